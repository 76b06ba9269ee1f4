"""Robust step-time model of one application on one GPU type, fitted to a table of measurements.

The model has the form `SATURATING`, or `CROWDED` if that predicts the table's placements better. Two corrections are
added to the logarithm of its smooth T_grad(b). Each is the median residual of n rows × n/(n + κ), with κ = 2, because
few rows prove little. For one or two rows, n is the sum of their weights in the fit. The corrections are:

- by batch size, interpolated in log b and constant beyond the measured batches: libraries choose kernels by shape, so a
  batch of 57 may be faster than one of 40;
- on a single GPU: its step is not exactly as long as a step on several GPUs minus the reported synchronisation.

A form with more constants always fits better, but may predict unmeasured placements worse. So the form is chosen by
five-fold cross-validation over the placements across nodes. The crowded form must win by a margin: where both do
equally well, as on most tables measured so far, the saturating form predicts larger clusters
better.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from synergy_core.performance.goodput.fit import Fits, fit_rows, residuals
from synergy_core.performance.goodput.throughput import (
    CROWDED,
    GAMMA,
    SATURATING,
    Form,
    ObservedSteps,
    PaddedSteps,
    overlapped,
    padded,
)
from synergy_core.units import Floats, Ints

MIN_PLACEMENTS = 12
"""Minimum number of placements across nodes for which the crowded form is tried."""
MIN_ERROR_SAVED_FRACTION = 0.02
"""Fraction of the error that the crowded form must save to be chosen. On synthetic all-reduces that depend on the
number of GPUs it saves less, or adds error; on those that depend on the crowd it saves more (tests/test_crowd.py)."""
_PARTS = 5


def saved_by_crowd(rows: PaddedSteps) -> float:
    """Fraction of the saturating form's cross-validated error that the crowded form saves; 0 for too few placements.

    All placements have the same weight, no matter how many batch sizes were measured on them.
    """
    placement = placements_across(rows)
    several = placement >= 0
    count = int(placement.max()) + 1
    if count < MIN_PLACEMENTS:
        return 0.0
    rows_each = np.bincount(placement[several], minlength=count)
    plain, crowded = (
        np.bincount(placement[several], held_out_error(rows, form, placement)[several], count) / rows_each
        for form in (SATURATING, CROWDED)
    )
    return float(1.0 - crowded.mean() / plain.mean())


def held_out_error(rows: PaddedSteps, form: Form, placement: Ints) -> Floats:
    """|log(predicted/measured)| of each row's step time, (K,). The prediction is that of a fit to the other folds.

    placement: (K,), the number of each row's placement; rows with negative numbers are in every fit and have error 0.
    """
    part_of = np.random.default_rng(0).permutation(int(placement.max()) + 1) % _PARTS
    part = np.where(placement >= 0, part_of[placement], -1)
    held_out = part == np.arange(_PARTS)[:, None]
    design, alone = form.lines(rows.nodes, rows.gpus, rows.crowd, rows.batch)
    folds = replace(rows, design=design, alone=alone).take(np.zeros(_PARTS, dtype=np.int64))
    folds = folds.weighted(np.where(held_out | (folds.weight == 0.0), 0.0, 1.0))
    error = np.abs(residuals(fit_rows(folds, form).theta, folds, form)[1])
    result: Floats = np.where(held_out, error, 0.0).sum(axis=0)
    return result


def placements_across(rows: PaddedSteps) -> Ints:
    """The number of each row's placement, (K,): equal (N, M, C) have the same number. −1 for rows on one node."""
    shapes = np.stack([rows.nodes[0], rows.gpus[0], rows.crowd[0]])
    across = rows.across[0]
    result = np.full(shapes.shape[1], -1)
    if across.any():
        result[across] = np.unique(shapes[:, across], axis=1, return_inverse=True)[1].reshape(-1)
    return result


MIN_ROWS = 3
_PSEUDO_ROWS = 2.0
_BACKFITS = 2
_MAX_KNOTS = 24


@dataclass(frozen=True, slots=True)
class Calibrated:
    """A fitted form with factors that correct its T_grad.

    knots: batch sizes, rising. log_factors: ln of the factor at each knot. alone_log_factor: added to these on one GPU.
    """

    form: Form
    theta: Floats
    knots: Floats
    log_factors: Floats
    alone_log_factor: float = 0.0

    def step_time(
        self, nodes: ArrayLike, gpus: ArrayLike, local_batch: ArrayLike, crowd: ArrayLike | None = None
    ) -> Floats:
        """T_opt in seconds; the arguments broadcast. crowd: None if GPUs are spread evenly."""
        compute = self.gradient_time(local_batch, gpus)
        return overlapped(compute, self.form.sync_time(self.theta, nodes, gpus, crowd), self.theta[GAMMA])

    def gradient_time(self, local_batch: ArrayLike, gpus: ArrayLike) -> Floats:
        b = np.asarray(local_batch, dtype=np.float64)
        return self.form.gradient_time(self.theta, b, gpus) * np.exp(self.log_factor(b, np.asarray(gpus)))

    def log_factor(self, local_batch: Floats, gpus: NDArray[np.generic]) -> Floats:
        result: Floats = np.interp(np.log(local_batch), np.log(self.knots), self.log_factors)
        return result + np.where(gpus == 1, self.alone_log_factor, 0.0)


