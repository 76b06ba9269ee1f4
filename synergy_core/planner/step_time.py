"""How long a training step takes under each plan, and where the time goes. docs/planner.md has the formulas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from synergy_core.arrays import Floats
from synergy_core.planner.communication import (
    Links,
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    links_for,
    reduce_scatter_s,
    send_s,
)
from synergy_core.planner.constants import Constants
from synergy_core.planner.kernels import block_time
from synergy_core.planner.machine import Machine
from synergy_core.planner.plan import Plans, Recompute
from synergy_core.planner.software import Software
from synergy_core.planner.work import Amount, Block, Work

Collective = Callable[[Amount, NDArray[np.int64], NDArray[np.int64], Links], Floats]


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


def step_time(work: Work, plans: Plans, machine: Machine, software: Software, c: Constants) -> StepTime:
    """Seconds of a step under each plan.

    The pipeline runs 1F1B: every micro-batch through the slowest stage, and once through all others, or through a
    v-th of them where stages are interleaved v times (Narayanan et al., arXiv 2104.04473, section 2.2).
    """
    links = links_for(machine)
    layout = _Layout(plans, machine.gpus_per_node)

    def part(block: Block, *, again: bool) -> _Part:
        return _part(block, plans, machine, software, c, links, layout, again=again)

    m, pp, v = (each.astype(float) for each in (plans.accumulation, plans.pipeline, plans.interleave))
    stage = _slowest_stage(work, plans, part)
    hop = send_s(work.layers[0].block.boundary_bytes / _scattered(plans), layout.pipeline_within, links)
    data = _data(work, plans, software, c, links, layout, stage.part)
    parts = {
        "compute_s": m * (stage.part.forward + stage.part.backward),
        "recompute_s": m * stage.part.again,
        "tensor_s": m * stage.part.tensor,
        "context_s": m * stage.part.context,
        "expert_s": m * stage.part.expert,
        "bubble_s": stage.others / v,
        "pipeline_s": np.where(pp > 1, 2.0 * hop * (m * v + pp - 1.0), 0.0),
        "data_s": data,
        "optimizer_s": _optimizer(work, plans, machine, software, c),
        "other_s": np.full(len(plans), c.step_s),
    }
    total: Floats = np.zeros(len(plans))
    for each in parts.values():
        total = total + each
    return StepTime(total_s=total, **parts)


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


class _Layout:
    """Where the ranks of each group are: tensor innermost, then context, data, pipeline outermost."""

    def __init__(self, plans: Plans, per_node: int) -> None:
        def within(degree: NDArray[np.int64], stride: NDArray[np.int64]) -> NDArray[np.int64]:
            return np.minimum(degree, np.maximum(per_node // stride, 1))

        one = np.ones_like(plans.tensor)
        self.per_node = np.minimum(per_node, plans.gpus)
        self.tensor_within = within(plans.tensor, one)
        self.context_within = within(plans.context, plans.tensor)
        self.data_ranks = plans.data * plans.context
        self.data_within = within(self.data_ranks, plans.tensor)
        self.expert_within = within(plans.expert, plans.tensor)
        self.copies = np.maximum(self.data_ranks // plans.expert, 1)
        self.copies_within = within(self.copies, plans.tensor * plans.expert)
        replica = plans.tensor * plans.context * plans.data
        self.pipeline_within = (replica * 2 <= per_node) & (per_node % replica == 0)


def _part(
    block: Block,
    plans: Plans,
    machine: Machine,
    software: Software,
    c: Constants,
    links: Links,
    layout: _Layout,
    *,
    again: bool,
) -> _Part:
    """One block: the host launches its kernels while the GPU runs them, so that the slower of both counts.

    again: whether it is recomputed where the plan says so.
    """
    gpu = block_time(block, machine, software, c)
    slow = 1.0 / c.tensor_efficiency
    one = all_reduce_s(block.tensor_bytes, plans.tensor, layout.tensor_within, links) * slow
    tensor = np.where(plans.tensor > 1, one * block.tensor_count, 0.0)
    ring = send_s(
        np.asarray(block.context_bytes) * (plans.context - 1) / np.maximum(plans.context, 1),
        layout.context_within == plans.context,
        links,
    )
    context = np.where(plans.context > 1, ring, 0.0)
    expert = _all_to_all_s(block, plans, software, links, layout) * block.expert_count
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


def _all_to_all_s(block: Block, plans: Plans, software: Software, links: Links, layout: _Layout) -> Floats:
    """Seconds (plans,) of moving tokens to their experts, once.

    Where a token goes to each node once, n nodes get n (1 − (1 − 1/n)^copies) of its copies at random, and pass them on
    within.
    """
    within = layout.expert_within
    nodes = np.maximum(plans.expert / within, 1.0)
    sent = np.asarray(block.expert_bytes, float)
    if not software.sends_once:
        return np.where(plans.expert > 1, all_to_all_s(sent, plans.expert, within, links), 0.0)
    copies = np.maximum(np.asarray(block.expert_copies, float), 1.0)
    once = nodes * (1.0 - (1.0 - 1.0 / nodes) ** copies) / copies
    between = all_to_all_s(sent * np.minimum(once, 1.0), plans.expert, within, links)
    inside = all_to_all_s(sent, within, within, links)
    return np.where(plans.expert > 1, np.where(nodes > 1, between + inside, inside), 0.0)


def _held(work: Work, plans: Plans) -> tuple[Floats, Floats]:
    """(plans,) twice: parameters of the largest stage on one GPU before ZeRO, dense and expert."""
    dense: Floats = np.zeros(len(plans))
    expert: Floats = np.zeros(len(plans))
    count = np.asarray(work.layer_count, float)
    most = np.minimum(np.ceil(count / plans.pipeline), count)
    for each in work.layers:
        share = most * each.count / count
        dense = dense + share * each.block.parameters
        expert = expert + share * each.block.expert_parameters
    first, last = np.asarray(work.before.parameters, float), np.asarray(work.after.parameters, float)
    edge = np.where(plans.pipeline == 1, first + last, np.maximum(first, last))
    return dense + edge, expert


def _data(
    work: Work, plans: Plans, software: Software, c: Constants, links: Links, layout: _Layout, stage: _Part
) -> Floats:
    """Exposed seconds of reducing gradients and gathering weights over data- and context-parallel ranks.

    Up to ZeRO-2 both happen once a step, behind the last micro-batch's backward pass as far as the software overlaps
    them. Under ZeRO-3 each layer's weights are gathered for the forward and again for the backward pass, and its
    gradients scattered, in every micro-batch, behind the computation of the layer before.
    """
    dense, expert = _held(work, plans)
    ranks, within = layout.data_ranks, layout.data_within
    # Groups that have several GPUs on a node, but not all, pick network cards without knowing of each other.
    groups = np.maximum(layout.per_node // np.maximum(within, 1), 1)
    sharing = 1.0 + c.card_collisions * np.where(within > 1, groups - 1.0, 0.0)

    def gather(nbytes: Amount) -> Floats:
        return all_gather_s(nbytes, ranks, within, links, sharing=sharing) / c.network_efficiency

    def scatter(nbytes: Amount) -> Floats:
        return reduce_scatter_s(nbytes, ranks, within, links, sharing=sharing) / c.network_efficiency

    gradients = dense * software.gradient_bytes
    whole = all_reduce_s(gradients, ranks, within, links, sharing=sharing) / c.network_efficiency
    split = scatter(gradients) + gather(dense * software.weight_bytes)
    own = _of_experts(all_reduce_s, expert * software.gradient_bytes, links, layout, c)
    seconds = np.where(plans.zero >= 1, split, whole) + own
    hidden = c.data_overlap * (stage.backward + stage.again)
    once = _exposed(seconds, hidden, c)
    count = np.asarray(work.layer_count, float)
    layers = np.maximum(np.ceil(count / plans.pipeline), 1.0)
    unit = sum(run.count * np.asarray(run.block.parameters, float) for run in work.layers) / count
    own_unit = sum(run.count * np.asarray(run.block.expert_parameters, float) for run in work.layers) / count
    gathered = gather(unit * software.weight_bytes)
    gathered = gathered + _of_experts(all_gather_s, own_unit * software.weight_bytes, links, layout, c)
    scattered = scatter(unit * software.gradient_bytes)
    scattered = scattered + _of_experts(reduce_scatter_s, own_unit * software.gradient_bytes, links, layout, c)
    forward = _exposed(gathered, c.data_overlap * stage.forward / layers, c)
    backward = _exposed(gathered + scattered, hidden / layers, c)
    every = layers * (forward + backward) + 2.0 * gathered
    return np.where(ranks > 1, np.where(plans.zero == 3, plans.accumulation * every, once), 0.0)


def _of_experts(collective: Collective, nbytes: Amount, links: Links, layout: _Layout, c: Constants) -> Floats:
    """Seconds among the ranks that hold the same experts; none where there are no experts."""
    seconds = collective(nbytes, layout.copies, layout.copies_within, links) / c.network_efficiency
    return np.where(np.asarray(nbytes) > 0, seconds, 0.0)


def _exposed(seconds: Floats, hidden: Floats, c: Constants) -> Floats:
    """Seconds of communication that are not hidden where `hidden` could be: a share never is, the rest if it can."""
    return c.data_exposed * seconds + (1.0 - c.data_exposed) * np.maximum(seconds - hidden, 0.0)


def _optimizer(work: Work, plans: Plans, machine: Machine, software: Software, c: Constants) -> Floats:
    """Memory-bound: reads gradients, reads and writes master copy and moments, writes weights."""
    dense, expert = _held(work, plans)
    shards = np.where(plans.zero >= 1, plans.data * plans.context, 1.0)
    expert_shards = np.where(plans.zero >= 1, np.maximum(plans.data * plans.context // plans.expert, 1), 1.0)
    held = dense / shards + expert / expert_shards
    moved = software.gradient_bytes + software.weight_bytes + 2.0 * software.optimizer_bytes
    rate = machine.gpu.memory_bandwidth_bytes_per_s * c.memory_efficiency
    seconds: Floats = held * moved * c.optimizer_bytes_factor / rate
    return seconds
