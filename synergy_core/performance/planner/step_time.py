"""Predicts how long a training step takes under each plan, part by part. docs/planner.md has the formulas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from synergy_core.performance.planner.communication import (
    PlannedRuns,
    ReplicaTerms,
    all_reduce_s,
    all_to_all_s,
    held,
    replica_exchange_s,
    send_s,
)
from synergy_core.performance.planner.machine import Constants, Machine, Software
from synergy_core.performance.planner.plan import Plans, Recompute
from synergy_core.performance.planner.work import Block, Work, block_time
from synergy_core.units import Floats

HOST_UPDATE_S = 8.5e-10
"""Seconds per parameter for the eight CPU threads of one GPU to update an offloaded optimizer."""
HOST_COPY_EFFICIENCY = 0.44
"""Fraction of PCIe's rate at which an offloaded step copies a GPU's gradients before they are sharded.

Both constants are fitted to Rubick's rows of bert and gpt2, by least squares of log(predicted ÷ measured).
docs/accuracy_planner.md has their errors on other models.
"""
NVME_BYTES_PER_S = 1.6e9
"""Assumed rate at which each GPU reads or writes NVMe drives while all of its node do: that of a DGX-2 (ZeRO-Infinity,
arXiv 2104.07857, figure 2b). Not fitted to anything."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step on the slowest stage, (plans,) each. The parts add up to total_s."""

    total_s: Floats
    """The whole step."""
    compute_s: Floats
    """Forward and backward passes of all micro-batches, or the copies over PCIe that a pass waits for."""
    recompute_s: Floats
    """Recomputed forward passes."""
    bubble_s: Floats
    """Filling and draining the pipeline."""
    tensor_s: Floats
    """Collectives of tensor parallelism that do not overlap with computation."""
    context_s: Floats
    """Exchanges of context parallelism that do not overlap with computation."""
    expert_s: Floats
    """All-to-alls of expert parallelism."""
    pipeline_s: Floats
    """Activations sent between stages."""
    data_s: Floats
    """Exchange of gradients and weights between replicas that does not overlap with computation."""
    optimizer_s: Floats
    """Update of the weights, with the copies of an offloaded optimizer."""
    other_s: Floats
    """Fixed cost of a step."""


@dataclass(frozen=True, slots=True)
class Computation:
    """A step under each plan without the exchange between replicas, which depends on the compressor.

    hidden_s: (2, plans), forward and backward seconds that the exchange may overlap with. seconds: (plans,), by field
    of `StepTime`; 0 for data_s.
    """

    work: Work
    runs: PlannedRuns
    hidden_s: Floats
    seconds: Mapping[str, Floats]

    def step_time(self, terms: ReplicaTerms | None = None) -> StepTime:
        """The step time including the exchange between replicas. terms: None for uncompressed gradients."""
        forward_s, backward_s = self.hidden_s
        data_s = replica_exchange_s(self.work, self.runs, forward_s, backward_s, terms)
        parts = {**self.seconds, "data_s": data_s}
        return StepTime(total_s=np.asarray(sum(parts.values())), **parts)


def step_time(work: Work, plans: Plans, machine: Machine, software: Software, c: Constants) -> StepTime:
    """Seconds of a step under each plan with uncompressed gradients."""
    return computation(work, plans, machine, software, c).step_time()


