"""The operators that one GPU runs for one micro-batch, and their seconds on the GPU.

All figures are arrays (plans,), or numbers that hold for all plans. A model family (`planner.families`) builds a
`Work`; step time and memory are computed from the `Work` alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from synergy_core.errors import InputError
from synergy_core.performance.planner.machine import Constants, Machine, Software
from synergy_core.performance.planner.plan import Plans, Recompute
from synergy_core.units import Floats

Amount = NDArray[Any] | float
"""An array (plans,), or one number for all plans."""


@dataclass(frozen=True, slots=True)
class Gemm:
    """`count` products (m × k) · (k × n) of the forward pass; the backward pass has two products for each."""

    m: Amount
    """Rows of the left operand and of the result."""
    n: Amount
    """Columns of the right operand and of the result."""
    k: Amount
    """Columns of the left operand and rows of the right one."""
    count: Amount = 1.0
    """Number of products."""
    stored: Amount | None = None
    """Number of right operands that are parameters of the block; None: all `count`."""
    expert: bool = False
    """Whether these parameters are in `Block.expert_parameters`."""
    again: bool = False
    """Whether Recompute.MODULES recomputes the products."""
    parts: Amount = 1.0
    """Number of the model's matrices that a right operand joins, such as queries, keys and values, each with its own
    adapter."""

    @property
    def flops(self) -> Amount:
        return 2.0 * self.m * self.n * self.k * self.count

    @property
    def right_operands(self) -> Amount:
        """Number of right operands that are parameters."""
        return self.count if self.stored is None else self.stored


@dataclass(frozen=True, slots=True)
class Attention:
    """`count` heads, each with queries × keys scores. causal: whether half of the scores are masked.

    width: elements of one query or key; value_width: elements of one value.
    """

    count: Amount
    queries: Amount
    keys: Amount
    width: Amount
    value_width: Amount
    causal: bool = True


@dataclass(frozen=True, slots=True)
class SavedActivations:
    """Bytes of a block that are kept for the backward pass, by recomputation mode."""

    whole_bytes: Amount = 0.0
    """Without recomputation."""
    selective_bytes: Amount | None = None
    """With selective recomputation; None: whole_bytes."""
    operator_bytes: Amount | None = None
    """With recomputation by operator; None: as with selective."""
    module_bytes: Amount | None = None
    """With recomputation by module; None: as with selective."""
    full_bytes: Amount | None = None
    """With full recomputation; None: whole_bytes."""

    def under(self, recompute: Recompute) -> Amount:
        """Bytes kept under that recomputation mode."""
        selective = self.whole_bytes if self.selective_bytes is None else self.selective_bytes
        return {
            Recompute.NONE: self.whole_bytes,
            Recompute.SELECTIVE: selective,
            Recompute.FULL: self.whole_bytes if self.full_bytes is None else self.full_bytes,
            Recompute.OPERATORS: selective if self.operator_bytes is None else self.operator_bytes,
            Recompute.MODULES: selective if self.module_bytes is None else self.module_bytes,
        }[recompute]

    def by_plan(self, plans: Plans, software: Software) -> Amount:
        """Bytes kept under each plan, (plans,); layers that do not recompute keep everything."""
        sizes = [np.broadcast_to(np.asarray(self.under(each), float), (len(plans),)) for each in Recompute]
        one: Floats = np.choose(plans.recompute, sizes)
        return one + (1.0 - software.run.recomputed_fraction) * (sizes[Recompute.NONE] - one)


@dataclass(frozen=True, slots=True)
class AllToAll:
    """The all-to-alls of a block by which tokens reach their experts and return."""

    sent_bytes: Amount = 0.0
    """Bytes that each GPU sends in one all-to-all."""
    copies: Amount = 1.0
    """Copies of each token in one all-to-all."""
    reach: Amount = 1.0
    """Largest fraction of the experts' nodes to which one token is sent."""
    count: Amount = 0.0
    """Number of all-to-alls."""


