"""What has been trained stays: a run that has ended, one that lives, one that goes on; one owner; what is removed."""

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from exec.pretended import FakeAgent, file_of, refuses
from exec.saved import BYTES, checkpoint_of, cut
from exec.served import TaskBackend, ask, executed, job, served, settings_values, trace_of, until

from synergy_core.errors import InputError
from synergy_exec import job_folder
from synergy_exec.commands import prune
from synergy_exec.controller import controller, owner
from synergy_exec.controller.journal import JobRow, Journal
from synergy_exec.controller.owner import FENCED_OUT, claim
from synergy_exec.folders import RESULTS, claimed, lock, newest
from synergy_exec.folders import works as works_below
from synergy_exec.job_folder import DAY_S, removals, remove
from synergy_exec.messages import Launch
from synergy_exec.recorded import open_journal
from synergy_exec.rereading import CHANGED
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


def test_run_that_ended_before_there_were_folders_of_runs_counts_as_ended_and_stays(tmp_path):
    trace, results = trace_of(tmp_path, 1, 3), tmp_path / "r"
    (first,) = executed(trace, results, ["fifo"])
    first.rename(results / "small" / "fifo-0")
    journal = open_journal(results / "small" / "fifo-0.work")
    journal.set_meta(RESULTS, None)
    journal.close()
    kept = contents(results / "small" / "fifo-0")
    executed(trace, results, ["fifo"])
    assert (results / "small" / "fifo-0.2.work").is_dir()
    assert contents(results / "small" / "fifo-0") == kept


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


def test_run_begun_before_a_key_was_there_goes_on(tmp_path):
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


def test_folders_of_jobs_without_a_journal_are_not_begun_over(tmp_path):
    trace, results = trace_of(tmp_path, 1, 3), tmp_path / "r"
    (first,) = executed(trace, results, ["fifo"])
    work = first.parent.with_name("fifo-0.work")
    for each in work.glob("journal.sqlite*"):
        each.unlink()
    with pytest.raises(InputError, match=rf"its journal is gone, .*python -m synergy_exec resume --salvage {work}"):
        executed(trace, results, ["fifo"])


# A run's folder has one owner, whichever machines share it and whether or not their locks reach each other

HOST = """
import fcntl, itertools, socket, sys
from pathlib import Path
from synergy_exec.controller import owner
from synergy_exec.controller.journal import Journal
from synergy_exec.folders import lock

fcntl.flock = lambda *_: None
socket.gethostname = owner.machine = lambda: "one"
owner.BEAT_S, owner.TRUSTED_S = 0.05, 0.0
work = Path(sys.argv[1])
with lock(work):
    journal = Journal(work / "journal.sqlite")
    for line in itertools.chain(["one"], sys.stdin):
        journal.set_meta("who", line.strip())
        journal.commit()
        print(line.strip(), flush=True)
"""


