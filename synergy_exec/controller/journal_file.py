"""A journal's file: made, opened, checked from its first row to its last, brought up to date."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import zlib
from pathlib import Path

from synergy_core.errors import InputError

# Checksums of a journal's rows: what changed or vanished on the disk is seen when the journal is opened.
#
# Each row has the CRC-32 of its values in `crc`, and `sums` the number of each table's rows and the sum of theirs.
# Triggers of the connection keep both up with whatever is written, so that no statement can forget them.
# What is cut off at the end, as of SQLite's write-ahead log, leaves an older journal that is whole in itself.
# Therefore
# a file beside it, `journal.sqlite-commits`, says how many commits there were.


COMMITS = "-commits"
_JOURNAL = "commits"
"""Under this name `sums` counts the commits; no table is called so."""
MODULUS = 1 << 32
_SUMS = "CREATE TABLE IF NOT EXISTS sums (name TEXT PRIMARY KEY, rows INTEGER NOT NULL, total INTEGER NOT NULL)"
_DIGITS = 19


def add(connection: sqlite3.Connection) -> None:
    """Gives every table its checksums, as its rows are now. Within a transaction; before `keep`."""
    _know(connection)
    connection.execute(_SUMS)
    connection.execute("INSERT OR IGNORE INTO sums VALUES (?, 0, 0)", (_JOURNAL,))
    for table in tables(connection):
        if "crc" not in [name for name, _ in _columns(connection, table)]:
            connection.execute(f"ALTER TABLE {table} ADD COLUMN crc INTEGER NOT NULL DEFAULT 0")
        connection.execute(f"UPDATE {table} SET crc = {_crc(connection, table)}")
        connection.execute(
            f"INSERT OR REPLACE INTO sums SELECT '{table}', count(*), ifnull(sum(crc), 0) % {MODULUS} FROM {table}"
        )


def keep(connection: sqlite3.Connection) -> None:
    """From now on whatever this connection writes has its checksums."""
    _know(connection)
    # Else a row that another takes the place of would go without its trigger.
    connection.execute("PRAGMA recursive_triggers = ON")
    for table in tables(connection):
        own = ", ".join(values(connection, table))
        keys = [name for name, key in _columns(connection, table) if key] or ["rowid"]
        this = " AND ".join(f"{key} = NEW.{key}" for key in keys)
        summed = f"UPDATE {table} SET crc = {_crc(connection, table)} WHERE {this};"
        new = f"(SELECT crc FROM {table} WHERE {this})"
        for name, event, first, rows, total in (
            ("added", "INSERT", summed, 1, new),
            ("changed", f"UPDATE OF {own}", summed, 0, f"{new} - OLD.crc"),
            ("removed", "DELETE", "", -1, "- OLD.crc"),
        ):
            connection.execute(
                f"CREATE TEMP TRIGGER {table}_{name} AFTER {event} ON main.{table} BEGIN {first} "
                f"UPDATE sums SET rows = rows + {rows}, total = (total + {total}) & {MODULUS - 1} "
                f"WHERE name = '{table}'; END"
            )


def damage(connection: sqlite3.Connection) -> str:
    """The first thing found that is not as it was written, in words; "" if all is. Raises sqlite3.Error."""
    _know(connection)
    sums = {name: (rows, total) for name, rows, total in connection.execute("SELECT name, rows, total FROM sums")}
    for table in tables(connection):
        if changed := odd_rows(connection, table):
            return f"row {changed[0]} of its table {table} has changed since it was written"
        rows, total = connection.execute(f"SELECT count(*), ifnull(sum(crc), 0) FROM {table}").fetchone()
        if table not in sums:
            return f"how many rows table {table} has is written nowhere"
        if rows != sums[table][0]:
            return f"{rows} rows are in its table {table} and {sums[table][0]} were written"
        if total % MODULUS != sums[table][1]:
            return f"the rows of its table {table} are not those that were written"
    return "" if _JOURNAL in sums else "how many commits there were is written nowhere"


def odd_rows(connection: sqlite3.Connection, table: str) -> list[str]:
    """The keys of rows that are not as they were written."""
    key = next((name for name, key in _columns(connection, table) if key), "rowid")
    found = connection.execute(f"SELECT {key} FROM {table} WHERE crc IS NOT {_crc(connection, table)}")
    return [str(each) for (each,) in found]


def tables(connection: sqlite3.Connection) -> list[str]:
    """The tables with rows of ours, by name."""
    found = connection.execute("SELECT name FROM main.sqlite_master WHERE type = 'table' ORDER BY name")
    return [name for (name,) in found if name != "sums" and not name.startswith("sqlite_")]


def values(connection: sqlite3.Connection, table: str) -> list[str]:
    """The columns that a checksum is over."""
    return [name for name, _ in _columns(connection, table) if name != "crc"]


def count_commit(connection: sqlite3.Connection) -> int:
    """Counts one more, within the transaction that is about to be committed; returns which it is."""
    connection.execute("UPDATE sums SET rows = rows + 1 WHERE name = ?", (_JOURNAL,))
    return commits(connection)


def commits(connection: sqlite3.Connection) -> int:
    """How many commits the journal has."""
    (number,) = connection.execute("SELECT rows FROM sums WHERE name = ?", (_JOURNAL,)).fetchone()
    return int(number)


def witness(path: Path, number: int) -> None:
    """Writes beside the journal how many commits there were. On no disk for sure: what it says is never too much."""
    # In place, a few bytes: no more than a commit can cost.
    with contextlib.suppress(OSError):
        descriptor = os.open(path.with_name(path.name + COMMITS), os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.pwrite(descriptor, _witness(number), 0)
        finally:
            os.close(descriptor)


def witnessed(path: Path) -> int:
    """How many commits there were at least; 0 where nothing says it."""
    try:
        text = path.with_name(path.name + COMMITS).read_bytes()
        number = int(text[:_DIGITS])
        return number if text == _witness(number) else 0
    except (OSError, ValueError):
        return 0


def of(table: str, row: tuple[object, ...]) -> int:
    """The checksum of a row's values."""
    return zlib.crc32(repr((table, *row)).encode())


