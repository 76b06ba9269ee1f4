"""Seconds of the operators of a block on one GPU: matrix products, attention, memory-bound operators.

A product runs in waves of tiles over the multiprocessors, so that its time depends on its shape (NVIDIA, Matrix
Multiplication Background: tile and wave quantization); tile by tile it is limited by the tensor cores or by how fast
its operands arrive. One efficiency for all shapes would be off by tens of percent.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from synergy_core.arrays import Floats
from synergy_core.planner.constants import Constants
from synergy_core.planner.machine import Machine
from synergy_core.planner.software import Software
from synergy_core.planner.work import Amount, Attention, Block

TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (128, 64, 0.85), (64, 128, 0.85), (64, 64, 0.7))
"""Tiles: rows, columns, and the inner loop's rate ÷ that of the largest tile, which reuses operands most."""
SPLITS = (1, 4)
"""Into how many parts the summed dimension may be cut where there are too few tiles."""
LANES = 8.0
"""How many times faster tensor cores multiply than fp32 lanes (V100 architecture whitepaper, 2017): for products on
lanes operands arrive in time whatever the tile, and what filling costs is so much less of the whole."""
ALIGNMENT = 8
MISALIGNED = 0.5
"""Elements per row of an operand: where not a multiple, 16-byte loads and with them half of the rate are lost (NVIDIA,
Matrix Multiplication Background, section 3.1: alignment)."""

_TILINGS = tuple(np.array([(*tile, split) for tile in TILES for split in SPLITS]).T)


@dataclass(frozen=True, slots=True)
class BlockTime:
    """Seconds (plans,) on the GPU of one block and micro-batch, and how many kernels are launched."""

    forward_s: Floats
    backward_s: Floats
    attention_s: Floats
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
) -> Floats:
    """Seconds of count products (m × k) · (k × n), without their launch. core: attention's, in 16 bits under FP8."""
    precision = "bf16" if core and software.precision == "fp8" else software.precision
    peak = machine.gpu.matrix_flops_per_s(precision)
    element = 4.0 if precision in ("fp32", "tf32") else 2.0
    lanes = precision == "fp32"
    m, n, k, count = (np.asarray(each, float) for each in (m, n, k, count))
    sms = machine.gpu.multiprocessors
    # Every tiling in one array (tilings, plans); the library is taken to choose the best.
    options = (..., *(None,) * np.broadcast(m, n, k, count).ndim)
    rows, columns, rate, split = (each[options] for each in _TILINGS)
    tiles = np.ceil(m / rows) * np.ceil(n / columns) * (count * split / sms)
    # Part of the last wave is filled by what comes next.
    waves = np.maximum(tiles + c.wave_loss * (np.ceil(tiles) - tiles), 1.0)
    depth = k / split + c.gemm_depth / (LANES if lanes else 1.0)
    busy = waves * depth * (rows * columns * 2.0 * sms / (peak * (1.0 if lanes else rate)))
    aligned = (n % ALIGNMENT == 0) & (k % ALIGNMENT == 0) | lanes
    best = busy.min(axis=0) / np.where(aligned, 1.0, MISALIGNED)
    moved = element * count * (m * k + k * n + m * n) / (machine.gpu.memory_bandwidth_bytes_per_s * c.memory_efficiency)
    result: Floats = np.maximum(best / c.gemm_efficiency, moved)
    return result


def block_time(block: Block, machine: Machine, software: Software, c: Constants) -> BlockTime:
    """Forward and backward, everything that runs on the GPU itself; communication is not in it."""
    memory = machine.gpu.memory_bandwidth_bytes_per_s * c.memory_efficiency
    forward: Floats = np.zeros(())
    backward: Floats = np.zeros(())
    launches = np.zeros(())
    for gemm in block.gemms:
        forward = forward + gemm_s(gemm.m, gemm.n, gemm.k, gemm.count, machine, software, c)
        backward = backward + gemm_s(gemm.m, gemm.k, gemm.n, gemm.count, machine, software, c)
        backward = backward + gemm_s(gemm.k, gemm.n, gemm.m, gemm.count, machine, software, c)
        launches = launches + 1.0
    attention: Floats = np.zeros(())
    kernels = np.asarray(block.kernels, float)
    for each in block.attention:
        one, other = attention_s(each, machine, software, c)
        attention = attention + one
        forward, backward = forward + one, backward + other
        kernels = kernels + (1.0 if software.flash else 4.0)
    traffic = (np.asarray(block.replicated_bytes, float) + block.split_bytes) / memory
    return BlockTime(
        forward_s=forward + traffic,
        backward_s=backward + c.backward_traffic * traffic,
        attention_s=attention,
        forward_kernels=launches + kernels,
        backward_kernels=2.0 * launches + c.backward_kernels * kernels,
    )


def attention_s(a: Attention, machine: Machine, software: Software, c: Constants) -> tuple[Floats, Floats]:
    """Forward and backward seconds of the attention core.

    Flash: the causal half is skipped; the backward pass computes 5 products for the forward's 2, less efficiently
    (Dao, arXiv 2307.08691). Else the scores are whole, go through memory for softmax and dropout, and are read again by
    each product. Under FP8 attention stays in 16 bits.
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
    passes = 4.0 + (5.0 if software.dropout else 0.0)
    softmax = c.score_passes * passes * scores / memory
    return product + softmax, 2.0 * product + 1.5 * softmax
