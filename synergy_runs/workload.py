"""The jobs of one run: a window of a trace, thinned or compressed as asked, in columns, in order of submission."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from synergy_core.arrays import Floats
from synergy_core.errors import InputError
from synergy_core.units import DAY_S, LONGEST_S, on_grid, parse_duration_s
from synergy_runs.interval import FEWEST_WORKLOADS
from synergy_runs.traces.cluster_seen import NOTHING_SEEN, SeenCluster, seen
from synergy_runs.traces.demands import short_estimates, silent_rows
from synergy_runs.traces.rows import BadRow, TraceRows
from synergy_runs.traces.times import epoch_s, iso

Ints = NDArray[np.int32]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Conversion:
    """Run times of one GPU type as those of another.

    factor: what they were multiplied by; low, high: within which the true one may lie. how: what the factor rests on.
    jobs: how many of them, or of those that could run there.
    """

    of: str
    on: str
    factor: float
    low: float
    high: float
    how: str
    jobs: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Jobs to replay. Row i is job i; rows are in order of submission, ties as in the trace.

    submit_time_s: from the window's start; duration_s: what the trace says a job ran, on its `gpus`;
    estimate_s: what its user declared (a seeded over-estimate where the trace has none, see `with_estimates`).
    cpus, memory_bytes: CPU cores and host memory that the trace says the whole job asks for, NaN where it does not.
    global_batch: as requested, samples, 0 where the log has none. work_scale: a training job's work in multiples of
    its model's; NaN for one that only has a run time (`synergy_sim.assignment` makes training jobs). iterations: after
    how many at the requested batch it is done, NaN where the log does not say.
    estimate_drawn: whether `with_estimates` drew its estimate. carried: it was submitted before the window and reaches
    into it (`synergy_runs.carrying`); its times are what was left at the window's start, and ran_before_s what it had
    run by then. measured: whether figures are over it (`synergy_runs.measured`). log_wait_s: from submission to start
    in the log itself, NaN where the log does not say.
    Times lie on the grid of `synergy_core.units`. `*_code` columns index the tuples of the same name.
    models_assigned: whether jobs were assigned models, and the work that their run times mean
    (`synergy_sim.assignment`); assumptions: what a reader must know was assumed, a sentence each.
    timed_on: the GPU type that run times in the log are of where a row asks for none; '' where they hold on any.
    gpu_types: that jobs ask for, and are bound to; given_gpu_types: that they ran on in the log; '' for none.
    timed_on: the GPU type whose run times those of rows that ask for no type are, here; '' where they hold on any.
    converted_by: what a run time of the log was multiplied by, as it is of another GPU type; conversions: why.
    seen: the cluster as the log's own jobs show it. windows: as many windows of the whole log as an interval needs,
    which share no job and have some each, in the form of trace.window; none where it is too short.
    line: where the job stands in its file, 0 if generated. bad_rows: impossible rows that were left out, of which
    `bad_examples` are the first.
    """

    name: str
    source: str
    sha256: str
    origin_s: float
    job_name: list[str]
    submit_time_s: Floats
    duration_s: Floats
    estimate_s: Floats
    gpus: Ints
    cpus: Floats
    memory_bytes: Floats
    virtual_cluster_code: Ints
    virtual_clusters: tuple[str, ...]
    user_code: Ints
    users: tuple[str, ...]
    partition_code: Ints
    partitions: tuple[str, ...]
    gpu_type_code: Ints
    gpu_types: tuple[str, ...]
    given_gpu_type_code: Ints
    given_gpu_types: tuple[str, ...]
    model_code: Ints
    models: tuple[str, ...]
    global_batch: Ints
    work_scale: Floats
    iterations: Floats
    estimate_drawn: Mask
    carried: Mask
    measured: Mask
    ran_before_s: Floats
    log_wait_s: Floats
    converted_by: Floats
    end_state_code: Ints
    line: Ints
    quotas: dict[str, int]
    left_out: dict[str, int]
    bad_rows: int
    bad_examples: tuple[BadRow, ...]
    notes: tuple[str, ...]
    timed_on: str = ""
    models_assigned: bool = False
    assumptions: tuple[str, ...] = ()
    conversions: tuple[Conversion, ...] = ()
    seen: SeenCluster = NOTHING_SEEN
    windows: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.submit_time_s)

    @property
    def arrival_window_s(self) -> float:
        """From the window's start to the last submission, seconds."""
        return float(self.submit_time_s[-1]) if len(self) else 0.0

    def offered_load_fraction(self, gpus: int) -> float:
        """GPU-seconds asked for ÷ GPU-seconds there are while jobs arrive; above 1 the queue must grow.

        Only the window's own jobs count: what was carried in did not arrive in it.
        """
        window_s = self.arrival_window_s
        asked = float((self.duration_s * self.gpus)[~self.carried].sum())
        return asked / (gpus * window_s) if window_s > 0 else float("inf")


