"""Shortest job first, knowing true run times."""

from synergy_core.policies import ordering_policy
from synergy_core.state import OracleJobView


@ordering_policy(backfill="greedy")
def sjf(job: OracleJobView) -> tuple[float, float]:
    """Shortest true run time first; never preempts."""
    return job.duration_s, job.submit_time_s
