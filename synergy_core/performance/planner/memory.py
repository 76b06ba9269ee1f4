"""Memory of plans on one GPU: weights, gradients, optimizer states, activations, and their peak.

Sources: Rajbhandari et al. (arXiv 1910.02054), section 3, for ZeRO; Korthikanti et al. (arXiv 2205.05198), sections
4.1-4.2, for activations and the micro-batches in flight; Narayanan et al. (arXiv 2104.04473), 2.2, for schedules.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from synergy_core.performance.planner.machine import Machine, Software
from synergy_core.performance.planner.plan import Plans
from synergy_core.performance.planner.work import Amount, Block, Work
from synergy_core.units import Floats

CONTEXT_BYTES = 512.0 * 2**20
"""Memory of CUDA's context and loaded kernels, outside the allocator."""
COMMUNICATOR_BYTES = 256.0 * 2**20
"""Memory of NCCL's channel buffers for one process group of several GPUs, outside the allocator."""
FRAGMENTATION = 0.05
"""Extra memory that the caching allocator reserves, as a fraction of the memory that is freed within a step."""
VISIBLE = 1.024**3 * 0.985
"""Bytes that a process can use ÷ `Machine.memory_bytes`: a data sheet's GB are in fact GiB, and driver and ECC tables
take 1.5 % of them."""
INLINE_ECC = 1.0 / 16.0
"""Fraction of GDDR6 memory that check bits take while ECC is on, the default (NVIDIA, nvidia-smi: 15,360 MiB of a T4's
16 GiB, 46,080 of an A40's 48)."""
MARGIN = 0.04
"""Fraction of the visible memory kept free, for prediction errors and fragmentation."""

RESIDENT_LAYERS = 2.0
"""Layers whose activations are on the GPU while they are offloaded: one is computed, and one is copied."""
STATE_BUFFERS = 4.0
"""DeepSpeed's buffers for states on NVMe, each of a sub-group in fp32: offload_optimizer.buffer_count."""
PINNED_ELEMENTS, ELEMENTS_IN_HOST = 5.0 * 1e8, 1e9
"""Weights in the host's buffers, and further weights there, if weights are on NVMe: offload_param.buffer_count ×
buffer_size, and max_in_cpu (deepspeedai/DeepSpeed, docs/_pages/config-json.md)."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on each GPU of the pipeline stage that needs most; arrays (plans,)."""

    weights: Floats
    gradients: Floats
    optimizer: Floats
    """A master copy of the weights, if there is one, and the optimizer's moments."""
    activations: Floats
    """What all micro-batches in flight keep for the backward pass, plus the peak of one block's backward pass."""
    logits: Floats
    """The logits with loss and gradient, if the last stage needs most; else 0."""
    buffers: Floats
    """Gathered layers and gradients under ZeRO-3, a chunk's gradients under ZeRO-2 with stages, DeepSpeed's buckets,
    the libraries' workspace, and the part of the optimizer's temporary array that exceeds what a micro-batch frees."""
    workspace: Floats
    """The part of buffers that stays between steps."""
    groups: NDArray[np.int64]
    """Number of process groups of several GPUs that include the GPU."""
    host: Floats
    """Bytes that the host keeps for the GPU of what is offloaded; of what is on NVMe, only its buffers."""
    gpus: NDArray[np.int64]
    """Number of GPUs of the plan."""

    @property
    def static(self) -> Floats:
        """Bytes that stay allocated between steps."""
        return self.weights + self.gradients + self.optimizer + self.workspace

    @property
    def total(self) -> Floats:
        """The allocator's peak (`torch.cuda.max_memory_allocated`)."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits + self.buffers

    @property
    def reserved(self) -> Floats:
        """Bytes that the allocator reserves (`torch.cuda.max_memory_reserved`)."""
        return self.total + FRAGMENTATION * (self.total - self.static)

    @property
    def outside(self) -> Floats:
        """Bytes outside the allocator: CUDA's context and communicators."""
        return CONTEXT_BYTES + COMMUNICATOR_BYTES * self.groups.astype(np.float64)

    @property
    def needed(self) -> Floats:
        """Bytes that a plan needs to run. Unused reserved memory is not included: the allocator frees it if needed."""
        return self.total + self.outside

    @property
    def device_total(self) -> Floats:
        """Bytes that nvidia-smi shows: what the allocator reserves, and what lies outside the allocator."""
        return self.reserved + self.outside

    def node_host(self, machine: Machine) -> Floats:
        """Bytes that the host of a node keeps: for each of its GPUs as much as for the one that needs most."""
        return self.host * np.minimum(self.gpus, machine.gpus_per_node)

    def fits_host(self, machine: Machine) -> NDArray[np.bool_]:
        """Whether what is offloaded fits into a node's host memory; true if that memory is unknown."""
        return self.node_host(machine) <= (machine.host_bytes or np.inf)

    def fits(self, machine: Machine) -> NDArray[np.bool_]:
        return (self.needed <= usable_bytes(machine)) & self.fits_host(machine)


