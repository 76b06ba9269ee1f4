"""Our own CSV, for logs that come in none of the other formats.

Required columns: submit_time (seconds, or a date), duration_s, gpus. Optional: job, virtual_cluster, user,
end_state (completed, killed, failed), estimate_s (the run time the user declared), gpu_type (asked for; empty is any),
model, cpus and memory_bytes (asked for, of the whole job). Order is free, and so are capitals in the names. Columns
are separated by commas, or by semicolons as some spreadsheets write them; a first line `sep=;` may say so. A `job` is
an id: two rows may not have the same.
"""

from __future__ import annotations

from difflib import SequenceMatcher
from pathlib import Path

from synergy_core.columns import renamed
from synergy_runs.traces._table import header_of, read_table
from synergy_runs.traces._text import open_text
from synergy_runs.traces._values import end_state, instant_s, is_missing, number, whole
from synergy_runs.traces.demands import demanded_bytes, demanded_cpus
from synergy_runs.traces.rows import UNKNOWN, TraceRows

NAME = "plain"
SUMMARY = (
    "a CSV of your own: submit_time, duration_s, gpus "
    "[job, virtual_cluster, user, end_state, estimate_s, gpu_type, cpus, memory_bytes]"
)

REQUIRED = ("submit_time", "duration_s", "gpus")
OPTIONAL = (
    "job",
    "virtual_cluster",
    "user",
    "end_state",
    "estimate_s",
    "gpu_type",
    "model",
    "cpus",
    "memory_bytes",
)


def recognises(path: Path, head: str) -> bool:
    """By two of its three required columns, so that a misspelt third is named rather than the format unknown; but for
    the time as `osdi22_csv` calls it.
    """
    header = {name.lower() for name in header_of(head)}
    return len(header & set(REQUIRED)) >= 2 and "arrival_s" not in header


def read(path: Path, rows: TraceRows) -> None:
    """Adds every row; columns that are not read are noted with the nearest known name."""

    def add(
        line: int,
        submit_time: str,
        duration: str,
        gpus: str,
        job: str,
        tenant: str,
        user: str,
        state: str,
        estimate: str,
        gpu_type: str,
        model: str,
        cpus: str,
        memory: str,
    ) -> None:
        rows.add(
            line,
            submit_s=instant_s(submit_time, "submit_time"),
            duration_s=number(duration, "duration_s", "seconds"),
            gpus=whole(gpus, "gpus"),
            job_name=job.strip() or f"line-{line}",
            virtual_cluster=tenant.strip(),
            user=user.strip(),
            end_state="completed" if is_missing(state) else end_state(state, "end_state"),
            estimate_s=UNKNOWN if is_missing(estimate) else number(estimate, "estimate_s", "seconds"),
            gpu_type=gpu_type.strip().lower(),
            model=model.strip(),
            cpus=demanded_cpus(cpus, "cpus"),
            memory_bytes=demanded_bytes(memory, "memory_bytes"),
            columns=("submit_time", "duration_s", "gpus"),
            demand_columns=("cpus", "memory_bytes"),
            id_column="job" if job.strip() else "",
        )

    _note_unread_columns(path, rows)
    read_table(path, rows, add, required=REQUIRED, optional=OPTIONAL, any_case=True)


def _note_unread_columns(path: Path, rows: TraceRows) -> None:
    with open_text(path) as stream:
        written = header_of(stream.readline() + stream.readline())
    known = (*REQUIRED, *OPTIONAL)
    header = {name.lower() if name.lower() in known else name for name in written}
    for name in sorted(header - set(known)):
        near = [each for each in known if each not in header and renamed(each, [name])]
        meant = max(near, key=lambda each: SequenceMatcher(None, name, each).ratio(), default=None)
        if meant is None:
            guess = ""
        elif "Rename" in (advice := renamed(meant, [name])):
            guess = f"; did you mean {meant!r}?"
        else:
            guess = f". {advice}"
        rows.notes.append(f"column {name!r} is not read{guess}")
