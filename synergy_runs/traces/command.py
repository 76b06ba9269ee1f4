"""`python -m synergy_sim.traces`: lists published traces and formats, downloads a trace, and checks a job log."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from synergy_core.cli import Parser
from synergy_core.errors import InputError, unknown
from synergy_core.units import GB, HOUR_S, format_duration, format_gpus, format_percent
from synergy_runs.traces import cluster_seen, formats, read_trace
from synergy_runs.traces._attempts import ATTEMPT_MODES
from synergy_runs.traces._download import SOURCES, download
from synergy_runs.traces.room import MAX_ROOM_FRACTION, REASONS, seconds_with_room
from synergy_runs.traces.rows import STATES, TraceRows, iso

if TYPE_CHECKING:
    import pandas as pd

# Summary of a job log for the terminal.


SHOWN_SIZES = 12


def lines(rows: TraceRows) -> Iterator[str]:
    """Yields a summary: jobs, dates, sizes, run times, attempts, tenants, GPU types; then jobs left out and notes."""
    jobs = rows.jobs
    yield f"{rows.path} ({rows.format_name}): {len(jobs):,} job{'s' * (len(jobs) > 1)}"
    yield f"  submitted   {iso(jobs['submit_s'].min())} to {iso(jobs['submit_s'].max())}"
    median_s, longest_s = float(np.median(jobs["duration_s"])), float(jobs["duration_s"].max())
    yield f"  run time    median {format_duration(median_s)}, longest {format_duration(longest_s)}"
    yield f"  GPU-hours   {jobs['duration_s'] @ jobs['gpus'] / HOUR_S:,.1f}"
    sizes = {format_gpus(gpus): count for gpus, count in sorted(Counter(jobs["gpus"].tolist()).items())}
    yield f"  jobs of     {_listed(sizes)}"
    states = np.bincount(jobs["end_state"].codes, minlength=len(STATES))
    yield "  end states  " + ", ".join(f"{count:,} {name}" for name, count in zip(STATES, states, strict=True))
    if retries := int((jobs["attempt"] > 1).sum()):
        first = len(jobs) - retries
        yield (
            f"  attempts    {len(jobs):,} of {first:,} jobs, {len(jobs) / first:.2f} per job, each a submission of its "
            f"own; median gap {format_duration(float(np.median(rows.retry_gap_s)))}"
        )
    for what, names in (("tenants", jobs["virtual_cluster"]), ("users", jobs["user"])):
        known = sum(map(bool, names.categories))
        yield f"  {what:11} {known:,}" if known else f"  {what:11} not in the log"
    yield f"  GPU types   requested: {_counts(jobs['gpu_type'])}"
    yield f"  GPU types   received: {_counts(jobs['given_gpu_type'], none='unknown')}"
    if partitions := sum(map(bool, jobs["partition"].categories)):
        yield f"  partitions  {partitions:,}"
    yield from cluster_seen.lines(rows)
    yield from _waiting(rows)
    if rows.quotas:
        yield f"  quotas      {len(rows.quotas)} tenants, {sum(rows.quotas.values()):,} GPUs"
    for what, name, unit, scale in (("CPUs", "cpus", "", 1.0), ("memory", "memory_bytes", " GB", GB)):
        per_gpu = (jobs[name] / jobs["gpus"] / scale)[~np.isnan(jobs[name])]
        if len(per_gpu):
            yield (
                f"  {what:11} requested by {len(per_gpu):,} of {len(jobs):,} jobs; "
                f"per GPU: median {np.median(per_gpu):,.4g}{unit}, most {per_gpu.max():,.4g}{unit}"
            )
    estimates = int((~np.isnan(jobs["estimate_s"])).sum())
    yield f"  estimates   {estimates:,} jobs with a run time declared by their user"
    for reason, count in rows.left_out.items():
        gpu_s = rows.left_out_gpu_s[reason]
        yield f"  left out    {count:,} {reason}" + f" ({gpu_s / HOUR_S:,.1f} GPU-hours)" * (gpu_s > 0)
    for note in rows.notes:
        yield f"  note        {note}"
    yield f"  bad rows    {rows.bad_count:,}"


def _waiting(rows: TraceRows) -> Iterator[str]:
    """How much of the waiting passed with room for the job: in all, and by partition, size and tenant."""
    jobs = rows.jobs
    wait_s = np.fmax(jobs["start_s"] - jobs["submit_s"], 0.0)
    room_s = np.nan_to_num(seconds_with_room(rows, cluster_seen.seen(rows)))
    if not wait_s.sum() > 0:
        return
    share = format_percent(room_s.sum() / wait_s.sum())
    yield (
        f"  waiting     {format_duration(wait_s.sum())} in all, {format_duration(wait_s.mean())} per job; for {share} "
        "of it, as many GPUs as the job needed were free, on any nodes"
    )
    sizes, size = np.unique(jobs["gpus"], return_inverse=True)
    for what, code, names in (
        ("partition", jobs["partition"].codes, jobs["partition"].categories),
        ("size", size, [format_gpus(each) for each in sizes.tolist()]),
        ("tenant", jobs["virtual_cluster"].codes, jobs["virtual_cluster"].categories),
    ):
        waits_s, rooms_s = (np.bincount(code, each, minlength=len(names)) for each in (wait_s, room_s))
        most = [at for at in np.argsort(-waits_s, kind="stable")[:SHOWN_SIZES].tolist() if waits_s[at] > 0]
        texts = [
            f"{names[at] or '(none)'} {format_percent(rooms_s[at] / waits_s[at])} of {format_duration(waits_s[at])}"
            for at in most
        ]
        if len(names) > 1:
            yield f"              by {what}: {', '.join(texts)}"
    if room_s.sum() > MAX_ROOM_FRACTION * wait_s.sum():
        yield f"              So policies are not compared with this log. Its waiting was for {REASONS}."


def _counts(names: pd.Categorical, none: str = "any") -> str:
    found = {name or none: count for name, count in Counter(names).most_common()}
    return "not in the log" if list(found) == [none] else _listed(found)


def _listed(counts: Mapping[str, int]) -> str:
    more = f", and {len(counts) - SHOWN_SIZES} more" if len(counts) > SHOWN_SIZES else ""
    return ", ".join(f"{name}: {count:,}" for name, count in list(counts.items())[:SHOWN_SIZES]) + more


BAD_INPUT = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; the exit status is 0, or 2 for errors that the user can fix, such as bad rows."""
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
        return status
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m synergy_sim.traces", description="Job logs to replay.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    listing = commands.add_parser("list", help="list published traces and the formats that can be read")
    listing.set_defaults(run=_list)
    fetching = commands.add_parser("download", help="download and verify a published trace; resumes if interrupted")
    fetching.add_argument("name", metavar="NAME", help=", ".join(SOURCES))
    fetching.add_argument("--to", metavar="DIR", type=Path, default=Path("traces"), help="default: ./traces")
    fetching.set_defaults(run=_download)
    checking = commands.add_parser("check", help="read a job log and print a summary; exit status 2 if rows are bad")
    checking.add_argument("file", metavar="FILE", type=Path)
    checking.add_argument("--format", metavar="NAME", help=f"default: recognised; {', '.join(sorted(formats()))}")
    checking.add_argument("--attempts", choices=ATTEMPT_MODES, default="apart", help="of requeued jobs; default: apart")
    checking.add_argument("--columns", metavar="OURS=THEIRS,…", default="", help="columns of a CSV of any other kind")
    checking.set_defaults(run=_check)
    return parser


