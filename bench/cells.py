"""Crius's Cells (arXiv 2403.16125): a job on a GPU type, with a number of GPUs and of stages; the rest is free.

A scheduler that compares allocations needs each Cell's worth, not yet its best plan. The estimator takes two proxies
per Cell: data parallelism only, and tensor parallelism as wide as a stage and a node allow; a Cell is worth its better
proxy. Only the Cell chosen is tuned, over the half of its (data, tensor) pairs on that proxy's side. Layers of a
family's run weigh the same, so stages of equal load are stages of equally many layers, with equally many GPUs each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from synergy_core.planner.enumerate import candidates
from synergy_core.planner.machine import Constants, Machine, Software
from synergy_core.planner.plan import Plan, Plans, plans_of
from synergy_core.planner.search import MICRO_BATCHES, Model, laid_out, timed
from synergy_core.planner.work import Architecture, Family
from synergy_core.units import Floats, Ints

MICRO_BATCHES_PER_STAGE = 4
"""A proxy's micro-batch is the largest that leaves that many per stage: then the bubble is below a quarter (GPipe)."""


@dataclass(frozen=True, slots=True)
class Cells:
    """Cells as columns (cells,), by GPU count and stages: the better proxy's plan and seconds, inf where none fits.

    tensor_side: whether that is the tensor-parallel one. timed: plans whose time was computed for all of them.
    """

    gpus: Ints
    stages: Ints
    step_time_s: Floats
    tensor_side: NDArray[np.bool_]
    plans: Plans
    timed: int

    def __len__(self) -> int:
        return len(self.gpus)

    def best(self) -> NDArray[np.int64]:
        """Row of the fastest Cell of every count that has one which fits."""
        order = np.lexsort((self.step_time_s, self.gpus))
        first = np.append(True, np.diff(self.gpus[order]) != 0)[: len(order)]
        rows: NDArray[np.int64] = order[first]
        return rows[np.isfinite(self.step_time_s[rows])]


@dataclass(frozen=True, slots=True)
class Tuned:
    """A Cell's best plan; timed: plans whose time was computed for it."""

    plan: Plan
    step_time_s: float
    timed: int


def estimate(
    family: Family,
    architecture: Architecture,
    machine: Machine,
    software: Software,
    constants: Constants,
    *,
    counts: Sequence[int],
    global_batch: int,
) -> Cells:
    """Every Cell of the counts, with stages in powers of two, by its proxies."""
    model = Model(family, architecture, software)
    made = [
        (gpus, stages, plan)
        for gpus in sorted(set(counts))
        for stages in _powers(min(gpus, model.limits.layers))
        if gpus % stages == 0
        for plan in _proxies(model, machine, gpus // stages, stages, global_batch)
    ]
    cells = list(dict.fromkeys((gpus, stages) for gpus, stages, _ in made))
    gpus, stages = (np.array([each[at] for each in cells], dtype=np.int64) for at in range(2))
    seconds, side = np.full(len(cells), np.inf), np.zeros(len(cells), dtype=bool)
    chosen = [Plan(pipeline=each, data=count // each) for count, each in cells]
    total = 0
    if made:
        plans, _, times = timed(model, machine, constants, plans_of([each[-1] for each in made]))
        total = len(plans)
        at = {cell: row for row, cell in enumerate(cells)}
        for row in np.argsort(-times.total_s, kind="stable").tolist():
            plan = plans.plan(row)
            cell = at[plan.gpus, plan.pipeline]
            seconds[cell], side[cell], chosen[cell] = times.total_s[row], plan.tensor > 1, plan
    return Cells(gpus, stages, seconds, side, plans_of(chosen or [Plan()]).take(np.arange(len(cells))), total)


def tune(
    family: Family,
    architecture: Architecture,
    machine: Machine,
    software: Software,
    constants: Constants,
    *,
    gpus: int,
    stages: int,
    tensor_side: bool,
    global_batch: int,
) -> Tuned | None:
    """The best plan of one Cell, its tensor degrees bounded to one side of the square root of a stage's GPUs.

    None where nothing on that side fits.
    """
    model = Model(family, architecture, software)
    every = candidates(
        model.limits,
        [gpus],
        global_batch,
        software,
        micro_batches=MICRO_BATCHES,
        max_tensor=machine.gpus_per_node,
        fixed={"pipeline": stages, "context": 1},
    )
    every = every.take(laid_out(every, machine))
    middle = sqrt(gpus // stages)
    inside = every.tensor >= min(middle, every.tensor.max(initial=1)) if tensor_side else every.tensor <= middle
    plans, _, times = timed(model, machine, constants, every.take(inside))
    if not len(plans):
        return None
    row = int(np.argmin(times.total_s))
    return Tuned(plans.plan(row), float(times.total_s[row]), len(plans))


def _proxies(model: Model, machine: Machine, share: int, stages: int, global_batch: int) -> list[Plan]:
    """Data only and tensor as wide as it goes, on `share` GPUs per stage; those whose replicas divide the batch."""
    node = machine.gpus_per_node
    within = [each for each in model.limits.tensors(node) if node % each == 0 or share * stages <= node]
    allowed = [each for each in within if share % each == 0]
    plans = []
    for tensor in dict.fromkeys((1, allowed[-1])):
        data = share // tensor
        if global_batch % data:
            continue
        each = global_batch // data
        fitting = [size for size in MICRO_BATCHES if each % size == 0]
        deep = [size for size in fitting if each // size >= MICRO_BATCHES_PER_STAGE * stages] if stages > 1 else []
        # Without stages nothing is gained by many micro-batches, but the smallest always fits best.
        micro = deep[-1] if deep else fitting[0]
        splits = tensor > 1 and model.limits.seq_len > 0 and model.limits.seq_len % tensor == 0
        plans.append(
            Plan(
                tensor=tensor,
                pipeline=stages,
                data=data,
                micro_batch=micro,
                accumulation=each // micro,
                sequence=splits,
            )
        )
    return plans


def _powers(most: int) -> list[int]:
    return [1 << each for each in range(most.bit_length())]
