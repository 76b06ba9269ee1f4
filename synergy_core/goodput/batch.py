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
from functools import lru_cache
from math import ceil, log
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from synergy_core.goodput.efficiency import GradientErrors
from synergy_core.goodput.throughput import ALPHA_C, BETA_C, GAMMA, TINY, sync_time
from synergy_core.units import Bools, Floats, Ints

CANDIDATES = 50
FORGIVEN = 1e-8
"""Tolerance of a ceiling, so that a batch that is a whole multiple up to rounding needs no further micro-batch."""
_FRACTIONS = np.linspace(0.0, 1.0, CANDIDATES)
# Working arrays of about this many numbers stay in the cache: measured, 2 times faster than all jobs at once.
_CHUNK = 16_384
REMEMBERED = 16_384
"""Answers for one job on one shape that are kept."""


@dataclass(frozen=True, slots=True)
class BatchChoice:
    """The best batch of each job on each shape; arrays (jobs, shapes), or numbers; all 0 where none is feasible.

    goodput: initial-batch iterations per second. local_batch: samples per GPU and micro-batch. accumulation:
    micro-batches per step. throughput: samples per second.
    """

    goodput: Floats
    local_batch: Ints
    accumulation: Ints
    throughput: Floats


class OneBatch(NamedTuple):
    """`BatchChoice` for one job on one shape."""

    goodput: float = 0.0
    local_batch: int = 0
    accumulation: int = 0
    throughput: float = 0.0


class _Asked(NamedTuple):
    """Jobs on shapes: numbers, or arrays that broadcast. alpha, beta, gamma: of the step time; sync_s: T_sync."""

    alpha: Floats | float
    beta: Floats | float
    gamma: Floats | float
    sync_s: Floats | float
    grad_sqr: Floats | float
    grad_var: Floats | float
    initial_batch: Floats | float
    gpus: Floats | float


def _goodput(asked: _Asked, local: Floats, micro: Floats, errors: GradientErrors | None) -> tuple[Floats, Floats]:
    """Goodput of these local batches and micro-batches, and the seconds of an iteration.

    T_opt/T_grad = (1 + (T_sync/T_grad)^γ)^(1/γ). T_grad ≥ 1e-8 and γ ≤ 10: no overflow below T_sync = 1e22 s. The gain
    is multiplied out, and the work is done in place: thousands of candidates are asked for at once.
    """
    compute = local * asked.beta
    compute += asked.alpha
    seconds = asked.sync_s / compute
    np.power(seconds, asked.gamma, out=seconds)
    seconds += 1.0
    np.power(seconds, 1.0 / asked.gamma, out=seconds)
    seconds += micro
    seconds -= 1.0
    seconds *= compute
    scale = micro * local
    scale /= asked.initial_batch / asked.gpus
    rate = scale * asked.grad_sqr
    rate += asked.grad_var
    rate *= seconds
    np.divide(scale, rate, out=rate)
    rate *= asked.grad_var + asked.grad_sqr
    if errors is not None:
        rate *= errors.worth(scale, asked.grad_sqr, asked.grad_var, asked.initial_batch, asked.gpus)
    return rate, seconds


