"""Loss curves of a run as TensorBoard shows them: a folder of events for every job."""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import ModuleType
from typing import Any

from synergy_core.errors import InputError
from synergy_exec.overheads import spans_of
from synergy_exec.recorded import RecordedJob, open_journal, recorded_jobs

SERIES = {"loss": "loss", "batch": "batch", "learning_rate_factor": "rate", "step_seconds": "seconds"}
"""Name in TensorBoard, and in steps.csv."""


def write(work: Path, into: Path) -> list[Path]:
    """The steps of all jobs in a work folder as event files; returns the folders below `into`, one per job.

    The horizontal axis is the step, from 1; its wall time is when it ended, to a second or so. Events that an earlier
    call wrote there are replaced. Raises InputError where TensorBoard is not installed, or the folder is no run's.
    """
    summary = _summary()
    journal = open_journal(work)
    runs, facts = journal.runs(), journal.facts()
    journal.close()
    spans = spans_of(runs, facts)
    jobs = [each for each in recorded_jobs(work) if each.steps]
    if not jobs:
        raise InputError(f"{work}: no job has trained a step; there is nothing to show.")
    began_s = _began_s(work, jobs, spans)
    folders = []
    for job in jobs:
        folder = into / f"{job.number}-{re.sub(r'[^A-Za-z0-9_.-]+', '_', job.name)}"
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        _write_job(summary.Writer(str(folder)), job, [began_s + each for each in ended_s(job, spans)])
        folders.append(folder)
    return folders


def _summary() -> ModuleType:
    try:
        from tensorboard import summary
    except ImportError as error:
        raise InputError("TensorBoard is not installed; type: pip install 'synergy-cluster[tensorboard]'") from error
    module: ModuleType = summary
    return module


def _write_job(writer: Any, job: RecordedJob, wall_s: list[float]) -> None:
    for step, ended in zip(job.steps, wall_s, strict=True):
        for tag, name in SERIES.items():
            writer.add_scalar(tag, getattr(step, name), step.number, wall_time=ended)
    wall_s_of = {step.number: ended for step, ended in zip(job.steps, wall_s, strict=True)}
    for each in job.evaluations:
        if each.step in wall_s_of:
            writer.add_scalar(f"evaluation/{each.metric}", each.value, each.step, wall_time=wall_s_of[each.step])
    writer.close()


def ended_s(job: RecordedJob, spans: dict[int, tuple[float, float]]) -> list[float]:
    """When each step ended, seconds on the controller's clock: counted back from when its run had left.

    spans: see `overheads.spans_of`. Saving at the end of a run is taken to last no time. A run that has not left counts
    from its launch on.
    """
    ended: list[float] = []
    later_s, run = 0.0, -1
    for step in reversed(job.steps):
        if step.run != run:
            run = step.run
            launched_s, left_s = spans.get(run, (0.0, math.inf))
            took_s = sum(each.seconds for each in job.steps if each.run == run)
            later_s = left_s if math.isfinite(left_s) else launched_s + took_s
        ended.append(later_s)
        later_s -= step.seconds
    return ended[::-1]


def _began_s(work: Path, jobs: list[RecordedJob], spans: dict[int, tuple[float, float]]) -> float:
    """Seconds since 1970 at which the controller's clock stood at 0: from when the last step of all was written."""
    last_s, number = max((ended_s(job, spans)[-1], job.number) for job in jobs)
    return (work / "jobs" / str(number) / "steps.csv").stat().st_mtime - last_s
