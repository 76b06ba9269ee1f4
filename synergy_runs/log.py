"""The log of facts: what happened, in columns. Metrics are computed from it afterwards, never during a run."""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from synergy_core.cluster import Cluster, Share
from synergy_core.policies import AllocationPolicy, Policy, SharingPolicy
from synergy_runs.workload import Workload


class Kind(IntEnum):
    """What an event says of its job."""

    SUBMIT = 0
    START = 1  # holds its GPUs from now on: first start or resume
    STOP = 2  # preempted: its GPUs are free, its progress is kept as the execution model says
    FINISH = 3  # done, its GPUs are free


@dataclass(frozen=True, slots=True)
class Events:
    """Facts in the order they happened, one row each; a start on k nodes has k rows (part 0 … k−1).

    time_s: seconds since the window's start. gpus: the job's GPUs. node, gpu_mask: for starts, the node's number
    and which of its GPUs (bit i = GPU i); −1 and 0 otherwise.
    """

    time_s: NDArray[np.float64]
    kind: NDArray[np.uint8]
    job_id: NDArray[np.int32]
    gpus: NDArray[np.int32]
    part: NDArray[np.uint16]
    node: NDArray[np.int32]
    gpu_mask: NDArray[np.uint64]

    def digest(self) -> str:
        """SHA-256 over all columns; equal digests mean equal logs, byte for byte."""
        total = hashlib.sha256()
        for column in (self.time_s, self.kind, self.job_id, self.gpus, self.part, self.node, self.gpu_mask):
            total.update(np.ascontiguousarray(column).tobytes())
        return total.hexdigest()


