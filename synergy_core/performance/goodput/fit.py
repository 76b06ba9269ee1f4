"""Fits the throughput model's constants to measured step times, for many profiles at once.

Pollux (OSDI 2021, section 3.2, and its artifact) minimises over θ, with natural logarithms,

    RMSE(log T_grad) + RMSE(log T_opt) + 1e-3·(γ − 1)² + 1e-2·[(β_n/α_n)² + (β_r/α_r)²]

with observed T_grad = step_time − sync_time and T_opt = step_time, 1e-8 ≤ α, β and 1 ≤ γ ≤ 10. Constants that the
observations do not determine are fixed at values that predict perfect scaling; some are raised after the fit:

    one distinct local batch        α_c = mean(T_grad)/2
    never N > 1                     α_n = β_n = 1e-8; raised to α_n ≥ 1.1·α_r and β_n ≥ 1.1·β_r
    one distinct N > 1 (`CROWDED`)  ν = 1e-8; if N = 2, raised to β_n + ν ≥ 0.06·(mean T_sync across nodes)
    never N = 1 and M > 1           α_r = β_r = 1e-8
    never M > 2                     β_n = β_r = 1e-8

The fit runs from three starts with different γ and keeps the best result. The objective is a sum of two RMSEs and of
squares. Near a perfect fit an RMSE is a cone, on which quasi-Newton methods converge slowly. So a step uses the cone's
own curvature. For an RMSE σ = √(Σ w·r²) of residuals r with weights w, where J is the Jacobian of r, it is

    ∇σ = Jᵀw r/σ,    ∇²σ ≈ (JᵀwJ − ∇σ∇σᵀ)/σ.

The step is damped after Marquardt (1963) with the plain Gauss-Newton matrix JᵀwJ/σ, whose full step goes to the cone's
tip. A constant at a bound stays fixed during a step that would push it beyond the bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from synergy_core.performance.goodput.throughput import (
    ALPHA_C,
    ALPHA_N,
    ALPHA_R,
    BETA_C,
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
    TINY,
    Form,
    ObservedSteps,
    PaddedSteps,
    evenly,
    padded,
    slowest_of,
)
from synergy_core.units import Bools, Floats, Ints

GAMMA_PRIOR = 1e-3
RATIO_PRIOR = 1e-2
MAX_STEPS = 60
CONVERGED_FRACTION = 1e-5
"""A fit has converged when a step lowers its objective, or is predicted to, by less than this fraction."""
_MIN_RESIDUAL = 1e-7
"""RMSE below which a fit counts as perfect; it rounds off the tip of the cone."""


def residuals(theta: Floats, rows: PaddedSteps, form: Form) -> tuple[Floats, Floats]:
    """log(predicted/observed) of T_grad and of T_opt in each of the K rows of F profiles, (F, K) each."""
    found = slopes(theta, rows, form)
    return found[:, 0, -1], found[:, 1, -1]


def slopes(theta: Floats, rows: PaddedSteps, form: Form) -> Floats:
    """Derivatives of log T_grad and log T_opt by the P constants, and last the `residuals`; (F, 2, P + 1, K)."""
    line_and_sync = (theta[:, None, None] @ rows.design)[:, :, 0] + rows.alone
    result = np.empty((len(theta), 2, theta.shape[1] + 1, line_and_sync.shape[2]))
    # First the derivatives of the logs of α_c + β_c·b and T_sync, then of T_grad and T_opt = T_grad·(1 + e^bend)^(1/γ).
    compute, step = (result[:, at, :-1] for at in range(2))
    np.divide(rows.design, line_and_sync[:, :, None], out=result[:, :, :-1])
    logs = np.log(line_and_sync)
    log_compute = logs[:, 0] + rows.log_factor
    if form.floor:
        line, floor, lag = line_and_sync[:, 0], theta[:, FLOOR, None], slowest_of(rows.gpus)
        cube, slowest = line**3 + floor**3, 1.0 + theta[:, SLOWEST, None] * lag
        log_compute += np.log(cube) / 3.0 - logs[:, 0] + np.log(slowest)
        compute *= (line**3 / cube)[:, None]
        compute[:, FLOOR], compute[:, SLOWEST] = floor**2 / cube, lag / slowest
    gamma = theta[:, GAMMA, None]
    bend = (logs[:, 1] - log_compute) * gamma
    overlap = np.logaddexp(0.0, bend)
    share = np.exp(bend - overlap)
    step -= compute
    step *= share[:, None]
    step += compute
    overlap /= gamma
    step[:, GAMMA] = (share * bend / gamma - overlap) / gamma
    np.subtract(log_compute, rows.log_compute, out=result[:, 0, -1])
    log_compute += overlap
    np.subtract(log_compute, rows.log_step, out=result[:, 1, -1])
    return result


def evaluate(theta: Floats, rows: PaddedSteps, form: Form) -> tuple[Floats, Floats, Floats, Floats]:
    """Objective (F,), gradient (F, P), and two Hessians (F, P, P): the cone's and the plain Gauss-Newton one."""
    by = slopes(theta, rows, form)
    # With the residuals r as the last column of J, one product gives JᵀwJ, Jᵀwr and rᵀwr.
    product = (by * rows.weight[:, None, None]) @ by.swapaxes(2, 3)
    variance = product[:, :, -1, -1]
    smooth = np.sqrt(variance + _MIN_RESIDUAL * _MIN_RESIDUAL)[:, :, None]
    sigma = np.sqrt(variance)
    objective = sigma[:, 0] + sigma[:, 1]
    product /= smooth[..., None]
    both = product[:, 0] + product[:, 1]
    # The priors are squares of γ − 1 and of ratios ρ = slope/constant, with ∇ρ = ρ·(1/slope, −1/constant).
    pull = np.zeros((len(theta), len(form.ratios) + 1, both.shape[1]))
    pull[:, 0, GAMMA] = GAMMA_PRIOR**0.5
    pull[:, 0, -1] = (theta[:, GAMMA] - 1.0) * GAMMA_PRIOR**0.5
    ratio = theta.take(form.slopes, axis=1) / theta.take(form.constants, axis=1)
    ratio *= RATIO_PRIOR**0.5
    np.divide(form.ratio_signs, theta[:, None], out=pull[:, 1:, :-1])
    pull[:, 1:, -1] = 1.0
    pull[:, 1:] *= ratio[:, :, None]
    prior = pull.swapaxes(1, 2) @ pull
    objective += prior[:, -1, -1]
    prior *= 2.0
    both += prior
    plain = both[:, :-1, :-1]
    # The cone's Hessian is the plain one minus ∇σ∇σᵀ/σ, summed over both RMSEs.
    towards = product[:, :, :-1, -1]
    return objective, both[:, :-1, -1], plain - towards.swapaxes(1, 2) @ (towards / smooth), plain


