"""The zygote's own death, and what is said of a run from the ways its workers left."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from agents_controller import Controller, children, end, gone, workers

from synergy_exec.agent.causes import outcome
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
    assert outcome(codes, failures, killed, verdict) == expected


def test_peer_lost_without_a_cause_here_is_lost() -> None:
    result, reason = outcome({0: 76}, {}, (), "")
    assert result == "lost"
    assert reason.startswith("rank 0 lost its peers")
