"""EASY backfill: when the first waiting job could start by the estimates, and who may run before that.

Lifka (JSSPP 1995); Mu'alem and Feitelson, IEEE TPDS 12(6), 2001, section 2: the head of the queue is promised the
earliest instant at which, by estimates, enough GPUs are free (the *shadow time*); GPUs free then beyond its need are
*extra*. A later job may start now if it ends before the shadow time or needs no more than the extra GPUs.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Any

from synergy_core.jobs.record import Job
from synergy_core.ordering.ends import ExpectedEnds
from synergy_core.ordering.keys import Entry

BLOCK = 256


class ByEstimate:
    """Waiting jobs of one size in the order of their keys, with the first below an estimate found by blocks."""

    __slots__ = ("_blocks", "_shortest_s")

    def __init__(self) -> None:
        self._blocks: list[list[Entry]] = []
        self._shortest_s: list[float] = []

    def add(self, entry: Entry) -> None:
        """Puts the entry at its place; a block that grows past twice `BLOCK` is halved."""
        if not self._blocks:
            self._blocks, self._shortest_s = [[entry]], [entry[2].estimate_s]
            return
        index = max(bisect_left(self._blocks, [entry]) - 1, 0)
        block = self._blocks[index]
        insort(block, entry)
        self._shortest_s[index] = min(self._shortest_s[index], entry[2].estimate_s)
        if len(block) > 2 * BLOCK:
            self._blocks[index : index + 1] = [block[:BLOCK], block[BLOCK:]]
            self._shortest_s[index : index + 1] = [_shortest(block[:BLOCK]), _shortest(block[BLOCK:])]

    def first(self) -> Entry | None:
        """The entry with the smallest key."""
        return self._blocks[0][0] if self._blocks else None

    def first_within(self, estimate_s: float, but: Job | None = None) -> Entry | None:
        """The entry with the smallest key among those estimated to run at most `estimate_s`, leaving that job out."""
        for block, shortest_s in zip(self._blocks, self._shortest_s, strict=True):
            if shortest_s <= estimate_s:
                for entry in block:
                    if entry[2].estimate_s <= estimate_s and entry[2] is not but:
                        return entry
        return None

    def remove(self, entry: Entry) -> None:
        """Takes the entry out."""
        index = max(bisect_left(self._blocks, [entry]) - 1, 0)
        if index + 1 < len(self._blocks) and self._blocks[index][-1] < entry:
            index += 1
        block = self._blocks[index]
        del block[bisect_left(block, entry)]
        if block:
            self._shortest_s[index] = _shortest(block)
        else:
            del self._blocks[index], self._shortest_s[index]


def _shortest(block: list[Entry]) -> float:
    return min(entry[2].estimate_s for entry in block)


class EasyReservation:
    """Waiting jobs by size, and running jobs by the instant at which they should end (`ends.py`)."""

    __slots__ = ("_ends", "_waiting")

    def __init__(self) -> None:
        self._waiting: dict[int, ByEstimate] = {}
        self._ends = ExpectedEnds()

    def wait(self, key: Any, job: Job) -> None:
        """The job waits, at the place its key gives it."""
        if job.gpus not in self._waiting:
            self._waiting[job.gpus] = ByEstimate()
        self._waiting[job.gpus].add((key, job.job_id, job))

    def ended(self, job: Job) -> None:
        """A running job has ended, whatever was estimated."""
        self._ends.remove(job)

    def overdue(self, now_s: float) -> bool:
        """Whether a running job has outrun what was last expected, so that the head should start later than thought."""
        return self._ends.overdue(now_s)

    def starts(self, now_s: float, free: int) -> list[Job]:
        """Who starts now, with `free` GPUs: heads while they fit, then whoever does not delay the next head."""
        starts: list[Job] = []
        while (head := self._head()) is not None and head[2].gpus <= free:
            free -= head[2].gpus
            starts.append(self._start(head, now_s))
        if head is None or not free:
            return starts
        window_s, extra = self._shadow(now_s, free, head[2].gpus)
        while (entry := self._next_filler(free, window_s, extra)) is not None:
            job = entry[2]
            free -= job.gpus
            if job.estimate_s > window_s:
                extra -= job.gpus
            starts.append(self._start(entry, now_s))
        return starts

    def _start(self, entry: Entry, now_s: float) -> Job:
        job = entry[2]
        self._waiting[job.gpus].remove(entry)
        self._ends.add(job, now_s)
        return job

    def _head(self) -> Entry | None:
        heads = [entry for queue in self._waiting.values() if (entry := queue.first()) is not None]
        return min(heads) if heads else None

    def _shadow(self, now_s: float, free: int, need: int) -> tuple[float, int]:
        """(seconds until the head should fit, GPUs free then beyond its need)."""
        window_s = 0.0
        for end_s, job, _ in self._ends.as_of(now_s):
            if free >= need and end_s - now_s > window_s:
                break
            free += job.gpus
            window_s = max(window_s, end_s - now_s)
        return window_s, free - need

    def _next_filler(self, free: int, window_s: float, extra: int) -> Entry | None:
        """The first job that fits without delaying the head; the head itself does not fit."""
        best: Entry | None = None
        for gpus, queue in self._waiting.items():
            if gpus > free:
                continue
            entry = queue.first() if gpus <= extra else queue.first_within(window_s)
            if entry is not None and (best is None or entry < best):
                best = entry
        return best
