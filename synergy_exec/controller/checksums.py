"""Checksums of a journal's rows: what changed or vanished on the disk is seen when the journal is opened.

Each row has the CRC-32 of its values in `crc`, and `sums` the number of each table's rows and the sum of theirs.
Triggers of the connection keep both up with whatever is written, so that no statement can forget them.
What is cut off at the end, as of SQLite's write-ahead log, leaves an older journal that is whole in itself. Therefore
a file beside it, `journal.sqlite-commits`, says how many commits there were.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import zlib
from pathlib import Path

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
