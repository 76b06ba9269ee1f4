"""Run times predicted from jobs that have already ended: by user, virtual cluster and size.

The idea of Helios' QSSF (SC 2021, section 4.2): users submit the same job again and again. The mean of the logarithm
of the run time is shrunk step by step from all jobs to jobs of this size, of this tenant and size, of this user, of
this user and size:  m_k = (n_k·mean_k + κ·m_{k−1}) / (n_k + κ),  with n_k the (fading) number of jobs seen.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import exp, log

from synergy_core.jobs.record import Job

# Chosen by bench/prediction.py on generated traces; no public log was looked at.
PRIOR_JOBS = 4.0
FADE = 0.9


class DurationPredictor:
    """Learns when a job ends, predicts when one arrives; it never sees a job's own future.

    What ends at an instant is learnt after all that arrives at it, in order of job ids: which of two events at one
    instant a driver reports first changes nothing.

    prior_jobs: κ, how many jobs the wider group's mean counts for. fade: the weight a job keeps each time another
    one of its group ends, in (0, 1]; all jobs together do not fade.
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
        """A job has ended after running `run_s` seconds: known to those that arrive after `now_s`."""
        heappush(self._ended, (now_s, job.job_id, job, run_s))

    def _learn(self, job: Job, run_s: float) -> None:
        value = log(max(run_s, 1.0))
        for group in _groups(job):
            weight, total = self._seen.get(group, (0.0, 0.0))
            fade = 1.0 if group is None else self._fade
            self._seen[group] = (weight * fade + 1.0, total * fade + value)


def _groups(job: Job) -> tuple[object, ...]:
    """From the widest to the narrowest; a trace without users has no user groups."""
    tenant = (job.virtual_cluster, job.gpus)
    if not job.user:
        return None, job.gpus, tenant
    return None, job.gpus, tenant, job.user, (job.user, *tenant)
