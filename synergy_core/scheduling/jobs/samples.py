"""Job records with which policies are tried: when they are registered, requested or checked.

They are here, below policies, so that registering a policy imports no checks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from synergy_core.scheduling.jobs.record import Job, Request

BATCH = 32
STEP_S, SAMPLE_S, SYNC_S = 0.05, 0.002, 0.02
"""Step time of the sample jobs, in seconds: fixed, per sample on a GPU, and for synchronising several GPUs."""


class TrialJob(Job):
    """A job record for trying policies. It holds the true run time, as a simulator's record does."""

    __slots__ = ("duration_s",)

    def __init__(self, *arguments: Any, duration_s: float, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.duration_s = duration_s

    @property
    def remaining_s(self) -> float:
        """Remaining run time on the requested GPUs."""
        return self.duration_s - self.service.attained_gpu_s / self.gpus

    def true_iteration_s(self, gpus: int, gpu_type: str) -> float:
        """Seconds of an iteration at the requested batch."""
        return STEP_S + SAMPLE_S * BATCH / gpus + SYNC_S * (gpus > 1)

    def remaining_iterations(self) -> float:
        """Remaining iterations at the requested batch."""
        return self.remaining_s / self.true_iteration_s(self.gpus, self.request.gpu_type)


def samples() -> Iterator[Job]:
    """Job records for trying policies: one job waits, one runs, and one was stopped."""
    for has_started, has_stopped in ((False, False), (True, False), (True, True)):
        job = TrialJob(1, 60.0, 2, request=Request("vc", "user", estimate_s=7_200.0), duration_s=3_600.0)
        job.predicted_duration_s = 3_000.0
        if has_started:
            job.started(120.0, ((0, 3),))
        if has_stopped:
            job.stopped(240.0)
        yield job
