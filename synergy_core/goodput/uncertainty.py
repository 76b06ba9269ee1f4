"""How sure a fit is of a step time, by the delta method."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from synergy_core.arrays import Floats
from synergy_core.goodput.forms import ALPHA_C, ALPHA_N, ALPHA_R, BETA_C, FLOOR, GAMMA, SLOWEST, Form
from synergy_core.goodput.minimise import slopes
from synergy_core.goodput.observations import PaddedSteps
from synergy_core.goodput.throughput import TINY, evenly

USUAL_MISFIT, USUAL_ROWS = 0.1, 3.0
"""Misfit of log times to expect before seeing any (the median over 18 measured tables), and the rows it counts for."""
UNSEEN_SYNC_FRACTION = 0.5
"""An all-reduce of a kind never observed may cost up to this much of T_grad (one standard deviation)."""
UNKNOWN_SLOPE_FRACTION = 0.3
"""A slope over GPUs is known a priori to this much of its constant."""
USUAL_LAG = 0.3
"""How much longer the slowest of many GPUs takes, a priori."""
_GAMMA_SD = 2.0


def log_step_time_sd(
    theta: Floats,
    rows: PaddedSteps,
    form: Form,
    nodes: ArrayLike,
    gpus: ArrayLike,
    local_batch: ArrayLike,
    crowd: ArrayLike | None = None,
) -> Floats:
    """Standard deviation of log(measured/predicted) step time, (F, S), at S shapes; see `Fits.log_step_time_sd`."""
    information, spread = _information(theta, rows, form)
    by_shape = _shape_slopes(theta, form, nodes, gpus, local_batch, crowd)
    covered = np.linalg.solve(information, by_shape)
    result: Floats = np.sqrt(spread[:, 1:] + (by_shape * covered).sum(axis=1))
    return result


def parameter_sd(theta: Floats, rows: PaddedSteps, form: Form) -> Floats:
    """Standard deviation of each constant, (F, P)."""
    information, _ = _information(theta, rows, form)
    result: Floats = np.sqrt(np.diagonal(np.linalg.inv(information), axis1=1, axis2=2))
    return result


def _information(theta: Floats, rows: PaddedSteps, form: Form) -> tuple[Floats, Floats]:
    """The inverse covariance of the constants (F, P, P), and the variance of log T_grad and log T_opt (F, 2)."""
    first, second, by = slopes(theta, rows, form)
    count = (rows.weight > 0).sum(axis=1)
    squares = np.stack([(rows.weight * each**2).sum(axis=1) for each in (first, second)], axis=1)
    spread = (squares * count[:, None] + USUAL_MISFIT**2 * USUAL_ROWS) / (count[:, None] + USUAL_ROWS)
    each_row = (rows.weight * _distinct_shapes(rows)[:, None])[:, None] / spread[..., None]
    information = ((by * each_row[:, :, None]) @ by.swapaxes(2, 3)).sum(axis=1)
    diagonal = np.arange(theta.shape[1])
    information[:, diagonal, diagonal] += prior_sd(theta, rows, form) ** -2.0
    return information, spread


def prior_sd(theta: Floats, rows: PaddedSteps, form: Form) -> Floats:
    """What is believed of each constant (F, P) before any row: standard deviations around the fitted values."""
    compute = np.exp((rows.weight * rows.log_compute).sum(axis=1))
    batch = (rows.weight * rows.batch).sum(axis=1)
    result = np.empty_like(theta)
    result[:, ALPHA_C] = compute
    result[:, BETA_C] = compute / batch
    result[:, GAMMA] = _GAMMA_SD
    for constant, seen in ((ALPHA_N, rows.across.any(axis=1)), (ALPHA_R, rows.within.any(axis=1))):
        unseen = UNSEEN_SYNC_FRACTION * compute
        result[:, constant] = np.maximum(2.0 * theta[:, constant], np.where(seen, 0.1 * unseen, unseen))
    for slope, constant in form.ratios:
        around = UNKNOWN_SLOPE_FRACTION * np.minimum(result[:, constant], theta[:, constant] + 0.1 * compute)
        result[:, slope] = np.maximum(around, theta[:, slope])
    if form.floor:
        result[:, FLOOR] = compute
        result[:, SLOWEST] = USUAL_LAG
    return result


def _distinct_shapes(rows: PaddedSteps) -> Floats:
    """How many different (N, M) each profile has seen, (F,)."""
    keys = np.where(rows.weight > 0, rows.nodes * 1e6 + rows.gpus, np.inf)
    ordered = np.sort(keys, axis=1)
    fresh = (ordered[:, 1:] > ordered[:, :-1]) & np.isfinite(ordered[:, 1:])
    result: Floats = 1.0 + fresh.sum(axis=1)
    return result


def _shape_slopes(
    theta: Floats,
    form: Form,
    nodes: ArrayLike,
    gpus: ArrayLike,
    local_batch: ArrayLike,
    crowd: ArrayLike | None,
) -> Floats:
    """∂log T_opt/∂θ at S shapes, (F, P, S)."""
    most = evenly(nodes, gpus) if crowd is None else crowd
    columns = np.broadcast_arrays(
        *(np.atleast_1d(np.asarray(each, dtype=float)) for each in (nodes, gpus, local_batch, most))
    )
    shape = (len(theta), len(columns[0]))
    n, m, b, c = (np.broadcast_to(each, shape) for each in columns)
    zero = np.zeros(shape)
    alone = np.where(m > 1, 0.0, TINY + TINY * TINY)
    rows = PaddedSteps(n, m, c, b, form.design(n, m, c).swapaxes(0, 1), alone, zero, zero, zero, zero)
    return slopes(theta, rows, form)[2][:, 1]
