"""Which run may change a job's folder: the newest that has begun. An older one cannot, whenever it wakes up.

    checkpoints/.run-00000005       run 5's desk: what it writes, replaces or deletes passes through it, by renames
    checkpoints/.run-00000005/over  the run has ended by itself, and writes nothing any more

A newer run takes the older ones' desks away before it reads anything. From then on every rename of theirs fails, at
whatever point they had stopped. No lock is needed, which a frozen process would hold for good, and no clock; renames
are one change on every file system that nodes share. One process of a run (rank 0) takes, and changes the folder.
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from synergy_exec.training import shelf

_DESK = re.compile(r"\.run-(\d{8,})")
_OVER = "over"


class FencedError(Exception):
    """A newer run of the job has begun; what this one would still change is not wanted."""


class Desk:
    """A run's, in the folder of a job's checkpoints. path: the folder that it is."""

    def __init__(self, checkpoints: Path, run: int) -> None:
        self.path, self._run = checkpoints / f".run-{run:08d}", run
        self._alone = True

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
                self._alone = self._alone and (older / _OVER).exists()
                # Gone: taken by a run between the two, whose own desk is next, or with this one by a newer run.
                with suppress(FileNotFoundError):
                    self._take_away(older)
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

    def take_file(self, path: Path) -> None:
        """Makes a file this run's: what an older one that was cut off may still write into it goes nowhere.

        Raises FencedError.
        """
        if self._alone or not path.exists():
            return
        try:
            same_disk = self.path.stat().st_dev == path.stat().st_dev
            # Else beside the file, where a run that is overtaken at this very moment is not kept out.
            copy = self.path / path.name if same_disk else path.with_name(f".{path.name}-{self._run}")
            shutil.copyfile(path, copy)
            with copy.open("rb") as file:
                os.fsync(file.fileno())
            copy.rename(path)
        except FileNotFoundError:
            raise FencedError(self._reason) from None

    def leave(self) -> None:
        """The run writes nothing any more. Its desk stays, so that no older run begins."""
        with suppress(FileNotFoundError):
            (self.path / _OVER).touch()

    @property
    def _reason(self) -> str:
        return f"run {self._run} is over, since a newer run of the same job has begun"

    def _take_away(self, older: Path) -> None:
        taken = self.path / older.name
        older.rename(taken)
        # What it was replacing when it was cut off is put back; also what one before it was, which it had not yet.
        shelf.mend(self.path.parent, taken.rglob(f"{shelf.REPLACED}*"))
        shutil.rmtree(taken, ignore_errors=True)
