"""Functions for queues ordered by a key: keys that compare exactly, instants at which keys jump, expected ends of
running jobs, EASY's reservation, and run times predicted from jobs that have ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from math import exp, log
from typing import Any

from synergy_core.scheduling.jobs.record import NEVER, Job, Placed
from synergy_core.scheduling.placement.one_job import Placement
from synergy_core.scheduling.policies import Key, OrderingPolicy
from synergy_core.units import MAX_TIME_S, TICK_S, grid_ceil, on_grid

Entry = tuple[Any, int, Job]
"""(key, job id, job): ordered by key, then id."""


def order_key_of(policy: OrderingPolicy) -> Callable[[Job], Key]:
    """The function that computes the keys by which queues compare jobs.

    If keys fall with the clock, their times are rounded to the grid. Two waiting jobs are compared by their keys, two
    running jobs by clock + key at their starts, and a waiting and a running job by clock + key. On the grid this sum is
    exact (`synergy_core.units`), so the order of two jobs does not depend on how and when they are compared. Off the
    grid, sums of different keys could round to equal values, and the order could change. Times beyond `MAX_TIME_S`,
    where sums would round again, count as never.
    """
    key_of: Callable[..., Key] = policy.key
    if not policy.falls_while_running:
        return key_of

    def on_the_grid(job: Job) -> Key:
        key = key_of(job)
        time_s = key[0]
        # Between `MAX_TIME_S` and twice that, floats are one tick apart: the sum is exact only for times on the grid.
        if 0.0 <= time_s < MAX_TIME_S and time_s + MAX_TIME_S - MAX_TIME_S == time_s:
            return key
        return (on_grid(time_s) if time_s < MAX_TIME_S else NEVER, *key[1:])

    return on_the_grid


def next_jump_s(policy: OrderingPolicy, job: Job, now_s: float) -> float | None:
    """The next instant after now at which the job's key jumps without an event; None if none is known."""
    if policy.next_change is None or (instant_s := policy.next_change(job, now_s)) is None:
        return None
    instant_s, soonest_s = grid_ceil(instant_s), now_s + TICK_S
    return instant_s if instant_s > soonest_s else soonest_s


def after_jump(policy: OrderingPolicy, job: Job, instant_s: float) -> Key:
    """Settles the job at the instant at which its key was expected to jump, and returns its key at that instant.

    If the job's start was delayed, its key jumps later too and has not changed yet.
    """
    before = policy.key(job)
    job.settle(instant_s)
    if policy.begins_anew is not None and policy.begins_anew(job):
        job.service.begin_anew()
    after = policy.key(job)
    if after == before:
        return after
    job.service.queue_entered_s = instant_s
    return policy.key(job)


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


# Chosen by rank correlation on generated traces; no public log was used.
PRIOR_JOBS = 4.0
FADE = 0.9


class DurationPredictor:
    """Predicts run times from jobs that have already ended, by user, virtual cluster and size.

    The idea of Helios' QSSF (SC 2021, section 4.2) is that users submit the same job again and again. The mean log run
    time of a group is shrunk towards that of the group before it: all jobs, jobs of this size, of this tenant and size,
    of this user, of this user, tenant and size:  m_k = (n_k·mean_k + κ·m_{k−1}) / (n_k + κ),  with n_k the (fading)
    number of ended jobs. A prediction uses only jobs that ended before the predicted job's arrival.

    Jobs that end at the same instant are used only by later predictions, in the order of job ids. The order in which a
    driver reports the events of one instant therefore does not matter.

    prior_jobs: κ, the weight of the wider group's mean, in jobs. fade: factor that multiplies a job's weight whenever
    another job of its group ends, in (0, 1]; the group of all jobs does not fade.
    """

    __slots__ = ("_ended", "_fade", "_prior_jobs", "_seen")

    def __init__(self, *, prior_jobs: float = PRIOR_JOBS, fade: float = FADE) -> None:
        self._prior_jobs = prior_jobs
        self._fade = fade
        self._seen: dict[object, tuple[float, float]] = {}
        self._ended: list[tuple[float, int, Job, float]] = []

    def predict_s(self, job: Job) -> float:
        """The expected run time (geometric mean) of a job that arrives now, in seconds; 1 s before any has ended."""
        while self._ended and self._ended[0][0] < job.submit_time_s:
            _, _, ended, run_s = heappop(self._ended)
            self._learn(ended, run_s)
        mean = 0.0
        prior = self._prior_jobs
        for group in _groups(job):
            seen = self._seen.get(group)
            if seen is not None:
                weight, total = seen
                mean = (total + prior * mean) / (weight + prior)
        return exp(mean)

    def ended(self, job: Job, run_s: float, now_s: float) -> None:
        """Records that a job has ended at `now_s` after running `run_s` seconds; only later predictions use it."""
        heappush(self._ended, (now_s, job.job_id, job, run_s))

    def _learn(self, job: Job, run_s: float) -> None:
        value = log(max(run_s, 1.0))
        for group in _groups(job):
            weight, total = self._seen.get(group, (0.0, 0.0))
            fade = 1.0 if group is None else self._fade
            self._seen[group] = (weight * fade + 1.0, total * fade + value)


def _groups(job: Job) -> tuple[object, ...]:
    """The job's groups, from the widest to the narrowest; a trace without users has no user groups."""
    tenant = (job.request.virtual_cluster, job.gpus)
    if not job.request.user:
        return None, job.gpus, tenant
    return None, job.gpus, tenant, job.request.user, (job.request.user, *tenant)
