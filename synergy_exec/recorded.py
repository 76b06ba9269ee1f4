"""What the work folder of a run holds: its journal, its jobs, and every step they trained."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from synergy_core.errors import InputError
from synergy_exec import job_folder
from synergy_exec.controller.journal import Journal
from synergy_exec.job_file import JobFile
from synergy_exec.job_folder import kept_code
from synergy_exec.wire import whole_lines

_CELLS = 6


class RecordedStep(NamedTuple):
    """A line of steps.csv. number: from 1. rate: the factor on the learning rate. run: of the job, that trained it."""

    number: int
    batch: int
    rate: float
    loss: float
    seconds: float
    run: int


class RecordedValue(NamedTuple):
    """A line of evaluations.csv: what a metric was after so many steps. run: of the job, that evaluated."""

    step: int
    metric: str
    value: float
    run: int


@dataclass(frozen=True, slots=True)
class RecordedJob:
    """A job that has a folder. name: as it was submitted. steps: each once, in order. evaluations: each once, by step.
    code: the copy of its file, None of a class of a package.
    """

    number: int
    name: str
    file: JobFile
    steps: tuple[RecordedStep, ...]
    evaluations: tuple[RecordedValue, ...] = ()
    code: Path | None = None


def open_journal(work: Path) -> Journal:
    """The journal in a work folder. Raises InputError where there is none."""
    path = work / "journal.sqlite"
    if not path.is_file():
        raise InputError(
            f"{work}: no journal.sqlite in it; expected the work folder of a run, such as "
            f"results/demo/latest/synergy-0.work.{_newest(work)}"
        )
    return Journal(path)


def _newest(work: Path) -> str:
    """Where a run of that name is in the newest folder that has one, in words: `latest` may be the simulator's."""
    runs = sorted(each for each in work.parent.parent.glob(f"*/{work.name}") if (each / "journal.sqlite").is_file())
    return f" The newest of that name: {runs[-1]}." if runs else ""


def recorded_jobs(work: Path) -> list[RecordedJob]:
    """All jobs of a run that have a folder, by number. Raises InputError for what cannot be read."""
    folders = sorted(job_folder.folders(work).items())
    return [_job(folder) for _, folder in folders if (folder / job_folder.DESCRIPTION).is_file()]


def chosen(jobs: list[RecordedJob], wanted: list[str]) -> list[RecordedJob]:
    """The jobs of these names or numbers; all, where none is wanted. Raises InputError for one that is not there."""
    known = {each.name: each for each in jobs} | {str(each.number): each for each in jobs}
    if missing := [each for each in wanted if each not in known]:
        names = ", ".join(each.name for each in jobs) or "none"
        raise InputError(f"job '{missing[0]}' has no folder in this run; those that do: {names}.")
    numbers = {known[each].number for each in wanted}
    return [each for each in jobs if each.number in numbers or not wanted]


def _job(folder: Path) -> RecordedJob:
    filed = job_folder.described(folder)
    return RecordedJob(
        filed.number,
        filed.name,
        filed.file,
        steps_of(folder / job_folder.STEPS),
        evaluations(folder / "evaluations.csv"),
        kept_code(filed.file.job_class, folder),
    )


def steps_of(path: Path) -> tuple[RecordedStep, ...]:
    """The steps of a steps.csv in order; of one trained twice the later run, without a line cut off by a crash."""
    latest: dict[int, RecordedStep] = {}
    for line in whole_lines(path):
        cells = line.split(",")
        if len(cells) != _CELLS:
            continue
        try:
            step = RecordedStep(
                int(cells[0]), int(cells[1]), float(cells[2]), float(cells[3]), float(cells[4]), int(cells[5])
            )
        except ValueError:
            continue
        if step.run >= latest.get(step.number, step).run:
            latest[step.number] = step
    return tuple(latest[number] for number in sorted(latest))


def evaluations(path: Path) -> tuple[RecordedValue, ...]:
    """The lines of an evaluations.csv by step, metrics as they came; of one evaluated twice the later run."""
    latest: dict[tuple[int, str], RecordedValue] = {}
    for line in whole_lines(path):
        cells = line.split(",")
        try:
            step, metric, value, run = cells
            found = RecordedValue(int(step), metric, float(value), int(run))
        except ValueError:
            continue  # the heading, or a line that is none
        if found.run >= latest.get((found.step, metric), found).run:
            latest[found.step, metric] = found
    return tuple(sorted(latest.values(), key=lambda each: each.step))
