"""Queues of an ordering policy on one GPU type, kept such that a decision never scans all waiting jobs.

A decision is the result of the *greedy walk*: take the active jobs in the order of their keys, and run each that fits
in the GPUs left. Waiting jobs of the same *form* (number of GPUs, and whether these may lie apart, that is, on more
nodes than necessary) share a queue. If its first job does not fit, no job of the queue does, because free GPUs only
become fewer along the walk.

If jobs may take any free GPUs (`Cluster.scatter_after_s` is 0), a lane only counts GPUs, and the scheduler chooses them
after the walk. If a job's GPUs must lie together, whether the job fits depends on which GPUs are free, so a lane
places each job in its turn. For several GPU types and borrowed quotas, `trial.py` walks over all jobs instead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from heapq import heapify, heappop, heappush
from typing import Any

from synergy_core.scheduling.decisions.order import Entry, Reservation, expected_end_s, order_key_of
from synergy_core.scheduling.jobs.cluster import Cluster
from synergy_core.scheduling.jobs.record import NEVER, Decision, Job, Placed
from synergy_core.scheduling.placement.one_job import Patience, Placement
from synergy_core.scheduling.policies import OrderingPolicy

Form = tuple[int, bool]
"""(number of GPUs, whether they may lie apart)."""
Starts = list[tuple[Job, Placed]]
NOTHING: Decision[Job] = Decision([], [])
ANY_FORM = (0, True)  # the only heap if the first job that does not fit blocks all later ones
BLOCK = 256  # target number of entries per block of `ByEstimate`


class Lane(ABC):
    """The waiting jobs of one tenant, or of all tenants, and the GPUs that they may use.

    placement: the GPUs, which all lanes share. quotas: GPUs by tenant of this lane. together: whether a job's GPUs must
    lie together. left: GPUs of the lane's quotas that no job holds. waiting: number of waiting jobs.
    """

    def __init__(self, policy: OrderingPolicy, cluster: Cluster, placement: Placement, quotas: dict[str, int]) -> None:
        self.policy = policy
        self.placement = placement
        self.pool = next(iter(placement.pools.values()))
        self.together = cluster.scatter_after_s > 0
        self.left = sum(quotas.values())
        self.waiting = 0
        self._key = order_key_of(policy)
        self._patience = Patience(cluster)
        self._now_s = 0.0

    def enter(self, job: Job) -> None:
        """Enters a job that waits from now on: it has arrived or was just stopped."""
        self.waiting += 1
        if self.together:
            self._patience.begin(job)
        self._wait(job, job.service.settled_s)

    @abstractmethod
    def _wait(self, job: Job, since_s: float) -> None:
        """Puts the job into the queue of its form, sorted by key; form and key are valid from the instant `since_s`."""

    def _form(self, job: Job) -> Form:
        return job.gpus, not self.together or self._patience.ends_s(job) <= self._now_s

    def _relax(self, now_s: float) -> None:
        """Moves jobs whose patience has ended by `now_s` to their new form's queue; heaps drop old entries later."""
        self._now_s = now_s
        for job in self._patience.over(now_s):
            self._wait(job, now_s)

    def leave(self, job: Job) -> None:
        """Frees the GPUs of a running job that has ended or was evicted."""
        self.pool.release(job.placement)
        self.left += job.gpus

    def withdraw(self, job: Job) -> None:  # noqa: B027
        """Called when a job has ended while it did not run; it may wait in a `WalkLane`, but in no other lane."""

    @abstractmethod
    def decide(self, now_s: float) -> Decision[Job]:
        """The jobs to stop and to start, with GPUs (`()` if the scheduler chooses them). A job in both lists moves."""

    def started(self, job: Job, now_s: float) -> None:  # noqa: B027
        """Called when a job has started or moved, if its key jumps or falls with the clock."""

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

    def __init__(self, *of_lane: Any) -> None:
        super().__init__(*of_lane)
        self._is_strict = self.policy.backfill == "none"
        self._heaps: dict[Form, list[Entry]] = {}

    def _wait(self, job: Job, since_s: float) -> None:
        entry = job.ticket = (self._key(job), job.job_id, job)
        heappush(self._heaps.setdefault(ANY_FORM if self._is_strict else self._form(job), []), entry)

    def decide(self, now_s: float) -> Decision[Job]:
        together, left = self.together, self.left
        if together:
            self._relax(now_s)
        if not (self.waiting and left):
            return NOTHING
        starts: Starts = []
        heaps = list(self._heaps.values())
        while left:
            first: Entry | None = None
            for heap in heaps:
                if together:
                    drop_stale(heap)
                if heap and heap[0][2].gpus <= left and (first is None or heap[0] < first):
                    first, of_first = heap[0], heap
            if first is None:
                break
            job = first[2]
            placed = self.pool.place(*self._form(job)) if together else ()
            if placed is None:
                heaps.remove(of_first)
                continue
            heappop(of_first)
            job.ticket = None  # else entry and job form a cycle, never freed while gc is off
            left -= job.gpus
            starts.append((job, placed))
        self.left = left
        self.waiting -= len(starts)
        return Decision([], starts) if starts else NOTHING


