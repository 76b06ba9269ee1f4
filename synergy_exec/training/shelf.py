"""The folder of a job's checkpoints: which are there, in what order, and how one appears and goes in one instant.

    step-00000120           complete: it got this name by a rename, after all its files were on disk
    .partial-…              being written or being deleted; of no use once its process is gone
    .replaced-step-00000120 the former one of this name, while the new one takes its place

One process at a time changes the folder (rank 0 of the job's newest run). What it writes, replaces or deletes passes
through its desk, a folder on the same file system: without it nothing changes any more (fence.py). Where there is only
one process anyway, the folder itself is the desk.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Iterable
from pathlib import Path

from synergy_exec.training import integrity

REPLACED = ".replaced-"
_COMPLETE = re.compile(r"step-(\d{8,})")
_PARTIAL = ".partial-"


def name(step: int) -> str:
    """The folder name of the checkpoint after so many steps."""
    return f"step-{step:08d}"


def newest_first(folder: Path) -> list[Path]:
    """All that have a complete one's name, the most steps first; undoes a replacement that was cut off."""
    if not folder.is_dir():
        return []
    mend(folder, folder.glob(f"{REPLACED}*"))
    return listed(folder)


def listed(folder: Path) -> list[Path]:
    """The same, for one who only looks, perhaps while another writes: what was cut off stays as it is."""
    if not folder.is_dir():
        return []
    found = [(int(match[1]), each) for each in folder.iterdir() if (match := _COMPLETE.fullmatch(each.name))]
    return [path for _, path in sorted(found, reverse=True)]


def begin(folder: Path, desk: Path, step: int) -> Path:
    """A new partial folder; those that were given up are deleted. Raises FileNotFoundError without the desk."""
    for stale in desk.glob(f"{_PARTIAL}*"):
        shutil.rmtree(stale, ignore_errors=True)
    mend(folder, desk.glob(f"{REPLACED}*"))
    partial = desk / f"{_PARTIAL}{name(step)}-{uuid.uuid4().hex[:8]}"
    partial.mkdir()
    return partial


def publish(folder: Path, partial: Path, step: int) -> None:
    """Give the partial folder its complete name, in place of any former one of that name; lasting when it returns."""
    final, former = folder / name(step), partial.with_name(f"{REPLACED}{name(step)}")
    _sync(partial)
    # No rename replaces a folder that is not empty. If we die between the two, `mend` brings the former one back.
    if final.exists():
        final.rename(former)
    partial.rename(final)
    _sync(folder)
    if former.exists():
        _delete(former, former.parent)


def prune(folder: Path, desk: Path, step: int, keep: int) -> None:
    """Delete all but the newest `keep` that look complete, after the one of `step` has been published.

    Later steps belong to a past that was given up: `load` passed over them as damaged.
    """
    kept = 0
    for path in newest_first(folder):
        if kept < keep and int(path.name.removeprefix("step-")) <= step and looks_complete(path):
            kept += 1
        else:
            _delete(path, desk)


def mend(folder: Path, replaced: Iterable[Path]) -> None:
    """Put back what was being replaced, where nothing has taken its place."""
    for former in list(replaced):
        final = folder / former.name.removeprefix(REPLACED)
        if final.exists():
            _delete(former, former.parent)
        else:
            former.rename(final)


def looks_complete(path: Path) -> bool:
    """Whether all its files are there, each as long as it was written."""
    try:
        return not integrity.damage(path, integrity.read(path).files, sizes_only=True)
    except integrity.DamagedError:
        return False


def _delete(path: Path, desk: Path) -> None:
    # Out of sight first: a deletion that is cut off must not look like damage.
    hidden = desk / f"{_PARTIAL}deleted-{path.name.lstrip('.')}-{uuid.uuid4().hex[:8]}"
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
