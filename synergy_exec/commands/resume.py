"""`resume`: goes on with a run that was broken off, with the settings that it was started with.

Those that say where and how it is carried out may be others: resume host=10.0.0.2 backend.options.slots=2
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import sqlite3
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from synergy_core.commands import Parser
from synergy_core.errors import InputError
from synergy_exec import job_folder
from synergy_exec.controller import journal_file as checksums
from synergy_exec.controller.journal import Journal
from synergy_exec.controller.journal_file import opened
from synergy_exec.controller.reconcile import ADOPTED
from synergy_exec.folders import WORK, lock, newest, under_way
from synergy_exec.rereading import changed
from synergy_exec.run import SERVED, run
from synergy_exec.settings import Settings
from synergy_runs.facts import Kind

NAME = "journal.sqlite"
_PARTS = ("", "-wal", checksums.COMMITS)
_DAMAGED = re.compile(rf"{re.escape(NAME)}\.damaged-(\d+)")
_HISTORY = ("facts", "jobs", "runs")
"""What happened: rows that follow from each other."""
_OF_HISTORY = ("facts", "runs", "timings")


class Remains(NamedTuple):
    """What is left of a table. whole: whether that is all there was."""

    rows: list[dict[str, Any]]
    whole: bool


def salvage(work: Path) -> list[str]:
    """Makes a journal of what is left of a work folder's; says what that is, and where the damaged one is now.

    The folder is the caller's own by now. Raises InputError where nothing is damaged, or nothing left.
    """
    path, earlier = work / NAME, _earlier(work)
    if path.is_file() and _is_whole(path):
        raise InputError(f"{path} is whole; there is nothing to salvage. Type the same without --salvage.")
    if not path.is_file() and not earlier and not job_folder.folders(work):
        raise InputError(f"{work}: neither a journal nor jobs are in it; expected the work folder of a run.")
    # Without a journal, but with one that was put aside, an earlier salvage was cut off.
    source = path if path.is_file() or not earlier else earlier[-1]
    made = work / f".{NAME}.salvaged"
    for part in _PARTS:
        made.with_name(made.name + part).unlink(missing_ok=True)
    left, lost = _left(source, work)
    said, commits = _make(made, left)
    if lost:
        said.append(f"its last {lost} commits are lost: a job that ended in them, or was cancelled, goes on")
    if path.is_file():
        aside = work / f"{NAME}.damaged-{len(earlier) + 1}"
        for part in _PARTS:
            if (each := path.with_name(NAME + part)).is_file():
                each.rename(aside.with_name(aside.name + part))
        path.with_name(f"{NAME}-shm").unlink(missing_ok=True)
        said.append(f"the damaged journal is {aside} now")
    made.rename(path)
    checksums.witness(path, commits)
    return said


def _earlier(work: Path) -> list[Path]:
    found = {int(match[1]): each for each in work.iterdir() if (match := _DAMAGED.fullmatch(each.name))}
    return [found[number] for number in sorted(found)]


def _is_whole(path: Path) -> bool:
    try:
        opened(path).close()
    except InputError:
        return False
    return True


def _make(made: Path, left: dict[str, Remains]) -> tuple[list[str], int]:
    """The new journal; what is in it, and how many commits it has."""
    connection = opened(made)
    history = all(name in left and left[name].whole for name in _HISTORY)
    known = {int(row["job"]) for row in left["jobs"].rows} if "jobs" in left else set()
    said = []
    connection.execute("BEGIN IMMEDIATE")
    for table in checksums.tables(connection):
        remains = left.get(table, Remains([], False))
        if table in _OF_HISTORY and not history:
            continue
        for row in (each for each in remains.rows if int(each.get("job", -1)) in known or "job" not in each):
            places = ", ".join("?" * len(row))
            connection.execute(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({places})", tuple(row.values()))
        if not remains.whole:
            said.append(f"of its table {table}, {len(remains.rows)} rows are left")
    if not history:
        said.append("what ran where and when is forgotten, of all its jobs; what they have trained is not")
        for job in sorted(left["jobs"].rows if "jobs" in left else [], key=lambda row: (row["submit_s"], row["job"])):
            asked = int(json.loads(job["file"])["slots"])
            connection.execute(
                "INSERT INTO facts (time_s, kind, job, gpus, placement) VALUES (?, ?, ?, ?, '[]')",
                (job["submit_s"], int(Kind.SUBMIT), job["job"], asked),
            )
        connection.execute("INSERT OR REPLACE INTO meta (name, value) VALUES (?, 'true')", (ADOPTED,))
    commits = checksums.count_commit(connection)
    connection.execute("COMMIT")
    connection.close()
    return said, commits


def _left(source: Path, work: Path) -> tuple[dict[str, Remains], int]:
    """By table what is left of a damaged journal, which is only read; and how many of its commits are lost."""
    if not source.is_file():
        return {}, 0
    with tempfile.TemporaryDirectory(dir=work, prefix=".salvage-") as folder:
        copy = Path(folder) / NAME
        for part in _PARTS:
            if (each := source.with_name(source.name + part)).is_file():
                shutil.copyfile(each, copy.with_name(NAME + part))
        like = opened(Path(folder) / "like.sqlite")
        columns = {table: checksums.values(like, table) for table in checksums.tables(like)}
        like.close()
        old = sqlite3.connect(copy, isolation_level=None)
        old.row_factory = sqlite3.Row
        old.text_factory = lambda given: given.decode(errors="replace")
        try:
            left = {table: _rows_left(old, table, names) for table, names in columns.items()}
            with contextlib.suppress(sqlite3.Error, TypeError):
                return left, max(0, checksums.witnessed(source) - checksums.commits(old))
            return left, 0
        finally:
            old.close()


def _rows_left(old: sqlite3.Connection, table: str, columns: list[str]) -> Remains:
    """What is read from the beginning until it cannot be, and from the end."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    behind: list[tuple[Any, ...]] = []
    for order in ("ASC", "DESC"):
        try:
            for row in old.execute(f"SELECT {', '.join(columns)}, crc FROM {table} ORDER BY {columns[0]} {order}"):
                key = tuple(row)[:-1]
                if row["crc"] == checksums.of(table, key) and key not in found:
                    found[key] = dict(zip(columns, key, strict=True))
                    behind += [key] if order == "DESC" else []
        except sqlite3.Error:
            continue
    last = set(behind)
    in_order = [key for key in found if key not in last] + behind[::-1]
    try:
        sums = old.execute("SELECT rows, total FROM sums WHERE name = ?", (table,)).fetchone()
    except sqlite3.Error:
        sums = None
    total = sum(checksums.of(table, key) for key in found) % checksums.MODULUS
    return Remains([found[key] for key in in_order], sums is not None and tuple(sums) == (len(found), total))


