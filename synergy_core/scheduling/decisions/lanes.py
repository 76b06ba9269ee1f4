"""Decides for an ordering policy on one GPU type, without visiting every job.

A decision is the result of the *greedy walk*: take the active jobs in the order of their keys, and run each that fits
in the GPUs left. Waiting jobs of the same *form* (number of GPUs, and whether these may lie apart, that is, on more
nodes than necessary) share a line. If its first job does not fit, no job of the line does, because free GPUs only
become fewer along the walk.

If jobs may take any free GPUs (`Cluster.scatter_after_s` is 0), a lane only counts GPUs, and they are chosen after the
walk. If a job's GPUs must lie together, whether the job fits depends on which GPUs are free, so a lane places each job
in its turn. For several GPU types and borrowed quotas, `walk.py` walks over all jobs instead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from heapq import heapify, heappop, heappush
from typing import Any

from synergy_core.scheduling.decisions.queue import ONE_FORM, Entry, Form, JobQueue
from synergy_core.scheduling.decisions.reservation import Reservation, expected_end_s
from synergy_core.scheduling.jobs.cluster import Cluster
from synergy_core.scheduling.jobs.record import NEVER, Decision, Job, Placed
from synergy_core.scheduling.placement.one_job import Patience, Placement
from synergy_core.scheduling.policies import OrderingPolicy
from synergy_core.units import TICK_S

Starts = list[tuple[Job, Placed]]
NOTHING: Decision[Job] = Decision([], [])


class Lane(ABC):
    """The jobs of one tenant, or of all tenants, and the GPUs that they may use.

    placement: the GPUs, which all lanes share. quotas: GPUs by tenant of this lane. together: whether a job's GPUs must
    lie together. left: GPUs of the lane's quotas that no job holds.
    """

    def __init__(self, policy: OrderingPolicy, cluster: Cluster, placement: Placement, quotas: dict[str, int]) -> None:
        self.policy = policy
        self.placement = placement
        self.pool = next(iter(placement.pools.values()))
        self.together = cluster.scatter_after_s > 0
        self.left = sum(quotas.values())
        self.queue = JobQueue(policy, self._form)
        self._patience = Patience(cluster)
        self._now_s = 0.0

    @property
    def waiting(self) -> int:
        """Number of waiting jobs."""
        return self.queue.waiting_jobs

    def _queue_of(self, job: Job) -> JobQueue:
        return self.queue

    def enter(self, job: Job) -> None:
        """Enters a job that waits from now on: it has arrived or was just stopped."""
        if self.together:
            self._patience.begin(job)
        self._queue_of(job).enter(job)

    def remove(self, job: Job) -> None:
        """Removes a job: it ends, is withdrawn or has lost its GPUs. A running job's GPUs become free."""
        if job.running:
            self.pool.release(job.placement)
            self.left += job.gpus
        self._queue_of(job).remove(job)

    def _form(self, job: Job) -> Form:
        return job.gpus, not self.together or self._patience.ends_s(job) <= self._now_s

    def _relax(self, now_s: float) -> None:
        """Moves jobs whose patience has ended by `now_s` to the line of their new form."""
        self._now_s = now_s
        for job in self._patience.over(now_s):
            self._reform(job, now_s)

    def _reform(self, job: Job, now_s: float) -> None:
        self._queue_of(job).reform(job, now_s)

    @abstractmethod
    def decide(self, now_s: float) -> Decision[Job]:
        """The jobs to stop and to start, with GPUs (`()` if the lane only counts them). A job in both lists moves."""

    def started(self, job: Job, now_s: float, *, moved: bool) -> None:
        """Called when a job has started; see `JobQueue.started`."""
        self.queue.started(job, now_s, moved=moved)

    def retry(self) -> None:  # noqa: B027
        """Called when another lane has freed GPUs, so that jobs of any form may fit again."""

    def is_due(self, now_s: float) -> bool:
        """Whether to decide now although there was no event."""
        return self.next_change_s(now_s) <= now_s

    def next_change_s(self, now_s: float) -> float:
        """The instant of the next decision without an event, `now_s` or later; inf if none is known."""
        return self._patience.next_s()


class KeepingLane(Lane):
    """A lane without preemption and reservations: jobs start in the order of their keys.

    A job that does not fit blocks the later jobs of its form or, under backfill "none", all later jobs.
    """

    def _form(self, job: Job) -> Form:
        return ONE_FORM if self.policy.backfill == "none" else super()._form(job)

    def next_change_s(self, now_s: float) -> float:
        change_s = self._patience.next_s()
        return min(change_s, self.queue.next_jump_s()) if self.queue.jumps else change_s

    def decide(self, now_s: float) -> Decision[Job]:
        together, left, queue = self.together, self.left, self.queue
        if together:
            self._relax(now_s)
        if not (queue.waiting_jobs and left):
            return NOTHING
        if queue.jumps:
            queue.advance(now_s)
        starts: Starts = []
        lines = list(queue.waiting.values())
        while left:
            first: Entry | None = None
            for line in lines:
                here = line.first
                if here is not None and here[2].gpus <= left and (first is None or here < first):
                    first, of_first = here, line
            if first is None:
                break
            job = first[2]
            placed = self.pool.place(*super()._form(job)) if together else ()
            if placed is None:
                lines.remove(of_first)
                continue
            queue.take(job)
            left -= job.gpus
            starts.append((job, placed))
        self.left = left
        return Decision([], starts) if starts else NOTHING


