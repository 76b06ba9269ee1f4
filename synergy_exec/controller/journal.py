"""The controller's state on disk in one SQLite file: submitted jobs, runs with their placements, and the event log.

Everything is committed before it is acknowledged or acted upon (WAL, synchronous=FULL). Only reports may lag: they are
written with the next commit, and a run that resumes reads its checkpoint, not its reports. On a full disk a request is
refused (`request`); all else stays recorded in memory, and is acted upon when a later commit succeeds.

The controller copies the journal to `journal.backup.sqlite` every minute (SQLite's backup API). If SQLite's own check
finds the journal damaged, `restore_if_damaged` puts it aside and uses the copy.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sqlite3
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from synergy_core.errors import InputError
from synergy_core.scheduling.jobs.record import Placed
from synergy_exec import job_folder
from synergy_runs.files import atomic_file
from synergy_runs.outputs.facts import DecisionLog, EventLog, Kind

NAME = "journal.sqlite"
BACKUP = "journal.backup.sqlite"
BACKUP_S = 60.0
"""Seconds between two backups of the journal while it changes."""

State = Literal["waiting", "starting", "running", "stopping", "done", "failed", "cancelled"]
STATES: tuple[State, ...] = get_args(State)
ENDED = ("done", "failed", "cancelled")
"""States that end a job; `retry` reopens failed and cancelled ones."""


class JobRow(NamedTuple):
    """The last known state of a job."""

    job: int
    name: str
    file: dict[str, Any]
    """The job file, as `JobFile.values` returns it."""
    submit_s: float
    row: int | None
    """Row in the workload; None if the job was submitted over the API."""
    state: State
    reason: str
    """Why the job failed, or ""."""
    losses: int
    """Number of runs lost in a row without a step of progress."""
    uuid: str
    """UUID that is also in the job's folder and in its checkpoints."""


class RunRow(NamedTuple):
    """A run of a job."""

    run: int
    job: int
    decided_s: float
    placement: Placed
    plan: dict[str, Any]
    launched: int
    """1 once its agents were told to launch it, before that 0."""
    outcome: str
    """An `Outcome`; "" until the run has ended."""
    reason: str


class Fact(NamedTuple):
    """A row of the event log. reason: a `Stopped` for a stop, else 0."""

    time_s: float
    kind: int
    job: int
    gpus: int
    placement: Placed
    reason: int = 0


class Observation(NamedTuple):
    """A step time for fitting models: seconds of one micro-batch with synchronisation, and of synchronisation alone."""

    gpu_type: str
    nodes: int
    gpus: int
    micro_batch: int
    step_s: float
    sync_s: float


class Timing(NamedTuple):
    """An event of a run."""

    run: int
    time_s: float
    kind: str
    """plan or share (decided or changed), stop (ordered), started (after the first step), or saved."""
    parts: dict[str, Any]
    """Details: micro_batch, accumulation and, with compression, the compressor's name of a plan; cpus and memory_bytes
    of each slot of a share; the seconds in the fields of `messages.Started` and `messages.Saved`."""


class NoRoomError(InputError):
    """The disk is full, so a request cannot be carried out. status: of the HTTP answer."""

    status = 503


_NO_ROOM = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
TERM, FENCED_OUT = "term", 3
"""Key in `meta` of the number of the controller that may write, and the exit code of a controller that was replaced."""


_JSON = {"file", "placement", "plan", "parts", "progress", "value"}
"""Columns that hold JSON."""