def _witness(number: int) -> bytes:
    digits = f"{number:0{_DIGITS}}"
    return f"{digits} {zlib.crc32(digits.encode()):08x}\n".encode()


def _crc(connection: sqlite3.Connection, table: str) -> str:
    return f"row_crc('{table}', {', '.join(values(connection, table))})"


def _columns(connection: sqlite3.Connection, table: str) -> list[tuple[str, bool]]:
    """Names, and whether they are of the primary key."""
    return [(name, key > 0) for _, name, _, _, _, key in connection.execute(f"PRAGMA table_info({table})")]


def _know(connection: sqlite3.Connection) -> None:
    connection.create_function("row_crc", -1, lambda table, *row: of(table, row), deterministic=True)


APPLICATION = 0x53594E45
"""SQLite's application_id of a journal of ours: "SYNE"."""
VERSION = 4
"""1: before `timings`. 2: before checksums, and before jobs were told apart by more than their numbers. 3: before stops
had reasons."""

_TIMINGS = """
CREATE TABLE timings (
    serial INTEGER PRIMARY KEY, run INTEGER NOT NULL, time_s REAL NOT NULL, kind TEXT NOT NULL, parts TEXT NOT NULL);
"""
_UUID = "uuid TEXT NOT NULL DEFAULT ''"
_REASON = "reason INTEGER NOT NULL DEFAULT 0"
_TABLES = f"""{_TIMINGS}
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE jobs (
    job INTEGER PRIMARY KEY, name TEXT NOT NULL, file TEXT NOT NULL, submit_s REAL NOT NULL, row INTEGER,
    state TEXT NOT NULL, reason TEXT NOT NULL DEFAULT '', losses INTEGER NOT NULL DEFAULT 0,
    best_step INTEGER NOT NULL DEFAULT 0, {_UUID});
CREATE TABLE runs (
    run INTEGER PRIMARY KEY, job INTEGER NOT NULL, decided_s REAL NOT NULL, placement TEXT NOT NULL,
    plan TEXT NOT NULL, launched INTEGER NOT NULL DEFAULT 0, outcome TEXT NOT NULL DEFAULT '',
    reason TEXT NOT NULL DEFAULT '');
CREATE TABLE facts (
    serial INTEGER PRIMARY KEY, time_s REAL NOT NULL, kind INTEGER NOT NULL, job INTEGER NOT NULL,
    gpus INTEGER NOT NULL, placement TEXT NOT NULL, {_REASON});
CREATE TABLE decisions (
    serial INTEGER PRIMARY KEY, time_s REAL NOT NULL, decision_s REAL NOT NULL, started INTEGER NOT NULL,
    stopped INTEGER NOT NULL, running INTEGER NOT NULL, queued INTEGER NOT NULL, gpus_used INTEGER NOT NULL,
    objective REAL, bound REAL);
CREATE TABLE reports (job INTEGER PRIMARY KEY, progress TEXT NOT NULL);
CREATE TABLE observations (
    job INTEGER NOT NULL, gpu_type TEXT NOT NULL, nodes INTEGER NOT NULL, gpus INTEGER NOT NULL,
    micro_batch INTEGER NOT NULL, step_s REAL NOT NULL, sync_s REAL NOT NULL,
    UNIQUE (job, gpu_type, nodes, gpus, micro_batch));
CREATE TABLE agents (node INTEGER PRIMARY KEY, host TEXT NOT NULL, pid INTEGER NOT NULL, began INTEGER NOT NULL);
"""


