"""How long a training step takes under each plan, and where the time goes. docs/planner.md has the formulas."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from synergy_core.arrays import Floats
from synergy_core.planner.communication import Links, all_reduce_s, all_to_all_s, links_for, send_s
from synergy_core.planner.constants import Constants
from synergy_core.planner.groups import RankGroups
from synergy_core.planner.kernels import block_time
from synergy_core.planner.machine import Machine
from synergy_core.planner.plan import Plans, Recompute
from synergy_core.planner.replicas import Hiding, ReplicaTerms, held, replica_exchange_s
from synergy_core.planner.software import Software
from synergy_core.planner.work import Amount, Block, Work


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds (plans,), parts that add up to total_s; of the slowest stage where stages differ.

    compute_s: forward and backward of every micro-batch. recompute_s: forward again. tensor_s, context_s, expert_s:
    collectives of tensor, context and expert parallelism. bubble_s: waiting for the pipeline to fill and drain.
    pipeline_s: activations between stages. data_s: gradients and gathered weights, as far as not hidden.
    optimizer_s: the update. other_s: what each step costs whatever its size.
    """

    total_s: Floats
    compute_s: Floats
    recompute_s: Floats
    bubble_s: Floats
    tensor_s: Floats
    context_s: Floats
    expert_s: Floats
    pipeline_s: Floats
    data_s: Floats
    optimizer_s: Floats
    other_s: Floats


@dataclass(frozen=True, slots=True)
class _Part:
    """Seconds (plans,) of one block and micro-batch."""

    forward: Floats
    backward: Floats
    again: Floats
    tensor: Floats
    context: Floats
    expert: Floats

    @property
    def total(self) -> Floats:
        return self.forward + self.backward + self.again + self.tensor + self.context + self.expert

    def __add__(self, other: _Part) -> _Part:
        return _Part(*(getattr(self, name) + getattr(other, name) for name in _Part.__slots__))

    def times(self, factor: Amount) -> _Part:
        return _Part(*(getattr(self, name) * factor for name in _Part.__slots__))


@dataclass(frozen=True, slots=True)
class Computation:
    """A step under each plan but for the exchange between replicas, which a compressor changes.

    seconds: (plans,) by the names of `StepTime`; data_s, which is asked for, is 0.
    """

    work: Work
    plans: Plans
    software: Software
    constants: Constants
    links: Links
    groups: RankGroups
    hiding: Hiding
    seconds: Mapping[str, Floats]

    def step_time(self, terms: ReplicaTerms | None = None) -> StepTime:
        """With that exchange; None: of gradients as they are."""
        data_s = replica_exchange_s(
            self.work, self.plans, self.software, self.constants, self.links, self.groups, self.hiding, terms
        )
        parts = {**self.seconds, "data_s": data_s}
        total: Floats = np.zeros(len(self.plans))
        for each in parts.values():
            total = total + each
        return StepTime(total_s=total, **parts)


def step_time(work: Work, plans: Plans, machine: Machine, software: Software, c: Constants) -> StepTime:
    """Seconds of a step under each plan, gradients exchanged as they are."""
    return computation(work, plans, machine, software, c).step_time()


def computation(work: Work, plans: Plans, machine: Machine, software: Software, c: Constants) -> Computation:
    """What takes time beside the exchange between replicas.

    The pipeline runs 1F1B: every micro-batch through the slowest stage, and once through all others, or through a
    v-th of them where stages are interleaved v times (Narayanan et al., arXiv 2104.04473, section 2.2).
    """
    links = links_for(machine)
    groups = RankGroups(plans, machine.gpus_per_node)

    def part(block: Block, *, again: bool) -> _Part:
        return _part(block, plans, machine, software, c, links, groups, again=again)

    m, pp, v = (each.astype(float) for each in (plans.accumulation, plans.pipeline, plans.interleave))
    stage = _slowest_stage(work, plans, part)
    hop = send_s(work.layers[0].block.boundary_bytes / _scattered(plans), groups.pipeline_within, links)
    hiding = Hiding(c.data_overlap * stage.part.forward, c.data_overlap * (stage.part.backward + stage.part.again))
    parts = {
        "compute_s": m * (stage.part.forward + stage.part.backward),
        "recompute_s": m * stage.part.again,
        "tensor_s": m * stage.part.tensor,
        "context_s": m * stage.part.context,
        "expert_s": m * stage.part.expert,
        "bubble_s": stage.others / v,
        "pipeline_s": np.where(pp > 1, 2.0 * hop * (m * v + pp - 1.0), 0.0),
        "data_s": np.zeros(len(plans)),
        "optimizer_s": _optimizer(work, plans, machine, software, c),
        "other_s": np.full(len(plans), c.step_s),
    }
    return Computation(work, plans, software, c, links, groups, hiding, parts)


@dataclass(frozen=True, slots=True)
class _Stage:
    """The slowest stage of a pipeline.

    part: of one micro-batch on that stage. others: seconds (plans,) of all other stages together.
    """

    part: _Part
    others: Floats


