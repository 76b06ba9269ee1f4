"""From facts to intervals and step functions: who held what from when to when, how much was in use, how many waited."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from synergy_core.arrays import Floats
from synergy_core.units import TICKS_PER_S
from synergy_runs.log import Compressions, Events, Kind, Run, Shares

Counts = NDArray[np.int64]

# What a fact adds to the number of waiting jobs, by kind.
_WAITING = np.array([1, -1, 1, 0], dtype=np.int64)
# What it adds to the GPUs in use, in multiples of the job's GPUs.
_IN_USE = np.array([0, 1, -1, -1], dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Holdings:
    """Intervals in which a job held GPUs, one per start, in the order of the starts.

    start_row, end_row: rows of the log; end_row is the log's length, and end_s its last time, for a job that still
    held its GPUs when a run was cut.
    """

    job_id: NDArray[np.int32]
    gpus: NDArray[np.int32]
    start_s: Floats
    end_s: Floats
    start_row: Counts
    end_row: Counts

    def __len__(self) -> int:
        return len(self.job_id)

    def gpu_ticks(self) -> Counts:
        """GPUs × length of each interval, exactly, in GPU-ticks (`units.TICKS_PER_S` per GPU-second)."""
        return ticks(self.end_s - self.start_s) * self.gpus


def ticks(time_s: Floats) -> Counts:
    """Times on the grid as exact integers."""
    return np.rint(time_s * TICKS_PER_S).astype(np.int64)


def last_time_s(events: Events) -> float:
    """When the log ends; 0 for an empty one."""
    return float(events.time_s[-1]) if len(events.time_s) else 0.0


def holdings(events: Events) -> Holdings:
    """Each start paired with the stop or finish that ends it."""
    rows = np.flatnonzero((events.kind != Kind.SUBMIT) & (events.part == 0))
    rows = rows[np.argsort(events.job_id[rows], kind="stable")]
    job_id = events.job_id[rows]
    at = np.flatnonzero(events.kind[rows] == Kind.START)
    following = np.minimum(at + 1, len(rows) - 1)
    ended = (following > at) & (job_id[following] == job_id[at])
    end_row = np.where(ended, rows[following], len(events.time_s))
    in_order = np.argsort(rows[at])
    start_row, end_row = rows[at][in_order], end_row[in_order]
    times = np.append(events.time_s, last_time_s(events))
    return Holdings(
        job_id=events.job_id[start_row],
        gpus=events.gpus[start_row],
        start_s=events.time_s[start_row],
        end_s=times[end_row],
        start_row=start_row,
        end_row=end_row,
    )


@dataclass(frozen=True, slots=True)
class Given:
    """Intervals in which a job had one share, one per row of `Shares` and in that order; empty ones too.

    holding: which of the `Holdings` it was given for, −1 where the job held nothing. cpus, memory_bytes: of the whole
    job.
    """

    job_id: NDArray[np.int32]
    holding: Counts
    start_s: Floats
    end_s: Floats
    cpus: Floats
    memory_bytes: Floats


def given(shares: Shares, held: Holdings) -> Given:
    """Each row of the shares with the start that it follows, until the job's next row, stop or finish."""
    jobs, starts = np.concatenate((held.job_id, shares.job_id)), len(held)
    time_s = np.concatenate((held.start_s, shares.time_s))
    is_row = np.arange(len(jobs)) >= starts
    order = np.lexsort((is_row, time_s, jobs))
    row_here, jobs_here = is_row[order], jobs[order]
    last = np.maximum.accumulate(np.where(row_here, -1, np.arange(len(order))))
    known = (last >= 0) & (jobs_here[last] == jobs_here)
    rows = order[row_here] - starts  # of the shares, job by job
    holding = np.empty(len(rows), dtype=np.int64)
    holding[rows] = np.where(known, order[last], -1)[row_here]
    end_s = np.where(holding >= 0, np.append(held.end_s, np.nan)[holding], shares.time_s)
    holding[end_s < shares.time_s] = -1
    following_s = np.full(len(rows), np.inf)
    same_job = shares.job_id[rows[1:]] == shares.job_id[rows[:-1]]
    following_s[rows[:-1][same_job]] = shares.time_s[rows[1:][same_job]]
    end_s = np.maximum(np.minimum(end_s, following_s), shares.time_s)
    return Given(shares.job_id, holding, shares.time_s, end_s, shares.cpus, shares.memory_bytes)


