"""Logs in bounded space, and the command that prints them."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import recorded_runs as stored

from synergy_core.errors import InputError
from synergy_exec.agent.logs import bound, logs, opened
from synergy_exec.commands import logs as command
from synergy_exec.controller.journal import Journal
from synergy_exec.messages import Launch, PlanMessage

KB = 1e-3
"""Megabytes."""


def launch(folder: Path, run: int, log_mb: float = 8 * KB, first_rank: int = 0) -> Launch:
    return Launch(
        run=run,
        job=0,
        job_class="a:B",
        plan=PlanMessage(),
        initial_batch=1,
        work=1.0,
        slots=[0],
        first_rank=first_rank,
        world=1,
        store_host="",
        store_port=0,
        folder=str(folder),
        log_mb=log_mb,
    )


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def test_a_job_keeps_the_last_of_what_it_printed_within_its_space(tmp_path: Path) -> None:
    for run in range(5):
        given = launch(tmp_path, run)
        with open(opened(given), "wb", buffering=0) as log:  # held open, as workers do
            for line in range(40):
                log.write(f"run {run} line {line:02} ".encode().ljust(99, b".") + b"\n")
                bound(given)
                assert size(tmp_path) <= 8_000 + 200
    found = {run: "".join(path.read_text() for path in paths) for run, paths in logs(tmp_path).items()}
    assert list(found) == [3, 4]
    assert found[4].splitlines()[-1].startswith("run 4 line 39")
    assert "the log of run 2 was removed: log_mb=0.008 of this job's logs are kept" in found[4] + found[3]


def test_what_is_printed_at_once_is_cut_to_its_end(tmp_path: Path) -> None:
    given = launch(tmp_path, 1)
    with open(opened(given), "wb", buffering=0) as log:
        log.write(b"a" * 50_000 + b"the end")
        bound(given)
        log.write(b", and more")
    old, now = logs(tmp_path)[1]
    assert len(old.read_bytes()) == 2_000
    assert old.read_bytes().endswith(b"aa" + b"the end")
    assert now.read_bytes() == b", and more"


def test_one_agent_bounds_what_those_of_all_nodes_write(tmp_path: Path) -> None:
    other = launch(tmp_path, 1, first_rank=2)
    with open(opened(other), "wb") as log:
        log.write(b"a" * 50_000)
    bound(other)
    assert [path.name for path in tmp_path.iterdir()] == ["log-1.txt"]


def test_a_log_that_cannot_be_bounded_ends_no_run(tmp_path: Path) -> None:
    bound(launch(tmp_path / "nowhere", 1))


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """Jobs a and b, numbers 0 and 1, of which a had runs 0 and 3, and c that printed nothing."""
    folder = tmp_path / "results" / "demo" / "fifo-0.work"
    for number, name in enumerate("abc"):
        stored.job_folder(folder, number, name, stored.SGD, {})
    texts = {"0/log-0.txt": "zero\n", "0/log-3.old.txt": "old\n", "0/log-3.txt": "three\n", "1/log-2.txt": "two\n"}
    for path, text in texts.items():
        (folder / "jobs" / path).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("typed", "printed"),
    [
        (["a"], "--- run 0\nzero\n--- run 3\nold\nthree\n"),
        (["0"], "--- run 0\nzero\n--- run 3\nold\nthree\n"),
        (["a", "--run", "3"], "old\nthree\n"),
        (["b"], "--- run 2\ntwo\n"),
        (["c"], ""),
    ],
)
def test_logs_of_a_job_are_printed_in_order(
    work: Path, typed: list[str], printed: str, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    for folder in (work, work.parents[1]):
        command.main([*typed, "--dir", str(folder)])
        assert capfdbinary.readouterr().out.decode() == printed


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        (["d"], "no job 'd' was launched in a run below .*; those that were: a, b, c"),
        (["a", "--run", "2"], "--run 2: job a has no log of that run; it has those of: 0, 3"),
        (["c", "--run", "2"], "it has those of: none"),
    ],
)
def test_what_has_no_log_is_said(work: Path, typed: list[str], says: str) -> None:
    with pytest.raises(InputError, match=says):
        command.main([*typed, "--dir", str(work)])


def test_a_name_that_two_jobs_have_is_not_guessed_but_the_last_run_is(
    work: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    later = work.with_name("las-0.work")
    (stored.job_folder(later, 7, "a", stored.SGD, {}) / "log-9.txt").write_text("nine\n")
    command.main(["a", "--dir", str(work.parents[1])])
    said = capfdbinary.readouterr()
    assert said.out.decode() == "--- run 9\nnine\n"
    assert f"of {later}, written to last" in said.err.decode()
    (stored.job_folder(later, 8, "a", stored.SGD, {}) / "log-10.txt").write_text("ten\n")
    with pytest.raises(InputError, match=r"2 jobs are called a in .*; take a number: 7, 8"):
        command.main(["a", "--dir", str(later)])


def test_following_goes_on_until_the_job_has_ended(work: Path) -> None:
    journal = Journal(work / "journal.sqlite")
    stored.add_runs(journal, 0, "a", [PlanMessage()])
    journal.job_is(0, "waiting", "", 0, 0)
    journal.commit()
    typed = [sys.executable, "-m", "synergy_exec", "logs", "a", "--follow", "--dir", str(work)]
    lines: list[str] = []
    grown = threading.Condition()
    with subprocess.Popen(typed, stdout=subprocess.PIPE, text=True) as process:

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                with grown:
                    lines.append(line.rstrip())
                    grown.notify_all()

        reader = threading.Thread(target=read)
        reader.start()

        def wait_for(text: str) -> None:
            with grown:
                assert grown.wait_for(lambda: text in lines, 60), lines

        wait_for("three")
        log = work / "jobs" / "0" / "log-3.txt"
        with log.open("a") as file:
            file.write("more\n")
        wait_for("more")
        log.write_text("x\n")  # turned over
        wait_for("x")
        (work / "jobs" / "0" / "log-4.txt").write_text("four\n")
        wait_for("four")
        assert process.poll() is None
        journal.job_is(0, "done", "", 0, 0)
        journal.commit()
        journal.close()
        assert process.wait(60) == 0
        reader.join()
    assert lines == ["--- run 0", "zero", "--- run 3", "old", "three", "more", "x", "--- run 4", "four"]
