"""Arrival times: hourly counts that vary more than a Poisson process, and batches of jobs within the hours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from synergy_core.units import DAY_S, HOUR_S, Floats
from synergy_runs.generators.statistics import Arrivals, Statistics
from synergy_runs.traces.rows import END_STATES, TraceRows, epoch_s

HOURS_PER_DAY = 24
DAYS_PER_WEEK = 7
EPOCH_WEEKDAY = 3  # 1970-01-01 was a Thursday; Monday is 0

QUADRATURE_POINTS = 1_000
MAX_SPREAD = 4.0
BISECTIONS = 24
CAP_ROUNDS = 5
MIN_SHAPED_HOURS = 4 * DAYS_PER_WEEK * HOURS_PER_DAY
SHAPING_ROUNDS = 5

Longs = NDArray[np.int64]


def hourly_jobs(arrivals: Arrivals, window_s: float, random: np.random.Generator) -> Floats:
    """Expected jobs in each hour of a window that starts at midnight of the first day; the last hour may be partial.

    Expected jobs are shape × level, at most `most_per_hour`. The shape is the known pattern of hours of the day and
    weekdays. The level is lognormal; its spread gives Poisson counts with this mean the known dispersion. Levels follow
    a Gaussian series, the sum of one that changes within hours and one that changes within days: hours are sorted by
    the series, and the i-th of n hours draws its level from the i-th of n equally likely parts of the distribution. In
    windows of four weeks or more, each hour of the day and each weekday is scaled to its known share, and the spread is
    fitted to the window. So a few months have the known mean, shape and dispersion; shorter windows need not.
    """
    from scipy.special import ndtri

    hours = max(1, int(np.ceil(window_s / HOUR_S)))
    hour_of_week = (first_hour(arrivals) + np.arange(hours)) % (HOURS_PER_DAY * DAYS_PER_WEEK)
    # Relative rates, with mean 1, of the 168 hours of a week from Monday midnight.
    weekly = np.outer(arrivals.weekday_fraction * DAYS_PER_WEEK, arrivals.hour_of_day_fraction * HOURS_PER_DAY).ravel()
    shape = weekly[hour_of_week]
    mean, most = float(shape.mean()), arrivals.most_per_hour / arrivals.mean_per_hour

    slow = _autoregressive(np.exp(-1.0 / (HOURS_PER_DAY * arrivals.slow_days)), hours, random)
    fast = _autoregressive(arrivals.hour_to_hour_correlation, hours, random)
    level = np.sqrt(arrivals.slow_fraction) * slow + np.sqrt(1 - arrivals.slow_fraction) * fast
    normal = np.empty(hours)
    normal[np.argsort(level, kind="stable")] = ndtri((np.arange(hours) + random.random(hours)) / hours)

    def shaped(spread: float) -> Floats:
        """Rates scaled until each hour of the day and each weekday has its share of `shape`, with none above `most`."""
        rate = _capped(shape * np.exp(spread * normal), mean, most)
        for _ in range(SHAPING_ROUNDS):
            for group in (hour_of_week % HOURS_PER_DAY, hour_of_week // HOURS_PER_DAY):
                rate *= (np.bincount(group, shape) / np.bincount(group, rate))[group]
            rate = np.minimum(rate, most)
        return _capped(rate, mean, most)

    def long_run(spread: float) -> Floats:
        sample = ndtri((np.arange(QUADRATURE_POINTS) + 0.5) / QUADRATURE_POINTS)
        return _capped(np.outer(weekly, np.exp(spread * sample)), 1.0, most)

    if hours < MIN_SHAPED_HOURS:
        expected = _capped(shape * np.exp(_spread_for(arrivals, long_run) * normal), mean, most)
    else:
        expected = shaped(_spread_for(arrivals, shaped))
    expected[-1] *= window_s / HOUR_S - (hours - 1)
    return np.asarray(arrivals.mean_per_hour * expected)


def first_hour(arrivals: Arrivals) -> int:
    """Hours from Monday midnight to the start of the window."""
    days = int(epoch_s(arrivals.first_day) // DAY_S)
    return (days + EPOCH_WEEKDAY) % DAYS_PER_WEEK * HOURS_PER_DAY


def _spread_for(arrivals: Arrivals, rate: Callable[[float], Floats]) -> float:
    """The spread σ at which the relative rates rate(σ), with mean 1, give the index of dispersion D; 0 if D is too low.

    Found by bisection: counts that are Poisson with mean μ·r have variance μ + μ²·Var[r], so D = 1 + μ·Var[r].
    """
    low, high = 0.0, MAX_SPREAD
    for _ in range(BISECTIONS):
        spread = (low + high) / 2
        enough = 1 + arrivals.mean_per_hour * float(rate(spread).var()) >= arrivals.index_of_dispersion
        low, high = (low, spread) if enough else (spread, high)
    return low


def _capped(rate: Floats, mean: float, most: float) -> Floats:
    """Scales `rate` to the given mean, with no value above `most`; any shape."""
    for _ in range(CAP_ROUNDS):
        rate = np.minimum(rate * (mean / rate.mean()), most)
    return rate


def submit_times(counts: Longs, opens_batch: NDArray[np.bool_], ratio: float, random: np.random.Generator) -> Longs:
    """Submission times in whole seconds from the window's start, in order, with `counts[h]` jobs in hour h.

    Gaps between jobs are exponential; their mean within a batch is `ratio` times that before a new batch, so the jobs
    of a batch arrive together. Gaps are scaled to fill each hour. counts: shape (hours,); opens_batch: shape (jobs,).
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


