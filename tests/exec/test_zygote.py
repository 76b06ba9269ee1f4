"""The zygote's own death, and what is said of a run from the ways its workers left."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from agents_controller import Controller, children, end, gone, wardens, workers

from synergy_core.errors import InputError
from synergy_exec.agent.causes import died_there, outcome
from synergy_exec.agent.zygote import Zygote
from synergy_exec.messages import Failure


def test_dead_zygote_ends_its_workers_and_the_agent_after_it_has_said_so(tmp_path: Path) -> None:
    with Controller(tmp_path) as controller:
        agent = controller.start_agent(slots=1)
        launch = controller.launch("Plain", {"pause_s": 0.02}, work=1e6)
        controller.started(launch)
        pids, (zygote,) = workers(agent.pid), children(agent.pid)
        end(zygote)
        assert controller.ended(launch, timeout_s=10).outcome == "lost"
        assert agent.wait(10) == 1
        assert gone([zygote, *pids], timeout_s=5)


LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(
    not LARGE_PAGES.is_file() or "[never]" in LARGE_PAGES.read_text(), reason="this kernel gives no large pages"
)
def test_large_tensors_of_a_job_lie_on_large_pages(tmp_path: Path) -> None:
    with Controller(tmp_path) as controller:
        agent = controller.start_agent(slots=1)
        mlp = "synergy_exec.examples.mlp:Mlp"
        controller.reached(controller.launch("Plain", {"width": 1024, "depth": 1}, work=1e6, job_class=mlp), 2)
        (pid,) = workers(agent.pid)
        held = dict(line.split(":") for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
        assert int(held["AnonHugePages"].split()[0]) >= 4 * 1024  # one layer's weights, in kB


def test_zygote_that_stands_still_is_noticed_and_ended_with_its_workers(tmp_path: Path) -> None:
    with Controller(tmp_path) as controller:
        agent = controller.start_agent(slots=1)
        launch = controller.launch("Plain", {"pause_s": 0.02}, work=1e6)
        controller.started(launch)
        pids, (zygote,) = [*workers(agent.pid), *wardens(agent.pid)], children(agent.pid)
        os.kill(zygote, signal.SIGSTOP)
        assert controller.ended(launch, timeout_s=10).outcome == "lost"
        assert gone([zygote, *pids], timeout_s=0)
        assert agent.wait(10) == 1
        assert "did not answer for 6 s" in (tmp_path / "agent.txt").read_text()


def test_zygote_that_stands_still_while_it_imports_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by an hour of chaos: its agent, whose controller had gone, waited for it for ever."""
    monkeypatch.setattr("synergy_exec.agent.zygote._IDLE", 3)

    async def frozen() -> None:
        starting = asyncio.ensure_future(Zygote.start())
        while not (found := children(os.getpid())):
            await asyncio.sleep(0)
        os.kill(found[-1], signal.SIGSTOP)
        await starting

    with pytest.raises(InputError, match="exit code -9 while importing torch"):
        asyncio.run(asyncio.wait_for(frozen(), 60))


