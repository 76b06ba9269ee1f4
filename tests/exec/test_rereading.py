"""Users and settings read again while a controller runs: by SIGHUP and by a command, all of it or nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from pathlib import Path

import pytest
from exec.test_api import ask, job, served, until
from exec.test_retention import run_of
from exec.test_users import ENTRIES, TOKENS, written

from synergy_core.errors import InputError
from synergy_exec.client import Client
from synergy_exec.commands import _asking, prune
from synergy_exec.controller.controller import Controller
from synergy_exec.controller.journal import Journal
from synergy_exec.rereading import CHANGED, CHANGING, FIXED, given
from synergy_exec.settings import Settings


def test_of_every_key_it_is_said_whether_it_may_change() -> None:
    keys = {each.name for each in dataclasses.fields(Settings)}
    assert set(FIXED) < keys
    assert set(FIXED) | set(CHANGING) == keys
    assert all(reason and "\n" not in reason and not reason.endswith(".") for reason in FIXED.values())

    page = " ".join((Path(__file__).resolve().parents[2] / "docs" / "executor.md").read_text(encoding="utf-8").split())
    assert f"These can change: {', '.join(f'`{name}`' for name in CHANGING)}." in page


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("round_s: -1", "round_s=-1: expected seconds above 0"),
        ("round_s: soon", "round_s=soon: expected a number"),
        ("rond_s: 1", "Did you mean 'round_s'"),
        ("port: 80", "port cannot change while a controller runs: agents and people are connected there"),
        ("cluster: {virtual_clusters: null}", "cluster cannot change .*: the policy's queues"),
        ("round_s 5", "expected keys with their values"),
        ("[: }", "not YAML"),
        ("x" * 200_000, "200,000 bytes"),
    ],
)
def test_what_a_file_may_not_say(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "changes.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=says) as caught:
        given(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_gone_is_said_and_one_that_is_empty_changes_nothing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        given(tmp_path / "none.yaml")
    (tmp_path / "changes.yaml").write_text("# nothing yet\n")
    assert given(tmp_path / "changes.yaml") == {}
    assert given(None) == {}


def test_settings_change_at_a_signal_and_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = tmp_path / "changes.yaml"
    changes.write_text("round_s: 600\n")

    async def work(controller: Controller, client: Client) -> None:
        execution = controller.execution
        assert execution is not None
        assert controller.settings.round_s == execution.settings.round_s == 600.0
        await ask(client, "POST", "/jobs", job(name="a"))
        changes.write_text("round_s: 0.1\nhang_s: 33\nretention: remove\nretention_days: 2\nagents_per_hour: 7\n")
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: execution.jobs[0].state == "running")  # rounds go at the new pace at once
        assert (execution.settings.hang_s, controller.settings.retention_days) == (33.0, 2.0)
        assert (controller.agents.at_once, execution.blame.most) == (7, 7)
        said = capsys.readouterr().err
        assert {"round_s: 600.0 → 0.1", "hang_s: 60.0 → 33.0", "retention: everything → remove"} <= set(
            said.splitlines()
        )
        assert execution._launch_of(execution.runs.runs[0]).hang_s == 33.0
        assert controller._journal.meta()[CHANGED]["retention"] == "remove"

        for wrong, says in (("hang_s: 5\nround_s: never", "round_s=never"), ("hang_s: 5\nseed: 3", "seed cannot")):
            changes.write_text(wrong)
            os.kill(os.getpid(), signal.SIGHUP)
            with pytest.raises(InputError, match=says):
                await ask(client, "POST", "/reload")
            told = capsys.readouterr().err
            assert says in told
            assert "Nothing has changed." in told
            assert controller.settings.hang_s == 33.0

        changes.write_text("hang_s: 33\n")
        await asyncio.to_thread(_asking.main, "reload", ["--dir", str(tmp_path)])
        assert "round_s: 0.1 → 0.2" in capsys.readouterr().out  # what was typed counts again
        assert await ask(client, "POST", "/reload") == ["nothing has changed"]
        assert controller._journal.meta()[CHANGED] == {"hang_s": 33.0}
        await ask(client, "DELETE", "/jobs/a")

    served(tmp_path / "s" / "fifo-0.work", work, 1, policy="fifo", changes=changes, round_s=0.2)


def test_users_come_and_go_without_a_restart(tmp_path: Path) -> None:
    users = written(tmp_path)

    async def work(controller: Controller, owner: Client) -> None:
        ann, new = Client(owner.url, TOKENS["ann"]), Client(owner.url, "a-new-0123456789abcdefghij")
        await ask(ann, "POST", "/jobs", job(name="hers"))
        with pytest.raises(InputError, match="missing or wrong"):
            await ask(new, "GET", "/jobs")
        with pytest.raises(InputError, match="ann is a user; this is for admins"):
            await ask(ann, "POST", "/reload")
        written(tmp_path, [*ENTRIES[2:], {"name": "new", "role": "reader", "token": new.token}])
        assert await ask(Client(owner.url, TOKENS["root"]), "POST", "/reload") == ["users: 3"]
        assert len(await ask(new, "GET", "/jobs")) == 1
        with pytest.raises(InputError, match="missing or wrong"):
            await ask(ann, "GET", "/jobs")
        for text, mode in (("[7]", 0o600), ("- token: " + TOKENS["bob"], 0o600), (None, 0o644)):
            written(tmp_path, text, mode)
            with pytest.raises(InputError, match=r"entry 1|chmod 600"):
                await ask(owner, "POST", "/reload")
            assert len(await ask(new, "GET", "/jobs")) == 1  # as before
        await ask(owner, "DELETE", "/jobs/hers")

    served(tmp_path / "run", work, 1, policy="fifo", users=users)


def test_retention_that_changed_is_what_prune_goes_by(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work = run_of(tmp_path / "demo" / "fifo-0.work", retention="last_checkpoint")
    for changed, says in (({"retention": "everything"}, "there is nothing to remove"), ({}, "to remove: ")):
        journal = Journal(work / "journal.sqlite")
        journal.set_meta(CHANGED, changed)
        journal.close()
        prune.main([str(tmp_path)])
        assert says in capsys.readouterr().out