def usable_bytes(machine: Machine) -> float:
    """The largest `Memory.needed` of a plan that fits: a GPU's visible bytes less `MARGIN`."""
    return (1.0 - MARGIN) * visible_bytes(machine)


def visible_bytes(machine: Machine) -> float:
    """Bytes of one GPU's memory that a process can use, including CUDA's context, as nvidia-smi shows them."""
    return VISIBLE * machine.memory_bytes * (1.0 - INLINE_ECC if machine.gpu.inline_ecc else 1.0)


def memory(work: Work, plans: Plans, software: Software, *, stage: str = "worst") -> Memory:
    """Bytes per GPU of each plan under 1F1B. stage: `worst`, or `first` or `last` to compare with one rank's log."""
    last = plans.pipeline - 1
    ranks = {"first": [np.zeros_like(last)], "last": [last]}.get(stage) or _roles(work, plans)
    best = _of_stage(work, plans, software, ranks[0])
    for rank in ranks[1:]:
        other = _of_stage(work, plans, software, rank)
        wins = other.total > best.total
        host = np.maximum(best.host, other.host)
        merged = {f.name: np.where(wins, getattr(other, f.name), getattr(best, f.name)) for f in fields(Memory)}
        best = Memory(**{**merged, "host": host})
    return best


def _roles(work: Work, plans: Plans) -> list[NDArray[np.int64]]:
    """Ranks of the stages that may need most memory: first, second, last, and those where another type of layer begins.

    Among stages with the same layers, the earliest has most micro-batches in flight.
    """
    last = plans.pipeline - 1
    roles = [np.zeros_like(last), np.minimum(1, last), last]
    begin: Amount = 0.0
    seen = {id(work.layers[0].block)}
    for run in work.layers:
        if id(run.block) not in seen:
            roles.append(np.minimum(np.ceil(begin * plans.pipeline / work.layer_count), last).astype(np.int64))
        seen.add(id(run.block))
        begin = begin + run.count
    return roles


def _cut(work: Work, plans: Plans, software: Software, rank: NDArray[np.int64]) -> Amount:
    """Number of layers before stage `rank`, as Megatron (equal layers) or nanotron (equal compute) cuts them."""
    layers, stages = work.layer_count, plans.pipeline
    if software.supports.weighs_logits:
        every = sum(sum(each.flops for each in run.block.gemms) * run.count for run in work.layers)
        weight = sum(each.flops for each in work.after.gemms) / (every / layers)
        # A stage ends after the block with which its compute exceeds its share.
        cut = np.where(rank > 0, np.floor(rank * (layers + weight) / stages) + 1.0, 0.0)
    else:
        cut = np.ceil(rank * layers / stages)
    return np.where(rank >= stages, layers, np.minimum(cut, layers))


def _in_flight(plans: Plans, rank: NDArray[np.int64]) -> Floats:
    """Micro-batches whose activations stage `rank` of p stages keeps at its peak under 1F1B.

    Without interleaving: p − rank. With v stages per GPU: (2(p − rank − 1) + (v − 1)p + 1) ÷ v, Megatron's warm-up + 1.
    """
    stages, chunks = plans.pipeline, plans.interleave
    after = stages - rank - 1
    one = np.where(chunks > 1, (2 * after + (chunks - 1) * stages + 1) / chunks, after + 1)
    return np.minimum(plans.accumulation, one)


