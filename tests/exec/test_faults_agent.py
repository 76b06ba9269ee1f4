"""Workers killed or hung, agents killed, controllers gone: what is reported, how fast, and that nothing is left."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from agents_controller import Controller, end, gone, workers
from family import children

from synergy_exec.messages import Ended, Kill, Launch, Report, Shutdown

DETECTED_S = 10.0


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controller]:
    with Controller(tmp_path_factory.mktemp("faults")) as controller:
        controller.start_agent()
        yield controller


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Controller]:
    with Controller(tmp_path) as controller:
        controller.start_agent(slots=2)
        yield controller


def training(controller: Controller, *, world: int) -> tuple[Launch, list[int]]:
    assert controller.agent is not None
    launch = controller.launch("Plain", {"pause_s": 0.02}, world=world, work=1e6)
    controller.reached(launch, 5)
    pids = workers(controller.agent.pid)
    assert len(pids) == world
    return launch, pids


@pytest.mark.parametrize("world", [1, 2])
def test_killed_worker_loses_the_run_and_its_peers_are_gone(shared: Controller, world: int) -> None:
    launch, pids = training(shared, world=world)
    end(pids[-1])
    ended = shared.ended(launch, timeout_s=DETECTED_S)
    assert ended.outcome == "lost"
    assert ended.reason == f"rank {world - 1} was killed by SIGKILL (out of memory?)"
    assert gone(pids, timeout_s=0)


@pytest.mark.parametrize("world", [1, 2])
def test_hung_worker_is_found_and_shows_where_it_stood(shared: Controller, world: int) -> None:
    assert shared.agent is not None
    hang = {"way": "hang", "rank": world - 1, "at": 30, "pause_s": 0.02}
    launch = shared.launch("Breaking", hang, world=world, work=1e6)
    shared.started(launch)
    ended = shared.ended(launch, timeout_s=60)
    assert ended.outcome == "lost"
    assert "no step for" in ended.reason
    # The detection itself: 8 s without a step, seen within a second.
    assert float(ended.reason.split("no step for ")[1].split(" s")[0]) < DETECTED_S
    log = (Path(launch.folder) / f"log-{launch.run}.txt").read_text()
    assert "in _hang" in log.split(f"rank {world - 1} stands at:")[1]


def test_process_that_a_worker_left_behind_is_gone_too(shared: Controller, tmp_path: Path) -> None:
    launch = shared.launch("Breaking", {"way": "child", "note": str(tmp_path / "child")})
    assert shared.ended(launch).outcome == "failed", shared.told()
    assert gone([int((tmp_path / "child").read_text())], timeout_s=2)


def test_hang_before_the_first_step_has_its_own_limit(shared: Controller) -> None:
    launch = shared.launch("Breaking", {"way": "hang", "at": 0}, start_s=3.0)
    ended = shared.ended(launch)
    assert ended.outcome == "lost", shared.told()
    assert ended.reason.startswith("rank 0: no step for")


def test_run_over_two_nodes_ends_on_both_when_a_rank_of_one_is_killed(shared: Controller, fresh: Controller) -> None:
    assert fresh.agent is not None
    here = shared.launch("Plain", {"pause_s": 0.02}, world=2, slots=[0], work=1e6)
    there = fresh.launch(
        "Plain",
        {"pause_s": 0.02},
        slots=[1],
        work=1e6,
        world=2,
        first_rank=1,
        plan=here.plan,
        initial_batch=here.initial_batch,
        store_host=here.store_host,
        store_port=here.store_port,
        folder=here.folder,
        run=here.run,
    )
    shared.reached(here, 5)
    (pid,) = workers(fresh.agent.pid)
    end(pid)
    ended = fresh.ended(there, timeout_s=DETECTED_S)
    assert (ended.outcome, ended.reason) == ("lost", "rank 1 was killed by SIGKILL (out of memory?)")
    ended = shared.ended(here, timeout_s=DETECTED_S)
    assert ended.outcome == "lost"
    assert ended.reason.startswith("rank 0 lost its peers")


def test_killed_as_asked(shared: Controller) -> None:
    launch, pids = training(shared, world=2)
    shared.say(Kill(run=launch.run))
    assert shared.ended(launch, timeout_s=DETECTED_S).outcome == "lost"
    assert gone(pids, timeout_s=0)


def test_killed_agent_leaves_no_process(fresh: Controller) -> None:
    assert fresh.agent is not None
    _, pids = training(fresh, world=2)
    zygotes = children(fresh.agent.pid)
    end(fresh.agent.pid)
    assert gone([*pids, *zygotes], timeout_s=DETECTED_S)


def test_runs_are_saved_when_the_controller_is_gone(fresh: Controller) -> None:
    assert fresh.agent is not None
    launch, pids = training(fresh, world=2)
    fresh.close()
    began = time.monotonic()
    fresh.agent.wait(25)
    assert time.monotonic() - began < 20
    assert gone(pids, timeout_s=0)
    (saved,) = sorted((Path(launch.folder) / "checkpoints").glob("step-*/progress.json"))
    last = fresh.of(launch, Report)[-1]
    assert json.loads(saved.read_text())["progress"]["step"] >= last.step


def test_agent_told_to_leave_pauses_its_runs_first(fresh: Controller) -> None:
    assert fresh.agent is not None
    launch, _ = training(fresh, world=1)
    fresh.say(Shutdown())
    assert fresh.wait(Ended, lambda each: each.run == launch.run).outcome == "paused"
    assert fresh.agent.wait(10) == 0
    assert "agent: leaves: it was told to by the controller" in (fresh.folder / "agent.txt").read_text()


def test_agent_says_why_it_leaves(fresh: Controller) -> None:
    assert fresh.agent is not None
    fresh.agent.terminate()
    fresh.agent.wait(10)
    assert fresh.farewells() == ["it was told to by SIGTERM"]
    assert "agent: leaves: it was told to by SIGTERM" in (fresh.folder / "agent.txt").read_text()


def test_wrong_token_is_named_at_once(tmp_path: Path) -> None:
    with Controller(tmp_path) as controller:
        agent = controller.start_agent(token="another", hello=False)
        assert agent.wait(30) == 2
        assert "is SYNERGY_TOKEN this controller's?" in (tmp_path / "agent.txt").read_text()
