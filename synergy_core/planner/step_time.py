"""How long a training step takes under each plan, and where the time goes. docs/planner.md has the formulas."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
from synergy_core.planner.plan import Plans
from synergy_core.planner.software import Software
from synergy_core.planner.work import Block, Work

Floats = NDArray[np.float64]


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

    def times(self, factor: Floats) -> _Part:
        return _Part(*(getattr(self, name) * factor for name in _Part.__slots__))


def step_time(work: Work, plans: Plans, machine: Machine, software: Software, c: Constants) -> StepTime:
    """Seconds of a step under each plan."""
    links = links_for(machine)
    shape = _Layout(plans, machine.gpus_per_node)
    before = _part(work.before, plans, machine, software, c, links, shape)
    after = _part(work.after, plans, machine, software, c, links, shape)
    pp, v = plans.pipeline.astype(float), plans.interleave.astype(float)
    m = plans.accumulation.astype(float)
    # Layers alike: each stage has at most ceil(L / (p·v)) of them v times.
    layers = _part(work.layers[0].block, plans, machine, software, c, links, shape)
    count = np.asarray(work.layer_count, float)
    most = np.ceil(count / (pp * v)) * v
    if len(work.layers) > 1:  # runs that differ: cut where the load is even, the mean block standing for all
        total = layers.times(np.asarray(work.layers[0].count, float))
        for each in work.layers[1:]:
            total = total + _part(each.block, plans, machine, software, c, links, shape).times(np.asarray(each.count, float))
        layers = total.times(1.0 / count)
    middle = layers.times(np.minimum(most, count))
    first, last = middle + before, middle + after
    alone = pp == 1
    stages = [middle, first, last]
    totals = np.stack([each.total for each in stages])
    totals[:, alone] = (middle + before + after).total[alone]
    slowest = totals.max(axis=0)
    which = totals.argmax(axis=0)
    whole = middle + before + after
    chosen = {
        name: np.where(alone, getattr(whole, name), np.choose(which, [getattr(each, name) for each in stages]))
        for name in _Part.__slots__
    }
    # Through the pipeline once, beside the slowest stage: all others (interleaved: 1/v of each).
    others = np.where(alone, 0.0, totals[1] + totals[2] + np.maximum(pp - 2.0, 0.0) * totals[0] - slowest)
    others = np.where(pp == 2, totals[1] + totals[2] - slowest, others)
    bubble = others / v
    boundary = np.asarray(work.layers[0].block.boundary_bytes, float) / np.where(plans.sequence, 1.0, plans.tensor)
    hop = send_s(boundary, shape.pipeline_within, links)
    pipeline = np.where(alone, 0.0, 2.0 * hop * (m * v + pp - 1.0))
    data, gathers = _data(work, plans, machine, software, c, links, shape, most, m, slowest, chosen)
    optimizer = _optimizer(work, plans, machine, software, c, most)
    parts = {
        "compute_s": m * (chosen["forward"] + chosen["backward"]),
        "recompute_s": m * chosen["again"],
        "tensor_s": m * chosen["tensor"],
        "context_s": m * chosen["context"],
        "expert_s": m * chosen["expert"],
        "bubble_s": bubble,
        "pipeline_s": pipeline,
        "data_s": data + gathers,
        "optimizer_s": optimizer,
        "other_s": np.full(len(plans), c.step_s),
    }
    total = np.zeros(len(plans))
    for each in parts.values():
        total = total + each
    return StepTime(total_s=total, **{name: np.broadcast_to(each, total.shape) for name, each in parts.items()})


class _Layout:
    """Where the ranks of each group are: tensor innermost, then context, data, pipeline outermost."""

    def __init__(self, plans: Plans, per_node: int) -> None:
        def within(degree: NDArray[np.int64], stride: NDArray[np.int64]) -> NDArray[np.int64]:
            return np.minimum(degree, np.maximum(per_node // stride, 1))

        one = np.ones_like(plans.tensor)
        self.tensor_within = within(plans.tensor, one)
        self.context_within = within(plans.context, plans.tensor)
        self.data_ranks = plans.data * plans.context
        self.data_within = within(self.data_ranks, plans.tensor)
        self.expert_within = within(plans.expert, plans.tensor)
        replica = plans.tensor * plans.context * plans.data
        self.pipeline_within = (replica * 2 <= per_node) & (per_node % replica == 0)


def _part(
    block: Block, plans: Plans, machine: Machine, software: Software, c: Constants, links: Links, shape: _Layout
) -> _Part:
    """One block: the host launches its kernels while the GPU runs them, so that the slower of both counts."""
    gpu = block_time(block, machine, software, c)
    slow = 1.0 / c.tensor_efficiency
    one = all_reduce_s(block.tensor_bytes, plans.tensor, shape.tensor_within, links) * slow
    tensor = np.where(plans.tensor > 1, one * block.tensor_count, 0.0)
    ring = send_s(np.asarray(block.context_bytes) * (plans.context - 1) / np.maximum(plans.context, 1),
                  shape.context_within == plans.context, links)
    context = np.where(plans.context > 1, ring, 0.0)
    expert = np.where(
        plans.expert > 1, all_to_all_s(block.expert_bytes, plans.expert, shape.expert_within, links) * block.expert_count, 0.0
    )
    full, selective = plans.recompute == 2, plans.recompute == 1
    collectives = (plans.tensor > 1) * np.asarray(block.tensor_count, float)

    def bound(seconds: Floats, kernels: Floats) -> Floats:
        """The GPU's work with the host's launches, which overlap in part: the norm of both, beside the collectives."""
        on_gpu = seconds + kernels * c.kernel_s + tensor
        on_host = (kernels + collectives) * c.host_s * (1.0 + c.host_jitter * np.log2(plans.tensor))
        return (on_gpu**c.launch_norm + on_host**c.launch_norm) ** (1.0 / c.launch_norm) - tensor

    forward = bound(gpu.forward_s, gpu.forward_kernels)
    backward = bound(gpu.backward_s, gpu.backward_kernels)
    again = np.where(full, forward, np.where(selective, gpu.attention_s, 0.0))
    if block.name in ("embedding", "logits"):
        again = np.zeros_like(forward)
        full = np.zeros_like(full)
    zeros = np.zeros(len(plans))
    return _Part(
        forward=forward + zeros,
        backward=backward + zeros,
        again=again + zeros,
        tensor=tensor * np.where(full, 3.0, 2.0) + zeros,
        context=context * np.where(full, 4.0, 3.0) + zeros,
        expert=expert * np.where(full, 3.0, 2.0) + zeros,
    )


def _held(work: Work, plans: Plans, most: Floats) -> tuple[Floats, Floats]:
    """(plans,) twice: parameters of the largest stage on one GPU before ZeRO, dense and expert."""
    dense: Floats = np.zeros(len(plans))
    expert: Floats = np.zeros(len(plans))
    count = np.asarray(work.layer_count, float)
    for each in work.layers:
        share = np.minimum(most, count) * each.count / count
        dense = dense + share * each.block.parameters
        expert = expert + share * each.block.expert_parameters
    ends = np.asarray(work.before.parameters, float), np.asarray(work.after.parameters, float)
    edge = np.where(plans.pipeline == 1, ends[0] + ends[1], np.maximum(ends[0], ends[1]))
    return dense + edge, expert


def _data(
    work: Work,
    plans: Plans,
    machine: Machine,
    software: Software,
    c: Constants,
    links: Links,
    shape: _Layout,
    most: Floats,
    m: Floats,
    stage_s: Floats,
    chosen: dict[str, Floats],
) -> tuple[Floats, Floats]:
    """Exposed seconds of gradient reduction, and of gathering weights under ZeRO-3."""
    dense, expert = _held(work, plans, most)
    ranks, within = shape.data_ranks, shape.data_within
    gradients, weights = dense * software.gradient_bytes, dense * software.weight_bytes
    sharded = plans.zero >= 1
    whole = all_reduce_s(gradients, ranks, within, links)
    split = reduce_scatter_s(gradients, ranks, within, links) + all_gather_s(weights, ranks, within, links)
    copies = np.maximum(ranks // plans.expert, 1)
    own = all_reduce_s(expert * software.gradient_bytes, copies, np.minimum(copies, within), links)
    seconds = np.where(sharded, split, whole) / c.network_efficiency + own / c.network_efficiency
    backward = chosen["backward"] + chosen["again"]
    exposed = np.maximum(seconds - c.data_overlap * backward, 0.0) + c.data_exposed * seconds
    fully = plans.zero == 3
    exposed = np.where((ranks > 1) & ~fully, exposed, 0.0)
    # ZeRO-3: each layer's weights are gathered forward and backward, its gradients scattered, every micro-batch.
    unit = work.layers[0].block
    layer_weights = np.asarray(unit.parameters, float) * software.weight_bytes
    gather = all_gather_s(layer_weights, ranks, within, links) / c.network_efficiency
    scatter = reduce_scatter_s(np.asarray(unit.parameters, float) * software.gradient_bytes, ranks, within, links)
    scatter = scatter / c.network_efficiency
    count = np.maximum(most, 1.0)
    forward_layer = (chosen["forward"]) / count
    backward_layer = (chosen["backward"] + chosen["again"]) / count
    each = np.maximum(gather - c.data_overlap * forward_layer, 0.0)
    each = each + np.maximum(gather + scatter - c.data_overlap * backward_layer, 0.0)
    each = each + c.data_exposed * (2.0 * gather + scatter)
    gathers = np.where(fully & (ranks > 1), m * (count * each + 2.0 * gather), 0.0)
    return exposed, gathers


def _optimizer(
    work: Work, plans: Plans, machine: Machine, software: Software, c: Constants, most: Floats
) -> Floats:
    """Memory-bound: reads gradients, reads and writes master copy and moments, writes weights."""
    dense, expert = _held(work, plans, most)
    shards = np.where(plans.zero >= 1, plans.data * plans.context, 1.0)
    expert_shards = np.where(plans.zero >= 1, np.maximum(plans.data * plans.context // plans.expert, 1), 1.0)
    held = dense / shards + expert / expert_shards
    moved = software.gradient_bytes + software.weight_bytes + 2.0 * software.optimizer_bytes
    rate = machine.gpu.memory_bandwidth_bytes_per_s * c.memory_efficiency
    seconds: Floats = held * moved * c.optimizer_bytes_factor / rate
    return seconds
