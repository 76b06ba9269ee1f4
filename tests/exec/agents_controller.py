"""A controller for tests: a thread that serves one agent, and lets a test wait for what it says."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import WSMsgType, web
from family import children

from synergy_exec.messages import (
    Ended,
    Hello,
    Launch,
    Message,
    PlanMessage,
    Report,
    Reserve,
    Reserved,
    Saved,
    Started,
)
from synergy_exec.wire import decode, encode

TOKEN = "a-token-of-tests"
JOBS = Path(__file__).parent / "agents_jobs.py"
AGENT_S = 90.0
"""How long an agent may take to say hello on a busy machine: it imports torch first."""
RUN_S = 60.0
WITHOUT_CGROUPS = """
from synergy_exec.agent import cgroups
cgroups.own_folder = lambda: None
from synergy_exec.agent.__main__ import main
raise SystemExit(main())
"""


class Controller:
    """Context manager. heard: all that the agent has said, in order."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.heard: list[Message] = []
        self._farewells: list[str] = []
        self._changed = threading.Condition()
        self._numbers = itertools.count(1)
        self._loop = asyncio.new_event_loop()
        self._socket: web.WebSocketResponse | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self.port = 0
        self.agent: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Controller:
        self._thread.start()
        assert self._started.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        if self.agent is not None:
            try:
                self.agent.wait(25)
            finally:
                self.agent.kill()

    def start_agent(
        self, slots: int = 4, *, token: str = TOKEN, hello: bool = True, cgroups: bool = True
    ) -> subprocess.Popen[bytes]:
        """Its output goes to agent.txt in the folder. cgroups: whether it may look for its own."""
        module = ["-m", "synergy_exec.agent"] if cgroups else ["-c", WITHOUT_CGROUPS]
        command = [sys.executable, *module, f"--url=http://127.0.0.1:{self.port}", "--node=0"]
        command += [f"--slots={slots}", f"--parent={os.getpid()}"]
        with (self.folder / "agent.txt").open("wb") as output:
            self.agent = subprocess.Popen(
                command, env=os.environ | {"SYNERGY_TOKEN": token}, stdout=output, stderr=output, start_new_session=True
            )
        if hello:
            self.wait(Hello, timeout_s=AGENT_S)
        return self.agent

    def close(self) -> None:
        """The controller is gone: its sockets close."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join(10)

    def say(self, message: Message) -> None:
        """Sends a message to the agent."""
        assert self._socket is not None
        asyncio.run_coroutine_threadsafe(self._socket.send_str(encode(message)), self._loop).result(10)

    def wait(
        self,
        kind: type[Any],
        such: Callable[[Any], bool] = lambda _: True,
        *,
        timeout_s: float = RUN_S,
    ) -> Any:
        """The first message heard of that kind and such."""

        def found() -> list[Message]:
            return [each for each in self.heard if isinstance(each, kind) and such(each)]

        with self._changed:
            assert self._changed.wait_for(found, timeout_s), f"no {kind.__name__} in {timeout_s:g} s; {self.told()}"
        return found()[0]

    def farewells(self) -> list[str]:
        """Why agents left, as they said; waits for the first."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._farewells, RUN_S), self.told()
        return self._farewells

    def told(self) -> str:
        """What there is to see when a test fails."""
        logs = sorted(self.folder.rglob("*.txt"), key=lambda path: path.stat().st_mtime)
        return "\n".join([f"heard {self.heard[-10:]}", *(f"{log}:\n{log.read_text()[-3000:]}" for log in logs[-2:])])

    def launch(self, name: str, arguments: dict[str, Any] | None = None, *, world: int = 1, **more: Any) -> Launch:
        """Starts a run of that class of agents_jobs.py; more: fields of `Launch` that are to be otherwise."""
        run = next(self._numbers)
        address = Reserved(run=run, host="", port=0)
        if len(more.get("slots", range(world))) < world and "store_port" not in more:  # the others are elsewhere
            self.say(Reserve(run=run, ports=""))
            address = self.wait(Reserved, lambda each: each.run == run)
        launch = Launch(
            **{
                "run": run,
                "job": run,
                "job_class": f"{JOBS}:{name}",
                "arguments": arguments or {},
                "plan": PlanMessage(data=world, micro_batch=4),
                "initial_batch": 4 * world,
                "work": 20.0,
                "slots": list(range(world)),
                "first_rank": 0,
                "world": world,
                "store_host": address.host,
                "store_port": address.port,
                "folder": str(self.folder / f"job-{run}"),
                "report_s": 0.1,
                **more,
            }
        )
        self.say(launch)
        return launch

    def ended(self, launch: Launch, *, timeout_s: float = RUN_S) -> Ended:
        """How the run ended; it is an error if any process of it is left then."""
        ended: Ended = self.wait(Ended, lambda each: each.run == launch.run, timeout_s=timeout_s)
        return ended

    def of(self, launch: Launch, kind: type[Any]) -> list[Any]:
        """What was heard of a run."""
        return [each for each in self.heard if isinstance(each, kind) and each.run == launch.run]

    def started(self, launch: Launch) -> Started:
        """When it trains."""
        started: Started = self.wait(Started, lambda each: each.run == launch.run)
        return started

    def reached(self, launch: Launch, step: int) -> Report:
        """A report of that step or a later one."""
        report: Report = self.wait(Report, lambda each: each.run == launch.run and each.step >= step)
        return report

    def saved(self, launch: Launch) -> Saved:
        """The last that it saved."""
        last: Saved = self.of(launch, Saved)[-1]
        return last

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._main())

    async def _main(self) -> None:
        self._end = asyncio.Event()
        application = web.Application()
        application.add_routes([web.get("/agents", self._agent)])
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.port = runner.addresses[0][1]
        self._started.set()
        await self._end.wait()
        if self._socket is not None:
            await self._socket.close()
        await runner.cleanup()

    async def _agent(self, request: web.Request) -> web.WebSocketResponse:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise web.HTTPUnauthorized
        self._socket = web.WebSocketResponse()
        await self._socket.prepare(request)
        while (received := await self._socket.receive()).type == WSMsgType.TEXT:
            with self._changed:
                self.heard.append(decode(received.data))
                self._changed.notify_all()
        with self._changed:
            self._farewells.append(received.extra or "")
            self._changed.notify_all()
        return self._socket


def workers(agent: int) -> list[int]:
    """Process ids of the workers under an agent: the children of its zygote's wardens."""
    return [worker for warden in wardens(agent) for worker in children(warden)]


def wardens(agent: int) -> list[int]:
    """Process ids of the parents of its workers."""
    return [warden for zygote in children(agent) for warden in children(zygote)]


def gone(pids: list[int], *, timeout_s: float = 10.0) -> bool:
    """Whether none of them is left in time; zombies that await their parent count as gone."""
    until_s = time.monotonic() + timeout_s
    while any(_lives(pid) for pid in pids):
        if time.monotonic() > until_s:
            return False
        time.sleep(0.05)
    return True


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def end(pid: int) -> None:
    """SIGKILL."""
    os.kill(pid, signal.SIGKILL)
