"""A policy put to work: told what happens, asked once per instant what should run where.

Whoever drives a scheduler, simulator or executor, calls `arrive`, `finish` and, after carrying out a stop, `requeue`;
`decide` answers with a `Decision` that has already been entered in the jobs (`running`, `placement`, attained service).
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from synergy_core.cluster import Cluster
from synergy_core.decision import Decision, JobQueue
from synergy_core.errors import InputError
from synergy_core.placement import Placement
from synergy_core.policies import AllocationPolicy, OrderingPolicy, Policy
from synergy_core.prediction import DurationPredictor
from synergy_core.queue import IncrementalQueue
from synergy_core.state import NEVER, Allocations, ClusterState, Job, OracleClusterState, Placed
from synergy_core.walk import WalkQueue


class Scheduler(Protocol):
    """What a driver needs of a scheduler."""

    def arrive(self, job: Job) -> None:
        """A job was submitted."""

    def finish(self, job: Job, now_s: float) -> None:
        """A job has ended: a running one, which holds nothing from now on, or a stopped one that will not be back."""

    def requeue(self, job: Job) -> None:
        """A stopped job's progress is settled: it waits from now on. Not called for one that starts elsewhere."""

    def decide(self, now_s: float) -> Decision:
        """Who stops and who starts where."""

    def next_change_s(self) -> float:
        """When to ask again although nothing happened; inf for never."""

    @property
    def waiting(self) -> int:
        """Jobs that wait."""


class OrderingScheduler:
    """Runs an ordering policy on a queue that suits the cluster."""

    __slots__ = ("_jumps", "_predictor", "_queue")

    def __init__(self, policy: OrderingPolicy, cluster: Cluster) -> None:
        suited = IncrementalQueue.suits(cluster)
        self._queue: JobQueue = IncrementalQueue(policy, cluster) if suited else WalkQueue(policy, cluster)
        self._predictor = DurationPredictor() if policy.predicted else None
        self._jumps = policy.next_change is not None

    def arrive(self, job: Job) -> None:
        if self._predictor is not None:
            job.predicted_duration_s = self._predictor.predict_s(job)
        self._queue.enter(job)

    def finish(self, job: Job, now_s: float) -> None:
        if job.running:
            self._queue.leave(job)
            job.stopped(now_s)
        if self._predictor is not None:
            self._predictor.learn(job, job.attained_service_gpu_s / job.gpus)

    def requeue(self, job: Job) -> None:
        self._queue.enter(job)

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
        return self._queue.next_change_s() if self._jumps else NEVER

    @property
    def waiting(self) -> int:
        return self._queue.waiting


