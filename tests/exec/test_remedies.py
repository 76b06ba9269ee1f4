"""Jobs that need not end: memory that runs out, parameters without a part in a step, losses again and again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from exec.controllers_agents import FakeAgent, Stage, report
from exec.controllers_jobs import cluster_of, file_of
from exec.test_controller import facts_hold, staged, states
from hypothesis import given
from hypothesis import strategies as st

from synergy_core.jobs.testbed_profiles import Profile
from synergy_core.policies import get_policy
from synergy_exec.controller.execution import Execution
from synergy_exec.controller.jobs import ExecutedJob, Seen
from synergy_exec.controller.journal import Journal
from synergy_exec.controller.remedies import FILLED, fitting, learn_memory, most_micro_batch
from synergy_exec.controller.resume import resume
from synergy_exec.messages import Ended, Failure, Noted, PlanMessage
from synergy_exec.settings import Settings


def failed(stage: Stage, job: ExecutedJob, **what: bool) -> None:
    """The job's run fails with its first step."""
    agent = stage.agents[job.placement[0][0]]
    agent.runs.pop(job.run)
    said = Failure(run=job.run, rank=0, reason="it failed", **what)
    for message in (said, Ended(run=job.run, outcome="failed", reason=said.reason)):
        stage.execution.heard(agent.node, message, stage.now_s)


def launched(stage: Stage, job: ExecutedJob) -> PlanMessage:
    stage.execution.decide(stage.now_s)
    stage.deliver()
    return stage.agents[job.placement[0][0]].runs[job.run].launch.plan


def test_memory_that_runs_out_halves_the_micro_batch_and_the_job_goes_on(tmp_path: Path) -> None:
    stage = staged(tmp_path, "fifo", (1,))
    job = stage.execution.submit("j", file_of(work=20.0, max_batch=32), 0.0)
    seen = []
    for _ in range(3):
        plan = launched(stage, job)
        seen.append((plan.micro_batch, plan.accumulation))
        failed(stage, job, out_of_memory=True)
        assert job.state == "waiting"
        stage.now_s += 1.0
    assert seen == [(32, 1), (16, 2), (8, 4)]
    assert stage.execution.notes[-1] == "job j: memory ran out at micro-batch 8: from now on at most 4"
    assert job.losses == 0
    # A controller that takes over knows it too.
    other = Journal(tmp_path / "journal.sqlite")
    after = Execution(other, get_policy("fifo"), cluster_of(1), Settings(retries=2), tmp_path, Profile())
    resume(after, stage.now_s)
    assert after.jobs[0].seen.spared_micro_batch == 4
    other.close()
    stage.finish()
    assert states(stage) == {0: "done"}
    facts_hold(stage)


def test_memory_that_runs_out_with_a_single_sample_ends_the_job(tmp_path: Path) -> None:
    stage = staged(tmp_path, "fifo", (1,))
    job = stage.execution.submit("j", file_of(work=20.0, initial_batch=2, max_batch=2), 0.0)
    for _ in range(2):
        launched(stage, job)
        failed(stage, job, out_of_memory=True)
        stage.now_s += 1.0
    assert (job.state, job.reason) == ("failed", "it failed")


def test_parameters_without_a_part_are_told_to_the_next_run_once(tmp_path: Path) -> None:
    stage = staged(tmp_path, "fifo", (1,))
    job = stage.execution.submit("j", file_of(work=20.0), 0.0)
    launched(stage, job)
    failed(stage, job, unused=True)
    assert job.state == "waiting"
    launched(stage, job)
    assert stage.agents[0].runs[job.run].launch.unused
    failed(stage, job, unused=True)
    assert job.state == "failed"


@given(st.integers(1, 600), st.integers(1, 8), st.integers(0, 700))
def test_a_batch_is_cut_into_what_fits_and_stays_the_same(micro_batch: int, accumulation: int, most: int) -> None:
    plan = PlanMessage(micro_batch=micro_batch, accumulation=accumulation)
    cut = fitting(plan, most)
    assert cut.micro_batch * cut.accumulation == micro_batch * accumulation
    assert cut.micro_batch <= (most or micro_batch)
    divisors = [each for each in range(1, min(most or micro_batch, micro_batch) + 1) if micro_batch % each == 0]
    assert cut.micro_batch == max(divisors)


@given(st.floats(0.0, 0.8), st.integers(1, 64), st.floats(0.001, 0.02))
def test_batches_grow_as_far_as_memory_reaches(standing: float, first: int, each: float) -> None:
    """Of memory 1 a step takes `standing` and `each` a sample; a tenth is left."""

    def used(micro_batch: int) -> float:
        return standing + each * micro_batch

    if used(first) > FILLED:
        return
    seen, launch = Seen(), Launched(PlanMessage(micro_batch=first))
    parts = (int(part * 1e12) for part in (used(first), standing, 1.0))
    names = ("memory_bytes", "standing_bytes", "memory_limit_bytes")
    said: Any = report(0, launch, 1.0)  # type: ignore[arg-type]
    learn_memory(seen, replace(said, **dict(zip(names, parts, strict=True))))
    most = most_micro_batch(seen)
    assert used(most) <= FILLED + 1e-9
    assert used(most + 1) > FILLED - 1e-6


