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
_HEAD_BYTES = 4_096
_UNPACK = "is packed by {tool}; unpack it first: {tool} -d {{name}}"
_RECODE = "is {code} text; type: iconv -f {code} -t utf-8 {{name}} > fixed.txt"
_KINDS = {
    b"PAR1": "is a Parquet file; write it as CSV first, with pandas: read_parquet('{name}').to_csv('log.csv')",
    b"PK\x03\x04": "is a ZIP archive or a spreadsheet; unpack it, or save the table as CSV",
    b"BZh": _UNPACK.format(tool="bzip2"),
    b"\xfd7zXZ": _UNPACK.format(tool="xz"),
    b"\x28\xb5\x2f\xfd": _UNPACK.format(tool="zstd"),
    b"\xff\xfe\0\0": _RECODE.format(code="UTF-32"),
    b"\xff\xfe": _RECODE.format(code="UTF-16"),
    b"\xfe\xff": _RECODE.format(code="UTF-16"),
    b"SQLite format 3": "is an SQLite database; write its table as CSV first",
    b"%PDF": "is a PDF; expected a job log as text",
}
"""By the bytes that a file begins with."""


def open_text(path: Path) -> AbstractContextManager[TextIO]:
    """The file as UTF-8 without its byte-order mark, line breaks as they are; what gzip packed, unpacked.

    Turns what goes wrong while the file is open (unreadable, damaged, not UTF-8) into an InputError.
    """
    return _opened(path, errors="strict", newline="")


def binary_kind(path: Path) -> str:
    """What a file is that is no text in UTF-8, and what to do about it; "" if it may be one, packed by gzip or not."""
    with _damage_named(path), _open_bytes(path) as stream:
        head = stream.read(_HEAD_BYTES)
    for magic, told in _KINDS.items():
        if head.startswith(magic):
            return told.format(name=path.name)
    if b"\0" in head:
        return "is no text: it has zero bytes; expected a job log, packed by gzip at the most"
    return ""


def first_characters(path: Path, count: int) -> str:
    """So many characters, fewer of a shorter file; line breaks as newlines, bytes that are no text replaced."""
    with _opened(path, errors="replace", newline=None) as stream:
        return stream.read(count)


@contextmanager
def _opened(path: Path, *, errors: str, newline: str | None) -> Iterator[TextIO]:
    with (
        _damage_named(path),
        _open_bytes(path) as content,
        TextIOWrapper(content, encoding="utf-8-sig", errors=errors, newline=newline) as stream,
    ):
        yield stream


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    """What goes wrong within, as an InputError."""
    try:
        yield
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
