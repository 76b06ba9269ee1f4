"""Which plans are measured: fewer than there are, without losing the fastest."""

from __future__ import annotations

from itertools import pairwise
from math import inf

import pytest

from synergy_core.planner.constants import constants_for
from synergy_core.planner.families import architecture_named
from synergy_core.planner.machine import machine_named
from synergy_core.planner.plan import Plan, plans_of
from synergy_core.planner.seen_plans import PlanTimes, SeenPlan
from synergy_core.planner.software import software_named
from synergy_core.planner.step_time import step_time
from synergy_exec.messages import PlanMessage
from synergy_exec.profiling.grid import plans, sizes_of
from synergy_exec.profiling.profile import QUICK
from synergy_exec.profiling.selection import MEMORY, Selection

BATCHES = [16, 32, 64, 128]
SLOTS = 8


def refusal(plan: PlanMessage) -> str | None:
    """As `admitted.plan_refusal` says of DDP and of interleaving, for a model of 24 blocks."""
    if plan.data > 1 and plan.tensor > 1 and not plan.zero:
        return "DDP fails on layers that are split"
    if plan.interleave > 1 and plan.accumulation % plan.pipeline:
        return "no multiple"
    return None if 24 % (plan.pipeline * plan.interleave) == 0 else "its blocks do not divide"


def candidates(slots: int = SLOTS) -> dict[int, list[list[PlanMessage]]]:
    return {size: plans(size, BATCHES, refusal) for size in sizes_of(slots)}


def all_of(there: dict[int, list[list[PlanMessage]]]) -> list[PlanMessage]:
    return [plan for lists in there.values() for same in lists for plan in same]


def planned(model: str, gpu: str) -> dict[PlanMessage, float]:
    """Seconds of a step under every candidate, as the planner has them for GPUs that were measured."""
    there = all_of(candidates())
    family, architecture = architecture_named(model)
    machine, software = machine_named(gpu), software_named("megatron")
    columns = plans_of([plan.core for plan in there])
    work = family.work(architecture, columns, software)
    times = step_time(work, columns, machine, software, constants_for(machine, software))
    return dict(zip(there, times.total_s.tolist(), strict=True))


@pytest.mark.parametrize(("model", "gpu"), [("gpt-350m", "a100-80gb"), ("gpt-1.3b", "v100"), ("resnet-50", "v100")])
def test_on_eight_slots_a_third_is_measured_and_the_fastest_is_among_it(model: str, gpu: str) -> None:
    truth = planned(model, gpu)
    selection = Selection(candidates(), lambda size: 1, hopeless=QUICK.hopeless, every_batch=QUICK.every_batch)
    found: dict[tuple[int, int], float] = {}
    while (same := selection.next()) is not None:
        for plan in same:
            if selection.worth(plan):
                key = plan.world, plan.global_batch
                found[key] = min(truth[plan], found.get(key, inf))
                selection.measured(plan, truth[plan])
            else:
                selection.leave_out(plan)
    measured = selection.plans - selection.left_out.total()
    assert measured < selection.plans / 3
    assert selection.undecided == 0
    best = {key: min(truth[plan] for plan in truth if (plan.world, plan.global_batch) == key) for key in found}
    assert len(best) == 2 * len(sizes_of(SLOTS))
    assert max(found[key] / best[key] for key in best) < 1.05


def test_what_jobs_fall_back_on_comes_first_then_the_fewest_slots() -> None:
    """The smallest and the largest batch of each, then those between; failed before: replicas at every batch took the
    time there was, and of a model with slow steps nothing else was measured.
    """
    selection, order = Selection(candidates(), lambda size: 1, hopeless=inf), list[list[PlanMessage]]()
    while (same := selection.next()) is not None:
        order.append(same)
        for plan in same:
            selection.measured(plan, 1.0)
    kinds = len(order) // 2
    for half, batches in ((order[:kinds], {BATCHES[0], BATCHES[-1]}), (order[kinds:], {*BATCHES[1:-1]})):
        assert [same[0].degrees for same in half[:4]] == ["1", "dp2", "dp4", "dp8"]
        assert all(one[0].world <= other[0].world for one, other in pairwise(half[4:]))
        assert {plan.global_batch for same in half for plan in same} == batches
    assert selection.undecided == 0