def _autoregressive(keep: float, hours: int, random: np.random.Generator) -> Floats:
    """A standard normal series whose neighbouring values have correlation `keep`."""
    news = random.standard_normal(hours)
    news[1:] *= np.sqrt(1 - keep**2)
    return np.array(list(accumulate(news.tolist(), lambda value, fresh: keep * value + fresh)))


# These functions compare a generated log with the statistics that it was drawn from, one figure at a time.


WEEKDAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")

# Accepted errors: relative to the known value, or the difference of two fractions.
QUANTILE_TOLERANCE = 0.10
MEAN_TOLERANCE = 0.05
DISPERSION_TOLERANCE = 0.20
SIZE_GPU_TIME_TOLERANCE = 0.03
HOUR_OF_DAY_TOLERANCE = 0.01
WEEKDAY_TOLERANCE = 0.03
JOB_SHARE_TOLERANCE = 0.005
END_STATE_GPU_TIME_TOLERANCE = 0.02


@dataclass(frozen=True, slots=True)
class CheckedFigure:
    """A figure of a generated log and its known value. If there is no source, `known` is NaN and `source` is "-".

    tolerance: bound of `error`, which is relative to the known value or a difference of fractions in [0, 1]; NaN if the
    generator does not aim at the figure. source: label of the known value's source, see `Statistics.sources`.
    """

    name: str
    source: str
    known: float
    generated: float
    tolerance: float = np.nan
    relative: bool = False

    @property
    def error(self) -> float:
        """Generated − known value, divided by the known value if `relative`."""
        return (self.generated - self.known) / (self.known if self.relative else 1.0)

    @property
    def holds(self) -> bool:
        """Whether the error is within the tolerance."""
        return abs(self.error) <= self.tolerance


def marginals(known: Statistics, rows: TraceRows, window_s: float) -> Iterator[CheckedFigure]:
    """Compares `rows`, a log of `window_s` seconds from the first day, in every figure that the generator aims at."""
    yield from _arrival_figures(known, rows.jobs["submit_s"], window_s)
    gpus, duration_s = rows.jobs["gpus"], rows.jobs["duration_s"]
    tenant, state = rows.jobs["virtual_cluster"].codes, rows.jobs["end_state"].codes
    yield from _duration_figures(known, gpus, duration_s)
    gpu_s, origin = gpus * duration_s, known.origin

    def gpu_time(jobs: NDArray[np.bool_]) -> float:
        return float(gpu_s[jobs].sum() / gpu_s.sum())

    for size, fraction in zip(known.sizes, known.mix.sum(axis=0).tolist(), strict=True):
        share = float((gpus == size).mean())
        yield CheckedFigure(f"jobs with {size} GPUs", origin["sizes"], fraction, share, JOB_SHARE_TOLERANCE)
    for text, fraction in known.checked.get("gpu_time_fraction", {}).items():
        share = gpu_time(gpus == int(text))
        yield CheckedFigure(f"GPU-time of {text} GPUs", origin["checked"], fraction, share, SIZE_GPU_TIME_TOLERANCE)
    for code, name in enumerate(known.virtual_clusters):
        fraction, share = float(known.mix[code].sum()), float((tenant == code).mean())
        yield CheckedFigure(f"jobs of {name}", origin["virtual_clusters"], fraction, share, JOB_SHARE_TOLERANCE)
    shares = zip(END_STATES, known.end_state_job_fraction, known.end_state_gpu_time_fraction, strict=True)
    for code, (name, of_jobs, of_gpu_time) in enumerate(shares):
        mine, source = state == code, origin["end_states"]
        yield CheckedFigure(f"jobs {name}", source, float(of_jobs), float(mine.mean()), JOB_SHARE_TOLERANCE)
        yield CheckedFigure(
            f"GPU-time {name}", source, float(of_gpu_time), gpu_time(mine), END_STATE_GPU_TIME_TOLERANCE
        )


