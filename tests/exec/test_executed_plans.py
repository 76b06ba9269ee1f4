"""Profiled jobs under the controller: measured plans, and a change of plan while a job runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from exec.controllers_agents import FakeAgent, Stage
from exec.controllers_jobs import cluster_of, file_of

from synergy_core.jobs.testbed_profiles import NoiseFrom, Profile, ProfiledCosts, ProfiledModel, ProfiledRow
from synergy_core.planner.plan import Plan
from synergy_core.policies import get_policy
from synergy_exec.controller.execution import Execution
from synergy_exec.controller.journal import Journal
from synergy_exec.settings import Settings


def row(step_s: float, micro_batch: int, **degrees: int) -> ProfiledRow:
    return ProfiledRow("cpu", 1, Plan(micro_batch=micro_batch, **degrees), step_s)


ROWS = (row(0.2, 32), row(0.3, 64), row(0.15, 16, data=2), row(0.2, 32, data=2), row(0.1, 32, pipeline=2))
NOISE = (NoiseFrom(0.0, 20.0),)
MODEL = ProfiledModel("mlp", 32, 128, 1e6, NOISE, ProfiledCosts(1.0, 2.0, 0.5), ROWS)


def staged(folder: Path, policy: str) -> Stage:
    journal, profile = Journal(folder / "journal.sqlite"), Profile({"mlp": MODEL})
    execution = Execution(journal, get_policy(policy), cluster_of(2), Settings(), folder, profile)
    return Stage(execution, [FakeAgent(0, 2, {})])


@pytest.mark.parametrize("policy", ["fifo", "synergy"])
def test_profiled_job_gets_the_fastest_measured_plan(tmp_path: Path, policy: str) -> None:
    stage = staged(tmp_path, policy)
    stage.execution.submit("j", file_of(work=100.0, slots=2), 0.0)
    stage.advance(0.0)
    plan = stage.execution.decider.plans[0]
    assert (plan.pipeline, plan.data, plan.global_batch) == (2, 1, 32)
    stage.finish()
    assert stage.execution.jobs[0].state == "done"


def test_another_plan_on_the_same_slots_is_a_stop_and_a_start(tmp_path: Path) -> None:
    stage = staged(tmp_path, "synergy")
    job = stage.execution.submit("j", file_of(work=4_000.0, slots=2), 0.0)
    stage.advance(0.0)
    stage.advance(1.0)
    assert job.state == "running"
    placed, before = job.placement, job.run
    assert stage.execution.decider.plans[0].pipeline == 2
    faster = row(0.01, 32, data=2)
    known = ProfiledModel("mlp", 32, 128, 1e6, NOISE, MODEL.costs, (*ROWS, faster))
    stage.execution.profile.models["mlp"] = known  # type: ignore[index]
    stage.advance(1.0)
    assert job.placement == placed
    assert job.run == before + 1
    assert [*stage.agents[0].runs] == [before]  # it saves and leaves before it starts again
    stage.advance(1.0)
    assert [*stage.agents[0].runs] == [before + 1]
    assert stage.agents[0].runs[before + 1].launch.plan.data == 2
    stage.finish()
    assert [run.outcome for run in stage.execution.journal.runs()] == ["paused", "done"]
