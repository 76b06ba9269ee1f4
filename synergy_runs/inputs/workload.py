"""The jobs of one run in columns, in order of submission: a window of a trace, sampled or made denser if requested."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from synergy_core.errors import InputError
from synergy_core.units import DAY_S, MAX_TIME_S, Floats, on_grid, parse_duration_s
from synergy_runs.traces.cluster_seen import NOTHING_SEEN, SeenCluster, seen, types_ran_on
from synergy_runs.traces.columns import UNKNOWN, JobColumn, JobTable, schema
from synergy_runs.traces.room import seconds_with_room
from synergy_runs.traces.rows import LOG, RUNNING, BadRow, TraceRows, epoch_s, iso

if TYPE_CHECKING:
    import pandas as pd

Mask = NDArray[np.bool_]

MIN_WORKLOADS = 5
"""Fewer independent workloads give no confidence interval. Source: docs/metrics.md, "Interval"."""
MIN_ESTIMATE_FRACTION = 0.5
"""A note counts the jobs whose declared run time is below this fraction of the true run time."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """Conversion of run times from GPU type `of` to GPU type `on`.

    factor: multiplier of the run times; low, high: range of the true factor. how: basis of the factor. jobs: number of
    jobs that ran on `of` in the log and run, or may run, on `on` here.
    """

    of: str
    on: str
    factor: float
    low: float
    high: float
    how: str
    jobs: int


COLUMNS = schema(
    *(LOG[each] for each in ("job_name", "gpus", "cpus", "memory_bytes", "virtual_cluster", "user", "partition")),
    *(LOG[each] for each in ("gpu_type", "given_gpu_type", "model", "global_batch", "iterations", "end_state", "line")),
    JobColumn("submit_time_s", np.float64, "seconds from the window's start to the submission; 0 for carried jobs"),
    JobColumn(
        "duration_s",
        np.float64,
        "run time of the job in the trace, on its `gpus`; the remaining part for carried jobs",
    ),
    JobColumn(
        "estimate_s",
        np.float64,
        "run time that the user declared or, if the trace has none, a seeded over-estimate (`with_estimates`); the "
        "remaining part for carried jobs",
    ),
    JobColumn("estimate_drawn", np.bool_, "whether `with_estimates` drew the estimate", False),
    JobColumn(
        "work_scale",
        np.float64,
        "work of a training job ÷ the work of its model; NaN for a job with only a run time (`synergy_sim.assignment` "
        "makes training jobs)",
        UNKNOWN,
    ),
    JobColumn(
        "carried",
        np.bool_,
        "whether the job was submitted before the window and still active at the window's start (`from_settings.cut`)",
        False,
    ),
    JobColumn("measured", np.bool_, "whether results include the job (`with_measured`)", True),
    JobColumn(
        "ran_before_s",
        np.float64,
        "part of the run time that lies before the window, of carried jobs; 0 for others",
        0.0,
    ),
    JobColumn(
        "log_wait_s",
        np.float64,
        "seconds from submission, or from the window's start for carried jobs, to the start in the log; NaN if unknown",
        UNKNOWN,
    ),
    JobColumn(
        "log_room_s",
        np.float64,
        "part of the logged wait in which as many GPUs as the job needs were free in the log "
        "(`room.seconds_with_room`); NaN if unknown",
        UNKNOWN,
    ),
    JobColumn(
        "converted_by",
        np.float64,
        "factor by which the logged run time was converted to another GPU type; 1 if it was not",
        1.0,
    ),
)
"""Columns of a workload. Times lie on the grid of `synergy_core.units`."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Jobs to replay, and facts of the log that they come from."""

    name: str
    """Name of the trace."""
    source: str
    """File and format of the trace, in words, also of generated jobs."""
    sha256: str
    """SHA-256 of the job log or, of generated jobs, of their main columns."""
    origin_s: float
    """The window's start in seconds since 1970."""
    jobs: JobTable
    """The jobs, with `COLUMNS`. Row i is job i; rows are in order of submission, with ties in the trace's order."""
    quotas: dict[str, int] = field(default_factory=dict)
    """GPUs of each tenant, as the log gives them; {} if it gives none."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Reason → number of jobs in the log that never ran or used no GPU."""
    bad_rows: int = 0
    """Number of impossible rows that were left out."""
    bad_examples: tuple[BadRow, ...] = ()
    """The first of these rows."""
    notes: tuple[str, ...] = ()
    """Notes about the trace, one sentence each."""
    timed_on: str = ""
    """GPU type on which run times were logged; "" if it is unknown and run times count as equal on all types."""
    models_assigned: bool = False
    """Whether `synergy_sim.assignment` gave jobs models and derived their work from run times."""
    assumptions: tuple[str, ...] = ()
    """Assumptions that a reader must know, one sentence each."""
    conversions: tuple[Conversion, ...] = ()
    """Origin of the factors in converted_by."""
    seen: SeenCluster = NOTHING_SEEN
    """The cluster, estimated from the log's jobs."""
    windows: tuple[str, ...] = ()
    """Disjoint windows of the log with jobs in each, as values of trace.window: just enough for a confidence interval,
    or empty if the log is too short."""

    def __len__(self) -> int:
        return len(self.jobs)

    def with_columns(self, **values: Any) -> Workload:
        """The workload with these columns of its jobs replaced. values: see `JobTable.of`."""
        return replace(self, jobs=self.jobs.with_columns(**values))

    @property
    def arrival_window_s(self) -> float:
        """Seconds from the window's start to the last submission."""
        return float(self.jobs["submit_time_s"][-1]) if len(self) else 0.0

    @property
    def whole(self) -> Mask:
        """Jobs neither carried in nor running when the log was written. Counts and means of jobs are over these."""
        return np.asarray(~self.jobs["carried"] & (self.jobs["end_state"] != RUNNING))

    def offered_load_fraction(self, gpus: int) -> float:
        """GPU-seconds requested ÷ GPU-seconds available while jobs arrive; above 1 the queue must grow.

        Jobs carried in from before the window do not count, because they did not arrive in it. Infinite, which is not
        shown, if jobs arrive for a shorter time than half of them run: then it says little about the queue.
        """
        window_s, own = self.arrival_window_s, self.jobs[~self.jobs["carried"]]
        if not len(own) or window_s <= np.median(own["duration_s"]):
            return float("inf")
        return float((own["duration_s"] * own["gpus"]).sum()) / (gpus * window_s)


