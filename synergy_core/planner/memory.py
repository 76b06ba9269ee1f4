"""Memory of plans: what one GPU holds of weights, gradients, optimizer and activations, and the most it needs at once.

Rajbhandari et al. (arXiv 1910.02054), section 3, for what ZeRO shards; Korthikanti et al. (arXiv 2205.05198), sections
4.1-4.2, for activations and the micro-batches in flight; Narayanan et al. (arXiv 2104.04473), 2.2, for schedules.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from synergy_core.arrays import Floats
from synergy_core.errors import InputError
from synergy_core.planner.machine import Machine
from synergy_core.planner.plan import Plans, Recompute
from synergy_core.planner.software import Software
from synergy_core.planner.work import Amount, Block, Work

MIB = float(2**20)

CONTEXT_BYTES = 512.0 * MIB
"""CUDA's context and loaded kernels: outside the allocator."""

COMMUNICATOR_BYTES = 256.0 * MIB
"""NCCL's channel buffers of one process group of several GPUs: outside the allocator."""

FRAGMENTATION = 0.05
"""What the caching allocator reserves beside the memory that comes and goes within a step, as a part of that."""

VISIBLE = 1.024**3 * 0.985
"""Bytes that a process sees ÷ a data sheet's: its gigabytes are binary (1.024³ decimal), less what driver and ECC
tables keep."""

INLINE_ECC = 1.0 / 16.0
"""The part of GDDR6 memory that check bits take while ECC is on, as it is by default (NVIDIA, nvidia-smi: 15,360 MiB
of a T4's 16 GiB, 46,080 of an A40's 48)."""

MARGIN = 0.04
"""The part of the visible memory that no plan may need: for the figures' error, and blocks too split to use."""


SCHEDULES = ("1f1b", "gpipe")

STAGES = ("worst", "first", "last")
"""The pipeline stages that `memory` can be asked about."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on each GPU of the pipeline stage that needs the most; arrays (plans,).

    gradients: where they are summed over micro-batches. optimizer: fp32 master copy and moments. activations: kept for
    the backward pass by all micro-batches in flight, and what a block's backward pass needs on top of them. logits: of
    the last stage, with their loss and gradient; 0 where another stage is the worst. buffers: gathered layers and
    gradients under ZeRO-3, libraries' workspace, the optimizer's temporary where it is more than all that a micro-batch
    needs. workspace: the part of buffers that stays between steps. groups: process groups of several GPUs that a GPU is
    in.
    """

    weights: Floats
    gradients: Floats
    optimizer: Floats
    activations: Floats
    logits: Floats
    buffers: Floats
    workspace: Floats
    groups: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.weights)

    @property
    def static(self) -> Floats:
        """What stays between steps: weights, gradients, optimizer, workspace."""
        return self.weights + self.gradients + self.optimizer + self.workspace

    @property
    def total(self) -> Floats:
        """The allocator's peak (`torch.cuda.max_memory_allocated`)."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits + self.buffers

    @property
    def reserved(self) -> Floats:
        """What the allocator holds to serve that peak (`torch.cuda.max_memory_reserved`)."""
        return self.total + FRAGMENTATION * (self.total - self.static)

    @property
    def outside(self) -> Floats:
        """What the allocator does not know of: CUDA's context, communicators."""
        return CONTEXT_BYTES + COMMUNICATOR_BYTES * self.groups.astype(np.float64)

    @property
    def needed(self) -> Floats:
        """What must be there: the peak, and what is outside the allocator.

        The peak, not what is reserved: short of memory, the allocator gives back what it only reserved.
        """
        return self.total + self.outside

    @property
    def device_total(self) -> Floats:
        """What nvidia-smi shows: reserved by the allocator, and outside it."""
        return self.reserved + self.outside

    def fits(self, machine: Machine) -> NDArray[np.bool_]:
        """(plans,): whether what is needed is usable."""
        return self.needed <= usable_bytes(machine)


