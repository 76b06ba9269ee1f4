"""Reader of the job lists of Synergy's evaluation (OSDI 2022), which the generator `osdi22` also draws.

Columns: job (an id), arrival_s (from the list's start), duration_s (with the GPU-proportional share of a node's CPUs
and memory), model, gpus.
"""

from __future__ import annotations

from pathlib import Path

from synergy_runs.traces._reading import Number, Text, header_of, read_jobs
from synergy_runs.traces.rows import TraceRows, seconds, whole

NAME = "osdi22_csv"
SUMMARY = "job lists of Synergy (OSDI 2022): job, arrival_s, duration_s, model, gpus"
COLUMNS = {
    "job_name": Text("job"),
    "submit_s": Number("arrival_s", seconds),
    "duration_s": Number("duration_s", seconds),
    "gpus": Number("gpus", whole),
    "model": Text("model"),
}


def recognises(path: Path, head: str) -> bool:
    """Recognises the format by the column names in the header."""
    return header_of(head) >= {each.name for each in COLUMNS.values()}


def read(path: Path, rows: TraceRows) -> None:
    """Adds every row; times count from the list's own origin."""
    rows.from_zero = True
    read_jobs(path, rows, COLUMNS)
