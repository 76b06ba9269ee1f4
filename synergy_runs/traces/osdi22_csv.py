"""Jobs of Synergy's evaluation (OSDI 2022) as a list: which model arrives when, and how long it runs as requested.

Columns: job (an id), arrival_s (from the start), duration_s (with its GPUs' part of a node's CPUs and memory), model,
gpus. What generator `osdi22` draws, in a file.
"""

from __future__ import annotations

from pathlib import Path

from synergy_runs.traces._table import header_of, read_table
from synergy_runs.traces._values import number, whole
from synergy_runs.traces.rows import TraceRows

NAME = "osdi22_csv"
SUMMARY = "job lists of Synergy (OSDI 2022): job, arrival_s, duration_s, model, gpus"
COLUMNS = ("job", "arrival_s", "duration_s", "model", "gpus")


def recognises(path: Path, head: str) -> bool:
    """By its header."""
    return header_of(head) >= set(COLUMNS)


def read(path: Path, rows: TraceRows) -> None:
    """Adds every row; times stay relative to the list's own origin."""

    def add(line: int, job: str, arrival_s: str, duration_s: str, model: str, gpus: str) -> None:
        rows.add(
            line,
            submit_s=number(arrival_s, "arrival_s", "seconds"),
            duration_s=number(duration_s, "duration_s", "seconds"),
            gpus=whole(gpus, "gpus"),
            job_name=job.strip() or f"line-{line}",
            model=model.strip(),
            columns=("arrival_s", "duration_s", "gpus"),
            id_column="job" if job.strip() else "",
        )

    rows.from_zero = True
    read_table(path, rows, add, required=COLUMNS)
