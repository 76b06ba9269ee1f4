"""Quasi-shortest service first (Helios, SC 2021, section 4.2): shortest predicted GPU-time, never preempting."""

from synergy_core.scheduling.jobs.views import PredictedJobView
from synergy_core.scheduling.policies import ordering_policy
from synergy_core.units import format_duration, format_service


def _words(job: PredictedJobView) -> str:
    service = format_service(job.predicted_duration_s * job.gpus)
    return f"predicted {format_duration(job.predicted_duration_s)}, {service}"


@ordering_policy(words=_words, backfill="greedy")
def qssf(job: PredictedJobView) -> tuple[float, float]:
    """Smallest predicted duration × GPUs first, predicted from jobs that have ended."""
    return job.predicted_duration_s * job.gpus, job.submit_time_s
