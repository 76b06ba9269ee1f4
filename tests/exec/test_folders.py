"""What has been trained stays: a run that has ended, one that lives, one that goes on; and one process in a folder."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys

import pytest
from exec.pretended import refuses
from exec.served import TaskBackend, executed, settings_values, trace_of

from synergy_core.errors import InputError
from synergy_exec.controller.journal import JobRow, Journal, open_journal
from synergy_exec.folders import claimed, lock, newest
from synergy_exec.folders import works as works_below
from synergy_runs.results import is_unended
from synergy_runs.results import main as results_main

HOLDER = """
import sys, time
from pathlib import Path
from synergy_exec.folders import lock
with lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def weights(work):
    """As a job leaves them; the pretended agents of these tests write none."""
    path = work / "jobs" / "0" / "checkpoints" / "step-00000120" / "progress.json"
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    return path


def names(folder):
    return sorted(each.name for each in folder.iterdir())


def contents(folder):
    return {str(each.relative_to(folder)): each.read_bytes() for each in folder.rglob("*") if each.is_file()}


def test_finished_run_typed_again_gets_its_own_folder(tmp_path, capsys):
    trace, results = trace_of(tmp_path, 2, 4), tmp_path / "r"
    small = results / "small"
    (first,) = executed(trace, results, ["fifo"])
    weights(small / "fifo-0.work")
    kept = {folder: contents(folder) for folder in (first.parent, small / "fifo-0.work" / "jobs")}
    capsys.readouterr()
    (second,) = executed(trace, results, ["fifo"])
    assert second.name == "fifo-0"
    assert second.parent != first.parent
    assert json.loads((second / "summary.json").read_text())["jobs"] == 2
    told = capsys.readouterr().err
    assert f"{small / 'fifo-0.work'} has ended and is kept" in told
    assert f"this run goes to {small / 'fifo-0.2.work'}" in told
    (third,) = executed(trace, results, ["fifo"], restart_s=9.0)  # with other settings too
    works = [f"fifo-0{each}.work" for each in ("", ".2", ".3")]
    assert set(names(small)) == {*works, *(each.parent.name for each in (first, second, third)), "latest"}
    assert {folder: contents(folder) for folder in kept} == kept
    assert (small / "latest").resolve() == third.parent
    assert (small / "latest" / "fifo-0.work").resolve() == newest(small / "fifo-0") == small / "fifo-0.3.work"
    assert open_journal(small / "latest" / "fifo-0.work").meta()["settings"]["restart_s"] == 9.0
    assert works_below(results) == works_below(small) == sorted(small / each for each in works)
    assert works_below(small / "latest") == [small / "latest" / "fifo-0.work"]
    assert results_main([str(small)]) == 0
    assert "left out: 1 of 3" in capsys.readouterr().err


def test_live_run_is_refused_with_who_holds_it(tmp_path):
    trace, results = trace_of(tmp_path, 1, 3), tmp_path / "r"
    work = results / "small" / "fifo-0.work"
    with holding(work) as holder:
        kept = weights(work)
        says = f"a controller runs here already, process {holder.pid} on {socket.gethostname()}. Stop it, or name"
        for more in ({}, {"restart_s": 9.0}):
            refuses(says, executed, trace, results, ["fifo"], **more)
        assert kept.is_file()
        with pytest.raises(InputError, match=says), lock(work):
            raise AssertionError
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
    (first,) = executed(trace, results, ["fifo"])  # the lock died with its holder
    assert first.name == "fifo-0"


@contextlib.contextmanager
def holding(work):
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(work)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline() == b"held\n"
        yield holder
    finally:
        holder.kill()
        holder.wait()


def test_later_policies_of_a_command_are_held_from_its_beginning(tmp_path):
    trace, results = trace_of(tmp_path, 1, 3), tmp_path / "r"

    class Asking(TaskBackend):
        async def start(self, node, meeting):
            with pytest.raises(InputError, match=f"process {os.getpid()}"), lock(results / "small" / "synergy-0.work"):
                raise AssertionError
            await super().start(node, meeting)

    assert len(executed(trace, results, ["fifo", "synergy"], lambda: Asking(1, 1))) == 2


