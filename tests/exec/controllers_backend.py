"""Pretended agents behind a real websocket: as tasks of the controller's process, or as processes of their own.

`python controllers_backend.py agent URL TOKEN NODE SLOTS FOLDER` is such an agent,
`python controllers_backend.py run TRACE.csv RESULTS POLICY…` the executor with them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
import time
from pathlib import Path

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from exec.controllers_agents import FakeAgent

from synergy_exec.backends import Meeting
from synergy_exec.messages import Hello, Message
from synergy_exec.wire import decode, encode

POLL_S = 0.05


async def serve(url: str, token: str, node: int, slots: int, saved: Path | None, checkpoints: dict[int, float]) -> None:
    """One agent, until the controller is gone or has told it to leave."""
    if saved is not None and saved.is_file():
        checkpoints |= {int(job): work for job, work in json.loads(saved.read_text()).items()}
    agent = FakeAgent(node, slots, checkpoints)
    headers = {"Authorization": f"Bearer {token}"}
    async with aiohttp.ClientSession(headers=headers) as session, session.ws_connect(f"{url}/agents") as channel:

        async def say(messages: list[Message]) -> None:
            if saved is not None:
                saved.write_text(json.dumps(checkpoints))
            for message in messages:
                await channel.send_str(encode(message))

        here = {"host": socket.gethostname(), "pid": os.getpid(), "no_limit": "this agent only pretends"}
        hello = Hello(node=node, slots=slots, gpu_type="cpu", **here)
        await say([hello])
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
            leaving |= message.KIND == "shutdown"
            await say(agent.hear(message, time.monotonic()))
        for number in list(agent.runs):
            agent.end(number, "paused")
        if saved is not None:
            saved.write_text(json.dumps(checkpoints))


class TaskBackend:
    """Agents as tasks of this process. `agents`: those that are there."""

    def __init__(self, *slots: int) -> None:
        self.slots = slots
        self.checkpoints: dict[int, float] = {}
        self.agents: dict[int, asyncio.Task[None]] = {}

    @property
    def nodes(self) -> int:
        return len(self.slots)

    async def start(self, node: int, meeting: Meeting) -> None:
        token = meeting.token_file.read_text().strip()
        work = serve(meeting.url, token, node, self.slots[node], None, self.checkpoints)
        self.agents[node] = asyncio.ensure_future(work)

    def lost(self) -> dict[int, str]:
        return {node: "its task ended" for node, task in self.agents.items() if task.done()}

    async def stop(self) -> None:
        for task in self.agents.values():
            task.cancel()


class ProcessBackend:
    """Agents as processes."""

    def __init__(self, *slots: int) -> None:
        self.slots = slots
        self._processes: list[asyncio.subprocess.Process] = []

    @property
    def nodes(self) -> int:
        return len(self.slots)

    async def start(self, node: int, meeting: Meeting) -> None:
        token = meeting.token_file.read_text().strip()
        saved = meeting.folder / f"saved-{node}.json"
        arguments = ("agent", meeting.url, token, str(node), str(self.slots[node]), str(saved))
        process = await asyncio.create_subprocess_exec(sys.executable, __file__, *arguments)
        self._processes.append(process)

    def lost(self) -> dict[int, str]:
        return {}

    async def stop(self) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def settings_values(trace: Path | None, results: Path, policies: list[str], **more: object) -> dict[str, object]:
    """What Hydra would compose."""
    from omegaconf import OmegaConf

    from synergy_exec.settings import Settings
    from synergy_runs.settings import defaults

    conf = Path(__file__).resolve().parents[2] / "conf"
    values = defaults(Settings)
    if trace is not None:
        of_all = OmegaConf.to_container(OmegaConf.load(conf / "trace" / "default.yaml"))
        values["trace"] = {**of_all, "name": "small", "path": str(trace)}
    shown = {"results_dir": str(results), "figures": False, "live": False}
    fast = {"round_s": 0.2, "leave_s": 10.0, "nodes_s": 30.0, "profile": None}
    return {**values, "policy": policies, **shown, **fast, **more}


def run(trace: Path, results: Path, policies: list[str]) -> None:
    """As `python -m synergy_exec` does, with these agents."""
    from synergy_exec.run import execute_all
    from synergy_exec.settings import Settings
    from synergy_runs.settings import build

    values = settings_values(trace, results, policies)
    settings = build(Settings, values)
    execute_all(settings, values, results / "small", lambda: ProcessBackend(1, 1))


if __name__ == "__main__":
    if sys.argv[1] == "agent":
        url, token, node, slots, saved = sys.argv[2:]
        asyncio.run(serve(url, token, int(node), int(slots), Path(saved), {}))
    else:
        run(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
