"""Runs an ordering policy: jobs in the order of a key, each on the GPUs that its user requested."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from synergy_core.errors import InputError
from synergy_core.scheduling.decisions.chooser import Chooser
from synergy_core.scheduling.decisions.lanes import EasyLane, KeepingLane, Lane, TenantLanes
from synergy_core.scheduling.decisions.preemptive import PreemptiveLane, PreemptiveNodeLane
from synergy_core.scheduling.decisions.walk import Walk
from synergy_core.scheduling.jobs.cluster import Cluster
from synergy_core.scheduling.jobs.record import Decision, Job
from synergy_core.scheduling.placement.one_job import Placement
from synergy_core.scheduling.policies import OrderingPolicy


class Walker(Protocol):
    """Finds the result of the greedy walk over the active jobs: a lane, a lane per tenant, or the walk itself."""

    def enter(self, job: Job) -> None: ...
    def remove(self, job: Job) -> None: ...
    def started(self, job: Job, now_s: float, *, moved: bool) -> None: ...
    def decide(self, now_s: float) -> Decision[Job]: ...
    def next_change_s(self, now_s: float) -> float: ...


WalkerOf = Callable[[OrderingPolicy, Cluster, Placement], Walker]
"""Makes the walker of a policy on a cluster, whose GPUs it places."""


def stops_jobs(policy: str) -> InputError:
    """The error for a preemptive ordering policy with jobs that may not be stopped."""
    return InputError(
        f"policy {policy} stops running jobs, or tenants reclaim GPUs that they have lent, but some jobs may not be "
        f"stopped once they run. Leave {policy} out, type cluster.reclaim=never, or allow all jobs to be stopped (in "
        "the simulator, truth.not_preemptible=[])."
    )


def walks(policy: OrderingPolicy, cluster: Cluster, placement: Placement) -> Walker:
    """The walk over all jobs, which suits every cluster."""
    return Walk(policy, cluster, placement)


def fastest(policy: OrderingPolicy, cluster: Cluster, placement: Placement) -> Walker:
    """Lanes where they suit, one per tenant with a quota or a single one; else the walk over all jobs."""
    if len(cluster.gpu_types) > 1 or cluster.borrowing or cluster.max_wait > 0:
        return walks(policy, cluster, placement)
    quotas, together = cluster.virtual_clusters or {"": cluster.gpus}, cluster.scatter_after_s > 0
    if policy.preemptive:
        kind: type[Lane] = PreemptiveNodeLane if together else PreemptiveLane
    else:
        kind = EasyLane if policy.backfill == "easy" else KeepingLane
    if "" in quotas or (kind is EasyLane and together):
        return kind(policy, cluster, placement, quotas)
    return TenantLanes({name: kind(policy, cluster, placement, {name: gpus}) for name, gpus in quotas.items()})


class OrderingChooser(Chooser):
    """Chooses by the greedy walk; where GPUs may lie anywhere, it then chooses them for all starts together."""

    def __init__(self, policy: OrderingPolicy, cluster: Cluster, walker_of: WalkerOf) -> None:
        self._policy = policy
        self._cluster = cluster
        self._placement = Placement(cluster)
        self._walker = walker_of(policy.of_records(), cluster, self._placement)

    def arrive(self, job: Job) -> None:
        may_not_stop, policy = job.spec is not None and not job.spec.preemptible, self._policy
        if may_not_stop and (policy.preemptive or self._cluster.reclaims(policy.preemptive)):
            raise stops_jobs(policy.name)
        self._walker.enter(job)

    def requeue(self, job: Job) -> None:
        self._walker.enter(job)

    def leave(self, job: Job, now_s: float, *, ended: bool) -> None:
        self._walker.remove(job)

    def choose(self, now_s: float) -> Decision[Job]:
        decision = self._walker.decide(now_s)
        if not decision.starts or decision.starts[0][1]:
            return decision
        for _, placed in decision.stops:
            self._placement.release(placed)
        return Decision(decision.stops, self._placement.place_all([(job, "") for job, _ in decision.starts]))

    def entered(self, decision: Decision[Job], now_s: float) -> Decision[Job]:
        if decision.starts:
            stopped = {job.job_id for job, _ in decision.stops}
            for job, _ in decision.starts:
                self._walker.started(job, now_s, moved=job.job_id in stopped)
        return decision

    def next_change_s(self, now_s: float) -> float:
        return self._walker.next_change_s(now_s)
