"""What is kept of jobs that have ended, and that nothing goes without being named before."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from exec.controllers_agents import FakeAgent
from exec.controllers_backend import TaskBackend
from exec.controllers_jobs import file_of
from exec.test_api import ask, job, served, until
from exec.test_exec_cli import executed, trace_of
from lone_checkpoints import cut
from saved_jobs import BYTES, checkpoint_of

from synergy_core.errors import InputError
from synergy_exec import job_folder
from synergy_exec.client import Client
from synergy_exec.commands import prune
from synergy_exec.controller import controller
from synergy_exec.controller.journal import JobRow, Journal
from synergy_exec.folders import lock
from synergy_exec.messages import Launch, Message
from synergy_exec.retention import DAY_S, removals, remove

STATES = ("done", "failed", "cancelled", "waiting")


def run_of(work: Path, **settings: object) -> Path:
    """A work folder with a job in each state, that has two checkpoints, given-up ones, a log and data."""
    journal = Journal(work / "journal.sqlite")
    journal.set_meta("settings", settings)
    for number, state in enumerate(STATES):
        journal.submitted(JobRow(number, state, file_of().values(), 0.0, None, state, "", 0, 0, f"u{number}"))
        folder = work / "jobs" / str(number)
        job_folder.describe(folder, job_folder.Filed(number, f"u{number}", state, 0.0, None, file_of()))
        for step in (10, 20):
            checkpoint_of(folder, step, f"u{number}")
        checkpoint_of(folder / "given-up-1", 5)
        for name in ("log-0.txt", "steps.csv", "data/rows"):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text("x" * 100)
    journal.close()
    return work


def there(folder: Path) -> list[str]:
    return sorted(str(each.relative_to(folder)) for each in folder.rglob("*") if each.name != "progress.json")


def age(folder: Path, days: float) -> None:
    long_ago = time.time() - days * DAY_S
    for each in folder.rglob("*"):
        os.utime(each, (long_ago, long_ago))


def test_everything_is_kept_where_nothing_else_is_said(tmp_path: Path) -> None:
    age(run_of(tmp_path), 1_000.0)
    assert removals(tmp_path, range(4), "everything", 0.0) == []


def test_last_checkpoint_of_jobs_that_ended_is_kept_and_no_other(tmp_path: Path) -> None:
    run_of(tmp_path)
    what = removals(tmp_path, [0, 1], "last_checkpoint", 0.0)
    folders = [tmp_path / "jobs" / str(number) for number in (0, 1)]
    assert [each.path for each in what] == [
        path for folder in folders for path in (folder / "checkpoints" / "step-00000010", folder / "given-up-1")
    ]
    assert all(each.size_bytes > BYTES for each in what)
    before = there(tmp_path / "jobs" / "3")
    remove(what)
    for folder in folders:
        assert [each.name for each in (folder / "checkpoints").iterdir()] == ["step-00000020"]
        assert not (folder / "given-up-1").exists()
    assert there(tmp_path / "jobs" / "3") == before
    assert removals(tmp_path, [0, 1], "last_checkpoint", 0.0) == []


def test_a_damaged_last_checkpoint_is_not_the_one_that_stays(tmp_path: Path) -> None:
    run_of(tmp_path)
    checkpoints = tmp_path / "jobs" / "0" / "checkpoints"
    cut(checkpoints / "step-00000020" / "__0_0.distcp")
    remove(removals(tmp_path, [0], "last_checkpoint", 0.0))
    assert [each.name for each in checkpoints.iterdir()] == ["step-00000010"]
    cut(checkpoints / "step-00000010" / "__0_0.distcp")
    assert removals(tmp_path, [0], "last_checkpoint", 0.0) == []  # neither is whole: a person may mend one


def test_weights_and_logs_go_after_so_many_days_and_what_was_trained_stays_known(tmp_path: Path) -> None:
    run_of(tmp_path)
    assert removals(tmp_path, [0], "remove", 3.0) == []
    age(tmp_path / "jobs" / "0", 3.1)
    what = removals(tmp_path, [0, 1], "remove", 3.0)
    assert {each.path.parent.name for each in what} == {"0"}
    remove(what)
    assert there(tmp_path / "jobs" / "0") == ["job.json", "steps.csv"]


def test_prune_names_what_goes_and_removes_it_with_yes_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work = run_of(tmp_path / "demo" / "fifo-0.work", retention="last_checkpoint")
    kept = run_of(tmp_path / "demo" / "las-0.work")
    before = there(tmp_path)
    prune.main([str(tmp_path)])
    said = capsys.readouterr().out.splitlines()
    named = [line for line in said if line.startswith("to remove: ")]
    assert len(named) == 6
    assert f"to remove: {work}/jobs/0/checkpoints/step-00000010 (" in named[0]
    sizes = [int(line.rpartition("(")[2].split(" ")[0].replace(",", "")) for line in named]
    assert said[-2:] == [f"together {sum(sizes):,} bytes", "nothing is removed yet; type the same with --yes"]
    assert [each for each in there(tmp_path) if "owner-" not in each and each[-4:] != "lock"] == before
    prune.main([str(tmp_path), "--yes"])
    assert [line.replace("removing", "to remove") for line in capsys.readouterr().out.splitlines()[:6]] == named
    for number in range(3):
        assert [each.name for each in (work / "jobs" / str(number) / "checkpoints").iterdir()] == ["step-00000020"]
    assert (work / "jobs" / "3" / "checkpoints" / "step-00000010").exists()
    assert (kept / "jobs" / "0" / "checkpoints" / "step-00000010").exists()
    prune.main([str(kept), "--last-checkpoint", "--yes"])
    assert not (kept / "jobs" / "0" / "checkpoints" / "step-00000010").exists()


def test_prune_leaves_alone_a_run_that_somebody_works_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work = run_of(tmp_path / "fifo-0.work")
    with lock(work):
        prune.main([str(tmp_path), "--last-checkpoint", "--yes"])
    told = capsys.readouterr()
    assert f"{work} is left alone: {work}: a controller runs here already" in told.err
    assert "there is nothing to remove" in told.out
    assert (work / "jobs" / "0" / "checkpoints" / "step-00000010").exists()
    with pytest.raises(InputError, match="--days -1: expected days"):
        prune.main([str(tmp_path), "--days", "-1"])
    with pytest.raises(InputError, match="no run is in it"):
        prune.main([str(tmp_path / "nowhere")])


@pytest.fixture
def saving(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretended agents leave two checkpoints of each run that they are told to launch."""
    hear = FakeAgent.hear

    def hears(agent: FakeAgent, message: Message, now_s: float) -> list[Message]:
        if isinstance(message, Launch):
            for step in (1, 2):
                checkpoint_of(Path(message.folder), step, message.job_uuid)
        return hear(agent, message, now_s)

    monkeypatch.setattr(FakeAgent, "hear", hears)


