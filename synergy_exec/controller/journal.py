"""The controller's memory on disk: what was submitted, what ran where, what happened, in one SQLite file.

What is acknowledged or acted upon was committed before (WAL, synchronous=FULL). Reports alone may lag: they are
written with the next commit, and a run that resumes reads its checkpoint, not them.
"""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any, NamedTuple

from synergy_core.errors import InputError
from synergy_core.jobs.record import Placed
from synergy_runs.log import DecisionLog, EventLog, Kind

APPLICATION = 0x53594E45
"""SQLite's application_id of a journal of ours: "SYNE"."""
VERSION = 2

_TIMINGS = """
CREATE TABLE timings (
    serial INTEGER PRIMARY KEY, run INTEGER NOT NULL, time_s REAL NOT NULL, kind TEXT NOT NULL, parts TEXT NOT NULL);
"""
_TABLES = f"""{_TIMINGS}
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE jobs (
    job INTEGER PRIMARY KEY, name TEXT NOT NULL, file TEXT NOT NULL, submit_s REAL NOT NULL, row INTEGER,
    state TEXT NOT NULL, reason TEXT NOT NULL DEFAULT '', losses INTEGER NOT NULL DEFAULT 0,
    best_step INTEGER NOT NULL DEFAULT 0);
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


class JobRow(NamedTuple):
    """A job as it was last known. row: of the workload, None if it was submitted over the API.

    losses: runs lost in a row without a step of progress; best_step: the furthest step it ever reported.
    """

    job: int
    name: str
    file: dict[str, Any]
    submit_s: float
    row: int | None
    state: str
    reason: str
    losses: int
    best_step: int


class RunRow(NamedTuple):
    """A run. launched: whether its workers were told to start. outcome: "" while it has not ended."""

    run: int
    job: int
    decided_s: float
    placement: Placed
    plan: dict[str, Any]
    launched: bool
    outcome: str
    reason: str


class Fact(NamedTuple):
    """A row of the event log, its parts together."""

    time_s: float
    kind: int
    job: int
    gpus: int
    placement: Placed


class Observation(NamedTuple):
    """A step time that the models may be fitted to; seconds of one micro-batch with synchronisation, and of that."""

    gpu_type: str
    nodes: int
    gpus: int
    micro_batch: int
    step_s: float
    sync_s: float


class Timing(NamedTuple):
    """What a run went through. kind: plan (decided, or retuned), share (the same), stop (it was told to), started (its
    first step was heard of) or saved.

    parts: of a plan, micro_batch and accumulation, and the compressor's name where there may be one; of a share, cpus
    and memory_bytes of each slot; of started and saved, the worker's seconds by the names that `messages.Started` and
    `messages.Saved` give them.
    """

    run: int
    time_s: float
    kind: str
    parts: dict[str, Any]


class Journal:
    """One open journal. What its methods record is on disk once `commit` has returned, and not before."""

    def __init__(self, path: Path) -> None:
        """Opens or makes it. Raises InputError for a damaged, foreign or newer file, or where the disk refuses."""
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(path, isolation_level=None)
            self._prepare()
        except (sqlite3.Error, OSError) as error:
            raise InputError(
                f"{path}: the journal cannot be used ({error}). Free some space or mend its permissions; "
                "if it is damaged, name another place with results_dir=DIR."
            ) from error

    def _prepare(self) -> None:
        run = self._connection.execute
        version = int(run("PRAGMA user_version").fetchone()[0])
        application = int(run("PRAGMA application_id").fetchone()[0])
        tables = int(run("SELECT count(*) FROM sqlite_master").fetchone()[0])
        if tables and application != APPLICATION:
            raise InputError(f"{self.path}: this is no journal of Synergy's; name another place with results_dir=DIR.")
        if version > VERSION:
            raise InputError(
                f"{self.path}: a journal of version {version}; this program reads up to {VERSION}. "
                "Run the program that wrote it, or name another place with results_dir=DIR."
            )
        broken = run("PRAGMA quick_check").fetchone()[0]
        if broken != "ok":
            raise InputError(
                f"{self.path}: the journal is damaged ({broken}); name another place with results_dir=DIR."
            )
        run("PRAGMA journal_mode=WAL")
        run("PRAGMA synchronous=FULL")
        if not tables:
            self._connection.executescript(
                f"BEGIN; {_TABLES} PRAGMA application_id={APPLICATION}; PRAGMA user_version={VERSION}; COMMIT;"
            )
        elif version < 2:
            self._connection.executescript(f"BEGIN; {_TIMINGS} PRAGMA user_version={VERSION}; COMMIT;")

    def close(self) -> None:
        """Commits and closes."""
        self.commit()
        self._connection.close()

    def commit(self) -> None:
        """What was recorded is on disk when this returns."""
        if self._connection.in_transaction:
            self._write("COMMIT")

    def _write(self, statement: str, values: tuple[Any, ...] = ()) -> None:
        try:
            if not self._connection.in_transaction and statement != "COMMIT":
                self._connection.execute("BEGIN IMMEDIATE")
            self._connection.execute(statement, values)
        except sqlite3.Error as error:
            raise InputError(
                f"{self.path}: the journal cannot be written ({error}). Free some space; "
                "the same command goes on from what it holds."
            ) from error

    # What is recorded; nothing is on disk before `commit`

    def set_meta(self, name: str, value: Any) -> None:
        self._write("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, json.dumps(value)))

    def submitted(self, job: JobRow) -> None:
        values = (job.job, job.name, json.dumps(job.file), job.submit_s, job.row, job.state, job.reason)
        self._write("INSERT INTO jobs (job, name, file, submit_s, row, state, reason) VALUES (?,?,?,?,?,?,?)", values)

    def job_is(self, job: int, state: str, reason: str, losses: int, best_step: int) -> None:
        self._write(
            "UPDATE jobs SET state=?, reason=?, losses=?, best_step=? WHERE job=?",
            (state, reason, losses, best_step, job),
        )

    def decided_run(self, run: int, job: int, decided_s: float, placement: Placed, plan: dict[str, Any]) -> None:
        self._write(
            "INSERT INTO runs (run, job, decided_s, placement, plan) VALUES (?,?,?,?,?)",
            (run, job, decided_s, json.dumps(placement), json.dumps(plan)),
        )

    def launched(self, run: int) -> None:
        self._write("UPDATE runs SET launched=1 WHERE run=?", (run,))

    def retuned(self, run: int, plan: dict[str, Any]) -> None:
        self._write("UPDATE runs SET plan=? WHERE run=?", (json.dumps(plan), run))

    def ended(self, run: int, outcome: str, reason: str) -> None:
        self._write("UPDATE runs SET outcome=?, reason=? WHERE run=?", (outcome, reason, run))

    def fact(self, time_s: float, kind: int, job: int, gpus: int, placement: Placed = ()) -> None:
        self._write(
            "INSERT INTO facts (time_s, kind, job, gpus, placement) VALUES (?,?,?,?,?)",
            (time_s, kind, job, gpus, json.dumps(placement)),
        )

    def decision(
        self,
        time_s: float,
        decision_s: float,
        counts: tuple[int, int, int, int, int],
        optimum: tuple[float, float],
    ) -> None:
        """Records a decision.

        counts: started, stopped, running, queued, GPUs used. optimum: objective and bound, NaN for none.
        """
        self._write(
            "INSERT INTO decisions (time_s, decision_s, started, stopped, running, queued, gpus_used, objective, "
            "bound) VALUES (?,?,?,?,?,?,?,?,?)",
            (time_s, decision_s, *counts, *optimum),
        )

    def timing(self, run: int, time_s: float, kind: str, parts: dict[str, Any]) -> None:
        self._write(
            "INSERT INTO timings (run, time_s, kind, parts) VALUES (?,?,?,?)", (run, time_s, kind, json.dumps(parts))
        )

    def reported(self, job: int, progress: dict[str, Any]) -> None:
        self._write("INSERT OR REPLACE INTO reports VALUES (?, ?)", (job, json.dumps(progress)))

    def observed(self, job: int, seen: Observation) -> None:
        self._write("INSERT OR IGNORE INTO observations VALUES (?,?,?,?,?,?,?)", (job, *seen))

    def agent(self, node: int, host: str, pid: int, began: int) -> None:
        """Records an agent. began: when its process did, in the kernel's ticks; 0 where that is not known."""
        self._write("INSERT OR REPLACE INTO agents VALUES (?,?,?,?)", (node, host, pid, began))

    def agents_left(self) -> None:
        self._write("DELETE FROM agents")

    # What is read back

    def meta(self) -> dict[str, Any]:
        return {name: json.loads(value) for name, value in self._all("SELECT name, value FROM meta")}

    def jobs(self) -> list[JobRow]:
        rows = self._all("SELECT job,name,file,submit_s,row,state,reason,losses,best_step FROM jobs ORDER BY job")
        return [JobRow._make((*row[:2], json.loads(row[2]), *row[3:])) for row in rows]

    def runs(self) -> list[RunRow]:
        rows = self._all("SELECT run,job,decided_s,placement,plan,launched,outcome,reason FROM runs ORDER BY run")
        return [
            RunRow(run, job, at_s, _placed(placement), json.loads(plan), bool(launched), outcome, reason)
            for run, job, at_s, placement, plan, launched, outcome, reason in rows
        ]

    def facts(self) -> list[Fact]:
        rows = self._all("SELECT time_s, kind, job, gpus, placement FROM facts ORDER BY serial")
        return [Fact._make((*row[:4], _placed(row[4]))) for row in rows]

    def timings(self) -> list[Timing]:
        rows = self._all("SELECT run, time_s, kind, parts FROM timings ORDER BY serial")
        return [Timing(run, time_s, kind, json.loads(parts)) for run, time_s, kind, parts in rows]

    def reports(self) -> dict[int, dict[str, Any]]:
        return {job: json.loads(progress) for job, progress in self._all("SELECT job, progress FROM reports")}

    def observations(self) -> list[tuple[int, Observation]]:
        rows = self._all("SELECT * FROM observations ORDER BY rowid")
        return [(row[0], Observation(*row[1:])) for row in rows]

    def agents(self) -> list[tuple[int, str, int, int]]:
        """(node, host, pid, began) of every agent that has not been seen to leave."""
        return self._all("SELECT node, host, pid, began FROM agents ORDER BY node")

    def last_s(self) -> float:
        """The time of the last fact or decision; 0 before any."""
        (row,) = self._all("SELECT max((SELECT max(time_s) FROM facts), (SELECT max(time_s) FROM decisions))")
        (facts,) = self._all("SELECT max(time_s) FROM facts")
        return float(row[0] if row[0] is not None else facts[0] or 0.0)

    def events(self, numbers: dict[int, int]) -> EventLog:
        """All facts as the simulator logs them, jobs by the rows they have in the workload."""
        log = EventLog()
        for fact in self.facts():
            if fact.kind == Kind.START:
                log.start(fact.time_s, numbers[fact.job], fact.gpus, fact.placement)
            else:
                log.append(fact.time_s, fact.kind, numbers[fact.job], fact.gpus)
        return log

    def decisions(self) -> DecisionLog:
        """All decisions, as the simulator logs them."""
        log = DecisionLog()
        rows = self._all(
            "SELECT time_s, decision_s, started, stopped, running, queued, gpus_used, objective, bound "
            "FROM decisions ORDER BY serial"
        )
        for *row, objective, bound in rows:
            log.append(*row)
            log.optimum(*(float("nan") if each is None else each for each in (objective, bound)))
        return log

    def _all(self, statement: str) -> list[Any]:
        try:
            return self._connection.execute(statement).fetchall()
        except sqlite3.Error as error:
            raise InputError(f"{self.path}: the journal cannot be read ({error}).") from error


def _placed(text: str) -> Placed:
    return tuple((int(node), int(mask)) for node, mask in json.loads(text))
