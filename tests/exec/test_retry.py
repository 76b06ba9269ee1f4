"""Jobs that had ended wait again: under each kind of policy, over the API, and in the journal of no controller."""

from __future__ import annotations

from pathlib import Path

import pytest
from exec.controllers_jobs import file_of
from exec.test_api import ask, job, served, until
from exec.test_controller import facts_hold, staged, states
from saved_jobs import checkpoint_of

from synergy_core.errors import InputError
from synergy_exec.client import Client
from synergy_exec.controller.controller import Controller
from synergy_exec.controller.journal import Journal
from synergy_exec.controller.retry import retry, retry_in
from synergy_exec.run import _whole
from synergy_runs.log import Kind

POLICIES = ("fifo", "las", "tiresias", "synergy", "sia", "gavel")


@pytest.mark.parametrize("policy", POLICIES)
def test_failed_job_waits_again_and_ends_once(tmp_path: Path, policy: str) -> None:
    stage = staged(tmp_path, policy)
    execution = stage.execution
    for number in range(3):
        execution.submit(f"j{number}", file_of(work=20.0), 0.0)
    stage.agents[0].failing.add(1)
    stage.agents[1].failing.add(1)
    stage.finish()
    assert states(stage) == {0: "done", 1: "failed", 2: "done"}
    for agent in stage.agents.values():
        agent.failing.clear()
    retry(execution, execution.jobs[1], stage.now_s, from_start=False)
    assert states(stage)[1] == "waiting"
    assert [row.state for row in Journal(tmp_path / "journal.sqlite").jobs()] == ["done", "waiting", "done"]
    stage.finish()
    assert states(stage) == dict.fromkeys(range(3), "done")
    facts_hold(stage)
    facts = execution.journal.facts()
    assert sorted(fact.job for fact in facts if fact.kind == Kind.FINISH) == [0, 1, 2]
    assert _whole(execution.journal)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("runs", [True, False])
def test_cancelled_job_waits_again_whether_or_not_it_ran(tmp_path: Path, policy: str, runs: bool) -> None:
    """Cancelled while it waits, it is in the queue of an ordering policy still when it comes back."""
    stage = staged(tmp_path, policy, (1,))
    execution = stage.execution
    first, second = (execution.submit(name, file_of(work=20.0), 0.0) for name in ("first", "second"))
    stage.advance(0.0)
    (chosen,) = [each for each in (first, second) if each.running == runs]
    execution.cancel(chosen, stage.now_s)
    if runs:
        with pytest.raises(InputError, match="its last processes are leaving still; type the same again"):
            retry(execution, chosen, stage.now_s, from_start=False)
        stage.deliver()
    retry(execution, chosen, stage.now_s, from_start=chosen.seen.best_step > 0)
    stage.finish()
    assert states(stage) == {0: "done", 1: "done"}
    facts_hold(stage)
    finishes = [fact.job for fact in execution.journal.facts() if fact.kind == Kind.FINISH]
    assert sorted(finishes) == [0, 1]


def test_what_cannot_be_retried(tmp_path: Path) -> None:
    stage = staged(tmp_path, "fifo", (1,))
    execution = stage.execution
    done, going = (execution.submit(name, file_of(work=work), 0.0) for name, work in (("a", 5.0), ("b", 1e6)))
    while states(stage)[0] != "done":
        stage.advance(1.0)
    with pytest.raises(InputError, match="job a is done; to train it anew, submit it again"):
        retry(execution, done, stage.now_s, from_start=True)
    stage.advance(1.0)
    with pytest.raises(InputError, match="job b has not ended; nothing keeps it from going on"):
        retry(execution, going, stage.now_s, from_start=True)


def test_without_a_checkpoint_only_from_the_start(tmp_path: Path) -> None:
    stage = staged(tmp_path, "fifo", (1,))
    execution = stage.execution
    long = execution.submit("long", file_of(work=1e6), 0.0)
    for _ in range(3):
        stage.advance(1.0)
    execution.cancel(long, stage.now_s)
    stage.deliver()
    reached = long.seen.best_step
    assert reached > 0
    with pytest.raises(InputError, match=f"had come to step {reached}, and no checkpoint of it is in .*--from-start"):
        retry(execution, long, stage.now_s, from_start=False)
    checkpoint_of(execution.folder_of(long), 2, long.uuid)
    (execution.folder_of(long) / "steps.csv").write_text("step,batch,rate,loss,seconds,run\n")
    retry(execution, long, stage.now_s, from_start=True)
    aside = execution.folder_of(long) / "given-up-1"
    assert sorted(each.name for each in aside.iterdir()) == ["checkpoints", "steps.csv"]
    assert (long.seen.step, long.seen.best_step, long.seen.saved[0]) == (0, 0, 0)
    assert execution.journal.reports() == {}


def test_retry_over_the_api(tmp_path: Path) -> None:
    async def work(controller: Controller, client: Client) -> None:
        await ask(client, "POST", "/jobs", job(name="mine"))
        assert controller.execution is not None
        jobs = controller.execution.jobs
        await until(lambda: jobs[0].state == "running")
        with pytest.raises(InputError, match="job mine has not ended"):
            await ask(client, "POST", "/jobs/mine/retry", {})
        await ask(client, "DELETE", "/jobs/mine")
        await until(lambda: controller.execution.runs.of_job(0) is None)
        with pytest.raises(InputError, match=r'expected \{"from_start": true\}'):
            await ask(client, "POST", "/jobs/mine/retry", {"from": 0})
        assert (await ask(client, "POST", "/jobs/0/retry", {"from_start": True}))["state"] == "waiting"
        await until(lambda: jobs[0].state == "running")
        with pytest.raises(InputError, match="unknown job 'nobody'"):
            await ask(client, "POST", "/jobs/nobody/retry", {})

    served(tmp_path, work, 1)


def test_retry_without_a_controller_is_in_the_journal(tmp_path: Path) -> None:
    stage = staged(tmp_path, "fifo", (1,))
    execution = stage.execution
    long = execution.submit("long", file_of(work=1e6), 0.0)
    for _ in range(3):
        stage.advance(1.0)
    execution.cancel(long, stage.now_s)
    stage.deliver()
    execution.journal.set_meta("written", True)
    execution.journal.close()
    with pytest.raises(InputError, match=r"unknown job 'lang'\. Did you mean 'long'"):
        retry_in(tmp_path, "lang", from_start=True)
    with pytest.raises(InputError, match="no checkpoint of it is in"):
        retry_in(tmp_path, "0", from_start=False)
    assert retry_in(tmp_path, "long", from_start=True).state == "cancelled"
    journal = Journal(tmp_path / "journal.sqlite")
    assert [(row.state, row.best_step) for row in journal.jobs()] == [("waiting", 0)]
    assert journal.meta()["written"] is False
    assert [fact.kind for fact in journal.facts()] == [Kind.SUBMIT, Kind.START, Kind.STOP]
