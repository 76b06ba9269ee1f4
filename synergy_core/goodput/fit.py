"""The throughput model's constants from what jobs measured, many profiles at once.

Pollux (OSDI 2021, section 3.2, and its artifact) minimises over θ, with natural logarithms,

    RMSE(log T_grad) + RMSE(log T_opt) + 1e-3·(γ − 1)² + 1e-2·[(β_n/α_n)² + (β_r/α_r)²]

with observed T_grad = step_time − sync_time and T_opt = step_time, 1e-8 ≤ α, β and 1 ≤ γ ≤ 10, and holds constants that
nothing observed can tell at values that promise perfect scaling:

    one distinct local batch        α_c = mean(T_grad)/2
    never N > 1                     α_n = β_n = 1e-8; afterwards α_n ≥ 1.1·α_r and β_n ≥ 1.1·β_r
    never N > 2 (`CROWDED`)         ν = 1e-8; afterwards β_n + ν ≥ 0.06·T_sync across nodes, on average
    never N = 1 and M > 1           α_r = β_r = 1e-8
    never M > 2                     β_n = β_r = 1e-8

Three starts, differing in γ, run side by side; the best wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from synergy_core.arrays import Bools, Floats, Ints
from synergy_core.goodput.forms import (
    ALPHA_C,
    ALPHA_N,
    ALPHA_R,
    BETA_N,
    BETA_R,
    CARD,
    CROWD,
    FLOOR,
    GAMMA,
    NODES,
    PAIR,
    POLLUX,
    RHO_N,
    RHO_R,
    SLOWEST,
    Form,
)
from synergy_core.goodput.minimise import minimise, residuals
from synergy_core.goodput.observations import ObservedSteps, PaddedSteps, padded
from synergy_core.goodput.throughput import TINY
from synergy_core.goodput.uncertainty import log_step_time_sd, parameter_sd

__all__ = ["Fits", "ObservedSteps", "fit"]


UNSEEN_NODES_FACTOR = 1.1
"""How much costlier across nodes than within one, at least, while no job has spanned nodes (Pollux's artifact)."""
UNSEEN_NODES_GROWTH = 0.06
"""By how much of itself an all-reduce grows as nodes double, at least, while no job has spanned more than two: less
than on 11 of 12 measured tables, where it grows by 0.17 in the median (bench/fit.py --forms)."""
_START_GAMMAS = (1.0, 1.7, 4.0)
_ROBUST_ROUNDS = 8
_CAUCHY = 2.385
"""Cauchy weights 1/(1 + (e/(2.385·s))²) keep 95 % of least squares' efficiency on clean data (Holland, Welsch 1977)."""
_LEAST_SCALE = 0.01
"""Logarithms closer than this to the model are never suspected."""


@dataclass(frozen=True, slots=True)
class Fits:
    """One fit per profile.

    theta: (F, P), in the order of `form.parameters`. rmse: (F,) of log T_opt, so 0.1 is about 10 %.
    objective: (F,) the minimum found. steps: (F,) taken by the best start.
    """

    form: Form
    theta: Floats
    rmse: Floats
    objective: Floats
    steps: Ints
    rows: PaddedSteps

    def log_step_time_sd(
        self, nodes: ArrayLike, gpus: ArrayLike, local_batch: ArrayLike, crowd: ArrayLike | None = None
    ) -> Floats:
        """How sure the fit is: standard deviation of log(measured/predicted) step time at shapes (S,); (F, S).

        Delta method: var = s² + gᵀCg, g = ∂log T_opt/∂θ, C the inverse of the rows' information (deflated to one row
        per distinct (N, M), as rows of one shape err together) plus a wide prior: a slope unknown up to 0.3 of its
        constant, a constant never observed up to half of T_grad. s: the misfit, with 0.1 expected before any row.
        """
        return log_step_time_sd(self.theta, self.rows, self.form, nodes, gpus, local_batch, crowd)

    def parameter_sd(self) -> Floats:
        """Standard deviation of each constant, (F, P), by the same information."""
        return parameter_sd(self.theta, self.rows, self.form)


def fit(observations: Sequence[ObservedSteps], *, form: Form = POLLUX, robust: bool = False, least: int = 1) -> Fits:
    """The constants that explain each profile best.

    robust: rows that the others contradict lose their say (Cauchy weights, reweighted); for measurements by hand. The
    published policies' beliefs are fitted without. least: rows a profile must have.
    Raises InputError for too few rows, and for times that are not positive numbers with sync < step.
    """
    rows = padded(observations, form, least=least)
    return fit_rows(rows, form, robust=robust)


def fit_rows(rows: PaddedSteps, form: Form, *, robust: bool = False) -> Fits:
    """`fit` on rows already padded."""
    theta, objective, steps = _best(rows, form)
    if robust:
        for _ in range(_ROBUST_ROUNDS):
            rows = rows.weighted(_trust(theta, rows, form))
            theta, objective, steps = _best(rows, form, theta)
    rmse = np.sqrt((rows.weight * residuals(theta, rows, form)[1] ** 2).sum(axis=1))
    unseen = ~rows.across.any(axis=1)
    pairs = [(ALPHA_N, ALPHA_R), (BETA_N, BETA_R)] + ([(RHO_N, RHO_R)] if form.floor else [])
    for across, within in pairs:
        theta[unseen, across] = np.maximum(theta[unseen, across], UNSEEN_NODES_FACTOR * theta[unseen, within])
    if form.crowd:
        theta[:, NODES] = np.maximum(theta[:, NODES], _unseen_growth(theta, rows, form))
    return Fits(form, theta, rmse, objective, steps, rows)


def _unseen_growth(theta: Floats, rows: PaddedSteps, form: Form) -> Floats:
    """What log₂(N/2) multiplies at least, (F,), where nodes never were more than two; else 0."""
    weight = rows.weight * rows.across
    sync = (theta[:, None, form.sync_at] @ rows.design)[:, 0]
    typical = (weight * sync).sum(axis=1) / (weight.sum(axis=1) + 1e-300)
    result: Floats = np.where(
        (rows.across & (rows.nodes > 2)).any(axis=1), 0.0, UNSEEN_NODES_GROWTH * typical - theta[:, BETA_N]
    )
    return result


def _best(rows: PaddedSteps, form: Form, start: Floats | None = None) -> tuple[Floats, Floats, Ints]:
    """The best of several starts, `start` among them."""
    pinned, held = _pins(rows, form)
    starts = [_start(rows, form, gamma) for gamma in _START_GAMMAS] + ([] if start is None else [start])
    times, count = len(starts), len(rows.batch)
    many = rows.take(np.tile(np.arange(count), times))
    begin = np.where(np.tile(pinned, (times, 1)), np.tile(held, (times, 1)), np.concatenate(starts))
    theta, objective, steps = minimise(begin, np.tile(pinned, (times, 1)), many, form)
    best = objective.reshape(times, count).argmin(axis=0) * count + np.arange(count)
    return theta[best], objective[best], steps[best]


def _trust(theta: Floats, rows: PaddedSteps, form: Form) -> Floats:
    """How much each row counts, (F, K): less the further it is from where the others put it."""
    first, second = residuals(theta, rows, form)
    off = np.sqrt(first**2 + second**2)
    real = rows.weight > 0
    typical = np.nanmedian(np.where(real, off, np.nan), axis=1, keepdims=True)
    scale = _CAUCHY * np.maximum(1.4826 * typical, _LEAST_SCALE)
    return real / (1.0 + (off / scale) ** 2)


def _pins(rows: PaddedSteps, form: Form) -> tuple[Bools, Floats]:
    """Which constants (F, P) nothing observed can tell, and what they are held at."""
    real = rows.weight > 0
    across, within = rows.across, rows.within
    shape = (len(rows.batch), len(form.parameters))
    pinned = np.zeros(shape, dtype=bool)
    held = np.full(shape, TINY)
    held[:, GAMMA] = 1.0
    pinned[:, ALPHA_C] = ((rows.batch == rows.batch[:, :1]) | ~real).all(axis=1)
    held[:, ALPHA_C] = 0.5 * (np.exp(rows.log_compute) * rows.weight).sum(axis=1)
    pinned[:, ALPHA_N] = pinned[:, BETA_N] = ~across.any(axis=1)
    pinned[:, ALPHA_R] = pinned[:, BETA_R] = ~within.any(axis=1)
    never_three = ~(real & (rows.gpus > 2)).any(axis=1)
    pinned[:, BETA_N] |= never_three
    pinned[:, BETA_R] |= never_three
    if form.floor:
        pinned[:, FLOOR] = _distinct(rows.batch, real) < 3
        pinned[:, RHO_N] = _distinct(rows.gpus, across) < 3
        pinned[:, RHO_R] = _distinct(rows.gpus, within) < 3
        two = across & (rows.nodes == 2)
        pinned[:, SLOWEST] = _distinct(rows.gpus, real) < 3
        # Only where more nodes, too, have held several GPUs each does it differ from β_n.
        more = across & ~two & (rows.gpus > rows.nodes)
        pinned[:, PAIR] = ~((two & (rows.gpus > 2)).any(axis=1) & more.any(axis=1))
    if form.crowd:
        few = _distinct(rows.crowd, across) < 3
        pinned[:, RHO_N] = pinned[:, CARD] = pinned[:, CROWD] = few
        pinned[:, NODES] = _distinct(rows.nodes, across) < 2
    return pinned, held


def _distinct(values: Floats, where: Bools) -> Ints:
    """How many different values each profile has where marked, (F,)."""
    ordered = np.sort(np.where(where, values, np.inf), axis=1)
    fresh = (ordered[:, 1:] > ordered[:, :-1]) & np.isfinite(ordered[:, 1:])
    result: Ints = np.isfinite(ordered[:, 0]) + fresh.sum(axis=1)
    return result


def _start(rows: PaddedSteps, form: Form, gamma: float) -> Floats:
    """Where to begin, if γ were `gamma`: straight lines through T_grad over b and T_sync over what it grows with."""
    compute, step = np.exp(rows.log_compute - rows.log_factor), np.exp(rows.log_step)
    # The all-reduce that would explain the step under this overlap; at least 1 % of it.
    ratio = np.minimum(np.exp(rows.log_compute - rows.log_step), 1.0) ** gamma
    sync = step * np.maximum(1.0 - ratio, 1e-2**gamma) ** (1.0 / gamma)
    y = np.stack([compute, sync, sync], axis=1)
    x = np.stack([rows.batch, rows.design[:, 1], rows.design[:, 3]], axis=1)
    weight = np.stack([rows.weight, rows.weight * rows.across, rows.weight * rows.within], axis=1) / (y * y)
    total = weight.sum(axis=2) + 1e-300
    mean_x, mean_y = (weight * x).sum(axis=2) / total, (weight * y).sum(axis=2) / total
    off = x - mean_x[..., None]
    slope = (weight * off * y).sum(axis=2) / ((weight * off * off).sum(axis=2) + 1e-12 * total)
    steepest = mean_y / (np.array([0.0, 1.0, 1.0]) + mean_x)
    slope = np.clip(slope, 1e-3 * steepest, 0.9 * steepest)
    # One batch size: half of its time, as where α_c is then held.
    slope[:, 0] = np.where(_distinct(rows.batch, rows.weight > 0) == 1, 0.5 * steepest[:, 0], slope[:, 0])
    theta = np.empty((len(rows.batch), len(form.parameters)))
    theta[:, 1:6:2] = slope
    theta[:, 0:6:2] = mean_y - slope * mean_x
    theta[:, GAMMA] = gamma
    if form.floor:
        theta[:, FLOOR] = 0.7 * np.where(rows.weight > 0, compute, np.inf).min(axis=1)
        theta[:, SLOWEST] = 0.05
        theta[:, [RHO_N, RHO_R, PAIR]] = 0.1 * theta[:, [ALPHA_N, ALPHA_R, ALPHA_N]]
    if form.crowd:
        theta[:, [CARD, CROWD, NODES]] = 0.1 * theta[:, [ALPHA_N]]
    result: Floats = np.clip(theta, form.lower, form.upper)
    return result
