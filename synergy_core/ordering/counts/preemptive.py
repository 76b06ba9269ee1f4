"""The lane with preemption: what a full walk would decide, from the few jobs that can have changed places."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable
from heapq import heappop, heappush, heapreplace
from itertools import count
from typing import Any

from synergy_core.jobs.record import NEVER, Job
from synergy_core.ordering.counts.lanes import Lane
from synergy_core.ordering.keys import Entry, after_jump, next_jump_s, order_key_of
from synergy_core.policies import OrderingPolicy


class PreemptiveLane(Lane):
    """Running jobs give way to waiting ones with smaller keys.

    counts_decide: whether a job fits wherever as many GPUs are free.
    """

    counts_decide = True

    __slots__ = (
        "_changes",
        "_due",
        "_falls",
        "_first",
        "_heaps",
        "_jumps",
        "_key",
        "_running",
        "_serial",
        "_started",
        "_untried",
    )

    def __init__(self, policy: OrderingPolicy, capacity: int) -> None:
        super().__init__(policy, capacity)
        self._heaps: dict[Hashable, list[Entry]] = {}
        self._running: list[Entry] = []
        self._changes: list[tuple[float, int, Job, object]] = []
        self._serial = count()
        self._falls = policy.falls_while_running
        self._jumps = policy.next_change is not None
        self._key = order_key_of(policy)
        self._untried: dict[Hashable, list[Entry]] = {}
        self._started: list[tuple[Job, object, float]] = []
        self._due = False
        self._first: Entry | None = None

    # A job's ticket is its entry in a heap or in the running list; a heap entry that is no longer its job's ticket is
    # stale and is dropped when it surfaces.
    # `_untried`: the heaps whose first job may fit. The first job of any other did not fit when last tried, and since
    # then nothing was freed and no running job fell back; as time passes, running jobs only gain on waiting ones.
    # `_first`: the waiting job with the smallest key, or None if it must be looked for.

    def enter(self, job: Job) -> None:
        self.waiting += 1
        self._push(job, (self._key(job), job.job_id, job))
        if self._jumps:
            self.expect_change(job, job.settled_s)

    def _push(self, job: Job, entry: Entry) -> None:
        job.ticket = entry
        self._first = None
        form = self._form(job)
        heap = self._heaps.get(form)
        if heap is None:
            heap = self._heaps[form] = []
        heappush(heap, entry)
        if heap[0] is entry:
            self._untried[form] = heap

    def _form(self, job: Job) -> Hashable:
        """What it needs: jobs alike in that have one heap, and fit or do not fit in the order of their keys."""
        return job.gpus

    def leave(self, job: Job) -> None:
        self._remove_running(job.ticket)
        self._try_all()
        self.free += job.gpus
        job.ticket = None

    def _try_all(self) -> None:
        self._untried.update(self._heaps)

    def _remove_running(self, entry: Any) -> None:
        running = self._running
        del running[bisect_left(running, entry)]

    def _move_running(self, ticket: Any, entry: Entry) -> None:
        """Moves a running job whose key has changed to its new position."""
        entry[2].ticket = entry
        running = self._running
        index = bisect_left(running, ticket)
        if ticket < entry and (index + 1 == len(running) or entry < running[index + 1]):
            running[index] = entry
        else:
            del running[index]
            insort(running, entry)

    def started(self, job: Job, now_s: float) -> None:
        """The job runs from now on, or has moved."""
        if self._jumps:
            self.expect_change(job, now_s)
        if self._falls:
            self.settle_later(job, now_s)

    def settle_later(self, job: Job, now_s: float) -> None:
        """Marks the job, whose key is computed again before the next decision."""
        self._started.append((job, job.ticket, now_s))

    def _settle_started(self) -> None:
        """Enters jobs again whose keys have changed by starting or moving: a restart is paid anew, or nodes differ.

        How long a job has left is known once the driver has carried its start out, hence before the next decision.
        """
        for job, ticket, decided_s in self._started:
            if job.ticket is not ticket or not job.running:
                continue
            key = self._key(job)
            entry = ((key[0] + decided_s, *key[1:]), job.job_id, job)
            if entry != ticket:
                self._move_running(ticket, entry)
                self._try_all()
        self._started.clear()

    def expect_change(self, job: Job, now_s: float) -> None:
        """Notes the instant at which the job's key next jumps; the job has just entered, started or jumped."""
        instant_s = next_jump_s(self.policy, job, now_s)
        if instant_s is not None:
            heappush(self._changes, (instant_s, next(self._serial), job, job.ticket))

    def next_change_s(self, now_s: float) -> float:
        """The next instant at which a key jumps and somebody waits for it; inf if none is known.

        Jumps that are due by now are entered; `now_s` where one of them can change who runs. While nobody waits,
        nothing hangs on a jump: it is entered late, as of its instant.
        """
        if not self.waiting:
            return NEVER
        changes = self._changes
        if not self._due and changes and changes[0][0] <= now_s:
            self._due = self.apply_changes(now_s)
        if self._due:
            return now_s
        while changes and changes[0][2].ticket is not changes[0][3]:
            heappop(changes)
        return changes[0][0] if changes else NEVER

    def apply_changes(self, now_s: float) -> bool:
        """Enters the jumps that were due by now; whether any of them can change who runs.

        None does of a running job that still stands before all that wait.
        """
        matters = False
        changes = self._changes
        while changes and changes[0][0] <= now_s:
            instant_s, _, job, ticket = changes[0]
            if job.ticket is not ticket:
                heappop(changes)
                continue
            entry = (after_jump(self.policy, job, instant_s), job.job_id, job)
            if not job.running:
                self._push(job, entry)
                matters = True
            else:
                if entry != ticket:
                    self._move_running(ticket, entry)
                if not matters:
                    first = self._first = self._first or self._first_waiting()
                    matters = first is not None and first < entry
            next_s = next_jump_s(self.policy, job, job.settled_s)  # up to then, or to the jump, it is settled
            if next_s is None:
                heappop(changes)
            else:
                heapreplace(changes, (next_s, next(self._serial), job, job.ticket))
        if matters:
            self._try_all()
        return matters

    def _first_waiting(self) -> Entry | None:
        """The waiting job with the smallest key."""
        first: Entry | None = None
        for heap in self._heaps.values():
            while heap and heap[0][2].ticket is not heap[0]:
                heappop(heap)
            if heap and (first is None or heap[0] < first):
                first = heap[0]
        return first

    def decide(self, now_s: float) -> tuple[list[Job], list[Job]]:
        self._due = False
        if not self.waiting:
            return [], []
        if self._changes and self._changes[0][0] <= now_s:
            self.apply_changes(now_s)
        if self._started:
            self._settle_started()
        started: list[Job] = []
        displaced: dict[int, Entry] = {}
        # Displaced jobs are tried again only after a later displacement: the one that displaced them left no room.
        returning: dict[int, Entry] = {}
        while (here := self._next_admitted(now_s, returning)) is not None:
            job = here[2]
            if job.job_id in displaced:
                del displaced[job.job_id]
            else:
                heappop(self._heaps[job.gpus])
                self.waiting -= 1
                started.append(job)
            gone = bool(displaced)
            if self._admit(here, displaced):
                self._try_all()
                returning = displaced if gone else returning
        stops = [entry[2] for entry in displaced.values()]
        for job in stops:
            job.ticket = None
        return stops, started

    def _next_admitted(self, now_s: float, displaced: dict[int, Entry]) -> Entry | None:
        """The first job of the walk that is not running but fits, as an entry of the running list.

        A key that falls with the clock stands there as the instant at which it reaches zero.
        """
        self._first = None
        best: Entry | None = None
        free, running, counts_decide, falls = self.free, self._running, self.counts_decide, self._falls
        worst = running[-1] if running else None
        left: dict[Hashable, list[Entry]] = {}
        for form, heap in self._untried.items():
            while heap:
                here = heap[0]
                job = here[2]
                if job.ticket is here:
                    break
                heappop(heap)
            else:
                continue
            enough = job.gpus <= free
            if falls:
                key = here[0]
                zero_s = key[0] + now_s
                if not enough and (worst is None or worst[0][0] < zero_s):
                    continue
                here = ((zero_s, *key[1:]), here[1], job)
            if best is not None and best < here:
                left[form] = heap
            elif (enough and counts_decide) or ((enough or (worst is not None and here < worst)) and self._fits(here)):
                best = here
                left[form] = heap
        self._untried = left
        for here in displaced.values():
            if (best is None or here < best) and self._fits(here):
                best = here
        return best

    def _fits(self, here: Entry) -> bool:
        """Whether the free GPUs and those of the running jobs behind this position are enough."""
        need = here[2].gpus - self.free
        for behind in reversed(self._running):
            if need <= 0 or behind < here:
                break
            need -= behind[2].gpus
        return need <= 0

    def _admit(self, here: Entry, displaced: dict[int, Entry]) -> bool:
        """Lets the job in at its position; of the shortest tail that makes room, whoever still fits stays.

        True if more GPUs are free than before, which may let others in. Otherwise no job gained room: at every
        position the free GPUs plus those of the running jobs behind it are at most what they were.
        """
        running = self._running
        job = here[2]
        before = self.free
        left = before - job.gpus
        if left < 0:
            index = len(running)
            while left < 0:
                index -= 1
                left += running[index][2].gpus
            tail = running[index:]
            del running[index:]
            for behind in tail:
                if behind[2].gpus <= left:
                    left -= behind[2].gpus
                    running.append(behind)
                else:
                    displaced[behind[1]] = behind
        self.free = left
        job.ticket = here
        insort(running, here)
        return left > before
