"""The folder of a job's checkpoints: which are there, in what order, and how one appears and goes in one instant.

    step-00000120           complete: it got this name by a rename, after all its files were on disk
    .partial-…              being written or being deleted; of no use once its process is gone
    .replaced-step-00000120 the former one of this name, while the new one takes its place

One process at a time changes the folder (rank 0 of the job's only run).
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from pathlib import Path

from synergy_exec.training import integrity

_COMPLETE = re.compile(r"step-(\d{8,})")
_PARTIAL = ".partial-"
_REPLACED = ".replaced-"


def name(step: int) -> str:
    """The folder name of the checkpoint after so many steps."""
    return f"step-{step:08d}"


def newest_first(folder: Path) -> list[Path]:
    """All that have a complete one's name, the most steps first; undoes a replacement that was cut off."""
    if not folder.is_dir():
        return []
    _mend(folder)
    found = [(int(match[1]), each) for each in folder.iterdir() if (match := _COMPLETE.fullmatch(each.name))]
    return [path for _, path in sorted(found, reverse=True)]


def begin(folder: Path, step: int) -> Path:
    """A new partial folder; those that dead runs left behind are deleted."""
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob(f"{_PARTIAL}*"):
        shutil.rmtree(stale, ignore_errors=True)
    _mend(folder)
    partial = folder / f"{_PARTIAL}{name(step)}-{uuid.uuid4().hex[:8]}"
    partial.mkdir()
    return partial


def publish(partial: Path, step: int) -> Path:
    """Give the partial folder its complete name, in place of any former one of that name; lasting when it returns."""
    folder = partial.parent
    final, former = folder / name(step), folder / f"{_REPLACED}{name(step)}"
    _sync(partial)
    # No rename replaces a folder that is not empty. If we die between the two, `_mend` brings the former one back.
    if final.exists():
        final.rename(former)
    partial.rename(final)
    _sync(folder)
    if former.exists():
        _delete(former)
    return final


def prune(folder: Path, step: int, keep: int) -> None:
    """Delete all but the newest `keep` that look complete, after the one of `step` has been published.

    Later steps belong to a past that was given up: `load` passed over them as damaged.
    """
    kept = 0
    for path in newest_first(folder):
        if kept < keep and int(path.name.removeprefix("step-")) <= step and _looks_complete(path):
            kept += 1
        else:
            _delete(path)


def _looks_complete(path: Path) -> bool:
    try:
        return not integrity.damage(path, integrity.read(path).files, sizes_only=True)
    except integrity.DamagedError:
        return False


def _mend(folder: Path) -> None:
    for former in folder.glob(f"{_REPLACED}*"):
        final = folder / former.name.removeprefix(_REPLACED)
        if final.exists():
            _delete(former)
        else:
            former.rename(final)


def _delete(path: Path) -> None:
    # Out of sight first: a deletion that is cut off must not look like damage.
    hidden = path.with_name(f"{_PARTIAL}deleted-{path.name.lstrip('.')}-{uuid.uuid4().hex[:8]}")
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
