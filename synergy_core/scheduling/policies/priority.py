"""Jobs in the order of their users' priority; a job takes GPUs from jobs with lower priority."""

from synergy_core.scheduling.jobs.views import PriorityJobView
from synergy_core.scheduling.policies import ordering_policy
from synergy_core.units import format_instant


def _words(job: PriorityJobView) -> str:
    return f"priority {job.priority}, submitted at {format_instant(job.submit_time_s)}"


@ordering_policy(preemptive=True, words=_words)
def priority(job: PriorityJobView) -> tuple[int, float]:
    """Highest priority first, preempting; jobs with equal priority in order of arrival, and any job that fits runs."""
    return -job.priority, job.submit_time_s
