"""What moves when a job goes from one plan to another: bytes each GPU receives, and how long that takes.

A GPU holds of each block of its stage an interval of the flattened parameters: its tensor shard, and of that its ZeRO
shard, so what it must receive is what it will hold minus the overlap with what it holds. Sums over the blocks that two
stages have in common, times the overlap of two intervals, counted in whole parts of a common denominator, are exact;
ZeRO's shards are taken per block (FSDP2, DeepSpeed), where Megatron cuts one buffer of all of a stage's blocks.
Experts are a second axis: an interval of the experts times an interval within each.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

import numpy as np

from synergy_core.arrays import Floats, Ints
from synergy_core.planner.architecture import Architecture, Family
from synergy_core.planner.plan import Plan, plans_of
from synergy_core.planner.software import Software
from synergy_core.planner.work import Block


@dataclass(frozen=True, slots=True)
class Shards:
    """A job's state by block, in the model's order: embedding, layers, logits; (blocks,) parameters.

    dense: what every replica holds; experts: what expert parallelism spreads. weight_bytes, optimizer_bytes: per
    parameter. Gradients are not state: they are empty between steps.
    """

    dense: Floats
    experts: Floats
    weight_bytes: float
    optimizer_bytes: float

    @property
    def state_bytes(self) -> float:
        """Weights and optimizer state, each counted once."""
        return float((self.dense.sum() + self.experts.sum()) * (self.weight_bytes + self.optimizer_bytes))


def holdings(family: Family, architecture: Architecture, software: Software) -> Shards:
    """The state of a model: its blocks as one GPU without any parallelism would hold them."""
    work = family.work(architecture, plans_of([Plan()]), software)
    blocks: list[Block] = [work.before]
    for run in work.layers:
        blocks += [run.block] * round(float(np.max(run.count)))
    blocks.append(work.after)
    return Shards(
        dense=np.array([float(np.max(each.parameters)) for each in blocks]),
        experts=np.array([float(np.max(each.expert_parameters)) for each in blocks]),
        weight_bytes=software.weight_bytes,
        optimizer_bytes=software.optimizer_bytes,
    )


def moved_bytes(
    held: Shards,
    before: Plan | None,
    after: Plan,
    *,
    gpus_before: Ints | None = None,
    gpus_after: Ints | None = None,
) -> Floats:
    """(after.gpus,): bytes each GPU receives, in rank order of the new plan. before None: GPUs that hold nothing yet.

    gpus_before, gpus_after: which GPU each rank is, any numbers, each once; by default rank r is GPU r in both, so the
    smaller plan runs on the first GPUs of the larger.
    """
    new = _Place(after, np.arange(after.gpus), len(held.dense))
    shares = ((held.weight_bytes, 3), (held.optimizer_bytes, 1))
    if before is None:
        result = np.zeros(after.gpus)
        dense, experts = _all(new, held.dense), _all(new, held.experts)
        for size, from_zero in shares:
            result += size * (dense * new.length(from_zero) + experts * new.part(from_zero))
        return result
    ids_before = np.arange(before.gpus) if gpus_before is None else np.asarray(gpus_before)
    ids_after = np.arange(after.gpus) if gpus_after is None else np.asarray(gpus_after)
    was = _ranks(ids_before, ids_after)
    old = _Place(before, np.maximum(was, 0), len(held.dense))
    kept = (was >= 0).astype(float)
    dense, experts = (_common(new, old, each) * kept for each in (held.dense, held.experts))
    result = moved_bytes(held, None, after)
    for size, from_zero in shares:
        inner = _overlap(new.dense(from_zero), old.dense(from_zero))
        outer = _overlap(new.spread(), old.spread()) * _overlap(new.inside(from_zero), old.inside(from_zero))
        result = result - size * (dense * inner + experts * outer)
    return np.maximum(result, 0.0)


Interval = tuple[Ints, Ints, int]
"""Each rank's part of something: its start and end, (ranks,) integers, and the denominator that both count in."""


class _Place:
    """Where ranks of a plan stand: stage, tensor shard, replica. Layout: tensor, context, data, stage outermost."""

    def __init__(self, plan: Plan, ranks: Ints, blocks: int) -> None:
        self.plan = plan
        self.replicas = plan.context * plan.data
        self.tensor = ranks % plan.tensor
        self.replica = ranks // plan.tensor % self.replicas
        self.stage = ranks // (plan.tensor * self.replicas)
        self.stage_of_block = _stages(plan, blocks)

    def dense(self, from_zero: int) -> Interval:
        """What each rank holds of a block's dense parameters; ZeRO shards them from its stage `from_zero` on."""
        shards = self.replicas if self.plan.zero >= from_zero else 1
        at = self.tensor * shards + self.replica % shards
        return at, at + 1, self.plan.tensor * shards

    def spread(self) -> Interval:
        """Which of the experts each rank holds."""
        at = self.replica % self.plan.expert
        return at, at + 1, self.plan.expert

    def inside(self, from_zero: int) -> Interval:
        """What each rank holds of the parameters of each of its experts; ZeRO as in `dense`."""
        copies = self.replicas // self.plan.expert
        shards = copies if self.plan.zero >= from_zero else 1
        at = self.tensor * shards + self.replica // self.plan.expert % shards
        return at, at + 1, self.plan.tensor * shards

    def length(self, from_zero: int) -> float:
        """The share of a block's dense parameters that a rank holds, in (0, 1]."""
        return 1.0 / self.dense(from_zero)[2]

    def part(self, from_zero: int) -> float:
        """The share of a block's expert parameters that a rank holds, in (0, 1]."""
        return 1.0 / (self.plan.expert * self.inside(from_zero)[2])


def _stages(plan: Plan, blocks: int) -> Ints:
    """(blocks,): the stage of each block. Layers go round robin in even chunks, the longer ones first."""
    layers, chunks = blocks - 2, plan.pipeline * plan.interleave
    sizes = np.full(chunks, layers // chunks) + (np.arange(chunks) < layers % chunks)
    of_layers = np.repeat(np.arange(chunks) % plan.pipeline, sizes)
    return np.concatenate([[0], of_layers, [plan.pipeline - 1]])


def _all(new: _Place, parameters: Floats) -> Floats:
    """(ranks,): parameters of the blocks of each rank's stage."""
    by_stage: Floats = np.zeros(new.plan.pipeline)
    np.add.at(by_stage, new.stage_of_block, parameters)
    return by_stage[new.stage]


def _common(new: _Place, old: _Place, parameters: Floats) -> Floats:
    """(ranks,): parameters of the blocks that are in its stage before and after."""
    table = np.zeros((new.plan.pipeline, old.plan.pipeline))
    np.add.at(table, (new.stage_of_block, old.stage_of_block), parameters)
    result: Floats = table[new.stage, old.stage]
    return result


def _overlap(one: Interval, other: Interval) -> Floats:
    """(ranks,): the share of the whole that both cover, in [0, 1]; exact up to the last division."""
    whole = lcm(one[2], other[2])
    a, b = whole // one[2], whole // other[2]
    common = np.minimum(one[1] * a, other[1] * b) - np.maximum(one[0] * a, other[0] * b)
    result: Floats = np.maximum(common, 0) / whole
    return result


def _ranks(ids_before: Ints, ids_after: Ints) -> Ints:
    """(after,): the rank that each GPU had before, -1 for a new one."""
    order = np.argsort(ids_before)
    at = np.minimum(np.searchsorted(ids_before[order], ids_after), len(order) - 1)
    found = order[at]
    return np.where(ids_before[found] == ids_after, found, -1)
