"""Workers killed, hung or frozen, agents killed, controllers gone: what is reported, how fast, and what is left."""

import json
import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
from exec.real import Controller, descendants, forkservers, gone, log_of, steps_of, wait_until

from synergy_core.performance.planner.plan import Plan
from synergy_exec.agent.node_run import outcome
from synergy_exec.messages import LOST_PEERS, Ended, Failure, Kill, Noted, Report, Retune, Saved
from synergy_exec.training import checkpoint_folder

DETECTED_S = 10.0
SLOW = {"pause_s": 0.02}


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    with Controller(tmp_path_factory.mktemp("faults")) as controller:
        controller.start_agent()
        yield controller


@pytest.fixture
def fresh(tmp_path):
    with Controller(tmp_path) as controller:
        controller.start_agent(slots=2)
        yield controller


def training(controller):
    launch = controller.launch("Plain", SLOW, world=2, work=1e6)
    controller.reached(launch, 5)
    pids = controller.workers()
    assert len(pids) == 2
    return launch, pids


def test_killed_worker_loses_the_run_and_its_peers_are_gone(shared):
    launch, pids = training(shared)
    os.kill(pids[-1], signal.SIGKILL)
    ended = shared.ended(launch, timeout_s=DETECTED_S)
    assert ended.outcome == "lost"
    assert "rank 1 was killed by SIGKILL" in ended.reason
    assert gone(pids, timeout_s=0)


def test_parameters_that_one_replica_does_without_under_fsdp_are_the_reason_of_its_abort(shared):
    launch = shared.launch("Sparing", world=2, plan=Plan(data=2, zero=3, micro_batch=4))
    assert "FSDP aborts" in shared.ends(launch, "lost").reason


def test_hung_worker_is_found_and_shows_where_it_stood(shared):
    launch = shared.launch("Breaking", {"way": "hang", "rank": 1, "at": 10, **SLOW}, world=2, work=1e6, hang_s=2.0)
    shared.started(launch)
    reason = shared.ends(launch, "lost").reason
    # The detection itself: 2 s without a step, seen within a second.
    assert float(reason.split("no step for ")[1].split(" s")[0]) < DETECTED_S
    assert "in loss" in log_of(launch).split("rank 1 stands at:")[1]


def test_data_that_take_their_time_are_no_hang(shared):
    """Longer than a step may: neither of the rank that waits for them, nor of the one that waits for it."""
    stall = {"way": "stall", "rank": 1, "at": 12, "note": "3.0", **SLOW}
    shared.ends(shared.launch("Breaking", stall, world=2, hang_s=1.5), "done")


def test_a_first_step_at_another_batch_that_takes_its_time_is_no_hang(shared):
    launch = shared.launch("Choosing", {"seconds": 4.0, **SLOW}, world=2, work=60.0, hang_s=1.0)
    shared.reached(launch, 5)
    shared.say(Retune(run=launch.run, micro_batch=8, accumulation=1))
    shared.ends(launch, "done")


def test_an_agent_that_leaves_gives_a_large_checkpoint_the_time_that_it_takes(fresh, tmp_path):
    """It would have had 0.1 s; its last checkpoint was of 40 GB, most of which is not there."""
    noting = {"note": str(tmp_path / "note"), **SLOW}
    first = fresh.launch("Noting", noting, work=1e6)
    fresh.reached(first, 5)
    fresh.stop(first)
    (newest, *_) = checkpoint_folder.newest_first(Path(first.folder) / "checkpoints")
    with (newest / "others").open("wb") as file:
        file.truncate(40_000_000_000)
    launch = fresh.launch("Noting", {**noting, "saved_s": 5.0}, work=1e6, folder=first.folder, grace_s=0.1)
    fresh.reached(launch, 10)
    os.kill(fresh.agent.pid, signal.SIGTERM)
    fresh.ends(launch, "paused")


def test_hang_before_the_first_step_has_its_own_limit(shared):
    launch = shared.launch("Breaking", {"way": "hang", "at": 0}, start_s=3.0)
    assert shared.ends(launch, "lost").reason.startswith("rank 0: no step for")


