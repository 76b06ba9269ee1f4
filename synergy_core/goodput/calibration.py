"""One application on one GPU type, from a table of measurements: as exact as the table allows, and robust.

A fit in the saturating form, or in that of crowded nodes where the table's own placements call for it. On top of its
smooth T_grad(b) come two deviations of its logarithm, each the median of the rows concerned, shrunk by κ = 2
pseudo-rows (one or two rows count as far as the fit trusts them):

- by batch size, interpolated in log b, constant outside: kernels are chosen by shape, so 57 samples may be faster than
  40;
- for one GPU alone: what several GPUs report as synchronisation does not leave exactly the time that one takes.

A richer form always fits better, so how well a form fits says little of what it predicts beyond its rows. To choose
one, the placements across nodes are dealt into five parts; each form is fitted to four and scored on the fifth, in
turn. The crowded form must win by a margin: where both do equally well, as on most tables measured so far (bench/fit.py
--forms), the simpler one predicts larger clusters better.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from synergy_core.goodput.fit import Fits, fit_rows, residuals
from synergy_core.goodput.throughput import (
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
"""With fewer placements across nodes the crowded form is not tried."""
MIN_ERROR_SAVED_FRACTION = 0.02
"""The fraction of the error that the crowded form must save. Where all-reduces are planted to depend on all GPUs it
saves less, by chance, and mostly loses; where on the crowd, more (tests/test_crowd.py)."""
_PARTS = 5


def saved_by_crowd(rows: PaddedSteps) -> float:
    """Which fraction of the saturating form's error on held-out placements the crowded one saves; 0 for few of them.

    Each placement counts alike, however many batch sizes were measured on it.
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
    """|log(predicted/measured)| of each row's step, (K,), by a fit to the parts that it is not in.

    placement: (K,), numbers that rows of one placement share; negative ones are fitted to each time, and never scored.
    """
    dealt = np.random.default_rng(0).permutation(int(placement.max()) + 1) % _PARTS
    part = np.where(placement >= 0, dealt[placement], -1)
    out = part == np.arange(_PARTS)[:, None]
    design, alone = form.lines(rows.nodes, rows.gpus, rows.crowd, rows.batch)
    folds = replace(rows, design=design, alone=alone).take(np.zeros(_PARTS, dtype=np.int64))
    folds = folds.weighted(np.where(out | (folds.weight == 0.0), 0.0, 1.0))
    off = np.abs(residuals(fit_rows(folds, form).theta, folds, form)[1])
    result: Floats = np.where(out, off, 0.0).sum(axis=0)
    return result


def placements_across(rows: PaddedSteps) -> Ints:
    """A number for each different (N, M, C) across nodes, (K,); -1 for rows on one node."""
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
    """A form with its constants, and by what T_grad deviates from it.

    knots: batch sizes, rising; log_factors: logarithm of the deviation there. alone_log_factor: of one GPU's.
    """

    form: Form
    theta: Floats
    knots: Floats
    log_factors: Floats
    alone_log_factor: float = 0.0

    def step_time(
        self, nodes: ArrayLike, gpus: ArrayLike, local_batch: ArrayLike, crowd: ArrayLike | None = None
    ) -> Floats:
        """T_opt in seconds; the arguments broadcast. crowd: None for GPUs that are spread evenly."""
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
    """The constants and the fit they come from (for its error and uncertainty).

    form: None for the saturating or the crowded one, whichever foretells held-out placements better.
    deviations: whether T_grad may deviate from its formula at measured batch sizes, and on one GPU.
    Raises InputError for fewer than 3 rows.
    """
    if form is None:
        model, fitted = calibrate(profile, form=SATURATING, robust=robust, deviations=deviations)
        if saved_by_crowd(fitted.rows) <= MIN_ERROR_SAVED_FRACTION:
            return model, fitted
        form = CROWDED
    rows = padded([profile], form, least=MIN_ROWS)
    fitted = fit_rows(rows, form, robust=robust)
    model = Calibrated(form, fitted.theta[0], np.ones(1), np.zeros(1))
    for _ in range(_BACKFITS if deviations else 0):
        trust = fitted.rows.weight * (rows.weight > 0).sum()
        model = _deviating(replace(model, theta=fitted.theta[0]), replace(rows, weight=trust))
        rows = replace(rows, log_factor=model.log_factor(rows.batch, rows.gpus))
        fitted = fit_rows(rows, form, robust=robust)
    return replace(model, theta=fitted.theta[0]), fitted


def _deviating(model: Calibrated, rows: PaddedSteps) -> Calibrated:
    """The model with the deviations of one profile's rows, weighted by what they count."""
    smooth = replace(rows, log_factor=np.zeros_like(rows.log_factor))
    off = -residuals(model.theta[None], smooth, model.form)[0][0]
    batch, counts, alone = rows.batch[0], rows.weight[0], rows.gpus[0] == 1
    knots = np.unique(batch)
    group = np.searchsorted(knots, batch)
    if len(knots) > _MAX_KNOTS:
        # Neighbours share a knot: the nearest of a geometric grid.
        grid = np.geomspace(knots[0], knots[-1], _MAX_KNOTS)
        nearest = np.abs(np.log(batch)[:, None] - np.log(grid)).argmin(axis=1)
        used = np.unique(nearest)
        knots, group = grid[used], np.searchsorted(used, nearest)
    of_batch = np.zeros(len(knots))
    for at in range(len(knots)):
        mine = (group == at) & ~alone
        of_batch[at] = _shrunk_median(off, counts, mine if mine.any() else group == at)
    of_one = _shrunk_median(off - of_batch[group], counts, alone)
    return replace(model, knots=knots, log_factors=of_batch, alone_log_factor=of_one)


def _shrunk_median(values: Floats, counts: Floats, where: NDArray[np.bool_]) -> float:
    """The median of some rows, n/(n + κ) of it; n is the rows, or if only one or two, what they count."""
    if not where.any():
        return 0.0
    rows = int(where.sum())
    says = float(rows if rows > 2 else counts[where].sum())
    return float(np.median(values[where])) * says / (says + _PSEUDO_ROWS)


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Over n rows that were predicted; e = (predicted − measured)/measured. NaN where n is too small to tell.

    mape: mean |e|. median, p90, max: of |e|. bias: mean e, positive where predictions are too long.
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
    """Compares two arrays (rows,) in the same unit; a prediction that is not a positive number is a failure."""
    made = np.isfinite(predicted) & (predicted > 0)
    failures = int((~made).sum())
    if not made.any():
        nan = float("nan")
        return Accuracy(0, nan, nan, nan, nan, nan, failures, nan)
    told, truth = predicted[made], measured[made]
    signed = (told - truth) / truth
    off = np.abs(signed)
    return Accuracy(
        n=int(made.sum()),
        mape=float(off.mean()),
        median=float(np.median(off)),
        p90=float(np.quantile(off, 0.9)),
        max=float(off.max()),
        bias=float(signed.mean()),
        failures=failures,
        spearman=spearman(told, truth),
    )


def spearman(first: Floats, second: Floats) -> float:
    """The rank correlation of two arrays, ties at their mean rank; NaN where either does not vary."""
    if len(first) < 2:
        return float("nan")
    centred = []
    for values in (first, second):
        # As scipy.stats.rankdata, whose import takes longer than all that a summary computes.
        _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
        ranks = (np.cumsum(counts) - (counts - 1) / 2.0)[group]
        centred.append(ranks - ranks.mean())
    a, b = centred
    spread = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / spread if spread > 0 else float("nan")
