"""Files that grow by a line at a time, of which a crash or a full disk may have cut off the last."""

from __future__ import annotations

import os
from pathlib import Path

_PIECE = 4096


def whole_lines(path: Path) -> list[str]:
    """The lines that have their end; none where there is no file."""
    if not path.is_file():
        return []
    return path.read_text(encoding="utf-8", errors="replace").rpartition("\n")[0].splitlines()


def cut_to_lines(path: Path) -> None:
    """Takes off what stands after the end of the last whole line, so that the next does not go on in it."""
    if not path.is_file():
        return
    with path.open("rb+") as file:
        kept = file.seek(0, os.SEEK_END)
        while kept:
            begins = max(0, kept - _PIECE)
            file.seek(begins)
            end = file.read(kept - begins).rfind(b"\n")
            kept = begins + end + 1
            if end >= 0:
                break
        file.truncate(kept)
