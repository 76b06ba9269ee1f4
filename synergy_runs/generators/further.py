"""What a reader looks for beyond what a generated log is held to: beside it, what is known and where that is from.

No source at hand says how many attempts a job takes, how concentrated users are or how often jobs of a size fail, for
Philly or Helios; those figures stand here as they were generated, so that nobody takes them for known.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from synergy_runs.generators.marginals import bounds
from synergy_runs.generators.statistics import Statistics
from synergy_runs.traces.rows import END_STATES, TraceRows

UNKNOWN = np.nan
FAILED = END_STATES.index("failed")
TOP_USERS = (0.01, 0.05, 0.1)
SIZE_CLASSES = ("1", "2-4", "5-8", ">8")
NO_SOURCE = "-"


@dataclass(frozen=True, slots=True)
class PublishedFigure:
    """One figure; `known` is NaN, and `source` "-", where no source at hand has it. Fractions lie in [0, 1]."""

    name: str
    source: str
    known: float
    generated: float


def further(known: Statistics, rows: TraceRows) -> Iterator[PublishedFigure]:
    """Figures of other jobs of this cluster, then attempts, users, and how often jobs fail, by size and by GPU-time."""
    gpus, duration_s = np.asarray(rows.gpus, dtype=np.int64), np.asarray(rows.duration_s)
    gpu_s, state = gpus * duration_s, np.asarray(rows.end_state)
    source, other = known.origin.get("elsewhere", NO_SOURCE), known.elsewhere
    made = {"mean_s": duration_s.mean(), "median_s": np.median(duration_s), "mean_gpus": gpus.mean()}
    names = {"mean_s": "mean duration, s", "median_s": "median duration, s", "mean_gpus": "mean GPUs"}
    for key, name in names.items():
        if key in other:
            yield PublishedFigure(name, source, float(other[key]), float(made[key]))
    for code, name in enumerate(END_STATES):
        if name in other:
            mine = state == code
            yield PublishedFigure(f"jobs {name}", source, other[name]["jobs"], float(mine.mean()))
            yield PublishedFigure(
                f"GPU-time {name}", source, other[name]["gpu_time"], float(gpu_s[mine].sum() / gpu_s.sum())
            )
    attempts = len(rows) / sum(number == 1 for number in rows.attempt)
    yield PublishedFigure("attempts per job", NO_SOURCE, UNKNOWN, attempts)
    for fraction, share in _top_users(np.asarray(rows.user), gpu_s):
        yield PublishedFigure(f"GPU-time of the top {fraction:.0%} users", NO_SOURCE, UNKNOWN, share)
    yield from _failures(known, gpus, gpu_s, state == FAILED)


def _top_users(user: NDArray[np.int64], gpu_s: NDArray[np.float64]) -> Iterator[tuple[float, float]]:
    """(fraction of the users, share of the GPU-time that so many of the heaviest had), at least one user each."""
    held = np.sort(np.bincount(user, weights=gpu_s))[::-1]
    for fraction in TOP_USERS:
        yield fraction, float(held[: max(1, round(fraction * len(held)))].sum() / held.sum())


def _failures(
    known: Statistics, gpus: NDArray[np.int64], gpu_s: NDArray[np.float64], failed: NDArray[np.bool_]
) -> Iterator[PublishedFigure]:
    """Failed jobs by size; and GPU-time of a failed job ÷ that of any job, which the sources' two shares imply."""
    for sizes in SIZE_CLASSES:
        least, most = bounds(sizes)
        mine = (gpus >= least) & (gpus <= most)
        share = float(failed[mine].mean()) if mine.any() else UNKNOWN
        yield PublishedFigure(f"failed of jobs on {sizes} GPU{'s' * (sizes != '1')}", NO_SOURCE, UNKNOWN, share)
    ratio = float(gpu_s[failed].mean() / gpu_s.mean()) if failed.any() else UNKNOWN
    name = "GPU-time of a failed job ÷ any"
    jobs, time = known.end_state_job_fraction[FAILED], known.end_state_gpu_time_fraction[FAILED]
    yield PublishedFigure(name, known.origin["end_states"], float(time / jobs), ratio)
    if "failed" in known.elsewhere:
        other = known.elsewhere["failed"]
        yield PublishedFigure(name, known.origin["elsewhere"], other["gpu_time"] / other["jobs"], ratio)


def tenant_loads(known: Statistics, rows: TraceRows, window_s: float) -> NDArray[np.float64]:
    """GPU-seconds that each tenant with a quota asks for ÷ what its quota has in `window_s` seconds."""
    asked = np.bincount(rows.virtual_cluster, weights=np.multiply(rows.gpus, rows.duration_s))
    by_name = dict(zip(rows.virtual_clusters.values(), asked.tolist(), strict=False))
    return np.array([by_name.get(name, 0.0) / (quota * window_s) for name, quota in known.quotas.items()])