class BrokenOffError(Exception):
    pass


def test_repetition_that_is_broken_off_goes_on_where_it_was(tmp_path):
    """The second round of two policies, broken off at the second: no third round begins, and no run is made twice."""
    trace, results = trace_of(tmp_path, 1, 3), tmp_path / "r"
    executed(trace, results, ["fifo", "las"])
    backends = iter([TaskBackend(1, 1)])

    def make_backend():
        for each in backends:
            return each
        raise BrokenOffError

    with pytest.raises(BrokenOffError):
        executed(trace, results, ["fifo", "las"], make_backend)
    (broken,) = [each for each in (results / "small").glob("*-*_*") if is_unended(each)]
    assert not is_unended(results / "small" / "latest")
    done = (broken / "fifo-0" / "summary.json").stat().st_mtime_ns
    folders = executed(trace, results, ["fifo", "las"])
    assert folders == [broken / "fifo-0", broken / "las-0"]
    assert (broken / "fifo-0" / "summary.json").stat().st_mtime_ns == done
    assert (results / "small" / "latest").resolve() == broken


def test_policy_that_was_done_before_is_compared_with_one_that_is_new(tmp_path):
    """Its results are copied: a folder has all that its table shows, and the other command's stay as they were."""
    trace, results = trace_of(tmp_path, 1, 3), tmp_path / "r"
    (first,) = executed(trace, results, ["fifo"])
    kept = contents(first.parent)
    both = executed(trace, results, ["fifo", "las"])
    assert [each.name for each in both] == ["fifo-0", "las-0"]
    assert len({each.parent for each in both}) == 1
    assert contents(both[0]) == contents(first)
    assert contents(first.parent) == kept


def test_place_where_nothing_was_submitted_is_free_for_other_settings(tmp_path):
    """As after a mistake that was noticed before the first job came."""
    trace, results = trace_of(tmp_path, 1, 3), tmp_path / "r"

    def none():
        raise BrokenOffError

    with pytest.raises(BrokenOffError):
        executed(trace, results, ["fifo"], none, restart_s=9.0)
    (first,) = executed(trace, results, ["fifo"])
    assert first.name == "fifo-0"
    assert Journal(results / "small" / "fifo-0.work" / "journal.sqlite").meta()["settings"]["restart_s"] == 5.0


def test_run_under_way_with_other_settings_is_refused(tmp_path):
    trace, results = trace_of(tmp_path, 1, 3), tmp_path / "r"
    values = settings_values(trace, results, ["fifo"])
    settings = {"fifo": {**values, "policy": "fifo", "seed": 0}}
    with contextlib.ExitStack() as held:
        place, _ = claimed({"fifo": results / "small" / "fifo-0"}, settings, held)["fifo"]
        journal = Journal(place.work / "journal.sqlite")
        journal.submitted(JobRow(0, "a", {}, 0.0, 0, "waiting", "", 0, 0, "u"))
        journal.close()
    with contextlib.ExitStack() as held:
        assert claimed({"fifo": results / "small" / "fifo-0"}, settings, held) == {"fifo": (place, False)}
    with contextlib.ExitStack() as held, pytest.raises(InputError, match=r"with other settings \(restart_s\)"):
        claimed({"fifo": results / "small" / "fifo-0"}, {"fifo": {**settings["fifo"], "restart_s": 9}}, held)


def test_folders_of_jobs_whose_journal_and_copy_are_gone_are_not_begun_over(tmp_path):
    trace, results = trace_of(tmp_path, 1, 3), tmp_path / "r"
    (first,) = executed(trace, results, ["fifo"])
    work = first.parent.with_name("fifo-0.work")
    for each in work.glob("journal.*"):
        each.unlink()
    with pytest.raises(InputError, match="folders of jobs are in it, and no journal"):
        executed(trace, results, ["fifo"])