def from_rows(
    rows: TraceRows,
    *,
    name: str,
    sha256: str = "",
    window: str = "all",
    first_s: float | None = None,
    before: bool = False,
) -> Workload:
    """The jobs of `rows` submitted in `window`, in order of submission (stable); times count from the window's start.

    window: see `parse_window`. first_s: start of a window without a date, by default the first submission.
    before: whether to add all jobs submitted earlier, at negative times; `from_settings.cut` keeps those that reach
    into it.
    Raises InputError if no job was submitted in the window.
    """
    logged, submit_s = rows.jobs, rows.jobs["submit_s"]
    if first_s is None:
        first_s = 0.0 if rows.from_zero else float(submit_s.min())
    start_s, end_s = parse_window(window, first_s=first_s)
    order = np.argsort(submit_s, kind="stable")
    order = order[submit_s[order] < end_s]
    inside = int((submit_s[order] >= start_s).sum())
    order = order if before and not rows.from_zero else order[len(order) - inside :]
    if not inside:
        raise InputError(
            f"trace.window={window}: no job was submitted in it; the trace runs from "
            f"{iso(float(submit_s.min()))} to {iso(float(submit_s.max()))}. Type trace.window=all for all of it."
        )

    notes = list(rows.notes)
    for what, column in (("CPUs", logged["cpus"]), ("memory", logged["memory_bytes"])):
        silent = int(np.isnan(column).sum())
        if 0 < silent < len(rows):
            verb = "requests" if silent == 1 else "request"
            notes.append(f"{silent:,} of {len(rows):,} rows {verb} no {what}")
    short = (logged["estimate_s"] < MIN_ESTIMATE_FRACTION * logged["duration_s"]).sum()
    declared = np.isfinite(logged["estimate_s"]).sum()
    if short:
        notes.append(
            f"{short:,} of {declared:,} declared run times are below {MIN_ESTIMATE_FRACTION:.0%} of the true run time. "
            "Check that they are in seconds; policies that read them (easy) use them unchanged"
        )
    cluster = seen(rows)
    mine = logged[order]
    changed = {
        "submit_time_s": on_grid(mine["submit_s"] - start_s),
        "duration_s": on_grid(mine["duration_s"]),
        "estimate_s": on_grid(mine["estimate_s"]),
        "carried": mine["submit_s"] < start_s,
        "log_wait_s": on_grid(np.maximum(mine["start_s"] - mine["submit_s"], 0.0)),
        "log_room_s": on_grid(seconds_with_room(rows, cluster)[order]),
    }
    as_logged = {name: mine[name] for name in COLUMNS.keys() & LOG.keys()}
    return Workload(
        name=name,
        source=f"{rows.path} ({rows.format_name})",
        sha256=sha256,
        origin_s=start_s,
        jobs=JobTable.of(COLUMNS, len(mine), **as_logged | changed),
        quotas=dict(rows.quotas),
        left_out=dict(rows.left_out),
        bad_rows=rows.bad_count,
        bad_examples=tuple(rows.bad),
        notes=tuple(notes),
        seen=cluster,
        windows=() if rows.format_name.startswith("generator") else windows_of(submit_s, start_s),
    )


