"""What a job log holds, in a few lines for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import isnan

from synergy_core.units import HOUR_S, format_duration
from synergy_runs.traces.rows import END_STATES, TraceRows
from synergy_runs.traces.times import iso

SHOWN_SIZES = 12


def lines(rows: TraceRows) -> Iterator[str]:
    """Jobs, dates, sizes, durations, tenants; then what was left out, what is odd and how many rows are bad."""
    jobs = len(rows)
    yield f"{rows.path} ({rows.format_name}): {jobs:,} jobs"
    yield f"  submitted   {iso(min(rows.submit_s))} to {iso(max(rows.submit_s))}"
    durations = sorted(rows.duration_s)
    yield f"  run time    median {format_duration(durations[jobs // 2])}, longest {format_duration(durations[-1])}"
    gpu_hours = sum(d * g for d, g in zip(rows.duration_s, rows.gpus, strict=True)) / HOUR_S
    yield f"  GPU-hours   {gpu_hours:,.1f}"
    yield f"  GPUs        {_sizes(Counter(rows.gpus))}"
    states = Counter(rows.end_state)
    yield "  end states  " + ", ".join(f"{states[code]:,} {name}" for code, name in enumerate(END_STATES))
    for what, names in (("tenants", rows.virtual_clusters), ("users", rows.users), ("GPU types", rows.gpu_types)):
        known = [name for name in names.values() if name]
        yield f"  {what:11} {len(known):,}" if known else f"  {what:11} not in the log"
    if rows.quotas:
        yield f"  quotas      {len(rows.quotas)} tenants, {sum(rows.quotas.values()):,} GPUs"
    estimates = sum(not isnan(each) for each in rows.estimate_s)
    yield f"  estimates   {estimates:,} jobs with a run time declared by their user"
    for reason, count in rows.left_out.items():
        yield f"  left out    {count:,} {reason}"
    for note in rows.notes:
        yield f"  note        {note}"
    yield f"  bad rows    {rows.bad_count:,}"


def _sizes(sizes: Counter[int]) -> str:
    listed = ", ".join(f"{gpus}: {sizes[gpus]:,}" for gpus in sorted(sizes)[:SHOWN_SIZES])
    more = len(sizes) - SHOWN_SIZES
    return f"{listed}, and {more} more sizes up to {max(sizes)}" if more > 0 else listed