def test_a_plan_that_was_never_tried_is_believed_to_be_as_fast_as_it_could_be() -> None:
    def one(batch: int) -> Plan:
        return Plan(micro_batch=batch // 2, accumulation=2)

    seen = [SeenPlan(one(batch), 1, 0.01 * batch) for batch in BATCHES]
    times = PlanTimes(seen)
    assert times.step_s(one(24), 1) == pytest.approx(0.24)
    split = Plan(tensor=2, micro_batch=16, accumulation=2)
    assert times.step_s(split, 1) == pytest.approx(0.16)
    slow = PlanTimes([*seen, SeenPlan(split, 1, 0.8)])
    assert slow.step_s(Plan(tensor=4, micro_batch=16, accumulation=2), 1) > 0.8
    assert slow.step_s(Plan(data=2, micro_batch=16), 1) == pytest.approx(0.16)
    exchanging = SeenPlan(Plan(data=2, micro_batch=16), 1, 0.4, sync_s=0.3)
    alone = PlanTimes([exchanging])
    assert alone.step_s(exchanging.plan, 1) == pytest.approx(0.4)
    assert alone.step_s(Plan(tensor=2, micro_batch=16, accumulation=2), 1) == pytest.approx(0.1, rel=0.05)
    assert alone.step_s(Plan(data=2, micro_batch=8), 1) == pytest.approx(0.35, rel=0.05)
    staged = times.step_s(Plan(pipeline=2, micro_batch=8, accumulation=4), 1)
    assert staged == pytest.approx(0.01 * 8 * (4 + 1) / 2)


def test_what_memory_forbids_is_left_out() -> None:
    there = candidates(2)
    selection = Selection(there, lambda size: 1, hopeless=inf)
    (data,) = [same for same in there[2] if same[0].degrees == "dp2"]
    too_large = next(plan for plan in data if plan.global_batch == 64)
    selection.failed(too_large, out_of_memory=True)
    assert [selection.worth(plan) for plan in data] == [True, True, False, False]
    (alone,) = there[1]
    assert [selection.worth(plan) for plan in alone] == [True, True, False, False]  # half of 64 is as much as it had
    sharded = [plan for same in there[2] if same[0].zero or same[0].pipeline > 1 for plan in same]
    assert all(selection.worth(plan) for plan in sharded)
    for plan in data:
        if not selection.worth(plan):
            selection.leave_out(plan)
    assert selection.left_out == {MEMORY: 2}


def test_what_trains_in_too_much_memory_hides_no_plan_that_fits() -> None:
    there = candidates(2)
    selection = Selection(there, lambda size: 1, hopeless=1.25)
    for plan in there[2][0][:2]:
        selection.measured(plan, 0.1, fits=False)
    sharded = next(same for same in there[2] if same[0].degrees == "dp2 zero3")
    selection.measured(sharded[0], 0.9)
    assert selection.worth(sharded[1])
    assert not selection.worth(there[2][0][2])
    assert (2, BATCHES[0]) not in {(plan.world, plan.global_batch) for plan, _ in selection.predicted()}


def test_weights_that_no_slot_can_hold_alone_are_not_tried_whole() -> None:
    there = candidates(4)
    selection = Selection(there, lambda size: 1, hopeless=inf, held_bytes=3e9, memory_bytes=1e9)
    worth = {plan.degrees for plan in all_of(there) if selection.worth(plan)}
    assert worth == {
        "pp4",
        "pp4×2",
        "dp4 zero3",
        "tp4",
        "tp2 dp2 zero3",
        "pp2 dp2 zero3",
        "pp2×2 dp2 zero3",
        "tp2 pp2",
    } | {"tp2 pp2×2"}


def test_what_was_not_measured_is_predicted_where_nothing_else_is_known() -> None:
    there = candidates(2)
    selection = Selection(there, lambda size: 1, hopeless=inf)
    for plan in there[1][0]:
        selection.measured(plan, 0.01 * plan.global_batch)
    assert {(plan.world, plan.global_batch) for plan, _ in selection.predicted()} == {(2, batch) for batch in BATCHES}
    assert {plan.degrees for plan, _ in selection.predicted()} == {"dp2"}  # others may only seem faster
    for plan in there[2][0][:3]:
        selection.measured(plan, 0.006 * plan.global_batch)
    ((plan, step_s),) = selection.predicted()
    assert (plan.world, plan.global_batch) == (2, 128)
    assert 0.5 < step_s / 1.28 < 0.7
