"""First in, first out with greedy backfill: any job that fits runs. Jobs that need many GPUs may starve."""

from synergy_core.policies import ordering_policy
from synergy_core.policies.fifo import submitted
from synergy_core.state import JobView


@ordering_policy(words=submitted, backfill="greedy")
def backfill(job: JobView) -> tuple[float]:
    """In order of arrival; any job that fits runs."""
    return (job.submit_time_s,)