class EasyLane(Lane):
    """EASY backfilling: each tenant's first waiting job has a reservation that, by estimates, no later job may delay.

    If GPUs must lie together, all tenants share one lane, because a head may wait for the GPUs of any tenant's job, and
    any job could delay the head.
    A running job's ticket is its entry in the sorted list `_ends`: (expected end, job id, job, start, GPUs).
    `_quota_left`: by tenant, GPUs of its quota that no job holds. `_queues`: by tenant.
    """

    def __init__(self, policy: OrderingPolicy, cluster: Cluster, placement: Placement, quotas: dict[str, int]) -> None:
        super().__init__(policy, cluster, placement, quotas)
        self._has_tenants = bool(cluster.virtual_clusters)
        self._quota_left = dict(quotas)
        self._queues = {name: JobQueue(policy, self._form) for name in quotas}
        self._ends: list[tuple[float, int, Job, float, Placed]] = []

    @property
    def waiting(self) -> int:
        return sum([queue.waiting_jobs for queue in self._queues.values()])

    def _tenant(self, job: Job) -> str:
        return job.request.virtual_cluster if self._has_tenants else ""

    def _queue_of(self, job: Job) -> JobQueue:
        return self._queues[self._tenant(job)]

    def remove(self, job: Job) -> None:
        if job.running:
            self._quota_left[self._tenant(job)] += job.gpus
            ticket: Any = job.ticket
            del self._ends[bisect_left(self._ends, ticket)]
            job.ticket = None
        super().remove(job)

    def started(self, job: Job, now_s: float, *, moved: bool) -> None:
        """Nothing changes the keys of running jobs: EASY only orders jobs that wait."""

    def _expect_end(self, job: Job, started_s: float, placed: Placed, now_s: float) -> None:
        """Records the expected end of a job that has run since `started_s` on these GPUs."""
        entry = (expected_end_s(started_s, job.request.estimate_s, now_s), job.job_id, job, started_s, placed)
        job.ticket = entry
        insort(self._ends, entry)

    def _is_overdue(self, now_s: float) -> bool:
        """Whether a running job's expected end has passed."""
        return bool(self._ends) and self._ends[0][0] <= now_s

    def is_due(self, now_s: float) -> bool:
        """Also true if a running job is overdue: the head will then start later, so more jobs may run before it."""
        return super().is_due(now_s) or (self.waiting > 0 and self._is_overdue(now_s))

    def next_change_s(self, now_s: float) -> float:
        return min([self._patience.next_s(), *[queue.next_jump_s() for queue in self._queues.values()]])

    def decide(self, now_s: float) -> Decision[Job]:
        if self.together:
            self._relax(now_s)
        for queue in self._queues.values():
            if queue.jumps:
                queue.advance(now_s)
        starts: Starts = []
        promises: dict[str, Reservation] = {}
        goes_on = self.waiting > 0
        while goes_on and self.left and self.pool.gpus:
            goes_on = False
            promises, held_back = self._start_heads(promises, starts, now_s)
            while promises and self.left and (filler := self._next_filler(promises)) is not None:
                starts.append(self._start(*filler, promises, now_s))
                if held_back:  # the head held back may now get other GPUs, with which it delays no other head
                    goes_on = True
                    break
        return Decision([], starts) if starts else NOTHING

    def _head(self, tenant: str) -> Entry | None:
        lines = self._queues[tenant].waiting.values()
        return min([line.first for line in lines if line.first is not None], default=None)

    def _start_heads(
        self, promised: dict[str, Reservation], starts: Starts, now_s: float
    ) -> tuple[dict[str, Reservation], bool]:
        """Starts heads by key. Returns promises to the heads that wait, and whether one fits but would delay another.

        promised: promises made before. They are made again for all heads behind a head that starts.
        """
        promises: dict[str, Reservation] = {}
        held_back = False
        heads = [(head, tenant) for tenant in self._queues if (head := self._head(tenant)) is not None]
        heapify(heads)
        while heads:
            entry, tenant = heappop(heads)
            window_s = self._window_s(tenant, entry, promises)
            if window_s is not None and entry[2].request.estimate_s <= window_s:
                starts.append(self._start(tenant, entry, promises, now_s))
                promised = promises.copy()
                if (head := self._head(tenant)) is not None:
                    heappush(heads, (head, tenant))
            else:
                held_back |= window_s is not None
                promises[tenant] = promised.get(tenant) or self._reserve(tenant, entry, now_s)
        return promises, held_back

    def _window_s(self, tenant: str, entry: Entry, promises: dict[str, Reservation]) -> float | None:
        """The longest run time with which the job delays no head, `NEVER` without a limit; None if it does not fit."""
        form = entry[3]
        if form[0] > self._quota_left[tenant]:
            return None
        placed = self.pool.place(*form) if self.together else ()
        if placed is None:
            return None
        self.pool.release(placed)
        delayed_s = [each.window_s for each in promises.values() if not each.leaves_room(entry[2], placed)]
        return min(delayed_s) if delayed_s else NEVER

    def _start(self, tenant: str, entry: Entry, promises: dict[str, Reservation], now_s: float) -> tuple[Job, Placed]:
        """Starts a job that fits; returns it with its GPUs."""
        job = entry[2]
        placed = self.pool.place(*entry[3]) if self.together else ()
        assert placed is not None
        for each in promises.values():
            each.enter(job, placed)
        self.left -= job.gpus
        self._quota_left[tenant] -= job.gpus
        self._queues[tenant].take(job)
        self._expect_end(job, now_s, placed, now_s)
        return job, placed

    def _reserve(self, tenant: str, head: Entry, now_s: float) -> Reservation:
        """Computes the promise to a head from the expected ends of all running jobs."""
        placement = self.placement.copy() if self.together else None
        quota_left = self._quota_left[tenant] if self._has_tenants or placement is None else NEVER
        reservation = Reservation(placement, head[2], quota_left=quota_left, scattered=head[3][1])
        while self._is_overdue(now_s):
            _, _, job, started_s, placed = self._ends.pop(0)
            self._expect_end(job, started_s, placed, now_s)
        reservation.advance(((end_s, job, placed) for end_s, _, job, _, placed in self._ends), now_s)
        return reservation

    def _next_filler(self, promises: dict[str, Reservation]) -> tuple[str, Entry] | None:
        """The first job other than the heads that fits and delays no head."""
        best: tuple[str, Entry] | None = None
        for tenant, queue in self._queues.items():
            for line in queue.waiting.values():
                first = line.first
                if first is None or (best is not None and best[1] < first):
                    continue
                window_s = self._window_s(tenant, first, promises)
                if window_s is None:
                    continue
                entry = line.first_within(window_s, but=promises[tenant].head)
                if entry is not None and (best is None or entry < best[1]):
                    best = tenant, entry
        return best


