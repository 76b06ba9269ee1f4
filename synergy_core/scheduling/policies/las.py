"""Least attained service (foreground-background; Kleinrock, Queueing Systems II, 1976, section 4.6), in GPU-seconds.

Service in two dimensions, GPUs × time, is Tiresias's idea (NSDI 2019, section 3.2). A job's service is counted in whole
quanta of its running time: a job with less service preempts at once, and two jobs with equal service take turns of one
quantum. The quantum of an hour is our choice; docs/policies.md compares others.
"""

from synergy_core.errors import InputError
from synergy_core.scheduling.jobs.views import JobView
from synergy_core.scheduling.policies import ordering_policy
from synergy_core.units import format_service

QUANTUM_S = 3_600.0


def _quanta(job: JobView, quantum_s: float) -> float:
    """The number of whole quanta for which the job has held its GPUs."""
    if quantum_s <= 0:
        raise InputError(f"parameter quantum_s of policy las: got {quantum_s:g}, expected seconds > 0, such as 3600.")
    return job.attained_service_gpu_s / job.gpus // quantum_s


def _next_quantum(job: JobView, now_s: float, *, quantum_s: float) -> float | None:
    if not job.running:
        return None
    return now_s + (_quanta(job, quantum_s) + 1.0) * quantum_s - job.attained_service_gpu_s / job.gpus


def _words(job: JobView, *, quantum_s: float) -> str:
    counted_gpu_s = _quanta(job, quantum_s) * quantum_s * job.gpus
    return f"attained {format_service(job.attained_service_gpu_s)}, counted {format_service(counted_gpu_s)}"


@ordering_policy(preemptive=True, next_change=_next_quantum, words=_words)
def las(job: JobView, *, quantum_s: float = QUANTUM_S) -> tuple[float, float]:
    """Fewest GPU-seconds held first, counted in whole quanta, so that jobs with equal service do not keep swapping."""
    return _quanta(job, quantum_s) * quantum_s * job.gpus, job.submit_time_s