class Launched(NamedTuple):
    """As much of a launch as a report takes."""

    plan: PlanMessage


def test_a_job_that_is_lost_again_and_again_ends_whatever_its_progress(tmp_path: Path) -> None:
    stage = staged(tmp_path, "fifo", (1,))
    job = stage.execution.submit("j", file_of(work=1e6), 0.0)
    most = stage.execution.settings.losses_per_hour
    for _ in range(most + 1):
        assert job.state == "waiting"
        stage.execution.decide(stage.now_s)
        stage.deliver()
        stage.advance(1.0, decide=False)
        stage.agents[0].checkpoints[0] = stage.agents[0].runs.pop(job.run).done
        stage.execution.heard(0, Ended(run=job.run, outcome="lost", reason="rank 0 was killed"), stage.now_s)
    assert job.reason == f"lost {most + 1} times within an hour; at last: rank 0 was killed"


def test_losses_that_are_far_apart_are_forgiven(tmp_path: Path) -> None:
    stage = staged(tmp_path, "fifo", (1,))
    job = stage.execution.submit("j", file_of(work=1e9), 0.0)
    for _ in range(3 * stage.execution.settings.losses_per_hour):
        stage.execution.decide(stage.now_s)
        stage.deliver()
        stage.advance(900.0, decide=False)
        stage.agents[0].checkpoints[0] = stage.agents[0].runs.pop(job.run).done
        stage.execution.heard(0, Ended(run=job.run, outcome="lost", reason="rank 0 was killed"), stage.now_s)
    assert job.state == "waiting"


def test_after_a_loss_steps_and_work_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    stage = staged(tmp_path, "fifo", (1,))
    job = stage.execution.submit("j", file_of(work=1e6), 0.0)
    stage.advance(0.0)
    stage.advance(5.0)
    assert job.seen.step > 0
    stage.agents[0].runs.clear()
    stage.execution.heard(0, Ended(run=job.run, outcome="lost", reason="rank 0 was killed"), stage.now_s)
    assert (job.seen.step, job.seen.samples, job.seen.work) == (0, 0, 0.0)


def lose(stage: Stage, node: int) -> None:
    """The agent of a node is lost, and another comes."""
    slots, saved = stage.agents[node].slots, stage.agents[node].checkpoints
    stage.execution.agent_left(node, stage.now_s)
    stage.agents[node] = FakeAgent(node, slots, saved)
    stage.execution.agent_came(node, stage.now_s)
    stage.deliver()


def test_the_job_that_takes_agents_with_it_is_found_and_the_others_train(tmp_path: Path) -> None:
    """Job 1 does, whenever it has trained for two seconds; three others train beside it, one on another node."""
    stage = staged(tmp_path, "fifo", (3, 1))
    for number in range(4):
        stage.execution.submit(f"j{number}", file_of(work=2000.0), 0.0)
    guilty, trained, losses = stage.execution.jobs[1], 0, 0
    stage.advance(0.0)
    for _ in range(1500):
        stage.advance(1.0)
        runs = stage.agents[0].runs.values()
        trained = trained + 1 if guilty.job_id in {run.launch.job for run in runs} else 0
        if trained >= 2:
            lose(stage, 0)
            trained, losses = 0, losses + 1
        if guilty.ended:
            break
    assert guilty.state == "failed"
    assert guilty.reason.startswith("the agent of its node was lost 5 times within an hour while it trained there")
    assert losses == 5
    stage.finish(4000)
    assert states(stage) == {0: "done", 1: "failed", 2: "done", 3: "done"}
    assert not stage.execution.runs.alone
    facts_hold(stage)


def test_a_suspect_that_ends_keeps_nobody_off(tmp_path: Path) -> None:
    stage = staged(tmp_path, "fifo", (2,))
    for number in range(2):
        stage.execution.submit(f"j{number}", file_of(work=500.0), 0.0)
    for _ in range(stage.execution.settings.agents_per_hour):
        stage.advance(1.0)
        stage.advance(1.0)
        lose(stage, 0)
    assert sorted(stage.execution.runs.alone) == [0, 1]
    stage.execution.cancel(stage.execution.jobs[0], stage.now_s)
    assert sorted(stage.execution.runs.alone) == [1]
    stage.finish()
    assert not stage.execution.runs.alone


def test_nobody_is_blamed_for_a_node_that_loses_its_agent_now_and_then(tmp_path: Path) -> None:
    stage = staged(tmp_path, "fifo", (2,))
    for number in range(2):
        stage.execution.submit(f"j{number}", file_of(work=5000.0), 0.0)
    stage.advance(0.0)
    for _ in range(6):
        for _ in range(200):
            stage.advance(1.0)
        lose(stage, 0)
    stage.finish(9000)
    assert states(stage) == {0: "done", 1: "done"}


@pytest.mark.parametrize("text", ["something odd"])
def test_what_a_job_notes_is_said_once(tmp_path: Path, text: str) -> None:
    stage = staged(tmp_path, "fifo", (1,))
    job = stage.execution.submit("j", file_of(work=1e6), 0.0)
    stage.advance(0.0)
    for _ in range(3):
        stage.execution.heard(0, Noted(run=job.run, text=text), stage.now_s)
    assert stage.execution.notes == [f"job j: {text}"]
    assert job.seen.note == text
