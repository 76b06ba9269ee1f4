"""Opening a log as text, with errors that name the file and the line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from synergy_core.errors import InputError


@contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """The file as UTF-8 without its byte-order mark, line breaks as they are.

    Turns what goes wrong while the file is open (unreadable, not UTF-8) into an InputError.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            yield stream
    except UnicodeDecodeError:
        line = _first_undecodable_line(path)
        raise InputError(
            f"{path}: line {line}: bytes that are not UTF-8 text. Is the file compressed or cut? "
            f"If it is text in another encoding: iconv -f latin1 -t utf-8 {path.name} > fixed.txt"
        ) from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error}).") from error


def _first_undecodable_line(path: Path) -> int:
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            try:
                line.decode("utf-8-sig")
            except UnicodeDecodeError:
                return number
    return 1


def ends_with_line_break(path: Path) -> bool:
    """False where the last line may have been cut off. An empty file has nothing to cut."""
    with path.open("rb") as stream:
        size = stream.seek(0, 2)
        if size == 0:
            return True
        stream.seek(size - 1)
        return stream.read(1) in (b"\n", b"\r")