def minimise(theta: Floats, pinned: Bools, rows: PaddedSteps, form: Form) -> tuple[Floats, Floats]:
    """Takes damped steps until every fit has converged; returns the constants (F, P) and the objectives (F,)."""
    count, constants = theta.shape
    lower, upper = form.lower, form.upper
    result, lowest = theta.copy(), np.empty(count)
    going = np.arange(count)
    damping = np.ones(count)
    state: tuple[Floats, ...] = (theta.copy(), *evaluate(theta, rows, form))
    for step in range(1, MAX_STEPS + 1):
        theta, objective, gradient, cone, plain = state
        free = ~(pinned | ((theta <= lower) & (gradient > 0)) | ((theta >= upper) & (gradient < 0)))
        matrix = damping[:, None, None] * plain
        matrix += cone
        matrix *= free[:, :, None] & free[:, None, :]
        # Adding a small fraction of the diagonal keeps the matrix regular if rows do not determine all constants.
        extra = 1e-3 * np.minimum(damping, damping * damping)[:, None] + 1e-12
        diagonal = matrix.reshape(len(matrix), -1)[:, :: constants + 1]
        diagonal += np.where(free, extra * plain.diagonal(0, 1, 2) + 1e-30, 1.0)
        downhill = -gradient * free
        change = np.linalg.solve(matrix, downhill[..., None])[..., 0]
        trial = np.where(free, np.minimum(np.maximum(theta + change, lower), upper), theta)
        answer = (trial, *evaluate(trial, rows, form))
        better = answer[1] < objective
        promised = (downhill[:, None] @ change[..., None])[:, 0, 0]
        least = CONVERGED_FRACTION * objective
        done = (better & (objective - answer[1] <= least)) | (promised <= least) | (damping > 1e4)
        if step == MAX_STEPS:
            done[:] = True
        if all(better.tolist()):
            state = answer
        else:
            for new, old in zip(answer, state, strict=True):
                np.copyto(old, new, where=better.reshape(-1, *[1] * (new.ndim - 1)))
        # 0.3 and 8 were tuned on 800 profiles of 1 to 60 rows, for few steps and few results worse than SciPy's.
        damping = np.where(better, np.maximum(damping * 0.3, 1e-4), damping * 8.0)
        if any(done.tolist()):
            at = going[done]
            result[at], lowest[at] = state[0][done], state[1][done]
            left = np.flatnonzero(~done)
            if not left.size:
                break
            going, damping, pinned, rows = going[left], damping[left], pinned[left], rows.take(left)
            state = tuple(each[left] for each in state)
    return result, lowest


