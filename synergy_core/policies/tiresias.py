"""Discretised two-dimensional least attained service (Tiresias, NSDI 2019, section 4)."""

from bisect import bisect_right

from synergy_core.policies import ordering_policy
from synergy_core.state import JobView

# About one GPU-hour, as in the replays of shared/research/engine.md, section 2.2, and 16 GPU-hours,
# where Pollux's artifact demotes (goodput_policies.md, section 6.1). Not the paper's own figures.
QUEUE_LIMITS_GPU_S = (3_250.0, 57_600.0)


def _demotion(job: JobView, now_s: float, *, queue_limits_gpu_s: tuple[float, ...]) -> float | None:
    queue = bisect_right(queue_limits_gpu_s, job.attained_service_gpu_s)
    if not job.running or queue == len(queue_limits_gpu_s):
        return None
    return now_s + (queue_limits_gpu_s[queue] - job.attained_service_gpu_s) / job.gpus


@ordering_policy(preemptive=True, next_change=_demotion)
def tiresias(job: JobView, *, queue_limits_gpu_s: tuple[float, ...] = QUEUE_LIMITS_GPU_S) -> tuple[int, float, float]:
    """Queues by GPU-time held so far; within a queue, by when a job entered it."""
    return bisect_right(queue_limits_gpu_s, job.attained_service_gpu_s), job.queue_entered_s, job.submit_time_s