def _of_stage(work: Work, plans: Plans, software: Software, rank: NDArray[np.int64]) -> Memory:
    """Bytes on each GPU of one pipeline stage of each plan. rank: (plans,), the stage, counted from 0."""
    start = _cut(work, plans, software, rank)
    stop = _cut(work, plans, software, rank + 1)
    first, last = rank == 0, rank == plans.pipeline - 1
    held: list[tuple[Block, Amount]] = [(work.before, first * 1.0)]
    begin: Amount = 0.0
    for run in work.layers:
        end = begin + run.count
        held.append((run.block, np.maximum(np.minimum(stop, end) - np.maximum(start, begin), 0.0)))
        begin = end

    flight = _in_flight(plans, rank)
    kept, over, largest = (np.zeros(len(plans)) for _ in range(3))
    for block, count in held:
        one = block.saved.by_plan(plans, software)
        kept = kept + flight * count * one * software.run.trained_fraction
        over = np.maximum(over, np.where(count > 0, block.live_bytes - one, 0.0))
        largest = np.maximum(largest, np.where(count > 0, one, 0.0))
    on_gpu = np.maximum(RESIDENT_LAYERS * largest - (1.0 - software.run.offloaded_fraction) * kept, 0.0)
    host = np.maximum(software.run.offloaded_fraction * kept - on_gpu, 0.0)
    host = host * ("activations" in software.run.offload)
    kept = kept - host
    logits = last * work.after.live_bytes
    # The last block's backward pass begins after the logits are freed, so only the larger of the two counts.
    activations = kept + np.maximum(over - logits, 0.0)

    held.append((work.after, last * 1.0))
    none = np.zeros(len(plans))
    adapted = software.run.adapter_rank
    replicas = plans.data * plans.context
    apart = plans.tensor // plans.expert_tensor(whole=software.communication.whole_experts)
    shards = software.sharing(replicas)
    expert_shards = software.sharing(np.maximum(replicas * apart // plans.expert, 1))

    updated = held if software.run.trains_tables else held[1:-1]
    trained, of_experts = (
        sum((count * block.trained_parameters(software, expert=each) for block, count in updated), none)
        for each in (False, True)
    )

    def split(dense: Amount, of_experts: Amount, from_stage: int) -> Floats:
        is_split = plans.zero >= from_stage
        return dense / np.where(is_split, shards, 1.0) + of_experts / np.where(is_split, expert_shards, 1.0)

    def sharded(bytes_each: float, from_stage: int) -> Floats:
        return bytes_each * split(trained, of_experts, from_stage)

    # Bytes of each block's weights, dense and of experts; embeddings and logits are never quantized.
    edges = [(software.weight_bytes * block.parameters, none) for block in (work.before, work.after)]
    layers = [tuple(block.stored_bytes(software, expert=each) for each in (False, True)) for block, _ in held[1:-1]]
    stored = [edges[0], *layers, edges[1]]
    frozen, of_frozen_experts = (
        sum((weighed[at] * count for weighed, (_, count) in zip(stored, held, strict=True)), none) for at in (0, 1)
    )
    weights, optimizer_bytes = sharded(software.weight_bytes, 3), software.optimizer_bytes
    if software.memory.gathers_from_master:
        weights = np.where(plans.zero >= 3, 0.0, weights)
    if adapted:  # adapters are in fp32, beside frozen weights
        weights = sharded(4.0, 3) + split(frozen, of_frozen_experts, 3)
        optimizer_bytes = software.memory.state_bytes
    elif not software.run.trains_tables:
        rest = (frozen - software.weight_bytes * trained, of_frozen_experts - software.weight_bytes * of_experts)
        weights = weights + split(*rest, 3)
    tower = first * work.tower.count * work.tower.block.parameters if work.tower else none
    weights = weights + split(software.weight_bytes * tower, none, 3)
    third = plans.zero >= 3
    if "parameters" in software.run.offload:  # a single GPU runs DeepSpeed's stage 3 too
        third, away, weights = third | (replicas == 1), weights, none
        if "nvme" in software.run.offload:
            away = software.weight_bytes * PINNED_ELEMENTS + np.minimum(away, software.weight_bytes * ELEMENTS_IN_HOST)
        host = host + away
    unit, unit_bytes = none, none
    for (block, count), weighed in zip(held, stored, strict=True):
        unit = np.maximum(unit, np.where(count > 0, block.parameters + block.expert_parameters, 0.0))
        unit_bytes = np.maximum(unit_bytes, np.where(count > 0, sum(weighed), 0.0))
    live = software.memory.prefetch * unit_bytes
    if software.memory.live_elements:
        each = software.run.frozen_bytes if adapted else software.weight_bytes
        live = np.minimum(np.maximum(each * software.memory.live_elements, unit_bytes), frozen + of_frozen_experts)
    live_bytes = live + software.gradient_bytes * unit * (adapted == 0)
    gathered = np.where(third & ((shards > 1) | ("parameters" in software.run.offload)), live_bytes, 0.0)
    whole, own = software.gradient_bytes * (trained + of_experts), sharded(software.gradient_bytes, 2)
    gradients = own
    if (
        software.communication.sums_whole
    ):  # in the weights' format, beside the shards into which the last micro-batch reduces them
        summed = gradients + software.weight_bytes * (trained + of_experts)
        gradients = np.where((plans.zero >= 2) & (plans.accumulation > 1), summed, gradients)
    # With stages, the gradients of a chunk are scattered once all micro-batches have passed it.
    chunk = np.minimum(whole / plans.interleave, whole - gradients)
    gathered = gathered + np.where((plans.zero >= 2) & (plans.pipeline > 1), chunk, 0.0)
    # DeepSpeed sends gradients to the host through its buckets, on one GPU too.
    is_offloaded = "optimizer" in software.run.offload
    through_host = is_offloaded & (software.memory.bucket_elements > 0) & (shards == 1)
    in_buckets = (plans.zero >= 1) & (shards > 1) | through_host
    per_gradient = np.where(third, 1.0, 2.0) * software.sent_gradient_bytes
    buckets = np.where(in_buckets, software.memory.bucket_elements * per_gradient, 0.0)
    # After the activations are freed, foreach kernels make an fp32 array of a state, and DeepSpeed one of gradients.
    foreach = 4.0 if software.eager and software.memory.foreach else 0.0
    per_updated = 0.0 if is_offloaded else software.memory.update_bytes + foreach
    step = sharded(per_updated, 1)
    if software.memory.update_elements:
        step = np.where(plans.zero >= 3, np.minimum(step, per_updated * software.memory.update_elements), step)
    spare = np.maximum(step - activations - logits - gathered, 0.0)
    local = [np.where(count > 0, gemm.count, 0.0) for block, count in held for gemm in block.gemms if gemm.expert]
    grouped = np.max([np.zeros(len(plans)), *local], axis=0) > 1.0  # several experts on a GPU
    workspace = software.memory.workspace_bytes + software.memory.grouped_bytes * grouped
    if adapted and software.run.frozen_bytes < software.weight_bytes:  # the largest matrix, written out in 16 bits
        sizes = [
            np.where(count > 0, gemm.n * gemm.k / gemm.parts, 0.0)
            for block, count in held[1:-1]
            for gemm in block.gemms
        ]
        workspace = workspace + software.weight_bytes * np.max([none, *sizes], axis=0)
    groups = sum(np.asarray(each > 1, np.int64) for each in (plans.tensor, plans.pipeline, plans.context, plans.data))
    moved = np.where(is_offloaded & (plans.zero >= 2) | through_host, own, 0.0)
    states = sharded(optimizer_bytes, 1)
    away = (states + moved) * is_offloaded
    if "nvme" in software.run.offload:
        away = np.minimum(
            away, STATE_BUFFERS * np.minimum(sharded(4.0, 1), 4.0 * (software.memory.update_elements or np.inf))
        )
    return Memory(
        weights=weights,
        gradients=gradients - moved,
        optimizer=states * (not is_offloaded),
        activations=activations,
        logits=none + logits,
        buffers=workspace + gathered + buckets + spare,
        workspace=workspace,
        groups=groups + (plans.expert > 1),
        host=host + away,
        gpus=plans.gpus,
    )
