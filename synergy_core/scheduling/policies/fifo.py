"""First in, first out, strictly: the head of the queue blocks all jobs behind it."""

from synergy_core.scheduling.jobs.views import JobView
from synergy_core.scheduling.policies import ordering_policy
from synergy_core.units import format_instant


def submitted(job: JobView) -> str:
    """The key of policies that order jobs by arrival, in words."""
    return f"submitted at {format_instant(job.submit_time_s)}"


@ordering_policy(words=submitted, backfill="none")
def fifo(job: JobView) -> tuple[float]:
    """Jobs in order of arrival; none overtakes another."""
    return (job.submit_time_s,)
