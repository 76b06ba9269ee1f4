"""The jobs under an ordering policy where a job's GPUs must lie together: who runs hangs on which GPUs are free.

The decisions are those of the walk (`ordering/trial/walk.py`): the active jobs in the order of their keys, each placed
as soon as its turn comes. Waiting jobs lie in one heap per *form*, a number of GPUs that must lie together or, once its
patience is over, need not (`Cluster.scatter_after_s`); if the first of a form does not fit, none does, for room only
shrinks along the walk. For one GPU type, and quotas that nobody exceeds; everything else is left to the walk itself.

A tenant with a quota has a lane of its own, but under EASY, where all share one. Its jobs may have what is free and,
with preemption, what jobs of the same tenant hold: nobody is stopped for another tenant's sake.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from heapq import heapify, heappop, heappush
from typing import Any

from synergy_core.cluster import Cluster
from synergy_core.jobs.decision import Decision
from synergy_core.jobs.record import NEVER, Job, Placed
from synergy_core.ordering.counts.easy import ByEstimate
from synergy_core.ordering.ends import ExpectedEnds
from synergy_core.ordering.keys import Entry
from synergy_core.ordering.trial.reservation import Reservation
from synergy_core.placement.one_job import Placement
from synergy_core.placement.patience import Patience
from synergy_core.policies import OrderingPolicy

Form = tuple[int, bool]
"""GPUs, and whether they may lie apart."""
NOTHING = Decision([], [])


class NodeLane(ABC):
    """Waiting jobs of a tenant, or of all; the GPUs that are free, which all lanes share; and who may have them.

    quota: GPUs that the lane's jobs may hold together; left: how many of those nobody holds.
    """

    __slots__ = ("left", "patience", "placement", "policy", "quota", "waiting")

    def __init__(self, policy: OrderingPolicy, cluster: Cluster, placement: Placement, quota: int) -> None:
        self.policy = policy
        self.placement = placement
        self.patience = Patience(cluster)
        self.quota = self.left = quota
        self.waiting = 0

    def enter(self, job: Job) -> None:
        """The job waits from now on."""
        self.waiting += 1
        self.patience.begin(job)
        self._wait(job, (job.gpus, self.patience.ends_s(job) == 0))

    @abstractmethod
    def _wait(self, job: Job, form: Form) -> None:
        """The job waits in this form."""

    def leave(self, job: Job) -> None:
        """A running job has ended."""
        self.left += job.gpus
        self.placement.release(job.placement)

    def _place(self, form: Form) -> Placed | None:
        """GPUs for a job of this form, if there are some and the quota allows it; they are its own then."""
        if form[0] > self.left:
            return None
        placed = self.placement.place(form[0], scattered=form[1])
        if placed is not None:
            self.left -= form[0]
        return placed

    def _give_back(self, form: Form, placed: Placed) -> None:
        self.left += form[0]
        self.placement.release(placed)

    def decide(self, now_s: float) -> Decision:
        """Who starts now, and where."""
        for job in self.patience.over(now_s):
            self._relax(job)
        starts = self._starts(now_s) if self.waiting and self.left and self.placement.free_gpus else []
        self.waiting -= len(starts)
        return Decision([], starts) if starts else NOTHING

    @abstractmethod
    def _relax(self, job: Job) -> None:
        """The waiting job's GPUs may lie apart from now on."""

    @abstractmethod
    def _starts(self, now_s: float) -> list[tuple[Job, Placed]]:
        """Whoever starts, placed, in the order of keys."""

    def next_change_s(self, now_s: float) -> float:
        """When to decide again although nothing happened."""
        return self.patience.next_s()


class StrictNodeLane(NodeLane):
    """No preemption, no overtaking: the head blocks."""

    __slots__ = ("_heap", "_relaxed")

    def __init__(self, policy: OrderingPolicy, cluster: Cluster, placement: Placement, quota: int) -> None:
        super().__init__(policy, cluster, placement, quota)
        self._heap: list[Entry] = []
        self._relaxed: set[int] = set()

    def _wait(self, job: Job, form: Form) -> None:
        heappush(self._heap, (self.policy.key(job), job.job_id, job))
        if form[1]:
            self._relaxed.add(job.job_id)

    def _relax(self, job: Job) -> None:
        self._relaxed.add(job.job_id)

    def _starts(self, now_s: float) -> list[tuple[Job, Placed]]:
        starts = []
        while self._heap:
            job = self._heap[0][2]
            placed = self._place((job.gpus, job.job_id in self._relaxed))
            if placed is None:
                break
            heappop(self._heap)
            self._relaxed.discard(job.job_id)
            starts.append((job, placed))
        return starts


class GreedyNodeLane(NodeLane):
    """No preemption; whoever fits runs, the smallest key first."""

    __slots__ = ("_heaps",)

    def __init__(self, policy: OrderingPolicy, cluster: Cluster, placement: Placement, quota: int) -> None:
        super().__init__(policy, cluster, placement, quota)
        self._heaps: dict[Form, list[Entry]] = {}

    def _wait(self, job: Job, form: Form) -> None:
        entry = (self.policy.key(job), job.job_id, job)
        job.ticket = entry
        heap = self._heaps.get(form)
        if heap is None:
            heap = self._heaps[form] = []
        heappush(heap, entry)

    def _relax(self, job: Job) -> None:
        self._wait(job, (job.gpus, True))  # the old entry is no longer its ticket

    def _starts(self, now_s: float) -> list[tuple[Job, Placed]]:
        starts: list[tuple[Job, Placed]] = []
        for heap in self._heaps.values():
            while heap and heap[0][2].ticket is not heap[0]:
                heappop(heap)
        open_forms = {form: heap for form, heap in self._heaps.items() if heap}
        while open_forms:
            form, heap = min(open_forms.items(), key=lambda item: item[1][0])
            placed = self._place(form)
            if placed is None:
                del open_forms[form]
                continue
            job = heappop(heap)[2]
            job.ticket = None
            starts.append((job, placed))
            while heap and heap[0][2].ticket is not heap[0]:
                heappop(heap)
            if not heap:
                del open_forms[form]
        return starts


