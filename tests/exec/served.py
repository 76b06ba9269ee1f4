"""Whole controllers over pretended agents behind a real websocket: served to a client, or executing a trace.

`python served.py TRACE.csv RESULTS POLICY…` is the executor with them.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from exec.pretended import FakeAgent, file_of

from synergy_core.errors import InputError
from synergy_core.scheduling.jobs.testbed_profiles import TestbedProfile
from synergy_core.scheduling.policies import get_policy
from synergy_exec.backends import Meeting
from synergy_exec.commands._asking import Client, client_for
from synergy_exec.controller.controller import Arrival, Controller
from synergy_exec.messages import Hello, Message, Shutdown
from synergy_exec.settings import Settings
from synergy_exec.wire import decode, encode
from synergy_runs.inputs.keys import build, defaults

POLL_S = 0.05
FAST = {"round_s": 0.1, "nodes_s": 20.0, "leave_s": 5.0}
# Agents


async def serve(meeting: Meeting, node: int, slots: int, checkpoints: dict[int, float]) -> None:
    """One agent, until the controller is gone or has told it to leave."""
    agent = FakeAgent(node, slots, checkpoints)
    headers = {"Authorization": f"Bearer {meeting.token}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.ws_connect(f"{meeting.url}/agents") as channel,
    ):

        async def say(messages: list[Message]) -> None:
            for message in messages:
                await channel.send_str(encode(message))

        here = {"host": socket.gethostname(), "pid": os.getpid()}
        await say([Hello(node=node, slots=slots, gpu_type="cpu", **here)])
        leaving = False
        while not (leaving and not agent.runs):
            try:
                heard = await channel.receive(timeout=POLL_S)
            except TimeoutError:
                with contextlib.suppress(ConnectionError):
                    await say(agent.pass_time(time.monotonic()))
                continue
            if heard.type != aiohttp.WSMsgType.TEXT:
                break
            message = decode(heard.data)
            leaving |= isinstance(message, Shutdown)
            await say(agent.hear(message, time.monotonic()))
        for number in list(agent.runs):
            agent.end(number, "paused")


class TaskBackend:
    """starting: awaited, with its node and where it finds the controller, before an agent is started."""

    def __init__(self, *slots: int, starting: Callable[[int, Meeting], Awaitable[Any]] | None = None) -> None:
        self.slots, self.starting = slots, starting
        self.nodes = len(slots)
        self.checkpoints: dict[int, float] = {}
        self.agents: dict[int, asyncio.Task[None]] = {}

    async def start(self, node: int, meeting: Meeting) -> None:
        if self.starting is not None:
            await self.starting(node, meeting)
        work = serve(meeting, node, self.slots[node], self.checkpoints)
        self.agents[node] = asyncio.ensure_future(work)

    def lost(self) -> dict[int, str]:
        return {node: "its task ended" for node, task in self.agents.items() if task.done()}

    async def stop(self) -> None:
        for task in self.agents.values():
            task.cancel()


# Controllers


def through(work: Callable[[], Awaitable[Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(work(), 120.0))


def controller_of(
    folder: Path,
    *slots: int,
    policy: str = "fifo",
    arrivals: tuple[Arrival, ...] = (),
    backend: Any = None,
    profile: TestbedProfile | None = None,
    **more: Any,
) -> Controller:
    """more: settings."""
    given = {name: dataclasses.asdict(each) if dataclasses.is_dataclass(each) else each for name, each in more.items()}
    settings, known = build(Settings, FAST | given), TestbedProfile() if profile is None else profile
    return Controller(get_policy(policy), arrivals, backend or TaskBackend(*slots), settings, folder, known)


def served(folder: Path, work: Callable[[Controller, Client], Awaitable[None]], *slots: int, **more: Any) -> None:

    async def meanwhile() -> None:
        controller = controller_of(folder, *slots, serve=True, **more)
        running = asyncio.ensure_future(controller.run())
        try:
            while controller.execution is None:
                await asyncio.sleep(0.02)
                assert not running.done(), running
            await work(controller, client_for(folder, None))
        finally:
            controller._interrupt()
            await running

    through(meanwhile)


def ask(client: Client, *what: Any) -> Awaitable[Any]:
    return asyncio.to_thread(client.ask, *what)


async def refused(says: str, client: Client, *what: Any) -> str:
    with pytest.raises(InputError, match=says) as caught:
        await ask(client, *what)
    return str(caught.value)


async def until(true: Callable[[], object]) -> None:
    for _ in range(500):
        if true():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it never came true")


def job(**more: object) -> dict[str, object]:
    return {**file_of(work=10_000.0).values(), **more}


def arriving(*works: float) -> tuple[Arrival, ...]:
    return tuple(Arrival(0.0, f"j{at}", file_of(work=work)) for at, work in enumerate(works))


# Traces


def settings_values(trace: Path | None, results: Path, policies: list[str], **more: object) -> dict[str, object]:
    from omegaconf import OmegaConf

    conf = Path(__file__).resolve().parents[2] / "conf"
    values = defaults(Settings)
    if trace is not None:
        of_all = OmegaConf.to_container(OmegaConf.load(conf / "trace" / "default.yaml"))
        values["trace"] = {**of_all, "name": "small", "path": str(trace)}
    shown = {"results_dir": str(results), "figures": False}
    fast = {"round_s": 0.2, "leave_s": 10.0, "nodes_s": 30.0, "profile": None}
    return {**values, "policy": policies, **shown, **fast, **more}


def trace_of(folder: Path, jobs: int, iterations: int) -> Path:
    """Every second job asks for two slots."""
    path = folder / "small.csv"
    rows = [f"{0.1 * number},cnn,{iterations},j{number},{1 + number % 2}" for number in range(jobs)]
    path.write_text("\n".join(["submit_s,model,iterations,job,gpus", *rows]) + "\n")
    return path


def executed(trace: Path, results: Path, policies: list[str], make_backend: Any = None, **more: Any) -> list[Path]:
    """Runs policies as `python -m synergy_exec`, by default with two pretended agents; returns the results' folders."""
    from synergy_exec.run import execute_all

    values = settings_values(trace, results, policies, **more)
    make = make_backend or (lambda: TaskBackend(1, 1))
    return [each.results for each in execute_all(build(Settings, values), values, results / "small", make)]


if __name__ == "__main__":
    executed(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
