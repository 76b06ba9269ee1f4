"""Writes files and folders atomically: under a temporary name, which is renamed at the end."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from synergy_core.errors import InputError

# Temporary names begin with a dot, so that they are hidden and never equal a policy's name.
PARTIAL = ".{name}.partial-{pid}"
REPLACED = ".{name}.replaced-{pid}"


@contextlib.contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder to write in; it is renamed to `folder` at the end, or deleted on an error."""
    names = {"name": folder.name, "pid": os.getpid()}
    partial, replaced = (folder.parent / each.format(**names) for each in (PARTIAL, REPLACED))
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        for path in (*partial.iterdir(), partial):
            flush(path)
        if folder.exists():
            folder.rename(replaced)
        partial.rename(folder)
        flush(folder.parent)
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
    """A temporary file to write to; it is renamed to `path` at the end, or deleted on an error."""
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
        with contextlib.suppress(OSError):  # no permission, or a read-only disk
            partial.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Flushes a file or folder to disk; otherwise a renamed file could be empty after a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Finds the package's data files, in a checkout or in an installed wheel.


_PACKAGE = Path(__file__).resolve().parent


def folder(in_wheel: str, in_checkout: str) -> Path:
    """The absolute path of a data folder, which is inside the package in a wheel and next to it in a checkout.

    Raises FileNotFoundError if neither exists (a broken installation).
    """
    for candidate in (_PACKAGE / in_wheel, _PACKAGE.parent / in_checkout):
        if candidate.is_dir():
            return candidate
    raise FileNotFoundError(f"neither {_PACKAGE / in_wheel} nor {_PACKAGE.parent / in_checkout} exists")


def conf_folder() -> Path:
    """The folder of the Hydra configuration."""
    return folder("conf", "conf")


def statistics_folder() -> Path:
    """The folder of published trace statistics, which are JSON files."""
    return folder("statistics", "traces")
