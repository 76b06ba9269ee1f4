"""Another journal in place of one that cannot be read: of its rows that are as they were written. That one is kept.

Jobs whose rows are lost are taken in from their folders when the run goes on (`reconcile`).
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import sqlite3
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from synergy_core.errors import InputError
from synergy_exec import job_folder
from synergy_exec.controller import checksums
from synergy_exec.controller.journal_file import opened
from synergy_exec.controller.reconcile import ADOPTED
from synergy_runs.log import Kind

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
