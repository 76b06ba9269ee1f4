"""The journal: what it keeps, what it refuses to open, and that no damage goes unnoticed."""

import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from exec.pretended import refuses
from jobs import workload

from synergy_core.errors import InputError
from synergy_exec.controller import journal_file
from synergy_exec.controller.journal import JobRow, Journal, Observation
from synergy_exec.controller.journal_file import VERSION
from synergy_exec.workload import as_executed
from synergy_runs.facts import Kind
from synergy_runs.traces import read_trace
from synergy_runs.workload import from_rows, with_measured

FILE = {"class": "a.b:C", "slots": 1}


def filled(path):
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


def test_everything_is_read_back_by_another(tmp_path):
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


def test_what_jobs_of_a_trace_asked_for_beside_gpus_is_in_the_workload_as_executed(tmp_path):
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


def test_what_was_not_committed_never_was(tmp_path):
    journal = filled(tmp_path / "j")
    journal.fact(2.0, int(Kind.FINISH), 0, 2)
    assert len(Journal(tmp_path / "j").facts()) == 2
    journal.commit()
    assert len(Journal(tmp_path / "j").facts()) == 3


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


def test_damaged_foreign_and_newer_files_are_refused(tmp_path):
    (tmp_path / "text").write_text("not a database, but long enough to look at" * 100)
    refuses("cannot be used", Journal, tmp_path / "text")
    for name, statement, says in (
        ("foreign", "CREATE TABLE t (x)", "no journal of Synergy's"),
        ("newer", f"PRAGMA user_version={VERSION + 1}", f"version {VERSION + 1}; this program reads up to {VERSION}"),
    ):
        if name == "newer":
            filled(tmp_path / name).close()
        other = sqlite3.connect(tmp_path / name)
        other.execute(statement)
        other.close()
        refuses(says, Journal, tmp_path / name)
    filled(tmp_path / "cut").close()
    whole = (tmp_path / "cut").read_bytes()
    (tmp_path / "cut").write_bytes(whole[:4096] + b"\xff" * (len(whole) - 4096))
    refuses(r"cannot be used|damaged", Journal, tmp_path / "cut")


def test_a_disk_that_refuses_is_said_in_a_sentence(tmp_path):
    refuses("journal cannot be used", Journal, Path("/proc/nowhere/j"))
    journal = filled(tmp_path / "j")
    journal._connection.execute("PRAGMA max_page_count=1")
    journal.reported(1, {"filler": "x" * 100_000})
    refuses("cannot be written", journal.commit)


@pytest.mark.parametrize(("ids", "measured"), [("1-2", [False, True, True, False]), (None, [True] * 4)])
def test_jobs_of_a_trace_are_measured_by_their_ids_and_those_beside_it_where_all_are(tmp_path, ids, measured):
    trace = with_measured(workload([(0.0, 1, 5.0), (1.0, 1, 5.0), (2.0, 1, 5.0)]), ids)
    journal = Journal(tmp_path / "j")
    for job, row in ((0, 0), (1, 1), (2, 2), (3, None)):
        journal.submitted(JobRow(job, f"job-{job}", {**FILE, "name": "a"}, float(job), row, "done", "", 0, 0))
    made, rows = as_executed(trace, journal, "test")
    assert made.measured.tolist() == measured
    assert rows == {0: 0, 1: 1, 2: 2, 3: 3}


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
    refuses("Free some space", journal.set_meta, "name", "x" * 100_000)


# Whatever the damage

PARTS = ("", "-wal", "-commits")
Written = dict[str, bytes]


def everything(journal):
    decisions = journal.decisions().decisions()
    return [
        journal.meta(),
        journal.jobs(),
        journal.runs(),
        journal.facts(),
        journal.timings(),
        journal.reports(),
        journal.observations(),
        journal.agents(),
        [decisions.time_s.tolist(), decisions.queued.tolist()],
    ]


