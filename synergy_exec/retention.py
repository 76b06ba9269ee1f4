"""What is kept of jobs that have ended. Nothing is removed that was not named before, with its bytes.

`everything`. `last_checkpoint`: of the checkpoints the newest whole one, and none that was given up. `remove`: neither
checkpoints nor logs, nor data that the job made, once nothing has been written for some days; what the job was, and its
steps with their losses, stay.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from synergy_exec import job_folder
from synergy_exec.training import shelf

Retention = Literal["everything", "last_checkpoint", "remove"]
DAY_S = 86_400.0


class Removal(NamedTuple):
    """A file or folder that may go, and its bytes."""

    path: Path
    size_bytes: int

    def __str__(self) -> str:
        return f"{self.path} ({self.size_bytes:,} bytes)"


def removals(work: Path, ended: Collection[int], keep: Retention, days: float) -> list[Removal]:
    """What `keep` does not keep of the jobs of a work folder that have ended, and that no process works on.

    days: see `remove`. The newest whole checkpoint stays under `last_checkpoint`; where none is whole, all do.
    """
    folders = [folder for number, folder in job_folder.folders(work).items() if number in ended]
    return [
        Removal(path, sum(map(_size_bytes, _files(path)))) for folder in folders for path in _unkept(folder, keep, days)
    ]


def remove(what: Iterable[Removal]) -> None:
    """Removes them. A checkpoint goes from sight first: one that is cut off must not look like damage."""
    for path, _ in what:
        if path.is_dir():
            hidden = path.with_name(f".partial-removed-{path.name.lstrip('.')}")
            shutil.rmtree(hidden, ignore_errors=True)
            path.rename(hidden)
            shutil.rmtree(hidden, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def tidy(work: Path, ended: Collection[int], keep: Retention, days: float) -> None:
    """Removes what `keep` does not keep, each named before."""
    what = removals(work, ended, keep, days)
    for each in what:
        print(f"retention={keep} removes {each}", file=sys.stderr)
    remove(what)


def _unkept(folder: Path, keep: Retention, days: float) -> list[Path]:
    checkpoints = folder / job_folder.CHECKPOINTS
    given_up = sorted(folder.glob(f"{job_folder.GIVEN_UP}*"))
    if keep == "last_checkpoint":
        found = shelf.listed(checkpoints)
        whole = next((path for path in found if shelf.looks_complete(path)), None)
        return [path for path in found if path != whole] + given_up if whole is not None else []
    if keep == "remove" and time.time() - max(map(_written_s, _files(folder)), default=0.0) > days * DAY_S:
        logs = sorted(folder.glob("log-*"))
        return [path for path in (checkpoints, folder / "data", *given_up, *logs) if path.exists()]
    return []


def _files(path: Path) -> Iterator[Path]:
    if path.is_dir() and not path.is_symlink():
        for place, _, names in os.walk(path):
            yield from (Path(place) / name for name in names)
    else:
        yield path


def _size_bytes(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def _written_s(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0
