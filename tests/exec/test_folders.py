"""What has been trained stays: a run that has ended, one that lives, one that goes on, and who holds a folder."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from exec.controllers_backend import TaskBackend, settings_values
from exec.test_exec_cli import executed, trace_of
from exec.waiting import wait_until

from synergy_core.errors import InputError
from synergy_exec.controller.journal import JobRow, Journal
from synergy_exec.folders import RESULTS, claimed, lock, newest
from synergy_exec.recorded import open_journal
from synergy_exec.run import execute_all
from synergy_exec.settings import Settings
from synergy_exec.works import works as works_below
from synergy_runs.filing import is_unended
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


def contents(folder: Path) -> dict[str, bytes]:
    return {str(each.relative_to(folder)): each.read_bytes() for each in folder.rglob("*") if each.is_file()}


def test_finished_run_typed_again_gets_its_own_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, results = trace_of(tmp_path, 2, 4), tmp_path / "r"
    small = results / "small"
    (first,) = executed(trace, results, ["fifo"], TaskBackend(1, 1))
    weights(small / "fifo-0.work")
    kept = {folder: contents(folder) for folder in (first.parent, small / "fifo-0.work" / "jobs")}
    capsys.readouterr()
    (second,) = executed(trace, results, ["fifo"], TaskBackend(1, 1))
    assert second.name == "fifo-0"
    assert second.parent != first.parent
    assert json.loads((second / "summary.json").read_text())["jobs"] == 2
    told = capsys.readouterr().err
    assert f"{small / 'fifo-0.work'} has ended and is kept" in told
    assert f"this run goes to {small / 'fifo-0.2.work'}" in told
    (third,) = executed(trace, results, ["fifo"], TaskBackend(1, 1), restart_s=9.0)  # with other settings too
    works = [f"fifo-0{each}.work" for each in ("", ".2", ".3")]
    assert set(names(small)) == {*works, *(each.parent.name for each in (first, second, third)), "latest"}
    assert {folder: contents(folder) for folder in kept} == kept
    assert (small / "latest").resolve() == third.parent
    assert (small / "latest" / "fifo-0.work").resolve() == newest(small / "fifo-0") == small / "fifo-0.3.work"
    assert open_journal(small / "latest" / "fifo-0.work").meta()["settings"]["restart_s"] == 9.0
    assert works_below(results) == works_below(small) == sorted(small / each for each in works)
    assert works_below(small / "latest") == [small / "latest" / "fifo-0.work"]
    assert results_main([str(small)]) == 0
    assert "left out: 1 of 3, repetitions of newer runs above (policy, seed and settings are the same); name one " in (
        capsys.readouterr().err
    )


def test_results_of_before_folders_of_runs_stay_as_they_are(tmp_path: Path) -> None:
    trace, results = trace_of(tmp_path, 1, 3), tmp_path / "r"
    (results / "small" / "fifo-0").mkdir(parents=True)
    (results / "small" / "fifo-0" / "summary.json").write_text("{}")
    (second,) = executed(trace, results, ["fifo"], TaskBackend(1, 1))
    assert second == results.resolve() / "small" / second.parent.name / "fifo-0"
    assert contents(results / "small" / "fifo-0") == {"summary.json": b"{}"}


def test_run_that_ended_before_there_were_folders_of_runs_counts_as_ended(tmp_path: Path) -> None:
    trace, results = trace_of(tmp_path, 1, 3), tmp_path / "r"
    (first,) = executed(trace, results, ["fifo"], TaskBackend(1, 1))
    first.rename(results / "small" / "fifo-0")
    journal = open_journal(results / "small" / "fifo-0.work")
    journal.set_meta(RESULTS, None)
    journal.close()
    kept = contents(results / "small" / "fifo-0")
    executed(trace, results, ["fifo"], TaskBackend(1, 1))
    assert (results / "small" / "fifo-0.2.work").is_dir()
    assert contents(results / "small" / "fifo-0") == kept


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
    (broken,) = [each for each in (results / "small").glob("*-*_*") if is_unended(each)]
    assert not is_unended(results / "small" / "latest")
    done = (broken / "fifo-0" / "summary.json").stat().st_mtime_ns
    folders = executed(trace, results, ["fifo", "las"], TaskBackend(1, 1))
    assert folders == [broken / "fifo-0", broken / "las-0"]
    assert (broken / "fifo-0" / "summary.json").stat().st_mtime_ns == done
    assert (results / "small" / "latest").resolve() == broken


def test_policy_that_was_done_before_is_compared_with_one_that_is_new(tmp_path: Path) -> None:
    """Its results are copied: a folder has all that its table shows, and the other command's stay as they were."""
    trace, results = trace_of(tmp_path, 1, 3), tmp_path / "r"
    (first,) = executed(trace, results, ["fifo"], TaskBackend(1, 1))
    kept = contents(first.parent)
    both = executed(trace, results, ["fifo", "las"], TaskBackend(1, 1))
    assert [each.name for each in both] == ["fifo-0", "las-0"]
    assert len({each.parent for each in both}) == 1
    assert contents(both[0]) == contents(first)
    assert contents(first.parent) == kept


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
    assert Journal(results / "small" / "fifo-0.work" / "journal.sqlite").meta()["settings"]["restart_s"] == 5.0


