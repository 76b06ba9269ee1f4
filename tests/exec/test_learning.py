"""Models that nobody profiled: their plans are tried, and measured, while their jobs train. Agents only pretend."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from exec.controllers_agents import FakeAgent, Stage
from exec.controllers_backend import TaskBackend
from exec.controllers_jobs import cluster_of, file_of
from exec.test_api import FAST, until

from synergy_core.errors import InputError
from synergy_core.jobs.growing_profiles import with_seen, without
from synergy_core.jobs.testbed_profiles import NoiseFrom, Profile, ProfiledCosts, ProfiledModel, ProfiledRow
from synergy_core.jobs.training import Shape
from synergy_core.planner.plan import Plan
from synergy_core.policies import get_policy
from synergy_exec.controller import controller as controller_module
from synergy_exec.controller.controller import Controller
from synergy_exec.controller.execution import Execution
from synergy_exec.controller.journal import Journal
from synergy_exec.controller.resume import resume
from synergy_exec.job_file import JobFile
from synergy_exec.messages import Message, PlanMessage, Report, Retune
from synergy_exec.profiling.finder import CandidatePlans
from synergy_exec.profiling.grid import plans
from synergy_exec.settings import Settings
from synergy_runs.log import Kind
from synergy_runs.profiles import read_profile

HERE = "these cores"
EXCHANGE_S = 0.3
MODEL = {"max_batch": 64, "slots": 2}


def step_s(plan: PlanMessage) -> float:
    """Replicas exchange for longer than they compute; two stages are the fastest, tensor parallelism hopeless."""
    alone = 0.004 * plan.global_batch / plan.world
    return (
        alone + (EXCHANGE_S if plan.data > 1 else 0.0) + (0.02 if plan.pipeline > 1 else 0.0) + (plan.tensor > 1) * 0.5
    )


class Agent(FakeAgent):
    """Its steps take what `step_s` says. broken: kinds of plans that fail when they begin."""

    broken: frozenset[str] = frozenset()

    def hear(self, message: Message, now_s: float) -> list[Message]:
        if isinstance(message, Retune):
            run = self.runs[message.run]
            cut = {"micro_batch": message.micro_batch, "accumulation": message.accumulation}
            run.launch = dataclasses.replace(run.launch, plan=dataclasses.replace(run.launch.plan, **cut))
        return super().hear(message, now_s)

    def pass_time(self, now_s: float) -> list[Message]:
        for number, run in list(self.runs.items()):
            if run.launch.plan.degrees in self.broken:
                return [self.end(number, "failed", "rank 0: RuntimeError: it cannot be cut so")]
        plans = {number: run.launch.plan for number, run in self.runs.items()}
        return [
            _as_long(each, plans[each.run]) if isinstance(each, Report) else each for each in super().pass_time(now_s)
        ]


def _as_long(said: Report, plan: PlanMessage) -> Report:
    return dataclasses.replace(said, step_s=step_s(plan), sync_s=EXCHANGE_S if plan.data > 1 else 0.0)


def candidates(file: JobFile, sizes: list[int]) -> CandidatePlans:
    def refusal(plan: PlanMessage) -> str | None:
        return "no" if plan.zero or plan.interleave > 1 else None

    return CandidatePlans(1e3, {size: plans(size, [32, 64], refusal) for size in sizes})


def staged(folder: Path, *, policy: str = "synergy", fraction: float = 1.0, profile: Profile | None = None) -> Stage:
    settings = Settings(results_dir=folder, explore_fraction=fraction, restart_s=2.0)
    known = Profile({}, HERE) if profile is None else profile
    journal = Journal(folder / "journal.sqlite")
    execution = Execution(journal, get_policy(policy), cluster_of(2), settings, folder, known)
    return Stage(execution, [Agent(0, 2, {})])


def answered(stage: Stage) -> None:
    """As the controller does, once the process that builds models has told of all that are wanted."""
    learning = stage.execution.learning
    while learning.wanted:
        file = learning.wanted.pop()
        learning.found(file, candidates(file, learning.sizes(file)))


def degrees(stage: Stage, job: int) -> list[str]:
    """Of its runs, in their order."""
    return [PlanMessage(**each.plan).degrees for each in stage.execution.journal.runs() if each.job == job]


def test_submitted_job_tries_each_kind_of_plan_once_and_stays_with_the_fastest(tmp_path: Path) -> None:
    stage = staged(tmp_path)
    job = stage.execution.submit("first", file_of(work=4_000.0, **MODEL), 0.0)
    stage.advance(1.0)
    for _ in range(5):
        stage.advance(1.0)
    assert set(degrees(stage, 0)) <= {"1", "dp2"}  # nobody knows yet what else there is
    answered(stage)
    for _ in range(200):
        stage.advance(1.0)
    assert job.state == "running"
    assert stage.execution.decider.plans[0].degrees == "pp2"
    tried = degrees(stage, 0)
    assert {"dp2", "pp2"} <= set(tried)
    assert tried.count("tp2") <= 1
    assert tried.count("pp2") <= 2
    stage.finish()
    assert job.state == "done"
    model = read_profile(tmp_path / "profile.json").of("mlp", job.file.application)
    assert model is not None
    measured = {(row.plan.gpus, row.plan.pipeline): row for row in model.rows if not row.predicted}
    assert measured[2, 2].step_s == pytest.approx(step_s(PlanMessage.of(measured[2, 2].plan)))
    # Every step once: each run begins where the one before it had saved.
    outcomes = [each.outcome for each in stage.execution.journal.runs()]
    assert outcomes == ["paused"] * (len(outcomes) - 1) + ["done"]

    after = staged(tmp_path / "next", profile=read_profile(tmp_path / "profile.json"))
    after.execution.submit("second", file_of(work=500.0, **MODEL), 0.0)
    assert after.execution.learning.wanted == []
    after.advance(0.0)
    assert after.execution.decider.plans[0].degrees == "pp2"
    other = after.execution.submit("third", file_of(work=500.0, arguments={"width": 9}, **MODEL), 0.0)
    assert after.execution.learning.wanted == [other.file]
    # It is learned under another name; failed before: it was begun anew at every report, and no plan was known of it.
    answered(after)
    after.finish()
    models = read_profile(tmp_path / "next" / "profile.json")
    learned = models.of("mlp", other.file.application)
    assert learned is not None
    assert learned.name in set(models) - {"mlp"}
    alike = after.execution.submit("fourth", other.file, after.now_s)
    assert alike.spec is not None
    assert (alike.spec.architecture, after.execution.learning.wanted) == (learned.name, [])


@pytest.mark.parametrize("fraction", [0.0, 0.001])
def test_no_more_is_tried_than_the_settings_allow(tmp_path: Path, fraction: float) -> None:
    """Restarts, there and back, would be more than a thousandth of so short a job's time."""
    stage = staged(tmp_path, fraction=fraction)
    stage.execution.submit("one", file_of(work=800.0, **MODEL), 0.0)
    stage.advance(1.0)
    answered(stage)
    stage.finish()
    assert set(degrees(stage, 0)) <= {"1", "dp2"}
    assert stage.execution.jobs[0].trials == 0


