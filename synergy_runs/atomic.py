"""Files and folders that appear whole or not at all: written beside their place, flushed, then renamed."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from synergy_core.errors import InputError

# Names that nobody reads as a result: hidden, and never those of a policy.
PARTIAL = ".{name}.partial-{pid}"
REPLACED = ".{name}.replaced-{pid}"


@contextlib.contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """A new folder beside `folder` to write in; it takes that name at the end, or vanishes if anything fails."""
    names = {"name": folder.name, "pid": os.getpid()}
    partial, replaced = (folder.parent / each.format(**names) for each in (PARTIAL, REPLACED))
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        for path in (*partial.iterdir(), partial):
            _flush(path)
        if folder.exists():
            folder.rename(replaced)
        partial.rename(folder)
        _flush(folder.parent)
    except OSError as error:
        raise InputError(
            f"{folder}: the result cannot be written: {error.strerror or error}. "
            "Free some space or name another place with results_dir=DIR."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if replaced.exists() and not folder.exists():
            replaced.rename(folder)
        shutil.rmtree(replaced, ignore_errors=True)


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """A name beside `path` to write to; it takes that name at the end, or vanishes if anything fails."""
    partial = path.parent / PARTIAL.format(name=path.name, pid=os.getpid())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        partial.replace(path)
    except OSError as error:
        raise InputError(
            f"{path}: cannot be written: {error.strerror or error}. Name a file in a folder that you may write into, "
            "on a disk with room."
        ) from error
    finally:
        with contextlib.suppress(OSError):  # a folder that may not be entered, a disk that is only read
            partial.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    """Flushes to the disk, not only to the system: after a power cut a renamed file would otherwise be empty."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