@dataclass(frozen=True, slots=True)
class Block:
    """A layer, the embedding, or the logits. All amounts are for one forward pass on one GPU."""

    name: str
    gemms: tuple[Gemm, ...] = ()
    attention: tuple[Attention, ...] = ()
    replicated_bytes: Amount = 0.0
    """Memory traffic of operators that every tensor-parallel rank repeats (under sequence parallelism, one rank's
    part)."""
    split_bytes: Amount = 0.0
    """Memory traffic of operators that the ranks split."""
    kernels: Amount = 0.0
    """Launches besides GEMMs and attention."""
    tensor_bytes: Amount = 0.0
    """Bytes of one all-reduce over the tensor-parallel group."""
    tensor_count: Amount = 0.0
    """Number of these all-reduces in each pass."""
    context_bytes: Amount = 0.0
    """Bytes of keys and values sent around the context-parallel ring, or of queries, keys, values and outputs in
    all-to-alls."""
    all_to_all: AllToAll = AllToAll()
    """Exchange of tokens with their experts."""
    parameters: Amount = 0.0
    """Parameters before ZeRO shards them, without `expert_parameters`."""
    expert_parameters: Amount = 0.0
    """Parameters of experts, which data × context ÷ expert ranks hold alike."""
    tables: tuple[tuple[Amount, Amount], ...] = ()
    """Rows and columns of embedding tables; parameters in neither tables nor GEMMs are vectors."""
    boundary_bytes: Amount = 0.0
    """Bytes of this GPU's part of the output, which the next block reads."""
    saved: SavedActivations = SavedActivations()
    """What is kept for the backward pass."""
    again_bytes: Amount = 0.0
    """Memory traffic that recomputation by module repeats."""
    again_count: Amount = 0.0
    """All-reduces that recomputation by module repeats."""
    live_bytes: Amount = 0.0
    """Peak memory of the block in either pass."""

    def matrix_parameters(self, *, expert: bool) -> Amount:
        """Parameters of the right operands of products, of the experts or of all else."""
        own = (each for each in self.gemms if each.expert == expert)
        total: Amount = sum((each.n * np.asarray(each.k) * each.right_operands for each in own), 0.0)
        return total

    def adapter_parameters(self, rank: int, *, expert: bool) -> Amount:
        """Parameters of adapters of that rank on each matrix of the experts or of all else: (k × rank) and (rank × n)
        (LoRA, arXiv 2106.09685)."""
        own = (each for each in self.gemms if each.expert == expert)
        sides = ((each.n + each.k * np.asarray(each.parts)) * each.right_operands for each in own)
        total: Amount = rank * sum(sides, 0.0)
        return total

    def trained_parameters(self, software: Software, *, expert: bool) -> Amount:
        """Parameters of a layer that are trained, of the experts or of all else: on average over all layers."""
        if software.run.adapter_rank:
            return self.adapter_parameters(software.run.adapter_rank, expert=expert)
        return software.run.trained_fraction * np.asarray(self.expert_parameters if expert else self.parameters)

    def stored_bytes(self, software: Software, *, expert: bool) -> Amount:
        """Bytes of the weights of the experts or of all else. Under adapters, matrices may be quantized."""
        total = software.weight_bytes * np.asarray(self.expert_parameters if expert else self.parameters)
        if software.run.adapter_rank:
            total = total - (software.weight_bytes - software.run.frozen_bytes) * self.matrix_parameters(expert=expert)
        return total

    @property
    def forward_flops(self) -> Amount:
        """FLOPs of products and attention in the forward pass. Causal attention counts half."""
        return self.flops(0.5)

    def flops(self, causal_share: float) -> Amount:
        """FLOPs of products and attention in the forward pass. causal_share: how much of causal attention counts."""
        total: Amount = sum((gemm.flops for gemm in self.gemms), 0.0)
        for each in self.attention:
            scores = each.count * each.queries * each.keys * (causal_share if each.causal else 1.0)
            total = total + 2.0 * scores * (each.width + each.value_width)
        return total