def test_checkpoint_that_cannot_be_written_is_told_and_tried_again(shared):
    """A file takes the place of their folder, a link, and goes."""
    blocked, disk = shared.folder / "blocked", shared.folder / "disk"
    for each in (blocked, disk):
        each.mkdir()
    (blocked / "checkpoints").symlink_to(disk)
    launch = shared.launch("Plain", {"pause_s": 0.05}, work=1e6, checkpoint_interval_s=0.3, folder=str(blocked))
    shared.started(launch)
    (blocked / "file").touch()
    (blocked / "file").replace(blocked / "checkpoints")
    assert "cannot write checkpoint" in shared.of_run(launch, Noted).text
    saved = len(shared.of(launch, Saved))
    (blocked / "link").symlink_to(disk)
    (blocked / "link").replace(blocked / "checkpoints")
    shared.until(lambda: len(shared.of(launch, Saved)) > saved)
    shared.say(Kill(run=launch.run))
    shared.ends(launch, "lost")


def test_run_that_can_make_no_checkpoint_is_lost_at_once_and_says_why(shared):
    blocked = shared.folder / "file-for-checkpoints"
    blocked.mkdir()
    (blocked / "checkpoints").touch()
    assert "Not a directory" in shared.ends(shared.launch("Plain", folder=str(blocked)), "lost").reason


def test_batches_that_follow_from_the_process_are_told(shared):
    """They are the same when asked again, but of a seed that the next process does not have."""
    seeded = {"way": "seeded", **SLOW}
    launch = shared.launch("Odd", seeded, work=1e6)
    shared.reached(launch, 5)
    shared.stop(launch)
    again = shared.launch("Odd", seeded, folder=launch.folder, work=1e6)
    assert "differs from the same batch in an earlier run" in shared.of_run(again, Noted).text
    shared.say(Kill(run=again.run))
    shared.ends(again, "lost")


def test_run_over_two_nodes_ends_on_both_when_a_rank_of_one_is_killed(shared, fresh):
    here = shared.launch("Plain", SLOW, world=2, slots=[0], work=1e6)
    there = replace(here, node=replace(here.node, slots=[1], first_rank=1))
    fresh.say(there)
    shared.reached(here, 5)
    (pid,) = fresh.workers()
    os.kill(pid, signal.SIGKILL)
    ended = fresh.ended(there, timeout_s=DETECTED_S)
    assert (ended.outcome, "rank 1 was killed by SIGKILL" in ended.reason) == ("lost", True)
    ended = shared.ended(here, timeout_s=DETECTED_S)
    assert (ended.outcome, LOST_PEERS in ended.reason) == ("lost", True)


# An agent that is killed, leaves, or loses its controller


def test_runs_are_saved_when_the_controller_is_gone(fresh):
    launch, pids = training(fresh)
    fresh.close()
    began = time.monotonic()
    fresh.agent.wait(25)
    assert time.monotonic() - began < 20
    assert gone(pids, timeout_s=0)
    (saved,) = sorted((Path(launch.folder) / "checkpoints").glob("step-*/progress.json"))
    last = fresh.of(launch, Report)[-1]
    assert json.loads(saved.read_text())["progress"]["step"] >= last.step


def test_runs_are_saved_where_every_process_of_the_node_is_told_to_end(fresh):
    """As Slurm does with all of a step, when its job is cancelled or its time is up."""
    launch, _ = training(fresh)
    for each in descendants(fresh.agent.pid):
        os.kill(each, signal.SIGTERM)
    assert fresh.of_run(launch, Ended).outcome == "paused"
    assert fresh.agent.wait(25) == 0
    assert fresh.until(lambda: fresh.farewells) == ["it was told to by SIGTERM"]


def test_wrong_token_is_named_at_once(tmp_path):
    with Controller(tmp_path) as controller:
        agent = controller.start_agent(token="another", hello=False)
        assert agent.wait(30) == 2
        assert "SYNERGY_TOKEN" in (tmp_path / "agent.txt").read_text()


