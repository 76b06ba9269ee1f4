"""When jobs come: hourly counts that are too uneven for a Poisson process, and batches within the hours."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from synergy_core.units import HOUR_S
from synergy_sim.generators.statistics import Arrivals
from synergy_sim.traces.times import epoch_s

HOURS_PER_DAY = 24
DAYS_PER_WEEK = 7
EPOCH_WEEKDAY = 3  # 1970-01-01 was a Thursday; Monday is 0

Floats = NDArray[np.float64]
Longs = NDArray[np.int64]


def hourly_jobs(arrivals: Arrivals, window_s: float, random: np.random.Generator) -> Floats:
    """Expected jobs of every hour of a window that starts at midnight of the first day; the last may be partial.

    Expected jobs are shape × level: the published hour-of-day and weekday shape, and a lognormal level with mean 1 whose
    variance makes the counts, Poisson given level, as uneven as published (`level_variance`). Levels are a Gaussian
    series with a part common to a day and a part that forgets from hour to hour, taken by rank: hour i of n in rank
    draws its level uniformly from the i-th n-th of the distribution. So a window of weeks has the published
    unevenness and mean, not only a window of decades.
    """
    hours = max(1, int(np.ceil(window_s / HOUR_S)))
    shape = weekly_shape(arrivals)[(first_hour(arrivals) + np.arange(hours)) % (HOURS_PER_DAY * DAYS_PER_WEEK)]
    spread = np.sqrt(np.log1p(level_variance(arrivals)))
    level = np.exp(spread * _stratified_normal(_persistent(arrivals, hours, random), random))
    expected = shape * level
    expected *= shape.sum() / expected.sum()
    expected[-1] *= window_s / HOUR_S - (hours - 1)
    return np.asarray(arrivals.mean_per_hour * expected)


def first_hour(arrivals: Arrivals) -> int:
    """Hours from Monday midnight to the start of the window."""
    days = int(epoch_s(arrivals.first_day) // (HOURS_PER_DAY * HOUR_S))
    return (days + EPOCH_WEEKDAY) % DAYS_PER_WEEK * HOURS_PER_DAY


def weekly_shape(arrivals: Arrivals) -> Floats:
    """Relative rate of the 168 hours of a week from Monday midnight; mean 1."""
    shape = np.outer(arrivals.weekday_fraction * DAYS_PER_WEEK, arrivals.hour_of_day_fraction * HOURS_PER_DAY)
    return np.asarray(shape.ravel())


def level_variance(arrivals: Arrivals) -> float:
    """v = ((D − 1)/μ − Var[s]) / E[s²], from Var[N] = μ + μ²(Var[s] + v·E[s²]) for N Poisson with mean μ·s·L, E[L] = 1.

    D: index of dispersion of the hourly counts, μ: their mean, s: the weekly shape. 0 if the shape alone is uneven enough.
    """
    shape = weekly_shape(arrivals)
    excess = (arrivals.index_of_dispersion - 1) / arrivals.mean_per_hour
    return max(0.0, float((excess - shape.var()) / np.mean(shape**2)))


def submit_times(counts: Longs, opens_batch: NDArray[np.bool_], ratio: float, random: np.random.Generator) -> Longs:
    """Whole seconds from the window's start, increasing: `counts[h]` jobs in hour h.

    Gaps are exponential, `ratio` times as long within a batch, and stretched to fill the hour; so counts by the hour
    stay as they are and jobs of one batch come together. counts: shape (hours,); opens_batch: shape (jobs,).
    """
    jobs = int(counts.sum())
    hour = np.repeat(np.arange(len(counts)), counts)
    last = np.cumsum(counts)
    first = (last - counts)[counts > 0]
    gap = random.exponential(size=jobs) * np.where(opens_batch, 1.0, ratio)
    gap[first] = random.exponential(size=len(first))
    elapsed = np.cumsum(gap)
    before = np.repeat(elapsed[first] - gap[first], counts[counts > 0])
    whole = np.repeat(elapsed[last[counts > 0] - 1] + random.exponential(size=len(first)), counts[counts > 0])
    within = (elapsed - before) / (whole - before)
    return np.asarray(hour * int(HOUR_S) + np.minimum(within * HOUR_S, HOUR_S - 1).astype(np.int64))


def _persistent(arrivals: Arrivals, hours: int, random: np.random.Generator) -> Floats:
    """Standard normal by the hour; correlated within a day and from hour to hour."""
    day = random.standard_normal(hours // HOURS_PER_DAY + 1).repeat(HOURS_PER_DAY)[:hours]
    keep = arrivals.hour_to_hour_correlation
    news = random.standard_normal(hours) * np.sqrt(1 - keep**2)
    hourly = np.empty(hours)
    state = random.standard_normal()
    for hour in range(hours):
        state = keep * state + news[hour]
        hourly[hour] = state
    return np.asarray(np.sqrt(arrivals.day_fraction) * day + np.sqrt(1 - arrivals.day_fraction) * hourly)


def _stratified_normal(series: Floats, random: np.random.Generator) -> Floats:
    """The same order, the values a stratified standard normal sample."""
    from scipy.special import ndtri

    sample = ndtri((np.arange(len(series)) + random.random(len(series))) / len(series))
    values = np.empty(len(series))
    values[np.argsort(series, kind="stable")] = sample
    return values
