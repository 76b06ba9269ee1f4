"""What has been trained stays: a run that has ended, one that lives, one that goes on, and who holds a folder."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from exec.controllers_backend import TaskBackend, settings_values
from exec.test_exec_cli import executed, trace_of

from synergy_core.errors import InputError
from synergy_exec.controller.journal import Journal
from synergy_exec.folders import lock, newest
from synergy_exec.run import execute_all
from synergy_exec.settings import Settings
from synergy_runs.results import main as results_main
from synergy_runs.settings import build

HOLDER = """
import sys, time
from pathlib import Path
from synergy_exec.folders import lock
with lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def weights(work: Path) -> Path:
    """As a job leaves them; the pretended agents of these tests write none."""
    path = work / "jobs" / "0" / "checkpoints" / "step-00000120" / "progress.json"
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    return path


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def test_finished_run_typed_again_gets_its_own_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, results = trace_of(tmp_path, 2, 4), tmp_path / "r"
    (first,) = executed(trace, results, ["fifo"], TaskBackend(1, 1))
    kept = [weights(results / "small" / "fifo-0.work"), first / "summary.json"]
    before = [each.read_bytes() for each in kept]
    capsys.readouterr()
    (second,) = executed(trace, results, ["fifo"], TaskBackend(1, 1))
    assert second.name == "fifo-0.2"
    assert json.loads((second / "summary.json").read_text())["jobs"] == 2
    assert [each.read_bytes() for each in kept] == before
    assert f"{first} is kept, with its checkpoints in fifo-0.work; this run goes to {second}" in capsys.readouterr().err
    (third,) = executed(trace, results, ["fifo"], TaskBackend(1, 1), restart_s=9.0)  # with other settings too
    assert third.name == "fifo-0.3"
    assert names(results / "small") == [f"fifo-0{each}" for each in ("", ".2", ".2.work", ".3", ".3.work", ".work")]
    assert [each.read_bytes() for each in kept] == before
    assert newest(first).results == third
    assert results_main([str(results / "small")]) == 0
    assert f"{second}: left out, a repetition" in capsys.readouterr().err


def test_results_without_a_work_folder_are_kept_too(tmp_path: Path) -> None:
    """Whose weights were removed by hand, or that were simulated."""
    trace, results = trace_of(tmp_path, 1, 3), tmp_path / "r"
    (results / "small" / "fifo-0").mkdir(parents=True)
    (results / "small" / "fifo-0" / "summary.json").write_text("{}")
    (second,) = executed(trace, results, ["fifo"], TaskBackend(1, 1))
    assert second.name == "fifo-0.2"
    assert (results / "small" / "fifo-0" / "summary.json").read_text() == "{}"


def test_live_run_is_refused_with_who_holds_it(tmp_path: Path) -> None:
    trace, results = trace_of(tmp_path, 1, 3), tmp_path / "r"
    work = results / "small" / "fifo-0.work"
    with holding(work) as holder:
        kept = weights(work)
        says = f"a controller runs here already, process {holder.pid} on {socket.gethostname()}. Stop it, or name"
        for more in ({}, {"restart_s": 9.0}):
            with pytest.raises(InputError, match=says):
                executed(trace, results, ["fifo"], TaskBackend(1, 1), **more)
        assert kept.is_file()
        with pytest.raises(InputError, match=says), lock(work):
            raise AssertionError
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
    (first,) = executed(trace, results, ["fifo"], TaskBackend(1, 1))  # the lock died with its holder
    assert first.name == "fifo-0"


@contextlib.contextmanager
def holding(work: Path) -> Iterator[subprocess.Popen[bytes]]:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(work)], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == b"held\n"
        yield holder
    finally:
        holder.kill()
        holder.wait()


def test_later_policies_of_a_command_are_held_from_its_beginning(tmp_path: Path) -> None:
    trace, results = trace_of(tmp_path, 1, 3), tmp_path / "r"

    class Asking(TaskBackend):
        async def start(self, node: int, meeting: Any) -> None:
            with pytest.raises(InputError, match=f"process {os.getpid()}"), lock(results / "small" / "synergy-0.work"):
                raise AssertionError
            await super().start(node, meeting)

    assert len(executed(trace, results, ["fifo", "synergy"], Asking(1, 1))) == 2