# One run at a time: agents and workers that stand still and wake up when another run of their job has begun


def revive(*pids):
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


def test_revived_workers_change_nothing_beside_the_new_run(fresh, shared):
    old, new = fresh, shared
    often = {"work": 1e6, "checkpoint_interval_s": 0.2}
    # Not for the agent to say, once it wakes up, that its ranks have stood still.
    launch = old.launch("Plain", {"pause_s": 0.01}, world=2, hang_s=600.0, **often)
    old.reached(launch, 40)
    os.kill(old.agent.pid, signal.SIGSTOP)
    frozen = old.workers()
    assert len(frozen) == 2
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    second = new.launch("Plain", {"pause_s": 0.01}, run=1000, folder=launch.folder, **often)
    resumed = new.started(second).step - 1
    new.reached(second, resumed + 30)
    revive(*frozen, old.agent.pid)
    assert gone(frozen, timeout_s=30)
    assert "a newer run of the same job" in old.ends(launch, "lost").reason
    new.reached(second, new.of(second, Report)[-1].step + 30)
    new.stop(second)
    there = [(int(row["run"]), int(row["step"])) for row in steps_of(launch.folder)]
    for run, first in ((launch.run, 1), (second.run, resumed + 1)):
        own = [step for each, step in there if each == run]
        assert own == list(range(first, first + len(own))), "no step twice or among others"
    newest = checkpoint_folder.newest_first(Path(launch.folder) / "checkpoints")[0]
    assert newest.name == checkpoint_folder.name(new.saved(second).step)


def test_ranks_of_an_agent_that_stands_still_save_and_leave(fresh):
    launch = fresh.launch("Plain", {"pause_s": 0.01}, world=2, work=1e6, agent_silence_s=4.0)
    fresh.reached(launch, 10)
    pids = fresh.workers()
    os.kill(fresh.agent.pid, signal.SIGSTOP)
    assert gone(pids, timeout_s=30)
    (saved,) = checkpoint_folder.newest_first(Path(launch.folder) / "checkpoints")
    assert saved.name == checkpoint_folder.name(int(steps_of(launch.folder)[-1]["step"]))
    assert "agent has been silent for 4 s" in log_of(launch)
    revive(fresh.agent.pid)
    fresh.ends(launch, "paused")


def launched(controller, note, way, then=""):
    note.mkdir()
    # On a busy machine 64 forks take their time.
    return controller.launch("Straying", {"way": way, "note": str(note), "then": then}, hang_s=60.0)


def left(controller, note):
    """Processes of jobs that are there: what is below the agent, and those noted."""
    noted = {int(each.name) for each in note.iterdir() if each.name.isdigit()}
    own = {controller.agent.pid, *controller.idle}
    below = set(descendants(controller.agent.pid)) - own
    return [pid for pid in noted | below if not gone([pid], timeout_s=0)]


@pytest.mark.parametrize(
    ("way", "then", "outcome", "reason"),
    [
        *((way, "", "done", "") for way in ("daemon", "program", "runner", "bomb")),
        ("bomb", "raise", "failed", "the data is gone"),
    ],
)
def test_nothing_of_a_job_is_left_when_its_run_has_ended(shared, tmp_path, way, then, outcome, reason):
    launch = launched(shared, tmp_path / "note", way, then)
    ended = shared.ended(launch)
    assert left(shared, tmp_path / "note") == []
    assert (ended.outcome, reason in ended.reason) == (outcome, True), shared.told()


@pytest.mark.parametrize("victim", ["forkserver", "agent"])
def test_killed_forkserver_or_agent_leaves_nothing(fresh, tmp_path, victim):
    note = tmp_path / "note"
    launch = launched(fresh, note, "bomb", "wait")
    fresh.started(launch)
    wait_until(lambda: len(list(note.iterdir())) >= 64, 60)
    mine = [*left(fresh, note), *fresh.idle]
    assert len(mine) > 64
    (parent,) = forkservers(fresh.agent.pid)
    os.kill(parent if victim == "forkserver" else fresh.agent.pid, signal.SIGKILL)
    if victim == "forkserver":
        fresh.ends(launch, "lost")
        assert fresh.agent.wait(20) == 1
    assert gone(mine)


