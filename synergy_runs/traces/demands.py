"""CPUs and host memory that a job asks for beside GPUs: text to numbers, and how many rows are silent.

Nothing is made up for a silent row: its columns are NaN. What cannot be is refused by `TraceRows.add`.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isnan

from synergy_runs.traces._values import is_missing, number
from synergy_runs.traces.rows import UNKNOWN, TraceRows

MIB_BYTES = 2.0**20
FAR_BELOW = 0.5
"""A declared run time below this fraction of the true one is reported."""


def demanded_cpus(text: str, column: str, *, per_core: int = 1) -> float:
    """CPU cores in a number of which so many are a core; NaN for none."""
    return UNKNOWN if is_missing(text) else number(text, column, "a number of CPUs") / per_core


def demanded_bytes(text: str, column: str, *, unit: float = 1.0) -> float:
    """Host memory in a number of `unit` bytes; NaN for none, and for 0, by which logs say that none was asked for."""
    return UNKNOWN if is_missing(text) else number(text, column, "an amount of memory") * unit or UNKNOWN


def short_estimates(rows: TraceRows) -> Iterator[str]:
    """How many jobs ran for far longer than their users declared: one line where any did."""
    pairs = zip(rows.estimate_s, rows.duration_s, strict=True)
    declared = [(estimate_s, run_s) for estimate_s, run_s in pairs if not isnan(estimate_s)]
    short = sum(estimate_s < FAR_BELOW * run_s for estimate_s, run_s in declared)
    if short:
        yield (
            f"{short:,} of {len(declared):,} declared run times are less than {FAR_BELOW:.0%} of what the job ran: are "
            "they in seconds? Policies that read them (easy) plan with them as they are"
        )


def silent_rows(rows: TraceRows) -> Iterator[str]:
    """How many rows name no CPUs, and no memory, and how many do: a line each where some do and some do not."""
    for what, column in (("CPUs", rows.cpus), ("memory", rows.memory_bytes)):
        silent = sum(isnan(each) for each in column)
        if 0 < silent < len(rows):
            verb = "names" if silent == 1 else "name"
            yield f"{silent:,} of {len(rows):,} rows {verb} no {what}; {len(rows) - silent:,} do"
