"""The folder of a job's checkpoints: atomic writes and deletions, and a fence against older runs of the job.

    step-00000120           a complete checkpoint: renamed to this after all its files were on disk
    .partial-…              being written or deleted; useless once its process is gone
    .run-00000005           the staging folder of run 5: it writes and deletes checkpoints by renames through it

Only rank 0 of a job's newest run changes the folder. A newer run removes the staging folders of older runs before it
reads anything. From then on every rename by an older run fails, wherever that run had stopped. This needs no clock, and
no lock that a frozen process would keep. A rename is atomic on every file system that nodes share. If there is only one
process, the folder itself is used for staging.
"""

from __future__ import annotations

import re
import shutil
import uuid
from contextlib import suppress
from pathlib import Path

from synergy_exec.training import integrity
from synergy_runs.files import flush

_COMPLETE = re.compile(r"step-(\d{8,})")
_PARTIAL = ".partial-"


def name(step: int) -> str:
    """The folder name of the checkpoint after `step` steps."""
    return f"step-{step:08d}"


def newest_first(folder: Path) -> list[Path]:
    """Folders of complete checkpoints, newest first."""
    if not folder.is_dir():
        return []
    found = [(int(match[1]), each) for each in folder.iterdir() if (match := _COMPLETE.fullmatch(each.name))]
    return [path for _, path in sorted(found, reverse=True)]


MIN_WRITE_BYTES_PER_S = 200e6
"""Assumed of a slow file system that nodes share."""


def saving_s(folder: Path) -> float:
    """Seconds that a checkpoint as large as the newest one may take to write; 0 before any, or if it cannot be read."""
    with suppress(OSError):  # deleted meanwhile, or of a user who lets nobody read it
        newest = newest_first(folder)[:1]
        return sum(file.stat().st_size for each in newest for file in each.iterdir()) / MIN_WRITE_BYTES_PER_S
    return 0.0


def begin(staging: Path, step: int) -> Path:
    """Makes a new partial folder and deletes abandoned ones. Raises FileNotFoundError if the staging folder is gone."""
    for stale in staging.glob(f"{_PARTIAL}*"):
        shutil.rmtree(stale, ignore_errors=True)
    partial = staging / f"{_PARTIAL}{name(step)}-{uuid.uuid4().hex[:8]}"
    partial.mkdir()
    return partial


def publish(folder: Path, partial: Path, step: int) -> None:
    """Renames the partial folder to its final name; the rename is on disk when this returns.

    A folder that already has this name can only be a damaged checkpoint that the run skipped; it is deleted.
    """
    final = folder / name(step)
    flush(partial)
    if final.exists():
        _delete(final, partial.parent)
    partial.rename(final)
    flush(folder)


def prune(folder: Path, staging: Path, step: int, keep: int) -> None:
    """Deletes all but the newest `keep` complete checkpoints, after the one of `step` has been published.

    Checkpoints of later steps are deleted, too: `load` skipped them as damaged.
    """
    kept = 0
    for path in newest_first(folder):
        if kept < keep and int(path.name.removeprefix("step-")) <= step and _looks_complete(path):
            kept += 1
        else:
            _delete(path, staging)


def _looks_complete(path: Path) -> bool:
    """Whether all files of the checkpoint are there with the sizes that were written."""
    try:
        integrity.read(path).check(path, sizes_only=True)
    except integrity.DamagedError:
        return False
    return True


def _delete(path: Path, staging: Path) -> None:
    # Rename first: a deletion that is interrupted must not look like a damaged checkpoint.
    hidden = staging / f"{_PARTIAL}deleted-{path.name}-{uuid.uuid4().hex[:8]}"
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


_DESK = re.compile(r"\.run-(\d{8,})")


class FencedError(Exception):
    """A newer run of the job has begun, so this run may not change the folder any more."""


class Staging:
    """The staging folder of a run, inside the folder of the job's checkpoints."""

    def __init__(self, checkpoints: Path, run: int) -> None:
        self.path, self._run = checkpoints / f".run-{run:08d}", run

    def take_over(self) -> Staging:
        """Takes the folder over from older runs and returns self. Raises FencedError if a newer run has taken it."""
        self.path.mkdir(parents=True, exist_ok=True)
        # This looks after creating its own folder, so of two runs that begin at once at least one sees the other.
        there = {int(found[1]): each for each in self.path.parent.iterdir() if (found := _DESK.fullmatch(each.name))}
        if max(there, default=self._run) > self._run:
            shutil.rmtree(self.path, ignore_errors=True)
            raise FencedError(self._reason)
        for number, older in there.items():
            if number < self._run:
                # The older folder may be gone: removed by a run in between, or by a newer run, which removes ours, too.
                with suppress(FileNotFoundError):
                    taken = older.rename(self.path / older.name)
                    shutil.rmtree(taken, ignore_errors=True)
                self.check()
        return self

    def check(self) -> None:
        """Raises FencedError if a newer run has taken over."""
        try:
            self.path.stat()
        except FileNotFoundError:
            raise FencedError(self._reason) from None
        except OSError:
            # The file system does not answer now. A later write will report that.
            return

    @property
    def _reason(self) -> str:
        return f"run {self._run} is over, since a newer run of the same job has begun"