class Journal:
    """The journal of a run. Methods record in memory; `commit` writes to disk, and every read commits first."""

    def __init__(self, path: Path) -> None:
        """Opens or creates the file. Raises InputError for a damaged or foreign file, or if the disk refuses."""
        self.path = path
        self._connection = _opened(path)
        self._term = 0
        self._recorded: list[tuple[str, list[Any]]] = []
        self._reported: dict[int, dict[str, Any]] = {}

    def close(self) -> None:
        try:
            self.commit()
        finally:
            self._connection.close()

    def commit(self) -> None:
        """Writes all recorded changes to disk. Ends the process if another controller has taken over.

        Raises NoRoomError if the disk is full; everything is still recorded then, and written by a later commit.
        """
        if not (self._recorded or self._reported):
            return
        try:
            self._write_recorded()
            self._recorded.clear()
            self._reported.clear()
        except sqlite3.Error as error:
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")
            no_room = getattr(error, "sqlite_errorcode", 0) & 0xFF in _NO_ROOM
            error_class = NoRoomError if no_room else InputError
            why = f"{os.strerror(errno.ENOSPC)} ({error}). Free some space." if no_room else f"{error}."
            raise error_class(f"the journal {self.path} cannot be written: {why}") from error

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Writes what the block records to disk when the block ends; forgets it if the block or the disk fails."""
        behind = self._recorded
        self._recorded = []
        try:
            yield
            self._recorded = behind + self._recorded
            self.commit()
        except BaseException as error:
            self._recorded = behind
            if isinstance(error, NoRoomError):
                raise NoRoomError(f"{error} Then send the request again: it was not carried out.") from error
            raise

    @property
    def is_behind(self) -> bool:
        """Whether more than reports is recorded and not on disk."""
        return bool(self._recorded)

    def _write_recorded(self) -> None:
        run = self._connection.execute
        run("BEGIN IMMEDIATE")
        for statement, values in self._recorded:
            run(statement, values)
        for job, progress in self._reported.items():
            run("INSERT OR REPLACE INTO reports (job, progress) VALUES (?, ?)", (job, json.dumps(progress)))
        # No other process can write between this check and the commit: the transaction began IMMEDIATE.
        if self._term and run(f"SELECT value FROM meta WHERE name = '{TERM}'").fetchone() != (str(self._term),):
            # An exception would be handled by code that writes, and nothing may be written any more.
            print(f"{self.path.parent}: another controller has taken this run over; this one stops.", file=sys.stderr)
            os._exit(FENCED_OUT)
        run("COMMIT")

    def take_over(self) -> None:
        """Takes the next term, after which only this controller may write; controllers with earlier terms stop.

        `folders.lock` already excludes a second controller, but not on every shared file system.
        """
        term = int(self.meta().get(TERM, 0)) + 1
        self.set_meta(TERM, term)
        self.commit()
        self._term = term

    @property
    def changes(self) -> int:
        return self._connection.total_changes

    # Recording; nothing is on disk before `commit`

    def _write(self, statement: str, *values: Any) -> None:
        self._recorded.append((statement, list(values)))

    def _insert(self, table: str, row: Mapping[str, Any], *, replace: bool = False) -> None:
        values = [json.dumps(value) if name in _JSON else value for name, value in row.items()]
        marks = ", ".join("?" * len(values))
        statement = "INSERT OR REPLACE" if replace else "INSERT OR IGNORE" if table == "observations" else "INSERT"
        self._write(f"{statement} INTO {table} ({', '.join(row)}) VALUES ({marks})", *values)

    def set_meta(self, name: str, value: Any) -> None:
        self._insert("meta", {"name": name, "value": value}, replace=True)

    def submitted(self, job: JobRow) -> None:
        self._insert("jobs", job._asdict())

    def job_is(self, job: int, state: str, reason: str, losses: int) -> None:
        self._write("UPDATE jobs SET state=?, reason=?, losses=? WHERE job=?", state, reason, losses, job)

    def job_waits_again(self, job: int, *, from_start: bool) -> None:
        """Records that an ended job waits again; its end then counts as a stop. from_start: forget its progress."""
        self._write("UPDATE jobs SET state='waiting', reason='', losses=0 WHERE job=?", job)
        self._write("UPDATE facts SET kind=? WHERE job=? AND kind=?", int(Kind.STOP), job, int(Kind.FINISH))
        if from_start:
            self._write("DELETE FROM reports WHERE job=?", job)

    def decided_run(self, run: int, job: int, decided_s: float, placement: Placed, plan: dict[str, Any]) -> None:
        row = {"run": run, "job": job, "decided_s": decided_s, "placement": placement, "plan": plan}
        self._insert("runs", row)

    def launched(self, run: int) -> None:
        self._write("UPDATE runs SET launched=1 WHERE run=?", run)

    def retuned(self, run: int, plan: dict[str, Any]) -> None:
        self._write("UPDATE runs SET plan=? WHERE run=?", json.dumps(plan), run)

    def ended(self, run: int, outcome: str, reason: str) -> None:
        self._write("UPDATE runs SET outcome=?, reason=? WHERE run=?", outcome, reason, run)

    def fact(
        self, time_s: float, kind: int, job: int, gpus: int, placement: Placed = (), reason: int | None = None
    ) -> None:
        self._insert("facts", Fact(time_s, kind, job, gpus, placement, reason or 0)._asdict())

    def decision(self, **values: float) -> None:
        """Records a decision: values by column; objective and bound are NaN if there is no optimum."""
        self._insert("decisions", values)

    def timing(self, run: int, time_s: float, kind: str, parts: dict[str, Any]) -> None:
        self._insert("timings", Timing(run, time_s, kind, parts)._asdict())

    def reported(self, job: int, progress: dict[str, Any]) -> None:
        """Records a job's progress. Jobs report every second; only the last report before a commit is written."""
        self._reported[job] = progress

    def observed(self, job: int, seen: Observation) -> None:
        self._insert("observations", {"job": job, **seen._asdict()})

    def agent(self, node: int, host: str, pid: int, began: int) -> None:
        """Records an agent. began: start time of its process in clock ticks; 0 if unknown."""
        self._insert("agents", {"node": node, "host": host, "pid": pid, "began": began}, replace=True)

    def agents_left(self) -> None:
        self._write("DELETE FROM agents")

    # Reading

    def _rows(
        self, table: str, columns: Sequence[str], order: str, newest: int = -1, where: str = "true"
    ) -> list[list[Any]]:
        """All rows that fulfil the condition, or the last ones, in order."""
        self.commit()
        select = f"SELECT {', '.join(columns)} FROM {table} WHERE {where} ORDER BY {order} DESC LIMIT {newest}"
        try:
            rows = self._connection.execute(select).fetchall()[::-1]
        except sqlite3.Error as error:
            raise InputError(f"{self.path}: the journal cannot be read ({error}).") from error
        return [[_read(name, value) for name, value in zip(columns, row, strict=True)] for row in rows]

    def meta(self) -> dict[str, Any]:
        return dict(self._rows("meta", ("name", "value"), "name"))

    def jobs(self) -> list[JobRow]:
        return [JobRow(*row) for row in self._rows("jobs", JobRow._fields, "job")]

    def job(self, number: int) -> JobRow | None:
        rows = self._rows("jobs", JobRow._fields, "job", where=f"job = {number}")
        return JobRow(*rows[0]) if rows else None

    def runs(self, of_jobs: Collection[int] | None = None) -> list[RunRow]:
        """All runs, or those of these jobs."""
        return [RunRow(*row) for row in self._rows("runs", RunRow._fields, "run", where=_among("job", of_jobs))]

    def facts(self, newest: int = -1) -> list[Fact]:
        return [Fact(*row) for row in self._rows("facts", Fact._fields, "serial", newest)]

    def timings(self, newest: int = -1, of_runs: Collection[int] | None = None) -> list[Timing]:
        """The events of all runs or of these, or the last of them."""
        where = _among("run", of_runs)
        return [Timing(*row) for row in self._rows("timings", Timing._fields, "serial", newest, where)]

    def reports(self) -> dict[int, dict[str, Any]]:
        return dict(self._rows("reports", ("job", "progress"), "job"))

    def observations(self) -> list[tuple[int, Observation]]:
        rows = self._rows("observations", ("job", *Observation._fields), "rowid")
        return [(job, Observation(*seen)) for job, *seen in rows]

    def agents(self) -> list[tuple[int, str, int, int]]:
        """(node, host, pid, began) of every agent that is not known to have exited."""
        return [tuple(row) for row in self._rows("agents", ("node", "host", "pid", "began"), "node")]

    def last_s(self) -> float:
        """The time of the last fact or decision; 0 before any."""
        times = [self._rows(table, ("max(time_s)",), "1")[0][0] for table in ("facts", "decisions")]
        return float(max(each or 0.0 for each in times))

    def events(self, numbers: dict[int, int]) -> EventLog:
        """All facts in the simulator's format, with jobs by their rows in the workload."""
        log = EventLog()
        for fact in self.facts():
            if fact.kind == Kind.START:
                log.start(fact.time_s, numbers[fact.job], fact.gpus, fact.placement)
            else:
                log.append(fact.time_s, fact.kind, numbers[fact.job], fact.gpus, fact.reason)
        return log

    def decisions(self) -> DecisionLog:
        log = DecisionLog()
        columns = ("time_s", "decision_s", "started", "stopped", "running", "queued", "gpus_used", "objective", "bound")
        for *row, objective, bound in self._rows("decisions", columns, "serial"):
            log.append(*row)
            log.optimum(*(float("nan") if each is None else each for each in (objective, bound)))
        return log


