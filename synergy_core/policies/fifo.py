"""First in, first out, strictly: the head of the queue blocks all behind it."""

from synergy_core.policies import ordering_policy
from synergy_core.state import JobView


@ordering_policy(backfill="none")
def fifo(job: JobView) -> tuple[float]:
    """In order of arrival; nobody overtakes."""
    return (job.submit_time_s,)
