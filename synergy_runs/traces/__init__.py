"""Readers of job logs, one module per format. Every module in this folder registers its format by itself.

A format module defines

- `NAME`: the value of `trace.format=` that selects the format;
- `SUMMARY`: a one-line description for users;
- `recognises(path, head)`: whether a file has this format, from its path and its first `HEAD_CHARACTERS` characters;
- `read(path, rows)`: adds every job of the file to a `TraceRows`, and may set `rows.quotas`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, cast

from synergy_core import modules_of
from synergy_core.errors import InputError, unknown
from synergy_runs.traces._reading import binary_kind, open_text
from synergy_runs.traces.rows import TraceRows

HEAD_CHARACTERS = 4_096


class TraceFormat(Protocol):
    """Interface of a module that reads one trace format."""

    NAME: str
    SUMMARY: str

    def recognises(self, path: Path, head: str) -> bool:
        """Whether the file at `path`, which starts with the text `head`, has this module's format."""

    def read(self, path: Path, rows: TraceRows) -> None:
        """Adds the jobs of the file at `path` to `rows`."""


def formats() -> dict[str, TraceFormat]:
    """All trace formats, by name."""
    found = [module for module in modules_of(__name__) if hasattr(module, "recognises")]
    return {module.NAME: cast(TraceFormat, module) for module in found}


def read_trace(
    path: Path, *, format_name: str | None = None, bad_rows: str = "stop", attempts: str = "apart"
) -> TraceRows:
    """Reads a job log and recognises its format, unless `format_name` is given.

    bad_rows: "stop" raises on impossible rows, listing the first ten; "skip" leaves them out and counts them.
    attempts: "apart" replays each attempt of a requeued or retried job as a job; "merged" joins them, see `_attempts`.
    Raises InputError for a missing, empty or unrecognised file; the message says what to type.
    """
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise InputError(f"trace.path={path}: {what}; expected a job log. Give one with trace.path=FILE.")
    known = formats()
    if format_name is not None and format_name not in known:
        raise unknown("trace.format", format_name, known)
    if format_name is None:
        if kind := binary_kind(path):
            raise InputError(f"trace.path={path}: {kind}.")
        with open_text(path, errors="replace", newline=None) as stream:
            head = stream.read(HEAD_CHARACTERS)
        if not head.strip():
            raise InputError(f"trace.path={path}: the file is empty; expected a job log.")
        format_name = next((name for name, each in known.items() if each.recognises(path, head)), None)
    if format_name is None:
        raise InputError(
            f"trace.path={path}: no known format starts with {head.splitlines()[0][:120]!r}. "
            f"Name it with trace.format=NAME; known: {', '.join(sorted(known))}."
        )
    rows = TraceRows(path=path, format_name=format_name, bad_rows=bad_rows, attempts=attempts)
    known[format_name].read(path, rows)
    rows.close()
    return rows
