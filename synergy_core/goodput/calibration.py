"""One application on one GPU type, from a table of measurements: as exact as the table allows, and robust.

A fit in the saturating form (`forms.SATURATING`), or in that of crowded nodes where the table's own placements call
for it (`held_out`), and on top of its smooth T_grad(b) two deviations of its logarithm, each the median of the rows
concerned, shrunk by κ = 2 pseudo-rows (one or two rows count as far as the fit trusts them):

- by batch size, interpolated in log b, constant outside: kernels are chosen by shape, so 57 samples may be faster than
  40;
- for one GPU alone: what several GPUs report as synchronisation does not leave exactly the time that one takes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from synergy_core.arrays import Floats
from synergy_core.goodput.fit import Fits, fit_rows
from synergy_core.goodput.forms import CROWDED, GAMMA, SATURATING, Form
from synergy_core.goodput.held_out import calls_for_crowd
from synergy_core.goodput.minimise import residuals
from synergy_core.goodput.observations import ObservedSteps, PaddedSteps, padded
from synergy_core.goodput.throughput import overlapped

LEAST_ROWS = 3
_PSEUDO_ROWS = 2.0
_BACKFITS = 2
_MOST_KNOTS = 24


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
        """T_grad in seconds; the arguments broadcast."""
        b = np.asarray(local_batch, dtype=np.float64)
        result: Floats = self.form.gradient_time(self.theta, b, gpus) * np.exp(self.log_factor(b, np.asarray(gpus)))
        return result

    def log_factor(self, local_batch: Floats, gpus: NDArray[np.generic]) -> Floats:
        """log of what T_grad deviates by."""
        result: Floats = np.interp(np.log(local_batch), np.log(self.knots), self.log_factors)
        return result + np.where(gpus == 1, self.alone_log_factor, 0.0)


def calibrate(
    profile: ObservedSteps, *, form: Form | None = None, robust: bool = True, deviations: bool = True
) -> tuple[Calibrated, Fits]:
    """The constants and the fit they come from (for its error and uncertainty).

    form: None for the saturating or the crowded one, whichever foretells held-out placements better.
    deviations: whether T_grad may deviate from its formula at measured batch sizes, and on one GPU.
    Raises InputError for fewer than 3 rows and for times that cannot be.
    """
    if form is None:
        model, fitted = calibrate(profile, form=SATURATING, robust=robust, deviations=deviations)
        if not calls_for_crowd(fitted.rows):
            return model, fitted
        form = CROWDED
    rows = padded([profile], form, least=LEAST_ROWS)
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
    if len(knots) > _MOST_KNOTS:
        # Neighbours share a knot: the nearest of a geometric grid.
        grid = np.geomspace(knots[0], knots[-1], _MOST_KNOTS)
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
