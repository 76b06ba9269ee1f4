"""One recorded sequence of states, the same decisions: the simulator's and the executor's."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import pytest
from exec.parity_recording import Moment, Noise, SteppedUnder, recorded
from exec.parity_replay import Difference, Driver, replayed
from exec.parity_workloads import Scene, catalogued, nodes, profiled
from hypothesis import given, settings
from hypothesis import strategies as st

from synergy_core.policies import AllocationPolicy, Policy, get_policy, policy_names

FEWEST_JOBS, FEWEST_DECISIONS = 12, 40
KNOWABLE = [name for name in policy_names() if not get_policy(name).oracle] + ["sia+plans"]
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
    return catalogued(1, 14, cluster=nodes(count, "t4"))


def compared(scene: Scene, policy: Policy) -> tuple[list[Moment], Driver]:
    moments = recorded(scene.simulation(policy))
    return moments, replayed(moments, scene, policy)


def moves(moments: Iterable[Moment]) -> int:
    """Stops, starts and changes of batch."""
    return sum(len(each.stops) + len(each.starts) + len(each.retuned) for each in moments)


def replans(moments: Iterable[Moment]) -> int:
    """Jobs that stop and start at one instant on the slots they hold: for another plan."""
    return sum(start in each.stops for each in moments for start in each.starts)


@pytest.mark.parametrize("count", [1, 2], ids=["one-node", "two-nodes"])
@pytest.mark.parametrize("kind", ["profiled", "catalogued"])
@pytest.mark.parametrize("name", KNOWABLE)
def test_executor_decides_as_the_simulator_did(name: str, kind: str, count: int) -> None:
    scene, policy = scene_of(kind, count), policy_named(name)
    moments, driver = compared(scene, policy)
    assert len(scene.work) >= FEWEST_JOBS
    assert len(moments) >= FEWEST_DECISIONS
    assert len(driver.jobs) == len(scene.work)
    assert driver.compared_batches > len(moments)
    if isinstance(policy, AllocationPolicy):
        assert all(each.state for each in moments if each.starts)
    if name in TUNERS:
        assert driver.retunes > 0
    if name in READERS:
        assert sum(len(each.stops) for each in moments) > 0


def test_jobs_change_their_plan_on_the_slots_they_hold() -> None:
    found = {name: replans(recorded(scene_of("profiled", 2).simulation(policy_named(name)))) for name in READERS}
    assert {name for name, each in found.items() if each} >= {"synergy", "crius", "pollux", "sia+plans"}
