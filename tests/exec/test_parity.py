"""One recorded sequence of states, the same decisions: the simulator's and the executor's."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exec.compressing_agents import ComputingAgent
from exec.controllers_jobs import file_of
from exec.parity_executed import Executed, Told, decided_by_the_core, listening, staged
from exec.parity_recording import Moment, Noise, Recording, Stepped, SteppedUnder, recorded
from exec.parity_replay import Driver, ParityError, replayed
from exec.parity_workloads import PROFILE, Scene, catalogued, nodes, profiled
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from synergy_core.jobs.testbed_profiles import Profile
from synergy_core.policies import AllocationPolicy, Policy, get_policy, policy_names
from synergy_exec.messages import PlanMessage
from synergy_exec.settings import Settings
from synergy_runs.settings import build

FEWEST_JOBS, FEWEST_DECISIONS = 12, 40
KNOWABLE = [*(name for name in policy_names() if not get_policy(name).oracle), "sia+plans"]
"""Without those that read what only the simulator's truth knows: an executor cannot run optimus, sjf or srtf."""
READERS = [name for name in KNOWABLE if getattr(get_policy(name), "reads_goodput", False)]
TUNERS = [name for name in READERS if getattr(get_policy(name), "tunes_batch", False)]


def policy_named(name: str) -> Policy:
    """The policy; a shorter search where it searches."""
    policy = get_policy(name)
    return policy.with_parameters(generations=5, population=16) if name == "pollux" else policy


def scene_of(kind: str, count: int) -> Scene:
    if kind == "profiled":
        return profiled(1, 14, cluster=nodes(count))
    return catalogued(1, 14, cluster=nodes(count, "t4"), mean_s=400.0)


def compared(scene: Scene, policy: Policy) -> tuple[list[Moment], Driver]:
    recording = recorded(scene.simulation(policy))
    return recording.moments, replayed(recording, scene, policy)


def replans(moments: Iterable[Moment]) -> int:
    """Jobs that stop and start at one instant on the slots they hold: for another plan."""
    return sum(start in each.stops for each in moments for start in each.starts)


@pytest.mark.parametrize("count", [1, 2], ids=["one-node", "two-nodes"])
@pytest.mark.parametrize("kind", ["profiled", "catalogued"])
@pytest.mark.parametrize("name", KNOWABLE)
def test_executor_decides_as_the_simulator_did(name: str, kind: str, count: int) -> None:
    scene, policy = scene_of(kind, count), policy_named(name)
    moments, driver = compared(scene, policy)
    assert len(driver.jobs) == len(scene.work) >= FEWEST_JOBS
    assert len(moments) >= FEWEST_DECISIONS
    assert driver.compared_batches > len(moments)
    if isinstance(policy, AllocationPolicy):
        assert all(each.state for each in moments if each.starts)
    if name in TUNERS:
        assert driver.retunes > 0
    if name in READERS:
        assert sum(len(each.stops) for each in moments) > 0


def test_jobs_change_their_plan_on_the_slots_they_hold() -> None:
    found = {}
    for name in READERS:
        found[name] = replans(recorded(scene_of("profiled", 2).simulation(policy_named(name))).moments)
    assert {name for name, each in found.items() if each} >= {"synergy", "crius", "pollux", "sia+plans"}


def changed(recording: Recording, kind: type, **values: object) -> Recording:
    """The recording with one report of that kind, the first, saying something else."""
    moments = list(recording.moments)
    at, index = next(
        (at, index)
        for at, moment in enumerate(moments)
        for index, event in enumerate(moment.events)
        if isinstance(event, kind)
    )
    events = list(moments[at].events)
    events[index] = dataclasses.replace(events[index], **values)  # type: ignore[type-var]
    moments[at] = dataclasses.replace(moments[at], events=events)
    return Recording(moments, recording.fits)