USUAL_MISFIT, USUAL_ROWS = 0.1, 3.0
"""Prior misfit of log times (the median over 18 measured tables), and its weight in rows."""
UNSEEN_SYNC_FRACTION = 0.5
"""Prior standard deviation of a T_sync (across nodes, or within a node) that was never observed ÷ T_grad."""
UNKNOWN_SLOPE_FRACTION = 0.3
"""Prior standard deviation of a slope over GPUs, as a fraction of its constant."""
USUAL_LAG = 0.3
"""Prior standard deviation of `SLOWEST`, the constant for the lag of the slowest GPU."""
_GAMMA_SD = 2.0


def _information(theta: Floats, rows: PaddedSteps, form: Form) -> tuple[Floats, Floats]:
    """The constants' inverse covariance (F, P, P), and the residual variance of log T_grad and log T_opt (F, 2)."""
    found = slopes(theta, rows, form)
    by, off = found[:, :, :-1], found[:, :, -1]
    count = (rows.weight > 0).sum(axis=1, keepdims=True)
    squares = (rows.weight[:, None] * off**2).sum(axis=2)
    spread = (squares * count + USUAL_MISFIT**2 * USUAL_ROWS) / (count + USUAL_ROWS)
    placements = _distinct(rows.nodes * 1e6 + rows.gpus, rows.weight > 0)[:, None]
    each_row = (rows.weight * placements)[:, None] / spread[..., None]
    information = ((by * each_row[:, :, None]) @ by.swapaxes(2, 3)).sum(axis=1)
    diagonal = np.arange(theta.shape[1])
    information[:, diagonal, diagonal] += _prior_sd(theta, rows, form) ** -2.0
    return information, spread


def _prior_sd(theta: Floats, rows: PaddedSteps, form: Form) -> Floats:
    """Prior standard deviations (F, P) of the constants around their fitted values."""
    compute = np.exp((rows.weight * rows.log_compute).sum(axis=1))
    batch = (rows.weight * rows.batch).sum(axis=1)
    result = np.empty_like(theta)
    result[:, ALPHA_C] = compute
    result[:, BETA_C] = compute / batch
    result[:, GAMMA] = _GAMMA_SD
    for constant, seen in ((ALPHA_N, rows.across.any(axis=1)), (ALPHA_R, rows.within.any(axis=1))):
        unseen = UNSEEN_SYNC_FRACTION * compute
        result[:, constant] = np.maximum(2.0 * theta[:, constant], np.where(seen, 0.1 * unseen, unseen))
    for slope, constant in form.ratios.items():
        around = UNKNOWN_SLOPE_FRACTION * np.minimum(result[:, constant], theta[:, constant] + 0.1 * compute)
        result[:, slope] = np.maximum(around, theta[:, slope])
    if form.floor:
        result[:, FLOOR] = compute
        result[:, SLOWEST] = USUAL_LAG
    return result


UNSEEN_NODES_FACTOR = 1.1
"""Minimum time of an all-reduce across nodes ÷ within a node, until a job has spanned nodes (Pollux's artifact)."""
UNSEEN_NODES_GROWTH = 0.06
"""Minimum relative growth of the all-reduce time when the number of nodes doubles, until a job has spanned more than
two nodes. In 11 of 12 tables of Pollux and Sia the time grows more; the median is 0.17."""
_START_GAMMAS = (1.0, 1.7, 4.0)
_ROBUST_ROUNDS = 8
_CAUCHY = 2.385
"""Cauchy weights 1/(1 + (e/(2.385·s))²) keep 95 % of least squares' efficiency on clean data (Holland, Welsch 1977)."""
_MIN_SCALE = 0.01
"""Minimum scale s of the residuals e, so that rows much closer to the model than this keep their weight."""