def test_run_begun_before_a_key_was_there_goes_on(tmp_path: Path) -> None:
    trace, results = trace_of(tmp_path, 1, 3), tmp_path / "r"
    values = settings_values(trace, results, ["fifo"])
    settings = {"fifo": {**values, "policy": "fifo", "seed": 0}}
    with contextlib.ExitStack() as held:
        place, _ = claimed({"fifo": results / "small" / "fifo-0"}, settings, held)["fifo"]
        journal = Journal(place.work / "journal.sqlite")
        journal.submitted(JobRow(0, "a", {}, 0.0, 0, "waiting", "", 0, 0))
        older = {name: value for name, value in journal.meta()["settings"].items() if name != "retries"}
        journal.set_meta("settings", older)
        journal.close()
    with contextlib.ExitStack() as held:
        assert claimed({"fifo": results / "small" / "fifo-0"}, settings, held) == {"fifo": (place, False)}
    with contextlib.ExitStack() as held, pytest.raises(InputError, match=r"with other settings \(restart_s\)"):
        claimed({"fifo": results / "small" / "fifo-0"}, {"fifo": {**settings["fifo"], "restart_s": 9}}, held)


def test_folders_of_jobs_without_a_journal_are_not_begun_over(tmp_path: Path) -> None:
    trace, results = trace_of(tmp_path, 1, 3), tmp_path / "r"
    (first,) = executed(trace, results, ["fifo"], TaskBackend(1, 1))
    work = first.parent.with_name("fifo-0.work")
    for each in work.glob("journal.sqlite*"):
        each.unlink()
    with pytest.raises(InputError, match=rf"its journal is gone, .*python -m synergy_exec resume --salvage {work}"):
        executed(trace, results, ["fifo"], TaskBackend(1, 1))


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
            wait_until(lambda: asked("submit", str(tmp_path / "job.yaml")).returncode == 0, 120)
            second = subprocess.run(command, capture_output=True, text=True, timeout=60)
            assert second.returncode == 2
            assert f"a controller runs here already, process {first.pid} on" in second.stderr
            wait_until(lambda: all_done(asked("list", "--json").stdout), 120, (tmp_path / "said.txt").read_text)
        finally:
            first.send_signal(signal.SIGINT)
            first.wait(60)
        assert first.returncode == 0, (tmp_path / "said.txt").read_text()

    served()
    served()
    assert len(list((tmp_path / "served").glob("fifo-0.work/jobs/0/checkpoints/step-*"))) == 1
    assert len(list((tmp_path / "served").glob("fifo-0.2.work/jobs/0/checkpoints/step-*"))) == 1
    assert len(list((tmp_path / "served").glob("*-*_*/fifo-0/summary.json"))) == 2
