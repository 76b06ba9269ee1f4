"""The log of facts: what happened, in columns. Metrics are computed from it afterwards, never during a run."""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from synergy_core.scheduling.jobs.cluster import Cluster, Share
from synergy_core.scheduling.policies import AllocationPolicy, Policy, SharingPolicy
from synergy_core.units import TICKS_PER_S, Floats, on_grid
from synergy_runs.inputs.workload import Workload

Counts = NDArray[np.int64]

AS_LOGGED = "as-logged"
"""Policy name under which the schedule in the log is stored. Tables show it as `as logged`."""
TRUE_RUN_TIMES = "true run times"
POOLED = "CPUs and memory as if all nodes of a GPU type were one"
WAITING = np.array([1, -1, 1, 0], dtype=np.int64)
"""Change of the number of waiting jobs at an event of each `Kind`."""
IN_USE = np.array([0, 1, -1, -1], dtype=np.int64)
"""Change of the GPUs in use at an event of each `Kind`, in multiples of the job's GPUs."""
_BITS_OF_16 = np.array([value.bit_count() for value in range(1 << 16)], dtype=np.uint8)


class Kind(IntEnum):
    """Kinds of events."""

    SUBMIT = 0
    START = 1  # the job holds its GPUs from now on: first start or resume
    STOP = 2  # the job is preempted: it frees its GPUs and keeps as much progress as the execution model says
    FINISH = 3  # the job is done and frees its GPUs


@dataclass(frozen=True, slots=True)
class Events:
    """Events in order of time, one row each, except that a start on k nodes has k rows."""

    time_s: NDArray[np.float64]
    """Seconds since the window's start."""
    kind: NDArray[np.uint8]
    """A `Kind`."""
    job_id: NDArray[np.int32]
    """The job's row in the workload."""
    gpus: NDArray[np.int32]
    """Number of GPUs of the whole job."""
    part: NDArray[np.uint16]
    """Number of the row among those of its start, from 0; 0 for other events."""
    node: NDArray[np.int32]
    """Number of a start's node in `Cluster.boards`; −1 for other events, and if it is unknown."""
    gpu_mask: NDArray[np.uint64]
    """Mask of a start's GPUs on that node (bit i = GPU i); 0 for other events, and if it is unknown."""
    reason: NDArray[np.uint8]
    """A `scheduling.reasons.Stopped` for stops; 0 for other events, and if it was not recorded."""

    def digest(self) -> str:
        """SHA-256 of all columns except `reason`; equal digests mean that the same events happened."""
        total = hashlib.sha256()
        for column in fields(self):
            if column.name != "reason":
                total.update(np.ascontiguousarray(getattr(self, column.name)).tobytes())
        return total.hexdigest()


@dataclass(frozen=True, slots=True)
class Decisions:
    """One row per decision of the scheduler.

    decision_s: wall-clock seconds that the decision took; they are not in the event log because they differ from run to
    run. objective, bound, gap: results of the allocator, NaN for a policy without one. running, queued, gpus_used:
    values after the decision.
    """

    time_s: NDArray[np.float64]
    decision_s: NDArray[np.float64]
    started: NDArray[np.int32]
    stopped: NDArray[np.int32]
    running: NDArray[np.int32]
    queued: NDArray[np.int32]
    gpus_used: NDArray[np.int32]
    objective: NDArray[np.float64]
    bound: NDArray[np.float64]
    gap: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Shares:
    """The log of CPUs and memory given to jobs: one row per change, in force until the job's next row, stop or finish.

    cpus, memory_bytes: totals of the whole job."""

    time_s: NDArray[np.float64]
    job_id: NDArray[np.int32]
    cpus: NDArray[np.float64]
    memory_bytes: NDArray[np.float64]


def _rows(columns: type, form: str) -> tuple[Callable[..., bytes], np.dtype[Any]]:
    """Returns a function that packs one row, and the NumPy type of packed rows. form: a `struct` code per column."""
    columns_of = [(column.name, f"<{row_type}") for column, row_type in zip(fields(columns), form, strict=False)]
    return struct.Struct(f"<{form}").pack, np.dtype(columns_of)


