"""The folder of a job.

    job.json         number, UUID, name, and the job file
    log.txt          what its workers print, with a line before each run; log-old.txt: what was there before
    checkpoints/     see `training.checkpoint_folder`; each contains the UUID, too
    steps.csv        every step; evaluations.csv: the metrics of every evaluation; tensorboard/: both, on request
    source/          the code as it was submitted; code: a link to the job's folder in it, in which a command runs
    given-up-<n>/    checkpoints and steps from before the job began again from the start

This module needs neither torch nor a controller.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from synergy_core.errors import InputError
from synergy_core.units import MB
from synergy_exec.job_file import JobFile, job_of
from synergy_runs.files import atomic_file, flush

DESCRIPTION = "job.json"
CHECKPOINTS = "checkpoints"
STEPS, EVALUATIONS = "steps.csv", "evaluations.csv"
TENSORBOARD = "tensorboard"
REPORTS = "report-*.jsonl"
"""What a command reports, a file for each run."""
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
OWN_FILES = (DESCRIPTION, PROGRESS, REPORTS, f"{GIVEN_UP}*", LOG, OLD_LOG)
"""Patterns of the files that Synergy writes at the top of the folder of a command."""


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


def name_of(folder: Path) -> str:
    """The job's name in `job.json`. Nothing else is read, because there may be thousands of folders."""
    try:
        return str(json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))["submitted_as"])
    except (OSError, ValueError, KeyError, TypeError):
        return folder.name


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


# The copy of a job's code.


SOURCE, FOLDER = "source", "code"
MAX_CODE_MB, MAX_CODE_FILES = 50, 10_000
"""A folder with more than this is not copied."""
_GIT_S = 60.0
NEVER_COPIED = (".git", "__pycache__")


def freeze(file: JobFile, folder: Path, without: Collection[Path] = ()) -> tuple[JobFile, str]:
    """Copies a job's code into its folder, so that later changes and other jobs do not touch it.

    Of a command, the git work tree of its directory or else the directory; of `/path/file.py:Class`, the Python files
    in the folder of that file. Returns the job, whose `directory` is then below its folder, and what its user should
    know, or "". without: folders that are left out. Raises InputError if the code cannot be read or copied.
    """
    source = None if file.trained is None else _file_of(file.trained.job_class)
    directory = "" if file.command is None else file.command.directory
    if file.code == "in_place" or not (source or directory):
        return file, ""
    discard_code(folder)
    try:
        where = root = (source.parent if source else Path(directory)).resolve(strict=True)
        ignored: list[Path] = []
        if source is not None:
            source.read_bytes()
        elif (top := _git(where, "rev-parse", "--show-toplevel")) and not _git(where, "check-ignore", "."):
            root = Path(top[0])
            ignored = [root / each for each in _git(root, "ls-files", "-oiz", "--exclude-standard", "--directory")]
        left_out = {each.resolve() for each in without} - {root, *root.parents}
        room = [int(MAX_CODE_MB * MB), MAX_CODE_FILES]
        found = _below(root, left_out.union(ignored), room, ".py" if source else "")
        if found is None:
            large = f"{root} has more than {MAX_CODE_MB} MB or {MAX_CODE_FILES:,} files"
            if file.code == "copy":
                raise InputError(f"code=copy: {large}. Remove what is not code, or set code: in_place.")
            if source is None:
                return file, f"{large}: the job runs in {where} itself (code: in_place)"
            found = [root / source.name]
        below = {each: _below(each, left_out, room) for each in ignored}
        found += [file for files in below.values() for file in files or ()]
        linked = [each for each, files in below.items() if files is None]
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for each in (*found, *linked):
            target = folder / SOURCE / each.relative_to(root)
            target.parent.mkdir(parents=True, exist_ok=True)
            if each in linked or (each.is_symlink() and not each.resolve().is_relative_to(root)):
                target.symlink_to(each.resolve())
            else:
                shutil.copy2(each, target, follow_symlinks=False)
                if not each.is_symlink():
                    flush(target)
        (folder / FOLDER).symlink_to(Path(SOURCE) / where.relative_to(root))
    except OSError as error:
        discard_code(folder)
        raise InputError(
            f"{'class' if source else 'directory'}: {source or directory} cannot be read by the controller on "
            f"{os.uname().nodename} ({error.strerror}). Put it on a file system that the controller's machine has, and "
            f"see that there is room in {folder}."
        ) from error
    names = ", ".join(str(each.relative_to(root)) for each in linked)
    note = f"the job uses the originals of what git ignores and is too large to be copied: {names}" if linked else ""
    if file.command is None:
        return file, note
    return dataclasses.replace(file, command=dataclasses.replace(file.command, directory=FOLDER)), note


def _git(folder: Path, *words: str) -> list[str]:
    """The output of git, split at null bytes; empty if git fails or is not installed."""
    try:
        text = subprocess.run(["git", *words], cwd=folder, capture_output=True, check=True, timeout=_GIT_S).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [os.fsdecode(each) for each in text.rstrip(b"\n").split(b"\0") if each]


def _below(path: Path, left_out: Collection[Path], room: list[int], ending: str = "") -> list[Path] | None:
    """The files at or below a path that can be read; None if there are too many. room: bytes and files for others."""
    found, level = list[Path](), [path]
    while level and len(found) <= room[1]:
        each = level.pop()
        unreadable = each != path and not each.is_symlink() and not os.access(each, os.R_OK)
        if each.name in NEVER_COPIED or each in left_out or unreadable:
            continue
        if each.is_dir() and not each.is_symlink():
            level += each.iterdir()
        elif each.is_symlink() or (each.is_file() and each.name.endswith(ending)):
            found.append(each)
    left = [room[0] - sum(each.lstat().st_size for each in found), room[1] - len(found)]
    if min(left) < 0:
        return None
    room[:] = left
    return found


def discard_code(folder: Path) -> None:
    """Removes the copy of a job that could not be submitted, and its folder if nothing else is there."""
    shutil.rmtree(folder / SOURCE, ignore_errors=True)
    with contextlib.suppress(OSError):
        (folder / FOLDER).unlink(missing_ok=True)
        folder.rmdir()


def kept_code(job_class: str, folder: Path) -> Path | None:
    """The copy of the file of a job's class; None for a class of a package, or one that is used in place."""
    source = _file_of(job_class)
    if source is None:
        return None
    path = folder / FOLDER / source.name
    return path if path.is_file() else None


def _file_of(job_class: str) -> Path | None:
    place = job_class.rpartition(":")[0]
    return Path(place) if place.endswith(".py") else None
