"""Reader of our own CSV format, for logs in none of the other formats.

Required columns: submit_time (seconds, or a date), duration_s, gpus. Optional: job, virtual_cluster, user, end_state
(completed, killed, failed, running), estimate_s (run time declared by the user), gpu_type (requested; empty means any),
model, cpus and memory_bytes (requested for the whole job), start_time. A log with start_time and end_time needs no
duration_s: jobs without a start are left out, and jobs without an end were running when the log was written. Columns
may come in any order, with names in upper or lower case. They are separated by commas, or by semicolons as in some
spreadsheets; a first line `sep=;` may say which. Values of `job` are ids and must be unique.
"""

from __future__ import annotations

from difflib import SequenceMatcher
from pathlib import Path

import numpy as np

from synergy_core.performance.catalog.columns import similar_column, suggest_column
from synergy_runs.traces._reading import Number, Text, header_of, open_text, read_tables
from synergy_runs.traces.columns import UNKNOWN
from synergy_runs.traces.rows import RUNNING, TraceRows, cpus, end_state, instant_s, memory_bytes, seconds, whole

NAME = "plain"
SUMMARY = (
    "a CSV of your own: submit_time, duration_s, gpus "
    "[start_time, end_time, job, virtual_cluster, user, end_state, estimate_s, gpu_type, cpus, memory_bytes]"
)
COLUMNS = {
    "job_name": Text("job", missing=""),
    "submit_s": Number("submit_time", instant_s),
    "duration_s": Number("duration_s", seconds),
    "gpus": Number("gpus", whole),
    "virtual_cluster": Text("virtual_cluster", missing=""),
    "user": Text("user", missing=""),
    "end_state": Text("end_state", end_state, missing="completed"),
    "estimate_s": Number("estimate_s", seconds, missing=UNKNOWN),
    "gpu_type": Text("gpu_type", lambda text, column: text.strip().lower(), missing=""),
    "model": Text("model", missing=""),
    "cpus": Number("cpus", cpus, missing=UNKNOWN),
    "memory_bytes": Number("memory_bytes", memory_bytes, missing=UNKNOWN),
    "start_s": Number("start_time", instant_s, missing=UNKNOWN),
    "end_s": Number("end_time", instant_s, missing=UNKNOWN),
}
WITHOUT_DURATION = COLUMNS | {"duration_s": Number("duration_s", seconds, missing=UNKNOWN)}


def recognises(path: Path, head: str) -> bool:
    """Recognises two of the three required columns, so that the reader can report a misspelt third one. A file with the
    time column of `osdi22_csv` is excluded.
    """
    header = {name.lower() for name in header_of(head)}
    return len(header & {"submit_time", "duration_s", "gpus"}) >= 2 and "arrival_s" not in header


def advice(head: str) -> str:
    """A sentence that says which columns a CSV needs, and which of this one's look like them; "" if it is no CSV."""
    header = sorted(header_of(head))
    if "|" in head.split("\n", 1)[0]:
        return " Did sacct print it without its header (--noheader)? Print it again, or write the names above."
    if len(header) < 2:
        return ""
    like: dict[str, str] = {}
    needed = [each.name for each in COLUMNS.values() if each.missing is None]
    for name, is_synonym in [*((each.name, True) for each in COLUMNS.values()), *((each, False) for each in needed)]:
        left = [each for each in header if each not in like.values()]
        if name not in like and (found := similar_column(name, left, is_synonym=is_synonym)):
            like[name] = found
    given = dict.fromkeys((*needed, *like))
    if "duration_s" not in like and {"start_time", "end_time"} <= like.keys():
        del given["duration_s"]
    typed = ", ".join(f"{name}: {like.get(name, 'COLUMN')}" for name in given)
    return (
        f" A CSV of any other kind needs {', '.join(needed)} (or start_time and end_time in place of duration_s): say "
        f"which they are, such as 'trace.columns={{{typed}}}'; traces check --columns '{typed.replace(': ', '=')}'."
    )


def read(path: Path, rows: TraceRows) -> None:
    """Adds every row; the notes name each column that is not read and the known column with the nearest name."""
    with open_text(path) as stream:
        written = header_of(stream.readline() + stream.readline())
    known = [each.name for each in COLUMNS.values()]
    renamed = {theirs: ours for ours, theirs in rows.columns.items()}
    header = {renamed.get(name) or (name.lower() if name.lower() in known else name) for name in written}
    for name in sorted(header - set(known)):
        near = [each for each in known if each not in header and suggest_column(each, [name])]
        meant = max(near, key=lambda each: SequenceMatcher(None, name, each).ratio(), default=None)
        if meant is None:
            guess = ""
        elif "Rename" in (advice := suggest_column(meant, [name])):
            guess = f"; did you mean {meant!r}?"
        else:
            guess = f". {advice}"
        rows.notes.append(f"column {name!r} is not read{guess}")
    by_end = {"start_time", "end_time"} <= header and "duration_s" not in header
    for table in read_tables(path, rows, WITHOUT_DURATION if by_end else COLUMNS, any_case=True):
        if not by_end:
            table.add()
            continue
        start_s, end_s = table["start_s"], table["end_s"]
        table.leave_out(np.isnan(start_s), "without a start time")
        state = np.where(np.isnan(end_s), RUNNING, table["end_state"])
        table.add(
            duration_s=np.nan_to_num(end_s - start_s), end_state=state, columns={"duration_s": "end_time - start_time"}
        )
