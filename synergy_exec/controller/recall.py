"""What is known of jobs that have arrived at a scheduler which knows nothing of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from synergy_core.jobs.training import Shape
from synergy_exec.controller.jobs import ExecutedJob
from synergy_exec.controller.journal import Observation


def recall(jobs: Mapping[int, ExecutedJob], observations: Iterable[tuple[int, Observation]]) -> None:
    """Progress and noise, as jobs last reported them, and what was observed of their speed, by their numbers."""
    for job in jobs.values():
        if not job.ended and job.task is not None:
            job.task.done_work, job.task.statistics = job.seen.work, job.seen.statistics
    for number, observation in observations:
        task = jobs[number].task if number in jobs else None
        if task is not None and not task.scheduled:  # else they are from before the model was profiled
            gpu_type, nodes, gpus, micro_batch, step_s, sync_s = observation
            task.recall(Shape(gpu_type, nodes, gpus), micro_batch, step_s, sync_s)
