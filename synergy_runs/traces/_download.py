"""Downloads, verifies and unpacks published traces, and finds traces on this machine."""

from __future__ import annotations

import errno
import hashlib
import http.client
import os
import shutil
import sys
import tarfile
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from synergy_core.errors import InputError
from synergy_runs.files import statistics_folder

# Published traces: where to get them, their licences, and the size and checksum of each archive.


@dataclass(frozen=True, slots=True)
class Source:
    """One published trace.

    url: address of the archive, "" if we know only its web page. sha256, size_bytes: checksum and size of the archive,
    "" and 0 if unknown; such an archive is not downloaded, because we could not verify it.
    wanted: names of the files to extract from the archive; other files are not unpacked.
    """

    name: str
    what: str
    page: str
    licence: str
    url: str = ""
    archive: str = ""
    size_bytes: int = 0
    sha256: str = ""
    wanted: tuple[str, ...] = ()


# Size and checksum of the Philly archive come from the git-LFS pointer in its repository.
_PUBLISHED = (
    Source(
        name="philly",
        what="Microsoft Philly, 117,325 jobs, August to December 2017 (ATC '19)",
        page="https://github.com/msr-fiddle/philly-traces",
        licence="CC BY 4.0",
        url="https://github.com/msr-fiddle/philly-traces/raw/master/trace-data.tar.gz",
        archive="philly-trace-data.tar.gz",
        size_bytes=1_055_988_361,
        sha256="2037ccf63a725a02be718b0e1aeee6142c90b7f62d0d849295120e9f6ba13d2c",
        wanted=("cluster_job_log", "cluster_machine_list"),
    ),
    Source(
        name="helios",
        what="SenseTime Helios, 4 clusters, 3.4 million jobs, April to September 2020 (SC '21)",
        page="https://github.com/S-Lab-System-Group/HeliosData",
        licence="CC BY 4.0",
    ),
    Source(
        name="acme",
        what="Shanghai AI Laboratory Acme, Seren and Kalos, March to August 2023 (NSDI '24)",
        page="https://github.com/InternLM/AcmeTrace",
        licence="CC BY 4.0",
    ),
    Source(
        name="openb",
        what="Alibaba OpenB, 8,152 pods of a cluster with 6,212 GPUs, 2023 (ATC '23)",
        page="https://github.com/alibaba/clusterdata/tree/master/cluster-trace-gpu-v2023",
        licence="for research and study; cite",
    ),
    Source(
        name="spot2026",
        what="Alibaba spot GPUs, 466,867 jobs on 4,278 nodes, 2026 (ASPLOS '26)",
        page="https://github.com/alibaba/clusterdata/tree/master/cluster-trace-v2026-spot-gpu",
        licence="for research and study; cite",
    ),
)


SOURCES = {each.name: each for each in _PUBLISHED}


def download(source: Source, folder: Path, *, wait_s: float = 2.0) -> list[Path]:
    """Downloads the wanted files of `source` into `folder`, unless they are there; returns their paths in order.

    The archive stays in the folder. wait_s: wait after a connection without new bytes, doubled after every such one.
    Raises InputError if the source has no checksum, the server cannot be reached, or the checksum is wrong.
    """
    wanted = [folder / name for name in source.wanted]
    if not source.sha256:
        raise InputError(
            f"{source.name}: we know no checksum of its archive, so we do not download it. "
            f"Get it from {source.page} and give the job log with trace.path=FILE."
        )
    if all(path.is_file() for path in wanted):
        return wanted
    archive = folder / source.archive
    if archive.is_file():
        _check(archive, source, f"{archive}", "Remove it and run the same command to fetch it again.")
    else:
        with _bar(source) as progress:
            _fetch(source, archive, progress, wait_s)
    _unpack(archive, source.wanted, folder)
    return wanted


# Download of one large file over HTTP, with retries, resumption and a checksum.
#
# Bytes are written to `NAME.part`, which is renamed to `NAME` once size and sha256 match. A broken download resumes
# where it stopped, in this run or the next.


CHUNK_BYTES = 1 << 20
TIMEOUT_S = 60.0
MAX_FRUITLESS_CONNECTIONS = 6
"""Number of consecutive connections without new bytes after which the download stops with an error."""
_RETRIED = frozenset({408, 429, 500, 502, 503, 504})
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})