def test_plan_that_fails_when_it_is_tried_is_not_the_jobs_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Agent, "broken", frozenset({"pp2"}))
    stage = staged(tmp_path)
    job = stage.execution.submit("one", file_of(work=3_000.0, **MODEL), 0.0)
    stage.advance(1.0)
    answered(stage)
    stage.finish()
    assert job.state == "done"
    assert degrees(stage, 0).count("pp2") == 1
    (note,) = stage.execution.notes
    assert "pp2" in note
    assert "does not train, and is not tried again: rank 0: RuntimeError: it cannot be cut so" in note
    model = read_profile(tmp_path / "profile.json")["mlp"]
    assert not [row for row in model.rows if row.plan.pipeline == 2]
    assert [fact.kind for fact in stage.execution.journal.facts()].count(int(Kind.FINISH)) == 1


def test_what_fails_under_a_plan_that_had_trained_is_the_jobs_own_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = staged(tmp_path)
    job = stage.execution.submit("one", file_of(work=4_000.0, **MODEL), 0.0)
    stage.advance(1.0)
    answered(stage)
    for _ in range(200):
        stage.advance(1.0)
    assert stage.execution.decider.plans[0].degrees == "pp2"
    monkeypatch.setattr(Agent, "broken", frozenset({"pp2"}))
    stage.advance(1.0)
    assert (job.state, job.reason) == ("failed", "rank 0: RuntimeError: it cannot be cut so")


