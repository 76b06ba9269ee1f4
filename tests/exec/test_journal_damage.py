"""A damaged journal is noticed, whatever the damage, or it reads as it was written; nothing is forgotten in silence."""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from exec.test_journal import FILE, filled

from synergy_core.errors import InputError
from synergy_exec.controller.journal import JobRow, Journal
from synergy_exec.controller.journal_file import VERSION
from synergy_runs.log import Kind

PARTS = ("", "-wal", "-commits")
Written = dict[str, bytes]


def everything(journal: Journal) -> list[object]:
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


def journal_of(path: Path) -> Journal:
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
def closed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Written, list[object]]:
    """The files of a journal that was closed, and what it says."""
    path = tmp_path_factory.mktemp("closed") / "j"
    journal = journal_of(path)
    told = everything(journal)
    journal.close()
    return files(path), told


@pytest.fixture(scope="module")
def broken_off(tmp_path_factory: pytest.TempPathFactory) -> tuple[Written, list[object]]:
    """The files of one whose process was killed, most of it in the write-ahead log, and what it says."""
    path = tmp_path_factory.mktemp("open") / "j"
    journal = journal_of(path)
    written, told = files(path), everything(journal)
    journal.close()
    assert len(written["-wal"]) > 100_000
    return written, told


def files(path: Path) -> Written:
    found = {part: path.with_name(path.name + part) for part in PARTS}
    return {part: each.read_bytes() for part, each in found.items() if each.is_file()}


def noticed(folder: Path, written: Written, told: list[object]) -> bool:
    """Whether a journal of these files is refused with what to type; if not, it says what it was told."""
    folder.mkdir()
    path = folder / "j"
    for part, content in written.items():
        path.with_name(path.name + part).write_bytes(content)
    try:
        journal = Journal(path)
    except InputError as error:
        words = str(error)
        return "resume --salvage" in words or "no journal of Synergy's" in words or "a journal of version" in words
    assert everything(journal) == told
    journal.close()
    shutil.rmtree(folder)
    return False


def flipped(content: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(content))
    return content[:at] + bytes([content[at] ^ (1 << draw.randrange(8))]) + content[at + 1 :]


def cut(content: bytes, draw: random.Random) -> bytes:
    return content[: draw.randrange(len(content))]


def zeroed(content: bytes, draw: random.Random) -> bytes:
    """A sector that was never written."""
    at = draw.randrange(len(content)) // 512 * 512
    return content[:at] + bytes(512) + content[at + 512 :]


@pytest.mark.parametrize("harm", [flipped, cut, zeroed])
@pytest.mark.parametrize("seed", range(3))
def test_damage_anywhere_in_the_file_is_noticed_or_changes_nothing(
    closed: tuple[Written, list[object]], tmp_path: Path, harm: Callable[[bytes, random.Random], bytes], seed: int
) -> None:
    written, told = closed
    draw = random.Random(seed)
    found = [noticed(tmp_path / str(number), {**written, "": harm(written[""], draw)}, told) for number in range(60)]
    assert any(found)


@pytest.mark.parametrize("harm", [flipped, cut, zeroed])
@pytest.mark.parametrize("seed", range(2))
def test_damage_anywhere_in_the_write_ahead_log_is_noticed_or_changes_nothing(
    broken_off: tuple[Written, list[object]], tmp_path: Path, harm: Callable[[bytes, random.Random], bytes], seed: int
) -> None:
    """SQLite itself takes what stands before the damage for all there was."""
    written, told = broken_off
    draw = random.Random(seed)
    found = [
        noticed(tmp_path / str(number), {**written, "-wal": harm(written["-wal"], draw)}, told) for number in range(30)
    ]
    assert any(found)


def test_log_that_is_gone_is_noticed(broken_off: tuple[Written, list[object]], tmp_path: Path) -> None:
    written, told = broken_off
    assert noticed(tmp_path / "log", {part: written[part] for part in ("", "-commits")}, told)
    assert noticed(tmp_path / "all", {"": b"", "-commits": written["-commits"]}, told)


def test_an_older_copy_put_back_is_noticed(tmp_path: Path) -> None:
    journal = filled(tmp_path / "j")
    journal.close()
    kept = (tmp_path / "j").read_bytes()
    journal = Journal(tmp_path / "j")
    journal.submitted(JobRow(7, "later", FILE, 0.5, None, "waiting", "", 0, 0))
    journal.close()
    (tmp_path / "j").write_bytes(kept)
    with pytest.raises(InputError, match=r"has lost its last commits: it has \d+, and \d+ had been written\. To make"):
        Journal(tmp_path / "j")


def test_harm_to_the_count_of_commits_alone_does_no_harm(closed: tuple[Written, list[object]], tmp_path: Path) -> None:
    written, told = closed
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
def test_what_another_program_changed_is_named(tmp_path: Path, statement: str, says: str) -> None:
    journal_of(tmp_path / "j").close()
    other = sqlite3.connect(tmp_path / "j")
    other.execute(statement)
    other.commit()
    other.close()
    with pytest.raises(InputError, match=says):
        Journal(tmp_path / "j")


OLD = """
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
INSERT INTO jobs VALUES (0, 'a', '{"class": "a.b:C", "slots": 1}', 0.5, 0, 'waiting', '', 1, 9);
INSERT INTO facts VALUES (1, 0.5, 0, 0, 1, '[]');
INSERT INTO meta VALUES ('over', 'false');
PRAGMA application_id=1398361669;
"""
TIMINGS = """
CREATE TABLE timings (
    serial INTEGER PRIMARY KEY, run INTEGER NOT NULL, time_s REAL NOT NULL, kind TEXT NOT NULL, parts TEXT NOT NULL);
INSERT INTO timings VALUES (1, 0, 0.5, 'plan', '{}');
"""


@pytest.mark.parametrize("version", [1, 2])
def test_journals_of_earlier_versions_are_read_and_checked_from_then_on(tmp_path: Path, version: int) -> None:
    old = sqlite3.connect(tmp_path / "j")
    old.executescript(OLD + (TIMINGS if version > 1 else "") + f"PRAGMA user_version={version};")
    old.close()
    for _ in range(2):
        journal = Journal(tmp_path / "j")
        assert journal.jobs() == [JobRow(0, "a", FILE, 0.5, 0, "waiting", "", 1, 9)]
        assert (len(journal.timings()), journal.meta()) == (version - 1, {"over": False})
        journal.close()
    other = sqlite3.connect(tmp_path / "j")
    assert other.execute("PRAGMA user_version").fetchone() == (VERSION,)
    other.execute("UPDATE jobs SET name='b'")
    other.commit()
    other.close()
    with pytest.raises(InputError, match="row 0 of its table jobs has changed"):
        Journal(tmp_path / "j")


def test_journal_is_opened_while_another_writes_it(tmp_path: Path) -> None:
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
