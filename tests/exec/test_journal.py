"""The journal: what it keeps, what it refuses to open, and what takes the place of a damaged one."""

import os
import random
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from exec.pretended import refuses

from synergy_core.errors import InputError
from synergy_exec.controller.journal import FENCED_OUT, JobRow, Journal, Observation, back_up
from synergy_exec.folders import lock
from synergy_exec.workload import as_executed
from synergy_runs.facts import Kind
from synergy_runs.traces import read_trace
from synergy_runs.workload import from_rows

FILE = {"class": "a.b:C", "slots": 1}


def filled(path):
    journal = Journal(path)
    journal.submitted(JobRow(0, "a", FILE, 0.5, 0, "waiting", "", 0, "u"))
    journal.fact(0.5, int(Kind.SUBMIT), 0, 1)
    journal.decided_run(0, 0, 1.0, ((0, 1), (1, 2)), {"data": 2})
    journal.launched(0)
    journal.fact(1.0, int(Kind.START), 0, 2, ((0, 1), (1, 2)))
    counts = {"started": 1, "stopped": 0, "running": 1, "queued": 0, "gpus_used": 2}
    journal.decision(time_s=1.0, decision_s=0.01, **counts, objective=float("nan"), bound=3.0)
    journal.reported(0, {"step": 3})
    journal.observed(0, Observation("cpu", 1, 1, 32, 0.1, 0.01))
    journal.observed(0, Observation("cpu", 1, 1, 32, 0.2, 0.01))
    journal.agent(0, "here", 12, 34)
    journal.commit()
    return journal


def test_everything_is_read_back_by_another(tmp_path):
    filled(tmp_path / "j").close()
    again = Journal(tmp_path / "j")
    assert again.jobs() == [JobRow(0, "a", FILE, 0.5, 0, "waiting", "", 0, "u")]
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