@pytest.mark.usefixtures("saving")
def test_run_says_what_it_removes_when_it_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (first,) = executed(trace_of(tmp_path, 1, 3), tmp_path / "r", ["fifo"], TaskBackend(1), retention="last_checkpoint")
    checkpoints = first.parent.with_name("fifo-0.work") / "jobs" / "0" / "checkpoints"
    assert f"retention=last_checkpoint removes {checkpoints}/step-00000001 (" in capsys.readouterr().err
    assert [each.name for each in checkpoints.iterdir()] == ["step-00000002"]


@pytest.mark.usefixtures("saving")
def test_controller_removes_while_it_serves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller, "TIDY_S", 0.05)

    async def work(controller: controller.Controller, client: Client) -> None:
        await ask(client, "POST", "/jobs", job(name="mine"))
        assert controller.execution is not None
        await until(lambda: controller.execution.jobs[0].state == "running")
        assert len(list(tmp_path.glob("jobs/0/checkpoints/step-*"))) == 2
        await ask(client, "DELETE", "/jobs/mine")
        await until(lambda: len(list(tmp_path.glob("jobs/0/checkpoints/step-*"))) == 1)

    served(tmp_path, work, 1, retention="last_checkpoint")
    assert "retention=last_checkpoint removes" in capsys.readouterr().err
