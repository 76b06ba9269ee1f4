"""Agents and workers that stand still and wake up when another run of their job has begun; real ones, on two agents."""

from __future__ import annotations

import csv
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from agents_controller import Controller, gone, workers

from synergy_exec.messages import Launch, Report, Stop
from synergy_exec.training import shelf


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Controller, Controller]]:
    with ExitStack() as stack:
        made = []
        for name in ("old", "new"):
            (tmp_path / name).mkdir()
            made.append(stack.enter_context(Controller(tmp_path / name)))
            made[-1].start_agent(slots=2)
        yield made[0], made[1]


def steps(launch: Launch) -> list[tuple[int, int]]:
    """(run, step) of every line."""
    with (Path(launch.folder) / "steps.csv").open() as file:
        return [(int(row["run"]), int(row["step"])) for row in csv.DictReader(file)]


def require_no_step_twice_or_among_others(launch: Launch, resumed: int) -> None:
    """Run 1's steps, and after its last one run 2's, from the step on that follows what it has loaded."""
    there = steps(launch)
    runs = [run for run, _ in there]
    assert runs == sorted(runs)
    for run, first in ((1, 1), (2, resumed + 1)):
        own = [step for each, step in there if each == run]
        assert own == list(range(first, first + len(own)))


def freeze(controller: Controller) -> list[int]:
    """The agent, and then its workers, whose numbers it returns."""
    assert controller.agent is not None
    os.kill(controller.agent.pid, signal.SIGSTOP)
    pids = workers(controller.agent.pid)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    return pids


def revive(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("world", [1, 2])
def test_revived_workers_change_nothing_beside_the_new_run(two: tuple[Controller, Controller], world: int) -> None:
    old, new = two
    assert old.agent is not None
    # Not for the agent to say, once it wakes up, that its ranks have stood still.
    launch = old.launch("Plain", {"pause_s": 0.01}, world=world, work=1e6, checkpoint_interval_s=0.2, hang_s=600.0)
    old.reached(launch, 40)
    frozen = freeze(old)
    assert len(frozen) == world
    second = new.launch(
        "Plain", {"pause_s": 0.01}, run=2, world=1, work=1e6, folder=launch.folder, checkpoint_interval_s=0.2
    )
    resumed = new.started(second).step - 1
    new.reached(second, resumed + 30)
    revive([*frozen, old.agent.pid])
    assert gone(frozen, timeout_s=30)
    ended = old.ended(launch)
    assert (ended.outcome, "a newer run of the same job" in ended.reason) == ("lost", True), old.told()
    new.reached(second, new.of(second, Report)[-1].step + 30)
    new.say(Stop(run=2))
    assert new.ended(second).outcome == "paused"
    require_no_step_twice_or_among_others(launch, resumed)
    newest = shelf.newest_first(Path(launch.folder) / "checkpoints")[0]
    assert newest.name == shelf.name(new.saved(second).step)


def test_workers_train_on_beside_the_new_run_only_until_their_next_step(two: tuple[Controller, Controller]) -> None:
    """The agent alone stands still, and its controller is gone; so nobody tells its workers anything."""
    old, new = two
    assert old.agent is not None
    launch = old.launch("Plain", {"pause_s": 0.01}, work=1e6)
    old.reached(launch, 10)
    (pid,) = workers(old.agent.pid)
    os.kill(old.agent.pid, signal.SIGSTOP)
    old.close()
    second = new.launch("Plain", {"pause_s": 0.01}, run=2, work=1e6, folder=launch.folder)
    resumed = new.started(second).step - 1
    assert gone([pid], timeout_s=10)
    new.say(Stop(run=2))
    assert new.ended(second).outcome == "paused"
    revive([old.agent.pid])
    assert old.agent.wait(30) == 0
    require_no_step_twice_or_among_others(launch, resumed)


def test_ranks_of_an_agent_that_stands_still_save_and_leave(tmp_path: Path) -> None:
    with Controller(tmp_path) as controller:
        agent = controller.start_agent(slots=2)
        launch = controller.launch("Plain", {"pause_s": 0.01}, world=2, work=1e6, agent_silence_s=4.0)
        controller.reached(launch, 10)
        pids = workers(agent.pid)
        os.kill(agent.pid, signal.SIGSTOP)
        assert gone(pids, timeout_s=30)
        (saved,) = shelf.newest_first(Path(launch.folder) / "checkpoints")
        assert saved.name == shelf.name(steps(launch)[-1][1])
        assert "nothing from the agent for 4 s" in (Path(launch.folder) / f"log-{launch.run}.txt").read_text()
        revive([agent.pid])
        assert controller.ended(launch).outcome == "paused", controller.told()