IS_DATE = re.compile(r"\d{4}-\d{2}")


def parse_window(text: str, *, first_s: float) -> tuple[float, float]:
    """(start, end), seconds since 1970, of `all`, `7d`, `2017-10-09/7d`, `2017-10-09/2017-10-16` or `2017-10-09`.

    A window without a date starts at `first_s`, the first submission; a window without an end has an infinite one.
    Raises InputError listing the accepted forms.
    """
    text = str(text).strip()
    if text == "all":
        return first_s, np.inf
    start_text, slash, end_text = text.partition("/")
    try:
        if not slash and not IS_DATE.match(text):
            return first_s, first_s + _length_s(text)
        start_s = epoch_s(start_text)
        if not slash:
            return start_s, np.inf
        end_s = epoch_s(end_text) if IS_DATE.match(end_text) else start_s + _length_s(end_text)
    except InputError:
        raise
    except ValueError:
        raise InputError(
            f"trace.window={text}: expected all, a length (7d, 12h), a date (2017-10-09), or "
            "date/length (2017-10-09/7d) or date/date."
        ) from None
    if end_s <= start_s:
        raise InputError(f"trace.window={text}: the end {iso(end_s)} is not after the start {iso(start_s)}.")
    return start_s, end_s


def _length_s(text: str) -> float:
    number = text.strip()
    if re.fullmatch(r"[\d.]+", number):
        raise InputError(f"trace.window={number}: the unit is missing. Type {number}d for days, {number}h for hours.")
    seconds = parse_duration_s(text)
    if seconds > MAX_TIME_S:
        raise InputError(f"trace.window={text}: expected at most {MAX_TIME_S / DAY_S:,.0f}d.")
    if seconds == 0:
        raise ValueError("a window has a length")
    return seconds