def opened(path: Path) -> sqlite3.Connection:
    """The file, whole and of this version, made where there is none; what is written to it gets its checksums.

    Raises InputError for a damaged, foreign or newer file, or where the disk refuses.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # For its owner alone; SQLite gives its other files the same mode.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        connection = sqlite3.connect(path, isolation_level=None)
        try:
            _prepare(connection, path)
        except BaseException:
            connection.close()
            raise
    except (sqlite3.Error, OSError, UnicodeError) as error:
        raise InputError(
            f"{path}: the journal cannot be used ({error}). Free some space or mend its permissions; "
            f"if it is damaged: {_mended(path)}"
        ) from error
    return connection


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    run = connection.execute
    least = witnessed(path)  # before anything is read: another may be writing
    version = int(run("PRAGMA user_version").fetchone()[0])
    application = int(run("PRAGMA application_id").fetchone()[0])
    tables = int(run("SELECT count(*) FROM sqlite_master").fetchone()[0])
    if tables and application != APPLICATION:
        raise InputError(f"{path}: this is no journal of Synergy's; name another place with results_dir=DIR.")
    if version > VERSION:
        raise InputError(
            f"{path}: a journal of version {version}; this program reads up to {VERSION}. "
            "Run the program that wrote it, or name another place with results_dir=DIR."
        )
    broken = run("PRAGMA quick_check").fetchone()[0]
    if broken != "ok":
        raise InputError(f"{path}: the journal is damaged ({broken}). {_mended(path)}")
    if not tables and least:
        raise InputError(f"{path}: the journal is empty, and {least} commits had been written. {_mended(path)}")
    run("PRAGMA journal_mode=WAL")
    run("PRAGMA synchronous=FULL")
    if version == 3:  # its checksums are made anew
        _verify(connection, path, least)
    if not tables or version < VERSION:
        _bring_up_to_date(connection, tables > 0, version)
    _verify(connection, path, least)
    keep(connection)


def _bring_up_to_date(connection: sqlite3.Connection, there: bool, version: int) -> None:
    run = connection.execute
    run("BEGIN IMMEDIATE")
    if not there:
        statements = [each for each in _TABLES.split(";") if each.strip()]
    else:
        statements = [_TIMINGS] if version < 2 else []
        statements += [f"ALTER TABLE jobs ADD COLUMN {_UUID}"] if version < 3 else []
        statements += [f"ALTER TABLE facts ADD COLUMN {_REASON}"]
    for each in statements:
        run(each)
    add(connection)
    run(f"PRAGMA application_id = {APPLICATION}")
    run(f"PRAGMA user_version = {VERSION}")
    run("COMMIT")


def _verify(connection: sqlite3.Connection, path: Path, least: int) -> None:
    connection.execute("BEGIN")  # one moment of a journal that another may be writing
    found = damage(connection)
    there = commits(connection) if not found else least
    connection.execute("COMMIT")
    if found:
        raise InputError(f"{path}: the journal is damaged ({found}). {_mended(path)}")
    if there < least:
        raise InputError(
            f"{path}: the journal has lost its last commits: it has {there}, and {least} had been written. "
            f"{_mended(path)}"
        )


def _mended(path: Path) -> str:
    return (
        "To make another of what is left of it and of the jobs' folders, and go on: "
        f"python -m synergy_exec resume --salvage {path.parent}"
    )
