"""A policy put to work: told what happens, asked once per instant what should run where.

Whoever drives a scheduler, simulator or executor, calls `arrive`, `finish` and, after carrying out a stop, `requeue`;
`decide` answers with a `Decision` that has already been entered in the jobs (`running`, `placement`, attained service).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from synergy_core.allocation import AllocationScheduler
from synergy_core.cluster import Cluster
from synergy_core.consolidated_queue import ConsolidatedQueue
from synergy_core.decision import Decision, JobQueue
from synergy_core.policies import OrderingPolicy, Policy
from synergy_core.prediction import DurationPredictor
from synergy_core.profiles import Profile
from synergy_core.queue import IncrementalQueue
from synergy_core.state import NEVER, Job
from synergy_core.walk import WalkQueue


class Scheduler(Protocol):
    """What a driver needs of a scheduler."""

    def arrive(self, job: Job) -> None:
        """A job was submitted."""

    def finish(self, job: Job, now_s: float) -> None:
        """A job has ended: a running one, which holds nothing from now on, or a stopped one that will not be back."""

    def requeue(self, job: Job) -> None:
        """A stopped job's progress is settled: it waits from now on. Not called for one that starts elsewhere."""

    def evicted(self, job: Job, now_s: float) -> None:
        """A running job has lost its GPUs unasked: it holds nothing from now on, and waits. No `requeue` follows."""

    def refresh(self, jobs: Iterable[Job]) -> None:
        """The jobs have reported something new and want to know what to make of it."""

    def decide(self, now_s: float) -> Decision:
        """Who stops and who starts where."""

    def next_change_s(self) -> float:
        """When to ask again although nothing happened; inf for never."""

    @property
    def waiting(self) -> int:
        """Jobs that wait."""


class OrderingScheduler:
    """Runs an ordering policy on a queue that suits the cluster."""

    __slots__ = ("_jumps", "_predictor", "_queue", "_wakes")

    def __init__(self, policy: OrderingPolicy, cluster: Cluster) -> None:
        kinds: tuple[type[JobQueue], ...] = (IncrementalQueue, ConsolidatedQueue, WalkQueue)
        self._queue = next(each for each in kinds if each.suits(cluster))(policy.of_records(), cluster)
        self._predictor = DurationPredictor() if policy.predicted else None
        self._jumps = policy.next_change is not None
        self._wakes = self._jumps or cluster.scatter_after_s > 0

    def arrive(self, job: Job) -> None:
        if self._predictor is not None:
            job.predicted_duration_s = self._predictor.predict_s(job)
        self._queue.enter(job)

    def finish(self, job: Job, now_s: float) -> None:
        if job.running:
            self._queue.leave(job)
            job.stopped(now_s)
        if self._predictor is not None:
            self._predictor.ended(job, job.attained_service_gpu_s / job.gpus, now_s)

    def requeue(self, job: Job) -> None:
        self._queue.enter(job)

    def evicted(self, job: Job, now_s: float) -> None:
        self._queue.leave(job)
        job.stopped(now_s)
        self._queue.enter(job)

    def refresh(self, jobs: Iterable[Job]) -> None:
        """Nothing is believed of jobs here."""

    def decide(self, now_s: float) -> Decision:
        decision = self._queue.decide(now_s)
        for job, _ in decision.stops:
            job.stopped(now_s)
        for job, placed in decision.starts:
            job.started(now_s, placed)
            if self._jumps:
                self._queue.started(job, now_s)
        return decision

    def next_change_s(self) -> float:
        return self._queue.next_change_s() if self._wakes else NEVER

    @property
    def waiting(self) -> int:
        return self._queue.waiting


def scheduler_for(
    policy: Policy, cluster: Cluster, *, free_moves: bool = False, profile: Profile | None = None
) -> Scheduler:
    """The scheduler that runs this policy on this cluster; free_moves, profile: see `AllocationScheduler`."""
    if isinstance(policy, OrderingPolicy):
        return OrderingScheduler(policy, cluster)
    return AllocationScheduler(policy, cluster, free_moves=free_moves, profile=profile)
