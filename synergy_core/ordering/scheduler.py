"""An ordering policy put to work: on the kind of queue that suits the cluster."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from synergy_core.cluster import Cluster
from synergy_core.errors import InputError
from synergy_core.jobs.decision import Decision
from synergy_core.jobs.record import NEVER, Job
from synergy_core.ordering.counts.queue import IncrementalQueue
from synergy_core.ordering.nodes.queue import ConsolidatedQueue
from synergy_core.ordering.prediction import DurationPredictor
from synergy_core.ordering.queue import JobQueue
from synergy_core.ordering.trial.walk import WalkQueue
from synergy_core.policies import OrderingPolicy

QUEUES: tuple[type[JobQueue], ...] = (IncrementalQueue, ConsolidatedQueue, WalkQueue)
"""The quickest first; the last suits any cluster."""


def stops_jobs(policy: str) -> InputError:
    """The error of a preemptive order that is given jobs which may not be stopped."""
    return InputError(
        f"policy {policy} stops running jobs, and some jobs may not be stopped once they run. Leave {policy} out, or "
        "let such jobs be stopped (in the simulator, truth.not_preemptible=[])."
    )


class OrderingScheduler:
    """Runs an ordering policy on the first of these kinds of queue that suits the cluster."""

    __slots__ = ("_falls", "_jumps", "_policy", "_predictor", "_queue", "_wakes")

    last = None

    def __init__(self, policy: OrderingPolicy, cluster: Cluster, *, queues: Sequence[type[JobQueue]] = QUEUES) -> None:
        self._policy = policy
        self._queue = next(each for each in queues if each.suits(cluster))(policy.of_records(), cluster)
        self._predictor = DurationPredictor() if policy.predicted else None
        self._jumps = policy.next_change is not None
        self._falls = policy.falls_while_running
        self._wakes = self._jumps or cluster.scatter_after_s > 0

    def arrive(self, job: Job) -> None:
        if self._policy.preemptive and job.spec is not None and not job.spec.preemptible:
            raise stops_jobs(self._policy.name)
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

    def respecified(self, job: Job) -> None:
        """Nothing to do: no belief follows from it."""

    def refresh(self, jobs: Iterable[Job]) -> None:
        """Nothing to do: ordering policies ask no models of training jobs."""

    def decide(self, now_s: float) -> Decision:
        decision = self._queue.decide(now_s)
        for job, _ in decision.stops:
            job.stopped(now_s)
        for job, placed in decision.starts:
            job.started(now_s, placed)
            if self._jumps or (self._falls and job.task is not None):
                self._queue.started(job, now_s)
        return decision

    def next_change_s(self, now_s: float) -> float:
        return self._queue.next_change_s(now_s) if self._wakes else NEVER

    @property
    def waiting(self) -> int:
        return self._queue.waiting