def drop_stale(heap: list[Entry]) -> None:
    """Drops stale entries from the top of the heap: those that are not their jobs' tickets any more."""
    while heap and heap[0][2].ticket is not heap[0]:
        heappop(heap)


class ByEstimate:
    """Waiting jobs of one form, sorted by key, in blocks; `first_within` skips a block of only too long estimates."""

    __slots__ = ("_blocks", "_shortest_s")

    def __init__(self) -> None:
        self._blocks: list[list[Entry]] = []
        self._shortest_s: list[float] = []

    def add(self, entry: Entry) -> None:
        """Inserts the entry; a block that grows beyond 2 × `BLOCK` is halved."""
        if not self._blocks:
            self._blocks, self._shortest_s = [[entry]], [entry[2].request.estimate_s]
            return
        index = max(bisect_left(self._blocks, [entry]) - 1, 0)
        block = self._blocks[index]
        insort(block, entry)
        self._shortest_s[index] = min(self._shortest_s[index], entry[2].request.estimate_s)
        if len(block) > 2 * BLOCK:
            self._blocks[index : index + 1] = [block[:BLOCK], block[BLOCK:]]
            self._shortest_s[index : index + 1] = [_shortest_s(block[:BLOCK]), _shortest_s(block[BLOCK:])]

    def first(self) -> Entry | None:
        """The entry with the smallest key."""
        return self._blocks[0][0] if self._blocks else None

    def first_within(self, estimate_s: float, but: Job) -> Entry | None:
        """The entry with the smallest key among jobs, except `but`, that are estimated to run at most `estimate_s`."""
        for block, shortest_s in zip(self._blocks, self._shortest_s, strict=True):
            if shortest_s <= estimate_s:
                for entry in block:
                    if entry[2].request.estimate_s <= estimate_s and entry[2] is not but:
                        return entry
        return None

    def remove(self, entry: Entry) -> None:
        index = max(bisect_left(self._blocks, [entry]) - 1, 0)
        if index + 1 < len(self._blocks) and self._blocks[index][-1] < entry:
            index += 1
        block = self._blocks[index]
        del block[bisect_left(block, entry)]
        if not block:
            del self._blocks[index], self._shortest_s[index]
        elif entry[2].request.estimate_s == self._shortest_s[index]:
            self._shortest_s[index] = _shortest_s(block)


def _shortest_s(block: list[Entry]) -> float:
    return min([entry[2].request.estimate_s for entry in block])


