"""Ratios of mean JCTs with confidence intervals, and the formats of numbers in tables and sentences."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import numpy as np

from synergy_core.units import DAY_S, HOUR_S, Floats
from synergy_runs.inputs.workload import MIN_WORKLOADS

MIN_WAITING_FRACTION = 0.1
"""Minimum waiting time ÷ the longer mean JCT. Below it, there is no interval: most workloads lack the long queue that a
few have, and agree on a wrong ratio. Source: docs/metrics.md, "Interval"."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio, its 95 % confidence interval, and the number of independent workloads.

    why_not: "" if there is an interval; otherwise `few` (workloads) or `rare` (queues), and low and high are NaN.
    """

    value: float
    low: float
    high: float
    workloads: int
    why_not: str = ""


class Means(NamedTuple):
    """Mean JCTs of one workload under a policy and under the first policy, over the jobs that both finished.

    waiting_s: mean waiting time under the policy with the longer wait; inf if both policies resize jobs, so that
    contention shows in run times.
    """

    policy_s: float
    first_s: float
    waiting_s: float


def mean_jcts(policy_jct_s: Floats, first_jct_s: Floats) -> tuple[float, float]:
    """Mean JCTs of two runs over the jobs that both finished; NaN if there are none. Arrays: (jobs,), seconds."""
    known = np.isfinite(policy_jct_s) & np.isfinite(first_jct_s)
    if not known.any():
        return math.nan, math.nan
    return float(policy_jct_s[known].mean()), float(first_jct_s[known].mean())


def ratio_of_means(workloads: Sequence[Means], *, limits: bool = True) -> Ratio:
    """Σ of the policy's means ÷ Σ of the first policy's, with a 95 % interval over independent workloads.

    Jackknife of the log-ratio with Student's t of n − 1 degrees of freedom (Miller, Biometrika 61(1), 1974, sections 2
    and 6). Each step leaves out the same workload under both policies, so differences between workloads cancel. Jobs
    within a workload are not independent, since a single long queue can cause most of the waiting, so only whole
    workloads are left out. limits: whether to return no interval if workloads are few or queues are rare.
    """
    from scipy.special import stdtrit

    policy_s, first_s, waiting_s = np.array(workloads, dtype=np.float64).reshape(-1, 3).T
    count, total_s, first_total_s = len(workloads), policy_s.sum(), first_s.sum()
    if not first_total_s > 0:
        return Ratio(math.nan, math.nan, math.nan, count, "few")
    value = float(total_s / first_total_s)
    others = np.stack((total_s - policy_s, first_total_s - first_s))  # one entry per workload that is left out
    waits = waiting_s.sum() >= MIN_WAITING_FRACTION * np.maximum(policy_s, first_s).sum()
    why_not = "few" if count < MIN_WORKLOADS else "" if waits else "rare"
    if (limits and why_not) or not np.all(others > 0):
        return Ratio(value, math.nan, math.nan, count, (limits and why_not) or "few")
    left_out = np.log(others[0] / others[1])
    standard_error = np.sqrt((count - 1) / count * ((left_out - left_out.mean()) ** 2).sum())
    half = float(stdtrit(count - 1, 0.975) * standard_error)
    return Ratio(value, value * math.exp(-half), value * math.exp(half), count)


def unit_of_times(values_s: Iterable[float]) -> tuple[float, str]:
    """(seconds, name) of the unit in which all durations of one column are shown, by their median; NaN and 0 aside."""
    typical_s = median([abs(value) for value in values_s if math.isfinite(value) and value] or [0.0])
    units = ((DAY_S, "d"), (HOUR_S, "h"), (60.0, "min"))
    return next(((scale, unit) for scale, unit in units if typical_s >= 2 * scale), (1.0, "s"))


def three_digits(value: float) -> str:
    """Formats a number with about three digits: `0.065`, `3.12`, `42.1`, `1,234`; `–` for NaN and infinity."""
    if not math.isfinite(value):
        return "–"
    size = abs(value)
    decimals = sum(size < limit for limit in (99.95, 9.995, 0.0995)) if size else 0
    return f"{value:,.{decimals}f}"


def ratio_text(ratio: Ratio) -> str:
    """Formats a ratio with its interval, `0.58 (0.51–0.66)`; leaves out a missing interval, and one from 1 to 1."""
    if not math.isfinite(ratio.value):
        return "–"
    if ratio.low == ratio.high == 1.0 or not math.isfinite(ratio.low):
        return three_digits(ratio.value)
    return f"{three_digits(ratio.value)} ({three_digits(ratio.low)}–{three_digits(ratio.high)})"
