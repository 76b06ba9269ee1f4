"""Whether the queue was still growing when arrivals ended: then every mean grows with the window's length."""

from __future__ import annotations

import numpy as np

from synergy_core.arrays import Floats
from synergy_runs.log import Kind, Run
from synergy_runs.timeline import Holdings, holdings

FEWEST_JOBS = 100
"""Workloads of fewer jobs are never called overloaded."""
POINTS = 400
SHARE = 0.03
"""Growth of waiting work, as a share of the cluster's capacity, that counts as overload. Chosen by
`bench/overload.py`; docs/metrics.md has how often it errs."""
FEWEST_WAITING = 10
"""The fewest waiting jobs that can make up that share: one wide job that starves is no overload."""


def overloaded(run: Run, held: Holdings | None = None) -> bool:
    """Whether waiting work grew by `SHARE` of what the cluster can do, and stood as high in the last quarter.

    See `growth`. False for fewer than `FEWEST_JOBS` jobs of the window's own.
    """
    if int((~run.workload.carried).sum()) < FEWEST_JOBS:
        return False
    slope, late = growth(run, held)
    return bool(slope >= SHARE and late >= SHARE)


def growth(run: Run, held: Holdings | None = None) -> tuple[float, float]:
    """(growth, level) of waiting work while jobs arrive, both as shares of what the cluster can do; NaN where all come
    at once.

    growth: the least-squares slope of W(t), GPU-seconds that wait, ÷ the cluster's GPUs: by how much arrivals exceed
    what is served. level: mean W in the last quarter ÷ (GPUs × length of the window).
    """
    length_s = run.workload.arrival_window_s
    if length_s <= 0:
        return np.nan, np.nan
    return growth_until(run, length_s, held)


def growth_until(run: Run, length_s: float, held: Holdings | None = None) -> tuple[float, float]:
    """`growth` over the first `length_s` seconds of the run."""
    at_s = np.linspace(0.0, length_s, POINTS)
    most_gpu_s = SHARE / FEWEST_WAITING * run.cluster.gpus * length_s
    waiting_s = waiting_gpu_s(run, at_s, held, most_gpu_s=most_gpu_s) / run.cluster.gpus
    centred_s = at_s - at_s.mean()
    slope = float(centred_s @ waiting_s / (centred_s @ centred_s))
    late_s = float(waiting_s[-(len(at_s) // 4) :].mean())
    return slope, late_s / float(at_s[-1] - at_s[0])


def waiting_gpu_s(run: Run, at_s: Floats, held: Holdings | None = None, *, most_gpu_s: float = np.inf) -> Floats:
    """GPU-seconds that jobs waiting at each of these instants still had to train; same shape as at_s.

    A job's work is its run time × its GPUs; what it has held GPUs for is taken off it while it waits again. most_gpu_s:
    no job counts for more.
    """
    held = holdings(run.events) if held is None else held
    work = run.workload.duration_s * run.workload.gpus
    order = np.lexsort((held.start_s, held.job_id))
    job = held.job_id[order]
    service = ((held.end_s - held.start_s) * held.gpus)[order]
    total = np.cumsum(service)
    first = np.append(True, job[1:] != job[:-1])[: len(job)]
    before_job = np.maximum.accumulate(np.where(first, total - service, 0.0))
    left_after = np.maximum(work[job] - (total - before_job), 0.0)
    left_before = np.maximum(work[job] - (total - service - before_job), 0.0)
    end_row = held.end_row[order]
    kinds = np.append(run.events.kind, np.uint8(Kind.FINISH))
    stopped = kinds[end_row] == Kind.STOP
    time_s = np.concatenate((run.workload.submit_time_s, held.start_s[order], held.end_s[order][stopped]))
    change = np.concatenate((work, -left_before, left_after[stopped]))
    change = np.clip(change, -most_gpu_s, most_gpu_s)
    in_time = np.argsort(time_s, kind="stable")
    level = np.concatenate(([0.0], np.cumsum(change[in_time])))
    return np.asarray(np.maximum(level[np.searchsorted(time_s[in_time], at_s, side="right")], 0.0))
