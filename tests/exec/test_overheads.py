"""What a run's journal says of the cost of decisions, against a course of events that is known."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
import recorded_runs as stored
from exec.controllers_agents import FakeAgent, Stage
from exec.controllers_jobs import cluster_of, file_of

from synergy_core.errors import InputError
from synergy_core.jobs.testbed_profiles import Profile
from synergy_core.policies import get_policy
from synergy_exec.controller.execution import Execution
from synergy_exec.controller.journal import Journal
from synergy_exec.controller.journal_file import VERSION
from synergy_exec.messages import PlanMessage, Saved
from synergy_exec.overheads import overheads
from synergy_exec.settings import Settings

BENCH = Path(__file__).resolve().parents[2] / "bench" / "executor.py"
ONE = PlanMessage(micro_batch=16)
PARTS = {"launch_s": 0.1, "build_s": 0.05, "load_s": 0.025, "first_step_s": 0.2}


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A job of two runs: decided and launched at 0 and 1 s, first steps told of 0.5 s later, the first stopped."""
    folder = tmp_path / "las-0.work"
    journal = Journal(folder / "journal.sqlite")
    stored.add_runs(journal, 0, "j", [ONE, ONE])
    journal.timing(0, 0.5, "started", PARTS)
    journal.timing(0, 0.75, "stop", {})
    journal.timing(0, 0.875, "saved", {"save_s": 0.0625})
    journal.timing(1, 1.5, "started", PARTS)
    journal.decision(0.0, 0.002, (1, 0, 1, 0, 1), (float("nan"), float("nan")))
    journal.close()
    results = tmp_path / "las-0"
    results.mkdir()
    (results / "summary.json").write_text(json.dumps({"simulation_cpu_s": 0.01}))
    return folder


def test_times_are_told_apart(work: Path) -> None:
    found = overheads(work)
    first, restart = found.starts
    assert (first.fresh, restart.fresh) == (True, False)
    assert (first.total_s, first.waited_s, first.parts) == (0.5, 0.0, PARTS)
    assert first.told_s == pytest.approx(0.5 - 0.375)
    assert (found.freed_s, found.saved_s, found.decided_s) == ((0.25,), (0.0625,), (0.002,))
    assert (found.jobs, found.most_at_once, found.clock_s) == (1, 1, 2.0)
    assert found.cpu_fraction == pytest.approx(0.005)


def test_cpu_of_a_resumed_run_or_without_results_is_not_known(work: Path) -> None:
    journal = Journal(work / "journal.sqlite")
    journal.ended(0, "lost", "the controller was restarted")
    journal.close()
    assert overheads(work).cpu_fraction is None
    (work.with_suffix("") / "summary.json").unlink()
    assert overheads(work).cpu_s is None


def test_execution_keeps_what_is_told(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    execution = Execution(journal, get_policy("las"), cluster_of(1), Settings(), tmp_path, Profile())
    stage = Stage(execution, [FakeAgent(0, 1, {})])
    first = execution.submit("long", file_of(work=40.0), 0.0)
    stage.advance(0.0)
    stage.advance(1.0)
    execution.heard(0, Saved(run=first.run, step=4, samples=128, work=4.0, save_s=0.375), stage.now_s)
    execution.cancel(first, stage.now_s)
    execution.submit("other", file_of(work=8.0), stage.now_s)
    stage.finish()
    kinds = [(each.run, each.kind) for each in execution.journal.timings()]
    assert kinds[:3] == [(0, "plan"), (0, "started"), (0, "saved")]
    assert (1, "started") in kinds
    execution.journal.close()
    found = overheads(tmp_path)
    assert [each.fresh for each in found.starts] == [True, True]
    assert set(found.starts[0].parts.values()) == {0.1}
    assert found.saved_s == (0.375,)


def test_journal_of_the_version_before_is_read_and_goes_on(work: Path) -> None:
    path = work / "journal.sqlite"
    older = sqlite3.connect(path)
    older.executescript(
        "DROP TABLE timings; DROP TABLE sums; ALTER TABLE jobs DROP COLUMN uuid; PRAGMA user_version=1;"
    )
    older.close()
    (work / "journal.sqlite-commits").unlink()
    found = overheads(work)
    assert (found.starts, found.freed_s, found.saved_s) == ((), (), ())
    journal = Journal(path)
    journal.timing(1, 1.5, "started", PARTS)
    journal.close()
    assert len(overheads(work).starts) == 1
    assert sqlite3.connect(path).execute("PRAGMA user_version").fetchone() == (VERSION,)


def test_printed(work: Path, tmp_path: Path) -> None:
    typed = [sys.executable, str(BENCH), str(work), "--json", str(tmp_path / "found.json")]
    ended = subprocess.run(typed, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    lines = {" ".join(line.split()[:-4]): line.split()[-4:] for line in ended.stdout.splitlines()[1:-1]}
    assert lines["stop decided → slots free"] == ["1", "0.2500", "0.2500", "0.2500"]
    assert lines["restart: decision → first step"][0] == "1"
    assert "0.01 s CPU ÷ 2.0 s = 0.50% of a core" in ended.stdout
    assert "not judged: fewer jobs" in ended.stdout
    assert json.loads((tmp_path / "found.json").read_text())["cpu_fraction"] == pytest.approx(0.005)
    with pytest.raises(InputError, match="expected the work folder"):
        overheads(tmp_path)
