"""What has been trained stays: a run that has ended, one that lives, one that goes on; and one process in a folder."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from exec.pretended import refuses
from exec.served import TaskBackend, executed, job, settings_values, trace_of

from synergy_core.errors import InputError
from synergy_exec.commands._asking import Client
from synergy_exec.controller.journal import NAME, Journal
from synergy_exec.folders import find_job, lock, meta_of, works_below
from synergy_exec.run import execute_all
from synergy_exec.settings import Settings
from synergy_runs.inputs.keys import build
from synergy_runs.outputs.results import is_unended, resumed_run
from synergy_runs.outputs.results import main as results_main
from synergy_runs.outputs.stored import read_run

HOLDER = """
import sys, time
from pathlib import Path
from synergy_exec.folders import lock
with lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def typed(tmp_path):
    """Executes a trace of two jobs under these policies; the folders of results, which are below `r`."""
    trace = trace_of(tmp_path, 2, 4)
    return lambda *policies, backend=None, **more: executed(trace, tmp_path / "r", [*policies], backend, **more)


def contents(folder):
    return {str(each.relative_to(folder)): each.read_bytes() for each in folder.rglob("*") if each.is_file()}


def test_finished_run_typed_again_gets_its_own_folder(typed, tmp_path, capsys):
    (first,) = typed("fifo")
    kept = contents(first.parent)
    small = first.parents[1]
    assert small == tmp_path / "r" / "small"
    (second,) = typed("fifo")
    (third,) = typed("fifo", restart_s=9.0)  # with other settings too
    runs = [each.parent for each in (first, second, third)]
    assert json.loads((second / "summary.json").read_text())["jobs"] == 2
    assert read_run(second).jobs("restarts")["restarts"].tolist() == [0, 0]
    assert {each.name for each in small.iterdir()} == {*(each.name for each in runs), "latest"}
    assert len(set(runs)) == 3
    assert contents(first.parent) == kept
    assert (small / "latest").resolve() == third.parent
    works = [each / "fifo-0.work" for each in runs]
    assert [meta_of(work)["settings"]["restart_s"] for work in works] == [5.0, 5.0, 9.0]
    assert works_below(tmp_path / "r") == works_below(small) == sorted(works)
    assert works_below(small / "latest") == works[2:]
    assert results_main([str(small)]) == 0
    assert "left out: 1 of 3" in capsys.readouterr().err


class BrokenOffError(Exception):
    pass


def broken_off(typed, *policies, backends=(), **more):
    """The folder of a command that is broken off when it has used up these backends."""
    there = iter(backends)

    def make_backend():
        for each in there:
            return each
        raise BrokenOffError

    with pytest.raises(BrokenOffError):
        typed(*policies, backend=make_backend, **more)


def unended(results):
    return [each for each in (results / "small").glob("*-*_*") if is_unended(each)]


def test_live_run_is_refused_with_who_holds_it(typed, tmp_path):
    broken_off(typed, "fifo")
    (broken,) = unended(tmp_path / "r")
    work = broken / "fifo-0.work"
    with holding(work) as holder:
        says = f"a controller runs here already, process {holder.pid} on {socket.gethostname()}. Stop it, or name"
        refuses(says, typed, "fifo")
        with pytest.raises(InputError, match=says), lock(work):
            raise AssertionError
        (other,) = typed("fifo", restart_s=9.0)  # another run, beside it
        assert other.parent != broken
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
    assert typed("fifo") == [broken / "fifo-0"]  # the lock died with its holder
    assert meta_of(work)["settings"]["restart_s"] == 5.0


@contextlib.contextmanager
def holding(work):
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(work)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline() == b"held\n"
        yield holder
    finally:
        holder.kill()
        holder.wait()


def test_later_policies_of_a_command_are_held_from_its_beginning(typed, tmp_path):
    async def held(*_):
        (work,) = tmp_path.glob("r/small/*-*_*/synergy-0.work")
        with pytest.raises(InputError, match=f"process {os.getpid()}"), lock(work):
            raise AssertionError

    assert len(typed("fifo", "synergy", backend=lambda: TaskBackend(1, 1, starting=held))) == 2