class AllocationScheduler:
    """Asks an allocation policy each time, and turns its answer into stops and starts."""

    __slots__ = ("_active", "_cluster", "_placement", "_policy", "_tenant", "_type_of_node", "waiting")

    def __init__(self, policy: AllocationPolicy, cluster: Cluster) -> None:
        self._policy = policy
        self._cluster = cluster
        self._placement = Placement(cluster)
        self._active: dict[int, Job] = {}
        self._type_of_node = [each.gpu_type for each in cluster.node_types for _ in range(each.nodes)]
        self._tenant = {name: index for index, name in enumerate(cluster.virtual_clusters)}
        self.waiting = 0

    def arrive(self, job: Job) -> None:
        self._active[job.job_id] = job
        self.waiting += 1
        if self._tenant:
            self._tenant.setdefault(job.virtual_cluster, len(self._tenant))

    def finish(self, job: Job, now_s: float) -> None:
        del self._active[job.job_id]
        if job.running:
            self._placement.release(job.placement)
            job.stopped(now_s)
        else:
            self.waiting -= 1

    def requeue(self, job: Job) -> None:
        """It is still among the active jobs."""

    def next_change_s(self) -> float:
        return NEVER

    def decide(self, now_s: float) -> Decision:
        jobs = [self._active[job_id] for job_id in sorted(self._active)]
        if not jobs:
            return Decision([], [])
        for job in jobs:
            job.settle(now_s)
        answer = self._policy.allocate(self.state(jobs, now_s))
        self._check(answer, jobs)
        return self._carry_out(answer, jobs, now_s)

    def state(self, jobs: list[Job], now_s: float) -> ClusterState:
        """The frozen snapshot of these jobs, which are in order of their ids."""
        kinds = {kind: index for index, kind in enumerate(self._cluster.gpu_types)}
        held = [kinds[self._type_of_node[job.placement[0][0]]] if job.running else -1 for job in jobs]
        columns: dict[str, Any] = {
            "job_id": [job.job_id for job in jobs],
            "submit_time_s": [job.submit_time_s for job in jobs],
            "gpus": [job.gpus for job in jobs],
            "held_gpus": [job.gpus if job.running else 0 for job in jobs],
            "attained_service_gpu_s": [job.attained_service_gpu_s for job in jobs],
            "first_start_s": [job.first_start_s for job in jobs],
            "estimate_s": [job.estimate_s for job in jobs],
            "restarts": [job.restarts for job in jobs],
            "gpu_type": [kinds.get(job.gpu_type, -1) for job in jobs],
            "held_type": held,
            "virtual_cluster": [self._tenant.get(job.virtual_cluster, 0) for job in jobs],
        }
        if self._policy.oracle:
            columns |= {name: [getattr(job, name) for job in jobs] for name in ("duration_s", "remaining_s")}
        columns = {name: np.array(column) for name, column in columns.items()}
        fixed: dict[str, Any] = {"now_s": now_s, "cluster": self._cluster}
        fixed["virtual_clusters"] = tuple(self._tenant) or ("",)
        kind = OracleClusterState if self._policy.oracle else ClusterState
        return kind(**fixed, **columns)

    def _check(self, answer: Allocations, jobs: list[Job]) -> None:
        """A policy's answer is checked before it is believed."""
        name, gpus = self._policy.name, answer.gpus
        if gpus.shape != (len(jobs),) or answer.gpu_type.shape != (len(jobs),):
            raise InputError(f"policy {name} answered {gpus.shape} allocations for {len(jobs)} jobs.")
        for index, kind in enumerate(self._cluster.gpu_types):
            used, most = int(gpus[answer.gpu_type == index].sum()), self._cluster.gpus_of(kind)
            if used > most:
                raise InputError(f"policy {name} gave out {used} GPUs of type {kind}; the cluster has {most}.")
        if gpus.min() < 0 or int(gpus.sum()) > self._cluster.gpus:
            raise InputError(f"policy {name} gave out {gpus.sum()} GPUs; the cluster has {self._cluster.gpus}.")
        odd = next((job for job, each in zip(jobs, gpus, strict=True) if each not in (0, job.gpus)), None)
        if odd is not None:
            raise InputError(f"policy {name} gave job {odd.job_id} another number of GPUs than its {odd.gpus}.")

    def _carry_out(self, answer: Allocations, jobs: list[Job], now_s: float) -> Decision:
        kinds = self._cluster.gpu_types
        stops: list[tuple[Job, Placed]] = []
        wanted: list[tuple[int, int, Job, str]] = []
        for job, gpus, kind in zip(jobs, answer.gpus.tolist(), answer.gpu_type.tolist(), strict=True):
            moves = job.running and gpus and kind >= 0 and kinds[kind] != self._type_of_node[job.placement[0][0]]
            if job.running and (moves or not gpus):
                self._placement.release(job.placement)
                stops.append((job, job.placement))
            if gpus and (moves or not job.running):
                wanted.append((-gpus, job.job_id, job, kinds[kind] if kind >= 0 else job.gpu_type))
        starts: list[tuple[Job, Placed]] = []
        for _, _, job, kind in sorted(wanted, key=lambda each: each[:2]):
            placed = self._placement.place(job.gpus, kind)
            if placed is not None:
                starts.append((job, placed))
        for job, _ in stops:
            job.stopped(now_s)
        for job, placed in starts:
            job.started(now_s, placed)
        self.waiting += len(stops) - len(starts)
        return Decision(stops, starts, answer.objective, answer.bound)


def scheduler_for(policy: Policy, cluster: Cluster) -> Scheduler:
    """The scheduler that runs this policy on this cluster."""
    if isinstance(policy, OrderingPolicy):
        return OrderingScheduler(policy, cluster)
    return AllocationScheduler(policy, cluster)
