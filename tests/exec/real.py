"""Real agents, workers and programs: a controller that a test speaks through, and processes looked at from outside."""

from __future__ import annotations

import asyncio
import csv
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from aiohttp import WSMsgType, web
from exec import warm
from exec.pretended import launch_of

from synergy_core.errors import InputError
from synergy_core.performance.planner.plan import Plan
from synergy_exec.backends import Meeting
from synergy_exec.commands._asking import Client, client_for
from synergy_exec.job_folder import LOG, LOG_HEADING, begin_log
from synergy_exec.messages import Ended, Hello, Launch, Message, Report, Reserve, Reserved, Saved, Started, Stop
from synergy_exec.wire import decode, encode
from synergy_exec.worker import processes
from synergy_exec.worker.processes import children

HERE = Path(__file__).parent
JOBS = HERE / "agents_jobs.py"
TOKEN = "a-token-of-tests"
AGENT_S = 90.0
"""How long an agent may take to say hello on a busy machine: it imports torch first."""
RUN_S = 60.0


# Processes


def descendants(pid: int) -> list[int]:
    return [pid, *processes.descendants(pid)]


def runs(pid: int, program: str, warm_name: str) -> bool:
    """Whether a process runs a program, of which a fork by `warm` has another name."""
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
        return program in words or Path(f"/proc/{pid}/comm").read_text().strip() == warm_name
    return False


def forkservers(agent: int) -> list[int]:
    """The process ids of the parents of an agent's workers: one, once it has been started."""
    return [pid for pid in children(agent) if runs(pid, "multiprocessing.forkserver", "forkserver")]


def gone(pids: list[int], *, timeout_s: float = 10.0) -> bool:
    """Whether none of them is left in time; zombies that await their parent count as gone."""
    until_s = time.monotonic() + timeout_s
    while any(map(processes.began, pids)):
        if time.monotonic() > until_s:
            return False
        time.sleep(0.05)
    return True


def wait_until(true: Callable[[], object], patience_s: float, said: Callable[[], str] = lambda: "") -> Any:
    """Waits until the function returns something true, and returns it; else raises AssertionError."""
    until_s = time.monotonic() + patience_s
    while not (found := true()):
        assert time.monotonic() < until_s, f"not in {patience_s:g} s\n{said()}"
        time.sleep(0.02)
    return found


# Programs


def typed(*words: object) -> subprocess.CompletedProcess[str]:
    return warm.run([sys.executable, "-m", "synergy_exec", *map(str, words)])


def answer(*words: object) -> str:
    """Runs a command that must succeed, and returns what it prints."""
    ended = typed(*words)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def asked(results: Path, method: str, path: str, body: Any = None) -> Any:
    """Asks the controller of a results folder; None if none answers."""
    with suppress(InputError):
        return client_for(results, None).ask(method, path, body)
    return None


