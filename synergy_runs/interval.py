"""How sure a ratio of mean JCTs is: a jackknife over independent workloads, and nothing where there are too few."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from synergy_core.arrays import Floats

FEWEST_WORKLOADS = 5
LEAST_WAITING_FRACTION = 0.4
"""The least part of the longer mean JCT that is waiting. Below it queues are so rare that workloads without one agree
on a wrong ratio. Both limits: bench/coverage.py; docs/metrics.md, "Interval"."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio and its 95 % interval over so many independent workloads.

    why_not: "" with an interval; else its ends are NaN: the workloads are `few`, or have `rare` queues.
    """

    value: float
    low: float
    high: float
    workloads: int
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class Means:
    """Mean JCTs of one workload under a policy and under the first, over the jobs that both finished.

    waiting_s: the mean wait under the one that waits longer.
    """

    policy_s: float
    first_s: float
    waiting_s: float


def mean_jcts(policy_jct_s: Floats, first_jct_s: Floats) -> tuple[float, float]:
    """Both mean JCTs over the jobs that both runs finished; NaN if none. Element i of each array is job i."""
    known = np.isfinite(policy_jct_s) & np.isfinite(first_jct_s)
    if not known.any():
        return math.nan, math.nan
    return float(policy_jct_s[known].mean()), float(first_jct_s[known].mean())


def ratio_of_means(workloads: Sequence[Means], *, limits: bool = True) -> Ratio:
    """Σ of the policy's means ÷ Σ of the first's, with a 95 % interval over independent workloads.

    The jackknife of the ratio's logarithm with Student's t of n − 1 degrees of freedom (Miller, Biometrika 61(1), 1974,
    sections 2 and 6): both policies lose the same workload at a time, so what a workload is like cancels. A workload
    is the least that may be left out: within one, a single long queue makes most of the wait, and no blocks of its
    jobs are independent. limits: whether workloads that are few or hardly wait have none.
    """
    top, bottom = np.array([(each.policy_s, each.first_s) for each in workloads], dtype=np.float64).reshape(-1, 2).T
    count = len(top)
    if not bottom.sum() > 0:
        return Ratio(math.nan, math.nan, math.nan, count, "few")
    value = float(top.sum() / bottom.sum())
    others = np.stack((top.sum() - top, bottom.sum() - bottom))
    why_not = _why_not(workloads) if limits else ""
    if why_not or not np.all(others > 0):
        return Ratio(value, math.nan, math.nan, count, why_not or "few")
    half = _t_975(count - 1) * _jackknife_error(np.log(others[0] / others[1]))
    return Ratio(value, value * math.exp(-half), value * math.exp(half), count)


def _why_not(workloads: Sequence[Means]) -> str:
    if len(workloads) < FEWEST_WORKLOADS:
        return "few"
    longer_s = sum(max(each.policy_s, each.first_s) for each in workloads)
    waits = sum(each.waiting_s for each in workloads) >= LEAST_WAITING_FRACTION * longer_s
    return "" if waits else "rare"


def _jackknife_error(left_out: Floats) -> float:
    """The standard error of a figure, from its values with one unit left out each."""
    count = len(left_out)
    return float(np.sqrt((count - 1) / count * ((left_out - left_out.mean()) ** 2).sum()))


def _t_975(freedom: int) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 0.975))
