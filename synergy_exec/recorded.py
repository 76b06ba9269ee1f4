"""What the work folder of a run holds: its journal, its jobs, and every step they trained."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from synergy_core.errors import InputError
from synergy_exec.controller.journal import Journal
from synergy_exec.job_file import JobFile, job_of

_CELLS = 6


class RecordedStep(NamedTuple):
    """A line of steps.csv. number: from 1. rate: the factor on the learning rate. run: of the job, that trained it."""

    number: int
    batch: int
    rate: float
    loss: float
    seconds: float
    run: int


@dataclass(frozen=True, slots=True)
class RecordedJob:
    """A job that was launched at least once. name: as it was submitted. steps: each once, in order."""

    number: int
    name: str
    file: JobFile
    steps: tuple[RecordedStep, ...]


def open_journal(work: Path) -> Journal:
    """The journal in a work folder. Raises InputError where there is none."""
    path = work / "journal.sqlite"
    if not path.is_file():
        raise InputError(
            f"{work}: no journal.sqlite in it; expected the work folder of a run, such as results/demo/synergy-0.work."
        )
    return Journal(path)


def recorded_jobs(work: Path) -> list[RecordedJob]:
    """All jobs of a run that have a folder, by number. Raises InputError for what cannot be read."""
    folders = (each for each in (work / "jobs").glob("*") if each.name.isdigit() and (each / "job.json").is_file())
    return [_job(folder) for folder in sorted(folders, key=lambda each: int(each.name))]


def chosen(jobs: list[RecordedJob], wanted: list[str]) -> list[RecordedJob]:
    """The jobs of these names or numbers; all, where none is wanted. Raises InputError for one that is not there."""
    known = {each.name: each for each in jobs} | {str(each.number): each for each in jobs}
    if missing := [each for each in wanted if each not in known]:
        names = ", ".join(each.name for each in jobs) or "none"
        raise InputError(f"job '{missing[0]}' has no folder in this run; those that do: {names}.")
    numbers = {known[each].number for each in wanted}
    return [each for each in jobs if each.number in numbers or not wanted]


def _job(folder: Path) -> RecordedJob:
    path = folder / "job.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        number, name = int(values.pop("job")), str(values.pop("submitted_as"))
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise InputError(f"{path}: not the description of a job ({type(error).__name__}: {error}).") from error
    return RecordedJob(number, name, job_of(values, str(path)), _steps(folder / "steps.csv"))


def _steps(path: Path) -> tuple[RecordedStep, ...]:
    """The steps of a steps.csv in order; of one trained twice the later run, without a line cut off by a crash."""
    if not path.is_file():
        return ()
    latest: dict[int, RecordedStep] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        cells = line.split(",")
        if len(cells) != _CELLS:
            continue
        try:
            step = RecordedStep(
                int(cells[0]), int(cells[1]), float(cells[2]), float(cells[3]), float(cells[4]), int(cells[5])
            )
        except ValueError:
            continue
        latest[step.number] = step
    return tuple(latest[number] for number in sorted(latest))