def windows_of(submit_s: Floats, start_s: float) -> tuple[str, ...]:
    """`MIN_WORKLOADS` consecutive windows of equally many days, at most 7, each with a submission; empty if the log is
    too short. The first starts on the day of `start_s` if all fit after it, else on the log's first day or, because a
    log's first jobs may have been submitted long before the others, so late that the last ends with the log.
    """
    last_s = float(submit_s.max())
    for first_s in (start_s, float(submit_s.min()), last_s - 7 * MIN_WORKLOADS * DAY_S):
        first_s = np.floor(first_s / DAY_S) * DAY_S
        days = min(7, int((last_s - first_s) / DAY_S + 1) // MIN_WORKLOADS)
        edges = first_s + np.arange(MIN_WORKLOADS + 1) * days * DAY_S
        if days and np.histogram(submit_s[submit_s < edges[-1]], edges)[0].all():
            return tuple(f"{iso(edge)[:10]}/{days}d" for edge in edges[:-1].tolist())
    return ()


def take(workload: Workload, keep: NDArray[np.bool_] | NDArray[np.int64]) -> Workload:
    """The workload with only the jobs that `keep` selects (a mask or increasing row numbers), in the same order."""
    return replace(workload, jobs=workload.jobs[keep])


def bound_to(workload: Workload, gpu_type: ArrayLike | pd.Categorical) -> Workload:
    """Replaces the requested GPU types. `given_gpu_type` gets the type that a job ran on, else its former request."""
    return workload.with_columns(gpu_type=gpu_type, given_gpu_type=types_ran_on(workload.jobs))


def at_least(workload: Workload, gpus: int) -> Workload:
    """Keeps only the jobs that request at least `gpus` GPUs. Raises InputError if the window has no such job."""
    kept = workload.jobs["gpus"] >= gpus
    if not (kept & ~workload.jobs["carried"]).any():
        raise InputError(f"trace.min_gpus={gpus}: no job of {workload.source} requests that many; give a lower number.")
    return workload if kept.all() else take(workload, kept)


def sampled(workload: Workload, fraction: float, random: np.random.Generator) -> Workload:
    """Keeps each job with probability `fraction`, in (0, 1]."""
    if fraction == 1:
        return workload
    kept = take(workload, uniform(workload, random) < fraction)
    if kept.jobs["carried"].all():
        raise InputError(f"trace.sample={fraction:g} kept none of {len(workload)} jobs; give a larger fraction.")
    return kept


def scaled(workload: Workload, load: float) -> Workload:
    """Divides every submission time by `load`, so that jobs arrive `load` times as fast; nothing else changes."""
    if workload.arrival_window_s / load > MAX_TIME_S:
        raise InputError(f"cluster.load={load:g}: arrivals would last more than {MAX_TIME_S / 3.15e7:.0f} years.")
    if load == 1:
        return workload
    return workload.with_columns(submit_time_s=on_grid(workload.jobs["submit_time_s"] / load))


def uniform(workload: Workload, random: np.random.Generator, columns: int | None = None) -> Floats:
    """Draws uniform numbers in [0, 1) for each job: shape (jobs,) or (jobs, columns).

    The first draws are for jobs of the window, so that these numbers do not depend on the jobs carried into it.
    """
    shape, carried = () if columns is None else (columns,), workload.jobs["carried"]
    drawn = np.empty((len(workload), *shape))
    drawn[~carried] = random.random((int((~carried).sum()), *shape))
    drawn[carried] = random.random((int(carried.sum()), *shape))
    return drawn


def with_estimates(
    workload: Workload, overestimate: float, random: np.random.Generator, readers: Sequence[str] = ()
) -> Workload:
    """Fills unknown user estimates with duration × (1 + overestimate·U), U uniform in [0, 1). readers: policies that
    read estimates; an assumption says that their results are optimistic.

    The f-model of Mu'alem and Feitelson (IEEE TPDS 12(6), 2001, section 5): users over-estimate by a factor that does
    not depend on the job. overestimate = 0 makes estimates exact.
    """
    factor = 1.0 + overestimate * uniform(workload, random)
    jobs = workload.jobs
    unknown = np.isnan(jobs["estimate_s"])
    if not unknown.any():
        return workload
    guess = on_grid((jobs["ran_before_s"] + jobs["duration_s"]) * factor) - jobs["ran_before_s"]
    assumptions = list(workload.assumptions)
    if readers:
        missing = "the log has none" if unknown.all() else f"{unknown.sum():,} of {len(unknown):,} jobs lack one"
        drawn = f"1 to {1 + overestimate:g} ×" if overestimate else "exactly"
        *others, last = readers
        read = f"{', '.join(others)} and {last} read them, so their" if others else f"{last} reads them, so its"
        assumptions.append(
            f"Users' estimates are {drawn} the true run time ({missing}); {read} results are optimistic."
        )
    estimate_s = np.where(unknown, guess, jobs["estimate_s"])
    made = workload.with_columns(estimate_s=estimate_s, estimate_drawn=unknown)
    return replace(made, assumptions=tuple(assumptions))


# Measured jobs: results cover only these jobs. Earlier jobs fill the cluster, and later jobs keep it full.


def with_measured(workload: Workload, ids: str | None) -> Workload:
    """Marks the jobs with these ids, such as `4000-4999` or `17`, as measured; None marks all. Ids are row numbers.

    This is the last step in making a workload, because removing jobs changes the ids of later jobs.
    """
    if ids is None:
        return workload
    found = re.fullmatch(r"(\d+)(?:\s*[-–]\s*(\d+))?", str(ids).strip())
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
    if not 0 <= first <= last < len(workload):
        raise InputError(
            f"trace.measured_jobs={ids}: expected ids from 0 to {len(workload) - 1}, such as 0-{len(workload) - 1}; "
            "null measures all jobs."
        )
    row = np.arange(len(workload))
    return workload.with_columns(measured=(first <= row) & (row <= last))


def measured_ids(workload: Workload) -> str | None:
    """The measured jobs' ids in the form of `with_measured`; None if all are measured, "none" if no job is."""
    measured = workload.jobs["measured"]
    if measured.all():
        return None
    rows = np.flatnonzero(measured)
    return f"{rows[0]}-{rows[-1]}" if len(rows) else "none"
