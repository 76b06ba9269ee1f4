"""A published trace onto this machine: fetched, believed, unpacked."""

from __future__ import annotations

import os
import shutil
import sys
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from synergy_core.errors import InputError
from synergy_runs.traces._fetch import Progress, fetch, sha256_of
from synergy_runs.traces._sources import Source


def download(source: Source, folder: Path, *, wait_s: float = 2.0) -> list[Path]:
    """The wanted files of `source` in `folder`, in order; what is there already is not fetched again.

    The archive stays beside them. Raises InputError where the source has no checksum, and as `fetch` does.
    """
    wanted = [folder / name for name in source.wanted]
    if not source.downloadable:
        raise InputError(
            f"{source.name}: no checksum of its archive is known to us, so we do not fetch it. "
            f"Get it from {source.page} and give the job log with trace.path=FILE."
        )
    if all(path.is_file() for path in wanted):
        return wanted
    archive = folder / source.archive
    by_hand = (
        f"By hand: fetch {source.url} in a browser or with curl -L -o {archive} on a machine that reaches it, "
        f"and run the same command here: it checks and unpacks {archive}."
    )
    if archive.is_file():
        _require_checksum(archive, source)
    else:
        with _bar(source) as progress:
            fetch(
                source.url,
                archive,
                size_bytes=source.size_bytes,
                sha256=source.sha256,
                by_hand=by_hand,
                progress=progress,
                wait_s=wait_s,
            )
    _unpack(archive, source.wanted, folder)
    return wanted


def _require_checksum(archive: Path, source: Source) -> None:
    got = sha256_of(archive)
    if got != source.sha256:
        raise InputError(
            f"{archive}: {archive.stat().st_size:,} bytes with sha256 {got}, expected {source.size_bytes:,} bytes with "
            f"{source.sha256}. Remove it and run the same command to fetch it again."
        )


def _unpack(archive: Path, wanted: tuple[str, ...], folder: Path) -> None:
    """Writes the wanted files into `folder` under their own names, each beside its place and then renamed.

    Only names we asked for and only regular files are taken, so no path of the archive's own is ever used.
    """
    left = set(wanted)
    try:
        with tarfile.open(archive, "r:*") as tar:
            for member in tar:
                name = member.name.rsplit("/", 1)[-1]
                content = tar.extractfile(member) if name in left and member.isreg() else None
                if content is None:
                    continue
                part = folder / f"{name}.part"
                with content, part.open("wb") as sink:
                    shutil.copyfileobj(content, sink, 1 << 20)
                os.replace(part, folder / name)
                left.remove(name)
                if not left:
                    return
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise InputError(
            f"{archive}: cannot be unpacked ({error}). Remove it and run the same command again."
        ) from None
    except OSError as error:
        raise InputError(f"{folder}: cannot unpack into it ({error.strerror or error}).") from error
    raise InputError(f"{archive}: holds no {', '.join(sorted(left))}; expected {', '.join(wanted)}.")


@contextmanager
def _bar(source: Source) -> Iterator[Progress]:
    """A progress bar on standard error; silent where that is no terminal."""
    if not sys.stderr.isatty():
        yield lambda done_bytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(source.name, total=source.size_bytes)
        yield lambda done_bytes: bar.update(task, completed=done_bytes)
