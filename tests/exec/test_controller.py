"""Decisions carried out over pretended agents: slots, order, losses, failures, cancellations, resumption."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from exec.controllers_agents import FakeAgent, Stage
from exec.controllers_jobs import cluster_of, file_of

from synergy_core.errors import InputError
from synergy_core.jobs.testbed_profiles import Profile
from synergy_core.policies import get_policy
from synergy_exec.backends import get_backend
from synergy_exec.controller.controller import Controller
from synergy_exec.controller.execution import Execution
from synergy_exec.controller.journal import Journal
from synergy_exec.controller.resume import resume
from synergy_exec.messages import LOST_PEERS, Ended
from synergy_exec.nodes.runs import _together
from synergy_exec.settings import Settings
from synergy_runs.log import Kind

POLICIES = ("fifo", "srtf", "las", "tiresias", "synergy", "sia", "gavel", "pollux")


def staged(
    folder: Path, policy: str = "las", slots: tuple[int, ...] = (2, 2), checkpoints: dict[int, float] | None = None
) -> Stage:
    journal, settings = Journal(folder / "journal.sqlite"), Settings(retries=2)
    execution = Execution(journal, get_policy(policy), cluster_of(*slots), settings, folder, Profile())
    saved = {} if checkpoints is None else checkpoints
    return Stage(execution, [FakeAgent(node, each, saved) for node, each in enumerate(slots)])


def facts_hold(stage: Stage) -> None:
    """No slot held twice, starts and stops in turn, at most one end a job."""
    held: dict[int, set[tuple[int, int]]] = {}
    last: dict[int, int] = {}
    time_s = 0.0
    for fact in stage.execution.journal.facts():
        assert fact.time_s >= time_s
        time_s = fact.time_s
        before = last.get(fact.job)
        if fact.kind == Kind.SUBMIT:
            assert before is None
        elif fact.kind == Kind.START:
            assert before in (Kind.SUBMIT, Kind.STOP)
            own = {(node, bit) for node, mask in fact.placement for bit in range(64) if mask >> bit & 1}
            assert len(own) == fact.gpus
            assert not any(own & others for others in held.values())
            held[fact.job] = own
        else:
            assert before == Kind.START
            assert len(held.pop(fact.job)) == fact.gpus
        last[fact.job] = fact.kind
    assert not held or not stage.execution.idle


def states(stage: Stage) -> dict[int, str]:
    return {number: job.state for number, job in stage.execution.jobs.items()}


@pytest.mark.parametrize("policy", [each for each in POLICIES if each != "srtf"])
def test_all_jobs_end_once(tmp_path: Path, policy: str) -> None:
    stage = staged(tmp_path, policy)
    for number in range(8):
        stage.execution.submit(f"j{number}", file_of(work=20.0 + 10 * number, slots=1 + number % 3), stage.now_s)
        stage.advance(2.0)
    stage.finish()
    assert set(states(stage).values()) == {"done"}
    facts_hold(stage)
    finishes = [fact.job for fact in stage.execution.journal.facts() if fact.kind == Kind.FINISH]
    assert sorted(finishes) == list(range(8))


def test_next_run_waits_until_the_last_process_has_left(tmp_path: Path) -> None:
    stage = staged(tmp_path, "las", (1,))
    stage.execution.submit("long", file_of(work=1e9), 0.0)
    stage.advance(0.0)
    stage.advance(4_000.0)  # past the quantum after which a newcomer goes first
    stage.execution.submit("short", file_of(work=10.0), stage.now_s)
    agent = stage.agents[0]
    stage.execution.decide(stage.now_s)
    stage.deliver()
    assert states(stage) == {0: "stopping", 1: "starting"}
    assert agent.launched == [0]  # told to save and leave, which takes it until the next second
    stage.advance(1.0, decide=False)
    assert agent.launched == [0, 1]
    facts_hold(stage)


@pytest.mark.parametrize("twice", [False, True])
def test_interrupted_when_all_jobs_have_ended_it_is_over_when_the_last_process_has_left(
    tmp_path: Path, twice: bool
) -> None:
    """Else that process counts as lost, and a run in which everything is done as broken off."""

    async def through() -> None:
        settings = Settings(serve=True)
        controller = Controller(get_policy("las"), [], get_backend("local", {}), settings, tmp_path, Profile())
        controller._over = asyncio.get_running_loop().create_future()
        stage = staged(tmp_path, "las", (1,))
        controller.execution = stage.execution
        number = stage.execution.submit("long", file_of(work=1e9), 0.0)
        stage.advance(0.0)
        stage.execution.cancel(number, stage.now_s)
        controller._interrupt()
        assert not controller._over.done()
        if twice:
            controller._interrupt()
            assert controller._over.done()
            return
        stage.advance(1.0)
        controller._flush()
        assert controller._over.done()
        assert stage.execution.idle

    asyncio.run(through())


def test_launch_that_waits_is_superseded(tmp_path: Path) -> None:
    stage = staged(tmp_path, "las", (1,))
    stage.execution.submit("long", file_of(work=1e9), 0.0)
    stage.advance(0.0)
    stage.advance(4_000.0)
    waits = stage.execution.submit("waits", file_of(work=10.0), stage.now_s)
    stage.execution.decide(stage.now_s)
    stage.deliver()
    stage.execution.cancel(waits, stage.now_s)
    stage.advance(1.0)
    stage.advance(1.0)
    assert states(stage) == {0: "running", 1: "cancelled"}
    assert stage.agents[0].launched == [0, 0]
    facts_hold(stage)


def test_lost_agent_loses_its_runs_alone_and_gets_no_job_until_it_is_back(tmp_path: Path) -> None:
    stage = staged(tmp_path, "fifo", (2, 1))
    stage.execution.submit("both", file_of(work=60.0, slots=3), 0.0)
    stage.advance(0.0)
    stage.advance(1.0)
    assert states(stage) == {0: "running"}
    gone = stage.agents.pop(1)
    stage.execution.agent_left(1, stage.now_s)
    stage.deliver()
    assert not stage.agents[0].runs  # its part was killed
    stage.advance(1.0)
    stage.advance(1.0)
    assert states(stage) == {0: "starting"}
    assert stage.agents[0].launched == [0]
    gone.runs.clear()
    stage.agents[1] = gone
    stage.execution.agent_came(1, stage.now_s)
    stage.deliver()
    assert stage.agents[0].launched == [0, 0]
    stage.finish()
    assert states(stage) == {0: "done"}
    facts_hold(stage)


def test_failure_by_itself_is_not_tried_again_and_the_others_run_on(tmp_path: Path) -> None:
    stage = staged(tmp_path, "fifo", (1, 1))
    for agent in stage.agents.values():
        agent.failing.add(0)
    for number in range(3):
        stage.execution.submit(f"j{number}", file_of(work=20.0), 0.0)
    stage.advance(0.0)
    stage.finish()
    assert states(stage) == {0: "failed", 1: "done", 2: "done"}
    assert "ValueError" in stage.execution.jobs[0].reason
    assert sum(agent.launched.count(0) for agent in stage.agents.values()) == 1
    facts_hold(stage)


def test_lost_without_progress_ends_after_the_retries(tmp_path: Path) -> None:
    stage = staged(tmp_path, "fifo", (1,))
    job = stage.execution.submit("j", file_of(work=100.0), 0.0)
    for losses in range(3):
        stage.execution.decide(stage.now_s)
        stage.deliver()
        assert job.state == "starting", losses
        stage.agents[0].runs.clear()
        stage.execution.heard(0, Ended(run=job.run, outcome="lost", reason="rank 0 was killed"), stage.now_s)
        stage.now_s += 1.0
    assert job.state == "failed"
    assert "3 times" in job.reason
    assert "rank 0 was killed" in job.reason
    assert stage.execution.idle
    facts_hold(stage)


def test_progress_forgives_losses(tmp_path: Path) -> None:
    stage = staged(tmp_path, "fifo", (1,))
    job = stage.execution.submit("j", file_of(work=200.0), 0.0)
    for _ in range(6):
        stage.execution.decide(stage.now_s)
        stage.deliver()
        stage.advance(1.0, decide=False)
        stage.agents[0].checkpoints[0] = stage.agents[0].runs[job.run].done
        stage.agents[0].runs.clear()
        stage.execution.heard(0, Ended(run=job.run, outcome="lost", reason="rank 0 was killed"), stage.now_s)
        assert job.state == "waiting"
    stage.finish()
    assert job.state == "done"
    facts_hold(stage)


def test_the_peers_of_a_killed_worker_do_not_hide_why(tmp_path: Path) -> None:
    stage = staged(tmp_path, "fifo", (1, 1))
    job = stage.execution.submit("j", file_of(work=100.0, slots=2), 0.0)
    stage.advance(0.0)
    number = job.run
    for agent in stage.agents.values():
        agent.runs.clear()
    echo, why = f"rank 1 {LOST_PEERS}", "rank 0 was killed by signal 9"
    stage.execution.heard(1, Ended(run=number, outcome="lost", reason=echo), stage.now_s)
    stage.execution.heard(0, Ended(run=number, outcome="lost", reason=why), stage.now_s)
    assert _together([("lost", echo), ("lost", why)]) == ("lost", why)
    assert _together([("lost", echo), ("failed", "no such file")])[0] == "failed"
    assert job.state == "waiting"
    stage.finish()
    assert job.state == "done"


@pytest.mark.parametrize("policy", ["fifo", "las", "synergy"])
def test_cancelled_wherever_it_is(tmp_path: Path, policy: str) -> None:
    stage = staged(tmp_path, policy, (1,))
    running = stage.execution.submit("running", file_of(work=1e6), 0.0)
    waiting = stage.execution.submit("waiting", file_of(work=1e6), 0.0)
    stage.advance(0.0)
    stage.advance(1.0)
    if waiting.state != "waiting":
        running, waiting = waiting, running
    last = stage.execution.submit("last", file_of(work=20.0), stage.now_s)
    stage.execution.cancel(waiting, stage.now_s)
    stage.execution.cancel(running, stage.now_s)
    stage.deliver()
    with pytest.raises(InputError, match="has ended: cancelled"):
        stage.execution.cancel(running, stage.now_s)
    stage.finish()
    assert (running.state, waiting.state, last.state) == ("cancelled", "cancelled", "done")
    assert stage.agents[0].launched.count(waiting.job_id) == 0
    facts_hold(stage)


def test_job_that_never_fits_is_refused_at_once(tmp_path: Path) -> None:
    stage = staged(tmp_path, "fifo", (2,))
    with pytest.raises(InputError, match="slots=3; the cluster has 2"):
        stage.execution.submit("wide", file_of(slots=3), 0.0)
    assert not stage.execution.journal.jobs()


def test_retuned_where_the_beliefs_say_so(tmp_path: Path) -> None:
    stage = staged(tmp_path, "synergy", (2,))
    job = stage.execution.submit("j", file_of(work=400.0, max_batch=256), 0.0)
    stage.advance(0.0)
    first = stage.execution.decider.plans[0].global_batch
    stage.finish()
    plans = [run.plan for run in stage.execution.journal.runs()]
    assert first == 32
    assert job.state == "done"
    assert any(plan["micro_batch"] * plan["accumulation"] * plan["data"] > 32 for plan in plans)


def resumed(stage: Stage, folder: Path, policy: str, slots: tuple[int, ...]) -> Stage:
    """A new controller on the same journal after the old one vanished; agents have saved and left."""
    for agent in stage.agents.values():
        for number in list(agent.runs):
            agent.end(number, "paused")
    stage.execution.journal._connection.close()  # not committed: as after SIGKILL
    again = staged(folder, policy, slots, stage.agents[0].checkpoints)
    again.now_s = max(again.execution.journal.last_s(), stage.now_s)
    resume(again.execution, again.now_s)
    return again


@pytest.mark.parametrize("policy", ["fifo", "las", "synergy"])
@pytest.mark.parametrize("point", ["submitted", "decided", "reserved", "running", "stopping", "done"])
def test_controller_that_vanishes_loses_nothing_acknowledged(tmp_path: Path, point: str, policy: str) -> None:
    stage = staged(tmp_path, policy, (1, 1))
    jobs = [stage.execution.submit(f"j{number}", file_of(work=40.0), 0.0) for number in range(3)]
    if point in ("decided", "reserved"):
        stage.execution.decide(0.0)
        if point == "reserved":
            node, message = stage.execution.outbox.pop(0)
            for answer in stage.agents[node].hear(message, 0.0):
                stage.execution.heard(node, answer, 0.0)  # in the journal: launched; the message never leaves
    elif point != "submitted":
        stage.advance(0.0)
        stage.advance(1.0)
    if point == "stopping":
        stage.execution.cancel(next(job for job in jobs if job.state == "running"), stage.now_s)
    if point == "done":  # the worker is done and has saved; its message never arrives
        for agent in stage.agents.values():
            for number in list(agent.runs):
                agent.runs[number].done = agent.runs[number].launch.work
                agent.end(number, "done")
    again = resumed(stage, tmp_path, policy, (1, 1))
    assert len(again.execution.jobs) == 3
    again.finish()
    wanted = ["done", "done", "done"] if point != "stopping" else ["cancelled", "done", "done"]
    assert sorted(states(again).values()) == wanted
    facts_hold(again)
    finishes = [fact.job for fact in again.execution.journal.facts() if fact.kind == Kind.FINISH]
    assert sorted(finishes) == [0, 1, 2]


def test_resumed_controller_believes_what_was_observed(tmp_path: Path) -> None:
    stage = staged(tmp_path, "synergy", (2,))
    stage.execution.submit("j", file_of(work=1e5), 0.0)
    stage.advance(0.0)
    for _ in range(5):
        stage.advance(1.0)
    before = stage.execution.jobs[0]
    assert before.task is not None
    again = resumed(stage, tmp_path, "synergy", (2,))
    after = again.execution.jobs[0]
    assert after.task is not None
    assert 0 < after.task.done_work <= before.task.done_work  # to the last decision
    assert after.task.believed_statistics == (1.0, 4.0)
    again.advance(0.0)
    assert after.task.pool.models.keys() == {"cpu"}
    assert after.attained_service_gpu_s > 0
    assert after.restarts == 1


def test_reports_in_a_journal_that_counts_saved_steps_are_read(tmp_path: Path) -> None:
    """As journals did once."""
    stage = staged(tmp_path, "fifo", (2,))
    stage.execution.submit("j", file_of(work=1e5), 0.0)
    stage.advance(0.0)
    for _ in range(3):
        stage.advance(1.0)
    journal = stage.execution.journal
    (said,) = journal.reports().values()
    assert said["step"] > 0
    journal.reported(0, {**said, "saved_step": 3})
    journal.commit()
    assert resumed(stage, tmp_path, "fifo", (2,)).execution.jobs[0].seen.step == said["step"]