def _candidates(
    asked: _Asked, least: Floats | float, log_span: Floats | float, low: Floats | float, high: Floats | float
) -> tuple[Floats, Floats, Bools]:
    """Local batch, micro-batches and feasibility of each total batch; least: B/M of the smallest."""
    per_gpu = log_span * _FRACTIONS
    np.exp(per_gpu, out=per_gpu)
    per_gpu *= least
    micro = per_gpu / high
    micro -= FORGIVEN
    np.ceil(micro, out=micro)
    np.maximum(micro, 1.0, out=micro)
    alone = np.equal(asked.gpus, 1.0)
    if alone.any():
        np.maximum(micro, 1.0 + (alone & (per_gpu > asked.initial_batch)), out=micro)
    per_gpu /= micro
    per_gpu -= FORGIVEN
    np.ceil(per_gpu, out=per_gpu)
    feasible = per_gpu >= low
    feasible &= per_gpu <= high
    return per_gpu, micro, feasible


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

    theta: (J, 7). grad_sqr, grad_var, initial_batch, max_batch: (J,), or a number for all jobs; so, too, min_local and
    max_local, b_min and b_max. nodes, gpus: (S,). Batches in samples. sync_s: (J, S), T_sync in place of the formula's.
    errors: fields (J,), of compressed gradients, which make a sample worth less.
    """
    theta = np.asarray(theta, dtype=np.float64)[:, None, :]
    nodes, gpus = np.atleast_1d(nodes), np.atleast_1d(gpus).astype(np.float64)
    shape = jobs, shapes = theta.shape[0], gpus.shape[0]
    first, low = _column(initial_batch), _column(min_local)
    least = np.maximum(first, low * gpus)
    span = np.log(np.maximum(_column(max_batch), 1e-300) / least)
    alpha, beta, gamma = (theta[..., at] for at in (ALPHA_C, BETA_C, GAMMA))
    sync = sync_time(theta, nodes, gpus) if sync_s is None else sync_s
    columns = [
        *(alpha, beta, gamma, sync, _column(grad_sqr), _column(grad_var), first, gpus),
        *(least / gpus, np.maximum(span, 0.0), low, _column(max_local), span),
        *([] if errors is None else [_column(getattr(errors, each.name)) for each in fields(errors)]),
    ]
    columns = [np.broadcast_to(each, shape) for each in columns]
    step = max(1, _CHUNK // (shapes * CANDIDATES))
    parts = [_chosen([each[at : at + step, :, None] for each in columns]) for at in range(0, jobs, step)]
    goodput, local, micro, throughput = (np.concatenate(each) for each in zip(*parts, strict=True))
    return BatchChoice(goodput, local.astype(np.int64), micro.astype(np.int64), throughput)


def _column(values: ArrayLike) -> Floats:
    """(J,) or a number for all → (J, 1)."""
    return np.atleast_1d(np.asarray(values, dtype=np.float64))[:, None]


def _chosen(columns: list[Floats]) -> tuple[Floats, Floats, Floats, Floats]:
    """Goodput, local batch, micro-batches and throughput of the best candidates; columns (jobs, shapes, 1)."""
    asked, gpus, (least, span, low, high, possible) = _Asked(*columns[:8]), columns[7], columns[8:13]
    local, micro, feasible = _candidates(asked, least, span, low, high)
    # Where even the smallest batch exceeds the largest, the only candidate is the (infeasible) smallest.
    feasible &= possible >= 0.0
    rate, seconds = _goodput(asked, local, micro, GradientErrors(*columns[13:]) if columns[13:] else None)
    rate *= feasible
    best = rate.argmax(axis=-1)
    at = best + np.arange(best.size).reshape(best.shape) * rate.shape[-1]
    found, rate, local, micro, seconds = (each.take(at) for each in (feasible, rate, local, micro, seconds))
    throughput = np.where(found, local * micro * gpus[..., 0] / np.where(found, seconds, 1.0), 0.0)
    return rate, np.where(found, local, 0.0), np.where(found, micro, 0.0), throughput


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
    if sync_s is None:  # `sync_time`, in a tenth of its time
        constant, slope = (alpha_n, beta_n) if nodes > 1 else (alpha_r, beta_r) if gpus > 1 else (TINY, TINY)
        sync_s = constant + slope * max(gpus - 2, TINY)
    asked = _Asked(alpha, beta, gamma, sync_s, grad_sqr, grad_var, initial_batch, gpus)
    return _best_of(asked, max_batch, min_local, max_local, errors)


@lru_cache(maxsize=REMEMBERED)
def _best_of(
    asked: _Asked, max_batch: float, min_local: float, max_local: float, errors: GradientErrors | None
) -> OneBatch:
    """The best batch of numbers; remembered, because similar jobs learn the same constants and ask the same."""
    gpus = float(asked.gpus)
    least = max(asked.initial_batch, min_local * gpus)
    if least > max_batch:
        return OneBatch()
    local, micro, feasible = _candidates(asked, least / gpus, log(max_batch / least), min_local, max_local)
    rate, seconds = _goodput(asked, local, micro, errors)
    rate *= feasible
    best = int(rate.argmax())
    if not rate[best] > 0.0:
        return OneBatch()
    b, a = int(local[best]), int(micro[best])
    return OneBatch(float(rate[best]), b, a, gpus * b * a / float(seconds[best]))


def goodput_at(
    theta: Floats,
    grad_sqr: float,
    grad_var: float,
    initial_batch: float,
    local_batch: ArrayLike,
    accumulation: ArrayLike,
    gpus: ArrayLike,
    *,
    sync_s: ArrayLike,
    errors: GradientErrors,
) -> tuple[Floats, Floats]:
    """Goodput and samples per second at batches that are given; theta (7,), the other arguments broadcast."""
    local, micro, many, sync = np.broadcast_arrays(
        *(np.asarray(each, dtype=np.float64) for each in (local_batch, accumulation, gpus, sync_s))
    )
    asked = _Asked(theta[ALPHA_C], theta[BETA_C], theta[GAMMA], sync, grad_sqr, grad_var, initial_batch, many)
    goodput, seconds = _goodput(asked, np.atleast_1d(local), np.atleast_1d(micro), errors)
    return goodput.reshape(sync.shape), (many * local * micro / seconds).reshape(sync.shape)


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