@pytest.mark.parametrize(
    ("name", "kind", "report", "values"),
    [
        ("synergy", "profiled", Noise, {"statistics": (1.0, 1e-3)}),
        ("synergy", "profiled", SteppedUnder, {"step_s": 3.0}),
        ("sia", "profiled", Noise, {"statistics": (1.0, 1e-3)}),
        ("sia", "catalogued", Stepped, {"step_s": 3.0}),
        ("synergy", "catalogued", Stepped, {"step_s": 3.0}),
    ],
)
@pytest.mark.parametrize("states", [True, False], ids=["seen", "decided"])
def test_one_report_that_says_something_else_is_noticed(
    name: str, kind: str, report: type, values: dict[str, object], states: bool
) -> None:
    scene, policy = scene_of(kind, 2), policy_named(name)
    other = changed(recorded(scene.simulation(policy)), report, **values)
    with pytest.raises(ParityError, match="^column" if states else "^(stops|starts|plans|plan|batch)"):
        replayed(other, scene, policy, states=states)


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 10**6), jobs=st.integers(1, 8), count=st.integers(1, 2), kind=st.booleans())
@pytest.mark.parametrize("name", ["synergy", "sia+plans", "tiresias"])
def test_any_small_workload_is_decided_alike(name: str, seed: int, jobs: int, count: int, kind: bool) -> None:
    if kind:
        scene = profiled(seed, jobs, cluster=nodes(count), iterations=200.0)
    else:
        scene = catalogued(seed, jobs, cluster=nodes(count, "t4"), mean_s=600.0)
    moments, driver = compared(scene, policy_named(name))
    assert len(driver.jobs) == jobs
    assert moments


def executed(folder: Path, name: str, profile: Profile, **more: Any) -> Executed:
    """Jobs of three models over two nodes, one of which is lost for a while."""
    run = staged(folder, policy_named(name), nodes(2), profile, **more)
    random = np.random.default_rng(2)
    models = list(PROFILE)
    with listening(run.decider):
        for number in range(FEWEST_JOBS):
            more = {"name": models[number % 3], "initial_batch": 8, "max_batch": 64}
            work, slots = float(random.integers(40, 400)), int(random.choice([1, 2, 4]))
            run.stage.execution.submit(f"j{number}", file_of(work, slots, **more), run.stage.now_s)
            run.stage.advance(2.0)
            if number == FEWEST_JOBS // 2:
                gone = run.stage.agents.pop(1)
                run.stage.execution.agent_left(1, run.stage.now_s)
                run.stage.advance(2.0)
                gone.runs.clear()
                run.stage.agents[1] = gone
                run.stage.execution.agent_came(1, run.stage.now_s)
        run.stage.finish()
    return run


@pytest.mark.parametrize("profile", [PROFILE, Profile()], ids=["profiled", "unknown"])
@pytest.mark.parametrize("name", KNOWABLE)
def test_what_an_executor_decided_the_simulators_scheduler_decides(tmp_path: Path, name: str, profile: Profile) -> None:
    run = executed(tmp_path, name, profile)
    starts = decided_by_the_core(run, policy_named(name))
    rows = run.stage.execution.journal.runs()
    assert [(row.decided_s, row.job, row.placement) for row in rows] == starts
    moments = run.decider.moments
    plans = {(moment.now_s, number): plan for moment in moments for number, plan in moment.plans.items()}
    for row in rows:
        if plan := plans.get((row.decided_s, row.job)):
            first = PlanMessage.of(plan)
            assert (row.plan["data"], row.plan["pipeline"]) == (first.data, first.pipeline)
    assert len(moments) >= FEWEST_DECISIONS
    assert len(starts) > FEWEST_JOBS  # some started again
    if name in READERS:
        assert any(isinstance(event, Told) for moment in moments for event in moment.events)


@pytest.mark.parametrize(
    ("name", "mode"), [("synergy", "coadaptive"), ("sia", "naive"), ("pollux", "lgreco"), ("las", "uniform")]
)
def test_what_jobs_show_of_compression_has_the_core_decide_alike(tmp_path: Path, name: str, mode: str) -> None:
    """From layers that become known, and exchanges that take other than they should."""
    chosen = build(Settings, {"compression": mode, "compressor": "q4"})
    run = executed(tmp_path, name, Profile(), settings=chosen, agent=ComputingAgent)
    starts = decided_by_the_core(run, policy_named(name))
    assert [(row.decided_s, row.job, row.placement) for row in run.stage.execution.journal.runs()] == starts
    compressors = {plan.parts["compressor"] for plan in run.stage.execution.journal.timings() if plan.kind == "plan"}
    assert compressors > {"none"}
    told = {event.method for moment in run.decider.moments for event in moment.events if isinstance(event, Told)}
    assert name == "las" or told >= {"may_exchange", "observe_exchange", "observe"}


def test_another_order_of_events_is_another_decision(tmp_path: Path) -> None:
    run = executed(tmp_path, "synergy", PROFILE)
    told = next(moment for moment in run.decider.moments if any(isinstance(each, Told) for each in moment.events))
    told.events = [each for each in told.events if not isinstance(each, Told)]
    with pytest.raises(ParityError):
        decided_by_the_core(run, policy_named("synergy"))
