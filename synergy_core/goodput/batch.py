"""Which total batch, micro-batch and accumulation a job trains with on a shape: Pollux's rule, over many jobs at once.

For N nodes and M GPUs (as in Pollux's published artifact): 50 total batches B, geometric from max(B₀, b_min·M) to
B_max, both included; for each  L = B/M,  a = ⌈L/b_max⌉,  but a ≥ 2 if M = 1 and L > B₀ (two micro-batches are
needed to estimate the noise),  b = ⌈L/a⌉;  not feasible unless b_min ≤ b ≤ b_max. The best goodput wins, the
smallest batch among equals. Ceilings forgive 1e-8. What counts is the batch that results, M·b·a.

Goodput is here the true rate of progress,  gain(B)/T_iter = throughput × efficiency / B₀:  iterations per second, each
worth one at the initial batch. It ranks configurations of a job as Pollux's throughput × efficiency does, and
remaining work ÷ goodput is a time.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import ceil, log

import numpy as np
from numpy.typing import ArrayLike

from synergy_core.arrays import Floats, Ints
from synergy_core.goodput.compressed import GradientErrors
from synergy_core.goodput.efficiency import gain
from synergy_core.goodput.throughput import TINY, gradient_time, overlapped, sync_time

CANDIDATES = 50
FORGIVEN = 1e-8
"""What a ceiling forgives: a batch that is a whole multiple but for rounding needs no further micro-batch."""
_FRACTIONS = np.linspace(0.0, 1.0, CANDIDATES)
# Working arrays of about this many numbers stay in the cache: measured, 2 times faster than all jobs at once.
_CHUNK = 16_384


@dataclass(frozen=True, slots=True)
class BatchChoice:
    """The best batch of each job on each shape; arrays (jobs, shapes), all 0 where none is feasible.

    goodput: initial-batch-equivalent iterations per second. total_batch = gpus × local_batch × accumulation, samples.
    local_batch: samples per GPU and micro-batch. accumulation: micro-batches per step.
    throughput: samples per second. efficiency: statistical, in (0, 1].
    """

    goodput: Floats
    total_batch: Ints
    local_batch: Ints
    accumulation: Ints
    throughput: Floats
    efficiency: Floats


@dataclass(frozen=True, slots=True)
class OneBatch:
    """`BatchChoice` for one job on one shape."""

    goodput: float
    total_batch: int
    local_batch: int
    accumulation: int
    throughput: float
    efficiency: float


_NONE = OneBatch(0.0, 0, 0, 0, 0.0, 0.0)


def best_batch(
    theta: ArrayLike,
    grad_sqr: ArrayLike,
    grad_var: ArrayLike,
    initial_batch: ArrayLike,
    max_batch: ArrayLike,
    min_local: ArrayLike,
    max_local: ArrayLike,
    nodes: ArrayLike,
    gpus: ArrayLike,
    *,
    sync_s: ArrayLike | None = None,
    errors: GradientErrors | None = None,
) -> BatchChoice:
    """The rule above for J jobs × S shapes.

    theta: (J, 7), or (J, S, 7) where shapes differ in GPU type. grad_sqr, grad_var, initial_batch, max_batch: (J,).
    min_local, max_local: (J,) or (J, S), b_min and b_max. nodes, gpus: (S,). Batches in samples. sync_s: (J, S),
    T_sync in place of the formula's. errors: fields (J,), of compressed gradients, which make a sample worth less.
    """
    theta = np.asarray(theta, dtype=np.float64)
    nodes, gpus = np.atleast_1d(nodes), np.atleast_1d(gpus).astype(np.float64)
    jobs, shapes = theta.shape[0], gpus.shape[0]
    if theta.ndim == 2:
        theta = theta[:, None, :]
    sync = np.broadcast_to(sync_time(theta, nodes, gpus) if sync_s is None else sync_s, (jobs, shapes))
    # One row per job: statistics and limits, with axes for shapes and candidates where they are missing.
    sqr, var, first = _column(grad_sqr), _column(grad_var), _column(initial_batch)
    least = np.maximum(first, _column(min_local) * gpus)
    span = np.log(np.maximum(_column(max_batch), 1e-300) / least)
    span = np.broadcast_to(span, (jobs, shapes))
    # Where even the smallest batch exceeds the largest, the only candidate is the (infeasible) smallest.
    possible = (span >= 0.0).astype(np.float64)
    columns = [
        np.maximum(span, 0.0), least / gpus, _column(min_local), _column(max_local), theta[..., 0], theta[..., 1],
        theta[..., 6], sync, sqr, var, first, gpus, possible, first / gpus,
    ]  # fmt: skip
    if errors is not None:
        columns += [_column(getattr(errors, each.name)) for each in fields(errors)]
    columns = [np.broadcast_to(each, (jobs, shapes)) for each in columns]
    singles = np.flatnonzero(gpus == 1.0)
    step = max(1, _CHUNK // (shapes * CANDIDATES))
    parts = [_choose([each[at : at + step] for each in columns], singles) for at in range(0, jobs, step)]
    rate, local, micro_batches, throughput, efficiency = (
        parts[0] if len(parts) == 1 else [np.concatenate(each) for each in zip(*parts, strict=True)]
    )
    local_batch, micro = local.astype(np.int64), micro_batches.astype(np.int64)
    total = gpus.astype(np.int64) * local_batch * micro
    return BatchChoice(rate, total, local_batch, micro, throughput, efficiency)


def _column(values: ArrayLike) -> Floats:
    """(J,) → (J, 1); (J, S) as it is."""
    array = np.asarray(values, dtype=np.float64)
    return array[:, None] if array.ndim < 2 else array


def _choose(columns: list[Floats], singles: Ints) -> tuple[Floats, Floats, Floats, Floats, Floats]:
    """Goodput, local batch, micro-batches, throughput and efficiency of the best candidate; arrays (jobs, shapes)."""
    span, least, low, high, alpha, beta, gamma, sync, sqr, var, first, gpus, possible, first_local, *distorting = (
        each[..., None] for each in columns
    )
    per_gpu = span * _FRACTIONS
    np.exp(per_gpu, out=per_gpu)
    per_gpu *= least
    micro = per_gpu / high
    micro -= FORGIVEN
    np.ceil(micro, out=micro)
    np.maximum(micro, 1.0, out=micro)
    if singles.size:
        micro[:, singles] = np.maximum(micro[:, singles], np.where(per_gpu[:, singles] > first[:, singles], 2.0, 1.0))
    local = per_gpu
    local /= micro
    local -= FORGIVEN
    np.ceil(local, out=local)
    compute = local * beta
    compute += alpha
    # T_opt/T_grad = (1 + (T_sync/T_grad)^γ)^(1/γ). T_grad ≥ 1e-8 and γ ≤ 10: no overflow below T_sync = 1e22 s.
    seconds = sync / compute
    np.power(seconds, gamma, out=seconds)
    seconds += 1.0
    np.power(seconds, 1.0 / gamma, out=seconds)
    seconds += micro
    seconds -= 1.0
    seconds *= compute
    scale = micro * local
    scale /= first_local
    rate = scale * sqr
    rate += var
    rate *= seconds
    np.divide(scale, rate, out=rate)
    worth = GradientErrors(*distorting).worth(scale, sqr, var, first, gpus) if distorting else None
    if worth is not None:
        rate *= worth
    feasible = local >= low
    feasible &= local <= high
    feasible &= possible > 0.0
    rate *= feasible
    best = rate.argmax(axis=-1)
    at = (np.arange(best.shape[0])[:, None], np.arange(best.shape[1]), best)
    found = feasible[at]
    local_best, micro_best, seconds_best, scale_best = (
        np.where(found, each[at], 0.0) for each in (local, micro, seconds, scale)
    )
    noise = (var + sqr)[..., 0]
    with np.errstate(divide="ignore", invalid="ignore"):
        throughput = np.where(found, local_best * micro_best * gpus[..., 0] / seconds_best, 0.0)
        efficiency = np.where(found, noise / (var[..., 0] + sqr[..., 0] * scale_best), 0.0)
    if worth is not None:
        efficiency *= worth[at]
    return rate[at] * noise, local_best, micro_best, throughput, efficiency


def best_batch_one(
    theta: Floats,
    grad_sqr: float,
    grad_var: float,
    initial_batch: float,
    max_batch: float,
    min_local: float,
    max_local: float,
    nodes: int,
    gpus: int,
    *,
    sync_s: float | None = None,
    errors: GradientErrors | None = None,
) -> OneBatch:
    """`best_batch` for one job on one shape; theta (7,). For a simulated job, which asks at every epoch."""
    alpha, beta, alpha_n, beta_n, alpha_r, beta_r, gamma = theta.tolist()
    least = max(initial_batch, min_local * gpus)
    if least > max_batch:
        return _NONE
    per_gpu = np.exp(_FRACTIONS * log(max_batch / least))
    per_gpu *= least / gpus
    micro = np.ceil(per_gpu / max_local - FORGIVEN)
    np.maximum(micro, 1.0, out=micro)
    if gpus == 1:
        np.maximum(micro, (per_gpu > initial_batch) + 1.0, out=micro)
    local = np.ceil(per_gpu / micro - FORGIVEN)
    if sync_s is not None:
        sync = sync_s
    elif nodes > 1:
        sync = alpha_n + beta_n * max(gpus - 2, TINY)
    else:
        sync = alpha_r + beta_r * max(gpus - 2, TINY) if gpus > 1 else TINY + TINY * TINY
    compute = local * beta
    compute += alpha
    seconds = sync / compute
    seconds **= gamma
    seconds += 1.0
    seconds **= 1.0 / gamma
    seconds += micro
    seconds -= 1.0
    seconds *= compute
    scale = micro * local
    scale *= gpus / initial_batch
    rate = scale / ((scale * grad_sqr + grad_var) * seconds)
    worth = None if errors is None else errors.worth(scale, grad_sqr, grad_var, initial_batch, gpus)
    if worth is not None:
        rate *= worth
    rate *= local <= max_local
    rate *= local >= min_local
    best = int(rate.argmax())
    if not rate[best] > 0.0:
        return _NONE
    b, m = int(local[best]), int(micro[best])
    total = gpus * b * m
    noise = grad_var + grad_sqr
    efficiency = noise / (grad_var + grad_sqr * float(scale[best]))
    if worth is not None:
        efficiency *= float(worth[best])
    return OneBatch(float(rate[best]) * noise, total, b, m, total / float(seconds[best]), efficiency)


def goodput_at(
    theta: ArrayLike,
    grad_sqr: ArrayLike,
    grad_var: ArrayLike,
    initial_batch: ArrayLike,
    local_batch: ArrayLike,
    accumulation: ArrayLike,
    gpus: ArrayLike,
    *,
    sync_s: ArrayLike,
    errors: GradientErrors,
) -> tuple[Floats, Floats]:
    """Goodput and samples per second at batches that are given; the arguments broadcast, theta (…, 7)."""
    theta, micro = np.asarray(theta, dtype=np.float64), np.asarray(accumulation, dtype=np.float64)
    compute = gradient_time(theta, local_batch)
    seconds = (micro - 1.0) * compute + overlapped(compute, sync_s, theta[..., 6])
    samples: Floats = np.asarray(gpus, dtype=np.float64) * np.asarray(local_batch) * micro
    scale: Floats = samples / np.asarray(initial_batch)
    sqr, var = np.asarray(grad_sqr, dtype=np.float64), np.asarray(grad_var, dtype=np.float64)
    worth = gain(scale, sqr, var) * errors.worth(scale, sqr, var, initial_batch, gpus)
    return worth / seconds, samples / seconds


def fixed_batch(
    total_batch: float, gpus: int, initial_batch: float, max_batch: float, max_local: float
) -> tuple[int, int]:
    """(local batch, accumulation) of a job that keeps its total batch: Tiresias, Optimus, Gavel and rigid jobs.

    As above with  L = ⌈B/M⌉,  a ≥ 2 if M = 1 and B > B₀,  and at last  b ≤ ⌊B_max/(M·a)⌋; but at least a sample
    per GPU, on however many.
    """
    per_gpu = ceil(total_batch / gpus - FORGIVEN)
    micro_batches = max(ceil(per_gpu / max_local - FORGIVEN), 1)
    if gpus == 1 and total_batch > initial_batch:
        micro_batches = max(micro_batches, 2)
    local_batch = ceil(per_gpu / micro_batches - FORGIVEN)
    return max(1, min(local_batch, int(max_batch // (gpus * micro_batches)))), micro_batches
