"""Workers killed or hung, agents killed, controllers gone: what is reported, how fast, and that nothing is left."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from agents_controller import Controller, end, gone, workers
from family import children, descendants

from synergy_exec.messages import LOST_PEERS, Ended, Failure, Kill, Launch, Noted, Report, Saved, Shutdown, Stop

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
    assert ended.died == -1  # anybody may have sent that
    assert gone(pids, timeout_s=0)


def test_slot_of_a_worker_that_a_signal_ended_which_nobody_sends_is_told(shared: Controller) -> None:
    launch, pids = training(shared, world=2)
    os.kill(pids[1], signal.SIGSEGV)
    ended = shared.ended(launch, timeout_s=DETECTED_S)
    assert (ended.outcome, ended.reason, ended.died) == ("lost", "rank 1 was killed by SIGSEGV", 1)


@pytest.mark.parametrize("world", [1, 2])
def test_hung_worker_is_found_and_shows_where_it_stood(shared: Controller, world: int) -> None:
    assert shared.agent is not None
    hang = {"way": "hang", "rank": world - 1, "at": 30, "pause_s": 0.02}
    launch = shared.launch("Breaking", hang, world=world, work=1e6, hang_s=4.0)
    shared.started(launch)
    ended = shared.ended(launch, timeout_s=60)
    assert ended.outcome == "lost"
    assert "no step for" in ended.reason
    # The detection itself: 4 s without a step, seen within a second.
    assert float(ended.reason.split("no step for ")[1].split(" s")[0]) < DETECTED_S
    log = (Path(launch.folder) / f"log-{launch.run}.txt").read_text()
    assert "in loss" in log.split(f"rank {world - 1} stands at:")[1]


@pytest.mark.parametrize("world", [1, 2])
def test_data_that_take_their_time_are_no_hang(shared: Controller, world: int) -> None:
    """Longer than a step may: neither of the rank that waits for them, nor of the one that waits for it."""
    stall = {"way": "stall", "rank": world - 1, "at": 12, "pause_s": 0.02, "note": "5.0"}
    launch = shared.launch("Breaking", stall, world=world, hang_s=1.5)
    assert shared.ended(launch, timeout_s=60).outcome == "done", shared.told()


def test_job_that_ends_its_process_in_the_middle_is_not_done(shared: Controller) -> None:
    launch = shared.launch("Breaking", {"way": "end", "at": 10})
    ended = shared.ended(launch)
    assert (ended.outcome, ended.reason) == (
        "failed",
        "the job's code ended rank 0 with exit code 0 in the middle of its work",
    )


def test_a_connection_that_the_job_loses_is_shown_as_its_own(shared: Controller) -> None:
    launch = shared.launch("Breaking", {"way": "reset", "rank": 1, "at": 10}, world=2)
    ended = shared.ended(launch)
    assert ended.outcome == "failed"
    assert ended.reason == "rank 1, step 11: ConnectionResetError: Connection reset by peer"


def test_loss_that_is_no_number_is_told_or_ends_the_job(shared: Controller) -> None:
    launch = shared.launch("Wide", {"way": "nan"})
    noted = shared.wait(Noted, lambda each: each.run == launch.run)
    assert noted.text == "step 6: the gradient's norm is nan, and the loss nan"
    assert shared.ended(launch).outcome == "done"
    ended = shared.ended(shared.launch("Wide", {"way": "nan"}, not_finite="stop"))
    assert (ended.outcome, ended.reason) == (
        "failed",
        "rank 0, step 6: the loss of step 6 is nan, and not_finite=stop ends the job then",
    )


def test_checkpoint_that_cannot_be_written_is_told_and_tried_again(shared: Controller) -> None:
    """A file takes the place of their folder, a link, and goes."""
    blocked, disk = shared.folder / "blocked", shared.folder / "disk"
    for each in (blocked, disk):
        each.mkdir()
    (blocked / "checkpoints").symlink_to(disk)
    launch = shared.launch("Plain", {"pause_s": 0.05}, work=1e6, checkpoint_interval_s=0.3, folder=str(blocked))
    shared.started(launch)
    (blocked / "file").touch()
    (blocked / "file").replace(blocked / "checkpoints")
    noted = shared.wait(Noted, lambda each: each.run == launch.run)
    assert "cannot write checkpoint" in noted.text
    saved = len(shared.of(launch, Saved))
    (blocked / "link").symlink_to(disk)
    (blocked / "link").replace(blocked / "checkpoints")
    shared.wait(Saved, lambda each: len(shared.of(launch, Saved)) > saved)
    shared.say(Kill(run=launch.run))
    assert shared.ended(launch).outcome == "lost"


def test_run_that_can_make_no_checkpoint_is_lost_at_once_and_says_why(shared: Controller) -> None:
    blocked = shared.folder / "file-for-checkpoints"
    blocked.mkdir()
    (blocked / "checkpoints").touch()
    ended = shared.ended(shared.launch("Plain", folder=str(blocked)))
    assert (ended.outcome, "cannot be written: Not a directory" in ended.reason) == ("lost", True)


@pytest.mark.parametrize("world", [1, 2])
def test_batches_that_do_not_follow_from_the_step_are_told(shared: Controller, world: int) -> None:
    launch = shared.launch("Impure", world=world)
    noted = shared.wait(Noted, lambda each: each.run == launch.run)
    assert "gives other samples when it is asked again" in noted.text
    assert shared.ended(launch).outcome == "done"


def test_batches_that_another_process_does_not_get_are_told(shared: Controller) -> None:
    """The same twice in a process, but of a seed that the next process does not have."""
    launch = shared.launch("Seeded", {"pause_s": 0.02}, work=1e6)
    shared.reached(launch, 5)
    shared.say(Stop(run=launch.run))
    assert shared.ended(launch).outcome == "paused"
    again = shared.launch("Seeded", {"pause_s": 0.02}, folder=launch.folder, work=1e6)
    noted = shared.wait(Noted, lambda each: each.run == again.run)
    assert "is not what it was in an earlier run" in noted.text
    shared.say(Kill(run=again.run))
    assert shared.ended(again).outcome == "lost"


def test_parameters_without_a_part_in_the_loss_are_found_out(shared: Controller) -> None:
    """One replica of two goes without a layer at step 5; nothing is trained wrongly, nothing hangs."""
    launch = shared.launch("Sparing", world=2, hang_s=20.0)
    ended = shared.ended(launch)
    assert ended.outcome == "failed"
    assert "had no part in the loss" in ended.reason
    assert shared.wait(Failure, lambda each: each.run == launch.run).unused
    assert shared.ended(shared.launch("Sparing", world=2, unused=True)).outcome == "done", shared.told()


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
    assert LOST_PEERS in ended.reason


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


def test_runs_are_saved_where_every_process_of_the_node_is_told_to_end(fresh: Controller) -> None:
    """As Slurm does with all of a step, when its job is cancelled or its time is up."""
    assert fresh.agent is not None
    launch, _ = training(fresh, world=2)
    for each in descendants(fresh.agent.pid):
        os.kill(each, signal.SIGTERM)
    assert fresh.wait(Ended, lambda each: each.run == launch.run).outcome == "paused"
    assert fresh.agent.wait(25) == 0


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
