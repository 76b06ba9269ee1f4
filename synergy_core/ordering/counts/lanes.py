"""Lanes without preemption: the head blocks, whoever fits runs, or EASY's reservation in between."""

from __future__ import annotations

from abc import ABC, abstractmethod
from heapq import heappop, heappush

from synergy_core.jobs.record import Job
from synergy_core.ordering.counts.easy import EasyReservation
from synergy_core.ordering.keys import Entry
from synergy_core.policies import OrderingPolicy


class Lane(ABC):
    """Jobs that share one budget of GPUs: a virtual cluster with its quota, or everybody."""

    __slots__ = ("free", "policy", "waiting")

    def __init__(self, policy: OrderingPolicy, capacity: int) -> None:
        self.policy = policy
        self.free = capacity
        self.waiting = 0

    @abstractmethod
    def enter(self, job: Job) -> None:
        """The job waits from now on."""

    @abstractmethod
    def leave(self, job: Job) -> None:
        """A running job has ended."""

    @abstractmethod
    def decide(self, now_s: float) -> tuple[list[Job], list[Job]]:
        """Who stops and who starts now."""


class StrictLane(Lane):
    """No preemption, no overtaking: the head blocks."""

    __slots__ = ("_heap",)

    def __init__(self, policy: OrderingPolicy, capacity: int) -> None:
        super().__init__(policy, capacity)
        self._heap: list[Entry] = []

    def enter(self, job: Job) -> None:
        self.waiting += 1
        heappush(self._heap, (self.policy.key(job), job.job_id, job))

    def leave(self, job: Job) -> None:
        self.free += job.gpus

    def decide(self, now_s: float) -> tuple[list[Job], list[Job]]:
        starts: list[Job] = []
        heap = self._heap
        while heap and heap[0][2].gpus <= self.free:
            job = heappop(heap)[2]
            self.free -= job.gpus
            starts.append(job)
        self.waiting -= len(starts)
        return [], starts


class GreedyLane(Lane):
    """No preemption; whoever fits runs, the smallest key first."""

    __slots__ = ("_heaps",)

    def __init__(self, policy: OrderingPolicy, capacity: int) -> None:
        super().__init__(policy, capacity)
        self._heaps: dict[int, list[Entry]] = {}

    def enter(self, job: Job) -> None:
        self.waiting += 1
        heap = self._heaps.get(job.gpus)
        if heap is None:
            heap = self._heaps[job.gpus] = []
        heappush(heap, (self.policy.key(job), job.job_id, job))

    def leave(self, job: Job) -> None:
        self.free += job.gpus

    def decide(self, now_s: float) -> tuple[list[Job], list[Job]]:
        starts: list[Job] = []
        free = self.free
        while self.waiting and free:
            best: list[Entry] | None = None
            for gpus, heap in self._heaps.items():
                if gpus <= free and heap and (best is None or heap[0] < best[0]):
                    best = heap
            if best is None:
                break
            job = heappop(best)[2]
            free -= job.gpus
            self.waiting -= 1
            starts.append(job)
        self.free = free
        return [], starts


class EasyLane(Lane):
    """No preemption; the head has a reservation that, by estimates, nobody behind it may delay."""

    __slots__ = ("_reservation",)

    def __init__(self, policy: OrderingPolicy, capacity: int) -> None:
        super().__init__(policy, capacity)
        self._reservation = EasyReservation()

    def enter(self, job: Job) -> None:
        self.waiting += 1
        self._reservation.wait(self.policy.key(job), job)

    def leave(self, job: Job) -> None:
        self.free += job.gpus
        self._reservation.ended(job)

    def overdue(self, now_s: float) -> bool:
        """Whether somebody waits for a job that has outrun its estimate: more may now run beside it."""
        return self.waiting > 0 and self._reservation.overdue(now_s)

    def decide(self, now_s: float) -> tuple[list[Job], list[Job]]:
        starts = self._reservation.starts(now_s, self.free) if self.waiting and self.free else []
        for job in starts:
            self.free -= job.gpus
        self.waiting -= len(starts)
        return [], starts
