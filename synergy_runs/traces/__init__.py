"""Readers of job logs. One file per format; being in this folder registers it.

A format module defines

- `NAME`: what `trace.format=` calls it;
- `SUMMARY`: one line for people;
- `recognises(path, head)`: whether a file is of this format, from its path and its first `HEAD_CHARACTERS`;
- `read(path, rows)`: adds every job of the file to a `TraceRows`, and may set `rows.quotas`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, cast

from synergy_core.errors import InputError, unknown
from synergy_core.modules import modules_of
from synergy_runs.traces._text import binary_kind, first_characters
from synergy_runs.traces.rows import TraceRows

HEAD_CHARACTERS = 4_096


class TraceFormat(Protocol):
    """What a module in this folder offers."""

    NAME: str
    SUMMARY: str

    def recognises(self, path: Path, head: str) -> bool:
        """Whether this file is of this format."""

    def read(self, path: Path, rows: TraceRows) -> None:
        """Adds the file's jobs to `rows`."""


def formats() -> dict[str, TraceFormat]:
    """Every format in this folder, by name."""
    found = [module for module in modules_of(__name__) if hasattr(module, "recognises")]
    return {module.NAME: cast(TraceFormat, module) for module in found}


def read_trace(
    path: Path, *, format_name: str | None = None, bad_rows: str = "stop", attempts: str = "apart"
) -> TraceRows:
    """Reads a job log; the format is recognised unless named.

    bad_rows: "stop" raises on impossible rows, listing the first ten; "skip" leaves them out and counts them.
    attempts: "apart" keeps the attempts of a requeued or retried job apart, "merged" joins them, see `_attempts`.
    Raises InputError for a missing, empty or unrecognised file, naming what to type.
    """
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise InputError(f"trace.path={path}: {what}; expected a job log. Give one with trace.path=FILE.")
    known = formats()
    if format_name is not None:
        if format_name not in known:
            raise unknown("trace.format", format_name, known)
        chosen = known[format_name]
    else:
        chosen = _recognise(path, known)
    rows = TraceRows(path=path, format_name=chosen.NAME, bad_rows=bad_rows, attempts=attempts)
    chosen.read(path, rows)
    rows.close()
    return rows


def _recognise(path: Path, known: dict[str, TraceFormat]) -> TraceFormat:
    if kind := binary_kind(path):
        raise InputError(f"trace.path={path}: {kind}.")
    head = first_characters(path, HEAD_CHARACTERS)
    if not head.strip():
        raise InputError(f"trace.path={path}: the file is empty; expected a job log.")
    matching = [each for each in known.values() if each.recognises(path, head)]
    if not matching:
        first = head.splitlines()[0][:120]
        raise InputError(
            f"trace.path={path}: no known format starts with {first!r}. "
            f"Name it with trace.format=NAME; known: {', '.join(sorted(known))}."
        )
    return matching[0]


def summaries() -> Iterator[tuple[str, str]]:
    """(name, one line) of every format, sorted by name."""
    for name, each in sorted(formats().items()):
        yield name, each.SUMMARY