class TenantLanes:
    """One lane per tenant with a quota. A decision skips lanes in which nothing can have changed.

    `_dirty`: tenants whose lanes must decide again. `_again_s`: instant of a further decision, because one lane has
    freed GPUs on which a job of an earlier lane may fit.
    """

    def __init__(self, lanes: dict[str, Lane]) -> None:
        self._lanes = lanes
        self._together = next(iter(lanes.values())).together
        self._dirty: set[str] = set()
        self._again_s = NEVER

    def enter(self, job: Job) -> None:
        self._lanes[job.request.virtual_cluster].enter(job)
        self._dirty.add(job.request.virtual_cluster)

    def remove(self, job: Job) -> None:
        self._lanes[job.request.virtual_cluster].remove(job)
        if job.running:
            self._freed(job.request.virtual_cluster)

    def _freed(self, tenant: str) -> None:
        """Marks the lanes whose jobs may fit on freed GPUs: the tenant's, or all lanes if GPUs must lie together."""
        if not self._together:
            self._dirty.add(tenant)
            return
        for name, lane in self._lanes.items():
            if lane.waiting:
                self._dirty.add(name)
                lane.retry()

    def started(self, job: Job, now_s: float, *, moved: bool) -> None:
        self._lanes[job.request.virtual_cluster].started(job, now_s, moved=moved)

    def decide(self, now_s: float) -> Decision[Job]:
        self._again_s = NEVER
        stops: Starts = []
        starts: Starts = []
        for name, lane in self._lanes.items():
            if name not in self._dirty and not lane.is_due(now_s):
                continue
            self._dirty.discard(name)
            decision = lane.decide(now_s)
            if decision.stops and self._together:  # the freed GPUs may be enough for an earlier lane
                self._freed(name)
                self._dirty.discard(name)
                self._again_s = now_s + TICK_S
            stops += decision.stops
            starts += decision.starts
        if not self._dirty:
            self._again_s = NEVER
        return Decision(stops, starts) if starts else NOTHING

    def next_change_s(self, now_s: float) -> float:
        return min([self._again_s, *[lane.next_change_s(now_s) for lane in self._lanes.values()]])
