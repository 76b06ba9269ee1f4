"""Schedulers run policies: they receive events and decide once per instant what should run where.

A driver (simulator or executor) calls `arrive`, `finish` and, after carrying out a stop, `requeue`; `decide` returns a
`Decision` that has already been entered in the jobs (`running`, `placement`, attained service).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from synergy_core.errors import InputError
from synergy_core.performance.planner.tables import PlanError
from synergy_core.scheduling.decisions.allocation import AllocationScheduler
from synergy_core.scheduling.decisions.lanes import NOTHING, EasyLane, KeepingLane, Lane
from synergy_core.scheduling.decisions.order import DurationPredictor
from synergy_core.scheduling.decisions.preemptive import PreemptiveLane, PreemptiveNodeLane
from synergy_core.scheduling.decisions.protocol import Scheduler
from synergy_core.scheduling.decisions.sharing import SharingScheduler
from synergy_core.scheduling.decisions.starvation import guarded
from synergy_core.scheduling.decisions.trial import WalkLane
from synergy_core.scheduling.jobs.cluster import Cluster
from synergy_core.scheduling.jobs.record import NEVER, Decision, Job, Placed
from synergy_core.scheduling.jobs.testbed_profiles import TestbedProfile
from synergy_core.scheduling.placement.one_job import Placement
from synergy_core.scheduling.policies import OrderingPolicy, Policy, SharingPolicy
from synergy_core.units import TICK_S


def stops_jobs(policy: str) -> InputError:
    """The error for a preemptive ordering policy with jobs that may not be stopped."""
    return InputError(
        f"policy {policy} stops running jobs, or tenants reclaim GPUs that they have lent, but some jobs may not be "
        f"stopped once they run. Leave {policy} out, type cluster.reclaim=never, or allow all jobs to be stopped (in "
        "the simulator, truth.not_preemptible=[])."
    )


class OrderingScheduler:
    """Runs an ordering policy in lanes: one per tenant with a quota, or a single one.

    On several GPU types, with borrowing, with `Cluster.max_wait`, or with `walks`, one `WalkLane` decides by walks over
    all jobs. `_only`: the lane if there is only one, else None. `_dirty`: tenants whose lanes must decide again, in
    order of the events.
    `_chooses_gpus`: whether lanes only count GPUs, so that this class chooses them.
    """

    last = None

    def __init__(self, policy: OrderingPolicy, cluster: Cluster, *, walks: bool = False) -> None:
        self._policy = policy
        self._may_stop = policy.preemptive or cluster.reclaims(policy.preemptive)
        self._predictor = DurationPredictor() if policy.predicted else None
        self._jumps = policy.next_change is not None
        self._falls = policy.falls_while_running
        self._together = cluster.scatter_after_s > 0
        self._wakes = self._jumps or self._together
        self._is_easy = not policy.preemptive and policy.backfill == "easy"
        self._widest_first = cluster.placement != "most_free"
        quotas = cluster.virtual_clusters or {"": cluster.gpus}
        of_lane = {name: {name: gpus} for name, gpus in quotas.items()}
        kind: type[Lane]
        walks = walks or len(cluster.gpu_types) > 1 or cluster.borrowing or cluster.max_wait > 0
        if walks:
            kind = WalkLane
        elif policy.preemptive:
            kind = PreemptiveNodeLane if self._together else PreemptiveLane
        else:
            kind = EasyLane if self._is_easy else KeepingLane
        if walks or (self._is_easy and self._together):
            of_lane = {"": quotas}
        self._chooses_gpus = not (walks or self._together)
        placement, records = Placement(cluster), policy.of_records()
        self._pool = next(iter(placement.pools.values()))
        self._lanes = {name: kind(records, cluster, placement, own) for name, own in of_lane.items()}
        self._only = self._lanes.get("") if len(self._lanes) == 1 else None
        self._dirty: dict[str, None] = {}
        self._again_s = NEVER

    def arrive(self, job: Job) -> None:
        if self._may_stop and job.spec is not None and not job.spec.preemptible:
            raise stops_jobs(self._policy.name)
        if self._predictor is not None:
            job.predicted_duration_s = self._predictor.predict_s(job)
        self.requeue(job)

    def requeue(self, job: Job) -> None:
        if self._only is not None:
            self._only.enter(job)
        else:
            self._lanes[job.request.virtual_cluster].enter(job)
            self._dirty[job.request.virtual_cluster] = None

    def finish(self, job: Job, now_s: float) -> None:
        if job.running:
            self._leave(job, now_s)
        elif self._only is not None:
            self._only.withdraw(job)
        if self._predictor is not None:
            self._predictor.ended(job, job.service.attained_gpu_s / job.gpus, now_s)

    def evicted(self, job: Job, now_s: float) -> None:
        self._leave(job, now_s)
        self.requeue(job)

    def _leave(self, job: Job, now_s: float) -> None:
        if self._only is not None:
            self._only.leave(job)
        else:
            self._lanes[job.request.virtual_cluster].leave(job)
            self._freed(job.request.virtual_cluster)
        job.stopped(now_s)

    def _freed(self, tenant: str) -> None:
        """Marks the lanes whose jobs may fit on freed GPUs: the tenant's, or all lanes if GPUs must lie together."""
        if not self._together:
            self._dirty[tenant] = None
            return
        for name, lane in self._lanes.items():
            if lane.waiting:
                self._dirty[name] = None
                lane.retry()

    def respecified(self, job: Job) -> None:
        """Nothing to do: ordering policies hold no beliefs."""

    def refresh(self, jobs: Iterable[Job]) -> None:
        """Nothing to do: ordering policies use no models of training jobs."""

    def decide(self, now_s: float) -> Decision[Job]:
        decision = self._decide_lanes(now_s) if self._only is None else self._only.decide(now_s)
        stops, starts = decision.stops, decision.starts
        if starts and self._chooses_gpus:
            pool = self._pool
            for _, placed in stops:
                pool.release(placed)
            if len(starts) > 1 and self._widest_first:  # wide jobs first, to find whole nodes
                starts.sort(key=lambda start: (-start[0].gpus, start[0].job_id))
            for at, (job, _) in enumerate(starts):
                pairs = pool.find(job.gpus, scattered=True)
                assert pairs is not None, f"{job} fits by count but finds no GPUs"
                starts[at] = job, pool.claim_counts(pairs)
        for job, _ in stops:
            job.stopped(now_s)
        for job, placed in starts:
            job.started(now_s, placed)
            if self._jumps or (self._falls and job.task is not None):
                (self._only or self._lanes[job.request.virtual_cluster]).started(job, now_s)
        return decision

    def _decide_lanes(self, now_s: float) -> Decision[Job]:
        """The jobs to stop and to start, lane by lane; lanes in which nothing can have changed are skipped."""
        self._again_s = NEVER
        stops: list[tuple[Job, Placed]] = []
        starts: list[tuple[Job, Placed]] = []
        for name in self._lanes if self._wakes else [*self._dirty, *(self._lanes if self._is_easy else ())]:
            lane = self._lanes[name]
            if name not in self._dirty and not lane.is_due(now_s):
                continue
            self._dirty.pop(name, None)
            decision = lane.decide(now_s)
            if decision.stops and self._together:  # the freed GPUs may be enough for an earlier lane
                self._freed(name)
                self._dirty.pop(name, None)
                self._again_s = now_s + TICK_S
            stops += decision.stops
            starts += decision.starts
        if not self._dirty:
            self._again_s = NEVER
        return Decision(stops, starts) if starts else NOTHING

    def next_change_s(self, now_s: float) -> float:
        if not self._wakes:
            return NEVER
        if self._only is not None:
            return self._only.next_change_s(now_s)
        return min(self._again_s, *[lane.next_change_s(now_s) for lane in self._lanes.values()])

    @property
    def waiting(self) -> int:
        return self._only.waiting if self._only is not None else sum([each.waiting for each in self._lanes.values()])


def scheduler_for(
    policy: Policy,
    cluster: Cluster,
    *,
    free_moves: bool = False,
    profile: TestbedProfile | None = None,
    plan_errors: PlanError | None = None,
    round_s: float | None = None,
    walks: bool = False,
) -> Scheduler[Any]:
    """The scheduler that runs this policy on this cluster.

    free_moves, profile, plan_errors, round_s: see `AllocationScheduler`; walks: see `OrderingScheduler`.
    """
    scheduler: Scheduler[Any]
    if isinstance(policy, SharingPolicy):
        scheduler = SharingScheduler(policy, cluster, free_moves=free_moves, round_s=round_s or policy.round_s)
    elif isinstance(policy, OrderingPolicy):
        scheduler = OrderingScheduler(policy, cluster, walks=walks)
    else:
        scheduler = AllocationScheduler(
            policy, cluster, free_moves=free_moves, profile=profile, plan_errors=plan_errors, round_s=round_s
        )
    return guarded(policy, scheduler, cluster.max_wait)
