"""Quasi-shortest service first (Helios, SC 2021, section 4.2): shortest predicted GPU-time, never preempting."""

from synergy_core.policies import ordering_policy
from synergy_core.state import PredictedJobView


@ordering_policy(backfill="greedy")
def qssf(job: PredictedJobView) -> tuple[float, float]:
    """Smallest predicted duration × GPUs first, predicted from jobs that have ended."""
    return job.predicted_duration_s * job.gpus, job.submit_time_s
