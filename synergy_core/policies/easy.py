"""EASY backfill (Lifka, JSSPP 1995; Mu'alem and Feitelson, IEEE TPDS 2001): a reservation for the head."""

from synergy_core.policies import ordering_policy
from synergy_core.state import JobView
from synergy_core.units import format_instant


def _words(job: JobView) -> str:
    return f"submitted at {format_instant(job.submit_time_s)}"


@ordering_policy(words=_words, backfill="easy")
def easy(job: JobView) -> tuple[float]:
    """In order of arrival; a later job runs if, by user estimates, it does not delay the first."""
    return (job.submit_time_s,)