def from_rows(
    rows: TraceRows,
    *,
    name: str,
    sha256: str = "",
    window: str = "all",
    first_s: float | None = None,
    before: bool = False,
) -> Workload:
    """The jobs of `rows` submitted in `window`, sorted by submission (stable), times from the window's start.

    window: see `parse_window`. first_s: where one without a date starts; None: at the first submission.
    before: also all jobs submitted before it, at negative times, until `carrying.cut` says which reach into it.
    Raises InputError if no job was submitted in it.
    """
    submit_s = np.asarray(rows.submit_s, dtype=np.float64)
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

    def ints(column: object) -> Ints:
        return np.asarray(column, dtype=np.int32)[order]

    def floats(column: object) -> Floats:
        return np.asarray(column, dtype=np.float64)[order]

    wait_s = floats(rows.start_s) - submit_s[order]
    return Workload(
        name=name,
        source=f"{rows.path} ({rows.format_name})",
        sha256=sha256,
        origin_s=start_s,
        job_name=[rows.job_name[i] for i in order],
        submit_time_s=on_grid(submit_s[order] - start_s),
        duration_s=on_grid(floats(rows.duration_s)),
        estimate_s=on_grid(floats(rows.estimate_s)),
        gpus=ints(rows.gpus),
        cpus=floats(rows.cpus),
        memory_bytes=floats(rows.memory_bytes),
        virtual_cluster_code=ints(rows.virtual_cluster),
        virtual_clusters=rows.virtual_clusters.values(),
        user_code=ints(rows.user),
        users=rows.users.values(),
        partition_code=ints(rows.partition),
        partitions=rows.partitions.values(),
        gpu_type_code=ints(rows.gpu_type),
        gpu_types=rows.gpu_types.values(),
        given_gpu_type_code=ints(rows.given_gpu_type),
        given_gpu_types=rows.given_gpu_types.values(),
        model_code=ints(rows.model),
        models=rows.models.values(),
        global_batch=ints(rows.global_batch),
        work_scale=np.full(len(order), np.nan),
        iterations=floats(rows.iterations),
        estimate_drawn=np.zeros(len(order), dtype=np.bool_),
        carried=submit_s[order] < start_s,
        measured=np.ones(len(order), dtype=np.bool_),
        ran_before_s=np.zeros(len(order)),
        log_wait_s=on_grid(np.maximum(wait_s, 0.0)),
        converted_by=np.ones(len(order)),
        end_state_code=ints(rows.end_state),
        line=ints(rows.line),
        quotas=dict(rows.quotas),
        left_out=dict(rows.left_out),
        bad_rows=rows.bad_count,
        bad_examples=tuple(rows.bad),
        notes=(*rows.notes, *silent_rows(rows), *short_estimates(rows)),
        seen=seen(rows),
        windows=() if rows.format_name.startswith("generator") else windows_of(submit_s, start_s),
    )


