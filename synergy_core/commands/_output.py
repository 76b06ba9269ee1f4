"""What commands print and write: plain aligned tables, and files that appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from synergy_core.errors import InputError


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Aligned columns; the first `left` to the left, the others, numbers, to the right."""
    everything = [list(header), *(list(row) for row in rows)]
    widths = [max(len(row[at]) for row in everything) for at in range(len(header))]
    lines = []
    for row in everything:
        cells = [
            cell.ljust(width) if at < left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def write_whole(path: Path, text: str) -> None:
    """Writes beside `path`, then renames. Raises InputError where that is not possible."""
    if not path.name or path.is_dir():
        raise InputError(f"{path}: is a folder; expected the name of a file to write.")
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        try:
            beside.write_text(text, encoding="utf-8")
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(
            f"{path}: cannot be written ({error.strerror}); expected a path in an existing folder."
        ) from None