class Service:
    """Context manager: `python -m synergy_exec` in another terminal; its results are in the folder.

    seen: every process that it started, directly or not, with when that began; looked for as long as it runs.
    """

    def __init__(self, results: Path) -> None:
        self.results = results
        self.results.mkdir(exist_ok=True)
        self.said = results / "said.txt"
        self.seen: set[tuple[int, int]] = set()
        self._process: subprocess.Popen[bytes] | None = None
        self._over = threading.Event()

    def __enter__(self) -> Service:
        threading.Thread(target=self._look, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.leave()
        finally:
            self.kill()
            self._over.set()

    def start(self, *words: object) -> None:
        """Starts the service and waits until it answers."""
        line = [sys.executable, "-m", "synergy_exec", *map(str, words)]
        with self.said.open("ab") as stream:
            self._process = warm.Popen(line, stdout=stream, stderr=stream)
        self.until(lambda: asked(self.results, "GET", "/state"))

    def client(self) -> Client:
        return client_for(self.results, None)

    def jobs(self) -> dict[str, Any]:
        """The jobs as the service lists them, by name."""
        return {each["name"]: each for each in self.client().ask("GET", "/jobs")}

    def until(self, true: Callable[[], object], patience_s: float = 240.0) -> Any:
        return wait_until(true, patience_s, self.said.read_text)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def leave(self) -> int:
        """Ends the service as Ctrl-C does, checks that no process is left, and returns the exit code."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        code = self._process.wait(240)
        wait_until(lambda: not [each for each in self.seen if processes.lives(*each)], 10.0, self.said.read_text)
        return code

    def _look(self) -> None:
        while not self._over.wait(0.05):
            if self._process is not None:
                self.seen = self.seen | {(pid, processes.began(pid)) for pid in descendants(self._process.pid)}


def steps_of(folder: Path | str) -> list[dict[str, str]]:
    """All lines that a job's runs wrote, in order."""
    with (Path(folder) / "steps.csv").open() as file:
        return list(csv.DictReader(file))


def log_of(launch: Launch) -> str:
    """Returns the output of the run."""
    since = (Path(launch.folder) / LOG).read_text().partition(f"{LOG_HEADING} {launch.run}\n")[2]
    return since.partition(LOG_HEADING)[0]


# Agents


class Controller:
    """Context manager: a thread that agents dial in to.

    heard: (node, message) of all agents, in order. hellos: of those that are connected. farewells: why others left.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.heard: list[tuple[int, Message]] = []
        self.hellos: dict[int, Hello] = {}
        self.agent: subprocess.Popen[bytes] | None = None
        self.farewells: list[str] = []
        self._sockets: dict[int, web.WebSocketResponse] = {}
        self._numbers = itertools.count(1)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()), daemon=True)
        self._ready = threading.Event()

    def __enter__(self) -> Controller:
        self._thread.start()
        assert self._ready.wait(10)
        self.meeting = Meeting(url=f"http://127.0.0.1:{self._port}", token=TOKEN, folder=self.folder)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        if self.agent is not None:
            try:
                self.agent.wait(25)
            finally:
                self.agent.kill()

    def start_agent(self, slots: int = 4, *, token: str = TOKEN, hello: bool = True, program: Any = warm.Popen) -> Any:
        """Its output goes to agent.txt in the folder. program: in place of one that starts at once."""
        command = [sys.executable, "-m", "synergy_exec.agent", f"--url={self.meeting.url}", "--node=0"]
        command += [f"--slots={slots}", f"--parent={os.getpid()}"]
        with (self.folder / "agent.txt").open("wb") as output:
            self.agent = program(
                command, env=os.environ | {"SYNERGY_TOKEN": token}, stdout=output, stderr=output, start_new_session=True
            )
        if hello:
            self.until(lambda: self.hellos, AGENT_S)
            self.idle = children(self.agent.pid)  # what it has without any run
        return self.agent

    def workers(self) -> list[int]:
        (forkserver,) = forkservers(self.agent.pid)
        return children(forkserver)

    def close(self) -> None:
        """The controller is gone: its sockets close."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join(10)

    def say(self, message: Message, node: int = 0) -> None:
        asyncio.run_coroutine_threadsafe(self._sockets[node].send_str(encode(message)), self._loop).result(10)

    def until(self, true: Callable[[], object], timeout_s: float = RUN_S) -> Any:
        return wait_until(true, timeout_s, self.told)

    def wait(self, kind: type[Any], such: Callable[[Any], bool] = lambda _: True, *, timeout_s: float = RUN_S) -> Any:
        """Waits for the first message of this class that satisfies the condition."""
        heard = self.until(lambda: [each for _, each in self.heard if isinstance(each, kind) and such(each)], timeout_s)
        return heard[0]

    def told(self) -> str:
        logs = sorted(self.folder.rglob("*.txt"), key=lambda path: path.stat().st_mtime)
        return "\n".join([f"heard {self.heard[-10:]}", *(f"{log}:\n{log.read_text()[-3000:]}" for log in logs[-2:])])

    def launch(self, name: str, arguments: dict[str, Any] | None = None, *, world: int = 1, **more: Any) -> Launch:
        """Starts a run of that class of agents_jobs.py; more: fields of `Launch` that are to be otherwise."""
        run = next(self._numbers)
        address = Reserved(run=run, host="", port=0)
        if len(more.get("slots", range(world))) < world and "store_port" not in more:  # the others are elsewhere
            address = self.reserved(run)
        values = {"run": run, "job": run, "class": f"{JOBS}:{name}", "arguments": arguments or {}, "work": 20.0}
        values |= {"plan": Plan(data=world, micro_batch=4), "initial_batch": 4 * world, "world": world}
        values |= {"slots": list(range(world)), "store_host": address.host, "store_port": address.port}
        values |= {"folder": str(self.folder / f"job-{run}"), "report_s": 0.1}
        launch = launch_of(**values | more)
        Path(launch.folder).mkdir(exist_ok=True)
        begin_log(Path(launch.folder), run)
        self.say(launch)
        return launch

    def reserved(self, run: int) -> Reserved:
        self.say(Reserve(run=run, ports=""))
        return self.wait(Reserved, lambda each: each.run == run)

    def of(self, launch: Launch, kind: type[Any], node: int = 0) -> list[Any]:
        """The messages of this class about a run."""
        return [each for by, each in self.heard if by == node and isinstance(each, kind) and each.run == launch.run]

    def of_run(self, launch: Launch, kind: type[Any], such: Callable[[Any], bool] = lambda _: True, **more: Any) -> Any:
        """Waits for the first message of this class about a run that satisfies the condition."""
        return self.wait(kind, lambda each: each.run == launch.run and such(each), **more)

    def ended(self, launch: Launch, *, timeout_s: float = RUN_S) -> Ended:
        return self.of_run(launch, Ended, timeout_s=timeout_s)

    def ends(self, launch: Launch, outcome: str) -> Ended:
        ended = self.ended(launch)
        assert ended.outcome == outcome, f"{ended}\n{self.told()}"
        return ended

    def done(self, name: str, arguments: dict[str, Any] | None = None, **more: Any) -> Launch:
        """A run that reaches its work."""
        launch = self.launch(name, arguments, **more)
        self.ends(launch, "done")
        return launch

    def stop(self, launch: Launch) -> None:
        """Stops the run, which saves and pauses."""
        self.say(Stop(run=launch.run))
        self.ends(launch, "paused")

    def started(self, launch: Launch) -> Started:
        return self.of_run(launch, Started)

    def reached(self, launch: Launch, step: int) -> Report:
        """A report of that step or a later one."""
        return self.of_run(launch, Report, lambda each: each.step >= step)

    def saved(self, launch: Launch) -> Saved:
        return self.of(launch, Saved)[-1]

    async def _serve(self) -> None:
        self._end = asyncio.Event()
        application = web.Application()
        application.add_routes([web.get("/agents", self._agent)])
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self._port = runner.addresses[0][1]
        self._ready.set()
        await self._end.wait()
        for channel in list(self._sockets.values()):
            await channel.close()
        await runner.cleanup()

    async def _agent(self, request: web.Request) -> web.WebSocketResponse:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise web.HTTPUnauthorized
        channel = web.WebSocketResponse()
        await channel.prepare(request)
        hello = decode(await channel.receive_str())
        self._sockets[hello.node] = channel
        self.hellos[hello.node] = hello
        self.heard.append((hello.node, hello))
        while (received := await channel.receive()).type == WSMsgType.TEXT:
            self.heard.append((hello.node, decode(received.data)))
        del self.hellos[hello.node]
        self.farewells.append(received.extra or "")
        return channel
