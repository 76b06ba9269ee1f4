"""The jobs under an ordering policy where a job's GPUs must lie together: who runs hangs on which GPUs are free.

The decisions are those of the walk (`ordering/trial/walk.py`): the active jobs in the order of their keys, each placed
as soon as its turn comes. Waiting jobs lie in one heap per *form*, a number of GPUs that must lie together or, once its
patience is over, need not (`Cluster.scatter_after_s`); if the first of a form does not fit, none does, for room only
shrinks along the walk. For one GPU type, and quotas that nobody exceeds; everything else is left to the walk itself.

A tenant with a quota has a lane of its own. Its jobs may have what is free and, with preemption, what jobs of the same
tenant hold: nobody is stopped for another tenant's sake.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from heapq import heappop, heappush
from typing import Any

from synergy_core.cluster import Cluster
from synergy_core.jobs.decision import Decision
from synergy_core.jobs.record import Job, Placed
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

    def next_change_s(self) -> float:
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
    """No preemption; the head has a reservation that, by estimates, nobody behind it may delay."""

    __slots__ = ("_ends", "_forms")

    def __init__(self, policy: OrderingPolicy, cluster: Cluster, placement: Placement, quota: int) -> None:
        super().__init__(policy, cluster, placement, quota)
        self._forms: dict[Form, ByEstimate] = {}
        self._ends = ExpectedEnds()

    def _wait(self, job: Job, form: Form) -> None:
        if form not in self._forms:
            self._forms[form] = ByEstimate()
        entry = (self.policy.key(job), job.job_id, job)
        job.ticket = form, entry
        self._forms[form].add(entry)

    def _relax(self, job: Job) -> None:
        waits: Any = job.ticket
        self._forms[waits[0]].remove(waits[1])
        self._wait(job, (job.gpus, True))

    def leave(self, job: Job) -> None:
        super().leave(job)
        self._ends.remove(job)

    def _starts(self, now_s: float) -> list[tuple[Job, Placed]]:
        starts: list[tuple[Job, Placed]] = []
        while (head := self._head()) is not None:
            placed = self._place(head[0])
            if placed is None:
                break
            starts.append(self._start(head[0], head[1], placed, now_s))
        if head is not None and self.placement.free_gpus:
            self._fill_behind(head[1][2], head[0], starts, now_s)
        return starts

    def _head(self) -> tuple[Form, Entry] | None:
        heads = [(form, entry) for form, queue in self._forms.items() if (entry := queue.first()) is not None]
        return min(heads, key=lambda each: each[1]) if heads else None

    def _start(self, form: Form, entry: Entry, placed: Placed, now_s: float) -> tuple[Job, Placed]:
        job = entry[2]
        self._forms[form].remove(entry)
        self._ends.add(job, now_s, placed)
        return job, placed

    def _fill_behind(self, head: Job, form: Form, starts: list[tuple[Job, Placed]], now_s: float) -> None:
        """A later job starts if the head, in its present form, still fits at its shadow time."""
        used = self.quota - self.left
        reservation = Reservation(self.placement.copy(), used, self.quota, head, scattered=form[1])
        promised = reservation.advance(self._ends.as_of(now_s), now_s)
        while (found := self._next_filler(reservation if promised else None)) is not None:
            placed = self._place(found[0])
            assert placed is not None
            if promised:
                reservation.enter(found[1][2], placed)
            starts.append(self._start(found[0], found[1], placed, now_s))

    def _next_filler(self, reservation: Reservation | None) -> tuple[Form, Entry] | None:
        """The first job that fits without delaying the head; the head itself does not fit."""
        best: tuple[Form, Entry] | None = None
        for form, queue in self._forms.items():
            first = queue.first()
            if first is None or (best is not None and best[1] < first):
                continue
            placed = self._place(form)
            if placed is None:
                continue
            if reservation is None or reservation.leaves_room(first[2], placed):
                entry: Entry | None = first
            else:
                entry = queue.first_within(reservation.window_s)
            self._give_back(form, placed)
            if entry is not None and (best is None or entry < best[1]):
                best = form, entry
        return best
