"""Multi-level feedback with two levels of attained service, the simplest form of Tiresias's idea (NSDI 2019)."""

from synergy_core.scheduling.jobs.views import JobView
from synergy_core.scheduling.policies import ordering_policy
from synergy_core.units import format_service


def _demotion(job: JobView, now_s: float, *, demote_after_gpu_s: float) -> float | None:
    left_gpu_s = demote_after_gpu_s - job.attained_service_gpu_s
    return now_s + left_gpu_s / job.gpus if job.running and left_gpu_s > 0 else None


def _words(job: JobView, *, demote_after_gpu_s: float) -> str:
    queue = 1 + (job.attained_service_gpu_s >= demote_after_gpu_s)
    return f"queue {queue} of 2, attained {format_service(job.attained_service_gpu_s)}"


@ordering_policy(preemptive=True, next_change=_demotion, words=_words)
def mlfq(job: JobView, *, demote_after_gpu_s: float = 3_600.0) -> tuple[bool, float]:
    """Jobs that have held less than `demote_after_gpu_s` go first; within a queue, by arrival."""
    return job.attained_service_gpu_s >= demote_after_gpu_s, job.submit_time_s
