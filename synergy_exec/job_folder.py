"""The folder of a job.

    job.json         number, UUID, name, and the job file
    log.txt          what its workers print, with a line before each run; log-old.txt: what was there before
    checkpoints/     see `training.checkpoint_folder`; each contains the UUID, too
    steps.csv        every step; evaluations.csv: the metrics of every evaluation
    given-up-<n>/    checkpoints and steps from before the job began again from the start

This module needs neither torch nor a controller.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

from synergy_core.errors import InputError
from synergy_exec.job_file import JobFile, job_of
from synergy_runs.files import atomic_file

DESCRIPTION = "job.json"
CHECKPOINTS = "checkpoints"
STEPS, EVALUATIONS = "steps.csv", "evaluations.csv"
COLUMNS: dict[str, dict[str, type]] = {
    STEPS: {"step": int, "batch": int, "rate": float, "loss": float, "seconds": float, "run": int},
    EVALUATIONS: {"step": int, "metric": str, "value": float, "run": int},
}
"""Columns of the files with a line per step, and per metric of an evaluation, over all runs of a job.

step: from 1. batch: samples. rate: factor of the learning rate. seconds: on rank 0. run: number of its run.
"""
PROGRESS = "progress.json"
"""The seconds that a command has run, over all runs, and the step it last reported."""
GIVEN_UP = "given-up-"
LOG, OLD_LOG = "log.txt", "log-old.txt"
LOG_HEADING = "--- run"
"""Begins the line before the output of a run; the run's number follows."""


class Filed(NamedTuple):
    """The contents of `job.json`. uuid: also written in its checkpoints. name: as submitted."""

    number: int
    uuid: str
    name: str
    file: JobFile


def folders(work: Path) -> dict[int, Path]:
    """The folders of a run's jobs by number."""
    found = (work / "jobs").glob("*")
    return {int(each.name): each for each in sorted(found) if each.name.isdecimal() and each.is_dir()}


def describe(folder: Path, job: Filed) -> None:
    """Writes `job.json` into a folder that only its owner can read. Raises InputError."""
    told = {"job": job.number, "uuid": job.uuid, "submitted_as": job.name}
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{folder}: cannot be created ({error.strerror}). The same command resumes the run."
        ) from error
    with atomic_file(folder / DESCRIPTION) as partial:
        partial.write_text(json.dumps({**told, **job.file.values()}, indent=1) + "\n", encoding="utf-8")


def described(folder: Path) -> Filed:
    """Reads `job.json`. Raises InputError if it is missing or not as `describe` wrote it."""
    path = folder / DESCRIPTION
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        number, uuid, name = (values.pop(each) for each in ("job", "uuid", "submitted_as"))
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{path}: not the description of a job ({type(error).__name__}: {error}).") from error
    return Filed(number, uuid, name, job_of(values, str(path)))


def begin_log(folder: Path, run: int) -> None:
    """Writes the heading of a run into the log, before any worker of any node may print."""
    with contextlib.suppress(OSError), (folder / LOG).open("a", encoding="utf-8") as log:  # the disk may be full
        log.write(f"{LOG_HEADING} {run}\n")


def newest_run(folder: Path) -> int:
    """The highest number of a run with a staging folder here; −1 for none."""
    return max((int(each.name.rpartition("-")[2]) for each in folder.glob(f"{CHECKPOINTS}/.run-*")), default=-1)


def give_up(folder: Path) -> Path | None:
    """Moves checkpoints and all files with values by step aside, so that the job begins from the start.

    Returns the folder with them, or None if there are none.
    """
    parts = [*folder.glob(CHECKPOINTS), *folder.glob("*.csv"), *folder.glob(PROGRESS)]
    if not parts:
        return None
    taken = [int(number) for each in folder.glob(f"{GIVEN_UP}*") if (number := each.name[len(GIVEN_UP) :]).isdecimal()]
    aside = folder / f"{GIVEN_UP}{max(taken, default=0) + 1}"
    aside.mkdir()
    for path in parts:
        path.rename(aside / path.name)
    return aside


def give(folder: Path, job: Filed) -> None:
    """Prepares a new job's folder: writes `job.json`, and puts the files of another job aside."""
    # The job is in the journal already. If the disk refuses now, this is tried again and reported at the launch.
    with contextlib.suppress(InputError, OSError):
        if (aside := give_up(folder)) is not None:
            print(f"job {job.number} is new; what lay in its folder is in {aside} now", file=sys.stderr)
        describe(folder, job)


FOLDER = "code"


def freeze(job_class: str, folder: Path) -> None:
    """Copies the file of `/path/file.py:Class` into the job's folder; does nothing for a class of a package.

    Raises InputError if the file cannot be read or written.
    """
    source = _file_of(job_class)
    if source is None:
        return
    try:
        text = source.read_bytes()
    except OSError as error:
        raise InputError(
            f"class: {source.absolute()} cannot be read by the controller on {os.uname().nodename} ({error.strerror}). "
            "Put it on a file system that the controller's machine has, or give package.module:Class."
        ) from error
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with atomic_file(folder / FOLDER / source.name) as partial, partial.open("wb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def kept_code(job_class: str, folder: Path) -> Path | None:
    """The copy of the job's file; None for a class of a package."""
    source = _file_of(job_class)
    if source is None:
        return None
    path = folder / FOLDER / source.name
    return path if path.is_file() else None


def _file_of(job_class: str) -> Path | None:
    place = job_class.rpartition(":")[0]
    return Path(place) if place.endswith(".py") else None