def test_what_jobs_of_a_trace_asked_for_beside_gpus_is_in_the_workload_as_executed(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("submit_time,duration_s,gpus,cpus,memory_bytes\n0,60,1,6,\n5,60,1,3,1e9\n", encoding="utf-8")
    journal = Journal(tmp_path / "j")
    for job, row in enumerate((1, None, 0)):
        journal.submitted(JobRow(job, f"job-{job}", FILE | {"name": "cnn"}, job / 2, row, "done", "", 0, "u"))
    made, _ = as_executed(from_rows(read_trace(path), name="log"), journal, "log")
    assert made.cpus[[0, 2]].tolist() == [3, 6]
    assert made.memory_bytes[0] == 1e9
    assert np.isnan(made.memory_bytes[1:]).all()
    assert np.isnan(made.cpus[1])


def test_committed_facts_outlive_a_kill(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from synergy_exec.controller.journal import Journal\n"
        "journal = Journal(Path(sys.argv[1]))\n"
        "for i in range(10**6):\n"
        "    journal.fact(float(i), 0, i, 1); journal.commit(); print(i, flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "j")], stdout=subprocess.PIPE, text=True)
    acknowledged = [int(process.stdout.readline()) for _ in range(40)]
    os.kill(process.pid, signal.SIGKILL)
    acknowledged += [int(line) for line in process.stdout.read().splitlines()]
    process.wait()
    kept = [fact.job for fact in Journal(tmp_path / "j").facts()]
    assert kept[: len(acknowledged)] == acknowledged
    assert len(kept) <= len(acknowledged) + 1


def test_damaged_foreign_and_newer_files_and_disks_that_refuse_are_said(tmp_path):
    refuses("journal cannot be used", Journal, Path("/proc/nowhere/j"))
    (tmp_path / "text").write_text("not a database, but long enough to look at" * 100)
    refuses("cannot be used", Journal, tmp_path / "text")
    for name, statement, says in (
        ("foreign", "CREATE TABLE t (x)", "no journal of Synergy's"),
        ("newer", "PRAGMA user_version=99", "version 99; this program reads version"),
    ):
        if name == "newer":
            filled(tmp_path / name).close()
        other = sqlite3.connect(tmp_path / name)
        other.execute(statement)
        other.close()
        refuses(says, Journal, tmp_path / name)


def test_while_the_disk_is_full_nothing_recorded_is_lost(tmp_path, monkeypatch):
    """In the middle of a transaction and at its end; there is room again after a while."""
    journal = Journal(tmp_path / "journal.sqlite")
    waits = []

    def pages(most):
        journal._connection.execute(f"PRAGMA max_page_count={most}")

    def passes(seconds):
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


def test_a_disk_that_stays_full_ends_it_with_what_to_do(tmp_path, monkeypatch):
    journal = Journal(tmp_path / "journal.sqlite")
    monkeypatch.setattr("synergy_exec.controller.journal.time.sleep", lambda _: None)
    journal._connection.execute("PRAGMA max_page_count=1")
    journal.set_meta("name", "x" * 100_000)
    refuses("Free some space", journal.commit)


# Damage, and the copy that takes a damaged journal's place


def journal_of(path, jobs=30):
    """One with something in each table, and rows that were changed, replaced and deleted."""
    journal = filled(path)
    journal.set_meta("over", False)
    journal.set_meta("over", True)
    for number in range(1, jobs):
        journal.submitted(JobRow(number, f"job-{number}", FILE, 1.0 * number, None, "waiting", "", 0, f"u{number}"))
        journal.fact(1.0 * number, int(Kind.SUBMIT), number, 1)
        journal.decided_run(number, number, 1.0 * number, ((0, 1),), {"data": 1})
        journal.timing(number, 1.0 * number, "plan", {"micro_batch": 4})
        journal.reported(number % 3, {"step": number})
        journal.commit()
    journal.job_is(4, "failed", "it was too much", 3)
    journal.job_waits_again(4, from_start=True)
    journal.agents_left()
    journal.agent(1, "there", 5, 6)
    journal.commit()
    return journal


def everything(journal):
    return journal.meta(), journal.jobs(), journal.runs(), journal.facts(), journal.timings(), journal.reports()


def overwritten(content, draw):
    at = draw.randrange(0, len(content), 4096)
    return content[:at] + draw.randbytes(4096) + content[at + 4096 :]


HARMS = {
    "overwritten": overwritten,
    "cut": lambda content, draw: content[: draw.randrange(1, len(content))],
    "emptied": lambda content, draw: b"",
    "removed": lambda content, draw: None,
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_journal_is_put_aside_and_its_copy_used(tmp_path, capsys, harm):
    work = tmp_path / "run"
    journal = journal_of(work / "journal.sqlite")
    back_up(work)
    told = everything(journal)
    journal.close()
    content = (work / "journal.sqlite").read_bytes()
    for number in range(1, 13):
        harmed = HARMS[harm](content, random.Random(number))
        (work / "journal.sqlite").unlink() if harmed is None else (work / "journal.sqlite").write_bytes(harmed)
        with lock(work):
            found = Journal(work / "journal.sqlite")
            assert everything(found) == told
            found.close()
        assert (work / "journal.sqlite").stat().st_mode & 0o77 == 0
        said = capsys.readouterr().err
        assert ("put aside as journal.sqlite.damaged-" in said) == (said != "")
        if said and harmed is not None:
            aside = max(work.glob("journal.sqlite.damaged-*"), key=lambda each: int(each.name.rpartition("-")[2]))
            assert aside.read_bytes() == harmed
    assert harm == "removed" or len(list(work.glob("journal.sqlite.damaged-*"))) >= 11


def test_damage_without_a_copy_is_said_and_nothing_is_touched(tmp_path):
    journal_of(tmp_path / "journal.sqlite").close()
    harmed = b"x" * 20_000
    (tmp_path / "journal.sqlite").write_bytes(harmed)
    with pytest.raises(InputError, match=r"damaged .*no whole journal\.backup\.sqlite.*export"), lock(tmp_path):
        raise AssertionError
    assert (tmp_path / "journal.sqlite").read_bytes() == harmed


REPLACED = """
import sys; from pathlib import Path; from synergy_exec.controller.journal import Journal
journal = Journal(Path(sys.argv[1]))
journal.take_over()
print("mine", flush=True)
sys.stdin.readline()
journal.set_meta("who", "the first"); journal.commit()
print("written", flush=True)
"""


def test_a_controller_that_another_has_replaced_writes_nothing_any_more(tmp_path):
    """As on file systems that keep no locks between machines."""
    path = tmp_path / "journal.sqlite"
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    first = subprocess.Popen([sys.executable, "-c", REPLACED, str(path)], **pipes, text=True)
    assert first.stdout.readline() == "mine\n"
    second = Journal(path)
    second.take_over()
    second.set_meta("who", "the second")
    second.commit()
    said, complained = first.communicate("go\n", timeout=60)
    assert (first.returncode, said) == (FENCED_OUT, "")
    assert "another controller has taken this run over" in complained
    assert second.meta()["who"] == "the second"