def test_zygote_leaves_when_nothing_comes_from_its_agent() -> None:
    """One whose agent pings stays; without pings it has waited its 40 times after 0.8 s."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    lines = "import socket, sys; from synergy_exec.worker.zygote import Forker\n"
    lines += "Forker(socket.socket(fileno=int(sys.argv[1])), ping_s=0.02).serve()"
    command = [sys.executable, "-c", lines, str(theirs.fileno())]
    with (
        ours,
        theirs,
        subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, text=True) as zygote,
    ):
        assert "ready" in json.loads(ours.recv(1000))
        for number in range(80):
            ours.send(json.dumps({"ping": number}).encode())
            assert json.loads(ours.recv(1000)) == {"pong": number}
            time.sleep(0.02)
        assert zygote.poll() is None
        _, said = zygote.communicate(timeout=30)
    assert said == "zygote: nothing from the agent for 0.8 s; ends its workers\n"


def said(rank: int, reason: str, *, out_of_memory: bool = False) -> dict[int, Failure]:
    return {rank: Failure(run=1, rank=rank, reason=reason, out_of_memory=out_of_memory)}


KILLED = -signal.SIGKILL


@pytest.mark.parametrize(
    ("codes", "failures", "killed", "verdict", "expected"),
    [
        ({0: 0, 1: 0}, {}, (), "", ("done", "")),
        ({0: 75, 1: 75}, {}, (), "", ("paused", "")),
        # The peer's error came first, the cause second.
        ({0: 76, 1: 1}, said(1, "its data"), (), "", ("failed", "its data")),
        ({0: 76, 1: KILLED}, {}, (), "", ("lost", "rank 1 was killed by SIGKILL (out of memory?)")),
        ({0: -signal.SIGSEGV}, {}, (), "", ("lost", "rank 0 was killed by SIGSEGV")),
        ({0: 3}, {}, (), "", ("failed", "rank 0 left with exit code 3")),
        ({0: KILLED, 1: KILLED}, {}, (0, 1), "no step", ("lost", "no step")),
        # It said why, and was killed before it could leave.
        ({0: KILLED, 1: KILLED}, said(1, "its data"), (0, 1), "", ("failed", "its data")),
        ({0: 1, 1: 1}, said(0, "a") | said(1, "b", out_of_memory=True), (), "", ("failed", "b")),
        ({}, {}, (), "cannot be started", ("lost", "cannot be started")),
    ],
)
def test_what_a_rank_did_by_itself_comes_first(codes, failures, killed, verdict, expected) -> None:  # type: ignore[no-untyped-def]
    assert outcome(codes, codes, failures, killed, verdict) == expected


@pytest.mark.parametrize("code", [0, 75])
def test_a_process_that_user_code_ends_is_not_done_whatever_its_code(code: int) -> None:
    """As `os._exit(0)` in the middle of training does."""
    result, reason = outcome({0: code, 1: KILLED}, {0: None, 1: None}, {}, (1,), "")
    assert (result, reason) == (
        "failed",
        f"the job's code ended rank 0 with exit code {code} in the middle of its work",
    )


def test_peer_lost_without_a_cause_here_is_lost() -> None:
    result, reason = outcome({0: 76}, {}, {}, (), "")
    assert result == "lost"
    assert reason.startswith("rank 0 lost its peers")


def test_what_a_rank_saw_of_its_peers_is_shown_where_nobody_says_more() -> None:
    """An error of NCCL, say, may have another cause than a peer's death."""
    echo = {0: Failure(run=1, rank=0, reason="rank 0, step 3: NCCL error", from_peers=True)}
    result, reason = outcome({0: 76}, {}, echo, (), "")
    assert result == "lost"
    assert reason.startswith("rank 0, step 3: NCCL error: lost its peers")
    assert outcome({0: 76, 1: 1}, {}, echo | said(1, "its data"), (), "") == ("failed", "its data")


def test_a_checkpoint_that_the_disk_refuses_is_not_the_jobs_failure() -> None:
    refused = {0: Failure(run=1, rank=0, reason="no space", unsaved=True)}
    assert outcome({0: 1}, {}, refused, (), "") == ("lost", "no space")


def test_a_device_that_says_it_is_broken_loses_the_run_and_so_may_a_signal_that_nobody_sends() -> None:
    broken = {1: Failure(run=1, rank=1, reason="ECC", broken_device=True)}
    assert outcome({0: 76, 1: 1}, {}, broken, (), "") == ("lost", "ECC")
    assert died_there({0: 76, 1: 1}, broken, ()) == 1
    for number in (signal.SIGSEGV, signal.SIGBUS):
        assert died_there({0: 76, 1: -number}, {}, ()) == 1
        assert died_there({0: 76, 1: -number}, {}, (1,)) is None
    assert died_there({0: -signal.SIGKILL, 1: -signal.SIGTERM, 2: 1}, {}, ()) is None
