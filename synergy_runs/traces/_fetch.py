"""One large file over HTTP: resumed, retried, and believed only when its checksum is right.

Bytes go to `NAME.part`; the name itself appears only when size and sha256 are those expected. A broken connection is
taken up where it broke, in this run or the next.
"""

from __future__ import annotations

import errno
import hashlib
import http.client
import os
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import IO

from synergy_core.errors import InputError

CHUNK_BYTES = 1 << 20
TIMEOUT_S = 60.0
TRIES = 6
"""Connections in a row that bring nothing before giving up; one that brings bytes starts the count again."""
_RETRIED = frozenset({408, 429, 500, 502, 503, 504})
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})

Progress = Callable[[int], None]


class _Dropped(Exception):  # noqa: N818 (an event, not an error, until the tries are used up)
    """The connection broke or the server was busy; trying again may help."""


def fetch(
    url: str,
    target: Path,
    *,
    size_bytes: int,
    sha256: str,
    by_hand: str,
    progress: Progress = lambda done_bytes: None,
    wait_s: float = 2.0,
) -> None:
    """Downloads `url` to `target`, resuming from `target` + ".part".

    by_hand: what the user can do instead, for errors. progress: told how many bytes there are, from 0 to `size_bytes`.
    wait_s: before the second try; doubled each time. Raises InputError if the host cannot be reached, refuses, sends
    something else, or if the disk is full; the part stays unless it is known to be wrong.
    """
    part = target.with_name(target.name + ".part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _require_space(part, size_bytes)
        _fill(url, part, size_bytes, by_hand, progress, wait_s)
        _verify(part, size_bytes, sha256, url)
        os.replace(part, target)
    except OSError as error:
        if error.errno in _NO_SPACE:
            raise InputError(
                f"{part}: the disk is full after {_size(part):,} of {size_bytes:,} bytes. Free space, or name another "
                "folder with --to, and run the same command: it resumes."
            ) from error
        raise InputError(f"{error.filename or part}: cannot be written ({error.strerror or error}).") from error


def sha256_of(path: Path) -> str:
    """The file's sha256, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _require_space(part: Path, size_bytes: int) -> None:
    needed, free = size_bytes - _size(part), shutil.disk_usage(part.parent).free
    if needed > free:
        raise InputError(
            f"{part.parent}: {free:,} bytes free, {needed:,} needed. Free space, or name another folder with --to."
        )


def _fill(url: str, part: Path, size_bytes: int, by_hand: str, progress: Progress, wait_s: float) -> None:
    """Brings `part` to `size_bytes`, over as many connections as it takes."""
    if _size(part) > size_bytes:
        part.unlink()
    fruitless, reason = 0, ""
    # The furthest we ever came: a server that cannot resume starts over, and must not do so for ever.
    furthest = _size(part)
    while _size(part) < size_bytes:
        progress(_size(part))
        try:
            _one_connection(url, part, size_bytes, by_hand, progress)
        except _Dropped as dropped:
            reason = str(dropped)
        if _size(part) >= size_bytes:
            break
        fruitless = 0 if _size(part) > furthest else fruitless + 1
        furthest = max(furthest, _size(part))
        if fruitless >= TRIES:
            raise InputError(
                f"{url}: stopped after {_size(part):,} of {size_bytes:,} bytes ({reason or 'connection closed'}). "
                f"Run the same command: it resumes. {by_hand}"
            )
        time.sleep(wait_s * 2**fruitless / 2)
    progress(_size(part))


def _one_connection(url: str, part: Path, size_bytes: int, by_hand: str, progress: Progress) -> None:
    have = _size(part)
    headers = {"User-Agent": "synergy-cluster", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        with _OPENER.open(urllib.request.Request(url, headers=headers), timeout=TIMEOUT_S) as answer:
            resumes = answer.status == 206 and (answer.headers.get("Content-Range") or "").startswith(f"bytes {have}-")
            _require_size(answer, url, size_bytes, by_hand)
            with part.open("ab" if resumes else "wb") as sink:
                _copy(answer, sink, have if resumes else 0, size_bytes, progress)
    except urllib.error.HTTPError as error:
        if error.code == 416:
            part.unlink(missing_ok=True)
            raise _Dropped("the server has no such range; started anew") from error
        if error.code in _RETRIED:
            raise _Dropped(f"the server answered {error.code} {error.reason}") from error
        raise InputError(f"{url}: the server answered {error.code} {error.reason}. {by_hand}") from error
    except urllib.error.URLError as error:
        if isinstance(error.reason, TimeoutError | ConnectionResetError):
            raise _Dropped(str(error.reason)) from error
        raise InputError(f"{url}: cannot be reached ({error.reason}). {by_hand}") from error
    except (http.client.HTTPException, ConnectionError, TimeoutError) as error:
        raise _Dropped(str(error) or type(error).__name__) from error


def _require_size(answer: http.client.HTTPResponse, url: str, size_bytes: int, by_hand: str) -> None:
    """Raises InputError if the server announces another file: a page, or a git-LFS pointer of some hundred bytes."""
    _, _, total = (answer.headers.get("Content-Range") or "").rpartition("/")
    announced = total if answer.status == 206 else answer.headers.get("Content-Length") or ""
    if announced.isdigit() and int(announced) != size_bytes:
        raise InputError(f"{url}: the server offers {int(announced):,} bytes, expected {size_bytes:,}. {by_hand}")


def _copy(source: IO[bytes], sink: IO[bytes], done: int, size_bytes: int, progress: Progress) -> None:
    while chunk := _read(source):
        # A server that sends more than was published sends something else; no need to see how much.
        sink.write(chunk[: size_bytes + 1 - done])
        done += len(chunk)
        progress(min(done, size_bytes))
        if done > size_bytes:
            return


def _read(source: IO[bytes]) -> bytes:
    try:
        return source.read(CHUNK_BYTES)
    except (http.client.HTTPException, OSError) as error:  # of the network: the disk is another call
        raise _Dropped(str(error) or type(error).__name__) from error


def _verify(part: Path, size_bytes: int, sha256: str, url: str) -> None:
    got = sha256_of(part)
    if got == sha256:
        return
    # Resuming a wrong file could never end well.
    size = _size(part)
    part.unlink()
    longer = " or more" if size > size_bytes else ""
    raise InputError(
        f"{url}: got {size:,}{longer} bytes with sha256 {got}, expected {size_bytes:,} bytes with {sha256}. "
        "The download was removed; run the same command to fetch it again."
    )


class _StaySecure(urllib.request.HTTPRedirectHandler):
    """Follows redirects, but not from https to anything else."""

    def redirect_request(self, req, fp, code, msg, headers, newurl):  # type: ignore[no-untyped-def]
        """None of urllib's own checks are lost: it still decides the rest."""
        if req.full_url.startswith("https:") and not newurl.startswith("https:"):
            raise InputError(f"{req.full_url}: redirected to {newurl}, which is not https; not followed.")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


_OPENER = urllib.request.build_opener(_StaySecure)
