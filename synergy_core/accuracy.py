"""How far predictions are from what was measured: relative errors, their quantiles, their order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from synergy_core.arrays import Floats


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
    a, b = _ranks(first), _ranks(second)
    a, b = a - a.mean(), b - b.mean()
    spread = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / spread if spread > 0 else float("nan")


def _ranks(values: Floats) -> Floats:
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    mean_rank = last - (counts - 1) / 2.0
    result: Floats = mean_rank[group]
    return result
