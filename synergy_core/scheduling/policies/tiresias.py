"""Discretised two-dimensional least attained service (Tiresias, NSDI 2019, section 3.2).

As published, jobs are in queues by GPU-seconds held. A job that has waited PROMOTEKNOB times as long as it has run goes
back to the first queue, and both times start again at zero. The authors' simulator (github.com/SymbioticLab/Tiresias,
simulator/jobs.py) has three queues, with limits of 3,250 and 7,200 GPU-seconds, and promotes no job by default. The
paper orders a queue by first start; the simulator puts jobs that enter a queue at its end, and waiting jobs behind
running ones. Here a queue is ordered by when each job entered it, so that no job is overtaken for ever.
"""

from bisect import bisect_right

from synergy_core.scheduling.jobs.views import JobView
from synergy_core.scheduling.policies import ordering_policy
from synergy_core.units import format_instant, format_service

QUEUE_LIMITS_GPU_S = (3_250.0, 7_200.0)


def _next_change(
    job: JobView, now_s: float, *, queue_limits_gpu_s: tuple[float, ...], promote_knob: float
) -> float | None:
    """The instant at which the job is demoted if it keeps running, or promoted if it keeps waiting."""
    queue = bisect_right(queue_limits_gpu_s, job.recent_service_gpu_s)
    if job.running:
        if queue == len(queue_limits_gpu_s):
            return None
        return now_s + (queue_limits_gpu_s[queue] - job.recent_service_gpu_s) / job.gpus
    if promote_knob <= 0 or queue == 0:
        return None
    return now_s + promote_knob * (job.recent_service_gpu_s / job.gpus) - job.waited_s


def _promoted(job: JobView, *, queue_limits_gpu_s: tuple[float, ...], promote_knob: float) -> bool:
    if job.running or promote_knob <= 0 or bisect_right(queue_limits_gpu_s, job.recent_service_gpu_s) == 0:
        return False
    return job.waited_s >= promote_knob * (job.recent_service_gpu_s / job.gpus)


def _words(job: JobView, *, queue_limits_gpu_s: tuple[float, ...], promote_knob: float) -> str:
    queue = 1 + bisect_right(queue_limits_gpu_s, job.recent_service_gpu_s)
    attained, since = format_service(job.recent_service_gpu_s), format_instant(job.queue_entered_s)
    return f"queue {queue} of {len(queue_limits_gpu_s) + 1} since {since}, attained {attained}"


@ordering_policy(preemptive=True, next_change=_next_change, begins_anew=_promoted, words=_words)
def tiresias(
    job: JobView, *, queue_limits_gpu_s: tuple[float, ...] = QUEUE_LIMITS_GPU_S, promote_knob: float = 0.0
) -> tuple[int, float, float]:
    """Queues by GPU-time held; within a queue, by when a job entered it. promote_knob: 0 promotes no job."""
    return bisect_right(queue_limits_gpu_s, job.recent_service_gpu_s), job.queue_entered_s, job.submit_time_s