def parse_window(text: str, *, first_s: float) -> tuple[float, float]:
    """(start, end) in seconds since 1970 of `all`, `7d`, `2017-10-09/7d`, `2017-10-09/2017-10-16` or `2017-10-09`.

    A window without a date starts at the first submission, `first_s`; one without an end has none.
    Raises InputError with the accepted forms.
    """
    text = str(text).strip()
    if text == "all":
        return first_s, np.inf
    start_text, slash, end_text = text.partition("/")
    try:
        if not slash and not re.match(r"\d{4}-\d{2}", text):
            return first_s, first_s + _positive_s(text)
        start_s = epoch_s(start_text)
        if not slash:
            return start_s, np.inf
        end_s = epoch_s(end_text) if re.match(r"\d{4}-\d{2}", end_text) else start_s + _positive_s(end_text)
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


def windows_of(submit_s: Floats, start_s: float) -> tuple[str, ...]:
    """Windows of equal length, of a week or of as many whole days as fit, in each of which a job was submitted: from
    the day of `start_s` on where there are enough, else from the log's first day.
    """
    last_s = float(submit_s.max())
    for first_s in (start_s, float(submit_s.min())):
        first_s = np.floor(first_s / DAY_S) * DAY_S
        days = min(7, int((last_s - first_s) / DAY_S + 1) // FEWEST_WORKLOADS)
        edges = first_s + np.arange(FEWEST_WORKLOADS + 1) * days * DAY_S
        if days and np.histogram(submit_s[submit_s < edges[-1]], edges)[0].all():
            return tuple(f"{iso(edge)[:10]}/{days}d" for edge in edges[:-1].tolist())
    return ()


def window_length_s(text: str) -> float:
    """Seconds from the start to the end of a window that has both, for traces that are generated."""
    start_s, end_s = parse_window(text, first_s=0.0)
    if not np.isfinite(end_s):
        raise InputError(
            f"trace.window={text}: jobs are generated here, and go on for ever; give a length, such as 7d."
        )
    return end_s - start_s


def _positive_s(text: str) -> float:
    if re.fullmatch(r"[\d.]+", text.strip()):
        number = text.strip()
        raise InputError(f"trace.window={number}: {number} of what? Type {number}d for days, {number}h for hours.")
    seconds = parse_duration_s(text)
    if seconds > LONGEST_S:
        raise InputError(f"trace.window={text}: expected at most {LONGEST_S / DAY_S:,.0f}d.")
    if seconds == 0:
        raise ValueError("a window has a length")
    return seconds


def take(workload: Workload, keep: NDArray[np.bool_] | NDArray[np.int64]) -> Workload:
    """The jobs that `keep` (a mask or increasing row numbers) selects; the order stays."""
    rows = np.flatnonzero(keep) if keep.dtype == bool else keep
    columns = ("submit_time_s", "duration_s", "estimate_s", "gpus", "cpus", "memory_bytes")
    names = ("virtual_cluster_code", "user_code", "partition_code", "gpu_type_code", "model_code", "end_state_code")
    more = ("given_gpu_type_code", "global_batch", "work_scale", "iterations", "line")
    since = (
        "given_gpu_type_code",
        "estimate_drawn",
        "carried",
        "measured",
        "ran_before_s",
        "log_wait_s",
        "converted_by",
    )
    picked = {column: getattr(workload, column)[rows] for column in (*columns, *names, *more, *since)}
    return replace(workload, job_name=[workload.job_name[i] for i in rows], **picked)


def of_any_type(workload: Workload) -> Workload:
    """The jobs as if none had asked for a GPU type; what they ran on in the log, else asked for, stays known."""
    zeros = np.zeros(len(workload), dtype=np.int32)
    code, names = ran_on(workload)
    return replace(workload, gpu_type_code=zeros, gpu_types=("",), given_gpu_type_code=code, given_gpu_types=names)


def ran_on(workload: Workload) -> tuple[Ints, tuple[str, ...]]:
    """By job the GPU type whose run time the log has: that it ran on, else that it asked for; codes into the names."""
    given, asked = workload.given_gpu_types, workload.gpu_types
    names = tuple(dict.fromkeys((*given, *asked)))
    of_asked = np.array([names.index(each) for each in asked], dtype=np.int32)
    known = np.array([bool(each) for each in given])[workload.given_gpu_type_code]
    return np.where(known, workload.given_gpu_type_code, of_asked[workload.gpu_type_code]), names


def at_least(workload: Workload, gpus: int) -> Workload:
    """The jobs that ask for so many GPUs or more."""
    kept = workload.gpus >= gpus
    if not (kept & ~workload.carried).any():
        raise InputError(f"trace.min_gpus={gpus}: no job of {workload.source} asks for so many; take fewer.")
    return workload if kept.all() else take(workload, kept)


def sampled(workload: Workload, fraction: float, random: np.random.Generator) -> Workload:
    """Each job kept with probability `fraction` in (0, 1]."""
    if not 0 < fraction <= 1:
        raise InputError(f"trace.sample={fraction:g}: expected a fraction in (0, 1].")
    if fraction == 1:
        return workload
    kept = take(workload, uniform(workload, random) < fraction)
    if kept.carried.all():
        raise InputError(f"trace.sample={fraction:g} kept none of {len(workload)} jobs; take a larger fraction.")
    return kept


def scaled(workload: Workload, load: float) -> Workload:
    """Arrivals `load` times as dense: every submission time divided by `load`; the jobs stay as they are."""
    if not (np.isfinite(load) and load > 0):
        raise InputError(f"cluster.load={load:g}: expected a factor > 0, 1 to leave the arrivals as they are.")
    if workload.arrival_window_s / load > LONGEST_S:
        raise InputError(f"cluster.load={load:g}: arrivals would go on for more than {LONGEST_S / 3.15e7:.0f} years.")
    return workload if load == 1 else replace(workload, submit_time_s=on_grid(workload.submit_time_s / load))


def uniform(workload: Workload, random: np.random.Generator, columns: int | None = None) -> Floats:
    """Numbers in [0, 1) for each job: shape (jobs,) or (jobs, columns).

    The window's own jobs take theirs first, so that carrying others in changes none of them.
    """
    shape = () if columns is None else (columns,)
    drawn = np.empty((len(workload), *shape))
    drawn[~workload.carried] = random.random((int((~workload.carried).sum()), *shape))
    drawn[workload.carried] = random.random((int(workload.carried.sum()), *shape))
    return drawn


def with_estimates(
    workload: Workload, overestimate: float, random: np.random.Generator, readers: Sequence[str] = ()
) -> Workload:
    """Fills unknown user estimates with duration × (1 + overestimate·U), U uniform in [0, 1). readers: the policies
    that read them, for which a note says so.

    The f-model of Mu'alem and Feitelson (IEEE TPDS 12(6), 2001, section 5): users over-estimate by a factor that does
    not depend on the job. overestimate = 0 makes estimates exact.
    """
    if not (np.isfinite(overestimate) and overestimate >= 0):
        raise InputError(f"trace.overestimate={overestimate:g}: expected a number ≥ 0.")
    factor = 1.0 + overestimate * uniform(workload, random)
    unknown = np.isnan(workload.estimate_s)
    if not unknown.any():
        return workload
    whole_s = workload.ran_before_s + workload.duration_s
    guess = on_grid(whole_s * factor) - workload.ran_before_s
    notes = (*workload.notes, *_on_estimates(unknown, overestimate, readers))
    return replace(
        workload, estimate_s=np.where(unknown, guess, workload.estimate_s), estimate_drawn=unknown, notes=notes
    )


def _on_estimates(unknown: NDArray[np.bool_], overestimate: float, readers: Sequence[str]) -> list[str]:
    """Where the estimates that these policies read come from; nothing where none does."""
    if not readers:
        return []
    some = f"{unknown.sum():,} of {len(unknown):,} jobs lack an estimate"
    missing = "No user estimates in the log" if unknown.all() else some
    drew = f"drew 1–{1 + overestimate:g} ×" if overestimate else "took"
    *others, last = readers
    read = f"{', '.join(others)} and {last} read them: their" if others else f"{last} reads them: its"
    return [f"{missing}; {drew} the true run time. {read} results are optimistic."]
