"""EASY backfill (Lifka, JSSPP 1995; Mu'alem and Feitelson, IEEE TPDS 2001): the head of the queue has a reservation."""

from synergy_core.scheduling.jobs.views import JobView
from synergy_core.scheduling.policies import ordering_policy
from synergy_core.scheduling.policies.fifo import submitted


@ordering_policy(words=submitted, backfill="easy")
def easy(job: JobView) -> tuple[float]:
    """In order of arrival; a later job runs if, by user estimates, it does not delay the first."""
    return (job.submit_time_s,)
