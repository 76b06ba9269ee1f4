"""EASY's promise to a blocked head, with its GPUs tried out.

`ordering/counts/easy.py` keeps the same promise by counts alone.
"""

from __future__ import annotations

from collections.abc import Iterable

from synergy_core.jobs.record import Job, Placed
from synergy_core.placement.one_job import Placement


class Reservation:
    """The GPUs that should be free, and the quota that should be left, when the head of a queue first fits.

    placement: a copy that may be changed. used, quota: of the head's tenant, GPUs. scattered: whether the head's GPUs
    may lie apart.
    """

    __slots__ = ("_head", "_placement", "_quota", "_scattered", "_used", "window_s")

    def __init__(self, placement: Placement, used: int, quota: float, head: Job, *, scattered: bool) -> None:
        self._placement = placement
        self._used = used
        self._quota = quota
        self._head = head
        self._scattered = scattered
        self.window_s = 0.0

    def _fits(self) -> bool:
        head = self._head
        if self._used + head.gpus > self._quota:
            return False
        return self._placement.fits(head.gpus, head.gpu_type, scattered=self._scattered)

    def _counts(self, job: Job) -> int:
        return job.gpus if job.virtual_cluster == self._head.virtual_cluster else 0

    def advance(self, running: Iterable[tuple[float, Job, Placed]], now_s: float) -> bool:
        """Lets jobs end, in the order of their estimated ends, until the head fits: its shadow time.

        Sets `window_s`, the seconds until then; False if the head does not fit even when all have ended.
        """
        for end_s, job, placed in running:
            if self._fits() and end_s - now_s > self.window_s:
                break
            self._placement.release(placed)
            self._used -= self._counts(job)
            self.window_s = max(self.window_s, end_s - now_s)
        return self._fits()

    def allows(self, job: Job, placed: Placed) -> bool:
        """Whether the head still fits then if this job starts now: it has ended by then, or leaves room beside it."""
        return job.estimate_s <= self.window_s or self.leaves_room(job, placed)

    def leaves_room(self, job: Job, placed: Placed) -> bool:
        """Whether the head still fits then beside this job."""
        self._hold(job, placed)
        fits = self._fits()
        self._placement.release(placed)
        self._used -= self._counts(job)
        return fits

    def enter(self, job: Job, placed: Placed) -> None:
        """The job starts now; it is counted if it still runs at the shadow time."""
        if job.estimate_s > self.window_s:
            self._hold(job, placed)

    def _hold(self, job: Job, placed: Placed) -> None:
        self._placement.claim(placed)
        self._used += self._counts(job)
