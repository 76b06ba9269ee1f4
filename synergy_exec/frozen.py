"""The code of a job that is given as a file, kept in the job's folder as it was when it was submitted.

jobs/<id>/code/mine.py      read at every run of the job, whatever becomes of the file that was submitted
"""

from __future__ import annotations

import os
from pathlib import Path

from synergy_core.errors import InputError
from synergy_runs.atomic import atomic_file

FOLDER = "code"


def freeze(job_class: str, folder: Path) -> None:
    """Copies the file of `/path/file.py:Class` into the job's folder; a class of a package has none.

    Raises InputError where it cannot be read here, or not be written.
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
    """The copy of the job's file; None of a class of a package, and of jobs from before copies were kept."""
    source = _file_of(job_class)
    if source is None:
        return None
    path = folder / FOLDER / source.name
    return path if path.is_file() else None


def _file_of(job_class: str) -> Path | None:
    place = job_class.rpartition(":")[0]
    return Path(place) if place.endswith(".py") else None
