"""The folder of a job's checkpoints: which there are, how one appears and goes in one instant, and who may change it.

    step-00000120           complete: it got this name by a rename, after all its files were on disk
    .partial-…              being written or being deleted; of no use once its process is gone
    .run-00000005           run 5's desk: what it writes or deletes passes through it, by renames

Only rank 0 of a job's newest run changes the folder. A newer run removes the desks of older runs before it reads
anything; from then on every rename of theirs fails, wherever they had stopped. This needs no clock and no lock, which a
frozen process would hold for good, and a rename is one change on every file system that nodes share. Where there is
only one process anyway, the folder itself is the desk.
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
    """The folder name of the checkpoint after so many steps."""
    return f"step-{step:08d}"


def newest_first(folder: Path) -> list[Path]:
    """Folders of complete checkpoints, newest first."""
    if not folder.is_dir():
        return []
    found = [(int(match[1]), each) for each in folder.iterdir() if (match := _COMPLETE.fullmatch(each.name))]
    return [path for _, path in sorted(found, reverse=True)]


def begin(desk: Path, step: int) -> Path:
    """A new partial folder; those that were given up are deleted. Raises FileNotFoundError without the desk."""
    for stale in desk.glob(f"{_PARTIAL}*"):
        shutil.rmtree(stale, ignore_errors=True)
    partial = desk / f"{_PARTIAL}{name(step)}-{uuid.uuid4().hex[:8]}"
    partial.mkdir()
    return partial


def publish(folder: Path, partial: Path, step: int) -> None:
    """Gives the partial folder its complete name; lasting when it returns.

    A folder of that name can only be a damaged checkpoint that the run passed over; it is deleted.
    """
    final = folder / name(step)
    flush(partial)
    if final.exists():
        _delete(final, partial.parent)
    partial.rename(final)
    flush(folder)


def prune(folder: Path, desk: Path, step: int, keep: int) -> None:
    """Delete all but the newest `keep` that look complete, after the one of `step` has been published.

    Later steps belong to a past that was given up: `load` passed over them as damaged.
    """
    kept = 0
    for path in newest_first(folder):
        if kept < keep and int(path.name.removeprefix("step-")) <= step and _looks_complete(path):
            kept += 1
        else:
            _delete(path, desk)


def _looks_complete(path: Path) -> bool:
    """Whether all its files are there, each as long as it was written."""
    try:
        integrity.read(path).check(path, sizes_only=True)
    except integrity.DamagedError:
        return False
    return True


def _delete(path: Path, desk: Path) -> None:
    # Out of sight first: a deletion that is cut off must not look like damage.
    hidden = desk / f"{_PARTIAL}deleted-{path.name}-{uuid.uuid4().hex[:8]}"
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


_DESK = re.compile(r"\.run-(\d{8,})")


class FencedError(Exception):
    """A newer run of the job has begun; what this one would still change is not wanted."""


class Desk:
    """A run's, in the folder of a job's checkpoints. path: the folder that it is."""

    def __init__(self, checkpoints: Path, run: int) -> None:
        self.path, self._run = checkpoints / f".run-{run:08d}", run

    def taken(self) -> Desk:
        """Itself, once it has taken the folder over from older runs. Raises FencedError where a newer one has."""
        self.path.mkdir(parents=True, exist_ok=True)
        # Looked for after the own is there: of two that begin at once at least one sees the other.
        there = {int(found[1]): each for each in self.path.parent.iterdir() if (found := _DESK.fullmatch(each.name))}
        if max(there, default=self._run) > self._run:
            shutil.rmtree(self.path, ignore_errors=True)
            raise FencedError(self._reason)
        for number, older in there.items():
            if number < self._run:
                # Gone: taken by a run between the two, whose own desk is next, or with this one by a newer run.
                with suppress(FileNotFoundError):
                    taken = older.rename(self.path / older.name)
                    shutil.rmtree(taken, ignore_errors=True)
                self.require()
        return self

    def require(self) -> None:
        """Raises FencedError where a newer run has taken over."""
        try:
            self.path.stat()
        except FileNotFoundError:
            raise FencedError(self._reason) from None
        except OSError:
            # The file system cannot tell just now; whoever writes will hear of it.
            return

    @property
    def _reason(self) -> str:
        return f"run {self._run} is over, since a newer run of the same job has begun"
