"""Opening a log as text, packed by gzip or not, with errors that name the file and the line."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import BinaryIO, TextIO, cast

from synergy_core.errors import InputError

_GZIP = b"\x1f\x8b"
_CHUNK_BYTES = 2**20


def open_text(path: Path) -> AbstractContextManager[TextIO]:
    """The file as UTF-8 without its byte-order mark, line breaks as they are; what gzip packed, unpacked.

    Turns what goes wrong while the file is open (unreadable, damaged, not UTF-8) into an InputError.
    """
    return _opened(path, errors="strict", newline="")


def first_characters(path: Path, count: int) -> str:
    """So many characters, fewer of a shorter file; line breaks as newlines, bytes that are no text replaced."""
    with _opened(path, errors="replace", newline=None) as stream:
        return stream.read(count)


@contextmanager
def _opened(path: Path, *, errors: str, newline: str | None) -> Iterator[TextIO]:
    try:
        with (
            _open_bytes(path) as content,
            TextIOWrapper(content, encoding="utf-8-sig", errors=errors, newline=newline) as stream,
        ):
            yield stream
    except UnicodeDecodeError:
        line = _first_undecodable_line(path)
        raise InputError(
            f"{path}: line {line}: bytes that are not UTF-8 text. Is the file compressed or cut? "
            f"If it is text in another encoding: iconv -f latin1 -t utf-8 {path.name} > fixed.txt"
        ) from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path}: gzip cannot unpack it ({error}). Is it cut off? Get it again.") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error}).") from error


def _open_bytes(path: Path) -> BinaryIO:
    """The file's bytes; if they begin as gzip's do, whatever its name, those that were packed."""
    stream = path.open("rb")
    if stream.peek(len(_GZIP))[: len(_GZIP)] != _GZIP:
        return stream
    stream.close()
    return cast(BinaryIO, gzip.open(path, "rb"))


def _first_undecodable_line(path: Path) -> int:
    with _open_bytes(path) as stream:
        for number, line in enumerate(stream, start=1):
            try:
                line.decode("utf-8-sig")
            except UnicodeDecodeError:
                return number
    return 1


def ends_with_line_break(path: Path) -> bool:
    """False where the last line may have been cut off. An empty file has nothing to cut."""
    last = b"\n"
    with _open_bytes(path) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            last = chunk[-1:]
    return last in (b"\n", b"\r")
