"""One application on one GPU type, from a table of measurements: as exact as the table allows, and robust.

A fit in the saturating form (`forms.SATURATING`), and on top of its smooth T_grad(b) what each measured batch size
deviates by: kernels are chosen by shape, so that 57 samples can be faster than 40. The deviation is the rows' mean,
shrunk by κ = 2 pseudo-rows, interpolated in log b, constant outside.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from synergy_core.goodput.fit import Fits, fit_rows
from synergy_core.goodput.forms import GAMMA, SATURATING, Form
from synergy_core.goodput.minimise import residuals
from synergy_core.goodput.observations import Profile, Rows, padded
from synergy_core.goodput.throughput import overlapped

Floats = NDArray[np.float64]

LEAST_ROWS = 3
_PSEUDO_ROWS = 2.0
_BACKFITS = 2
_MOST_KNOTS = 24


@dataclass(frozen=True, slots=True)
class Calibrated:
    """A form with its constants. knots: batch sizes, rising; log_factors: log of what T_grad deviates by there."""

    form: Form
    theta: Floats
    knots: Floats
    log_factors: Floats

    def step_time(self, nodes: ArrayLike, gpus: ArrayLike, local_batch: ArrayLike) -> Floats:
        """T_opt in seconds; the arguments broadcast."""
        n, m, b = (np.asarray(each, dtype=np.float64) for each in (nodes, gpus, local_batch))
        return overlapped(self.gradient_time(b), self.form.sync_time(self.theta, n, m), self.theta[GAMMA])

    def gradient_time(self, local_batch: ArrayLike) -> Floats:
        """T_grad in seconds."""
        b = np.asarray(local_batch, dtype=np.float64)
        result: Floats = self.form.gradient_time(self.theta, b) * np.exp(_between(b, self.knots, self.log_factors))
        return result


def calibrate(
    profile: Profile, *, form: Form = SATURATING, robust: bool = True, batch_curve: bool = True
) -> tuple[Calibrated, Fits]:
    """The constants and the fit they come from (for its error and uncertainty).

    batch_curve: whether T_grad may deviate from its formula at measured batch sizes.
    Raises InputError for fewer than 3 rows and for times that cannot be.
    """
    rows = padded([profile], form, least=LEAST_ROWS)
    fitted = fit_rows(rows, form, robust=robust)
    knots = np.ones(1)
    log_factors = np.zeros(1)
    if batch_curve:
        for _ in range(_BACKFITS):
            trust = fitted.rows.weight * (rows.weight > 0).sum()
            knots, log_factors = _deviations(fitted.theta, replace(rows, weight=trust), form)
            rows = replace(rows, log_factor=_between(rows.batch, knots, log_factors))
            fitted = fit_rows(rows, form, robust=robust)
    return Calibrated(form, fitted.theta[0], knots, log_factors), fitted


def _deviations(theta: Floats, rows: Rows, form: Form) -> tuple[Floats, Floats]:
    """Knots and the log of what T_grad deviates by there, from one profile's rows weighted by what they count."""
    smooth = -residuals(theta, replace(rows, log_factor=np.zeros_like(rows.log_factor)), form)[0][0]
    batch, counts = rows.batch[0], rows.weight[0]
    sizes = np.unique(batch)
    if len(sizes) > _MOST_KNOTS:
        # Neighbours share a knot: the nearest of a geometric grid.
        grid = np.geomspace(sizes[0], sizes[-1], _MOST_KNOTS)
        at = np.abs(np.log(batch)[:, None] - np.log(grid)).argmin(axis=1)
        used = np.unique(at)
        knots, group = grid[used], np.searchsorted(used, at)
    else:
        knots, group = sizes, np.searchsorted(sizes, batch)
    total = np.bincount(group, counts * smooth, minlength=len(knots))
    return knots, total / (np.bincount(group, counts, minlength=len(knots)) + _PSEUDO_ROWS)


def _between(batch: Floats, knots: Floats, log_factors: Floats) -> Floats:
    result: Floats = np.interp(np.log(batch), np.log(knots), log_factors)
    return result