def _arrival_figures(known: Statistics, submit_s: NDArray[np.float64], window_s: float) -> Iterator[CheckedFigure]:
    """Compares rate and dispersion over all whole hours, and the shares of hours and weekdays over all whole weeks."""
    arrivals, source = known.arrivals, known.origin["arrivals"]
    since_s = submit_s - epoch_s(arrivals.first_day)
    hours = int(window_s // HOUR_S)
    hourly = np.bincount((since_s // HOUR_S).astype(np.int64), minlength=hours)[:hours]
    yield CheckedFigure("jobs per hour", source, arrivals.mean_per_hour, hourly.mean(), MEAN_TOLERANCE, relative=True)
    dispersion = float(hourly.var() / hourly.mean())
    name = "dispersion of hourly counts"
    yield CheckedFigure(name, source, arrivals.index_of_dispersion, dispersion, DISPERSION_TOLERANCE, relative=True)
    weeks = hours // (DAYS_PER_WEEK * HOURS_PER_DAY)
    if not weeks:
        return
    of_week = hourly[: weeks * DAYS_PER_WEEK * HOURS_PER_DAY].reshape(weeks, DAYS_PER_WEEK, HOURS_PER_DAY)
    by_hour, by_day = of_week.sum(axis=(0, 1)) / of_week.sum(), of_week.sum(axis=(0, 2)) / of_week.sum()
    by_weekday = np.roll(by_day, first_hour(arrivals) // HOURS_PER_DAY)
    for hour, fraction in enumerate(arrivals.hour_of_day_fraction.tolist()):
        yield CheckedFigure(f"jobs at {hour:02d} h", source, fraction, float(by_hour[hour]), HOUR_OF_DAY_TOLERANCE)
    for day, fraction in enumerate(arrivals.weekday_fraction.tolist()):
        yield CheckedFigure(f"jobs on {WEEKDAYS[day]}", source, fraction, float(by_weekday[day]), WEEKDAY_TOLERANCE)


def _duration_figures(
    known: Statistics, gpus: NDArray[np.int32], duration_s: NDArray[np.float64]
) -> Iterator[CheckedFigure]:
    """Compares mean and median durations, mean sizes, and quantiles of durations by size class (see `has_size`)."""
    figures = {
        "mean_s": ("mean duration, s", duration_s.mean(), MEAN_TOLERANCE),
        "median_s": ("median duration, s", np.median(duration_s), QUANTILE_TOLERANCE),
        "mean_gpus": ("mean GPUs", gpus.mean(), MEAN_TOLERANCE),
        "gpu_s_per_job": ("mean GPU-seconds", (gpus * duration_s).mean(), MEAN_TOLERANCE),
    }
    source = known.origin.get("checked", "")
    for key, (name, generated, tolerance) in figures.items():
        if key in known.checked:
            yield CheckedFigure(name, source, known.checked[key], float(generated), tolerance, relative=True)
    for sizes, table in known.checked.get("quantiles_s", {}).items():
        each_s = duration_s[has_size(gpus, sizes)]
        for probability, quantile_s in table.items():
            value = float(np.quantile(each_s, float(probability))) if len(each_s) else np.nan
            name = f"p{100 * float(probability):g} of {sizes}{' GPUs' * (sizes != 'all')}, s"
            yield CheckedFigure(name, source, quantile_s, value, QUANTILE_TOLERANCE, relative=True)


def has_size(gpus: NDArray[np.int32], sizes: str) -> NDArray[np.bool_]:
    """Mask of the entries of `gpus` that lie in a size class such as `all`, `8`, `2-4` or `>8`."""
    if sizes == "all":
        return gpus >= 1
    if sizes.startswith(">"):
        return gpus > int(sizes[1:])
    least, _, most = sizes.partition("-")
    return (gpus >= int(least)) & (gpus <= int(most or least))
