"""Schedulers run policies: they receive events and decide once per instant what should run where."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Generic

from synergy_core.performance.planner.tables import PlanError
from synergy_core.scheduling.decisions.allocation import AllocationChooser
from synergy_core.scheduling.decisions.chooser import Chooser
from synergy_core.scheduling.decisions.ordering import OrderingChooser, WalkerOf, fastest
from synergy_core.scheduling.decisions.predictor import DurationPredictor
from synergy_core.scheduling.decisions.sharing import SharingChooser
from synergy_core.scheduling.decisions.starvation import Waits, exempt
from synergy_core.scheduling.jobs.beliefs import Beliefs
from synergy_core.scheduling.jobs.cluster import Cluster
from synergy_core.scheduling.jobs.record import AnyJob, Decision
from synergy_core.scheduling.jobs.testbed_profiles import TestbedProfile
from synergy_core.scheduling.jobs.views import Allocations, ClusterState
from synergy_core.scheduling.policies import OrderingPolicy, Policy, SharingPolicy


class Scheduler(Generic[AnyJob]):
    """Runs one policy on one cluster, for the simulator and the executor.

    The driver tells events: `arrive`, `finish`, `evicted` and, after it has carried out a stop, `requeue`. Once per
    instant, after its events, it asks for a decision, which the jobs' records then already say.
    """

    def __init__(self, chooser: Chooser, predictor: DurationPredictor | None, waits: Waits[AnyJob] | None) -> None:
        self._chooser = chooser
        self._predictor = predictor
        self._waits = waits
        self.waiting = 0
        """Number of waiting jobs."""

    @property
    def beliefs(self) -> Beliefs | None:
        return self._chooser.beliefs

    @property
    def last(self) -> tuple[ClusterState, Allocations] | None:
        """The last state and answer of an allocation policy; None for other policies."""
        return self._chooser.last

    def arrive(self, job: AnyJob) -> None:
        """A job was submitted."""
        if self._predictor is not None:
            job.predicted_duration_s = self._predictor.predict_s(job)
        self._chooser.arrive(job)
        self.waiting += 1
        if self._waits is not None:
            self._waits.begin(job)

    def requeue(self, job: AnyJob) -> None:
        """A stopped job waits, and its progress is settled. Not called for a job that moves."""
        self._chooser.requeue(job)

    def evicted(self, job: AnyJob, now_s: float) -> None:
        """A running job has lost its GPUs without a decision and waits. No `requeue` follows."""
        self._chooser.leave(job, now_s, ended=False)
        job.stopped(now_s)
        self._chooser.requeue(job)
        self.waiting += 1
        if self._waits is not None:
            self._waits.stop(job, now_s)

    def finish(self, job: AnyJob, now_s: float) -> None:
        """A running job has ended, which frees its GPUs, or a waiting or stopped job will not run again."""
        self._chooser.leave(job, now_s, ended=True)
        if self._waits is not None:
            self._waits.end(job, now_s)
        if job.running:
            job.stopped(now_s)
        else:
            self.waiting -= 1
        if self._predictor is not None:
            self._predictor.ended(job, job.service.attained_gpu_s / job.gpus, now_s)

    def respecified(self, job: AnyJob) -> None:
        """The job has a new spec, because prior knowledge about its model has changed."""
        self._chooser.respecified(job)

    def refresh(self, jobs: Iterable[AnyJob]) -> None:
        """Fits all outdated models of jobs that have reported something new, in one call."""
        if self.beliefs is not None:
            self.beliefs.refresh([job.task for job in jobs if job.task is not None])

    def decide(self, now_s: float) -> Decision[AnyJob]:
        """Decides what runs from now on; the jobs' records then say so."""
        chooser, waits = self._chooser, self._waits
        entered: list[Decision[Any]] = []
        # 1. Jobs that have waited for too long count as starved, and get their GPUs before all others.
        if waits is not None:
            waits.mark(now_s)
            entered += [self._enter(seated, now_s) for seated in chooser.seat_starved(now_s)]
        # 2. The policy chooses, by its queue or by a snapshot of all jobs, who stops and who starts on which GPUs.
        chosen = chooser.choose(now_s)
        # 3. Stops, then starts, are entered in the jobs' records; started jobs get their plans and shares.
        decision = self._enter(chosen, now_s)
        for each in reversed(entered):
            decision = decision._replace(stops=each.stops + decision.stops, starts=each.starts + decision.starts)
        # 4. Waits and run times are counted.
        if waits is not None:
            waits.count(decision, now_s)
        return decision

    def _enter(self, decision: Decision[Any], now_s: float) -> Decision[Any]:
        stops, starts, moved = decision.stops, decision.starts, decision.moved
        for job, _ in stops:
            job.stopped(now_s)
        for job, placed in starts:
            job.started(now_s, placed, moved=bool(moved) and job.job_id in moved)
        self.waiting += len(stops) - len(starts)
        return self._chooser.entered(decision, now_s)

    def next_change_s(self, now_s: float) -> float:
        """The instant of the next decision if no event comes before, `now_s` or later; inf for never."""
        change_s = self._chooser.next_change_s(now_s)
        return change_s if self._waits is None else min(change_s, self._waits.next_change_s(now_s))


def scheduler_for(
    policy: Policy,
    cluster: Cluster,
    *,
    free_moves: bool = False,
    profile: TestbedProfile | None = None,
    plan_errors: PlanError | None = None,
    round_s: float | None = None,
    walker_of: WalkerOf = fastest,
) -> Scheduler[Any]:
    """The scheduler that runs this policy on this cluster.

    free_moves: a job that moves to other nodes but keeps its GPU type and its GPUs per node continues at no cost.
    profile: measured models. plan_errors: true ÷ planned step times, if the policy knows them
    (`tables.planned_tables`). round_s: seconds from one decision to the next; None: the policy's default. walker_of:
    how an ordering policy's walk is found (`ordering`).
    """
    chooser: Chooser
    order = policy.order if isinstance(policy, SharingPolicy) else policy
    round_s = policy.round_s if round_s is None else round_s
    if isinstance(policy, SharingPolicy):
        chooser = SharingChooser(policy, cluster, free_moves=free_moves, round_s=round_s or policy.round_s)
    elif isinstance(policy, OrderingPolicy):
        chooser = OrderingChooser(policy, cluster, walker_of)
    else:
        chooser = AllocationChooser(
            policy, cluster, free_moves=free_moves, profile=profile, plan_errors=plan_errors, round_s=round_s
        )
    predictor = DurationPredictor() if order.predicted else None
    waits: Waits[Any] | None = None
    if cluster.max_wait and not exempt(policy):
        waits = Waits(cluster.max_wait, in_rounds=policy.in_rounds)
    return Scheduler(chooser, predictor, waits)
