"""How far a generated log is from the statistics it was drawn from: one line per figure, with where that is from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from synergy_core.units import DAY_S, HOUR_S
from synergy_runs.generators.arrivals import DAYS_PER_WEEK, EPOCH_WEEKDAY, HOURS_PER_DAY
from synergy_runs.generators.statistics import Statistics
from synergy_runs.traces.rows import END_STATES, TraceRows
from synergy_runs.traces.times import epoch_s

WEEKDAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")

# Accepted differences: of the value, or between two fractions.
QUANTILE = 0.10
MEAN = 0.05
DISPERSION = 0.20
GPU_TIME_BY_SIZE = 0.03
HOUR_OF_DAY = 0.01
WEEKDAY = 0.03
SHARE_OF_JOBS = 0.005
END_STATE_GPU_TIME = 0.02


@dataclass(frozen=True, slots=True)
class Marginal:
    """One figure. `tolerance` bounds `error`: relative to the target, or the difference of two fractions.

    source: the label of where the target is from, see `Statistics.sources`.
    """

    name: str
    source: str
    target: float
    generated: float
    tolerance: float
    relative: bool

    @property
    def error(self) -> float:
        """(generated − target), divided by the target if relative."""
        return (self.generated - self.target) / (self.target if self.relative else 1.0)

    @property
    def holds(self) -> bool:
        """Whether the error is within the tolerance."""
        return abs(self.error) <= self.tolerance


def marginals(known: Statistics, rows: TraceRows, window_s: float) -> Iterator[Marginal]:
    """Every figure that is aimed at beside that of `rows`, a log of `window_s` seconds from the first day."""
    yield from _arrivals(known, np.asarray(rows.submit_s), window_s)
    gpus = np.asarray(rows.gpus, dtype=np.int64)
    duration_s = np.asarray(rows.duration_s)
    yield from _durations(known, gpus, duration_s)
    gpu_s = gpus * duration_s
    origin = known.origin
    by_size = dict(zip(known.sizes, known.mix.sum(axis=0).tolist(), strict=True))
    for size, target in by_size.items():
        yield Marginal(
            f"jobs with {size} GPUs", origin["sizes"], target, float((gpus == size).mean()), SHARE_OF_JOBS, False
        )
    for text, target in known.checked.get("gpu_time_fraction", {}).items():
        share = float(gpu_s[gpus == int(text)].sum() / gpu_s.sum())
        yield Marginal(f"GPU-time of {text} GPUs", origin["checked"], target, share, GPU_TIME_BY_SIZE, False)
    tenant = np.asarray(rows.virtual_cluster)
    for code, name in enumerate(known.virtual_clusters):
        share = float((tenant == code).mean())
        target = float(known.mix[code].sum())
        yield Marginal(f"jobs of {name}", origin["virtual_clusters"], target, share, SHARE_OF_JOBS, False)
    state = np.asarray(rows.end_state)
    for code, name in enumerate(END_STATES):
        mine = state == code
        source, target = origin["end_states"], float(known.end_state_job_fraction[code])
        yield Marginal(f"jobs {name}", source, target, float(mine.mean()), SHARE_OF_JOBS, False)
        target, share = float(known.end_state_gpu_time_fraction[code]), float(gpu_s[mine].sum() / gpu_s.sum())
        yield Marginal(f"GPU-time {name}", source, target, share, END_STATE_GPU_TIME, False)


def _arrivals(known: Statistics, submit_s: NDArray[np.float64], window_s: float) -> Iterator[Marginal]:
    """Rate, unevenness over the window's whole hours, hours of the day and weekdays over its whole weeks."""
    arrivals, source = known.arrivals, known.origin["arrivals"]
    since_s = submit_s - epoch_s(arrivals.first_day)
    hours = int(window_s // HOUR_S)
    hourly = np.bincount((since_s // HOUR_S).astype(np.int64), minlength=hours)[:hours]
    yield Marginal("jobs per hour", source, arrivals.mean_per_hour, hourly.mean(), MEAN, True)
    dispersion = float(hourly.var() / hourly.mean())
    yield Marginal("dispersion of hourly counts", source, arrivals.index_of_dispersion, dispersion, DISPERSION, True)
    weeks = hours // (DAYS_PER_WEEK * HOURS_PER_DAY)
    if not weeks:
        return
    of_week = hourly[: weeks * DAYS_PER_WEEK * HOURS_PER_DAY].reshape(weeks, DAYS_PER_WEEK, HOURS_PER_DAY)
    by_hour, by_day = of_week.sum(axis=(0, 1)) / of_week.sum(), of_week.sum(axis=(0, 2)) / of_week.sum()
    first_weekday = (int(epoch_s(arrivals.first_day) // DAY_S) + EPOCH_WEEKDAY) % DAYS_PER_WEEK
    for hour, target in enumerate(arrivals.hour_of_day_fraction.tolist()):
        yield Marginal(f"jobs at {hour:02d} h", source, target, float(by_hour[hour]), HOUR_OF_DAY, False)
    for day, target in enumerate(arrivals.weekday_fraction.tolist()):
        share = float(by_day[(day - first_weekday) % DAYS_PER_WEEK])
        yield Marginal(f"jobs on {WEEKDAYS[day]}", source, target, share, WEEKDAY, False)


def _durations(known: Statistics, gpus: NDArray[np.int64], duration_s: NDArray[np.float64]) -> Iterator[Marginal]:
    """Means, the median, and the quantiles of each class of sizes (`all`, `8`, `2-4`, `>8`)."""
    figures = {
        "mean_s": ("mean duration, s", duration_s.mean(), MEAN),
        "median_s": ("median duration, s", np.median(duration_s), QUANTILE),
        "mean_gpus": ("mean GPUs", gpus.mean(), MEAN),
        "gpu_s_per_job": ("mean GPU-seconds", (gpus * duration_s).mean(), MEAN),
    }
    source = known.origin.get("checked", "")
    for key, (name, generated, tolerance) in figures.items():
        if key in known.checked:
            yield Marginal(name, source, known.checked[key], float(generated), tolerance, True)
    for sizes, table in known.checked.get("quantiles_s", {}).items():
        least, most = bounds(sizes)
        each_s = duration_s[(gpus >= least) & (gpus <= most)]
        for probability, target in table.items():
            value = float(np.quantile(each_s, float(probability))) if len(each_s) else np.nan
            name = f"p{100 * float(probability):g} of {sizes}{' GPUs' * (sizes != 'all')}, s"
            yield Marginal(name, source, target, value, QUANTILE, True)


def bounds(sizes: str) -> tuple[float, float]:
    """Least and most GPUs of `all`, `8`, `2-4`, `>8`."""
    if sizes == "all":
        return 1, np.inf
    if sizes.startswith(">"):
        return int(sizes[1:]) + 1, np.inf
    least, _, most = sizes.partition("-")
    return int(least), int(most or least)
