"""`alerts`: silent while all is well, else a line for each thing that somebody should look at, and exit code 1."""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from exec.controllers_agents import FakeAgent, Stage
from exec.controllers_jobs import cluster_of, file_of
from exec.test_api import job, served, until

from synergy_core.jobs.testbed_profiles import Profile
from synergy_core.policies import get_policy
from synergy_exec import __main__ as program
from synergy_exec.alert_limits import AlertLimits
from synergy_exec.client import Client
from synergy_exec.controller.alerts import alerts
from synergy_exec.controller.controller import Controller
from synergy_exec.controller.execution import Execution
from synergy_exec.controller.journal import Journal
from synergy_exec.controller.resume import resume
from synergy_exec.nodes.agents import Agents
from synergy_exec.settings import Settings

LIMITS = AlertLimits(silent_s=60.0, failed_s=600.0, free_fraction=0.0)


class Nodes:
    """Of a backend, how many agents there should be."""

    nodes = 0


def execution_of(folder: Path) -> Execution:
    journal = Journal(folder / "journal.sqlite")
    return Execution(journal, get_policy("fifo"), cluster_of(2), Settings(), folder, Profile())


def said(execution: Execution, now_s: float) -> list[str]:
    return alerts(execution, Agents(Nodes(), 3), now_s, LIMITS)  # type: ignore[arg-type]


def test_a_job_without_a_step_and_a_job_that_failed_are_told_of_for_a_while(tmp_path: Path) -> None:
    execution = execution_of(tmp_path)
    stage = Stage(execution, [FakeAgent(0, 2, {}, failing={1})])
    for name in ("goes on", "fails", "waits"):
        execution.submit(name, file_of(work=1e9, slots=1 + (name == "waits")), stage.now_s)
    for _ in range(100):
        stage.advance(1.0)
    failed = "rank 0: ValueError: no"
    assert said(execution, stage.now_s) == [f"job 1 (fails) failed 98 s ago: {failed}"]
    stage.agents[0].deaf = True
    stage.advance(61.0)
    assert said(execution, stage.now_s) == [
        "job 0 (goes on) has trained no step for 61 s; slots that it holds: 1",
        f"job 1 (fails) failed 2.6 min ago: {failed}",
    ]
    assert said(execution, stage.now_s + 600) == [
        "job 0 (goes on) has trained no step for 11.0 min; slots that it holds: 1"
    ]
    execution.journal.commit()
    again = execution_of(tmp_path)
    resume(again, stage.now_s)
    assert said(again, stage.now_s) == [f"job 1 (fails) failed 2.6 min ago: {failed}"]


def typed(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code of the command."""
    monkeypatch.setattr(sys, "argv", ["synergy_exec", "alerts", *arguments])
    try:
        program.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_the_command_is_silent_until_something_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = f"--dir={tmp_path}"

    def ask(*more: str) -> Any:
        return asyncio.to_thread(typed, monkeypatch, here, "--free_fraction=0", *more)

    async def work(controller: Controller, client: Client) -> None:
        await asyncio.to_thread(client.ask, "POST", "/jobs", job())
        await until(lambda: controller.execution.jobs[0].state == "running")
        capsys.readouterr()
        assert await ask() == 0
        assert capsys.readouterr().out == ""
        await until(lambda: controller.now_s() > controller.execution.jobs[0].moved_s)
        assert await ask("--silent_s=0") == 1
        assert capsys.readouterr().out.startswith("job 0 (mlp) has trained no step for ")
        controller.agents.backend.agents[0].cancel()
        await until(lambda: controller.agents.losses > 0 and bool(controller.agents.links))
        assert await ask() == 1
        assert capsys.readouterr().out == "node 0: agents lost within an hour: 1\n"
        for wrong in ("--silent_s=-1", "--silent_s=nan"):
            assert await ask(wrong) == 2
            assert "each with a number from 0" in capsys.readouterr().err

    served(tmp_path, work, 1, policy="fifo")
    assert typed(monkeypatch, here) == 2
    assert "no controller runs below" in capsys.readouterr().err


def test_a_disk_that_is_nearly_full_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    execution = execution_of(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100e9, 96e9, 4e9))
    agents = Agents(Nodes(), 3)  # type: ignore[arg-type]
    assert alerts(execution, agents, 0.0, AlertLimits(free_fraction=0.05)) == [
        f"{tmp_path}: 4.0 GB of 100.0 GB are free"
    ]
    assert alerts(execution, agents, 0.0, AlertLimits(free_fraction=0.03)) == []
