"""When running jobs should end, by their users' estimates; an overdue one is expected to be late a while more.

A job that has outrun its estimate has not ended, whatever was declared: to count its GPUs as free at once would promise
them to the head of the queue and everything else that comes free to whoever fits. Tsafrir, Etsion and Feitelson (IEEE
TPDS 18(6), 2007, section 3) therefore correct a prediction that proved too short, step by step. Ours: by a minute, and
then twice as much each time, so that a job is never expected to be late for more than twice as long as it is.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Any

from synergy_core.jobs.record import Job, Placed

FIRST_EXTENSION_S = 60.0


def expected_end_s(started_s: float, estimate_s: float, now_s: float) -> float:
    """The estimated end, or, from then on, the first after `now_s` of those 60, 120, 240, … s later; seconds."""
    end_s = started_s + estimate_s
    extension_s = FIRST_EXTENSION_S
    if end_s > now_s:
        return end_s
    while end_s + extension_s <= now_s:
        extension_s *= 2.0
    return end_s + extension_s


class ExpectedEnds:
    """Running jobs in the order of their expected ends. A job's ticket is its entry here.

    An entry: (expected end, job id, job, when it started, the GPUs it was given).
    """

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, Job, float, Placed]] = []

    def add(self, job: Job, now_s: float, placed: Placed = ()) -> None:
        """The job starts now."""
        self._insert(job, now_s, placed, now_s)

    def _insert(self, job: Job, started_s: float, placed: Placed, now_s: float) -> None:
        entry = (expected_end_s(started_s, job.estimate_s, now_s), job.job_id, job, started_s, placed)
        job.ticket = entry
        insort(self._entries, entry)

    def remove(self, job: Job) -> None:
        """A running job has ended, whatever was expected."""
        entry: Any = job.ticket
        del self._entries[bisect_left(self._entries, entry)]

    def overdue(self, now_s: float) -> bool:
        """Whether somebody has outrun what was last expected of it."""
        return bool(self._entries) and self._entries[0][0] <= now_s

    def as_of(self, now_s: float) -> Iterator[tuple[float, Job, Placed]]:
        """(expected end, job, GPUs) of all that run, by expected end. O(log n) for each that has become overdue."""
        entries = self._entries
        late = 0
        while late < len(entries) and entries[late][0] <= now_s:
            late += 1
        overdue = entries[:late]
        del entries[:late]
        for _, _, job, started_s, placed in overdue:
            self._insert(job, started_s, placed, now_s)
        return ((end_s, job, placed) for end_s, _, job, _, placed in entries)
