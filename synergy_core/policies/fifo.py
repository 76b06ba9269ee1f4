"""First in, first out, strictly: the head of the queue blocks all behind it."""

from synergy_core.policies import ordering_policy
from synergy_core.state import JobView
from synergy_core.units import format_instant


def _words(job: JobView) -> str:
    return f"submitted at {format_instant(job.submit_time_s)}"


@ordering_policy(words=_words, backfill="none")
def fifo(job: JobView) -> tuple[float]:
    """In order of arrival; nobody overtakes."""
    return (job.submit_time_s,)