@dataclass(frozen=True, slots=True)
class Decisions:
    """One row per decision of the scheduler.

    decision_s: wall-clock seconds it took (not part of the event log: it differs from run to run). objective, bound,
    gap: of the allocator, NaN where the policy has none. queued and gpus_used: after the decision.
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


_EVENT_FIELDS = "time_s:<f8 kind:u1 job_id:<i4 gpus:<i4 part:<u2 node:<i4 gpu_mask:<u8"
_DECISION_FIELDS = "time_s:<f8 decision_s:<f8 started:<i4 stopped:<i4 running:<i4 queued:<i4 gpus_used:<i4"
_SHARE_FIELDS = "time_s:<f8 job_id:<i4 cpus:<f8 memory_bytes:<f8"
_EVENT, _DECISION, _SHARE = (
    np.dtype([tuple(each.split(":")) for each in fields.split()])
    for fields in (_EVENT_FIELDS, _DECISION_FIELDS, _SHARE_FIELDS)
)
_pack_share = struct.Struct("<didd").pack
_pack_event = struct.Struct("<dBiiHiQ").pack
_pack_decision = struct.Struct("<ddiiiii").pack
# As plain integers: an enum member costs a look-up and a conversion each time.
_START = int(Kind.START)


class EventLog:
    """Appends facts; 31 bytes a row, packed in one call (seven typed arrays take twice as long)."""

    __slots__ = ("_rows",)

    def __init__(self) -> None:
        self._rows = bytearray()

    def append(
        self, time_s: float, kind: int, job_id: int, gpus: int, part: int = 0, node: int = -1, gpu_mask: int = 0
    ) -> None:
        """One fact."""
        self._rows += _pack_event(time_s, kind, job_id, gpus, part, node, gpu_mask)

    def start(self, time_s: float, job_id: int, gpus: int, placement: Sequence[tuple[int, int]]) -> None:
        """A start on the (node, GPU mask) pairs of `placement`."""
        rows = self._rows
        for part, (node, gpu_mask) in enumerate(placement):
            rows += _pack_event(time_s, _START, job_id, gpus, part, node, gpu_mask)

    def events(self) -> Events:
        """Everything so far, in numpy columns. The log is empty afterwards: a row is held in memory once."""
        return Events(**_columns(self._rows, _EVENT))


@dataclass(frozen=True, slots=True)
class Shares:
    """One row whenever a job is given CPUs and memory, or other than it had; they are its own until its next row, or
    until it stops or ends. cpus, memory_bytes: of the whole job.
    """

    time_s: NDArray[np.float64]
    job_id: NDArray[np.int32]
    cpus: NDArray[np.float64]
    memory_bytes: NDArray[np.float64]


class ShareLog:
    """Appends what jobs are given beside GPUs."""

    __slots__ = ("_rows",)

    def __init__(self) -> None:
        self._rows = bytearray()

    def append(self, time_s: float, job_id: int, share: Share, gpus: int) -> None:
        """The job has so many GPUs, each with that share, from now on."""
        self._rows += _pack_share(time_s, job_id, share.cpus * gpus, share.memory_bytes * gpus)

    def shares(self) -> Shares | None:
        """Everything so far, in numpy columns; None for nothing. The log is empty afterwards."""
        return Shares(**_columns(self._rows, _SHARE)) if self._rows else None


@dataclass(frozen=True, slots=True)
class Compressions:
    """One row whenever a job begins to train under another compressor than before, by job and then by time.

    compressor_code: index into `compressors`.
    """

    time_s: NDArray[np.float64]
    job_id: NDArray[np.int32]
    compressor_code: NDArray[np.int32]
    compressors: tuple[str, ...]


class CompressionLog:
    """Appends what ended jobs trained under."""

    __slots__ = ("_codes", "_rows")

    def __init__(self) -> None:
        self._rows: list[tuple[float, int, int]] = []
        self._codes: dict[str, int] = {}

    def append(self, job_id: int, changes: Sequence[tuple[float, str]]) -> None:
        """(from when on, compressor) of a whole job."""
        for time_s, name in changes:
            self._rows.append((time_s, job_id, self._codes.setdefault(name, len(self._codes))))

    def compressions(self) -> Compressions | None:
        """Everything so far, in numpy columns; None for nothing."""
        if not self._rows:
            return None
        time_s, job_id, code = zip(*sorted(self._rows, key=lambda row: row[1]), strict=True)
        return Compressions(
            np.array(time_s), np.array(job_id, dtype=np.int32), np.array(code, dtype=np.int32), tuple(self._codes)
        )


class DecisionLog:
    """Appends decisions."""

    __slots__ = ("_bound", "_objective", "_rows")

    def __init__(self) -> None:
        self._rows = bytearray()
        self._objective = array("d")
        self._bound = array("d")

    def __len__(self) -> int:
        return len(self._rows) // _DECISION.itemsize

    def append(
        self, time_s: float, decision_s: float, started: int, stopped: int, running: int, queued: int, gpus_used: int
    ) -> None:
        """One decision, without an optimum."""
        self._rows += _pack_decision(time_s, decision_s, started, stopped, running, queued, gpus_used)

    def optimum(self, objective: float, bound: float) -> None:
        """What the allocator says of the decision just appended; given for every decision of a run or for none."""
        self._objective.append(objective)
        self._bound.append(bound)

    def decisions(self) -> Decisions:
        """Everything so far, in numpy columns; gap = |bound − objective| ÷ |bound|. The log is empty afterwards."""
        none = np.full(len(self), np.nan)
        objective = np.frombuffer(self._objective) if self._objective else none
        bound = np.frombuffer(self._bound) if self._bound else none
        with np.errstate(divide="ignore", invalid="ignore"):
            gap = np.abs(bound - objective) / np.abs(bound)
        return Decisions(**_columns(self._rows, _DECISION), objective=objective, bound=bound, gap=gap)


def _columns(rows: bytearray, kind: np.dtype[Any]) -> dict[str, NDArray[Any]]:
    """A contiguous array per field; `rows` is cleared."""
    table = np.frombuffer(rows, dtype=kind)
    columns = {name: table[name].copy() for name in kind.names or ()}
    del table  # a buffer that somebody looks at cannot be cleared
    rows.clear()
    return columns


@dataclass(frozen=True, slots=True)
class Run:
    """One simulated policy: what went in, and the facts that came out.

    oracle: the policy knows true run times (starred in tables); truth_read: by reading what. information: what it knew
    of training jobs beside their own reports, "" for one that asks nothing of them. learns_input: how fast input is
    prepared it knew from reports, not from profiles. terms: what it knew and might do (`terms.Terms`), {} for what is
    no policy. seed: of the workload.
    predicted_duration_s: per job, NaN where nothing was predicted. simulation_cpu_s: processor seconds of the
    simulation alone. peak_memory_bytes: the process's high-water mark. shares: None where nobody shares CPUs and memory
    out. compressions: None where nobody compresses gradients. pooled: they keep to what all nodes of a GPU type have
    together, not to what each has.
    """

    policy: str
    oracle: bool
    seed: int
    workload: Workload
    cluster: Cluster
    events: Events
    decisions: Decisions
    predicted_duration_s: NDArray[np.float64]
    simulation_cpu_s: float
    peak_memory_bytes: int
    information: str = ""
    learns_input: bool = False
    truth_read: str = ""
    terms: Mapping[str, Any] = field(default_factory=dict)
    shares: Shares | None = None
    compressions: Compressions | None = None
    pooled: bool = False


TRUE_RUN_TIMES = "true run times"
POOLED = "CPUs and memory as if all nodes of a GPU type were one"
EXACT_ESTIMATES = "estimates equal to the true run times"
EXACT_WORK = "declared work that is the true run time"


def truth_read_by(policy: Policy, workload: Workload, *, declared_error: float = 0.0) -> str:
    """What a policy reads of the truth on this workload; "" for nothing, and then it is no oracle.

    What users declare is no truth as long as it errs. Where it was drawn without an error it is the true run time;
    so is the declared work of jobs that were assigned a model, for it was made of the run time. declared_error: the
    standard deviation of the logarithm of declared ÷ true work.
    """
    if isinstance(policy, SharingPolicy) and policy.mechanism.pooled and not policy.order.oracle:
        return POOLED
    if policy.oracle:
        return TRUE_RUN_TIMES
    drawn = workload.estimate_drawn
    if policy.reads_estimates and drawn.any() and (workload.estimate_s == workload.duration_s)[drawn].all():
        return EXACT_ESTIMATES
    told = policy.information if isinstance(policy, AllocationPolicy) and policy.reads_goodput else "own"
    if told in ("declared", "all") and workload.models_assigned and declared_error == 0.0:
        return EXACT_WORK
    return ""
