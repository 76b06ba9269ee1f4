"""EASY's promise to the head of a queue, and when running jobs are expected to end."""

from __future__ import annotations

from collections.abc import Iterable

from synergy_core.scheduling.jobs.record import NEVER, Job, Placed
from synergy_core.scheduling.placement.one_job import Placement

FIRST_EXTENSION_S = 60.0
"""First extension of the expected end of an overdue job; each later extension is twice as long as the one before."""


def expected_end_s(started_s: float, estimate_s: float, now_s: float) -> float:
    """The estimated end of a running job or, once it has passed, the next of the instants 60, 120, 240, … s later.

    If the GPUs of an overdue job counted as free immediately, they would be promised to the head of the queue, and all
    other GPUs that become free would go to any job that fits. Tsafrir, Etsion and Feitelson (IEEE TPDS 18(6), 2007,
    section 3) therefore correct predictions that were too short step by step. Doubling the step keeps the expected
    delay below twice the delay so far.
    """
    end_s = started_s + estimate_s
    if end_s > now_s:
        return end_s
    extension_s = FIRST_EXTENSION_S
    while end_s + extension_s <= now_s:
        extension_s *= 2.0
    return end_s + extension_s


class Reservation:
    """EASY's promise to the head of a queue: the head starts at the earliest instant at which it is expected to fit.

    Lifka (JSSPP 1995); Mu'alem and Feitelson, IEEE TPDS 12(6), 2001, section 2. A later job may start now if it ends
    before that instant (the *shadow time*) or if the head still fits beside the job then.

    placement: a copy that may be changed; None if counts alone decide what fits and all running jobs use the head's
    quota. quota_left: GPUs of the head's quota that no job holds now, `NEVER` without a quota. scattered: whether the
    head's GPUs may lie apart. window_s: seconds until the shadow time, `NEVER` if the head would not fit even if all
    jobs had ended, so that no job can delay it. `_extra`: GPUs of the quota beyond the head's need at the shadow time.
    """

    __slots__ = ("_extra", "_placement", "_scattered", "head", "window_s")

    def __init__(self, placement: Placement | None, head: Job, *, quota_left: float, scattered: bool) -> None:
        self._placement = placement
        self._extra = quota_left - head.gpus
        self._scattered = scattered
        self.head = head
        self.window_s = 0.0

    def _has_room(self) -> bool:
        """Whether the head fits on the free GPUs; its quota is not checked."""
        head, placement = self.head, self._placement
        return placement is None or placement.fits(head.gpus, head.request.gpu_type, scattered=self._scattered)

    def advance(self, running: Iterable[tuple[float, Job, Placed]], now_s: float) -> None:
        """Finds the shadow time by ending jobs, in the order of their expected ends, until the head fits.

        running: (expected end, job, GPUs) of all jobs whose GPUs the head may use, in the order of expected ends.
        """
        placement, extra, window_s = self._placement, self._extra, 0.0
        for end_s, job, placed in running:
            if end_s - now_s > window_s:
                if extra >= 0 and self._has_room():
                    break
                window_s = end_s - now_s
            if placement is not None:
                placement.release(placed)
            if placement is None or job.request.virtual_cluster == self.head.request.virtual_cluster:
                extra += job.gpus
        else:
            if extra < 0 or not self._has_room():
                window_s = NEVER
        self._extra, self.window_s = extra, window_s

    def allows(self, job: Job, placed: Placed) -> bool:
        """Whether the job may start now, because it ends before the shadow time or leaves room for the head."""
        return job.request.estimate_s <= self.window_s or self.leaves_room(job, placed)

    def leaves_room(self, job: Job, placed: Placed) -> bool:
        """Whether the head still fits beside the job at the shadow time."""
        placement = self._placement
        if placement is None:
            return job.gpus <= self._extra
        if self._extra < (job.gpus if job.request.virtual_cluster == self.head.request.virtual_cluster else 0):
            return False
        placement.claim(placed)
        fits = self._has_room()
        placement.release(placed)
        return fits

    def enter(self, job: Job, placed: Placed) -> None:
        """Claims the GPUs of a job that starts now if, by its estimate, it runs beyond the shadow time."""
        if job.request.estimate_s <= self.window_s:
            return
        if self._placement is not None:
            self._placement.claim(placed)
        if self._placement is None or job.request.virtual_cluster == self.head.request.virtual_cluster:
            self._extra -= job.gpus
