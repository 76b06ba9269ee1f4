"""First in, first out with greedy backfill: any job that fits runs. Jobs that need many GPUs may starve."""

from synergy_core.scheduling.jobs.views import JobView
from synergy_core.scheduling.policies import ordering_policy
from synergy_core.scheduling.policies.fifo import submitted


@ordering_policy(words=submitted, backfill="greedy")
def backfill(job: JobView) -> tuple[float]:
    """In order of arrival; any job that fits runs."""
    return (job.submit_time_s,)