TRAINS = True


def main(arguments: Sequence[str]) -> None:
    """As the command would that began the run, typed once more in the same place. Raises InputError."""
    parser = Parser(prog="python -m synergy_exec resume", description=__doc__)
    parser.add_argument(
        "words",
        nargs="*",
        metavar="RUN.work KEY=VALUE",
        help="its work folder, by default the one under way below --dir; and keys that are to be others from now on",
    )
    parser.add_argument("--dir", type=Path, default=Settings().results_dir, help="results_dir")
    parser.add_argument(
        "--salvage",
        action="store_true",
        help="first make another journal of what is left of a damaged one and of the jobs' folders",
    )
    given = parser.parse_args(arguments)
    named = [Path(word) for word in given.words if word.endswith(WORK) or "=" not in word]
    if len(named) > 1:
        parser.error(f"one RUN.work at a time, not {len(named)}")
    if given.salvage:
        if not named:
            parser.error("--salvage needs RUN.work")
        with lock(damaged := _there(named[0])):
            print("\n".join(salvage(damaged)))
    work = _there(named[0] if named else under_way(given.dir))
    typed = [word for word in given.words if Path(word) not in named]
    run(changed(_values(work), typed), anew=False)


def _there(work: Path) -> Path:
    if not work.is_dir() or not work.name.endswith(WORK):
        raise InputError(f"{work}: expected the work folder of a run, such as results/demo/latest/synergy-0.work.")
    return work.resolve()


def _values(work: Path) -> dict[str, Any]:
    """The settings that the run was started with, as Hydra composed them."""
    journal = Journal(work / "journal.sqlite")
    values: dict[str, Any] = journal.meta().get("settings", {})
    journal.close()
    if not values:
        raise InputError(
            f"{work}: its journal does not say with which settings the run was started. Type the command that began "
            "it; that goes on with what is there."
        )
    policies = values.pop("compared_with", None) or [values["policy"]]
    name = values["trace"]["name"] if values.get("trace") else SERVED
    base = work.with_name(f"{values['policy']}-{values['seed']}")
    if work.parent.name != name or newest(base) != work:
        raise InputError(
            f"{work} is not where its run is filed: the newest of it is {newest(base)}, in a folder called {name}."
        )
    return {**values, "policy": policies, "results_dir": str(work.parent.parent)}
