"""`python -m synergy_sim.traces`: which traces there are, fetching one, and checking a job log."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from synergy_core.errors import InputError, unknown
from synergy_core.parser import Parser
from synergy_runs.traces import formats, read_trace, summaries
from synergy_runs.traces._attempts import HOW
from synergy_runs.traces._download import download
from synergy_runs.traces._sources import SOURCES, by_name
from synergy_runs.traces._summary import lines

BAD_INPUT = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; the exit status is 0 or 2 for what the user can mend (bad rows too)."""
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
    fetching.add_argument("name", metavar="NAME", help=", ".join(by_name()))
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
    for each in SOURCES:
        how = f"{each.size_bytes:,} bytes, verified" if each.downloadable else "by hand: no checksum is known to us"
        print(f"  {each.name:12} {each.what}\n  {'':12} {each.page} · {each.licence} · {how}")
    print("\nFormats that are read (trace.path=FILE; recognised, or named with trace.format=NAME):")
    for name, summary in summaries():
        print(f"  {name:12} {summary}")
    return 0


def _download(given: argparse.Namespace) -> int:
    known = by_name()
    if given.name not in known:
        raise unknown("trace", given.name, known)
    source = known[given.name]
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
