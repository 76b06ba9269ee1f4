"""Shortest remaining time first, by true run times."""

from synergy_core.scheduling.jobs.views import OracleJobView
from synergy_core.scheduling.policies import ordering_policy
from synergy_core.units import format_duration


def _words(job: OracleJobView) -> str:
    return f"remaining {format_duration(job.remaining_s)}"


@ordering_policy(words=_words, preemptive=True, falls_while_running=True, starves=True)
def srtf(job: OracleJobView) -> tuple[float, float]:
    """Shortest true remaining time first, preempting."""
    return job.remaining_s, job.submit_time_s