def journal_of(path):
    """One with something in each table, and rows that were changed, replaced and deleted."""
    journal = filled(path)
    journal.set_meta("settings", {"seed": 0, "policy": "fifo"})
    journal.set_meta("over", False)
    journal.set_meta("over", True)
    for number in range(1, 30):
        journal.submitted(JobRow(number, f"job-{number}", FILE, 1.0 * number, None, "waiting", "", 0, 0, f"u{number}"))
        journal.fact(1.0 * number, int(Kind.SUBMIT), number, 1)
        journal.decided_run(number, number, 1.0 * number, ((0, 1),), {"data": 1})
        journal.timing(number, 1.0 * number, "plan", {"micro_batch": 4})
        journal.reported(number % 3, {"step": number})
        journal.commit()
    journal.job_is(4, "failed", "it was too much", 3, 5)
    journal.job_waits_again(4, from_start=True)
    journal.agents_left()
    journal.agent(1, "there", 5, 6)
    journal.commit()
    return journal


@pytest.fixture(scope="module")
def journals(tmp_path_factory):
    """The files of a journal that was closed, of one whose process was killed, most of it in the write-ahead log; and
    what each says.
    """
    path = tmp_path_factory.mktemp("journals") / "j"
    journal = journal_of(path)
    told, written = everything(journal), files(path)
    assert len(written["-wal"]) > 100_000
    journal.close()
    return {"": files(path), "-wal": written}, told


def files(path):
    found = {part: path.with_name(path.name + part) for part in PARTS}
    return {part: each.read_bytes() for part, each in found.items() if each.is_file()}


def noticed(folder, written, told):
    """Whether a journal of these files is refused with what to type, or is as it is read (a column's name can be
    damaged); if not, it says what it was told.
    """
    folder.mkdir()
    path = folder / "j"
    for part, content in written.items():
        path.with_name(path.name + part).write_bytes(content)
    try:
        journal = Journal(path)
    except InputError as error:
        return any(
            each in str(error) for each in ("resume --salvage", "no journal of Synergy's", "a journal of version")
        )
    try:
        assert everything(journal) == told
    except InputError as error:
        return "the journal cannot be read" in str(error)
    finally:
        journal.close()
    shutil.rmtree(folder)
    return False


def flipped(content, draw):
    at = draw.randrange(len(content))
    return content[:at] + bytes([content[at] ^ (1 << draw.randrange(8))]) + content[at + 1 :]


def cut(content, draw):
    return content[: draw.randrange(len(content))]


def zeroed(content, draw):
    """A sector that was never written."""
    at = draw.randrange(len(content)) // 512 * 512
    return content[:at] + bytes(512) + content[at + 512 :]


@pytest.mark.parametrize("harm", [flipped, cut, zeroed])
@pytest.mark.parametrize(("part", "times"), [("", 180), ("-wal", 60)])
def test_damage_anywhere_is_noticed_or_changes_nothing(journals, tmp_path, harm, part, times):
    """SQLite itself takes what stands before damage in its log for all there was."""
    written, told = journals
    draw, found = random.Random(0), []
    for number in range(times):
        harmed = {**written[part], part: harm(written[part][part], draw)}
        found.append(noticed(tmp_path / str(number), harmed, told))
    assert any(found)


def test_log_that_is_gone_is_noticed(journals, tmp_path):
    written, told = journals[0]["-wal"], journals[1]
    assert noticed(tmp_path / "log", {part: written[part] for part in ("", "-commits")}, told)
    assert noticed(tmp_path / "all", {"": b"", "-commits": written["-commits"]}, told)