class EasyLane(Lane):
    """EASY backfilling: each tenant's first waiting job has a reservation that, by estimates, no later job may delay.

    If GPUs must lie together, all tenants share one lane, because a head may wait for the GPUs of any tenant's job, and
    any job could delay the head.
    A waiting job's ticket is (form, entry in the form's queue); a running job's ticket is its entry in the sorted list
    `_ends`: (expected end, job id, job, start, GPUs). `_quota_left`: by tenant, GPUs of its quota that no job holds.
    """

    def __init__(self, policy: OrderingPolicy, cluster: Cluster, placement: Placement, quotas: dict[str, int]) -> None:
        super().__init__(policy, cluster, placement, quotas)
        self._has_tenants = bool(cluster.virtual_clusters)
        self._quota_left = dict(quotas)
        self._queues: dict[str, dict[Form, ByEstimate]] = {name: {} for name in quotas}
        self._ends: list[tuple[float, int, Job, float, Placed]] = []

    def _tenant(self, job: Job) -> str:
        return job.request.virtual_cluster if self._has_tenants else ""

    def _wait(self, job: Job, since_s: float) -> None:
        queues, form = self._queues[self._tenant(job)], self._form(job)
        before: Any = job.ticket
        if before is not None:
            queues[before[0]].remove(before[1])
        if form not in queues:
            queues[form] = ByEstimate()
        entry = (self._key(job), job.job_id, job)
        job.ticket = form, entry
        queues[form].add(entry)

    def leave(self, job: Job) -> None:
        super().leave(job)
        self._quota_left[self._tenant(job)] += job.gpus
        ticket: Any = job.ticket
        del self._ends[bisect_left(self._ends, ticket)]
        job.ticket = None

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

    def decide(self, now_s: float) -> Decision[Job]:
        if self.together:
            self._relax(now_s)
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
        self.waiting -= len(starts)
        return Decision([], starts) if starts else NOTHING

    def _head(self, tenant: str) -> tuple[Entry, Form] | None:
        heads = [(first, form) for form, queue in self._queues[tenant].items() if (first := queue.first()) is not None]
        return min(heads) if heads else None

    def _start_heads(
        self, promised: dict[str, Reservation], starts: Starts, now_s: float
    ) -> tuple[dict[str, Reservation], bool]:
        """Starts heads by key. Returns promises to the heads that wait, and whether one fits but would delay another.

        promised: promises made before. They are made again for all heads behind a head that starts.
        """
        promises: dict[str, Reservation] = {}
        held_back = False
        heads = [(*head, tenant) for tenant in self._queues if (head := self._head(tenant)) is not None]
        heapify(heads)
        while heads:
            entry, form, tenant = heappop(heads)
            window_s = self._window_s(tenant, form, entry[2], promises)
            if window_s is not None and entry[2].request.estimate_s <= window_s:
                starts.append(self._start(tenant, form, entry, promises, now_s))
                promised = promises.copy()
                if (head := self._head(tenant)) is not None:
                    heappush(heads, (*head, tenant))
            else:
                held_back |= window_s is not None
                promises[tenant] = promised.get(tenant) or self._reserve(tenant, form, entry[2], now_s)
        return promises, held_back

    def _window_s(self, tenant: str, form: Form, job: Job, promises: dict[str, Reservation]) -> float | None:
        """The longest run time with which the job delays no head, `NEVER` without a limit; None if it does not fit."""
        if form[0] > self._quota_left[tenant]:
            return None
        placed = self.pool.place(*form) if self.together else ()
        if placed is None:
            return None
        self.pool.release(placed)
        delayed_s = [each.window_s for each in promises.values() if not each.leaves_room(job, placed)]
        return min(delayed_s) if delayed_s else NEVER

    def _start(
        self, tenant: str, form: Form, entry: Entry, promises: dict[str, Reservation], now_s: float
    ) -> tuple[Job, Placed]:
        """Starts a job that fits; returns it with its GPUs."""
        job = entry[2]
        placed = self.pool.place(*form) if self.together else ()
        assert placed is not None
        for each in promises.values():
            each.enter(job, placed)
        self.left -= job.gpus
        self._quota_left[tenant] -= job.gpus
        self._queues[tenant][form].remove(entry)
        self._expect_end(job, now_s, placed, now_s)
        return job, placed

    def _reserve(self, tenant: str, form: Form, head: Job, now_s: float) -> Reservation:
        """Computes the promise to a head of this form from the expected ends of all running jobs."""
        placement = self.placement.copy() if self.together else None
        quota_left = self._quota_left[tenant] if self._has_tenants or placement is None else NEVER
        reservation = Reservation(placement, head, quota_left=quota_left, scattered=form[1])
        while self._is_overdue(now_s):
            _, _, job, started_s, placed = self._ends.pop(0)
            self._expect_end(job, started_s, placed, now_s)
        reservation.advance(((end_s, job, placed) for end_s, _, job, _, placed in self._ends), now_s)
        return reservation

    def _next_filler(self, promises: dict[str, Reservation]) -> tuple[str, Form, Entry] | None:
        """The first job other than the heads that fits and delays no head."""
        best: tuple[str, Form, Entry] | None = None
        for tenant, queues in self._queues.items():
            for form, queue in queues.items():
                first = queue.first()
                if first is None or (best is not None and best[2] < first):
                    continue
                window_s = self._window_s(tenant, form, first[2], promises)
                if window_s is None:
                    continue
                entry = queue.first_within(window_s, but=promises[tenant].head)
                if entry is not None and (best is None or entry < best[2]):
                    best = tenant, form, entry
        return best
