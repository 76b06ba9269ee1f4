"""What a job's workers print, on disk in bounded space.

    jobs/<id>/log-<run>.txt       what the run prints; log-<run>.old.txt: what it printed before, once that was much

Of each job `log_mb` are kept: a run's log is turned over when it is a quarter of that, and the oldest runs' go first.
Workers of all nodes append to one file; the agent that has rank 0 bounds it.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from synergy_core.errors import InputError
from synergy_core.units import MB
from synergy_exec.messages import Launch
from synergy_runs.files import atomic_file

_NAME = re.compile(r"log-(\d+)(\.old)?\.txt")


def opened(launch: Launch) -> int:
    """A descriptor that appends to the run's log."""
    path = _path(launch)
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)


def bound(launch: Launch) -> None:
    """Keeps the job's logs within their space; called about every second, so a job may exceed it for so long."""
    if launch.first_rank == 0:
        # A log that cannot be bounded now can be in a second; it is no reason to end a run.
        with contextlib.suppress(OSError, InputError):
            limit_bytes = launch.log_mb * MB
            _turn_over(_path(launch), int(limit_bytes / 4))
            _forget(launch, limit_bytes)


def logs(folder: Path) -> dict[int, list[Path]]:
    """The logs in a job's folder by run, in order, each in the order in which it was written."""
    found = [(int(match[1]), not match[2], path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    runs: dict[int, list[Path]] = {}
    for run, _, path in sorted(found):
        runs.setdefault(run, []).append(path)
    return runs


def _path(launch: Launch) -> Path:
    return Path(launch.folder) / f"log-{launch.run}.txt"


def _turn_over(path: Path, most_bytes: int) -> None:
    """What the log ends with becomes the old one. Workers hold the file open, so it is emptied, not renamed; what is
    printed in the very moment before that is lost.
    """
    size = path.stat().st_size
    if size <= most_bytes:
        return
    kept = path.with_name(f"{path.stem}.old.txt")
    with path.open("rb") as file, atomic_file(kept) as partial, partial.open("wb", buffering=0) as copy:
        file.seek(size - most_bytes)
        copy.write(file.read())
        os.truncate(path, 0)


def _forget(launch: Launch, limit_bytes: float) -> None:
    """Removes the logs of the oldest runs until the job's fit, and says so in the present one."""
    runs = logs(Path(launch.folder))
    total = sum(path.stat().st_size for paths in runs.values() for path in paths)
    for run, paths in runs.items():
        if total <= limit_bytes or run >= launch.run:
            return
        for path in paths:
            total -= path.stat().st_size
            path.unlink()
        with _path(launch).open("a", encoding="utf-8") as file:
            file.write(f"the log of run {run} was removed: log_mb={launch.log_mb:g} of this job's logs are kept\n")