@dataclass(frozen=True, slots=True)
class Fits:
    """One fit per profile.

    theta: (F, P), in the order of `form.parameters`. objective: (F,), the minimum found.
    """

    form: Form
    theta: Floats
    objective: Floats
    rows: PaddedSteps

    def log_step_time_sd(
        self, nodes: ArrayLike, gpus: ArrayLike, local_batch: ArrayLike, crowd: ArrayLike | None = None
    ) -> Floats:
        """Standard deviation (F, S) of log(measured/predicted) step time at S shapes; the arguments are (S,).

        By the delta method var = s² + gᵀCg, with g = ∂log T_opt/∂θ, s the misfit (0.1 before any row) and C the inverse
        of the rows' information plus a wide prior (`_prior_sd`). All rows of one (N, M) together have the information
        of one row, because their errors are correlated.
        """
        most = evenly(nodes, gpus) if crowd is None else crowd
        columns = [np.asarray(each, dtype=float) for each in (nodes, gpus, local_batch, most)]
        shape = (len(self.theta), np.broadcast(*columns, np.empty(1)).size)
        n, m, b, c = (np.broadcast_to(each, shape) for each in columns)
        zero = np.zeros(shape)
        rows = PaddedSteps(n, m, c, b, *self.form.lines(n, m, c, b), zero, zero, zero, zero)
        by_shape = slopes(self.theta, rows, self.form)[:, 1, :-1]
        information, spread = _information(self.theta, self.rows, self.form)
        covered = np.linalg.solve(information, by_shape)
        result: Floats = np.sqrt(spread[:, 1:] + (by_shape * covered).sum(axis=1))
        return result

    def parameter_sd(self) -> Floats:
        """Standard deviation of each constant, (F, P): the square root of C's diagonal in `log_step_time_sd`."""
        information, _ = _information(self.theta, self.rows, self.form)
        return np.sqrt(np.diagonal(np.linalg.inv(information), axis1=1, axis2=2))


def fit(observations: Sequence[ObservedSteps], *, form: Form = POLLUX, robust: bool = False, min_rows: int = 1) -> Fits:
    """Fits the constants of each profile.

    robust: whether rows that contradict the others lose weight (iteratively reweighted Cauchy weights). This is used
    for measured tables but, as in Pollux, not for policies' beliefs. Raises InputError for fewer than `min_rows` rows.
    """
    return fit_rows(padded(observations, form, min_rows=min_rows), form, robust=robust)


def fit_rows(rows: PaddedSteps, form: Form, *, robust: bool = False) -> Fits:
    """`fit` on rows already padded."""
    theta, objective = _best(rows, form)
    if robust:
        for _ in range(_ROBUST_ROUNDS):
            rows = rows.weighted(_trust(theta, rows, form))
            theta, objective = _best(rows, form, theta)
    unseen = ~rows.across.any(axis=1)
    pairs = [(ALPHA_N, ALPHA_R), (BETA_N, BETA_R)] + ([(RHO_N, RHO_R)] if form.floor else [])
    for across, within in pairs:
        theta[unseen, across] = np.maximum(theta[unseen, across], UNSEEN_NODES_FACTOR * theta[unseen, within])
    if form.crowd:
        weight = rows.weight * rows.across
        sync = (theta[:, None] @ rows.design[:, 1])[:, 0]
        typical = (weight * sync).sum(axis=1) / (weight.sum(axis=1) + 1e-300)
        beyond_two = (rows.across & (rows.nodes > 2)).any(axis=1)
        least = np.where(beyond_two, 0.0, UNSEEN_NODES_GROWTH * typical - theta[:, BETA_N])
        theta[:, NODES] = np.maximum(theta[:, NODES], least)
    return Fits(form, theta, objective, rows)


def _best(rows: PaddedSteps, form: Form, start: Floats | None = None) -> tuple[Floats, Floats]:
    """The best result from several starts, including `start`."""
    count, times = len(rows.batch), len(_START_GAMMAS)
    many = rows.take(np.tile(np.arange(count), times))
    starts = _start(many, form, np.repeat(_START_GAMMAS, count)[:, None])
    if start is not None:
        many, times = rows.take(np.tile(np.arange(count), times + 1)), times + 1
        starts = np.concatenate([starts, start])
    pinned, held = _pins(rows, form)
    pinned, held = np.tile(pinned, (times, 1)), np.tile(held, (times, 1))
    theta, objective = minimise(np.where(pinned, held, starts), pinned, many, form)
    best = objective.reshape(times, count).argmin(axis=0) * count + np.arange(count)
    return theta[best], objective[best]