_pack_event, _EVENT = _rows(Events, "dBiiHiQB")
_pack_decision, _DECISION = _rows(Decisions, "ddiiiii")
_pack_share, _SHARE = _rows(Shares, "didd")
# This is a plain integer, because each use of an enum member would cost a look-up and a conversion.
_START = int(Kind.START)


def _columns(rows: bytearray, row_type: np.dtype[Any]) -> dict[str, NDArray[Any]]:
    """Converts packed rows to one contiguous array per field. Clears `rows`, so that memory holds each row once."""
    table = np.frombuffer(rows, dtype=row_type)
    columns = {name: table[name].copy() for name in row_type.names or ()}
    del table  # a bytearray cannot be cleared while an array refers to it
    rows.clear()
    return columns


class EventLog:
    """Collects the events of a run, 32 bytes each, packed in one call (an array per column takes twice as long)."""

    __slots__ = ("_first_board", "_rows")

    def __init__(self, cluster: Cluster | None = None) -> None:
        """cluster: needed only if a node has more than `BOARD_GPUS` GPUs."""
        self._rows = bytearray()
        boards = cluster.boards if cluster is not None and len(cluster.boards) > cluster.nodes else ()
        self._first_board = {node: board for board, (node, _) in reversed([*enumerate(boards)])}

    def append(self, time_s: float, kind: int, job_id: int, gpus: int, reason: int = 0) -> None:
        """Appends a submit, stop or finish. reason: a `Stopped` for stops."""
        self._rows += _pack_event(time_s, kind, job_id, gpus, 0, -1, 0, reason)

    def start(self, time_s: float, job_id: int, gpus: int, placement: Sequence[tuple[int, int]]) -> None:
        """Appends a start on the (node, GPU mask) pairs of `placement`."""
        if self._first_board:
            in_bytes = ((node, mask.to_bytes(mask.bit_length() // 64 * 8 + 8, "little")) for node, mask in placement)
            words = ((self._first_board[node], np.frombuffer(each, "<u8").tolist()) for node, each in in_bytes)
            placement = [(first + at, word) for first, each in words for at, word in enumerate(each) if word]
        for part, (node, gpu_mask) in enumerate(placement):
            self._rows += _pack_event(time_s, _START, job_id, gpus, part, node, gpu_mask, 0)

    def events(self) -> Events:
        """Returns all events and empties the log."""
        return Events(**_columns(self._rows, _EVENT))


class ShareLog:
    """Collects the CPUs and memory that jobs are given."""

    __slots__ = ("_rows",)

    def __init__(self) -> None:
        self._rows = bytearray()

    def append(self, time_s: float, job_id: int, share: Share, gpus: int) -> None:
        """Records that the job has `gpus` GPUs, each with this share, from now on."""
        self._rows += _pack_share(time_s, job_id, share.cpus * gpus, share.memory_bytes * gpus)

    def shares(self) -> Shares | None:
        """Returns all rows, None if there are none, and empties the log."""
        return Shares(**_columns(self._rows, _SHARE)) if self._rows else None


@dataclass(frozen=True, slots=True)
class Training:
    """How jobs trained: one row at the first step of each run and at each later change, sorted by job, then by time.

    global_batch: samples per step on all GPUs together. compressor_code: index into `compressors`, the compressor of
    the gradients that its replicas exchange; "" for a job that may not compress them.
    """

    time_s: NDArray[np.float64]
    job_id: NDArray[np.int32]
    global_batch: NDArray[np.int32]
    compressor_code: NDArray[np.int32]
    compressors: tuple[str, ...]

    def of(self, rows: NDArray[np.bool_]) -> Training:
        """The rows that the mask selects, and the compressors in them."""
        used, code = np.unique(self.compressor_code[rows], return_inverse=True)
        names = tuple(self.compressors[each] for each in used.tolist())
        return Training(self.time_s[rows], self.job_id[rows], self.global_batch[rows], code.astype(np.int32), names)

    def with_compression(self) -> Training | None:
        """The rows of jobs that may compress gradients; None if there are none."""
        may = np.array([bool(name) for name in self.compressors])[self.compressor_code]
        return self.of(may) if may.any() else None


class TrainingLog:
    """Collects, for each finished job, the batches and compressors with which it trained."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, float, int, str]] = []

    def append(self, job_id: int, changes: Sequence[tuple[float, int, str]]) -> None:
        """Appends all changes of one job: (time from which it trained so, global batch, compressor)."""
        self._rows += [(job_id, *change) for change in changes]

    def training(self) -> Training | None:
        """Returns all rows, None if there are none."""
        if not self._rows:
            return None
        names = {name: code for code, name in enumerate(dict.fromkeys(name for *_, name in self._rows))}
        job_id, time_s, batches, compressors = zip(*sorted(self._rows, key=lambda row: row[0]), strict=True)
        codes = [names[name] for name in compressors]
        job_ids, global_batches, compressor_codes = (
            np.array(each, dtype=np.int32) for each in (job_id, batches, codes)
        )
        return Training(np.array(time_s), job_ids, global_batches, compressor_codes, tuple(names))


class DecisionLog:
    """Collects the decisions of a run."""

    __slots__ = ("_optima", "_rows")

    def __init__(self) -> None:
        self._rows = bytearray()
        self._optima = array("d")

    def __len__(self) -> int:
        return len(self._rows) // _DECISION.itemsize

    def append(
        self, time_s: float, decision_s: float, started: int, stopped: int, running: int, queued: int, gpus_used: int
    ) -> None:
        """Appends a decision without its objective and bound."""
        self._rows += _pack_decision(time_s, decision_s, started, stopped, running, queued, gpus_used)

    def optimum(self, objective: float, bound: float) -> None:
        """Appends the objective and bound of the last decision. A run has both for all decisions or none."""
        self._optima.extend((objective, bound))

    def decisions(self) -> Decisions:
        """Returns all decisions, with gap = |bound − objective| ÷ |bound|, and empties the log."""
        optima = np.frombuffer(self._optima) if self._optima else np.full(2 * len(self), np.nan)
        objective, bound = optima.reshape(-1, 2).T.copy()
        with np.errstate(divide="ignore", invalid="ignore"):
            gap = np.abs(bound - objective) / np.abs(bound)
        return Decisions(**_columns(self._rows, _DECISION), objective=objective, bound=bound, gap=gap)


@dataclass(frozen=True)
class Run:
    """The inputs and the facts of one policy's run."""

    policy: str
    """Name of the policy with its parameters, or `AS_LOGGED` for the schedule in the log."""
    oracle: bool
    """Whether the policy reads true values, such as run times; starred in tables."""
    seed: int
    """The workload's seed."""
    workload: Workload
    """The jobs."""
    cluster: Cluster
    """The simulated cluster."""
    events: Events
    """The log of events."""
    decisions: Decisions
    """The scheduler's decisions; empty for the schedule in the log."""
    predicted_duration_s: NDArray[np.float64]
    """(jobs,) predicted run time; NaN if the policy predicted none."""
    simulation_cpu_s: float
    """CPU time of the simulation alone; 0 for the schedule in the log."""
    peak_memory_bytes: int
    """Maximum resident memory of the process; 0 for the schedule in the log."""
    information: str = ""
    """The policy's level of information about training jobs; "" if it learns nothing about them."""
    learns_input: bool = False
    """Whether the policy learned the speed of input preparation from reports instead of profiles."""
    truth_read: str = ""
    """The true values that the policy reads, in words; "" if none."""
    terms: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `requested.Terms`; {} for the schedule in the log."""
    shares: Shares | None = None
    """CPUs and memory of jobs; None if the policy does not share them out."""
    training: Training | None = None
    """Batches and compressors of jobs; None if no job's batch is known."""
    lost_gpu_s: float = 0.0
    """GPU-seconds of training lost by stops of the jobs that ended."""
    pooled: bool = False
    """Whether shares are limited by the sum over all nodes of a GPU type instead of by each node."""

    @cached_property
    def held(self) -> Holdings:
        """The intervals in which jobs held GPUs."""
        return holdings(self.events)


def truth_read_by(policy: Policy, workload: Workload, *, declared_error: float = 0.0) -> str:
    """The true values that a policy reads on this workload; "" if none, which means that it is no oracle.

    Declared values count as true values only if they are exact: estimates of run times that were drawn without error,
    and work that is declared without error, if jobs were assigned models: that work is computed from run times.
    declared_error: standard deviation of the logarithm of declared ÷ true work.
    """
    jobs = workload.jobs
    if isinstance(policy, SharingPolicy) and policy.mechanism.pooled and not policy.order.oracle:
        return POOLED
    if policy.oracle:
        return TRUE_RUN_TIMES
    drawn = jobs["estimate_drawn"]
    if policy.reads_estimates and drawn.any() and (jobs["estimate_s"] == jobs["duration_s"])[drawn].all():
        return "estimates equal to the true run times"
    told = policy.information if isinstance(policy, AllocationPolicy) and policy.reads_goodput else "own"
    if told in ("declared", "all") and workload.models_assigned and declared_error == 0.0:
        return "declared work that is the true run time"
    return ""


@dataclass(frozen=True, slots=True)
class Holdings:
    """Intervals in which a job held GPUs, one per start, in the order of the starts.

    start_row, end_row: rows of the log. For a job that still held its GPUs when the run was truncated, end_row is the
    log's length, and end_s is the log's last time.
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
        """The exact GPUs × length of each interval, in GPU-ticks (`units.TICKS_PER_S` per GPU-second)."""
        return ticks(self.end_s - self.start_s) * self.gpus


def gpus_in(gpu_mask: NDArray[np.uint64]) -> Counts:
    """The number of GPUs in each mask."""
    return np.asarray(_BITS_OF_16[gpu_mask.view(np.uint16).reshape(-1, 4)].sum(axis=1), dtype=np.int64)


def ticks(time_s: Floats) -> Counts:
    """Converts times on the grid of `synergy_core.units` to exact integers."""
    return np.rint(time_s * TICKS_PER_S).astype(np.int64)


def last_time_s(events: Events) -> float:
    """The time of the last event; 0 for an empty log."""
    return float(events.time_s[-1]) if len(events.time_s) else 0.0


def holdings(events: Events) -> Holdings:
    """Pairs each start with the stop or finish that ends it."""
    rows = np.flatnonzero((events.kind != Kind.SUBMIT) & (events.part == 0))
    rows = rows[np.argsort(events.job_id[rows], kind="stable")]
    end_row = np.full(len(events.time_s), len(events.time_s))  # for each row, the row of its job's next event
    same_job = events.job_id[rows[1:]] == events.job_id[rows[:-1]]
    end_row[rows[:-1][same_job]] = rows[1:][same_job]
    start_row = np.flatnonzero((events.kind == Kind.START) & (events.part == 0))
    return Holdings(
        job_id=events.job_id[start_row],
        gpus=events.gpus[start_row],
        start_s=events.time_s[start_row],
        end_s=np.append(events.time_s, last_time_s(events))[end_row[start_row]],
        start_row=start_row,
        end_row=end_row[start_row],
    )


@dataclass(frozen=True, slots=True)
class ShareIntervals:
    """Intervals in which a job's share of CPUs and memory was constant, one per row of `Shares`; some may be empty.

    holding: index of the interval in `Holdings` that contains it, −1 if the job held no GPUs. cpus, memory_bytes:
    totals of the whole job.
    """

    job_id: NDArray[np.int32]
    holding: Counts
    start_s: Floats
    end_s: Floats
    cpus: Floats
    memory_bytes: Floats


def share_intervals(shares: Shares, held: Holdings) -> ShareIntervals:
    """The interval in which each row of `shares` applies (to the job's next row, stop or finish), and its holding."""
    import pandas as pd

    rows = pd.DataFrame({"job": shares.job_id, "time_s": shares.time_s})
    starts = pd.DataFrame({"job": held.job_id, "time_s": held.start_s, "holding": np.arange(len(held))})
    holding = pd.merge_asof(rows, starts, on="time_s", by="job")["holding"].fillna(-1).to_numpy(dtype=np.int64)
    end_s = np.where(holding >= 0, np.append(held.end_s, np.nan)[holding], shares.time_s)
    holding = np.where(end_s < shares.time_s, -1, holding)
    next_s = rows.groupby("job")["time_s"].shift(-1, fill_value=np.inf).to_numpy()
    end_s = np.maximum(np.minimum(end_s, next_s), shares.time_s)
    return ShareIntervals(shares.job_id, holding, shares.time_s, end_s, shares.cpus, shares.memory_bytes)


def batches_in(held: Holdings, training: Training | None) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The global batch with which a job first and last trained in each interval; 0 where none is known."""
    import pandas as pd

    unknown = np.zeros(len(held), dtype=np.int32)
    if training is None:
        return unknown, unknown
    rows = pd.DataFrame({"job": training.job_id, "time_s": training.time_s, "batch": training.global_batch})
    rows = rows.sort_values("time_s", kind="stable").assign(at_s=lambda row: row["time_s"])

    def nearest(instant_s: Floats, direction: Literal["forward", "backward"]) -> NDArray[np.int32]:
        order = np.argsort(instant_s, kind="stable")
        asked = pd.DataFrame({"job": held.job_id, "time_s": instant_s}).iloc[order]
        is_start = direction == "forward"  # a change at the end of an interval belongs to the next one
        row = pd.merge_asof(asked, rows, on="time_s", by="job", direction=direction, allow_exact_matches=is_start)
        inside = (row["at_s"].to_numpy() >= held.start_s[order]) & (row["at_s"].to_numpy() < held.end_s[order])
        batch = unknown.copy()
        batch[order] = np.where(inside, row["batch"].fillna(0), 0)
        return batch

    return nearest(held.start_s, "forward"), nearest(held.end_s, "backward")


def compressed_gpu_s(training: Training, held: Holdings) -> Floats:
    """GPU-seconds that jobs held under each compressor, (compressors,). A resumed job keeps its last compressor."""
    import pandas as pd

    rows = pd.DataFrame({"job": training.job_id, "from_s": training.time_s})
    rows["code"] = training.compressor_code
    rows["until_s"] = rows.groupby("job")["from_s"].shift(-1, fill_value=np.inf)
    # The time before a job's first step counts for its first compressor.
    rows.loc[~rows["job"].duplicated(), "from_s"] = -np.inf
    intervals = {"job": held.job_id, "gpus": held.gpus, "start_s": held.start_s, "end_s": held.end_s}
    pairs = pd.DataFrame(intervals).merge(rows, on="job")
    inside_s = np.minimum(pairs["end_s"], pairs["until_s"]) - np.maximum(pairs["start_s"], pairs["from_s"])
    gpu_s = np.maximum(inside_s, 0.0) * pairs["gpus"]
    return np.bincount(pairs["code"], weights=gpu_s, minlength=len(training.compressors)).astype(np.float64)


def compressed_gpu_s_by_model(run: Run) -> dict[tuple[str, str], float]:
    """GPU-seconds of a run by (model, compressor) for training jobs; {} if no job may compress gradients."""
    facts, model = run.training and run.training.with_compression(), run.workload.jobs["model"]
    found: dict[tuple[str, str], float] = {}
    if facts is None:
        return found
    trained = model.codes[facts.job_id]
    for code in np.unique(trained).tolist():
        mine = facts.of(trained == code)
        gpu_s = compressed_gpu_s(mine, run.held).tolist()
        found |= {(model.categories[code], name): each for name, each in zip(mine.compressors, gpu_s, strict=True)}
    return found


def shares_in_use(had: ShareIntervals) -> tuple[Floats, Floats, Floats]:
    """(times, CPUs, bytes of memory): what all jobs together have from each time to the next."""
    time_s = np.concatenate((had.start_s, had.end_s))
    order = np.argsort(time_s, kind="stable")
    change = np.stack([np.concatenate((amount, -amount)) for amount in (had.cpus, had.memory_bytes)])[:, order]
    at_s, (cpus, memory_bytes) = steps(time_s[order], change)
    return at_s, cpus, memory_bytes


def steps(time_s: Floats, change: NDArray[Any]) -> tuple[Floats, NDArray[Any]]:
    """Sums `change` (…, times) at sorted times to a step function: (distinct times, its value from each time on)."""
    last = np.append(time_s[1:] != time_s[:-1], True)[: len(time_s)]
    return time_s[last], np.cumsum(change, axis=-1)[..., last]


def gpus_in_use(events: Events) -> tuple[Floats, Counts]:
    """(times, number of GPUs in use from each time to the next)."""
    whole = events.part == 0
    return steps(events.time_s[whole], IN_USE[events.kind[whole]] * events.gpus[whole])


def waiting_jobs(events: Events) -> tuple[Floats, Counts]:
    """(times, number of jobs that wait from each time to the next, after their submission or a stop)."""
    whole = events.part == 0
    return steps(events.time_s[whole], WAITING[events.kind[whole]])


def integral(time_s: Floats, value: NDArray[Any], at_s: Floats) -> Floats:
    """Integral of a step function from its first time to each time in `at_s`; its last value holds forever."""
    if not len(time_s):
        return np.zeros(len(at_s))
    total = np.concatenate(([0.0], np.cumsum(np.diff(time_s) * value[:-1])))
    beyond = np.maximum(at_s - time_s[-1], 0.0) * value[-1]
    sums: Floats = np.interp(at_s, time_s, total) + beyond
    return sums


def binned_mean(time_s: Floats, value: NDArray[Any], edges_s: Floats) -> Floats:
    """Time-weighted mean of a step function in each bin between neighbouring edges."""
    means: Floats = np.diff(integral(time_s, value, edges_s)) / np.diff(edges_s)
    return means


def binned_extremes(time_s: Floats, value: NDArray[Any], edges_s: Floats) -> tuple[Floats, Floats]:
    """(minimum, maximum) of a step function, which is 0 before its first time, in each bin between two edges."""
    after = np.concatenate(([0.0], value))
    at = np.searchsorted(time_s, edges_s, side="right")
    least: Floats = np.minimum(np.minimum.reduceat(after, at)[:-1], after[at[1:]])
    most: Floats = np.maximum(np.maximum.reduceat(after, at)[:-1], after[at[1:]])
    return least, most


def as_logged(workload: Workload, cluster: Cluster, seed: int) -> Run | None:
    """The schedule in the log as a run on unknown nodes (−1); None if the log does not say when each job started.

    Run times are always the logged ones, even if policies run with run times converted to other GPU types.
    cluster: the simulated cluster, on which utilisation is based; the log's own cluster may have been different.
    """
    if not len(workload) or not np.isfinite(workload.jobs["log_wait_s"]).all():
        return None
    duration_s = on_grid(workload.jobs["duration_s"] / workload.jobs["converted_by"])
    workload = workload.with_columns(duration_s=duration_s)
    jobs, submit_s = np.arange(len(workload), dtype=np.int32), workload.jobs["submit_time_s"]
    start_s = submit_s + workload.jobs["log_wait_s"]
    times = np.concatenate((submit_s, start_s, start_s + duration_s))
    kinds = np.repeat(np.array([Kind.SUBMIT, Kind.START, Kind.FINISH], dtype=np.uint8), len(jobs))
    job_id = np.tile(jobs, 3)
    # At equal times, jobs finish before others start, except that a job of zero length starts before it finishes.
    rank = np.where((kinds == Kind.FINISH) & (duration_s > 0)[job_id], 0, kinds + 1)
    order = np.lexsort((job_id, rank, times))
    events = Events(
        time_s=times[order],
        kind=kinds[order],
        job_id=job_id[order],
        gpus=workload.jobs["gpus"][job_id[order]],
        part=np.zeros(len(order), dtype=np.uint16),
        node=np.full(len(order), -1, dtype=np.int32),
        gpu_mask=np.zeros(len(order), dtype=np.uint64),
        reason=np.zeros(len(order), dtype=np.uint8),
    )
    return Run(
        policy=AS_LOGGED,
        oracle=False,
        seed=seed,
        workload=workload,
        cluster=cluster,
        events=events,
        decisions=DecisionLog().decisions(),
        predicted_duration_s=np.full(len(jobs), np.nan),
        simulation_cpu_s=0.0,
        peak_memory_bytes=0,
    )