def compressed_gpu_s(compressions: Compressions, held: Holdings) -> Floats:
    """GPU-seconds that jobs held GPUs for, by compressor, (compressors,); from each start on under the last one."""
    following_s = np.append(compressions.time_s[1:], np.inf)
    same_job = np.append(compressions.job_id[1:] == compressions.job_id[:-1], False)
    until_s = np.where(same_job, following_s, np.inf)
    # What a job holds before its first step counts as of the compressor that it begins with.
    first = np.append(True, ~same_job[:-1])[: len(same_job)]
    from_s = np.where(first, -np.inf, compressions.time_s)
    first_row = np.searchsorted(compressions.job_id, held.job_id, side="left")
    rows = np.searchsorted(compressions.job_id, held.job_id, side="right") - first_row
    pairs = np.repeat(np.arange(len(held)), rows)
    row = np.arange(len(pairs)) - np.repeat(np.cumsum(rows) - rows, rows) + np.repeat(first_row, rows)
    inside_s = np.minimum(held.end_s[pairs], until_s[row]) - np.maximum(held.start_s[pairs], from_s[row])
    return np.bincount(
        compressions.compressor_code[row],
        weights=np.maximum(inside_s, 0.0) * held.gpus[pairs],
        minlength=len(compressions.compressors),
    ).astype(np.float64)


def compressed_gpu_s_by_model(run: Run) -> dict[tuple[str, str], float]:
    """The same of a whole run by (model, compressor), of models that train; {} where nobody compresses."""
    facts, held, models = run.compressions, holdings(run.events), run.workload.model_code
    found: dict[tuple[str, str], float] = {}
    if facts is None:
        return found
    for code in np.unique(models[facts.job_id]):
        mine = models[facts.job_id] == code
        columns = {name: getattr(facts, name)[mine] for name in ("time_s", "job_id", "compressor_code")}
        spent = compressed_gpu_s(replace(facts, **columns), held).tolist()
        found |= {(run.workload.models[code], facts.compressors[at]): each for at, each in enumerate(spent)}
    return found


def shares_in_use(had: Given) -> tuple[Floats, Floats, Floats]:
    """(times, CPUs, bytes of memory) that jobs have, from each instant on."""
    time_s = np.concatenate((had.start_s, had.end_s))
    order = np.argsort(time_s, kind="stable")
    both = [steps(time_s[order], np.concatenate((amount, -amount))[order]) for amount in (had.cpus, had.memory_bytes)]
    return both[0][0], both[0][1], both[1][1]


def steps(time_s: Floats, change: NDArray[Any]) -> tuple[Floats, NDArray[Any]]:
    """The distinct times of sorted `time_s`, and the running sum of `change` after everything at each."""
    last = np.append(time_s[1:] != time_s[:-1], True)[: len(time_s)]
    return time_s[last], np.cumsum(change)[last]


def gpus_in_use(events: Events) -> tuple[Floats, Counts]:
    """The GPUs held from each instant on."""
    whole = events.part == 0
    return steps(events.time_s[whole], _IN_USE[events.kind[whole]] * events.gpus[whole])


def waiting_jobs(events: Events) -> tuple[Floats, Counts]:
    """The jobs submitted or stopped and not running, from each instant on."""
    whole = events.part == 0
    return steps(events.time_s[whole], _WAITING[events.kind[whole]])


def integral(time_s: Floats, value: NDArray[Any], at_s: Floats) -> Floats:
    """∫ of a step function from its first time to each of `at_s`; it keeps its last value for ever."""
    if not len(time_s):
        return np.zeros(len(at_s))
    total = np.concatenate(([0.0], np.cumsum(np.diff(time_s) * value[:-1])))
    beyond = np.maximum(at_s - time_s[-1], 0.0) * value[-1]
    sums: Floats = np.interp(at_s, time_s, total) + beyond
    return sums


def binned_mean(time_s: Floats, value: NDArray[Any], edges_s: Floats) -> Floats:
    """Time-weighted mean of a step function within each pair of neighbouring edges."""
    means: Floats = np.diff(integral(time_s, value, edges_s)) / np.diff(edges_s)
    return means


def binned_extremes(time_s: Floats, value: NDArray[Any], edges_s: Floats) -> tuple[Floats, Floats]:
    """(least, most) of a step function within each pair of neighbouring edges; it is 0 before its first time."""
    after = np.concatenate(([0.0], value))
    at = np.searchsorted(time_s, edges_s, side="right")
    least: Floats = np.minimum(np.minimum.reduceat(after, at)[:-1], after[at[1:]])
    most: Floats = np.maximum(np.maximum.reduceat(after, at)[:-1], after[at[1:]])
    return least, most
