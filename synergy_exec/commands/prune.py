"""`prune`: removes what runs need not keep of jobs that have ended, after it was named and `--yes` typed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from synergy_core.commands import Parser
from synergy_core.errors import InputError
from synergy_exec.client import client_for
from synergy_exec.controller.jobs import ENDED
from synergy_exec.folders import lock, works
from synergy_exec.job_folder import Removal, Retention, removals, remove
from synergy_exec.plain import plain
from synergy_exec.recorded import open_journal
from synergy_exec.rereading import CHANGED
from synergy_exec.settings import Settings


def main(arguments: Sequence[str]) -> None:
    """Names what goes, with its bytes, and removes it with --yes alone. Raises InputError."""
    usual = Settings()
    parser = Parser(prog="python -m synergy_exec prune", description=__doc__)
    parser.add_argument(
        "what",
        metavar="DIR",
        help="results_dir, or RUN.work; runs under way are left alone. With --url: a job",
    )
    kept = parser.add_mutually_exclusive_group()
    kept.add_argument("--last-checkpoint", action="store_true", help="of each job its newest whole checkpoint stays")
    kept.add_argument(
        "--days", type=float, default=None, help="no weights and no logs of jobs that were last written to so long ago"
    )
    parser.add_argument("--yes", action="store_true", help="remove what is named")
    parser.add_argument("--url", default=None, help="asks the controller there, with the token in SYNERGY_TOKEN")
    given = parser.parse_args(arguments)
    if given.days is not None and not given.days >= 0:
        raise InputError(f"--days {given.days:g}: expected days, 0 or more.")
    if given.url is not None:
        _ask(given, usual)
        return
    found = 0
    for work in works(Path(given.what)):
        try:
            with lock(work):
                keep, days = _kept(work, given, usual)
                what = removals(work, _ended(work), keep, days)
                _say(what, yes=given.yes)
                if given.yes:
                    remove(what)
                found += len(what)
        except InputError as error:
            print(f"{work} is left alone: {error}", file=sys.stderr)
    if found and not given.yes:
        print("nothing is removed yet; type the same with --yes")
    elif not found:
        print("there is nothing to remove; --last-checkpoint and --days N keep less than the runs' own retention")


def _ask(given: argparse.Namespace, usual: Settings) -> None:
    """Has a controller prune a job."""
    asked = {"yes": given.yes, "last_checkpoint": given.last_checkpoint, "days": given.days}
    path = f"/jobs/{quote(given.what, safe='')}/prune"
    told = client_for(usual.results_dir, given.url).ask("POST", path, asked)
    _say_all(told["what"], told["bytes"], yes=given.yes)
    if not told["what"]:
        print("there is nothing to remove")
    elif not given.yes:
        print("nothing is removed yet; type the same with --yes")


def _say(what: list[Removal], *, yes: bool) -> None:
    _say_all(list(map(str, what)), sum(each.size_bytes for each in what), yes=yes)


def _say_all(what: list[str], size_bytes: int, *, yes: bool) -> None:
    action = "removing" if yes else "to remove"
    for each in what:
        print(f"{action}: {plain(each)}")
    if what:
        print(f"together {size_bytes:,} bytes")


def _kept(work: Path, given: argparse.Namespace, usual: Settings) -> tuple[Retention, float]:
    """As typed, else as the run's own settings have it."""
    if given.last_checkpoint:
        return "last_checkpoint", 0.0
    if given.days is not None:
        return "remove", given.days
    journal = open_journal(work)
    meta = journal.meta()
    own = {**meta.get("settings", {}), **meta.get(CHANGED, {})}
    journal.close()
    return own.get("retention", usual.retention), float(own.get("retention_days", usual.retention_days))


def _ended(work: Path) -> set[int]:
    """Jobs that have ended."""
    journal = open_journal(work)
    ended = {row.job for row in journal.jobs() if row.state in ENDED}
    journal.close()
    return ended