def test_under_an_order_the_next_job_starts_with_what_the_last_one_showed(tmp_path: Path) -> None:
    """Its plan does not change while it runs; each job begins with what promises most."""
    stage = staged(tmp_path, policy="fifo")
    for job in range(4):
        stage.execution.submit(f"j{job}", file_of(work=300.0, **MODEL), 0.0)
    stage.advance(1.0)
    answered(stage)
    stage.finish()
    assert degrees(stage, 0) == ["dp2"]
    assert degrees(stage, 3) == ["pp2"]


def test_what_was_learnt_is_known_after_a_restart_of_the_controller(tmp_path: Path) -> None:
    stage = staged(tmp_path)
    stage.execution.submit("one", file_of(work=4_000.0, **MODEL), 0.0)
    stage.advance(1.0)
    answered(stage)
    for _ in range(200):
        stage.advance(1.0)
    after = staged(tmp_path, profile=read_profile(tmp_path / "profile.json"))
    resume(after.execution, 300.0)
    after.now_s = 300.0
    after.advance(0.0)
    assert after.execution.decider.plans[0].degrees == "pp2"


def test_controller_has_another_process_find_out_what_plans_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that cannot be built is no end of it: what is wrong its own run says."""
    asked: list[str] = []

    class Found:
        async def candidates(self, file: JobFile, sizes: list[int]) -> CandidatePlans:
            asked.append(file.name)
            if file.name == "broken":
                raise InputError("its model cannot be built")
            return candidates(file, sizes)

    @contextlib.asynccontextmanager
    async def finder() -> AsyncIterator[Found]:
        yield Found()

    monkeypatch.setattr(controller_module, "finder", finder)
    settings = dataclasses.replace(FAST, serve=True, results_dir=tmp_path)
    given = (get_policy("synergy"), [], TaskBackend(2), settings, tmp_path, Profile({}, HERE))

    async def through() -> None:
        controller = Controller(*given)
        running = asyncio.ensure_future(controller.run())
        await until(lambda: controller.execution is not None)
        for name in ("broken", "sound", "sound"):
            controller.execution.submit(name, file_of(name=name, work=1e6, **MODEL), controller.now_s())
        controller.changed()
        await until(lambda: "sound" in controller.execution.profile)
        assert "broken" not in controller.execution.profile
        controller._interrupt()
        await running

    asyncio.run(asyncio.wait_for(through(), 60))
    assert sorted(asked) == ["broken", "sound"]
    assert read_profile(tmp_path / "profile.json").machine == HERE


def test_a_growing_profile_predicts_from_all_that_was_seen_and_forgets_nothing() -> None:
    rows = [
        ProfiledRow("cpu", 1, Plan(micro_batch=each // 2, accumulation=2), 1.0, predicted=True) for each in (32, 64)
    ]
    rows += [ProfiledRow("gpu", 1, rows[0].plan, 1.0, predicted=True)]
    pair = ProfiledRow("cpu", 1, Plan(data=2, micro_batch=16), 1.0, predicted=True)
    costs, noise = ProfiledCosts(1.0, 1.0, 1.0), (NoiseFrom(0.0, 0.0),)
    model = ProfiledModel("m", 32, 64, 1.0, noise, costs, (*rows, pair))
    once = with_seen(model, ProfiledRow("cpu", 1, rows[0].plan, 0.32, memory_bytes=5.0))
    known = {(row.gpu_type, row.plan): row for row in once.rows}
    seen = known["cpu", rows[0].plan]
    assert (seen.step_s, seen.memory_bytes, seen.predicted) == (0.32, 5.0, False)
    assert known["cpu", rows[1].plan].step_s == pytest.approx(0.64)
    assert known["gpu", rows[0].plan].step_s == pytest.approx(0.32)  # as if it were alike
    assert known["cpu", pair.plan].step_s == pytest.approx(0.16)
    twice = with_seen(once, ProfiledRow("cpu", 1, pair.plan, 0.5))
    assert {row.step_s for row in twice.rows if not row.predicted} == {0.32, 0.5}
    assert len(without(twice, Shape("cpu", 1, 1), rows[1].plan, least_micro_batch=32).rows) == 3
    short = with_seen(once, ProfiledRow("cpu", 1, rows[1].plan, 0.6, memory_bytes=9e9), fits=False)
    assert rows[1].plan not in {row.plan for row in short.rows}
    assert without(twice, Shape("cpu", 1, 1), rows[1].plan, least_micro_batch=33) == twice