@contextlib.contextmanager
def on(host):
    """As if this process ran on another machine, to which locks do not reach."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(owner, "machine", lambda: host)
        patched.setattr(socket, "gethostname", lambda: host)
        patched.setattr(fcntl, "flock", lambda *_: None)
        yield


def nothing(_):
    """Instead of waiting."""


def numbers(work):
    return [each for each in names(work) if each.startswith("owner-")]


def test_owner_that_gives_no_sign_is_replaced_and_fenced_out_when_it_comes_back(tmp_path, monkeypatch):
    monkeypatch.setattr(owner, "WATCH_S", 0.01)
    said = []
    with on("one"):
        first = claim(tmp_path, fenced=said.append)
    with on("two"):
        second = claim(tmp_path, wait=nothing)
    before = (tmp_path / "owner-00000002").read_text()
    first.beat()
    first.leave()
    (told,) = said
    assert f"{tmp_path} does not belong to process {os.getpid()} on one any more: process {os.getpid()} on two" in told
    assert numbers(tmp_path) == ["owner-00000002"]
    assert (tmp_path / "owner-00000002").read_text() == before
    second.beat()
    assert owner.newest(tmp_path)[1].beat == 1


def test_of_two_that_find_a_dead_owner_at_once_one_gets_the_folder(tmp_path, monkeypatch):
    with on("one"):
        claim(tmp_path)
    winner = []

    def meanwhile(*_):
        monkeypatch.setattr(owner, "_lives", lambda *_: False)
        with on("three"):
            winner.append(claim(tmp_path))
        return False

    monkeypatch.setattr(owner, "_lives", meanwhile)
    with on("two"), pytest.raises(InputError, match=r"runs here already, process .* on three"):
        claim(tmp_path)
    assert numbers(tmp_path) == ["owner-00000002"]
    winner[0].beat()
    assert owner.newest(tmp_path)[1].host == "three"


def test_who_has_left_is_not_waited_for_and_no_number_comes_twice(tmp_path):
    def waits(_):
        raise AssertionError

    for number in (1, 2, 3):
        with on(f"host-{number}"):
            first = claim(tmp_path, wait=waits)
        assert owner.newest(tmp_path)[0] == number
        first.leave()


def test_a_process_of_this_machine_is_there_or_not_without_waiting(tmp_path):
    def waits(_):
        raise AssertionError

    child = subprocess.Popen(["sleep", "600"])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "getpid", lambda: child.pid)
        claim(tmp_path)
    refuses(f"process {child.pid} on {socket.gethostname()}. Stop it, or name another", claim, tmp_path, wait=waits)
    child.kill()
    child.wait()
    claim(tmp_path, wait=waits)
    assert owner.newest(tmp_path)[0] == 2


def test_folder_of_another_process_in_the_same_one_is_refused_without_locks(tmp_path):
    says = "a controller runs here already"
    with on("one"), lock(tmp_path), pytest.raises(InputError, match=says), lock(tmp_path):
        raise AssertionError
    with on("one"), lock(tmp_path):
        pass


def test_an_owner_file_that_is_being_written_counts_as_somebody(tmp_path):
    (tmp_path / "owner-00000004").touch()

    def appears(_):
        (tmp_path / "owner-00000004").write_text('{"half')
        (tmp_path / "owner-00000005").touch()

    refuses("a controller runs here already, one that has just begun", claim, tmp_path, wait=appears)


def test_two_controllers_on_two_machines_without_locks(tmp_path, monkeypatch):
    """The second is refused while the first lives. That was frozen for long, and writes nothing when it wakes up."""
    work = tmp_path / "fifo-0.work"
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    first = subprocess.Popen([sys.executable, "-c", HOST, str(work)], **pipes, text=True)
    try:
        assert first.stdout.readline() == "one\n"
        with on("two"):
            with pytest.raises(InputError, match=f"process {first.pid} on one"), lock(work):
                raise AssertionError
            os.kill(first.pid, signal.SIGSTOP)
            monkeypatch.setattr(owner, "WATCH_S", 0.5)
            with lock(work):
                journal = Journal(work / "journal.sqlite")
                journal.set_meta("who", "two")
                journal.commit()
                first.stdin.write("one again\n")
                first.stdin.flush()
                os.kill(first.pid, signal.SIGCONT)
                assert first.wait(120) == FENCED_OUT
                journal.close()
    finally:
        first.kill()
        first.wait()
    assert first.stdout.read() == ""
    assert (
        f"does not belong to process {first.pid} on one any more: process {os.getpid()} on two" in first.stderr.read()
    )
    assert Journal(work / "journal.sqlite").meta()["who"] == "two"


STATES = ("done", "failed", "cancelled", "waiting")


def run_of(work, **settings):
    """A work folder with a job in each state, that has two checkpoints, given-up ones, a log and data."""
    journal = Journal(work / "journal.sqlite")
    journal.set_meta("settings", settings)
    for number, state in enumerate(STATES):
        journal.submitted(JobRow(number, state, file_of().values(), 0.0, None, state, "", 0, 0, f"u{number}"))
        folder = work / "jobs" / str(number)
        job_folder.describe(folder, job_folder.Filed(number, f"u{number}", state, 0.0, None, file_of()))
        for step in (10, 20):
            checkpoint_of(folder, step, f"u{number}")
        checkpoint_of(folder / "given-up-1", 5)
        for name in ("log-0.txt", "steps.csv", "data/rows"):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text("x" * 100)
    journal.close()
    return work


def there(folder):
    return sorted(str(each.relative_to(folder)) for each in folder.rglob("*") if each.name != "progress.json")


def age(folder, days):
    long_ago = time.time() - days * DAY_S
    for each in folder.rglob("*"):
        os.utime(each, (long_ago, long_ago))


def test_everything_is_kept_where_nothing_else_is_said(tmp_path):
    age(run_of(tmp_path), 1_000.0)
    assert removals(tmp_path, range(4), "everything", 0.0) == []


def test_last_checkpoint_of_jobs_that_ended_is_kept_and_no_other(tmp_path):
    run_of(tmp_path)
    what = removals(tmp_path, [0, 1], "last_checkpoint", 0.0)
    folders = [tmp_path / "jobs" / str(number) for number in (0, 1)]
    assert [each.path for each in what] == [
        path for folder in folders for path in (folder / "checkpoints" / "step-00000010", folder / "given-up-1")
    ]
    assert all(each.size_bytes > BYTES for each in what)
    before = there(tmp_path / "jobs" / "3")
    remove(what)
    for folder in folders:
        assert [each.name for each in (folder / "checkpoints").iterdir()] == ["step-00000020"]
        assert not (folder / "given-up-1").exists()
    assert there(tmp_path / "jobs" / "3") == before
    assert removals(tmp_path, [0, 1], "last_checkpoint", 0.0) == []


def test_a_damaged_last_checkpoint_is_not_the_one_that_stays(tmp_path):
    run_of(tmp_path)
    checkpoints = tmp_path / "jobs" / "0" / "checkpoints"
    cut(checkpoints / "step-00000020" / "rank-0.safetensors")
    remove(removals(tmp_path, [0], "last_checkpoint", 0.0))
    assert [each.name for each in checkpoints.iterdir()] == ["step-00000010"]
    cut(checkpoints / "step-00000010" / "rank-0.safetensors")
    assert removals(tmp_path, [0], "last_checkpoint", 0.0) == []  # neither is whole: a person may mend one


def test_weights_and_logs_go_after_so_many_days_and_what_was_trained_stays_known(tmp_path):
    run_of(tmp_path)
    assert removals(tmp_path, [0], "remove", 3.0) == []
    age(tmp_path / "jobs" / "0", 3.1)
    what = removals(tmp_path, [0, 1], "remove", 3.0)
    assert {each.path.parent.name for each in what} == {"0"}
    remove(what)
    assert there(tmp_path / "jobs" / "0") == ["job.json", "steps.csv"]


def test_prune_names_what_goes_and_removes_it_with_yes_alone(tmp_path, capsys):
    work = run_of(tmp_path / "demo" / "fifo-0.work", retention="last_checkpoint")
    kept = run_of(tmp_path / "demo" / "las-0.work")
    before = there(tmp_path)
    prune.main([str(tmp_path)])
    said = capsys.readouterr().out.splitlines()
    named = [line for line in said if line.startswith("to remove: ")]
    assert len(named) == 6
    assert f"to remove: {work}/jobs/0/checkpoints/step-00000010 (" in named[0]
    sizes = [int(line.rpartition("(")[2].split(" ")[0].replace(",", "")) for line in named]
    assert said[-2:] == [f"together {sum(sizes):,} bytes", "nothing is removed yet; type the same with --yes"]
    assert [each for each in there(tmp_path) if "owner-" not in each and each[-4:] != "lock"] == before
    prune.main([str(tmp_path), "--yes"])
    assert [line.replace("removing", "to remove") for line in capsys.readouterr().out.splitlines()[:6]] == named
    for number in range(3):
        assert [each.name for each in (work / "jobs" / str(number) / "checkpoints").iterdir()] == ["step-00000020"]
    assert (work / "jobs" / "3" / "checkpoints" / "step-00000010").exists()
    assert (kept / "jobs" / "0" / "checkpoints" / "step-00000010").exists()
    prune.main([str(kept), "--last-checkpoint", "--yes"])
    assert not (kept / "jobs" / "0" / "checkpoints" / "step-00000010").exists()


def test_prune_leaves_alone_a_run_that_somebody_works_on(tmp_path, capsys):
    work = run_of(tmp_path / "fifo-0.work")
    with lock(work):
        prune.main([str(tmp_path), "--last-checkpoint", "--yes"])
    told = capsys.readouterr()
    assert f"{work} is left alone: {work}: a controller runs here already" in told.err
    assert "there is nothing to remove" in told.out
    assert (work / "jobs" / "0" / "checkpoints" / "step-00000010").exists()
    refuses("--days -1: expected days", prune.main, [str(tmp_path), "--days", "-1"])
    refuses("no run is in it", prune.main, [str(tmp_path / "nowhere")])


def test_retention_that_changed_is_what_prune_goes_by(tmp_path, capsys):
    work = run_of(tmp_path / "demo" / "fifo-0.work", retention="last_checkpoint")
    for changed, says in (({"retention": "everything"}, "there is nothing to remove"), ({}, "to remove: ")):
        journal = Journal(work / "journal.sqlite")
        journal.set_meta(CHANGED, changed)
        journal.close()
        prune.main([str(tmp_path)])
        assert says in capsys.readouterr().out


@pytest.fixture
def saving(monkeypatch):
    """Pretended agents leave two checkpoints of each run that they are told to launch."""
    hear = FakeAgent.hear

    def hears(agent, message, now_s):
        if isinstance(message, Launch):
            for step in (1, 2):
                checkpoint_of(Path(message.folder), step, message.job_uuid)
        return hear(agent, message, now_s)

    monkeypatch.setattr(FakeAgent, "hear", hears)


@pytest.mark.usefixtures("saving")
def test_run_says_what_it_removes_when_it_ends(tmp_path, capsys):
    (first,) = executed(trace_of(tmp_path, 1, 3), tmp_path / "r", ["fifo"], retention="last_checkpoint")
    checkpoints = first.parent.with_name("fifo-0.work") / "jobs" / "0" / "checkpoints"
    assert f"retention=last_checkpoint removes {checkpoints}/step-00000001 (" in capsys.readouterr().err
    assert [each.name for each in checkpoints.iterdir()] == ["step-00000002"]


@pytest.mark.usefixtures("saving")
def test_controller_removes_while_it_serves(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(controller, "TIDY_S", 0.05)

    async def work(controller, client):
        await ask(client, "POST", "/jobs", job(name="mine"))
        await until(lambda: controller.execution.jobs[0].state == "running")
        assert len(list(tmp_path.glob("jobs/0/checkpoints/step-*"))) == 2
        await ask(client, "DELETE", "/jobs/mine")
        await until(lambda: len(list(tmp_path.glob("jobs/0/checkpoints/step-*"))) == 1)

    served(tmp_path, work, 1, retention="last_checkpoint")
    assert "retention=last_checkpoint removes" in capsys.readouterr().err