def open_journal(work: Path) -> Journal:
    """Opens the journal in a work folder. Raises InputError if there is none."""
    path = work / NAME
    if not path.is_file():
        raise InputError(
            f"{work}: no journal.sqlite in it; expected the work folder of a run, such as results/demo/synergy-0.work."
        )
    return Journal(path)


def _among(column: str, numbers: Collection[int] | None) -> str:
    """The SQL condition that a column has one of these numbers; None: any."""
    return "true" if numbers is None else f"{column} IN ({', '.join(map(str, numbers))})"


def _read(column: str, value: Any) -> Any:
    if column not in _JSON:
        return value
    read = json.loads(value)
    return tuple(map(tuple, read)) if column == "placement" else read


# Creates, opens, checks, backs up and restores the file.


_APPLICATION = 0x53594E45
"""SQLite's application_id of our journals: "SYNE"."""
_VERSION = 7
_TABLES = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE jobs (
    job INTEGER PRIMARY KEY, name TEXT NOT NULL, file TEXT NOT NULL, submit_s REAL NOT NULL, row INTEGER,
    state TEXT NOT NULL, reason TEXT NOT NULL, losses INTEGER NOT NULL, uuid TEXT NOT NULL);
CREATE TABLE runs (
    run INTEGER PRIMARY KEY, job INTEGER NOT NULL, decided_s REAL NOT NULL, placement TEXT NOT NULL,
    plan TEXT NOT NULL, launched INTEGER NOT NULL DEFAULT 0, outcome TEXT NOT NULL DEFAULT '',
    reason TEXT NOT NULL DEFAULT '');
