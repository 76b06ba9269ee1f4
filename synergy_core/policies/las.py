"""Least attained service in two queues (Tiresias, NSDI 2019, section 4.1)."""

from synergy_core.policies import ordering_policy
from synergy_core.state import JobView


def _demotion(job: JobView, now_s: float, *, demote_after_gpu_s: float) -> float | None:
    left_gpu_s = demote_after_gpu_s - job.attained_service_gpu_s
    return now_s + left_gpu_s / job.gpus if job.running and left_gpu_s > 0 else None


@ordering_policy(preemptive=True, next_change=_demotion)
def las(job: JobView, *, demote_after_gpu_s: float = 3_600.0) -> tuple[bool, float]:
    """Young jobs first: those below one GPU-hour; within a queue, by arrival."""
    return job.attained_service_gpu_s >= demote_after_gpu_s, job.submit_time_s
