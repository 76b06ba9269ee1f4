"""From the command line, with real workers: a failed job goes on where it was, a broken-off run where it was, weights
come out, and what need not be kept goes."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from exec.test_exec_cli import trace_of
from exec.waiting import wait_until

from synergy_exec.controller.journal import Journal
from synergy_exec.run import SOME_FAILED

HERE = Path(__file__).parent
JOB = """
class: {here}/agents_jobs.py:Breaking
arguments: {{way: obey, at: 12, pause_s: 0.02, note: {note}}}
name: fickle
initial_batch: 8
work: 20
"""


def typed(*words: object) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "synergy_exec", *map(str, words)]
    return subprocess.run(line, capture_output=True, text=True, timeout=240)


def answer(*words: object) -> str:
    """What a command prints that does what it was asked."""
    ended = typed(*words)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@contextmanager
def serving(said: Path, *words: object, code: int = 0) -> Iterator[subprocess.Popen[bytes]]:
    """A controller in another terminal, until Ctrl-C; it leaves with that code."""
    with said.open("ab") as stream:
        line = [sys.executable, "-m", "synergy_exec", *map(str, words)]
        controller = subprocess.Popen(line, stdout=stream, stderr=stream)
    try:
        yield controller
        controller.send_signal(signal.SIGINT)
        assert controller.wait(240) == code, said.read_text()
    finally:
        controller.kill()
        controller.wait()


def until(true: Callable[[], object], said: Path) -> None:
    wait_until(true, 240, said.read_text)


def state(results: Path) -> dict[str, Any]:
    """The only job as it is listed; nothing where no controller answers yet."""
    listed = typed("list", "--json", "--dir", results)
    return json.loads(listed.stdout)[0] if listed.returncode == 0 else {"state": "", "restarts": 0}


def steps(work: Path) -> list[tuple[int, int]]:
    """(step, run) of each step trained."""
    lines = (work / "jobs" / "0" / "steps.csv").read_text().splitlines()[1:]
    return [(int(line.split(",")[0]), int(line.split(",")[5])) for line in lines]


def test_a_failed_job_is_retried_its_run_resumed_its_weights_exported_and_the_rest_pruned(tmp_path: Path) -> None:
    results, said, note = tmp_path / "r", tmp_path / "said.txt", tmp_path / "note"
    work = results / "served" / "fifo-0.work"
    (tmp_path / "job.yaml").write_text(JOB.format(here=HERE, note=note))
    serve = ("serve=true", "policy=[fifo]", f"results_dir={results}", "backend.options.slots=1", "figures=false")
    serve += ("live=false", "round_s=0.2", "checkpoint_interval_s=0.05", "keep_checkpoints=3", "hang_s=200")
    with serving(said, *serve, code=SOME_FAILED):
        until(lambda: typed("submit", tmp_path / "job.yaml", "--dir", results).returncode == 0, said)
        until(lambda: list((work / "jobs" / "0" / "checkpoints").glob("step-*")), said)
        note.write_text("fail\n")
        until(lambda: state(results)["state"] == "failed", said)
        assert answer("retry", "fickle", "--dir", results) == "job 0 (fickle) is waiting\n"
        until(lambda: (listed := state(results))["state"] == "failed" and listed["restarts"] == 1, said)
    assert {run for step, run in steps(work) if step == 1} == {0}, "it began again from step 0"
    note.write_text("go on\n")
    resume = f"python -m synergy_exec resume {work}"
    assert answer("retry", "fickle", "--dir", results) == f"job 0 (fickle) waits; to go on: {resume}\n"
    with serving(said, "resume", "--dir", results):
        until(lambda: state(results)["state"] == "done", said)
    trained = steps(work)
    assert {step for step, _ in trained} == set(range(1, 21))
    assert next(step for step, run in trained if run == 2) > 1
    assert json.loads((results / "served" / "latest" / "fifo-0" / "summary.json").read_text())["jobs_failed"] == 0
    assert not (results / "served" / "fifo-0.2.work").exists()
    refused = typed("resume", work)
    assert (refused.returncode, "has ended; there is nothing to go on with" in refused.stderr) == (2, True)

    out = tmp_path / "fickle.safetensors"
    assert " 2 tensors, 10 numbers, of job fickle at step 20" in answer("export", "fickle", "--dir", work, "--out", out)
    from safetensors.torch import load_file

    assert {name: tuple(each.shape) for name, each in load_file(out).items()} == {"weight": (2, 4), "bias": (2,)}
    assert len(list((work / "jobs" / "0" / "checkpoints").glob("step-*"))) <= 3
    named = answer("prune", results, "--last-checkpoint")
    assert "step-00000020" not in named
    assert "nothing is removed yet" in named
    answer("prune", results, "--last-checkpoint", "--yes")
    assert [each.name for each in (work / "jobs" / "0" / "checkpoints").glob("step-*")] == ["step-00000020"]


@pytest.fixture
def broken_off(tmp_path: Path) -> Path:
    """The work folder of a run of two jobs, killed once the first was launched. Its agents only pretended."""
    trace, results = trace_of(tmp_path, 2, 8), tmp_path / "r"
    work = results / "small" / "fifo-0.work"
    script = HERE / "controllers_backend.py"
    process = subprocess.Popen([sys.executable, str(script), "run", str(trace), str(results), "fifo"])
    try:
        until(lambda: (work / "controller.json").is_file() and launched(work), trace)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    return work


def launched(work: Path) -> bool:
    journal = Journal(work / "journal.sqlite")
    found = any(run.launched for run in journal.runs())
    journal.close()
    return found


def test_a_broken_off_run_is_resumed_without_retyping_the_command(broken_off: Path) -> None:
    """Its trace, its policy and its keys are those that it was started with; only the agents are real ones now."""
    results = broken_off.parents[1]
    ended = typed("resume", "--dir", results, "host=localhost", "retries=9")
    assert ended.returncode == 0, ended.stderr
    journal = Journal(broken_off / "journal.sqlite")
    assert [journal.meta()["settings"][each] for each in ("host", "retries", "hang_s")] == ["localhost", 9, 60.0]
    journal.close()
    summary = json.loads((results / "small" / "latest" / "fifo-0" / "summary.json").read_text())
    assert (summary["jobs"], summary["jobs_failed"], summary["jobs_unfinished"]) == (2, 0, 0)
    assert [each.name for each in results.glob("*/*.work")] == ["fifo-0.work"]
    assert typed("resume", "--dir", results).returncode == 2


def test_a_run_with_a_damaged_journal_is_salvaged_and_ends(broken_off: Path) -> None:
    other = sqlite3.connect(broken_off / "journal.sqlite")
    other.execute("UPDATE jobs SET state='done' WHERE job=0")
    other.commit()
    other.close()
    refused = typed("resume", broken_off)
    assert refused.returncode == 2
    assert f"python -m synergy_exec resume --salvage {broken_off}" in refused.stderr
    ended = typed("resume", "--salvage", broken_off)
    assert ended.returncode == SOME_FAILED, ended.stderr
    assert "of its table jobs," in ended.stdout
    assert "job 0 (j0): the journal had lost it; its folder has no checkpoint" in ended.stderr
    summary = json.loads((broken_off.with_name("latest") / "fifo-0" / "summary.json").read_text())
    assert (summary["jobs"], summary["jobs_failed"]) == (2, 1)
    again = answer("retry", "j0", "--from-start", "--dir", broken_off)
    assert "job 0 (j0) waits" in again
    assert typed("resume", broken_off).returncode == 0
    summary = json.loads((broken_off.with_name("latest") / "fifo-0" / "summary.json").read_text())
    assert (summary["jobs"], summary["jobs_failed"]) == (2, 0)
