"""Jobs whose processes do not leave when they should: a slot is free when nothing of its job lives, and not before."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from agents_controller import Controller, end, gone
from exec.waiting import wait_until
from family import children

from synergy_exec.controller import processes
from synergy_exec.messages import Ended, Launch


@pytest.fixture(scope="module", params=[True, False], ids=["cgroups", "none"])
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controller]:
    """With cgroups, where there can be any, and without."""
    with Controller(tmp_path_factory.mktemp("left")) as controller:
        controller.start_agent(slots=2, cgroups=request.param)
        yield controller


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Controller]:
    with Controller(tmp_path) as controller:
        controller.start_agent(slots=2, cgroups=False)
        yield controller


def launched(controller: Controller, note: Path, way: str, then: str = "") -> Launch:
    note.mkdir()
    # On a busy machine 64 forks take their time.
    return controller.launch("Straying", {"way": way, "note": str(note), "then": then}, hang_s=60.0)


def left(controller: Controller, note: Path) -> list[int]:
    """Processes of jobs that are there: forks of the agent's zygote, known by its command line, and those noted."""
    assert controller.agent is not None
    zygotes = children(controller.agent.pid)
    noted = {int(each.name) for each in note.iterdir() if each.name.isdigit()}
    return [pid for pid in everybody() if pid in noted or (pid not in zygotes and is_fork(pid, controller.agent.pid))]


def everybody() -> list[int]:
    return [int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit()]


def is_fork(pid: int, agent: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"synergy_exec.worker.zygote" in words and str(agent).encode() in words


@pytest.mark.parametrize("way", ["daemon", "program", "runner", "bomb"])
@pytest.mark.parametrize(("then", "outcome"), [("", "done"), ("raise", "failed")])
def test_nothing_of_a_job_is_left_when_its_run_has_ended(
    shared: Controller, tmp_path: Path, way: str, then: str, outcome: str
) -> None:
    launch = launched(shared, tmp_path / "note", way, then)
    ended = shared.ended(launch)
    assert left(shared, tmp_path / "note") == []
    assert ended.outcome == outcome, shared.told()


def test_job_that_kills_its_own_warden_leaves_nothing_and_is_lost(shared: Controller, tmp_path: Path) -> None:
    launch = launched(shared, tmp_path / "note", "bomb", "kill_parent")
    ended = shared.ended(launch)
    assert left(shared, tmp_path / "note") == []
    assert (ended.outcome, "SIGKILL" in ended.reason) == ("lost", True)


def test_job_that_stops_its_own_warden_is_ended_all_the_same(shared: Controller, tmp_path: Path) -> None:
    launch = launched(shared, tmp_path / "note", "daemon", "stop_parent")
    ended = shared.ended(launch)
    assert left(shared, tmp_path / "note") == []
    assert (ended.outcome, "the data is gone" in ended.reason) == ("failed", True)


def test_other_jobs_of_the_node_train_on_meanwhile(shared: Controller, tmp_path: Path) -> None:
    other = shared.launch("Plain", {"pause_s": 0.02}, slots=[1], work=1e6)
    shared.reached(other, 5)
    launch = launched(shared, tmp_path / "note", "bomb", "kill_parent")
    assert shared.ended(launch).outcome == "lost"
    assert shared.of(other, Ended) == []
    shared.reached(other, shared.reached(other, 5).step + 5)


@pytest.mark.parametrize("victim", ["zygote", "agent"])
def test_killed_zygote_or_agent_leaves_nothing(fresh: Controller, tmp_path: Path, victim: str) -> None:
    assert fresh.agent is not None
    launch = launched(fresh, tmp_path / "note", "bomb", "wait")
    fresh.started(launch)
    note = tmp_path / "note"
    until_s = time.monotonic() + 60
    while len(list(note.iterdir())) < 64:
        assert time.monotonic() < until_s
        time.sleep(0.01)
    (zygote,) = children(fresh.agent.pid)
    mine = [*left(fresh, note), zygote]
    assert len(mine) > 64
    end(zygote if victim == "zygote" else fresh.agent.pid)
    if victim == "zygote":
        assert fresh.ended(launch).outcome == "lost"
        assert left(fresh, note) == []
    assert gone(mine)


STARTING = "import asyncio\nfrom synergy_exec.agent.zygote import Zygote\nasyncio.run(Zygote.start())"


def test_a_parent_of_workers_stopped_as_it_begins_dies_with_its_agent() -> None:
    """As `bench/chaos.py 101 60` found it: it had not asked the kernel for that yet."""
    agent = subprocess.Popen([sys.executable, "-c", STARTING])
    wait_until(lambda: children(agent.pid), 60)
    (zygote,) = children(agent.pid)
    os.kill(zygote, signal.SIGSTOP)
    began = processes.began(zygote)
    try:
        agent.kill()
        agent.wait()
        wait_until(lambda: not processes.lives(zygote, began), 10)
    finally:
        if processes.lives(zygote, began):
            os.kill(zygote, signal.SIGKILL)