def visible_bytes(machine: Machine) -> float:
    """The most bytes of one GPU's memory that a process can have, CUDA's context included: what nvidia-smi shows."""
    result: float = VISIBLE * machine.memory_bytes * (1.0 - INLINE_ECC if machine.gpu.inline_ecc else 1.0)
    return result


def usable_bytes(machine: Machine) -> float:
    """The most bytes of one GPU that a plan may need (`Memory.needed`): what is visible, less a margin."""
    return (1.0 - MARGIN) * visible_bytes(machine)


def memory(
    work: Work,
    plans: Plans,
    software: Software,
    *,
    layers_first: Amount | None = None,
    schedule: str = "1f1b",
    stage: str = "worst",
) -> Memory:
    """Bytes per GPU of each plan.

    layers_first: layers of the first stage, where given; the others share the rest. schedule: `1f1b` (interleaved where
    the plan says so) or `gpipe`, which keeps every micro-batch of a step. stage: `worst`, or only the `first` or the
    `last`, to compare with a log of one rank. Raises InputError for another schedule or stage.
    """
    if schedule not in SCHEDULES:
        raise InputError(f"schedule '{schedule}' is unknown; expected one of {', '.join(SCHEDULES)}.")
    if stage not in STAGES:
        raise InputError(f"stage '{stage}' is unknown; expected one of {', '.join(STAGES)}.")
    last = plans.pipeline - 1
    ranks = {"first": [np.zeros_like(last)], "last": [last]}.get(stage) or _roles(work, plans)
    best = _of_stage(work, plans, software, ranks[0], layers_first, schedule)
    for rank in ranks[1:]:
        best = _larger(best, _of_stage(work, plans, software, rank, layers_first, schedule))
    return best


def _roles(work: Work, plans: Plans) -> list[NDArray[np.int64]]:
    """The stages that may be the worst: first, second, last, and the first to begin with each other kind of block.

    Among stages with the same layers, an earlier one has more micro-batches in flight.
    """
    last = plans.pipeline - 1
    roles = [np.zeros_like(last), np.minimum(1, last), last]
    begin: Amount = 0.0
    seen: list[Block] = []
    for run in work.layers:
        if seen and not any(run.block is each for each in seen):
            roles.append(np.minimum(np.ceil(begin * plans.pipeline / work.layer_count), last).astype(np.int64))
        seen.append(run.block)
        begin = begin + run.count
    return roles


def _larger(one: Memory, other: Memory) -> Memory:
    """Per plan, the one with the larger peak."""
    wins = other.total > one.total
    return Memory(*(np.where(wins, getattr(other, each.name), getattr(one, each.name)) for each in fields(Memory)))


def _cut(work: Work, plans: Plans, software: Software, rank: NDArray[np.int64], layers_first: Amount | None) -> Amount:
    """Layers on the stages before `rank`, as Megatron (equal shares) or nanotron (equal compute) cuts them."""
    layers, stages = work.layer_count, plans.pipeline
    if layers_first is not None:
        rest = (layers - np.asarray(layers_first, float)) / np.maximum(stages - 1, 1)
        cut = np.where(rank > 0, layers_first + np.ceil(np.maximum(rank - 1, 0) * rest), 0.0)
    elif software.weighs_logits:
        weight = _flops(work.after) / (sum(_flops(run.block) * run.count for run in work.layers) / layers)
        # A stage ends with the block that passes its share.
        cut = np.where(rank > 0, np.floor(rank * (layers + weight) / stages) + 1.0, 0.0)
    else:
        cut = np.ceil(rank * layers / stages)
    result: Amount = np.where(rank >= stages, layers, np.minimum(cut, layers))
    return result


def _flops(block: Block) -> Amount:
    """FLOPs of the block's matrix products in the forward pass."""
    return sum((each.flops for each in block.gemms), 0.0)


