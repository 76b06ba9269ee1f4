"""The greedy walk the long way: every active job, in the order of its key, with its GPUs tried out.

For clusters on which GPU counts do not decide what fits: several GPU types, quotas that may be exceeded by borrowing,
jobs that need whole nodes. A decision costs O(active jobs); where counts do decide, `queue.py` gives the same answers.
"""

from __future__ import annotations

from typing import Any

from synergy_core.cluster import Cluster
from synergy_core.decision import Decision
from synergy_core.placement import Placement
from synergy_core.policies import OrderingPolicy
from synergy_core.state import NEVER, Job, Placed
from synergy_core.units import TICK_S, grid_ceil

Entry = tuple[Any, int, Job]


class WalkQueue:
    """All active jobs; nothing is kept from one decision to the next but where they run."""

    __slots__ = ("_changes", "_cluster", "_placement", "_policy", "_running", "_waiting")

    def __init__(self, policy: OrderingPolicy, cluster: Cluster) -> None:
        self._policy = policy
        self._cluster = cluster
        self._placement = Placement(cluster)
        self._waiting: dict[int, Job] = {}
        self._running: dict[int, Job] = {}
        self._changes: dict[int, float] = {}

    def enter(self, job: Job) -> None:
        """The job waits from now on."""
        self._waiting[job.job_id] = job
        self._expect_change(job, job.settled_s)

    def leave(self, job: Job) -> None:
        """A running job has ended; its GPUs are free."""
        del self._running[job.job_id]
        self._changes.pop(job.job_id, None)
        self._placement.release(job.placement)

    def started(self, job: Job, now_s: float) -> None:
        """The job runs from now on, as decided."""
        self._expect_change(job, now_s)

    @property
    def waiting(self) -> int:
        """Jobs that wait."""
        return len(self._waiting)

    def _expect_change(self, job: Job, now_s: float) -> None:
        change = self._policy.next_change
        instant_s = change(job, now_s) if change is not None else None
        if instant_s is None:
            self._changes.pop(job.job_id, None)
        else:
            self._changes[job.job_id] = max(grid_ceil(instant_s), now_s + TICK_S)

    def next_change_s(self) -> float:
        """The next instant at which a key jumps by itself, inf if none is known."""
        return min(self._changes.values(), default=NEVER)

    def decide(self, now_s: float) -> Decision:
        """Who stops and who starts where."""
        for job_id in [each for each, instant_s in self._changes.items() if instant_s <= now_s]:
            job = self._running.get(job_id) or self._waiting[job_id]
            before = self._policy.key(job)
            job.settle(now_s)
            if self._policy.key(job) != before:  # a start that was delayed is not there yet
                job.queue_entered_s = now_s
            self._expect_change(job, now_s)
        if not self._waiting:
            return Decision([], [])
        trial = _Trial(self._policy, self._cluster, self._placement.copy(), self._running, now_s)
        trial.walk(self._ordered(self._waiting, now_s), self._ordered(self._running, now_s))
        self._placement = trial.placement
        held = [(job, job.placement) for job in trial.stops.values()]
        for job_id in trial.stops:
            del self._running[job_id]
            self._changes.pop(job_id, None)
        for job, _ in trial.starts.values():
            self._waiting.pop(job.job_id, None)
            self._running[job.job_id] = job
        return Decision(held, list(trial.starts.values()))

    def _ordered(self, jobs: dict[int, Job], now_s: float) -> list[Entry]:
        entries = []
        for job in jobs.values():
            key = self._policy.key(job)
            if self._policy.falls_while_running and job.running:
                key = (key[0] - (now_s - job.settled_s), *key[1:])
            entries.append((key, job.job_id, job))
        return sorted(entries)


