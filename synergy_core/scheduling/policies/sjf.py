"""Shortest job first, by true run times."""

from synergy_core.scheduling.jobs.views import OracleJobView
from synergy_core.scheduling.policies import ordering_policy
from synergy_core.units import format_duration


def _words(job: OracleJobView) -> str:
    return f"runs for {format_duration(job.duration_s)}"


@ordering_policy(words=_words, backfill="greedy")
def sjf(job: OracleJobView) -> tuple[float, float]:
    """Shortest true run time first; never preempts."""
    return job.duration_s, job.submit_time_s
