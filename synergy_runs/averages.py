"""Means, percentiles and correlations of what is known: NaN stands for what is not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from synergy_core.arrays import Floats


def mean(values: NDArray[Any]) -> float:
    """Mean of the known values; NaN of none."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else np.nan


def percentile(values: NDArray[Any], q: float) -> float:
    """Percentile of the known values, linear between neighbours; NaN of none."""
    known = values[np.isfinite(values)]
    return float(np.percentile(known, q)) if len(known) else np.nan


def ratio(top: float, bottom: float) -> float:
    """top ÷ bottom, NaN where bottom is not above 0."""
    return top / bottom if bottom > 0 else np.nan


def counts_by(code: NDArray[Any], names: Sequence[str]) -> dict[str, int]:
    """How many have each code."""
    return dict(zip(names, np.bincount(code, minlength=len(names)).tolist(), strict=True))


def means_by(code: NDArray[Any], names: Sequence[str], values: Floats) -> dict[str, float]:
    """Mean of the known values of each code; NaN where there are none."""
    known = np.isfinite(values)
    count = np.bincount(code[known], minlength=len(names))
    total = np.bincount(code[known], weights=values[known], minlength=len(names)).astype(np.float64)
    return dict(zip(names, quotient(total, count.astype(np.float64)).tolist(), strict=True))


def present(means: dict[str, float]) -> dict[str, float]:
    """The means that are not NaN."""
    return {name: value for name, value in means.items() if not np.isnan(value)}


def quotient(top: Floats, bottom: Floats) -> Floats:
    """top ÷ bottom of each, NaN where bottom is not above 0."""
    quotient: Floats = np.divide(top, bottom, out=np.full(len(top), np.nan), where=bottom > 0)
    return quotient