class _Trial:
    """One walk over a copy of the placement."""

    def __init__(
        self, policy: OrderingPolicy, cluster: Cluster, placement: Placement, running: dict[int, Job], now_s: float
    ) -> None:
        self.policy = policy
        self.cluster = cluster
        self.placement = placement
        self._before = placement.copy()
        self.now_s = now_s
        self.stops: dict[int, Job] = {}
        self.starts: dict[int, tuple[Job, Placed]] = {}
        self._running = running
        self._used: dict[str, int] = dict.fromkeys(cluster.virtual_clusters, 0)
        if not policy.preemptive:
            for job in running.values():
                self._use(job)

    def _use(self, job: Job) -> None:
        if self._used:
            self._used[job.virtual_cluster] = self._used.get(job.virtual_cluster, 0) + job.gpus

    def _within_quota(self, job: Job) -> bool:
        quotas = self.cluster.virtual_clusters
        tenant = job.virtual_cluster
        return not quotas or self._used.get(tenant, 0) + job.gpus <= quotas.get(tenant, 0)

    def walk(self, waiting: list[Entry], running: list[Entry]) -> None:
        """Fills `stops` and `starts`."""
        if self.policy.preemptive:
            self._preempting(sorted([*waiting, *running]))
            return
        before = -1
        while before < len(self.starts):  # borrowing by a head lets its lane go on
            before = len(self.starts)
            self._keeping([entry for entry in waiting if entry[1] not in self.starts])
            if not self.cluster.borrowing:
                break

    # Without preemption: running jobs stay; those who wait are taken in order, borrowers after all others.

    def _keeping(self, waiting: list[Entry]) -> None:
        blocked: dict[str, Job] = {}
        no_room: set[tuple[str, str, int]] = set()
        borrowers: list[Entry] = []
        for entry in waiting:
            job = entry[2]
            lane = job.virtual_cluster if self._used else ""
            if self.policy.backfill != "greedy" and lane in blocked:
                continue
            if not self._within_quota(job):
                borrowers.append(entry)
            elif self._start_unless_tried(job, no_room):
                continue
            if self.policy.backfill != "greedy":
                blocked[lane] = job
        if self.cluster.borrowing:
            for _, _, job in borrowers:
                if self._start_unless_tried(job, no_room):
                    blocked.pop(job.virtual_cluster, None)
        if self.policy.backfill == "easy":
            for lane, head in blocked.items():
                self._fill_behind(head, [each for each in waiting if not self._used or each[2].virtual_cluster == lane])

    def _start_unless_tried(self, job: Job, no_room: set[tuple[str, str, int]]) -> bool:
        """Room only shrinks along the walk, so a kind of job that found none is not tried again."""
        kind = (job.virtual_cluster, job.gpu_type, job.gpus)
        if kind in no_room:
            return False
        placed = self.placement.place(job.gpus, job.gpu_type)
        if placed is None:
            no_room.add(kind)
            return False
        self._start(job, placed)
        return True

    def _start(self, job: Job, placed: Placed) -> None:
        self.starts[job.job_id] = (job, placed)
        self._use(job)

    def _fill_behind(self, head: Job, waiting: list[Entry]) -> None:
        """EASY: a later job starts if the head still fits at its shadow time (see `estimates.py`)."""
        future = _Future(self.placement.copy(), self._used.get(head.virtual_cluster, 0), self._quota(head), head)
        running = [
            (job.settled_s + job.estimate_s, job_id, job, job.placement) for job_id, job in self._running.items()
        ]
        running += [(self.now_s + job.estimate_s, job_id, job, at) for job_id, (job, at) in self.starts.items()]
        window_s = future.advance(sorted(running, key=lambda each: each[:2]), self.now_s)
        if window_s is None:
            return
        for _, _, job in waiting:
            if job is head or job.job_id in self.starts or not self._within_quota(job):
                continue
            placed = self.placement.place(job.gpus, job.gpu_type)
            if placed is None:
                continue
            if job.estimate_s <= window_s or future.has_room_beside(job, placed):
                self._start(job, placed)
            else:
                self.placement.release(placed)

    def _quota(self, job: Job) -> int:
        if self.cluster.borrowing:  # a head that may borrow waits for room alone
            return self.cluster.gpus
        return self.cluster.virtual_clusters.get(job.virtual_cluster, self.cluster.gpus)

    # With preemption: all active jobs are taken in order; who comes first may take the GPUs of who comes after.

    def _preempting(self, order: list[Entry]) -> None:
        if self._used:
            order = self._entitled_first(order)
        position = {entry[1]: index for index, entry in enumerate(order)}
        behind = [entry[2] for entry in order if entry[2].running]
        for index, (_, _, job) in enumerate(order):
            if job.running and job.job_id not in self.stops:
                self._use(job)
                continue
            while behind and position[behind[0].job_id] <= index:
                behind.pop(0)
            placed = self._take_from(behind, job)
            if placed is not None:
                self._start(job, placed)
        self._settle()

    def _settle(self) -> None:
        """Places those that start once more, now that it is known who stays: nobody moves if that can be helped."""
        stops = {job_id: job for job_id, job in self.stops.items() if job_id not in self.starts}
        placement = self._before
        for job in stops.values():
            placement.release(job.placement)
        starts: dict[int, tuple[Job, Placed]] = {}
        fresh = [job for job_id, (job, _) in self.starts.items() if job_id not in self.stops]
        for job in sorted(fresh, key=lambda job: (-job.gpus, job.job_id)):
            placed = placement.place(job.gpus, job.gpu_type)
            if placed is None:
                return
            starts[job.job_id] = (job, placed)
        self.placement, self.stops, self.starts = placement, stops, starts

    def _entitled_first(self, order: list[Entry]) -> list[Entry]:
        """Those within quota, then, if the cluster lets them, the borrowers; who may not run at all is stopped."""
        entitled, others = [], []
        used = dict.fromkeys(self._used, 0)
        for entry in order:
            job = entry[2]
            tenant = job.virtual_cluster
            if used.get(tenant, 0) + job.gpus <= self.cluster.virtual_clusters.get(tenant, 0):
                used[tenant] = used.get(tenant, 0) + job.gpus
                entitled.append(entry)
            else:
                others.append(entry)
        if self.cluster.borrowing:
            return [*entitled, *others]
        for _, _, job in others:
            if job.running:
                self._stop(job)
        return entitled

    def _stop(self, job: Job) -> None:
        self.stops[job.job_id] = job
        self.placement.release(job.placement)

    def _take_from(self, behind: list[Job], job: Job) -> Placed | None:
        """GPUs for the job, free or of jobs behind it, the last first; whoever of these still fits beside it stays."""
        removed: list[Job] = []
        for victim in reversed(behind):
            if self.placement.fits(job.gpus, job.gpu_type):
                break
            if victim.job_id not in self.stops:
                self.placement.release(victim.placement)
                removed.append(victim)
        enough = self.placement.fits(job.gpus, job.gpu_type)
        for victim in reversed(removed):
            self.placement.claim(victim.placement)
            if enough and not self.placement.fits(job.gpus, job.gpu_type):
                self.placement.release(victim.placement)
                self.stops[victim.job_id] = victim
        return self.placement.place(job.gpus, job.gpu_type) if enough else None