def test_harm_to_the_count_of_commits_alone_does_no_harm(journals, tmp_path):
    written, told = journals[0][""], journals[1]
    draw = random.Random(1)
    for number in range(20):
        for harm in (flipped, cut):
            harmed = {**written, "-commits": harm(written["-commits"], draw)}
            assert not noticed(tmp_path / f"{number}-{harm.__name__}", harmed, told)


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        ("UPDATE jobs SET state='done' WHERE job=3", "row 3 of its table jobs has changed since it was written"),
        ("DELETE FROM jobs WHERE job=3", "29 rows are in its table jobs and 30 were written"),
        ("UPDATE facts SET job=9 WHERE serial=4", "row 4 of its table facts has changed"),
        ("UPDATE meta SET value='3' WHERE name='over'", "row over of its table meta has changed"),
        ("DELETE FROM sums WHERE name='runs'", "how many rows table runs has is written nowhere"),
        ("UPDATE sums SET total=total+1 WHERE name='runs'", "the rows of its table runs are not those"),
        ("DELETE FROM sums WHERE name='commits'", "how many commits there were is written nowhere"),
    ],
)
def test_what_another_program_changed_is_named(tmp_path, statement, says):
    journal_of(tmp_path / "j").close()
    other = sqlite3.connect(tmp_path / "j")
    other.execute(statement)
    other.commit()
    other.close()
    refuses(says, Journal, tmp_path / "j")


WITHOUT_REASONS = "ALTER TABLE facts DROP COLUMN reason;"
OLDER = {
    2: f"{WITHOUT_REASONS} DROP TABLE sums; ALTER TABLE jobs DROP COLUMN uuid;",
    1: f"{WITHOUT_REASONS} DROP TABLE sums; ALTER TABLE jobs DROP COLUMN uuid; DROP TABLE timings;",
}
"""What versions before 3 did not have; nor had any of their tables checksums."""


def without_checksums(path):
    """The journal as versions before 3 wrote it, but for what `OLDER` names."""
    filled(path).close()
    path.with_name("j-commits").unlink()
    old = sqlite3.connect(path)
    tables = [name for (name,) in old.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    checked = [name for name in tables if "crc" in [column[1] for column in old.execute(f"PRAGMA table_info({name})")]]
    old.executescript("".join(f"ALTER TABLE {name} DROP COLUMN crc;" for name in checked))
    return old


@pytest.mark.parametrize("version", OLDER)
def test_journals_of_earlier_versions_are_read_and_checked_from_then_on(tmp_path, version):
    old = without_checksums(tmp_path / "j")
    old.executescript(f"{OLDER[version]} PRAGMA user_version = {version};")
    old.close()
    for _ in range(2):
        journal = Journal(tmp_path / "j")
        assert (journal.jobs(), len(journal.facts())) == ([JobRow(0, "a", FILE, 0.5, 0, "waiting", "", 0, 0)], 2)
        assert (journal.reports(), journal.timings()) == ({0: {"step": 3}}, [])
        journal.close()
    other = sqlite3.connect(tmp_path / "j")
    assert other.execute("PRAGMA user_version").fetchone() == (VERSION,)
    other.execute("UPDATE jobs SET name='b'")
    other.commit()
    other.close()
    refuses("row 0 of its table jobs has changed", Journal, tmp_path / "j")


@pytest.mark.parametrize("damaged", [False, True])
def test_journal_from_before_stops_had_reasons_is_checked_before_it_is_brought_up_to_date(tmp_path, damaged):
    old = without_checksums(tmp_path / "j")
    old.executescript(f"{WITHOUT_REASONS} DROP TABLE sums;")
    journal_file.add(old)
    if damaged:
        old.execute("UPDATE facts SET gpus = 2")
    old.execute("PRAGMA user_version=3")
    old.commit()
    old.close()
    if damaged:
        refuses("row 1 of its table facts has changed", Journal, tmp_path / "j")
    else:
        assert [fact.reason for fact in Journal(tmp_path / "j").facts()] == [0, 0]


def test_journal_is_opened_while_another_writes_it(tmp_path):
    """As `verify` does beside a controller: a commit between two looks at it is no damage."""
    writer = journal_of(tmp_path / "j")
    for number in range(40):
        writer.fact(100.0 + number, int(Kind.SUBMIT), 5, 1)
        if number % 2:
            writer.commit()
        reader = Journal(tmp_path / "j")
        assert len(reader.facts()) >= 31 + number // 2
        reader.close()
    writer.close()
