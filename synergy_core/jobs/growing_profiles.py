"""Profiles that grow while jobs train: what was seen stands, and what was not is predicted anew from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from synergy_core.jobs.testbed_profiles import ProfiledModel, ProfiledRow, degrees_of
from synergy_core.jobs.training import Shape
from synergy_core.planner.plan import Plan
from synergy_core.planner.seen_plans import PlanTimes, SeenPlan


def grows(model: ProfiledModel) -> bool:
    """Whether something of it is predicted, and so may be seen yet."""
    return any(row.predicted for row in model.rows)


def is_new(model: ProfiledModel, shape: Shape, plan: Plan) -> bool:
    """Whether nothing was measured of that plan there."""
    return not any(_is(row, shape.gpu_type, shape.nodes, plan) for row in model.rows if not row.predicted)


def with_seen(model: ProfiledModel, seen: ProfiledRow, *, fits: bool = True) -> ProfiledModel:
    """The model once a plan was seen to train so, and all that are predicted are so by that, too. fits: in memory; else
    it tells of others this once, and with those of its degrees that hold as much it is none to be chosen.
    """
    rows = [row for row in model.rows if not _is(row, seen.gpu_type, seen.nodes, seen.plan)]
    known = dataclasses.replace(model, rows=_predicted([*rows, seen]))
    if fits:
        return known
    shape = Shape(seen.gpu_type, seen.nodes, seen.plan.gpus)
    smaller = without(known, shape, seen.plan, least_micro_batch=seen.plan.micro_batch)
    return dataclasses.replace(smaller, rows=tuple(row for row in smaller.rows if row != seen))


def without(model: ProfiledModel, shape: Shape, plan: Plan, *, least_micro_batch: int = 1) -> ProfiledModel:
    """The model without what was predicted of these degrees with so large a micro-batch: it does not run."""

    def stays(row: ProfiledRow) -> bool:
        alike = degrees_of(row.plan) == degrees_of(plan) and row.gpu_type == shape.gpu_type
        return not (row.predicted and alike and row.plan.micro_batch >= least_micro_batch)

    return dataclasses.replace(model, rows=tuple(filter(stays, model.rows)))


def _is(row: ProfiledRow, gpu_type: str, nodes: int, plan: Plan) -> bool:
    return (row.gpu_type, row.nodes, row.plan) == (gpu_type, nodes, plan)


def _predicted(rows: Sequence[ProfiledRow]) -> tuple[ProfiledRow, ...]:
    """The same rows, those that were not measured predicted from those that were: on GPUs of their type, or where none
    was, on any, as if they were alike. One at least was measured.
    """
    seen = {row: SeenPlan(row.plan, row.nodes, row.step_s, row.sync_s) for row in rows if not row.predicted}
    times = {
        gpu_type: PlanTimes([known for row, known in seen.items() if row.gpu_type == gpu_type])
        for gpu_type in {row.gpu_type for row in seen}
    }

    for gpu_type in {row.gpu_type for row in rows if row.predicted} - times.keys():
        times[gpu_type] = PlanTimes(list(seen.values()))

    def as_now(row: ProfiledRow) -> ProfiledRow:
        return (
            dataclasses.replace(row, step_s=times[row.gpu_type].step_s(row.plan, row.nodes)) if row.predicted else row
        )

    return tuple(as_now(row) for row in rows)