def block_of(name: str, amounts: Mapping[str, Any]) -> Block:
    """Makes a block from amounts by field. Those of `Block.saved` stand beside the others, by the names in `_SAVED`."""
    own = {key: value for key, value in amounts.items() if key not in _SAVED}
    saved = {_SAVED[key]: value for key, value in amounts.items() if key in _SAVED}
    return Block(name=name, saved=SavedActivations(**saved), **own)


_SAVED = {
    "saved_bytes": "whole_bytes",
    "selective_bytes": "selective_bytes",
    "operator_bytes": "operator_bytes",
    "module_bytes": "module_bytes",
    "input_bytes": "full_bytes",
}
"""The field of `SavedActivations` by the name that parts of a block use."""


@dataclass(frozen=True, slots=True)
class Layers:
    """`count` identical blocks, one after another."""

    block: Block
    count: Amount


@dataclass(frozen=True, slots=True)
class Work:
    """A model's operators for one micro-batch on one GPU of each pipeline stage.

    before: on the first stage (embedding). layers: runs of blocks, in order; stages can be cut between any two blocks.
    after: on the last stage (final norm, logits, loss).
    """

    before: Block
    layers: tuple[Layers, ...]
    after: Block
    tower: Layers | None = None
    """A frozen encoder of images on the first stage: it has weights and a forward pass, and nothing else."""

    @property
    def layer_count(self) -> Amount:
        return sum((each.count for each in self.layers), 0.0)


MIN_TOKENS_PER_CONTEXT_RANK = 4096
"""A search gives no context-parallel rank fewer tokens. Software allows fewer, but no such run was ever measured, so
predictions could not be checked. A fixed context= is not limited."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on a model's degrees of parallelism.

    Pipeline stages are cut between layers. The tensor-parallel degree divides heads (or channels), and it divides
    groups (key-value heads) or is a multiple of them. seq_len: tokens per sample; 0: none. experts: per layer; 1: none.
    """

    layers: int
    heads: int
    groups: int = 1
    seq_len: int = 0
    experts: int = 1

    def tensors(self, most: int) -> list[int]:
        """Tensor-parallel degrees up to `most`."""
        every = (each for each in divisors(self.heads) if each <= most)
        return [each for each in every if self.groups % each == 0 or each % self.groups == 0]

    def contexts(self) -> list[int]:
        """Context-parallel degrees: powers of two that leave each rank an even number of tokens, and not too few."""
        result = [1]
        while self.seq_len % (4 * result[-1]) == 0 and self.seq_len // (2 * result[-1]) >= MIN_TOKENS_PER_CONTEXT_RANK:
            result.append(2 * result[-1])
        return result


class Architecture(Protocol):
    """A model's sizes: a frozen dataclass. Numeric fields may be arrays (plans,), with one model per plan."""

    def __hash__(self) -> int:
        """Results are cached by architecture."""

    def parameters(self) -> Amount:
        """Parameters of the whole model, each counted once."""

    def limits(self) -> Limits:
        """Limits on the degrees of parallelism; not defined if fields are arrays."""

    def check(self) -> None:
        """Raises InputError for sizes that contradict each other, such as hidden=4096 with 41 heads."""


class Family(Protocol):
    """A module in `families/`. Architecture: its dataclass, read from `catalog/architectures/*.yaml`."""

    Architecture: Any

    def work(self, architecture: Any, plans: Plans, software: Software) -> Work:
        """Operators of one micro-batch on one GPU."""


def at_least(least: int, **sizes: Any) -> None:
    """Raises InputError for the first size that is below `least`."""
    for name, value in sizes.items():
        if value < least:
            raise InputError(f"{name}: {value}; expected a whole number of at least {least}.")


def divisors(number: int) -> list[int]:
    """All divisors of the number, rising."""
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})


TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (128, 64, 0.85), (64, 128, 0.85), (64, 64, 0.7))
"""Tiles of a product: rows, columns, and the inner loop's rate ÷ that of the largest tile, which reuses data most."""
SPLITS = (1, 4)
"""Numbers of parts into which the summed dimension may be split if there are too few tiles. 4 is replaced by the number
that fills the multiprocessors if that number is larger (NVIDIA, CUTLASS, Efficient GEMM in CUDA: parallelized
reductions). Weight gradients of convolutions are split most: they are small and sum over all pixels."""
LANES = 8.0
"""Rate of tensor cores ÷ rate of fp32 lanes (V100 architecture whitepaper, 2017). Products on lanes never wait for
operands, and their `gemm_depth` is smaller by this factor."""
ALIGNMENT = 8
MISALIGNED = 0.5
"""Operands whose rows are not a multiple of ALIGNMENT elements reach only this fraction of the rate, because 16-byte
loads are impossible (NVIDIA, Matrix Multiplication Background, section 3.1: alignment)."""

_TILINGS = tuple(np.array([(*tile, split) for tile in TILES for split in SPLITS]).T)


@dataclass(frozen=True, slots=True)
class BlockTime:
    """Seconds (plans,) of one block and micro-batch on the GPU, and number of kernels launched.

    weights_s: the part of backward_s for weight gradients. modules_s: forward seconds that Recompute.MODULES repeats.
    """

    forward_s: Floats
    backward_s: Floats
    weights_s: Floats
    attention_s: Floats
    modules_s: Floats
    forward_kernels: Floats
    backward_kernels: Floats


def gemm_s(
    m: Amount,
    n: Amount,
    k: Amount,
    count: Amount,
    machine: Machine,
    software: Software,
    c: Constants,
    *,
    core: bool = False,
    transposed: bool = False,
) -> Floats:
    """Seconds of `count` products (m × k) · (k × n), without kernel launches.

    core: whether they belong to the attention core, which stays in 16 bits under FP8. transposed: whether the left
    operand is stored as (k × m), as for weight gradients, which sum over tokens. Only dimensions along which elements
    are adjacent in memory need to be aligned. A product runs in waves of tiles over the multiprocessors, so its
    efficiency depends on its shape (NVIDIA, Matrix Multiplication Background: tile and wave quantization).
    """
    precision = "bf16" if core and software.precision == "fp8" else software.precision
    peak = machine.gpu.matrix_flops_per_s(precision)
    element = software.element_bytes
    lanes = precision == "fp32"
    m, n, k, count = (np.asarray(each, float) for each in (m, n, k, count))
    sms = machine.gpu.multiprocessors
    # All tilings in one array (tilings, plans). The library is assumed to choose the best.
    options = (..., *(None,) * np.broadcast(m, n, k, count).ndim)
    rows, columns, rate, split = (each[options] for each in _TILINGS)
    tiles = np.ceil(m / rows) * np.ceil(n / columns) * (count / sms)
    split = np.where(split > 1.0, np.maximum(np.floor(1.0 / tiles), split), 1.0)
    tiles = tiles * split
    # The next kernel fills a part of the last wave.
    waves = np.maximum(tiles + c.wave_loss * (np.ceil(tiles) - tiles), 1.0)
    depth = k / split + c.gemm_depth / (LANES if lanes else 1.0)
    busy = waves * depth * (rows * columns * 2.0 * sms / (peak * (1.0 if lanes else rate)))
    aligned = (n % ALIGNMENT == 0) & ((m if transposed else k) % ALIGNMENT == 0) | lanes
    best = busy.min(axis=0) / np.where(aligned, 1.0, MISALIGNED)
    moved = element * count * (m * k + k * n + m * n) / (machine.gpu.memory_bandwidth_bytes_per_s * c.memory_efficiency)
    result: Floats = np.maximum(best / c.gemm_efficiency, moved)
    return result