def _list(options: argparse.Namespace) -> int:
    print("Published traces (python -m synergy_sim.traces download NAME):")
    for name, source in SOURCES.items():
        how = f"{source.size_bytes:,} bytes, verified" if source.sha256 else "by hand: we know no checksum"
        print(f"  {name:12} {source.what}\n  {'':12} {source.page} · {source.licence} · {how}")
    print("\nFormats that are read (trace.path=FILE; recognised, or named with trace.format=NAME):")
    for name, each in sorted(formats().items()):
        print(f"  {name:12} {each.SUMMARY}")
    return 0


def _download(options: argparse.Namespace) -> int:
    if options.name not in SOURCES:
        raise unknown("trace", options.name, SOURCES)
    source = SOURCES[options.name]
    files = download(source, options.to)
    for path in files:
        print(f"{path}  {path.stat().st_size:,} bytes")
    archive = options.to / source.archive
    if archive.is_file():
        print(f"{archive} is no longer needed; remove it if you like.")
    print(f"Replay it: python -m synergy_sim +trace={source.name} trace.path={files[0]}")
    return 0


def _check(options: argparse.Namespace) -> int:
    columns = dict(re.findall(r"([^,=\s]+)\s*=\s*([^,]*[^,\s])", options.columns))
    how = {"format_name": options.format, "attempts": options.attempts, "columns": columns}
    rows = read_trace(options.file, bad_rows="skip", **how)
    width = shutil.get_terminal_size((10_000, 24)).columns  # lines are whole where nobody shows them
    for line in lines(rows):  # settings are not cut, so that they can be copied
        cut = textwrap.wrap(line, width, subsequent_indent=" " * 14, break_long_words=False, break_on_hyphens=False)
        print("\n".join([line] if line.startswith("  settings") else cut))
    if rows.bad_count:
        print(f"error: {rows.bad_rows_error()}", file=sys.stderr)
        return BAD_INPUT
    return 0
