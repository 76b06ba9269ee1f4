"""How sure a ratio of mean JCTs is: a paired bootstrap over seeds, or over stretches of one trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

RESAMPLES = 4_000
MOST_STRETCHES = 100


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio and its 95 % interval; resampled says over what: `seeds` or `jobs`. NaN ends: too little to say."""

    value: float
    low: float
    high: float
    resampled: str


def ratio_of_mean_jct(policy_jct_s: Sequence[Floats], first_jct_s: Sequence[Floats], *, seed: int = 0) -> Ratio:
    """Mean JCT under a policy ÷ mean JCT under the first, with a 95 % interval.

    One array per seed, element i job i of that seed's workload under both, so that what a workload is like cancels.
    Jobs that either run did not finish are left out of both. The ratio is (Σ over seeds of the mean) ÷ (Σ …).
    Several seeds: whole seeds are resampled. One seed: contiguous stretches of its jobs in order of submission, at most
    100 (the block bootstrap of Künsch, Annals of Statistics 17(3), 1989), since jobs that queue together wait together.
    """
    pairs = [_both_finished(a, b) for a, b in zip(policy_jct_s, first_jct_s, strict=True)]
    if len(pairs) > 1:
        top = np.array([a.mean() if len(a) else np.nan for a, _ in pairs])
        bottom = np.array([b.mean() if len(b) else np.nan for _, b in pairs])
        return _resampled(top, bottom, "seeds", seed)
    (policy, first) = pairs[0]
    stretches = min(len(policy), MOST_STRETCHES)
    starts = np.arange(stretches) * len(policy) // max(stretches, 1)
    top, bottom = (np.add.reduceat(each, starts) if stretches else np.zeros(0) for each in (policy, first))
    return _resampled(top, bottom, "jobs", seed)


def _both_finished(left: Floats, right: Floats) -> tuple[Floats, Floats]:
    known = np.isfinite(left) & np.isfinite(right)
    return left[known], right[known]


def _resampled(top: Floats, bottom: Floats, resampled: str, seed: int) -> Ratio:
    """Σ top ÷ Σ bottom, and the expanded percentile interval of its paired resamples."""
    count = len(top)
    if not count or not bottom.sum() > 0:
        return Ratio(np.nan, np.nan, np.nan, resampled)
    value = float(top.sum() / bottom.sum())
    if count < 2:
        return Ratio(value, np.nan, np.nan, resampled)
    picks = np.random.default_rng(seed).integers(0, count, size=(RESAMPLES, count))
    weights = bottom[picks].sum(axis=1)
    ratios = top[picks].sum(axis=1)[weights > 0] / weights[weights > 0]
    tail = _expanded_tail(count)
    low, high = np.quantile(ratios, (tail, 1 - tail))
    return Ratio(value, float(low), float(high), resampled)


def _expanded_tail(count: int) -> float:
    """The tail to cut on each side so that few units do not give too narrow a 95 % interval.

    Hesterberg (The American Statistician 69(4), 2015, section 5.3): Φ(−√(n/(n−1)) · t₀.₉₇₅,ₙ₋₁).
    """
    from scipy.special import ndtr, stdtrit

    return float(ndtr(-np.sqrt(count / (count - 1)) * stdtrit(count - 1, 0.975)))
