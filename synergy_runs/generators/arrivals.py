"""When jobs come: hourly counts that are too uneven for a Poisson process, and batches within the hours."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from synergy_core.arrays import Floats
from synergy_core.units import HOUR_S
from synergy_runs.generators.statistics import Arrivals
from synergy_runs.traces.times import epoch_s

HOURS_PER_DAY = 24
DAYS_PER_WEEK = 7
EPOCH_WEEKDAY = 3  # 1970-01-01 was a Thursday; Monday is 0

QUADRATURE_POINTS = 1_000
WIDEST_SPREAD = 4.0
BISECTIONS = 24
CAP_ROUNDS = 5
SHAPED_FROM_HOURS = 4 * DAYS_PER_WEEK * HOURS_PER_DAY
SHAPING_ROUNDS = 5

Longs = NDArray[np.int64]


def hourly_jobs(arrivals: Arrivals, window_s: float, random: np.random.Generator) -> Floats:
    """Expected jobs of every hour of a window that starts at midnight of the first day; the last may be partial.

    Expected jobs are shape × level, at most `most_per_hour`: the known hour-of-day and weekday shape, and a
    lognormal level that makes the counts, Poisson given level, as uneven as known. Levels are a Gaussian series
    with a part that changes within hours and one that changes within days, taken by rank: hour i of n in rank draws its
    level uniformly from the i-th n-th of the distribution. From four weeks on, hours are scaled so that every hour of
    the day and every weekday has its known share, and the level's spread is solved for the window itself. So
    months have the known mean, shape and unevenness, not only decades; a week or two keep their own shape.
    """
    hours = max(1, int(np.ceil(window_s / HOUR_S)))
    hour_of_week = (first_hour(arrivals) + np.arange(hours)) % (HOURS_PER_DAY * DAYS_PER_WEEK)
    shape = weekly_shape(arrivals)[hour_of_week]
    normal = _stratified_normal(_persistent(arrivals, hours, random), random)
    most = arrivals.most_per_hour / arrivals.mean_per_hour

    def rate(spread: float) -> Floats:
        return _shaped(shape * np.exp(spread * normal), shape, hour_of_week, most)

    if hours < SHAPED_FROM_HOURS:
        expected = _capped(shape * np.exp(level_spread(arrivals) * normal), float(shape.mean()), most)
    else:
        expected = rate(_spread_for(arrivals, rate))
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


def level_spread(arrivals: Arrivals) -> float:
    """σ of the logarithm of the hourly level, in the long run; 0 if the weekly shape alone is uneven enough."""
    from scipy.special import ndtri

    shape = weekly_shape(arrivals)
    normal = ndtri((np.arange(QUADRATURE_POINTS) + 0.5) / QUADRATURE_POINTS)
    most = arrivals.most_per_hour / arrivals.mean_per_hour
    return _spread_for(arrivals, lambda spread: _capped(np.outer(shape, np.exp(spread * normal)), 1.0, most))


def _spread_for(arrivals: Arrivals, rate: Callable[[float], Floats]) -> float:
    """The σ for which relative rates r = rate(σ) of mean 1 give counts of the known index of dispersion.

    D = 1 + μ·Var[r]: a count that is Poisson with mean μ·r has variance μ + μ²·Var[r]. By bisection.
    """
    low, high = 0.0, WIDEST_SPREAD
    for _ in range(BISECTIONS):
        spread = (low + high) / 2
        enough = 1 + arrivals.mean_per_hour * float(rate(spread).var()) >= arrivals.index_of_dispersion
        low, high = (low, spread) if enough else (spread, high)
    return low


def _shaped(rate: Floats, shape: Floats, hour_of_week: Longs, most: float) -> Floats:
    """`rate` scaled by hour of the day and by weekday until both have the shares of `shape`, none above `most`."""
    rate = _capped(rate, float(shape.mean()), most)
    groups = (hour_of_week % HOURS_PER_DAY, hour_of_week // HOURS_PER_DAY)
    for _ in range(SHAPING_ROUNDS):
        for group in groups:
            rate *= (np.bincount(group, shape) / np.bincount(group, rate))[group]
        rate = np.minimum(rate, most)
    return _capped(rate, float(shape.mean()), most)


def _capped(rate: Floats, mean: float, most: float) -> Floats:
    """`rate` scaled to the given mean with no value above `most`; any shape."""
    for _ in range(CAP_ROUNDS):
        rate = np.minimum(rate * (mean / rate.mean()), most)
    return rate


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
    """Standard normal by the hour: a slow and a fast autoregressive series, their variances adding up to 1."""
    slow = _autoregressive(np.exp(-1.0 / (HOURS_PER_DAY * arrivals.slow_days)), hours, random)
    fast = _autoregressive(arrivals.hour_to_hour_correlation, hours, random)
    return np.asarray(np.sqrt(arrivals.slow_fraction) * slow + np.sqrt(1 - arrivals.slow_fraction) * fast)


def _autoregressive(keep: float, hours: int, random: np.random.Generator) -> Floats:
    """Standard normal series with correlation `keep` between neighbours."""
    news = random.standard_normal(hours)
    news[1:] *= np.sqrt(1 - keep**2)
    series, value = np.empty(hours), 0.0
    for hour, fresh in enumerate(news.tolist()):
        value = keep * value + fresh
        series[hour] = value
    return series


def _stratified_normal(series: Floats, random: np.random.Generator) -> Floats:
    """Replaces the values of a series by a stratified standard normal sample, in the same order of rank."""
    from scipy.special import ndtri

    sample = ndtri((np.arange(len(series)) + random.random(len(series))) / len(series))
    values = np.empty(len(series))
    values[np.argsort(series, kind="stable")] = sample
    return values