def _slowest_stage(work: Work, plans: Plans, part: Callable[..., _Part]) -> _Stage:
    """Stages of whole layers, as even as their number allows; the first also embeds, the last has the logits.

    Only layers are recomputed, not what stands before and after them.
    """
    before, after = part(work.before, again=False), part(work.after, again=False)
    every = part(work.layers[0].block, again=True).times(work.layers[0].count)
    for run in work.layers[1:]:
        every = every + part(run.block, again=True).times(run.count)
    count = np.asarray(work.layer_count, float)
    layer = every.times(1.0 / count)
    chunks = (plans.pipeline * plans.interleave).astype(float)
    most = np.minimum(np.ceil(count / chunks) * plans.interleave, count)
    least = np.maximum(np.floor(count / chunks), 1.0) * plans.interleave
    whole = every + before + after
    stages = (layer.times(most), layer.times(most) + before, layer.times(least) + after)
    slowest = np.argmax([each.total for each in stages], axis=0)
    chosen = _choose(slowest, stages)
    chosen = _choose((plans.pipeline > 1).astype(int), (whole, chosen))
    return _Stage(chosen, np.maximum(whole.total - chosen.total, 0.0))


def _choose(index: NDArray[np.int64], parts: tuple[_Part, ...]) -> _Part:
    return _Part(*(np.choose(index, [getattr(each, name) for each in parts]) for name in _Part.__slots__))


def _scattered(plans: Plans) -> Floats:
    """By what tensor parallelism divides an activation that is sent on; sequence parallelism has divided it already."""
    return np.where(plans.sequence, 1.0, plans.tensor)


def _part(
    block: Block,
    plans: Plans,
    machine: Machine,
    software: Software,
    c: Constants,
    links: Links,
    groups: RankGroups,
    *,
    again: bool,
) -> _Part:
    """One block: the host launches its kernels while the GPU runs them, so that the slower of both counts.

    again: whether it is recomputed where the plan says so.
    """
    gpu = block_time(block, machine, software, c)
    slow = 1.0 / c.tensor_efficiency
    one = all_reduce_s(block.tensor_bytes, plans.tensor, groups.tensor_within, links) * slow
    tensor = np.where(plans.tensor > 1, one * block.tensor_count, 0.0)
    ring = send_s(
        np.asarray(block.context_bytes) * (plans.context - 1) / np.maximum(plans.context, 1),
        groups.context_within == plans.context,
        links,
    )
    context = np.where(plans.context > 1, ring, 0.0)
    expert = _all_to_all_s(block, plans, software, links, groups) * block.expert_count
    passes = plans.passes if again else np.full(len(plans), Recompute.NONE.passes)
    collectives = (plans.tensor > 1) * np.asarray(block.tensor_count, float)

    def bound(seconds: Floats, kernels: Floats) -> Floats:
        """The GPU's work with the host's launches, which overlap in part: the norm of both, beside the collectives."""
        on_gpu = seconds + kernels * c.kernel_s + tensor
        on_host = (kernels + collectives) * c.host_s * (1.0 + c.host_jitter * np.log2(plans.tensor))
        both: Floats = (on_gpu**c.launch_norm + on_host**c.launch_norm) ** (1.0 / c.launch_norm)
        return both - tensor

    forward = bound(gpu.forward_s, gpu.forward_kernels)
    backward = bound(gpu.backward_s, gpu.backward_kernels)
    zeros = np.zeros(len(plans))
    redone = zeros
    if again:
        seconds = {
            Recompute.NONE: zeros,
            Recompute.SELECTIVE: gpu.attention_s,
            Recompute.FULL: forward,
            Recompute.OPERATORS: 0.5 * (gpu.forward_s - gpu.attention_s),
        }
        redone = np.choose(plans.recompute, [seconds[each] for each in Recompute])
    return _Part(
        forward=forward + zeros,
        backward=backward + zeros,
        again=redone + zeros,
        tensor=tensor * (passes - 1.0) + zeros,
        context=context * passes + zeros,
        expert=expert * (passes - 1.0) + zeros,
    )


def _all_to_all_s(block: Block, plans: Plans, software: Software, links: Links, groups: RankGroups) -> Floats:
    """Seconds (plans,) of moving tokens to their experts, once.

    Where a token goes to each node once, n nodes get n (1 − (1 − 1/n)^copies) of its copies at random, and pass them on
    within.
    """
    within = groups.expert_within
    nodes = np.maximum(plans.expert / within, 1.0)
    sent = np.asarray(block.expert_bytes, float)
    if not software.sends_once:
        return np.where(plans.expert > 1, all_to_all_s(sent, plans.expert, within, links), 0.0)
    copies = np.maximum(np.asarray(block.expert_copies, float), 1.0)
    once = nodes * (1.0 - (1.0 - 1.0 / nodes) ** copies) / copies
    between = all_to_all_s(sent * np.minimum(once, 1.0), plans.expert, within, links)
    inside = all_to_all_s(sent, within, within, links)
    return np.where(plans.expert > 1, np.where(nodes > 1, between + inside, inside), 0.0)


def _optimizer(work: Work, plans: Plans, machine: Machine, software: Software, c: Constants) -> Floats:
    """Memory-bound: reads gradients, reads and writes master copy and moments, writes weights."""
    dense, expert = held(work, plans)
    shards = np.where(plans.zero >= 1, plans.data * plans.context, 1.0)
    expert_shards = np.where(plans.zero >= 1, np.maximum(plans.data * plans.context // plans.expert, 1), 1.0)
    own = dense / shards + expert / expert_shards
    moved = software.gradient_bytes + software.weight_bytes + 2.0 * software.optimizer_bytes
    rate = machine.gpu.memory_bandwidth_bytes_per_s * c.memory_efficiency
    seconds: Floats = own * moved * c.optimizer_bytes_factor / rate
    return seconds