CREATE TABLE facts (
    serial INTEGER PRIMARY KEY, time_s REAL NOT NULL, kind INTEGER NOT NULL, job INTEGER NOT NULL,
    gpus INTEGER NOT NULL, placement TEXT NOT NULL, reason INTEGER NOT NULL);
CREATE TABLE decisions (
    serial INTEGER PRIMARY KEY, time_s REAL NOT NULL, decision_s REAL NOT NULL, started INTEGER NOT NULL,
    stopped INTEGER NOT NULL, running INTEGER NOT NULL, queued INTEGER NOT NULL, gpus_used INTEGER NOT NULL,
    objective REAL, bound REAL);
CREATE TABLE timings (
    serial INTEGER PRIMARY KEY, run INTEGER NOT NULL, time_s REAL NOT NULL, kind TEXT NOT NULL, parts TEXT NOT NULL);
CREATE TABLE reports (job INTEGER PRIMARY KEY, progress TEXT NOT NULL);
CREATE TABLE observations (
    job INTEGER NOT NULL, gpu_type TEXT NOT NULL, nodes INTEGER NOT NULL, gpus INTEGER NOT NULL,
    micro_batch INTEGER NOT NULL, step_s REAL NOT NULL, sync_s REAL NOT NULL,
    UNIQUE (job, gpu_type, nodes, gpus, micro_batch));