def test_repetition_that_is_broken_off_goes_on_where_it_was(typed, tmp_path):
    """The second round of two policies, broken off at the second: no third round begins, and no run is made twice."""
    typed("fifo", "las")
    broken_off(typed, "fifo", "las", backends=[TaskBackend(1, 1)])
    (broken,) = unended(tmp_path / "r")
    latest = tmp_path / "r" / "small" / "latest"
    assert not is_unended(latest)
    done = (broken / "fifo-0" / "summary.json").stat().st_mtime_ns
    assert typed("fifo", "las") == [broken / "fifo-0", broken / "las-0"]
    assert (broken / "fifo-0" / "summary.json").stat().st_mtime_ns == done
    assert latest.resolve() == broken


def test_a_run_that_has_ended_needs_its_journal_no_more(typed, capsys):
    """Whether it is damaged or gone; a run that has one to resume again is unended until it has."""
    (first,) = typed("fifo")
    with resumed_run(first.parent):  # as after a retry
        assert is_unended(first.parent)
    assert not is_unended(first.parent)
    (first.parent / "fifo-0.work" / "journal.sqlite").write_bytes(b"no journal")
    for _ in range(2):
        kept = contents(first.parent)
        (second,) = typed("fifo")
        assert second.parent != first.parent
        assert contents(first.parent) == kept
        for each in first.parent.glob("fifo-0.work/journal.*"):
            each.unlink()
    (third,) = typed("fifo")
    assert third.parent != first.parent
    assert f"{first}.work: no journal.sqlite in it" in capsys.readouterr().err


def served_until_interrupted(results, policy, *requests, **more):
    """Sends requests to a service, interrupts it as Ctrl-C does, and returns its answers."""
    answers, tasks = [], []

    async def ask(client):
        with contextlib.suppress(InputError):  # it waits for its agents
            while len(answers) < len(requests):
                answers.append(await asyncio.to_thread(client.ask, *requests[len(answers)]))
            os.kill(os.getpid(), signal.SIGINT)
            return
        await asyncio.sleep(0.1)
        await ask(client)

    async def starting(_, meeting):
        tasks.append(asyncio.ensure_future(ask(Client(meeting.url, meeting.token))))

    values = settings_values(None, results, [policy], serve=True, **more)
    with pytest.raises(KeyboardInterrupt):
        execute_all(build(Settings, values), values, results / "served", lambda: TaskBackend(1, starting=starting))
    return answers


def test_a_service_with_another_policy_takes_over_the_queue_or_says_where_it_is(tmp_path):
    began_s = time.time()
    served_until_interrupted(tmp_path, "synergy", ("POST", "/jobs", job(name="stays")))
    between_s = time.time()
    state, jobs = served_until_interrupted(tmp_path, "sia", ("GET", "/state"), ("GET", "/jobs"), round_s=0.4)
    assert (state["policy"], [(each["job"], each["name"]) for each in jobs]) == ("sia", [(0, "stays")])
    assert began_s < jobs[0]["submitted_unix_s"] < between_s  # the run's own clock stood still in between
    (work,) = works_below(tmp_path)
    assert work.name == "sia-0.work"
    with lock(work):
        refuses("a controller runs here already", served_until_interrupted, tmp_path, "fifo", ("GET", "/jobs"))
    refuses(f"{work}.*resume {work}", served_until_interrupted, tmp_path, "fifo", ("GET", "/jobs"), seed=7)
    assert works_below(tmp_path) == [work]


@pytest.mark.parametrize(("old", "new"), [(True, "auto"), (False, "fp32")])
def test_settings_that_an_older_version_journaled_still_build(tmp_path, old, new):
    journal = Journal(tmp_path / NAME)
    journal.set_meta("settings", {"bfloat16": old})
    journal.close()
    assert build(Settings, meta_of(tmp_path)["settings"]).run.precision == new


def test_a_jobs_log_is_found_whatever_else_its_description_and_others_say(tmp_path):
    """`logs` read and checked every key of every job: half a second more for each 2,000 jobs."""
    for number, name in enumerate(("one", "two")):
        folder = tmp_path / "las-0.work" / "jobs" / str(number)
        folder.mkdir(parents=True)
        (folder / "job.json").write_text(json.dumps({"submitted_as": name, "of": "a later version"}))
    (tmp_path / "las-0.work" / "jobs" / "2").mkdir()
    assert find_job(tmp_path, "two").number == 1
    assert find_job(tmp_path, "2").name == "2"
