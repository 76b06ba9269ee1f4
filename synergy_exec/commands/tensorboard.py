"""`tensorboard`: writes the losses, batches and step times of a run's jobs for TensorBoard."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from synergy_core.commands import Parser
from synergy_core.errors import InputError
from synergy_exec.controller.execution import STARTED_PARTS
from synergy_exec.controller.journal import Fact, Journal, RunRow, Timing
from synergy_exec.folders import results_of
from synergy_exec.recorded import RecordedJob, open_journal, recorded_jobs
from synergy_runs.facts import Kind

# What it cost to carry decisions out, from the journal of a finished run. All times are seconds.


@dataclass(frozen=True, slots=True)
class FirstStep:
    """A run from the decision to its first step.

    fresh: the first of its job. waited_s: until it was launched, which is when the slots were free. told_s: of the
    first step's `total_s`, what launch, build, load and first step (`parts`) do not account for: messages on their way.
    """

    run: int
    fresh: bool
    total_s: float
    waited_s: float
    parts: dict[str, float]
    told_s: float


@dataclass(frozen=True, slots=True)
class Overheads:
    """What carrying out decisions cost in one run of a trace.

    freed_s: from the decision that stops a run until its slots are free, saving included. saved_s: how long saving
    held training up. decided_s: computing a decision. clock_s: what the controller's clock went through.
    cpu_s: CPU of the controller's process, None while no results are written. resumed: a later controller went on.
    """

    jobs: int
    most_at_once: int
    starts: tuple[FirstStep, ...]
    freed_s: tuple[float, ...]
    saved_s: tuple[float, ...]
    decided_s: tuple[float, ...]
    clock_s: float
    cpu_s: float | None
    resumed: bool

    @property
    def cpu_fraction(self) -> float | None:
        """The share of one core that the controller used; None where that is not known, as of a resumed run."""
        if self.cpu_s is None or self.resumed or self.clock_s <= 0:
            return None
        return self.cpu_s / self.clock_s


def overheads(work: Path) -> Overheads:
    """The overheads of the run in `<policy>-<seed>.work`; its journal says where its results are. Raises InputError."""
    journal = open_journal(work)
    try:
        return _overheads(journal, work)
    finally:
        journal.close()


def _overheads(journal: Journal, work: Path) -> Overheads:
    runs, facts, timings = journal.runs(), journal.facts(), journal.timings()
    spans = spans_of(runs, facts)
    return Overheads(
        jobs=len(journal.jobs()),
        most_at_once=_most_at_once(facts),
        starts=tuple(_starts(runs, spans, timings)),
        freed_s=tuple(_freed(spans, timings)),
        saved_s=tuple(each.parts["save_s"] for each in timings if each.kind == "saved"),
        decided_s=tuple(journal.decisions().decisions().decision_s.tolist()),
        clock_s=journal.last_s(),
        cpu_s=_controller_cpu_s(results_of(work, journal.meta())),
        resumed=any(run.reason == "the controller was restarted" for run in runs),
    )


def spans_of(runs: Iterable[RunRow], facts: Iterable[Fact]) -> dict[int, tuple[float, float]]:
    """When each launched run was launched and when it had left, by its number; infinite while it had not.

    A job's runs are launched one after the other, so its n-th start and its n-th end are the n-th launched run's.
    """
    launched: dict[int, list[float]] = {}
    left: dict[int, list[float]] = {}
    for fact in facts:
        if fact.kind == Kind.START:
            launched.setdefault(fact.job, []).append(fact.time_s)
        elif fact.kind in (Kind.STOP, Kind.FINISH):
            left.setdefault(fact.job, []).append(fact.time_s)
    spans: dict[int, tuple[float, float]] = {}
    turn: dict[int, int] = {}
    for run in runs:
        if not run.launched:
            continue
        at = turn[run.job] = turn.get(run.job, -1) + 1
        ends = left.get(run.job, [])
        spans[run.run] = launched[run.job][at], ends[at] if at < len(ends) else float("inf")
    return spans


def _starts(
    runs: Iterable[RunRow], spans: dict[int, tuple[float, float]], timings: Iterable[Timing]
) -> Iterable[FirstStep]:
    told = {each.run: each for each in timings if each.kind == "started"}
    seen: set[int] = set()
    for run in runs:
        fresh = run.job not in seen
        if run.run in spans:
            seen.add(run.job)
        if run.run not in told or run.run not in spans:
            continue
        first = told[run.run]
        launched_s, _ = spans[run.run]
        parts = {name: first.parts[name] for name in STARTED_PARTS}
        total_s, waited_s = first.time_s - run.decided_s, launched_s - run.decided_s
        yield FirstStep(run.run, fresh, total_s, waited_s, parts, total_s - waited_s - sum(parts.values()))


def _freed(spans: dict[int, tuple[float, float]], timings: Iterable[Timing]) -> Iterable[float]:
    told: dict[int, float] = {}
    for each in timings:
        if each.kind == "stop":
            told.setdefault(each.run, each.time_s)
    for run, told_s in told.items():
        # A run that was told to leave before its launch held no slots.
        if run in spans:
            yield spans[run][1] - told_s


def _most_at_once(facts: Iterable[Fact]) -> int:
    there, most = 0, 0
    for fact in facts:
        there += {int(Kind.SUBMIT): 1, int(Kind.FINISH): -1}.get(fact.kind, 0)
        most = max(most, there)
    return most


def _controller_cpu_s(results: Path | None) -> float | None:
    path = results / "summary.json" if results is not None else None
    if path is None or not path.is_file():
        return None
    return float(json.loads(path.read_text(encoding="utf-8"))["simulation_cpu_s"])


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


def main(arguments: Sequence[str]) -> None:
    """Writes event files and says how to look at them. Raises InputError."""
    parser = Parser(prog="python -m synergy_exec tensorboard", description=__doc__)
    parser.add_argument("work", type=Path, metavar="RUN.work", help="such as results/demo/latest/synergy-0.work")
    parser.add_argument("--out", type=Path, default=None, metavar="DIR", help="RUN.work/tensorboard")
    given = parser.parse_args(arguments)
    into = given.out or given.work / "tensorboard"
    folders = write(given.work, into)
    print(f"wrote {len(folders)} jobs; look at them with: tensorboard --logdir {into}")
