"""A run's folder has one owner, whichever machines share it and whether or not their locks reach each other."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from synergy_core.errors import InputError
from synergy_exec.controller import owner
from synergy_exec.controller.journal import Journal
from synergy_exec.controller.owner import FENCED_OUT, claim, newest
from synergy_exec.folders import lock

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
def on(host: str) -> Iterator[None]:
    """As if this process ran on another machine, to which locks do not reach."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(owner, "machine", lambda: host)
        patched.setattr(socket, "gethostname", lambda: host)
        patched.setattr(fcntl, "flock", lambda *_: None)
        yield


def nothing(_: float) -> None:
    """Instead of waiting."""


def numbers(work: Path) -> list[str]:
    return sorted(each.name for each in work.iterdir() if each.name.startswith("owner-"))


def who(work: Path) -> object:
    journal = Journal(work / "journal.sqlite")
    found = journal.meta()["who"]
    journal.close()
    return found


def test_owner_on_another_machine_is_left_alone_while_its_beat_changes(tmp_path: Path) -> None:
    with on("one"):
        first = claim(tmp_path)
    says = (
        f"a controller runs here already, process {os.getpid()} on one. Stop it, or name another place with "
        "results_dir=DIR. If it has died since, type the same again: it counts as dead after 20 s without a sign."
    )
    with on("two"), pytest.raises(InputError, match=says):
        claim(tmp_path, wait=lambda _: first.beat())
    assert numbers(tmp_path) == ["owner-00000001"]


def test_owner_that_gives_no_sign_is_replaced_and_fenced_out_when_it_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "WATCH_S", 0.01)
    said: list[str] = []
    with on("one"):
        first = claim(tmp_path, fenced=said.append)
    with on("two"):
        second = claim(tmp_path, wait=nothing)
    before = (tmp_path / "owner-00000002").read_text()
    first.beat()
    first.leave()
    assert said == [
        f"{tmp_path} does not belong to process {os.getpid()} on one any more: process {os.getpid()} on two has taken "
        "it over. It stops at once and writes nothing; its workers save and leave."
    ]
    assert numbers(tmp_path) == ["owner-00000002"]
    assert (tmp_path / "owner-00000002").read_text() == before
    second.beat()
    assert newest(tmp_path)[1].beat == 1


def test_of_two_that_find_a_dead_owner_at_once_one_gets_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with on("one"):
        claim(tmp_path)
    winner = []

    def meanwhile(*_: object) -> bool:
        monkeypatch.setattr(owner, "_lives", lambda *_: False)
        with on("three"):
            winner.append(claim(tmp_path))
        return False

    monkeypatch.setattr(owner, "_lives", meanwhile)
    with on("two"), pytest.raises(InputError, match=r"runs here already, process .* on three"):
        claim(tmp_path)
    assert numbers(tmp_path) == ["owner-00000002"]
    winner[0].beat()
    assert newest(tmp_path)[1].host == "three"


def test_who_has_left_is_not_waited_for_and_no_number_comes_twice(tmp_path: Path) -> None:
    def waits(_: float) -> None:
        raise AssertionError

    for number in (1, 2, 3):
        with on(f"host-{number}"):
            first = claim(tmp_path, wait=waits)
        assert newest(tmp_path)[0] == number
        first.leave()


def test_a_process_of_this_machine_is_there_or_not_without_waiting(tmp_path: Path) -> None:
    def waits(_: float) -> None:
        raise AssertionError

    child = subprocess.Popen(["sleep", "600"])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "getpid", lambda: child.pid)
        claim(tmp_path)
    with pytest.raises(InputError, match=f"process {child.pid} on {socket.gethostname()}. Stop it, or name another"):
        claim(tmp_path, wait=waits)
    child.kill()
    child.wait()
    claim(tmp_path, wait=waits)
    assert newest(tmp_path)[0] == 2


def test_folder_of_another_process_in_the_same_one_is_refused_without_locks(tmp_path: Path) -> None:
    says = "a controller runs here already"
    with on("one"), lock(tmp_path), pytest.raises(InputError, match=says), lock(tmp_path):
        raise AssertionError
    with on("one"), lock(tmp_path):
        pass


def test_an_owner_file_that_is_being_written_counts_as_somebody(tmp_path: Path) -> None:
    (tmp_path / "owner-00000004").touch()

    def appears(_: float) -> None:
        (tmp_path / "owner-00000004").write_text('{"half')
        (tmp_path / "owner-00000005").touch()

    with pytest.raises(InputError, match="a controller runs here already, one that has just begun"):
        claim(tmp_path, wait=appears)


def test_two_controllers_on_two_machines_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is refused while the first lives. That was frozen for long, and writes nothing when it wakes up."""
    work = tmp_path / "fifo-0.work"
    first = subprocess.Popen(
        [sys.executable, "-c", HOST, str(work)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert first.stdin is not None
    assert first.stdout is not None
    assert first.stderr is not None
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
    assert who(work) == "two"
