"""The greedy walk the long way: every active job, in the order of its key, with its GPUs tried out.

For clusters on which GPU counts do not decide what fits: several GPU types, quotas that may be exceeded by borrowing,
jobs whose GPUs must lie together. A decision costs O(active jobs); where counts do decide `ordering/counts/`, and on
one GPU type without borrowing `ordering/nodes/`, give the same answers.
"""

from __future__ import annotations

from synergy_core.cluster import Cluster
from synergy_core.jobs.decision import Decision
from synergy_core.jobs.record import NEVER, Job, Placed
from synergy_core.ordering.keys import Entry, after_jump, next_jump_s, order_key_of
from synergy_core.ordering.trial.trial import Isolated, Keeping, Preempting, Reserving, Trial
from synergy_core.placement.one_job import Placement
from synergy_core.placement.patience import Patience
from synergy_core.policies import OrderingPolicy
from synergy_core.units import TICK_S


class WalkQueue:
    """All active jobs; nothing is kept from one decision to the next but where they run."""

    __slots__ = (
        "_again_s",
        "_changes",
        "_cluster",
        "_easy",
        "_key",
        "_patience",
        "_placement",
        "_policy",
        "_running",
        "_started",
        "_turns",
        "_waiting",
        "_zero_s",
    )

    def __init__(self, policy: OrderingPolicy, cluster: Cluster) -> None:
        self._policy = policy
        self._key = order_key_of(policy)
        self._cluster = cluster
        self._placement = Placement(cluster)
        self._patience = Patience(cluster)
        self._waiting: dict[int, Job] = {}
        self._running: dict[int, Job] = {}
        self._changes: dict[int, float] = {}
        self._again_s = NEVER
        # Where quotas bind and GPUs must lie together, tenants take turns: nobody is stopped for another's sake. EASY
        # takes them together, as nobody may delay the head of any.
        self._easy = not policy.preemptive and policy.backfill == "easy"
        apart = cluster.virtual_clusters and not cluster.borrowing and self._patience.after_s and not self._easy
        self._turns: list[str | None] = [*cluster.virtual_clusters] if apart else [None]
        self._zero_s: dict[int, float] = {}  # when the falling key of a running job reaches zero
        self._started: dict[int, float] = {}  # when those were decided that have started since the last decision

    @staticmethod
    def suits(cluster: Cluster) -> bool:
        """Always: the walk can decide on any cluster."""
        return True

    def enter(self, job: Job) -> None:
        """The job waits from now on."""
        self._waiting[job.job_id] = job
        self._patience.begin(job)
        self._expect_change(job, job.settled_s)

    def leave(self, job: Job) -> None:
        """A running job has ended; its GPUs are free."""
        del self._running[job.job_id]
        self._changes.pop(job.job_id, None)
        self._zero_s.pop(job.job_id, None)
        self._placement.release(job.placement)

    def started(self, job: Job, now_s: float) -> None:
        """The job runs from now on, as decided."""
        self._expect_change(job, now_s)
        self._started[job.job_id] = now_s

    @property
    def waiting(self) -> int:
        """Jobs that wait."""
        return len(self._waiting)

    def _expect_change(self, job: Job, now_s: float) -> None:
        instant_s = next_jump_s(self._policy, job, now_s)
        if instant_s is None:
            self._changes.pop(job.job_id, None)
        else:
            self._changes[job.job_id] = instant_s

    def next_change_s(self, now_s: float) -> float:
        """The next instant at which a key jumps by itself or a job's patience ends, inf if none is known."""
        return min(self._again_s, self._patience.next_s(), min(self._changes.values(), default=NEVER))

    def decide(self, now_s: float) -> Decision:
        """Who stops and who starts where."""
        if self._policy.falls_while_running:
            for job_id, decided_s in self._started.items():
                if job_id in self._running:  # how long it has left is known now that its start was carried out
                    self._zero_s[job_id] = self._key(self._running[job_id])[0] + decided_s
        self._started.clear()
        for job_id in [each for each, instant_s in self._changes.items() if instant_s <= now_s]:
            job = self._running.get(job_id) or self._waiting[job_id]
            while (instant_s := self._changes.get(job_id, NEVER)) <= now_s:  # with rounds, decisions come later
                after_jump(self._policy, job, instant_s)
                self._expect_change(job, max(instant_s, job.settled_s))
        self._patience.over(now_s)
        self._again_s = NEVER
        if not self._waiting:
            return Decision([], [])
        stops: list[tuple[Job, Placed]] = []
        starts: list[tuple[Job, Placed]] = []
        for number, tenant in enumerate(self._turns):
            decision = self._walk(tenant, now_s)
            stops += decision.stops
            starts += decision.starts
            if number and decision.stops:  # what they left may be enough for a tenant that had its turn before
                self._again_s = now_s + TICK_S
        return Decision(stops, starts)

    def _walk(self, tenant: str | None, now_s: float) -> Decision:
        """One walk over the jobs of a tenant, of all if it is None."""
        waiting, running = ({i: job for i, job in jobs.items() if tenant in (None, job.virtual_cluster)}
                            for jobs in (self._waiting, self._running))  # fmt: skip
        kind: type[Trial] = Reserving if self._easy else Keeping
        if self._policy.preemptive:
            kind = Preempting if tenant is None else Isolated
        trial = kind(self._policy, self._cluster, self._placement.copy(), running, now_s, self._patience)
        trial.walk(self._ordered(waiting, now_s), self._ordered(running, now_s))
        self._placement = trial.placement
        held = [(job, job.placement) for job in trial.stops.values()]
        for job_id in trial.stops:
            del self._running[job_id]
            self._changes.pop(job_id, None)
        for job, _ in trial.starts.values():
            if self._policy.falls_while_running:
                if job.running:  # it moves
                    self._started[job.job_id] = now_s
                else:
                    self._zero_s[job.job_id] = self._key(job)[0] + now_s
            self._waiting.pop(job.job_id, None)
            self._running[job.job_id] = job
        return Decision(held, list(trial.starts.values()))

    def _ordered(self, jobs: dict[int, Job], now_s: float) -> list[Entry]:
        entries = []
        for job in jobs.values():
            key = self._key(job)
            if self._policy.falls_while_running and job.running:
                key = (self._zero_s[job.job_id] - now_s, *key[1:])
            entries.append((key, job.job_id, job))
        return sorted(entries)
