"""When waiting jobs cease to insist that their GPUs lie together (`Cluster.placement`)."""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import count

from synergy_core.cluster import Cluster
from synergy_core.jobs.record import NEVER, Job
from synergy_core.units import on_grid


class Patience:
    """Waiting jobs in the order in which their patience ends."""

    __slots__ = ("_queue", "_serial", "after_s")

    def __init__(self, cluster: Cluster) -> None:
        after_s = cluster.scatter_after_s
        self.after_s = on_grid(after_s) if after_s < NEVER else after_s
        self._queue: list[tuple[float, int, Job, tuple[int, float]]] = []
        self._serial = count()

    def ends_s(self, job: Job) -> float:
        """The instant from which the job's GPUs may lie apart; inf for one that runs, and so has not begun to wait."""
        if job.gpus == 1 or not self.after_s:
            return 0.0
        return NEVER if job.running else job.waits_since_s + self.after_s

    def begin(self, job: Job) -> None:
        """The job waits from now on."""
        instant_s = self.ends_s(job)
        if 0 < instant_s < NEVER:
            heappush(self._queue, (instant_s, next(self._serial), job, _starts(job)))

    def next_s(self) -> float:
        """When the patience of the next that still waits will be over; inf for never."""
        queue = self._queue
        while queue and _starts(queue[0][2]) != queue[0][3]:
            heappop(queue)
        return queue[0][0] if queue else NEVER

    def over(self, now_s: float) -> list[Job]:
        """The jobs whose patience has ended by now, each once."""
        jobs = []
        while self.next_s() <= now_s:
            jobs.append(heappop(self._queue)[2])
        return jobs


def _starts(job: Job) -> tuple[int, float]:
    """A value that differs after every start of the job, even one that ends at the instant of its submission."""
    return job.restarts, job.first_start_s