class EasyNodeLane(NodeLane):
    """No preemption; each tenant's head has a reservation that, by estimates, nobody behind it may delay.

    One lane for all tenants, for their jobs lie on the same nodes: a head waits for GPUs that anybody's jobs hold, and
    anybody could delay it. `_tenants`: by tenant, its waiting jobs; `_quota_left`: GPUs of its quota that nobody holds.
    """

    __slots__ = ("_ends", "_quota_left", "_tenants")

    def __init__(self, policy: OrderingPolicy, cluster: Cluster, placement: Placement) -> None:
        super().__init__(policy, cluster, placement, cluster.gpus)
        self._quota_left: dict[str, int] = dict(cluster.virtual_clusters)
        self._tenants: dict[str, dict[Form, ByEstimate]] = {name: {} for name in self._quota_left or ("",)}
        self._ends = ExpectedEnds()

    def _tenant(self, job: Job) -> str:
        return job.virtual_cluster if self._quota_left else ""

    def _wait(self, job: Job, form: Form) -> None:
        forms = self._tenants[self._tenant(job)]
        if form not in forms:
            forms[form] = ByEstimate()
        entry = (self.policy.key(job), job.job_id, job)
        job.ticket = form, entry
        forms[form].add(entry)

    def _relax(self, job: Job) -> None:
        waits: Any = job.ticket
        self._tenants[self._tenant(job)][waits[0]].remove(waits[1])
        self._wait(job, (job.gpus, True))

    def leave(self, job: Job) -> None:
        super().leave(job)
        if self._quota_left:
            self._quota_left[job.virtual_cluster] += job.gpus
        self._ends.remove(job)

    def _starts(self, now_s: float) -> list[tuple[Job, Placed]]:
        starts: list[tuple[Job, Placed]] = []
        promises: dict[str, Reservation] = {}
        while True:
            promises, held_back = self._start_heads(promises, starts, now_s)
            if not promises or not self.placement.free_gpus:
                return starts
            while (found := self._next_filler(promises)) is not None:
                starts.append(self._start(*found, promises, now_s))
                if held_back:
                    break  # a head that fits, but would have delayed another, may find other GPUs now
            else:
                return starts

    def _head(self, tenant: str) -> tuple[Entry, Form] | None:
        heads = [(first, form) for form, queue in self._tenants[tenant].items() if (first := queue.first()) is not None]
        return min(heads) if heads else None

    def _start_heads(
        self, promised: dict[str, Reservation], starts: list[tuple[Job, Placed]], now_s: float
    ) -> tuple[dict[str, Reservation], bool]:
        """Lets heads start, the smallest key first; the promises to those that cannot, and whether one that fits waits.

        promised: what heads were promised before. It holds until a head before them starts.
        """
        promises: dict[str, Reservation] = {}
        held_back = False
        heads = [(*head, tenant) for tenant in self._tenants if (head := self._head(tenant)) is not None]
        heapify(heads)
        while heads:
            entry, form, tenant = heappop(heads)
            window_s = self._window_s(tenant, form, entry[2], promises)
            if window_s is not None and entry[2].estimate_s <= window_s:
                starts.append(self._start(tenant, form, entry, promises, now_s))
                promised = promises.copy()
                if (head := self._head(tenant)) is not None:
                    heappush(heads, (*head, tenant))
            else:
                held_back |= window_s is not None
                promises[tenant] = promised.get(tenant) or self._reserve(tenant, form, entry[2], now_s)
        return promises, held_back

    def _window_s(self, tenant: str, form: Form, job: Job, promises: dict[str, Reservation]) -> float | None:
        """How soon the job must end to delay no head, `NEVER` where it need not; None for one that does not fit."""
        placed = self._place(form) if form[0] <= self._quota_left.get(tenant, NEVER) else None
        if placed is None:
            return None
        delayed_s = [each.window_s for each in promises.values() if not each.leaves_room(job, placed)]
        self._give_back(form, placed)
        return min(delayed_s, default=NEVER)

    def _start(
        self, tenant: str, form: Form, entry: Entry, promises: dict[str, Reservation], now_s: float
    ) -> tuple[Job, Placed]:
        job, placed = entry[2], self._place(form)
        assert placed is not None
        for each in promises.values():
            each.enter(job, placed)
        if self._quota_left:
            self._quota_left[tenant] -= job.gpus
        self._tenants[tenant][form].remove(entry)
        self._ends.add(job, now_s, placed)
        return job, placed

    def _reserve(self, tenant: str, form: Form, head: Job, now_s: float) -> Reservation:
        """The head's promise, in its present form, by the expected ends of all jobs."""
        quota_left = self._quota_left.get(tenant, NEVER)
        reservation = Reservation(self.placement.copy(), head, quota_left=quota_left, scattered=form[1])
        reservation.advance(self._ends.as_of(now_s), now_s)
        return reservation

    def _next_filler(self, promises: dict[str, Reservation]) -> tuple[str, Form, Entry] | None:
        """The first job that fits and delays no head; heads themselves are no such jobs."""
        best: tuple[str, Form, Entry] | None = None
        for tenant, forms in self._tenants.items():
            for form, queue in forms.items():
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