CREATE TABLE agents (node INTEGER PRIMARY KEY, host TEXT NOT NULL, pid INTEGER NOT NULL, began INTEGER NOT NULL);
"""


def _opened(path: Path) -> sqlite3.Connection:
    """Opens the file, or creates it; checks that it is undamaged and of this version."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Only the owner may read it; SQLite gives its other files the same mode.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        connection = sqlite3.connect(path, isolation_level=None)
        try:
            _prepare(connection, path)
        except BaseException:
            connection.close()
            raise
    except (sqlite3.Error, OSError, UnicodeError) as error:
        raise InputError(
            f"{path}: the journal cannot be used ({error}). Free some space or mend its permissions; if it is damaged, "
            f"the command that began the run restores {BACKUP}."
        ) from error
    return connection


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    run = connection.execute
    if not run("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        run("PRAGMA journal_mode=WAL")
        connection.executescript(
            f"BEGIN IMMEDIATE; {_TABLES} PRAGMA application_id = {_APPLICATION}; "
            f"PRAGMA user_version = {_VERSION}; COMMIT;"
        )
    elif run("PRAGMA application_id").fetchone()[0] != _APPLICATION:
        raise InputError(f"{path}: this is no journal of Synergy's; name another place with results_dir=DIR.")
    elif (version := run("PRAGMA user_version").fetchone()[0]) != _VERSION:
        raise InputError(
            f"{path}: a journal of version {version}; this program reads version {_VERSION}. "
            "Go on with the program that wrote it, or name another place with results_dir=DIR."
        )
    run("PRAGMA synchronous=FULL")


def back_up(work: Path) -> None:
    """Copies the journal as of its last commit to `journal.backup.sqlite`. Any thread may call it."""
    with (
        atomic_file(work / BACKUP) as partial,
        contextlib.closing(sqlite3.connect(work / NAME)) as journal,
        contextlib.closing(sqlite3.connect(partial)) as copy,
    ):
        partial.chmod(0o600)
        journal.backup(copy)


def restore_if_damaged(work: Path) -> None:
    """Replaces a damaged or missing journal by its last backup, and says so. The caller must hold the folder's lock.

    Raises InputError if there is no undamaged backup.
    """
    path, copy = work / NAME, work / BACKUP
    if not path.is_file() and not copy.is_file():
        return
    damage = _damage(path) if path.is_file() else "it is gone"
    if not damage:
        return
    if not copy.is_file() or _damage(copy):
        raise InputError(
            f"{path}: the journal is damaged ({damage}), and there is no whole {BACKUP}. What jobs have trained is in "
            f"{work / 'jobs'}: `python -m synergy_exec export {work / 'jobs'}/NUMBER` reads weights from there. Name "
            "another place with results_dir=DIR."
        )
    number = 1 + len(list(work.glob(f"{NAME}.damaged-*")))
    for each in sorted(work.glob(f"{NAME}*")):
        if ".damaged-" not in each.name:
            each.rename(each.with_name(each.name.replace(NAME, f"{NAME}.damaged-{number}")))
    with contextlib.closing(sqlite3.connect(copy)) as whole, contextlib.closing(sqlite3.connect(path)) as journal:
        path.chmod(0o600)
        whole.backup(journal)
    made = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(copy.stat().st_mtime))
    print(
        f"{path}: the journal is damaged ({damage}) and put aside as {NAME}.damaged-{number}; its copy of {made} is "
        "used. Later events are lost: jobs that ended since go on from their last checkpoints, and what was "
        "submitted since must be submitted again.",
        file=sys.stderr,
        flush=True,
    )


def _damage(path: Path) -> str:
    """The damage that SQLite's own check finds; "" if there is none."""
    try:
        with contextlib.closing(sqlite3.connect(path)) as connection:
            tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            found = str(connection.execute("PRAGMA integrity_check(1)").fetchone()[0])
    except (sqlite3.Error, UnicodeError) as error:
        return str(error)
    return ("" if tables else "it is empty") if found == "ok" else found.replace("\n", " ")


# Retrying a failed or cancelled job: in a running controller, or in the journal for a later controller.


def reopen(journal: Journal, folder: Path, number: int, name: str, state: str, *, from_start: bool) -> None:
    """Makes the job in that folder wait again, from its last checkpoint or from the start, and commits this.

    Raises InputError for a job that has not ended, or a class that is done.
    """
    if state == "done" and not job_folder.described(folder).file.command:
        raise InputError(f"job {name} is done; submit it again to train it once more.")
    if state not in ENDED:
        raise InputError(f"job {name} has not ended; nothing keeps it from going on.")
    aside = None
    try:
        with journal.request():
            journal.job_waits_again(number, from_start=from_start)
            if from_start and (aside := job_folder.give_up(folder)) is not None:
                print(f"what job {number} had trained is in {aside} now", file=sys.stderr)
    except NoRoomError:
        for each in aside.iterdir() if aside else ():
            each.rename(folder / each.name)
        raise


def retry_in(work: Path, number: int, *, from_start: bool) -> None:
    """Calls `reopen` for a job in the folder of a run that has no controller. Raises InputError."""
    with contextlib.closing(Journal(work / NAME)) as journal:
        row = journal.job(number)
        if row is None:
            raise InputError(f"{work}: its journal does not know job {number}; submit it again.")
        reopen(journal, work / "jobs" / str(number), number, row.name, row.state, from_start=from_start)
        journal.set_meta("written", False)  # they are written again when this job has ended
