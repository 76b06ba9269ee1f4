"""What a job log holds, in a few lines for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from math import isnan
from statistics import median

from synergy_core.units import GB, HOUR_S, format_duration
from synergy_runs.traces import cluster_seen
from synergy_runs.traces.rows import END_STATES, Names, TraceRows
from synergy_runs.traces.times import iso

SHOWN_SIZES = 12


def lines(rows: TraceRows) -> Iterator[str]:
    """Jobs, dates, sizes, durations, attempts, tenants, types; then what was left out, is odd, or bad."""
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
    yield from _attempts(rows)
    for what, names in (("tenants", rows.virtual_clusters), ("users", rows.users)):
        known = [name for name in names.values() if name]
        yield f"  {what:11} {len(known):,}" if known else f"  {what:11} not in the log"
    yield f"  types asked {_types(rows.gpu_type, rows.gpu_types)}"
    yield f"  types given {_types(rows.given_gpu_type, rows.given_gpu_types, none='unknown')}"
    partitions = [name for name in rows.partitions.values() if name]
    if partitions:
        yield f"  partitions  {len(partitions):,}"
    yield from cluster_seen.lines(rows)
    if rows.quotas:
        yield f"  quotas      {len(rows.quotas)} tenants, {sum(rows.quotas.values()):,} GPUs"
    yield from _demands(rows)
    estimates = sum(not isnan(each) for each in rows.estimate_s)
    yield f"  estimates   {estimates:,} jobs with a run time declared by their user"
    for reason, count in rows.left_out.items():
        yield f"  left out    {count:,} {reason}"
    for note in rows.notes:
        yield f"  note        {note}"
    yield f"  bad rows    {rows.bad_count:,}"


def _attempts(rows: TraceRows) -> Iterator[str]:
    """How many runs jobs took, where the log has jobs that took several."""
    if rows.joined_attempts:
        yield f"  attempts    {rows.joined_attempts:,} further ones joined to their jobs"
    retries = sum(number > 1 for number in rows.attempt)
    if retries:
        jobs, gaps = len(rows) - retries, sorted(rows.retry_gap_s)
        yield (
            f"  attempts    {len(rows):,} of {jobs:,} jobs, {len(rows) / jobs:.2f} a job, each submitted by itself; "
            f"median gap {format_duration(gaps[len(gaps) // 2])}"
        )


def _demands(rows: TraceRows) -> Iterator[str]:
    """CPUs and memory that jobs ask for, where any does."""
    for what, column, unit, scale in (("CPUs", rows.cpus, "", 1.0), ("memory", rows.memory_bytes, " GB", GB)):
        each = [asked / gpus / scale for asked, gpus in zip(column, rows.gpus, strict=True) if not isnan(asked)]
        if each:
            yield (
                f"  {what:11} named by {len(each):,} of {len(rows):,} jobs; "
                f"a GPU: median {median(each):,.4g}{unit}, most {max(each):,.4g}{unit}"
            )


def _types(codes: Iterable[int], names: Names, none: str = "any") -> str:
    counts = Counter(codes)
    listed = [(count, names.values()[code] or none) for code, count in counts.most_common(SHOWN_SIZES)]
    if [name for _, name in listed] == [none]:
        return "not in the log"
    more = f", and {len(counts) - SHOWN_SIZES} more" if len(counts) > SHOWN_SIZES else ""
    return ", ".join(f"{name}: {count:,}" for count, name in listed) + more


def _sizes(sizes: Counter[int]) -> str:
    listed = ", ".join(f"{gpus}: {sizes[gpus]:,}" for gpus in sorted(sizes)[:SHOWN_SIZES])
    more = len(sizes) - SHOWN_SIZES
    return f"{listed}, and {more} more sizes up to {max(sizes)}" if more > 0 else listed