class BrokenOffError(Exception):
    pass


def test_repetition_that_is_broken_off_goes_on_where_it_was(tmp_path: Path) -> None:
    """The second round of two policies, broken off at the second: no third round begins, and no run is made twice."""
    trace, results = trace_of(tmp_path, 1, 3), tmp_path / "r"
    executed(trace, results, ["fifo", "las"], TaskBackend(1, 1))
    backends = iter([TaskBackend(1, 1)])

    def make_backend() -> TaskBackend:
        for each in backends:
            return each
        raise BrokenOffError

    values = settings_values(trace, results, ["fifo", "las"])
    with pytest.raises(BrokenOffError):
        execute_all(build(Settings, values), values, results / "small", make_backend)
    done = (results / "small" / "fifo-0.2" / "summary.json").stat().st_mtime_ns
    folders = executed(trace, results, ["fifo", "las"], TaskBackend(1, 1))
    assert [each.name for each in folders] == ["fifo-0.2", "las-0.2"]
    assert (results / "small" / "fifo-0.2" / "summary.json").stat().st_mtime_ns == done


def test_place_where_nothing_was_submitted_is_free_for_other_settings(tmp_path: Path) -> None:
    """As after a mistake that was noticed before the first job came."""
    trace, results = trace_of(tmp_path, 1, 3), tmp_path / "r"

    def none() -> TaskBackend:
        raise BrokenOffError

    values = settings_values(trace, results, ["fifo"], restart_s=9.0)
    with pytest.raises(BrokenOffError):
        execute_all(build(Settings, values), values, results / "small", none)
    (first,) = executed(trace, results, ["fifo"], TaskBackend(1, 1))
    assert first.name == "fifo-0"
    assert Journal(first.with_name("fifo-0.work") / "journal.sqlite").meta()["settings"]["restart_s"] == 5.0


def test_serving_twice_is_refused_while_the_first_lives_and_keeps_it_afterwards(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "synergy_exec", "serve=true", "policy=[fifo]", f"results_dir={tmp_path}"]
    command += ["backend.options.slots=1", "figures=false", "live=false", "round_s=0.3"]
    (tmp_path / "job.yaml").write_text(
        "class: synergy_exec.examples.mlp:Mlp\narguments: {width: 8, depth: 1}\ninitial_batch: 8\nwork: 5\n"
    )

    def asked(*what: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "synergy_exec", *what, "--dir", str(tmp_path)]
        return subprocess.run(line, capture_output=True, text=True, timeout=60)

    def all_done(listed: str) -> bool:
        states = {job["state"] for job in json.loads(listed)}
        return states == {"done"}

    def served() -> None:
        with (tmp_path / "said.txt").open("ab") as said:
            first = subprocess.Popen(command, stderr=said, stdout=said)
        try:
            until(lambda: asked("submit", str(tmp_path / "job.yaml")).returncode == 0)
            second = subprocess.run(command, capture_output=True, text=True, timeout=60)
            assert second.returncode == 2
            assert f"a controller runs here already, process {first.pid} on" in second.stderr
            until(lambda: all_done(asked("list", "--json").stdout))
        finally:
            first.send_signal(signal.SIGINT)
            first.wait(60)
        assert first.returncode == 0, (tmp_path / "said.txt").read_text()

    def until(true: Any) -> None:
        until_s = time.monotonic() + 120
        while not true():
            assert time.monotonic() < until_s, (tmp_path / "said.txt").read_text()
            time.sleep(0.3)

    served()
    served()
    assert len(list((tmp_path / "served").glob("fifo-0.work/jobs/0/checkpoints/step-*"))) == 1
    assert len(list((tmp_path / "served").glob("fifo-0.2.work/jobs/0/checkpoints/step-*"))) == 1
    assert {"fifo-0", "fifo-0.2"} <= set(names(tmp_path / "served"))