def computation(work: Work, plans: Plans, machine: Machine, software: Software, c: Constants) -> Computation:
    """Computes all parts of a step except the exchange between replicas.

    With m micro-batches and v interleaved stages per GPU, a 1F1B pipeline takes m × the slowest stage plus the sum of
    all other stages ÷ v (Narayanan et al., arXiv 2104.04473, section 2.2).
    """
    runs = PlannedRuns(plans, machine, software, c)
    m, pp, v = (each.astype(float) for each in (plans.accumulation, plans.pipeline, plans.interleave))
    slowest, others = _slowest_stage(work, runs)
    forward, backward, again, tensor, context, expert = slowest
    # Without sequence parallelism each tensor-parallel rank holds the whole activation and sends 1/tensor of it.
    sent = work.layers[0].block.boundary_bytes / np.where(plans.sequence, 1.0, plans.tensor)
    hop = send_s(sent, runs.pipeline_within, runs.links)
    # The optimizer is memory-bound: it reads gradients, reads and writes master copy and moments, and writes weights.
    dense, of_experts = held(work, plans, software)
    shards = np.where(plans.zero >= 1, runs.shards, 1.0)
    expert_shards = np.where(plans.zero >= 1, runs.copies, 1.0)
    per_parameter = software.gradient_bytes + software.weight_bytes + 2.0 * software.optimizer_bytes
    updated = dense / shards + of_experts / expert_shards
    memory_bytes_per_s = machine.gpu.memory_bandwidth_bytes_per_s * c.memory_efficiency
    optimizer_s = updated * per_parameter * c.optimizer_bytes_factor / memory_bytes_per_s
    if "optimizer" in software.run.offload:
        # DeepSpeed copies what it reduces, as HOST_COPY_EFFICIENCY was fitted; others only their part.
        copied = (dense + of_experts if software.memory.bucket_elements else updated) * software.gradient_bytes
        optimizer_s = updated * HOST_UPDATE_S + copied / (machine.gpu.pcie_bytes_per_s * HOST_COPY_EFFICIENCY)
        if "nvme" in software.run.offload:  # states and fp32 gradients are read and written (ZeRO-Infinity, section 4)
            optimizer_s = optimizer_s + updated * 2.0 * (software.optimizer_bytes + 4.0) / NVME_BYTES_PER_S
    seconds = {
        "compute_s": m * (forward + backward),
        "recompute_s": m * again,
        "tensor_s": m * tensor,
        "context_s": m * context,
        "expert_s": m * expert,
        "bubble_s": others / v,
        "pipeline_s": np.where(pp > 1, 2.0 * hop * (m * v + pp - 1.0), 0.0),
        "data_s": np.zeros(len(plans)),
        "optimizer_s": optimizer_s,
        "other_s": np.full(len(plans), c.step_s),
    }
    hidden_s = np.stack([c.data_overlap * forward, c.data_overlap * (backward + again)])
    return Computation(work, runs, hidden_s, seconds)


def _slowest_stage(work: Work, runs: PlannedRuns) -> tuple[Floats, Floats]:
    """Seconds of a micro-batch on the slowest stage, (6, plans) as in `_block_s`, and the others' total, (plans,).

    Layers are spread evenly over stages. The first stage also has the embedding, the last the logits, alone in a chunk
    if there are more chunks than layers; neither is recomputed.
    """
    plans, count = runs.plans, np.asarray(work.layer_count, float)
    before, after = (_block_s(each, runs, is_layer=False) for each in (work.before, work.after))
    if work.tower:
        before[0] += _block_s(work.tower.block, runs, is_layer=False)[0] * work.tower.count
    layers = sum(_block_s(run.block, runs, is_layer=True) * run.count for run in work.layers)
    layer = layers * (1.0 / count)
    chunks = (plans.pipeline * plans.interleave).astype(float)
    most = np.minimum(np.ceil(count / chunks) * plans.interleave, count)
    least = np.where(chunks > count, most - 1.0, np.floor(count / chunks) * plans.interleave)
    stages = layer * most, layer * most + before, layer * least + after
    slowest = np.choose(np.argmax([sum(each) for each in stages], axis=0), stages)
    whole = layers + before + after
    chosen = np.where(plans.pipeline > 1, slowest, whole)
    return chosen, np.maximum(sum(whole) - sum(chosen), 0.0)


