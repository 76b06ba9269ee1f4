"""Bounds the time that a job waits, under any policy (`Cluster.max_wait`).

A job that has waited `max_wait` × max(60 s, 2 × the mean run time of the jobs so far) is *starved*: it starts before
all jobs that are not. Policies that stop jobs stop as few as suffice for it. Under the others it holds a reservation:
until it starts, no job starts on GPUs that it may use, except by EASY, whose estimates say which jobs do not delay it.
Once it runs, it keeps its GPUs for as long as it had to wait, or for `max_wait` × 60 s if their number may change. Then
it is a job like any other.

Policies that resize jobs can always start one more job. But a job with a fixed number of GPUs that is worth less to
them than two small jobs would never start beside a stream of small ones, and nor would it under any backfilling.
"""

from __future__ import annotations

from typing import Generic

from synergy_core.scheduling.jobs.record import NEVER, AnyJob, Decision
from synergy_core.scheduling.policies import OrderingPolicy, Policy, SharingPolicy
from synergy_core.units import TICK_S, grid_ceil

LEAST_S = 60.0
"""Jobs do not count as starved before `Cluster.max_wait` × this time, however short jobs are."""
MEAN_RUNS = 2.0


class RunTimes(Generic[AnyJob]):
    """The mean time for which jobs have run so far: over all jobs that have started, ended or not.

    It is empty in a new scheduler, such as that of an executor which has left a node out.
    """

    def __init__(self) -> None:
        self._started: set[int] = set()
        self._jobs = 0
        self._running = 0
        self._total_s = 0.0  # of the jobs that run now, less the instants of their starts

    def start(self, job: AnyJob, now_s: float) -> None:
        """Counts a job that runs from now on."""
        if job.job_id not in self._started:
            self._started.add(job.job_id)
            self._jobs += 1
        self._running += 1
        self._total_s -= now_s

    def stop(self, now_s: float) -> None:
        """Counts a job that has run until now."""
        self._running -= 1
        self._total_s += now_s

    def leave(self, job: AnyJob) -> None:
        """Forgets the id of a job that has ended; its run time still counts."""
        self._started.discard(job.job_id)

    def mean_s(self, now_s: float) -> float:
        """The mean; 0 before any job has started."""
        return (self._total_s + self._running * now_s) / self._jobs if self._jobs else 0.0

    def growth(self) -> float:
        """Seconds by which the mean grows per second."""
        return self._running / self._jobs if self._jobs else 0.0


class Waits(Generic[AnyJob]):
    """Marks jobs that have waited for too long (`Job.starved`), and lets them keep their GPUs for a while.

    max_wait: of the cluster. in_rounds: whether decisions have fixed times.
    """

    def __init__(self, max_wait: float, *, in_rounds: bool) -> None:
        self._max_wait = max_wait
        self._in_rounds = in_rounds
        self._waiting: dict[int, AnyJob] = {}
        self._kept_until_s: dict[int, tuple[AnyJob, float]] = {}  # starved jobs that run
        self._run_times: RunTimes[AnyJob] = RunTimes()

    def bound_s(self, now_s: float) -> float:
        """Seconds after which a job that waits now is starved."""
        return self._max_wait * max(LEAST_S, MEAN_RUNS * self._run_times.mean_s(now_s))

    def begin(self, job: AnyJob) -> None:
        """A job that has arrived waits."""
        self._waiting[job.job_id] = job

    def stop(self, job: AnyJob, now_s: float) -> None:
        """A job that ran waits again."""
        self._run_times.stop(now_s)
        self._waiting[job.job_id] = job
        self._kept_until_s.pop(job.job_id, None)

    def end(self, job: AnyJob, now_s: float) -> None:
        """A job has ended, or is withdrawn."""
        if job.running:
            self._run_times.stop(now_s)
        self._run_times.leave(job)
        self._waiting.pop(job.job_id, None)
        self._kept_until_s.pop(job.job_id, None)
        job.starved = False

    def mark(self, now_s: float) -> None:
        """Marks the jobs that are starved now, and takes the mark from those that have kept their GPUs long enough."""
        bound_s = self.bound_s(now_s)
        for job in self._waiting.values():
            job.starved = job.starved or now_s - job.service.waits_since_s >= bound_s
        for job in [job for job, until_s in self._kept_until_s.values() if until_s <= now_s]:
            del self._kept_until_s[job.job_id]
            job.starved = False

    def count(self, decision: Decision[AnyJob], now_s: float) -> None:
        """Counts the jobs that a decision has stopped and started."""
        bound_s = self.bound_s(now_s)
        for job, _ in decision.stops:
            self.stop(job, now_s)
        for job, _ in decision.starts:
            self._waiting.pop(job.job_id, None)
            self._run_times.start(job, now_s)
            if job.starved:
                resizable = job.spec is not None and not job.spec.fixed_gpus
                keeps_s = self._max_wait * LEAST_S if resizable else bound_s
                self._kept_until_s[job.job_id] = job, grid_ceil(now_s + keeps_s)

    def next_change_s(self, now_s: float) -> float:
        """The next instant at which a job is starved, or has kept its GPUs for long enough; inf if none is known."""
        if self._in_rounds:
            return NEVER
        change_s = min([until_s for _, until_s in self._kept_until_s.values()], default=NEVER)
        since_s = min([job.service.waits_since_s for job in self._waiting.values() if not job.starved], default=NEVER)
        return change_s if since_s == NEVER else min(change_s, self._starves_s(since_s, now_s))

    def _starves_s(self, since_s: float, now_s: float) -> float:
        """The instant at which a job that has waited since then is starved if no job starts, stops or ends before.

        As running jobs go on, their mean run time grows, and the bound with it.
        """
        if now_s - since_s >= self.bound_s(now_s):
            return now_s
        first_s = since_s + self._max_wait * LEAST_S
        rate = self._max_wait * MEAN_RUNS * self._run_times.growth()
        mean_s = self._max_wait * MEAN_RUNS * self._run_times.mean_s(now_s)
        if mean_s + rate * max(first_s - now_s, 0.0) <= self._max_wait * LEAST_S:
            return max(grid_ceil(first_s), now_s + TICK_S)
        if rate >= 1.0:
            return NEVER
        # now − since = bound, with bound = mean + rate · (now − now_s)
        return max(grid_ceil(now_s + (mean_s - (now_s - since_s)) / (1.0 - rate)), now_s + TICK_S)


def exempt(policy: Policy) -> bool:
    """Whether the policy may let jobs wait for ever by its definition (`OrderingPolicy.starves`)."""
    order = policy.order if isinstance(policy, SharingPolicy) else policy
    return isinstance(order, OrderingPolicy) and order.starves


def bound_in_words(policy: Policy) -> str:
    """How long jobs may wait under the policy, with `Cluster.max_wait`."""
    if exempt(policy):
        return "without bound, by definition: shorter jobs go first, and cluster.max_wait does not apply"
    then = "no other job starts until it does"
    if isinstance(policy, OrderingPolicy) and policy.backfill == "easy":
        then = "others may start before it only if, by users' estimates, they do not delay it"
    if policy.preemptive:
        then = "others are stopped for it" + (f", within a round of {policy.round_s:g} s" if policy.in_rounds else "")
    return f"at most cluster.max_wait × max(60 s, 2 × the mean run time); then a job is first in line, and {then}"
