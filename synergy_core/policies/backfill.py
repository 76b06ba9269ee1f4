"""First in, first out with greedy backfill: whoever fits runs. Wide jobs may starve."""

from synergy_core.policies import ordering_policy
from synergy_core.state import JobView
from synergy_core.units import format_instant


def _words(job: JobView) -> str:
    return f"submitted at {format_instant(job.submit_time_s)}"


@ordering_policy(words=_words, backfill="greedy")
def backfill(job: JobView) -> tuple[float]:
    """In order of arrival; any job that fits runs."""
    return (job.submit_time_s,)
