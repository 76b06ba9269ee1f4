"""`python -m synergy_sim.traces`: lists published traces and formats, downloads a trace, and checks a job log."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from synergy_core.commands import Parser
from synergy_core.errors import InputError, unknown
from synergy_core.units import GB, HOUR_S, format_duration
from synergy_runs.traces import cluster_seen, formats, read_trace
from synergy_runs.traces._attempts import HOW
from synergy_runs.traces._download import SOURCES, download
from synergy_runs.traces.rows import END_STATES, Names, TraceRows, iso

# Summary of a job log for the terminal.


SHOWN_SIZES = 12


def lines(rows: TraceRows) -> Iterator[str]:
    """Yields a summary: jobs, dates, sizes, run times, attempts, tenants, GPU types; then jobs left out and notes."""
    jobs = len(rows)
    yield f"{rows.path} ({rows.format_name}): {jobs:,} jobs"
    yield f"  submitted   {iso(rows.submit_s.min())} to {iso(rows.submit_s.max())}"
    median_s, longest_s = np.sort(rows.duration_s)[[jobs // 2, -1]].tolist()
    yield f"  run time    median {format_duration(median_s)}, longest {format_duration(longest_s)}"
    yield f"  GPU-hours   {rows.duration_s @ rows.gpus / HOUR_S:,.1f}"
    yield f"  GPUs        {_size_counts(Counter(rows.gpus.tolist()))}"
    states = np.bincount(rows.end_state, minlength=len(END_STATES))
    yield "  end states  " + ", ".join(f"{count:,} {name}" for name, count in zip(END_STATES, states, strict=True))
    if rows.joined_attempts:
        yield f"  attempts    {rows.joined_attempts:,} further ones joined to their jobs"
    if retries := int((rows.attempt > 1).sum()):
        first, gaps_s = jobs - retries, np.sort(rows.retry_gap_s)
        yield (
            f"  attempts    {jobs:,} of {first:,} jobs, {jobs / first:.2f} a job, each submitted by itself; "
            f"median gap {format_duration(float(gaps_s[len(gaps_s) // 2]))}"
        )
    for what, names in (("tenants", rows.virtual_clusters), ("users", rows.users)):
        known = sum(map(bool, names.values()))
        yield f"  {what:11} {known:,}" if known else f"  {what:11} not in the log"
    yield f"  types asked {_type_counts(rows.gpu_type, rows.gpu_types)}"
    yield f"  types given {_type_counts(rows.given_gpu_type, rows.given_gpu_types, none='unknown')}"
    if partitions := sum(map(bool, rows.partitions.values())):
        yield f"  partitions  {partitions:,}"
    yield from cluster_seen.lines(rows)
    if rows.quotas:
        yield f"  quotas      {len(rows.quotas)} tenants, {sum(rows.quotas.values()):,} GPUs"
    for what, column, unit, scale in (("CPUs", rows.cpus, "", 1.0), ("memory", rows.memory_bytes, " GB", GB)):
        each = (column / rows.gpus / scale)[~np.isnan(column)]
        if len(each):
            yield (
                f"  {what:11} named by {len(each):,} of {jobs:,} jobs; "
                f"a GPU: median {np.median(each):,.4g}{unit}, most {each.max():,.4g}{unit}"
            )
    estimates = int((~np.isnan(rows.estimate_s)).sum())
    yield f"  estimates   {estimates:,} jobs with a run time declared by their user"
    for reason, count in rows.left_out.items():
        yield f"  left out    {count:,} {reason}"
    for note in rows.notes:
        yield f"  note        {note}"
    yield f"  bad rows    {rows.bad_count:,}"


def _type_counts(codes: NDArray[np.int32], names: Names, none: str = "any") -> str:
    counts = Counter(codes.tolist())
    listed = [(count, names.values()[code] or none) for code, count in counts.most_common(SHOWN_SIZES)]
    if [name for _, name in listed] == [none]:
        return "not in the log"
    more = f", and {len(counts) - SHOWN_SIZES} more" if len(counts) > SHOWN_SIZES else ""
    return ", ".join(f"{name}: {count:,}" for count, name in listed) + more


def _size_counts(sizes: Counter[int]) -> str:
    listed = ", ".join(f"{gpus}: {sizes[gpus]:,}" for gpus in sorted(sizes)[:SHOWN_SIZES])
    more = len(sizes) - SHOWN_SIZES
    return f"{listed}, and {more} more sizes up to {max(sizes)}" if more > 0 else listed


BAD_INPUT = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; the exit status is 0, or 2 for errors that the user can fix, such as bad rows."""
    given = _parser().parse_args(arguments)
    try:
        status: int = given.run(given)
        return status
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m synergy_sim.traces", description="Job logs to replay.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    listing = commands.add_parser("list", help="published traces and the formats that are read")
    listing.set_defaults(run=_list)
    fetching = commands.add_parser("download", help="fetch a published trace, verified; resumes what was interrupted")
    fetching.add_argument("name", metavar="NAME", help=", ".join(SOURCES))
    fetching.add_argument("--to", metavar="DIR", type=Path, default=Path("traces"), help="default: ./traces")
    fetching.set_defaults(run=_download)
    checking = commands.add_parser("check", help="read a job log and say what is in it; status 2 if rows are bad")
    checking.add_argument("file", metavar="FILE", type=Path)
    checking.add_argument("--format", metavar="NAME", help=f"recognised unless given: {', '.join(sorted(formats()))}")
    checking.add_argument("--attempts", choices=HOW, default=HOW[0], help="of requeued jobs; default: apart")
    checking.set_defaults(run=_check)
    return parser


def _list(given: argparse.Namespace) -> int:
    print("Published traces (python -m synergy_sim.traces download NAME):")
    for name, source in SOURCES.items():
        how = f"{source.size_bytes:,} bytes, verified" if source.sha256 else "by hand: no checksum is known to us"
        print(f"  {name:12} {source.what}\n  {'':12} {source.page} · {source.licence} · {how}")
    print("\nFormats that are read (trace.path=FILE; recognised, or named with trace.format=NAME):")
    for name, each in sorted(formats().items()):
        print(f"  {name:12} {each.SUMMARY}")
    return 0


def _download(given: argparse.Namespace) -> int:
    if given.name not in SOURCES:
        raise unknown("trace", given.name, SOURCES)
    source = SOURCES[given.name]
    files = download(source, given.to)
    for path in files:
        print(f"{path}  {path.stat().st_size:,} bytes")
    archive = given.to / source.archive
    if archive.is_file():
        print(f"{archive} is no longer needed; remove it if you like.")
    print(f"Replay it: python -m synergy_sim +trace={source.name} trace.path={files[0]}")
    return 0


def _check(given: argparse.Namespace) -> int:
    rows = read_trace(given.file, format_name=given.format, bad_rows="skip", attempts=given.attempts)
    print("\n".join(lines(rows)))
    if rows.bad_count:
        print(f"error: {rows.bad_rows_error()}", file=sys.stderr)
        return BAD_INPUT
    return 0