def test_forkserver_that_stands_still_is_noticed_and_ended_with_its_workers(fresh):
    launch = fresh.launch("Plain", SLOW, work=1e6)
    fresh.started(launch)
    pids, (parent,) = fresh.workers(), forkservers(fresh.agent.pid)
    os.kill(parent, signal.SIGSTOP)
    assert fresh.ended(launch, timeout_s=15).outcome == "lost"
    assert gone([parent, *pids])
    assert fresh.agent.wait(10) == 1
    assert "the parent of workers was stopped" in (fresh.folder / "agent.txt").read_text()


def test_agent_whose_forkserver_stands_still_before_it_has_started_leaves_with_the_controller(tmp_path):
    with Controller(tmp_path) as controller:
        agent = controller.start_agent(hello=False, program=subprocess.Popen)
        wait_until(lambda: forkservers(agent.pid), 60)
        started = descendants(agent.pid)
        os.kill(*forkservers(agent.pid), signal.SIGSTOP)
        controller.close()
        assert agent.wait(30) == 1
        assert gone(started)


def said(rank, reason, **more):
    return {rank: Failure(run=1, reason=reason, **more)}


KILLED, SEGV = -signal.SIGKILL, -signal.SIGSEGV
ECHO = said(0, "rank 0, step 3: NCCL error", from_peers=True)


@pytest.mark.parametrize(
    ("codes", "failures", "killed", "verdict", "expected"),
    [
        ({0: 0, 1: 0}, {}, (), "", ("done", "")),
        ({0: 75, 1: 75}, {}, (), "", ("paused", "")),
        # The peer's error came first, the cause second.
        ({0: 76, 1: 1}, said(1, "its data"), (), "", ("failed", "its data")),
        ({0: 76, 1: KILLED}, {}, (), "", ("lost", "rank 1 was killed by SIGKILL (out of memory?)")),
        ({0: SEGV}, {}, (), "", ("lost", "rank 0 was killed by SIGSEGV")),
        ({0: 3}, {}, (), "", ("failed", "rank 0 left with exit code 3")),
        ({0: KILLED, 1: KILLED}, {}, (0, 1), "no step", ("lost", "no step")),
        # It said why, and was killed before it could leave.
        ({0: KILLED, 1: KILLED}, said(1, "its data"), (0, 1), "", ("failed", "its data")),
        ({0: 1, 1: 1}, said(0, "a") | said(1, "b", out_of_memory=True), (), "", ("failed", "b")),
        ({}, {}, (), "cannot be started", ("lost", "cannot be started")),
        # Nobody says more than that its peers are gone; an error of NCCL, say, may have another cause than that.
        ({0: 76}, {}, (), "", ("lost", "rank 0 lost its peers")),
        ({0: 76}, ECHO, (), "", ("lost", "rank 0, step 3: NCCL error: lost its peers")),
        ({0: 76, 1: 1}, ECHO | said(1, "its data"), (), "", ("failed", "its data")),
        # The disk refused a checkpoint.
        ({0: 1}, said(0, "no space", unsaved=True), (), "", ("lost", "no space")),
    ],
)
def test_what_a_rank_did_by_itself_comes_first(codes, failures, killed, verdict, expected):
    result, reason = outcome(codes, codes, failures, killed, verdict)
    assert (result, reason[: len(expected[1]) or None]) == expected


def test_job_that_needs_more_memory_than_it_may_fails_of_it(fresh):
    launch = fresh.launch("Breaking", {"way": "hoard"}, memory_gb_per_slot=0.75)
    ended = fresh.ends(launch, "failed")
    assert ("MemoryError" in ended.reason, ended.out_of_memory) == (True, True)