def block_time(block: Block, machine: Machine, software: Software, c: Constants) -> BlockTime:
    """Seconds of a block's forward and backward pass on the GPU, without communication."""
    memory = machine.gpu.memory_bandwidth_bytes_per_s * c.memory_efficiency
    forward = backward = weights = attention = modules = adapted = np.zeros(())
    launches, kernels = np.asarray(float(len(block.gemms))), np.asarray(block.kernels, float)
    for gemm in block.gemms:
        m, n, k, count = gemm.m, gemm.n, gemm.k, gemm.count
        once = gemm_s(m, n, k, count, machine, software, c)
        forward, modules = forward + once, modules + once if gemm.again else modules
        if software.run.adapter_rank:  # frozen weights have no gradients, but adapters read inputs and add to outputs
            moved = software.element_bytes * m * (k + np.asarray(n)) * count
            if software.run.frozen_bytes < software.weight_bytes:  # and quantized weights are written out before use
                moved = moved + (software.run.frozen_bytes + software.weight_bytes) * n * np.asarray(k) * count
            adapted = adapted + moved / memory
        else:
            weights = weights + gemm_s(k, n, m, count, machine, software, c, transposed=True)
        backward = backward + gemm_s(m, k, n, count, machine, software, c)
    for each in block.attention:
        forth, back = attention_s(each, machine, software, c)
        attention, forward, backward = attention + forth, forward + forth, backward + back
        kernels = kernels + (1.0 if software.flash else _softmax(each, software)[0])
    traffic = (np.asarray(block.replicated_bytes, float) + block.split_bytes) / memory
    return BlockTime(
        forward_s=forward + traffic + adapted,
        backward_s=backward + weights + c.backward_traffic * traffic + 2.0 * adapted,
        weights_s=weights,
        attention_s=attention,
        modules_s=modules + block.again_bytes / memory,
        forward_kernels=launches + kernels,
        backward_kernels=2.0 * launches + c.backward_kernels * kernels,
    )


def _softmax(a: Attention, software: Software) -> tuple[Floats, Floats]:
    """Number of kernels of unfused attention, and bytes per score that scale, mask and softmax move; forward pass.

    A fused kernel reads and writes each score once. Three separate ones do so in fp32, and two convert 16-bit scores to
    fp32 and back (Megatron-LM v2, megatron/model/fused_softmax.py: is_kernel_available, forward_torch_softmax).
    """
    is_fused = software.fused & (np.asarray(a.count) % software.softmax_heads == 0)
    converts = software.element_bytes < 4.0
    kernels, moved = (8.0, 36.0) if converts else (6.0, 24.0)
    return np.where(is_fused, 4.0, kernels), np.where(is_fused, 2.0 * software.element_bytes, moved)


def attention_s(a: Attention, machine: Machine, software: Software, c: Constants) -> tuple[Floats, Floats]:
    """Forward and backward seconds of the attention core.

    Flash attention skips masked scores. Its backward pass computes 5 products where the forward pass computes 2, and is
    less efficient (Dao, arXiv 2307.08691). Other attention computes all scores and writes them to memory for softmax
    and dropout. Under FP8 attention stays in 16 bits.
    """
    scores = np.asarray(a.count, float) * a.queries * a.keys
    if software.flash:
        part = 0.5 if a.causal else 1.0
        flops = 2.0 * scores * (np.asarray(a.width, float) + a.value_width) * part
        fill = a.queries / (a.queries + c.attention_fill)
        precision = "bf16" if software.precision == "fp8" else software.precision
        peak = machine.gpu.matrix_flops_per_s(precision)
        forward = flops / (peak * c.attention_efficiency * fill)
        return forward, c.attention_backward * forward
    memory = machine.gpu.memory_bandwidth_bytes_per_s * c.memory_efficiency
    product = gemm_s(a.queries, a.keys, a.width, a.count, machine, software, c, core=True)
    product = product + gemm_s(a.queries, a.value_width, a.keys, a.count, machine, software, c, core=True)
    # Dropout reads and writes scores, and writes a mask.
    moved = _softmax(a, software)[1] + (2.0 * software.element_bytes + 1.0 if software.dropout else 0.0)
    softmax = c.score_passes * moved * scores / memory
    return product + softmax, 2.0 * product + 1.5 * softmax
