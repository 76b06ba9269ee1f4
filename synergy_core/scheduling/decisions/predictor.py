"""Predicts run times from jobs that have ended."""

from __future__ import annotations

from heapq import heappop, heappush
from math import exp, log

from synergy_core.scheduling.jobs.record import Job

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
