"""Readers of job logs, one module per format. Every module in this folder registers its format by itself.

A format module defines

- `NAME`: the value of `trace.format=` that selects the format;
- `SUMMARY`: a one-line description for users;
- `recognises(path, head)`: whether a file has this format, from its path and its first `HEAD_CHARACTERS` characters
  (`by_header` makes it for a CSV);
- `read(path, rows)`: adds every job of the file to a `TraceRows`, and may set `rows.quotas` (`jobs_from_zero` makes it
  for a CSV whose rows are jobs as they stand).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, cast

from synergy_core import modules_of
from synergy_core.errors import InputError, unknown
from synergy_core.performance.catalog import gpu_sheet, gpu_sheet_of_words, gpu_sheets, gpu_type_named
from synergy_runs.traces import plain
from synergy_runs.traces._reading import binary_format, open_text
from synergy_runs.traces.columns import named
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
    path: Path,
    *,
    format_name: str | None = None,
    bad_rows: str = "stop",
    attempts: str = "apart",
    columns: Mapping[str, str] | None = None,
    gpu_names: Mapping[str, str] | None = None,
) -> TraceRows:
    """Reads a job log and recognises its format, unless `format_name` is given.

    columns: for a CSV of any kind, our column → the file's: {submit_time: arrival_time}. gpu_names: see `_name_gpus`.

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
    if columns:
        format_name = format_name or plain.NAME
        if format_name != plain.NAME:
            raise InputError(f"trace.columns: only a log of trace.format={plain.NAME} has columns of any name.")
    if format_name is None:
        if found := binary_format(path):
            raise InputError(f"trace.path={path}: {found}.")
        with open_text(path, errors="replace", newline=None) as stream:
            head = stream.read(HEAD_CHARACTERS)
        if not head.strip():
            raise InputError(f"trace.path={path}: the file is empty; expected a job log.")
        format_name = next((name for name, each in known.items() if each.recognises(path, head)), None)
    if format_name is None:
        raise InputError(
            f"trace.path={path}: no known format starts with {head.splitlines()[0][:120]!r}. "
            f"Name it with trace.format=NAME; known: {', '.join(sorted(known))}.{plain.advice(head)}"
        )
    rows = TraceRows(path=path, format_name=format_name, bad_rows=bad_rows, attempts=attempts, columns=columns or {})
    known[format_name].read(path, rows)
    _name_gpus(rows, gpu_names or {})
    rows.close()
    return rows


def _name_gpus(rows: TraceRows, ours: Mapping[str, str]) -> None:
    """Gives GPU types the catalog's names, by `ours` (name in the log → catalog's name) or as the catalog knows them.

    Notes say which names were replaced, which are unknown, and which jobs requested or received which types.
    """
    given = {name.lower(): gpu_type_named(known) for name, known in ours.items()}
    replaced: dict[str, str] = {}

    def name_of(text: str) -> str:
        for part in filter(None, text.split("+")):
            sheet = gpu_sheet_of_words(part)
            replaced[part] = given.get(part.lower()) or (sheet.name if sheet else part)
        return "+".join(dict.fromkeys(replaced.get(part, part) for part in text.split("+")))

    requested, received = (
        named(map(name_of, column.categories))[column.codes]
        for column in (rows.jobs["gpu_type"], rows.jobs["given_gpu_type"])
    )
    rows.jobs = rows.jobs.with_columns(gpu_type=requested, given_gpu_type=received)
    for (wanted, got), jobs in Counter(zip(requested, received, strict=True)).items():
        if wanted and got and got != wanted:
            rows.counted[f"jobs requested {wanted} and received {got}"] = jobs
        elif got and not wanted:
            rows.counted[f"jobs requested no GPU type and received {got}: here they may run on any type"] = jobs
    if read := [f"{name} as {known}" for name, known in replaced.items() if name.lower() != known]:
        rows.notes.append(f"GPU types were read as the catalog names them: {', '.join(read)}")
    if unknown := [name for name in dict.fromkeys(replaced.values()) if gpu_sheet(name) is None]:
        rows.notes.append(
            f"the catalog does not know {', '.join(unknown)}: run times on it are not converted. If it is one of "
            f"{', '.join(gpu_sheets())}, type 'cluster.gpu_names={{{unknown[0]}: OURS}}'"
        )
