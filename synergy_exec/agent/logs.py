"""Logs of jobs' workers, in bounded space on disk.

    jobs/<id>/log-<run>.txt       the end of the run's output; log-<run>.old.txt has the output before that

At most `log_mb` megabytes are kept for each job: a run's log is truncated when it reaches a quarter of that, and the
logs of the oldest runs are deleted first. Workers of all nodes append to one file; the agent with rank 0 limits it.
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
    """Opens the run's log for appending; returns the descriptor."""
    path = _path(launch)
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)


def bound(launch: Launch) -> None:
    """Limits the job's logs. It is called about every second, so a job may exceed the limit for that long."""
    if launch.first_rank == 0:
        # An error here is no reason to end a run; the next call comes in a second.
        with contextlib.suppress(OSError, InputError):
            limit_bytes = launch.log_mb * MB
            _truncate(_path(launch), int(limit_bytes / 4))
            _delete_oldest(launch, limit_bytes)


def logs(folder: Path) -> dict[int, list[Path]]:
    """The log files in a job's folder by run, in order; the files of a run in the order of their contents."""
    found = [(int(match[1]), not match[2], path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    runs: dict[int, list[Path]] = {}
    for run, _, path in sorted(found):
        runs.setdefault(run, []).append(path)
    return runs


def _path(launch: Launch) -> Path:
    return Path(launch.folder) / f"log-{launch.run}.txt"


def _truncate(path: Path, most_bytes: int) -> None:
    """Moves the end of the log into the old log. Workers hold the file open, so it is emptied and not renamed; output
    printed at the moment between copying and emptying is lost.
    """
    size = path.stat().st_size
    if size <= most_bytes:
        return
    kept = path.with_name(f"{path.stem}.old.txt")
    with path.open("rb") as file, atomic_file(kept) as partial, partial.open("wb", buffering=0) as copy:
        file.seek(size - most_bytes)
        copy.write(file.read())
        os.truncate(path, 0)


def _delete_oldest(launch: Launch, limit_bytes: float) -> None:
    """Deletes the logs of the oldest runs until the job's logs fit, and notes this in the present log."""
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
