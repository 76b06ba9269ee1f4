"""What each report and each line of a list costs a controller, as far as that can be counted."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path

import pytest
from exec.controllers_jobs import cluster_of, file_of

from synergy_core.jobs.testbed_profiles import Profile
from synergy_core.policies import get_policy
from synergy_exec import wire
from synergy_exec.controller.api import shown
from synergy_exec.controller.execution import Execution
from synergy_exec.controller.jobs import Seen
from synergy_exec.controller.journal import Journal
from synergy_exec.messages import Saved
from synergy_exec.settings import Settings


def test_types_of_a_message_are_found_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = Saved(run=1, step=2, samples=3, work=4.0, save_s=0.5)
    assert wire.decode(wire.encode(saved)) == saved
    monkeypatch.setattr(typing, "get_type_hints", lambda *_: pytest.fail("they are found out again"))
    assert wire.decode(wire.encode(saved)) == saved


def test_what_a_job_was_seen_to_do_is_kept_whole() -> None:
    seen = Seen(step=3, statistics=(1.0, 2.0), saved=(1, 2, 3.0), note="x", unused=True)
    assert seen.values() == dataclasses.asdict(seen)


def test_a_listed_job_has_its_folder(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    execution = Execution(journal, get_policy("fifo"), cluster_of(1), Settings(), tmp_path, Profile())
    job = execution.submit("a", file_of(), 0.0)
    assert shown(execution, job)["folder"] == str(execution.folder_of(job)) == str(tmp_path / "jobs" / "0")