Progress = Callable[[int], None]
"""Callback that receives the number of bytes downloaded so far."""


def _fetch(source: Source, archive: Path, progress: Progress, wait_s: float) -> None:
    part = archive.with_name(archive.name + ".part")
    by_hand = (
        f"By hand: fetch {source.url} in a browser or with curl -L -o {archive} on a machine that reaches it, "
        f"and run the same command here: it checks and unpacks {archive}."
    )
    try:
        archive.parent.mkdir(parents=True, exist_ok=True)
        needed, free = source.size_bytes - _size(part), shutil.disk_usage(part.parent).free
        if needed > free:
            raise InputError(
                f"{part.parent}: {free:,} bytes free, {needed:,} needed. Free space, or name another folder with --to."
            )
        if needed < 0:
            part.unlink()
        # Only bytes beyond the largest size so far count as progress: servers that cannot resume restart from 0.
        fruitless, furthest = 0, _size(part)
        while _size(part) < source.size_bytes:
            broke = _one_connection(source, part, by_hand, progress)
            if _size(part) >= source.size_bytes:
                break
            fruitless = 0 if _size(part) > furthest else fruitless + 1
            furthest = max(furthest, _size(part))
            if fruitless >= MAX_FRUITLESS_CONNECTIONS:
                raise InputError(
                    f"{source.url}: stopped after {_size(part):,} of {source.size_bytes:,} bytes ({broke}). "
                    f"Run the same command: it resumes. {by_hand}"
                )
            time.sleep(wait_s * 2**fruitless / 2)
        try:
            _check(part, source, source.url, "The download was removed; run the same command to fetch it again.")
        except InputError:
            part.unlink()  # resuming the wrong file would never succeed
            raise
        os.replace(part, archive)
    except OSError as error:
        if error.errno in _NO_SPACE:
            raise InputError(
                f"{part}: the disk is full after {_size(part):,} of {source.size_bytes:,} bytes. Free space, or name "
                "another folder with --to, and run the same command: it resumes."
            ) from error
        raise InputError(f"{error.filename or part}: cannot be written ({error.strerror or error}).") from error


def _one_connection(source: Source, part: Path, by_hand: str, progress: Progress) -> str:
    """Appends bytes to `part` until the connection ends; returns why. Raises InputError if a retry cannot help."""
    done = _size(part)
    headers = {"User-Agent": "synergy-cluster", "Accept-Encoding": "identity"}
    if done:
        headers["Range"] = f"bytes={done}-"
    try:
        with _OPENER.open(urllib.request.Request(source.url, headers=headers), timeout=TIMEOUT_S) as answer:
            content_range = answer.headers.get("Content-Range") or ""
            # A wrong total size means another file, such as an HTML page or a git-LFS pointer of some hundred bytes.
            is_part = answer.status == 206
            total = content_range.rpartition("/")[2] if is_part else answer.headers.get("Content-Length") or ""
            if total.isdigit() and int(total) != source.size_bytes:
                raise InputError(
                    f"{source.url}: the server offers {int(total):,} bytes, expected {source.size_bytes:,}. {by_hand}"
                )
            if not (is_part and content_range.startswith(f"bytes {done}-")):
                done = 0
            with part.open("ab" if done else "wb") as sink:
                # Reading stops one byte beyond the published size: a longer file is the wrong one.
                while done <= source.size_bytes:
                    progress(done)
                    try:
                        chunk = answer.read(CHUNK_BYTES)
                    except (http.client.HTTPException, OSError) as error:  # network error: `write` is outside `try`
                        return str(error) or type(error).__name__
                    if not chunk:
                        break
                    sink.write(chunk[: source.size_bytes + 1 - done])
                    done += len(chunk)
        return "connection closed"
    except urllib.error.HTTPError as error:
        if error.code == 416:
            part.unlink(missing_ok=True)
            return "the server has no such range; started anew"
        if error.code in _RETRIED:
            return f"the server answered {error.code} {error.reason}"
        raise InputError(f"{source.url}: the server answered {error.code} {error.reason}. {by_hand}") from error
    except urllib.error.URLError as error:
        if isinstance(error.reason, TimeoutError | ConnectionResetError):
            return str(error.reason)
        raise InputError(f"{source.url}: cannot be reached ({error.reason}). {by_hand}") from error
    except (http.client.HTTPException, ConnectionError, TimeoutError) as error:
        return str(error) or type(error).__name__


