"""The journal: what it keeps, what it refuses to open, and what takes the place of a damaged one."""

import contextlib
import multiprocessing
import random
import sqlite3
from pathlib import Path

import numpy as np
import pytest
from exec.pretended import refuses

from synergy_core.errors import InputError
from synergy_exec.controller.journal import FENCED_OUT, JobRow, Journal, NoRoomError, Observation, back_up
from synergy_exec.folders import lock
from synergy_exec.workload import as_executed
from synergy_runs.inputs.workload import from_rows
from synergy_runs.outputs.facts import Kind
from synergy_runs.traces import read_trace

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
    journal.agent(1, "there", 5, 6)
    journal.agents_left()
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
    assert made.jobs["cpus"][[0, 2]].tolist() == [3, 6]
    assert made.jobs["memory_bytes"][0] == 1e9
    assert np.isnan(made.jobs["memory_bytes"][1:]).all()
    assert np.isnan(made.jobs["cpus"][1])


def test_files_that_are_no_journal_of_this_version_are_refused(tmp_path):
    refuses("cannot be used", Journal, Path("/proc/nowhere/j"))
    (tmp_path / "text").write_text("not a database, but long enough to look at" * 100)
    refuses("cannot be used", Journal, tmp_path / "text")
    filled(tmp_path / "newer").close()
    for name, statement in (("foreign", "CREATE TABLE t (x)"), ("newer", "PRAGMA user_version=99")):
        with contextlib.closing(sqlite3.connect(tmp_path / name)) as other:
            other.execute(statement)
        refuses("no journal of Synergy" if name == "foreign" else "99", Journal, tmp_path / name)


def test_on_a_full_disk_a_request_is_refused_and_forgotten_and_all_else_is_written_later(tmp_path):
    journal = Journal(tmp_path / "journal.sqlite")
    again = Journal(tmp_path / "journal.sqlite")

    def pages(most):
        return journal._connection.execute(f"PRAGMA max_page_count={most}").fetchone()[0]

    journal.fact(1.0, 0, 7, 1)
    pages(1)  # no fewer than there are
    for number in range(40):
        journal.set_meta(f"name-{number}", "x" * 2000)
    refuses("No space left on device", journal.commit)
    with pytest.raises(NoRoomError, match="was not carried out"), journal.request():
        journal.set_meta("asked", True)
    assert not again.facts()
    pages(10_000)
    journal.commit()
    assert [fact.job for fact in again.facts()] == [7]
    assert len(again.meta()) == 40  # without what was asked for
    with journal.request():
        journal.set_meta("asked", True)
    assert again.meta()["asked"]


# Damage, and the copy that takes a damaged journal's place


def overwritten(content, draw):
    at = draw.randrange(0, len(content), 4096)
    return content[:at] + draw.randbytes(4096) + content[at + 4096 :]


HARMS = {
    "overwritten": overwritten,
    "cut": lambda content, draw: content[: draw.randrange(len(content))],
    "emptied": lambda content, draw: b"",
    "removed": lambda content, draw: None,
}


def everything(journal):
    return journal.meta(), journal.jobs(), journal.runs(), journal.facts(), journal.reports(), journal.observations()


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_journal_is_put_aside_and_its_copy_used(tmp_path, capsys, harm):
    path = tmp_path / "run" / "journal.sqlite"
    journal = filled(path)
    for number in range(1, 100):
        journal.fact(float(number), int(Kind.SUBMIT), number, 1)
        journal.set_meta(f"name-{number}", "x" * 100)
    journal.commit()
    back_up(path.parent)
    told = everything(journal)
    journal.close()
    content = path.read_bytes()

    def aside():
        return {each: each.read_bytes() for each in path.parent.glob(f"{path.name}.damaged-*")}

    for number in range(1, 13):
        harmed, before = HARMS[harm](content, random.Random(number)), aside()
        path.unlink() if harmed is None else path.write_bytes(harmed)
        with lock(path.parent), contextlib.closing(Journal(path)) as found:
            assert everything(found) == told
        assert path.stat().st_mode & 0o77 == 0
        new = aside().items() - before.items()
        assert {content for _, content in new} <= {harmed}
        assert all(each.name in capsys.readouterr().err for each, _ in new)
    assert harm == "removed" or len(aside()) >= 11


def test_damage_without_a_copy_is_said_and_nothing_is_touched(tmp_path):
    harmed = b"x" * 20_000
    (tmp_path / "journal.sqlite").write_bytes(harmed)
    with pytest.raises(InputError, match=r"damaged .*no whole journal\.backup\.sqlite.*export"), lock(tmp_path):
        raise AssertionError
    assert (tmp_path / "journal.sqlite").read_bytes() == harmed


def test_a_controller_that_another_has_replaced_writes_nothing_any_more(tmp_path, capfd):
    """As on file systems that keep no locks between machines."""
    path, processes = tmp_path / "journal.sqlite", multiprocessing.get_context("fork")
    begun, replaced = processes.Event(), processes.Event()

    def first():
        journal = Journal(path)
        journal.take_over()
        begun.set()
        replaced.wait(60)
        journal.set_meta("who", "the first")
        journal.commit()

    other = processes.Process(target=first)
    other.start()
    begun.wait(60)
    second = Journal(path)
    second.take_over()
    second.set_meta("who", "the second")
    second.commit()
    replaced.set()
    other.join(60)
    assert other.exitcode == FENCED_OUT
    assert "another controller has taken this run over" in capfd.readouterr().err
    assert second.meta()["who"] == "the second"