class _Future:
    """The GPUs that should be free, and the quota that should be left, when the head of a queue first fits."""

    def __init__(self, placement: Placement, used: int, quota: int, head: Job) -> None:
        self._placement = placement
        self._used = used
        self._quota = quota
        self._head = head

    def _fits(self) -> bool:
        head = self._head
        return self._used + head.gpus <= self._quota and self._placement.fits(head.gpus, head.gpu_type)

    def _counts(self, job: Job) -> int:
        return job.gpus if job.virtual_cluster == self._head.virtual_cluster else 0

    def advance(self, running: list[tuple[float, int, Job, Placed]], now_s: float) -> float | None:
        """Lets jobs end, in the order of their estimated ends, until the head fits; seconds until then."""
        window_s = 0.0
        for end_s, _, job, placed in running:
            if self._fits() and end_s - now_s > window_s:
                break
            self._placement.release(placed)
            self._used -= self._counts(job)
            window_s = max(window_s, end_s - now_s)
        return window_s if self._fits() else None

    def has_room_beside(self, job: Job, placed: Placed) -> bool:
        """Whether the head fits although this job still runs then; if so, it is taken to do so."""
        self._placement.claim(placed)
        self._used += self._counts(job)
        if self._fits():
            return True
        self._placement.release(placed)
        self._used -= self._counts(job)
        return False