def _in_flight(plans: Plans, rank: NDArray[np.int64], schedule: str) -> Floats:
    """Micro-batches whose activations a stage keeps at its peak; a fraction where stages are interleaved.

    1F1B: p − rank. Interleaved, in chunks of 1/v of the stage: 2(p − rank − 1) + (v − 1)p + 1 (Megatron's warm-up and
    one more), on the first stage 1 + (p − 1)/(p v) of all layers. Never more than there are.
    """
    stages, chunks = plans.pipeline, plans.interleave
    after = stages - rank - 1
    one = np.where(chunks > 1, (2 * after + (chunks - 1) * stages + 1) / chunks, after + 1)
    result: Floats = np.minimum(plans.accumulation, np.inf if schedule == "gpipe" else one)
    return result


def _of_stage(
    work: Work,
    plans: Plans,
    software: Software,
    rank: NDArray[np.int64],
    layers_first: Amount | None,
    schedule: str,
) -> Memory:
    """Bytes per GPU of the stage `rank` (plans,) of each plan."""
    start = _cut(work, plans, software, rank, layers_first)
    stop = _cut(work, plans, software, rank + 1, layers_first)
    first, last = rank == 0, rank == plans.pipeline - 1
    held: list[tuple[Block, Amount]] = [(work.before, first * 1.0)]
    begin: Amount = 0.0
    for run in work.layers:
        end = begin + run.count
        held.append((run.block, np.maximum(np.minimum(stop, end) - np.maximum(start, begin), 0.0)))
        begin = end

    flight = _in_flight(plans, rank, schedule)
    kept, over = np.zeros(len(plans)), np.zeros(len(plans))
    for block, count in held:
        one = np.choose(plans.recompute, _broad(plans, *(block.kept_bytes(each) for each in Recompute)))
        kept = kept + flight * count * one
        over = np.maximum(over, np.where(count > 0, block.live_bytes - one, 0.0))
    waiting = (flight - 1.0) * work.after.saved_bytes if schedule == "gpipe" else 0.0
    logits = last * (work.after.live_bytes + waiting)
    # The last block's backward pass begins when the logits are gone: the larger of the two is on top of what is kept.
    activations = kept + np.maximum(over - logits, 0.0)

    held.append((work.after, last * 1.0))
    dense = _total(held, "parameters")
    experts = _total(held, "expert_parameters")
    shards = (plans.data * plans.context).astype(float)
    expert_shards = np.maximum(shards / plans.expert, 1.0)

    def sharded(bytes_each: float, from_stage: int) -> Floats:
        split = plans.zero >= from_stage
        result: Floats = bytes_each * (
            dense / np.where(split, shards, 1.0) + experts / np.where(split, expert_shards, 1.0)
        )
        return result

    weights = sharded(software.weight_bytes, 3)
    if software.gathers_from_master:
        weights = np.where(plans.zero >= 3, 0.0, weights)
    unit = np.zeros(len(plans))
    for block, count in held:
        unit = np.maximum(unit, np.where(count > 0, block.parameters + block.expert_parameters, 0.0))
    per_gathered = software.prefetch * software.weight_bytes + software.gradient_bytes
    gathered = np.where((plans.zero >= 3) & (shards > 1), per_gathered * unit, 0.0)
    # torch's foreach Adam makes an fp32 copy of a moment, when nothing of a micro-batch is left.
    step = sharded(4.0, 1) if software.eager else 0.0
    spare = np.maximum(step - activations - logits - gathered, 0.0)
    groups = sum(np.asarray(each > 1, np.int64) for each in (plans.tensor, plans.pipeline, plans.context, plans.data))
    return Memory(
        weights=weights,
        gradients=sharded(software.gradient_bytes, 2),
        optimizer=sharded(software.optimizer_bytes, 1),
        activations=activations,
        logits=_broad(plans, logits)[0],
        buffers=software.workspace_bytes + gathered + spare,
        workspace=np.full(len(plans), software.workspace_bytes),
        groups=groups + (plans.expert > 1),
    )


def _total(held: list[tuple[Block, Amount]], name: str) -> Amount:
    total: Amount = 0.0
    for block, count in held:
        total = total + count * getattr(block, name)
    return total


def _broad(plans: Plans, *amounts: Any) -> list[Floats]:
    """Each amount as an array (plans,)."""
    return [np.broadcast_to(np.asarray(each, float), (len(plans),)) for each in amounts]