def calibrate(
    profile: ObservedSteps, *, form: Form | None = None, robust: bool = True, deviations: bool = True
) -> tuple[Calibrated, Fits]:
    """The calibrated model, and the fit from which it was made; the fit gives the error and the uncertainty.

    form: None chooses the saturating or the crowded form by cross-validation. deviations: whether to correct T_grad at
    measured batch sizes and on one GPU. Raises InputError for fewer than 3 rows.
    """
    if form is None:
        model, fitted = calibrate(profile, form=SATURATING, robust=robust, deviations=deviations)
        if saved_by_crowd(fitted.rows) <= MIN_ERROR_SAVED_FRACTION:
            return model, fitted
        form = CROWDED
    rows = padded([profile], form, min_rows=MIN_ROWS)
    fitted = fit_rows(rows, form, robust=robust)
    model = Calibrated(form, fitted.theta[0], np.ones(1), np.zeros(1))
    for _ in range(_BACKFITS if deviations else 0):
        trust = fitted.rows.weight * (rows.weight > 0).sum()
        model = _deviating(replace(model, theta=fitted.theta[0]), replace(rows, weight=trust))
        rows = replace(rows, log_factor=model.log_factor(rows.batch, rows.gpus))
        fitted = fit_rows(rows, form, robust=robust)
    return replace(model, theta=fitted.theta[0]), fitted


def _deviating(model: Calibrated, rows: PaddedSteps) -> Calibrated:
    """The model with new correction factors from one profile's weighted rows."""
    smooth = replace(rows, log_factor=np.zeros_like(rows.log_factor))
    residual = -residuals(model.theta[None], smooth, model.form)[0][0]
    batch, weight, alone = rows.batch[0], rows.weight[0], rows.gpus[0] == 1
    knots = np.unique(batch)
    group = np.searchsorted(knots, batch)
    if len(knots) > _MAX_KNOTS:
        # Each batch size counts at the nearest knot of a geometric grid.
        grid = np.geomspace(knots[0], knots[-1], _MAX_KNOTS)
        nearest = np.abs(np.log(batch)[:, None] - np.log(grid)).argmin(axis=1)
        used = np.unique(nearest)
        knots, group = grid[used], np.searchsorted(used, nearest)
    by_batch = np.zeros(len(knots))
    for index in range(len(knots)):
        several = (group == index) & ~alone
        by_batch[index] = _shrunk_median(residual, weight, several if several.any() else group == index)
    alone_factor = _shrunk_median(residual - by_batch[group], weight, alone)
    return replace(model, knots=knots, log_factors=by_batch, alone_log_factor=alone_factor)


def _shrunk_median(values: Floats, weights: Floats, where: NDArray[np.bool_]) -> float:
    """The median of the n marked values × n/(n + κ). If one or two are marked, n is the sum of their weights."""
    if not where.any():
        return 0.0
    rows = int(where.sum())
    count = float(rows if rows > 2 else weights[where].sum())
    return float(np.median(values[where])) * count / (count + _PSEUDO_ROWS)


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Errors e = (predicted − measured)/measured of the n rows that have a prediction; NaN where n is too small.

    mape: mean |e|. median, p90, max: of |e|. bias: mean e, positive if predictions are too long on average.
    failures: rows without a prediction. spearman: rank correlation of predicted and measured, NaN below 2 rows.
    """

    n: int
    mape: float
    median: float
    p90: float
    max: float
    bias: float
    failures: int
    spearman: float


def accuracy(predicted: Floats, measured: Floats) -> Accuracy:
    """Accuracy of predictions, (rows,), in the unit of `measured`; those that are not finite and > 0 are failures."""
    made = np.isfinite(predicted) & (predicted > 0)
    failures = int((~made).sum())
    if not made.any():
        nan = float("nan")
        return Accuracy(0, nan, nan, nan, nan, nan, failures, nan)
    found, truth = predicted[made], measured[made]
    signed = (found - truth) / truth
    error = np.abs(signed)
    return Accuracy(
        n=int(made.sum()),
        mape=float(error.mean()),
        median=float(np.median(error)),
        p90=float(np.quantile(error, 0.9)),
        max=float(error.max()),
        bias=float(signed.mean()),
        failures=failures,
        spearman=spearman(found, truth),
    )


def spearman(first: Floats, second: Floats) -> float:
    """The rank correlation of two arrays, with ties at their mean rank; NaN if either is constant."""
    if len(first) < 2:
        return float("nan")
    centred = []
    for values in (first, second):
        # Equals scipy.stats.rankdata, whose import takes longer than the rest of a summary.
        _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
        ranks = (np.cumsum(counts) - (counts - 1) / 2.0)[group]
        centred.append(ranks - ranks.mean())
    a, b = centred
    spread = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / spread if spread > 0 else float("nan")
