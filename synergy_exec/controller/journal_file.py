"""A journal's file: made, opened, checked from its first row to its last, brought up to date."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

from synergy_core.errors import InputError
from synergy_exec.controller import checksums

APPLICATION = 0x53594E45
"""SQLite's application_id of a journal of ours: "SYNE"."""
VERSION = 3
"""1: before `timings`. 2: before checksums, and before jobs were told apart by more than their numbers."""

_TIMINGS = """
CREATE TABLE timings (
    serial INTEGER PRIMARY KEY, run INTEGER NOT NULL, time_s REAL NOT NULL, kind TEXT NOT NULL, parts TEXT NOT NULL);
"""
_UUID = "uuid TEXT NOT NULL DEFAULT ''"
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
    gpus INTEGER NOT NULL, placement TEXT NOT NULL);
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
    least = checksums.witnessed(path)  # before anything is read: another may be writing
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
    if not tables or version < VERSION:
        _bring_up_to_date(connection, tables > 0, version)
    _verify(connection, path, least)
    checksums.keep(connection)


def _bring_up_to_date(connection: sqlite3.Connection, there: bool, version: int) -> None:
    run = connection.execute
    run("BEGIN IMMEDIATE")
    if not there:
        statements = [each for each in _TABLES.split(";") if each.strip()]
    else:
        statements = [_TIMINGS] if version < 2 else []
        statements += [f"ALTER TABLE jobs ADD COLUMN {_UUID}"]
    for each in statements:
        run(each)
    checksums.add(connection)
    run(f"PRAGMA application_id = {APPLICATION}")
    run(f"PRAGMA user_version = {VERSION}")
    run("COMMIT")


def _verify(connection: sqlite3.Connection, path: Path, least: int) -> None:
    connection.execute("BEGIN")  # one moment of a journal that another may be writing
    found = checksums.damage(connection)
    there = checksums.commits(connection) if not found else least
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
