"""The journal: what it keeps, and what it refuses to open."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from jobs import workload

from synergy_core.errors import InputError
from synergy_exec.controller.journal import JobRow, Journal, Observation
from synergy_exec.controller.journal_file import VERSION
from synergy_exec.workload import as_executed
from synergy_runs.log import Kind
from synergy_runs.measured import with_measured
from synergy_runs.traces import read_trace
from synergy_runs.workload import from_rows

FILE = {"class": "a.b:C", "slots": 1}


def filled(path: Path) -> Journal:
    journal = Journal(path)
    journal.submitted(JobRow(0, "a", FILE, 0.5, 0, "waiting", "", 0, 0))
    journal.fact(0.5, int(Kind.SUBMIT), 0, 1)
    journal.decided_run(0, 0, 1.0, ((0, 1), (1, 2)), {"data": 2})
    journal.launched(0)
    journal.fact(1.0, int(Kind.START), 0, 2, ((0, 1), (1, 2)))
    journal.decision(1.0, 0.01, (1, 0, 1, 0, 2), (float("nan"), 3.0))
    journal.reported(0, {"step": 3})
    journal.observed(0, Observation("cpu", 1, 1, 32, 0.1, 0.01))
    journal.observed(0, Observation("cpu", 1, 1, 32, 0.2, 0.01))
    journal.agent(0, "here", 12, 34)
    journal.commit()
    return journal


def test_everything_is_read_back_by_another(tmp_path: Path) -> None:
    filled(tmp_path / "j").close()
    again = Journal(tmp_path / "j")
    assert again.jobs() == [JobRow(0, "a", FILE, 0.5, 0, "waiting", "", 0, 0)]
    (run,) = again.runs()
    assert (run.placement, run.plan, run.launched, run.outcome) == (((0, 1), (1, 2)), {"data": 2}, True, "")
    assert again.last_s() == 1.0
    assert again.reports() == {0: {"step": 3}}
    assert again.observations() == [(0, Observation("cpu", 1, 1, 32, 0.1, 0.01))]  # the first of a shape stands
    assert again.agents() == [(0, "here", 12, 34)]
    events = again.events({0: 7}).events()
    assert events.job_id.tolist() == [7, 7, 7]
    assert events.node.tolist() == [-1, 0, 1]
    assert again.decisions().decisions().bound.tolist() == [3.0]


def test_what_jobs_of_a_trace_asked_for_beside_gpus_is_in_the_workload_as_executed(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("submit_time,duration_s,gpus,cpus,memory_bytes\n0,60,1,6,\n5,60,1,3,1e9\n", encoding="utf-8")
    journal = Journal(tmp_path / "j")
    for job, row in enumerate((1, None, 0)):
        journal.submitted(JobRow(job, f"job-{job}", FILE | {"name": "cnn"}, job / 2, row, "done", "", 0, 0))
    made, _ = as_executed(from_rows(read_trace(path), name="log"), journal, "log")
    assert made.cpus[[0, 2]].tolist() == [3, 6]
    assert made.memory_bytes[0] == 1e9
    assert np.isnan(made.memory_bytes[1:]).all()
    assert np.isnan(made.cpus[1])


def test_what_was_not_committed_never_was(tmp_path: Path) -> None:
    journal = filled(tmp_path / "j")
    journal.fact(2.0, int(Kind.FINISH), 0, 2)
    assert len(Journal(tmp_path / "j").facts()) == 2
    journal.commit()
    assert len(Journal(tmp_path / "j").facts()) == 3


def test_committed_facts_outlive_a_kill(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from synergy_exec.controller.journal import Journal\n"
        "journal = Journal(Path(sys.argv[1]))\n"
        "for i in range(10**6):\n"
        "    journal.fact(float(i), 0, i, 1); journal.commit(); print(i, flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "j")], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    acknowledged = [int(process.stdout.readline()) for _ in range(40)]
    os.kill(process.pid, signal.SIGKILL)
    acknowledged += [int(line) for line in process.stdout.read().splitlines()]
    process.wait()
    kept = [fact.job for fact in Journal(tmp_path / "j").facts()]
    assert kept[: len(acknowledged)] == acknowledged
    assert len(kept) <= len(acknowledged) + 1


def test_damaged_foreign_and_newer_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not a database, but long enough to look at" * 100)
    with pytest.raises(InputError, match="cannot be used"):
        Journal(tmp_path / "text")
    foreign = sqlite3.connect(tmp_path / "foreign")
    foreign.execute("CREATE TABLE t (x)")
    foreign.close()
    with pytest.raises(InputError, match="no journal of Synergy's"):
        Journal(tmp_path / "foreign")
    filled(tmp_path / "newer").close()
    newer = sqlite3.connect(tmp_path / "newer")
    newer.execute(f"PRAGMA user_version={VERSION + 1}")
    newer.close()
    with pytest.raises(InputError, match=f"version {VERSION + 1}; this program reads up to {VERSION}"):
        Journal(tmp_path / "newer")
    filled(tmp_path / "cut").close()
    whole = (tmp_path / "cut").read_bytes()
    (tmp_path / "cut").write_bytes(whole[:4096] + b"\xff" * (len(whole) - 4096))
    with pytest.raises(InputError, match=r"cannot be used|damaged"):
        Journal(tmp_path / "cut")


def test_a_disk_that_refuses_is_said_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="journal cannot be used"):
        Journal(Path("/proc/nowhere/j"))
    journal = filled(tmp_path / "j")
    journal._connection.execute("PRAGMA max_page_count=1")
    journal.reported(1, {"filler": "x" * 100_000})
    with pytest.raises(InputError, match="cannot be written"):
        journal.commit()


def test_of_what_a_job_says_before_a_commit_the_last_is_kept(tmp_path: Path) -> None:
    journal, other = Journal(tmp_path / "j"), Journal(tmp_path / "j")
    journal.reported(1, {"step": 1})
    journal.reported(1, {"step": 2})
    assert (journal.reports(), other.reports()) == ({1: {"step": 2}}, {})
    journal.commit()
    assert other.reports() == {1: {"step": 2}}
    other.close()
    journal.close()


@pytest.mark.parametrize(("ids", "measured"), [("1-2", [False, True, True, False]), (None, [True] * 4)])
def test_jobs_of_a_trace_are_measured_by_their_ids_and_those_beside_it_where_all_are(
    tmp_path: Path, ids: str | None, measured: list[bool]
) -> None:
    trace = with_measured(workload([(0.0, 1, 5.0), (1.0, 1, 5.0), (2.0, 1, 5.0)]), ids)
    journal = Journal(tmp_path / "j")
    for job, row in ((0, 0), (1, 1), (2, 2), (3, None)):
        journal.submitted(JobRow(job, f"job-{job}", {**FILE, "name": "a"}, float(job), row, "done", "", 0, 0))
    made, rows = as_executed(trace, journal, "test")
    assert made.measured.tolist() == measured
    assert rows == {0: 0, 1: 1, 2: 2, 3: 3}


def test_while_the_disk_is_full_nothing_recorded_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a transaction and at its end; there is room again after a while."""
    journal = Journal(tmp_path / "journal.sqlite")
    waits: list[float] = []

    def pages(most: int) -> None:
        journal._connection.execute(f"PRAGMA max_page_count={most}")

    def passes(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            pages(10_000)

    monkeypatch.setattr("synergy_exec.controller.journal.time.sleep", passes)
    journal.fact(1.0, 0, 7, 1)
    pages(journal._connection.execute("PRAGMA page_count").fetchone()[0])
    for number in range(40):
        journal.set_meta(f"name-{number}", "x" * 2000)
    journal.commit()
    assert len(waits) == 3
    again = Journal(tmp_path / "journal.sqlite")
    assert [fact.job for fact in again.facts()] == [7]
    assert sum(name.startswith("name-") for name in again.meta()) == 40
    again.close()


def test_a_disk_that_stays_full_ends_it_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    monkeypatch.setattr("synergy_exec.controller.journal.time.sleep", lambda _: None)
    journal._connection.execute("PRAGMA max_page_count=1")
    with pytest.raises(InputError, match="Free some space"):
        journal.set_meta("name", "x" * 100_000)
