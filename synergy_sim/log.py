"""The log of facts: what happened, in columns. Metrics are computed from it afterwards, never during a run."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from synergy_core.cluster import Cluster
from synergy_sim.workload import Workload


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


class EventLog:
    """Appends facts; one typed array per column (about 30 bytes a row)."""

    __slots__ = ("gpu_mask", "gpus", "job_id", "kind", "node", "part", "time_s")

    def __init__(self) -> None:
        self.time_s = array("d")
        self.kind = array("B")
        self.job_id = array("i")
        self.gpus = array("i")
        self.part = array("H")
        self.node = array("i")
        self.gpu_mask = array("Q")

    def append(
        self, time_s: float, kind: int, job_id: int, gpus: int, part: int = 0, node: int = -1, gpu_mask: int = 0
    ) -> None:
        """One fact."""
        self.time_s.append(time_s)
        self.kind.append(kind)
        self.job_id.append(job_id)
        self.gpus.append(gpus)
        self.part.append(part)
        self.node.append(node)
        self.gpu_mask.append(gpu_mask)

    def start(self, time_s: float, job_id: int, gpus: int, placement: Sequence[tuple[int, int]]) -> None:
        """A start on the (node, GPU mask) pairs of `placement`."""
        for part, (node, gpu_mask) in enumerate(placement):
            self.append(time_s, Kind.START, job_id, gpus, part, node, gpu_mask)

    def events(self) -> Events:
        """Everything so far, as numpy columns that share the log's memory."""
        return Events(
            time_s=np.frombuffer(self.time_s, dtype=np.float64),
            kind=np.frombuffer(self.kind, dtype=np.uint8),
            job_id=np.frombuffer(self.job_id, dtype=np.int32),
            gpus=np.frombuffer(self.gpus, dtype=np.int32),
            part=np.frombuffer(self.part, dtype=np.uint16),
            node=np.frombuffer(self.node, dtype=np.int32),
            gpu_mask=np.frombuffer(self.gpu_mask, dtype=np.uint64),
        )


class DecisionLog:
    """Appends decisions; one typed array per column."""

    __slots__ = (
        "bound", "decision_s", "gpus_used", "objective", "queued", "running", "started", "stopped", "time_s",
    )  # fmt: skip

    def __init__(self) -> None:
        self.time_s = array("d")
        self.decision_s = array("d")
        self.started = array("i")
        self.stopped = array("i")
        self.running = array("i")
        self.queued = array("i")
        self.gpus_used = array("i")
        self.objective = array("d")
        self.bound = array("d")

    def __len__(self) -> int:
        return len(self.time_s)

    def append(
        self, time_s: float, decision_s: float, started: int, stopped: int, running: int, queued: int, gpus_used: int
    ) -> None:
        """One decision, without an optimum."""
        self.time_s.append(time_s)
        self.decision_s.append(decision_s)
        self.started.append(started)
        self.stopped.append(stopped)
        self.running.append(running)
        self.queued.append(queued)
        self.gpus_used.append(gpus_used)

    def optimum(self, objective: float, bound: float) -> None:
        """What the allocator says of the decision just appended; given for every decision of a run or for none."""
        self.objective.append(objective)
        self.bound.append(bound)

    def decisions(self) -> Decisions:
        """Everything so far, as numpy columns. gap = |bound − objective| ÷ |bound|."""
        none = np.full(len(self), np.nan)
        objective = np.frombuffer(self.objective) if self.objective else none
        bound = np.frombuffer(self.bound) if self.bound else none
        with np.errstate(divide="ignore", invalid="ignore"):
            gap = np.abs(bound - objective) / np.abs(bound)
        return Decisions(
            time_s=np.frombuffer(self.time_s),
            decision_s=np.frombuffer(self.decision_s),
            started=np.frombuffer(self.started, dtype=np.int32),
            stopped=np.frombuffer(self.stopped, dtype=np.int32),
            running=np.frombuffer(self.running, dtype=np.int32),
            queued=np.frombuffer(self.queued, dtype=np.int32),
            gpus_used=np.frombuffer(self.gpus_used, dtype=np.int32),
            objective=objective,
            bound=bound,
            gap=gap,
        )


@dataclass(frozen=True, slots=True)
class Run:
    """One simulated policy: what went in, and the facts that came out.

    oracle: the policy reads true run times (starred in tables). seed: of the workload.
    predicted_duration_s: per job, NaN where nothing was predicted. simulation_cpu_s: processor seconds of the
    simulation alone. peak_memory_bytes: the process's high-water mark.
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