def _block_s(block: Block, runs: PlannedRuns, *, is_layer: bool) -> Floats:
    """Seconds (6, plans) of a block: forward, backward, recomputation, tensor, context and expert collectives."""
    plans, c, links = runs.plans, runs.constants, runs.links
    gpu = block_time(block, runs.machine, runs.software, c)
    one = all_reduce_s(block.tensor_bytes, plans.tensor, runs.tensor_within, links) * (1.0 / c.tensor_efficiency)
    tensor = np.where(plans.tensor > 1, one * block.tensor_count, 0.0)
    # A rank's keys and values visit all others, each while attention to those before is computed (Liu et al., arXiv
    # 2310.01889, section 3).
    sent = np.asarray(block.context_bytes) * (plans.context - 1.0)
    beside = gpu.attention_s * (1.0 - 1.0 / plans.context)
    ring = np.maximum(send_s(sent, runs.context_within == plans.context, links) - beside, 0.0)
    if by_heads := runs.software.communication.cp_comm_type == "a2a":  # of queries, keys, values and outputs
        quarter = 0.25 * np.asarray(block.context_bytes)
        ring = 4.0 * all_to_all_s(quarter, plans.context, runs.context_within, links)
    context = np.where((plans.context > 1) & is_layer, ring, 0.0)
    expert = _all_to_all_s(block, runs) * block.all_to_all.count
    collectives = (plans.tensor > 1) * np.asarray(block.tensor_count, float)

    # Input gradients are reduced while weight gradients are computed. Under sequence parallelism, half of what a
    # backward pass sends is the gather of output gradients, which does not overlap.
    hidden = (
        np.minimum(tensor, gpu.weights_s)
        * np.where(plans.sequence, 0.5, 1.0)
        * runs.software.communication.async_tensor
    )

    def bound(seconds: Floats, kernels: Floats, tensor: Floats) -> Floats:
        """Seconds of a pass without the collectives. The host launches kernels ahead, so the longer time counts."""
        on_gpu = seconds + kernels * c.kernel_s + tensor
        on_host = (kernels + collectives) * c.host_s * (1.0 + c.host_jitter * np.log2(plans.tensor))
        longer: Floats = np.maximum(on_gpu, on_host)
        return longer - tensor

    forward = bound(gpu.forward_s, gpu.forward_kernels, tensor)
    # No backward pass runs through frozen first layers, and frozen logits have no weight gradients.
    own = runs.software.run.trained_fraction if is_layer else 1.0
    frozen_s = gpu.weights_s * (not is_layer and not runs.software.run.trains_tables)
    backward = own * bound(gpu.backward_s - frozen_s, gpu.backward_kernels, tensor - hidden)
    passes, again = np.full(len(plans), Recompute.NONE.passes), np.zeros(len(plans))
    if is_layer:
        core = 0.0 if runs.software.flash else gpu.attention_s
        seconds = {
            Recompute.NONE: again,
            Recompute.SELECTIVE: gpu.attention_s,
            Recompute.FULL: forward,
            Recompute.OPERATORS: 0.5 * (gpu.forward_s - gpu.attention_s),
            Recompute.MODULES: gpu.modules_s + core + np.where(plans.tensor > 1, one * block.again_count, 0.0),
        }
        part = runs.software.run.recomputed_fraction
        passes = part * plans.passes + (1.0 - part) * Recompute.NONE.passes
        again = part * own * np.choose(plans.recompute, [seconds[each] for each in Recompute])
    tensor, context = tensor * (passes - 1.0) - hidden, context * (passes - by_heads)
    weights_s, kept_s = _copied_s(block, runs, is_layer=is_layer)
    forward, backward = np.maximum(forward, weights_s + kept_s), np.maximum(backward, own * weights_s + kept_s - again)
    parts = (forward, backward, again, tensor, context, expert * (passes - 1.0))
    return np.stack([np.broadcast_to(each, (len(plans),)) for each in parts])


def _copied_s(block: Block, runs: PlannedRuns, *, is_layer: bool) -> tuple[Floats, Floats]:
    """Seconds (plans,) to copy a block's weights, and what it keeps for the backward pass, if the host has them.

    Each rank reads its own part of the weights, which FSDP keeps in fp32 (ZeRO-Infinity, arXiv 2104.07857, section
    6.1). Copies run beside the computation of the same pass.
    """
    software, rate = runs.software, runs.machine.gpu.pcie_bytes_per_s * HOST_COPY_EFFICIENCY
    weights_s = kept_s = np.zeros(len(runs.plans))
    if "parameters" in software.run.offload:
        own = block.stored_bytes(software, expert=False) / runs.shards
        own = own + block.stored_bytes(software, expert=True) / runs.copies
        own = own * (
            4.0 / software.weight_bytes
            if software.memory.gathers_from_master and not software.run.adapter_rank
            else 1.0
        )
        weights_s = own / (min(rate, NVME_BYTES_PER_S) if "nvme" in software.run.offload else rate)
    if "activations" in software.run.offload and is_layer:
        fraction = software.run.offloaded_fraction * software.run.trained_fraction
        kept_s = fraction * np.asarray(block.saved.by_plan(runs.plans, software)) / rate
    return weights_s, kept_s


def _all_to_all_s(block: Block, runs: PlannedRuns) -> Floats:
    """Seconds (plans,) of sending tokens to their experts once.

    If a token is sent to each node only once (`sends_once`), its copies reach n (1 − (1 − 1/n)^copies) of the n nodes
    that may have its experts, on average. These nodes then forward the copies to their GPUs.
    """
    expert, links, within = runs.plans.expert, runs.links, runs.expert_within
    sent = np.asarray(block.all_to_all.sent_bytes, float)
    if not runs.software.communication.sends_once:
        return np.where(expert > 1, all_to_all_s(sent, expert, within, links), 0.0)
    nodes = np.maximum(expert / within, 1.0)
    copies = np.maximum(np.asarray(block.all_to_all.copies, float), 1.0)
    reached = np.maximum(nodes * block.all_to_all.reach, 1.0)
    once = reached * (1.0 - (1.0 - 1.0 / reached) ** copies) / copies
    between = all_to_all_s(sent * np.minimum(once, 1.0), expert, within, links)
    inside = all_to_all_s(sent, within, within, links)
    return np.where(expert > 1, np.where(nodes > 1, between + inside, inside), 0.0)
