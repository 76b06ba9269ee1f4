"""EASY's promise to a blocked head: the earliest instant at which it should fit, tried out on a copy of the GPUs.

`ordering/counts/easy.py` keeps the same promise by counts alone.
"""

from __future__ import annotations

from collections.abc import Iterable

from synergy_core.jobs.record import NEVER, Job, Placed
from synergy_core.placement.one_job import Placement


class Reservation:
    """The GPUs that should be free, and the quota that should be left, when the head of a queue first fits.

    placement: a copy that may be changed. quota_left: GPUs of its tenant's quota that nobody holds now, `NEVER` where
    no quota binds the head. scattered: whether the head's GPUs may lie apart.
    """

    __slots__ = ("_placement", "_quota_left", "_scattered", "head", "window_s")

    def __init__(self, placement: Placement, head: Job, *, quota_left: float, scattered: bool) -> None:
        self._placement = placement
        self._quota_left = quota_left
        self._scattered = scattered
        self.head = head
        self.window_s = 0.0

    def _fits(self) -> bool:
        head = self.head
        if head.gpus > self._quota_left:
            return False
        return self._placement.fits(head.gpus, head.gpu_type, scattered=self._scattered)

    def _counts(self, job: Job) -> int:
        """What the job takes of the head's quota; nothing where none binds, for `NEVER` less a number is `NEVER`."""
        return job.gpus if job.virtual_cluster == self.head.virtual_cluster else 0

    def advance(self, running: Iterable[tuple[float, Job, Placed]], now_s: float) -> None:
        """Lets jobs end, in the order of their estimated ends, until the head fits: its shadow time.

        running: all jobs whose GPUs the head may have, whoever's they are. Sets `window_s`, the seconds until then:
        `NEVER` for a head that does not fit even when all have ended, which nobody can delay.
        """
        for end_s, job, placed in running:
            if end_s - now_s > self.window_s and self._fits():
                return
            self._placement.release(placed)
            self._quota_left += self._counts(job)
            self.window_s = max(self.window_s, end_s - now_s)
        if not self._fits():
            self.window_s = NEVER

    def allows(self, job: Job, placed: Placed) -> bool:
        """Whether the head still fits then if this job starts now: it has ended by then, or leaves room beside it."""
        return job.estimate_s <= self.window_s or self.leaves_room(job, placed)

    def leaves_room(self, job: Job, placed: Placed) -> bool:
        """Whether the head still fits then beside this job."""
        self._hold(job, placed)
        fits = self._fits()
        self._placement.release(placed)
        self._quota_left += self._counts(job)
        return fits

    def enter(self, job: Job, placed: Placed) -> None:
        """The job starts now; it is counted if it still runs at the shadow time."""
        if job.estimate_s > self.window_s:
            self._hold(job, placed)

    def _hold(self, job: Job, placed: Placed) -> None:
        self._placement.claim(placed)
        self._quota_left -= self._counts(job)
