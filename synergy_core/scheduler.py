"""A policy put to work: told what happens, asked once per instant what should run where.

Whoever drives a scheduler, simulator or executor, calls `arrive`, `finish` and, after carrying out a stop, `requeue`;
`decide` answers with a `Decision` that has already been entered in the jobs (`running`, `placement`, attained service).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from synergy_core.allocation.scheduler import AllocationScheduler
from synergy_core.cluster import Cluster
from synergy_core.jobs.decision import Decision
from synergy_core.jobs.record import Job
from synergy_core.jobs.testbed_profiles import Profile
from synergy_core.ordering.queue import JobQueue
from synergy_core.ordering.scheduler import QUEUES, OrderingScheduler
from synergy_core.policies import OrderingPolicy, Policy, SharingPolicy
from synergy_core.sharing.scheduler import SharingScheduler
from synergy_core.state import Allocations, ClusterState


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

    def respecified(self, job: Job) -> None:
        """What is known of the job's model before it trains has changed: it has another spec."""

    def refresh(self, jobs: Iterable[Job]) -> None:
        """The jobs have reported something new and want to know what to make of it."""

    def decide(self, now_s: float) -> Decision:
        """Who stops and who starts where."""

    def next_change_s(self, now_s: float) -> float:
        """When to ask again although nothing happened, `now_s` or later; inf for never."""

    @property
    def waiting(self) -> int:
        """Jobs that wait."""

    @property
    def last(self) -> tuple[ClusterState, Allocations] | None:
        """The state that an allocation policy was last asked about, and its answer; None where jobs are ordered."""


def scheduler_for(
    policy: Policy,
    cluster: Cluster,
    *,
    free_moves: bool = False,
    profile: Profile | None = None,
    round_s: float | None = None,
    queues: Sequence[type[JobQueue]] = QUEUES,
) -> Scheduler:
    """The scheduler that runs this policy on this cluster.

    free_moves, profile, round_s: see `AllocationScheduler`; queues: see `OrderingScheduler`.
    """
    if isinstance(policy, SharingPolicy):
        return SharingScheduler(policy, cluster, free_moves=free_moves, round_s=round_s or policy.round_s)
    if isinstance(policy, OrderingPolicy):
        return OrderingScheduler(policy, cluster, queues=queues)
    return AllocationScheduler(policy, cluster, free_moves=free_moves, profile=profile, round_s=round_s)