class _StaySecure(urllib.request.HTTPRedirectHandler):
    """Follows redirects, except from https to another protocol."""

    def redirect_request(self, req, fp, code, msg, headers, newurl):  # type: ignore[no-untyped-def]
        """Refuses a redirect that leaves https; urllib checks all other redirects."""
        if req.full_url.startswith("https:") and not newurl.startswith("https:"):
            raise InputError(f"{req.full_url}: redirected to {newurl}, which is not https; not followed.")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


_OPENER = urllib.request.build_opener(_StaySecure)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _check(path: Path, source: Source, name: str, advice: str) -> None:
    """Raises InputError if the file is not the published archive. name: how the error refers to the file."""
    with path.open("rb") as stream:
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    if sha256 != source.sha256:
        got = f"{'more than ' * (_size(path) > source.size_bytes)}{min(_size(path), source.size_bytes):,} bytes"
        raise InputError(
            f"{name}: got {got} with sha256 {sha256}, expected {source.size_bytes:,} bytes with "
            f"{source.sha256}. {advice}"
        )


def _unpack(archive: Path, wanted: tuple[str, ...], folder: Path) -> None:
    """Extracts the wanted files into `folder`, writing each under a temporary name first.

    Only regular files with a wanted name are extracted, and folders inside the archive are ignored.
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
    raise InputError(f"{archive}: has no {', '.join(sorted(left))}; expected {', '.join(wanted)}.")


@contextmanager
def _bar(source: Source) -> Iterator[Progress]:
    """Shows a progress bar on standard error if standard error is a terminal."""
    if not sys.stderr.isatty():
        yield lambda done_bytes: None
        return
    from rich import progress
    from rich.console import Console

    columns = (progress.DownloadColumn(), progress.TransferSpeedColumn(), progress.TimeRemainingColumn())
    text = progress.TextColumn("{task.description}")
    with progress.Progress(text, progress.BarColumn(), *columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(source.name, total=source.size_bytes)
        yield lambda done_bytes: bar.update(task, completed=done_bytes)


# Search for traces on this machine: in the folder that SYNERGY_DATA names, ./traces, and the traces we ship.


VARIABLE = "SYNERGY_DATA"
FOLDER = "traces"
PUBLISHED_AT = {
    "workloads/pollux/": "https://github.com/petuum/adaptdl (branch osdi21-artifact, simulator/workloads/)",
    "workloads/sia/": "https://github.com/siasosp23/artifacts",
    "openb/": "https://github.com/alibaba/clusterdata/tree/master/cluster-trace-gpu-v2023",
}
"""Web page that publishes the traces of each data folder."""
PHILLY = ("philly.csv", "cluster_job_log", "trace-data/cluster_job_log")


def find_philly(data_folder: Path | None = None) -> Path | None:
    """Path of the real Philly trace: the CSV, else the job log as released; None if neither is on this machine."""
    return find(PHILLY, data_folder)


def find_folder(name: str) -> Path | None:
    """The folder `name` below the folder in SYNERGY_DATA; None if there is none."""
    data_folder = _from_environment()
    folder = data_folder / name if data_folder else None
    return folder if folder is not None and folder.is_dir() else None


def find(names: Sequence[str], data_folder: Path | None = None) -> Path | None:
    """The first of `names` that is a file in the data folder's traces/, the data folder, ./traces or our own traces/.

    data_folder: by default the folder in SYNERGY_DATA. A name earlier in `names` wins over an earlier folder.
    Raises InputError if SYNERGY_DATA is not a folder: a mistyped path must not quietly lead to a generated trace.
    """
    data_folder = data_folder or _from_environment()
    data_places = [data_folder / FOLDER, data_folder] if data_folder else []
    places = (folder / name for name in names for folder in (*data_places, Path(FOLDER), statistics_folder()))
    return next((place for place in places if place.is_file()), None)


def _from_environment() -> Path | None:
    text = os.environ.get(VARIABLE, "")
    if not text:
        return None
    folder = Path(text).expanduser()
    if not folder.is_dir():
        raise InputError(f"{VARIABLE}={text}: no such folder; name one that has traces/philly.csv, or unset it.")
    return folder