def _trust(theta: Floats, rows: PaddedSteps, form: Form) -> Floats:
    """Weight of each row, (F, K). The larger the row's residuals, the lower is its weight."""
    first, second = residuals(theta, rows, form)
    off = np.sqrt(first**2 + second**2)
    real = rows.weight > 0
    typical = np.nanmedian(np.where(real, off, np.nan), axis=1, keepdims=True)
    scale = _CAUCHY * np.maximum(1.4826 * typical, _MIN_SCALE)
    return real / (1.0 + (off / scale) ** 2)


def _pins(rows: PaddedSteps, form: Form) -> tuple[Bools, Floats]:
    """Which constants the observations do not determine, (F, P), and the values at which these are fixed, (F, P)."""
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
        # π and β_n can be told apart only if jobs with several GPUs per node have run on two nodes and on more nodes.
        more = across & ~two & (rows.gpus > rows.nodes)
        pinned[:, PAIR] = ~((two & (rows.gpus > 2)).any(axis=1) & more.any(axis=1))
    if form.crowd:
        few = _distinct(rows.crowd, across) < 3
        pinned[:, RHO_N] = pinned[:, CARD] = pinned[:, CROWD] = few
        pinned[:, NODES] = _distinct(rows.nodes, across) < 2
    return pinned, held


def _distinct(values: Floats, where: Bools) -> Ints:
    """Number of distinct marked values of each profile, (F,)."""
    ordered = np.sort(np.where(where, values, np.inf), axis=1)
    fresh = (ordered[:, 1:] > ordered[:, :-1]) & np.isfinite(ordered[:, 1:])
    result: Ints = np.isfinite(ordered[:, 0]) + fresh.sum(axis=1)
    return result


def _start(rows: PaddedSteps, form: Form, gamma: Floats) -> Floats:
    """Start values for a given γ, (F, 1): regressions of T_grad on b, and of T_sync on the terms of β_n and β_r."""
    compute, step = np.exp(rows.log_compute - rows.log_factor), np.exp(rows.log_step)
    # The T_sync that explains the step time with this γ, at least 1 % of the step.
    ratio = np.minimum(np.exp(rows.log_compute - rows.log_step), 1.0) ** gamma
    sync = step * np.maximum(1.0 - ratio, 1e-2**gamma) ** (1.0 / gamma)
    y = np.stack([compute, sync, sync], axis=1)
    x = np.stack([rows.batch, rows.design[:, 1, BETA_N], rows.design[:, 1, BETA_R]], axis=1)
    weight = np.stack([rows.weight, rows.weight * rows.across, rows.weight * rows.within], axis=1) / (y * y)
    total = weight.sum(axis=2) + 1e-300
    mean_x, mean_y = (weight * x).sum(axis=2) / total, (weight * y).sum(axis=2) / total
    off = x - mean_x[..., None]
    slope = (weight * off * y).sum(axis=2) / ((weight * off * off).sum(axis=2) + 1e-12 * total)
    steepest = mean_y / (np.array([0.0, 1.0, 1.0]) + mean_x)
    slope = np.clip(slope, 1e-3 * steepest, 0.9 * steepest)
    # With only one batch size, α_c is fixed at half of T_grad, so the slope has to explain the other half.
    slope[:, 0] = np.where(_distinct(rows.batch, rows.weight > 0) == 1, 0.5 * steepest[:, 0], slope[:, 0])
    theta = np.empty((len(rows.batch), len(form.parameters)))
    theta[:, 1:6:2] = slope
    theta[:, 0:6:2] = mean_y - slope * mean_x
    theta[:, GAMMA] = gamma[:, 0]
    if form.floor:
        theta[:, FLOOR] = 0.7 * np.where(rows.weight > 0, compute, np.inf).min(axis=1)
        theta[:, SLOWEST] = 0.05
        theta[:, [RHO_N, RHO_R, PAIR]] = 0.1 * theta[:, [ALPHA_N, ALPHA_R, ALPHA_N]]
    if form.crowd:
        theta[:, [CARD, CROWD, NODES]] = 0.1 * theta[:, [ALPHA_N]]
    return np.clip(theta, form.lower, form.upper)
