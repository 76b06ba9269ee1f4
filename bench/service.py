"""What a controller costs, and how long people wait for it: 20 and 200 jobs, 500 at one go, 10,000 in its queue.

python bench/service.py [POLICY…]                         # minutes: 3; by default las and synergy

Controller and agents are processes of their own, on this machine. Agents only pretend: they answer as real ones do, and
report of every job once a second, as workers do, which sleep. So the controller's CPU seconds (by /proc) are its own,
whatever jobs train, and two cores suffice. Exit code 1 where a goal is missed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from synergy_core.jobs.testbed_profiles import Profile
from synergy_core.policies import get_policy
from synergy_exec.backends import Meeting
from synergy_exec.commands._asking import Client, client_for, running
from synergy_exec.controller.controller import Controller
from synergy_exec.messages import (
    Ended,
    Hello,
    Kill,
    Launch,
    Message,
    Report,
    Reserve,
    Reserved,
    Shutdown,
    Started,
    Stop,
)
from synergy_exec.settings import Settings
from synergy_exec.wire import decode, encode

NODES, SLOTS = 25, 8
FEW, ALL, BURST, QUEUED = 20, NODES * SLOTS, 500, 10_000
WATCHED_S, SETTLING_S = 15.0, 8.0
SUBMITTING_S = 60.0
"""On a machine that is busy with something else not all are submitted; how many were is printed."""
TRIES, AT_ONCE = 5, 16
LIST_S, DECISION_S, FEW_CPU, ALL_CPU = 0.2, 1.0, 0.01, 0.05
"""The goals."""
JOB: dict[str, Any] = {"class": "synergy_exec.examples.mlp:Mlp", "initial_batch": 32, "max_batch": 32, "work": 1e9}


class Figure(NamedTuple):
    """A line of what is printed. goal: not above that; None where there is none."""

    what: str
    value: float
    unit: str
    goal: float | None = None

    def __str__(self) -> str:
        goal = "" if self.goal is None else f"goal {self.goal:g} {self.unit}, {'MET' if self.met else 'MISSED'}"
        return f"  {self.what:58} {self.value:10.3f} {self.unit:7} {goal}".rstrip()

    @property
    def met(self) -> bool:
        return self.goal is None or self.value <= self.goal


# The agents


async def agent(session: aiohttp.ClientSession, url: str, node: int) -> None:
    """One node that pretends, until it is told to leave."""
    launched: dict[int, tuple[Launch, float]] = {}
    async with session.ws_connect(f"{url}/agents", autoping=True) as channel:

        async def say(message: Message) -> None:
            await channel.send_str(encode(message))

        await say(Hello(node=node, slots=SLOTS, gpu_type="cpu", host=socket.gethostname(), pid=os.getpid()))
        due_s = time.monotonic() + 1.0 + node / NODES  # not all at the same instant
        while True:
            with contextlib.suppress(TimeoutError):
                heard = await channel.receive(timeout=max(0.001, due_s - time.monotonic()))
                if heard.type != aiohttp.WSMsgType.TEXT:
                    return
                told = decode(heard.data)
                for answer in answers(told, launched):
                    await say(answer)
                if isinstance(told, Shutdown):
                    return
            if time.monotonic() >= due_s:
                due_s += 1.0
                for launch, began_s in launched.values():
                    if launch.first_rank == 0:
                        await say(report(launch, time.monotonic() - began_s))


def answers(message: Message, launched: dict[int, tuple[Launch, float]]) -> Iterator[Message]:
    """What a real agent says to that in the end."""
    if isinstance(message, Reserve):
        yield Reserved(run=message.run, host="127.0.0.1", port=20_000 + message.run % 40_000)
    elif isinstance(message, Launch):
        launched[message.run] = message, time.monotonic()
        if message.first_rank == 0:
            parts = {"launch_s": 0.1, "build_s": 0.1, "load_s": 0.1, "first_step_s": 0.1}
            yield Started(run=message.run, step=0, samples=0, work=0.0, **parts)
    elif isinstance(message, Stop | Kill) and launched.pop(message.run, None) is not None:
        yield Ended(run=message.run, outcome="paused" if isinstance(message, Stop) else "lost", reason="")


def report(launch: Launch, seconds: float) -> Report:
    """A fifth of a step on one slot takes as long on many. Every run begins anew, for nothing is saved."""
    plan = launch.plan
    step_s = 0.02 + 0.08 * plan.micro_batch * plan.accumulation / JOB["initial_batch"]
    steps = int(seconds / step_s)
    fixed = {"sync_s": 0.0, "grad_sqr": 1.0, "grad_var": 4.0, "memory_bytes": 300_000_000}
    return Report(
        run=launch.run,
        step=steps,
        samples=steps * plan.global_batch,
        work=float(steps),
        loss=1.0 / (1.0 + seconds),
        micro_batch=plan.micro_batch,
        accumulation=plan.accumulation,
        step_s=step_s,
        steps=10,
        **fixed,  # type: ignore[arg-type]
    )


async def agents(url: str, token_file: str) -> None:
    """All of them."""
    headers = {"Authorization": f"Bearer {Path(token_file).read_text(encoding='utf-8').strip()}"}
    async with aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(agent(session, url, node) for node in range(NODES)))


# The controller


class Pretended:
    """A backend of such agents, all in one process."""

    nodes = NODES

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self, node: int, meeting: Meeting) -> None:
        if self._process is None:
            command = [sys.executable, __file__, "--agents", meeting.url, str(meeting.folder / "token")]
            self._process = subprocess.Popen(command)

    def lost(self) -> dict[int, str]:
        gone = self._process is not None and self._process.poll() is not None
        return dict.fromkeys(range(NODES), "their process ended") if gone else {}

    async def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def control(folder: Path, policy: str) -> None:
    """A service until it is interrupted."""
    settings = Settings(serve=True, leave_s=5.0)
    asyncio.run(Controller(get_policy(policy), [], Pretended(), settings, folder, Profile()).run())


@contextlib.contextmanager
def service(folder: Path, policy: str) -> Iterator[tuple[Client, int]]:
    """A controller whose agents are there, and its process's number."""
    process = subprocess.Popen([sys.executable, __file__, "--controller", str(folder), policy])
    try:
        until_s = time.monotonic() + 60.0
        while time.monotonic() < until_s:
            assert process.poll() is None, "the controller has ended"
            if running(folder):
                client = client_for(folder, None)
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(f"{client.url}/healthz").close()
                    break
            time.sleep(0.2)
        yield client, process.pid
    finally:
        process.terminate()
        try:
            process.wait(30.0)
        except subprocess.TimeoutExpired:
            process.kill()


# What is measured


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def used(pid: int) -> float:
    """Of a core, over a while."""
    began_s, before_s = time.monotonic(), cpu_s(pid)
    time.sleep(WATCHED_S)
    return (cpu_s(pid) - before_s) / (time.monotonic() - began_s)


def submitted(client: Client, first: int, last: int, most_s: float = float("inf")) -> tuple[float, int]:
    """Seconds until these jobs were acknowledged, many asked for at once, and how many: none is after so long."""
    began_s = time.monotonic()

    def submit(number: int) -> bool:
        if time.monotonic() - began_s > most_s:
            return False
        client.ask("POST", "/jobs", {**JOB, "name": f"j{number}"})
        return True

    with ThreadPoolExecutor(AT_ONCE) as pool:
        count = sum(pool.map(submit, range(first, last)))
    return time.monotonic() - began_s, count


def answered_s(client: Client, path: str) -> float:
    """Median seconds until all of an answer is there."""
    headers = {"Authorization": f"Bearer {client.token}"}
    took_s = []
    for _ in range(TRIES):
        began_s = time.monotonic()
        with urllib.request.urlopen(urllib.request.Request(client.url + path, headers=headers)) as answer:
            answer.read()
        took_s.append(time.monotonic() - began_s)
    return statistics.median(took_s)


def decisions_s(folder: Path, since: int) -> list[float]:
    """What decisions took, after the first so many."""
    connection = sqlite3.connect(f"file:{folder / 'journal.sqlite'}?mode=ro", uri=True)
    try:
        rows = connection.execute("SELECT decision_s FROM decisions ORDER BY serial").fetchall()
    finally:
        connection.close()
    return [each for (each,) in rows[since:]]


def decided(folder: Path, label: str, since: int) -> list[Figure]:
    """Median and longest of the decisions since then; a while is waited for two."""
    until_s = time.monotonic() + 30.0
    while len(found := decisions_s(folder, since)) < 2 and time.monotonic() < until_s:
        time.sleep(0.5)
    median = statistics.median(found) if found else float("inf")
    longest = max(found, default=float("inf"))
    return [Figure(f"{label}: a decision, median of {len(found)}", median, "s", DECISION_S),
            Figure(f"{label}: the longest", longest, "s")]  # fmt: skip


def measured(policy: str, folder: Path) -> Iterator[Figure]:
    """All of it under one policy, as it comes."""
    with service(folder, policy) as (client, pid):
        for many, before, goal in ((FEW, 0, FEW_CPU), (ALL, FEW, ALL_CPU)):
            submitted(client, before, many)
            time.sleep(SETTLING_S)
            yield Figure(f"{many} jobs that run: CPU of the controller", used(pid), "cores", goal)
        count = len(decisions_s(folder, 0))
        yield Figure(f"{BURST} jobs submitted at one go, all acknowledged", submitted(client, ALL, ALL + BURST)[0], "s")
        yield from decided(folder, f"{BURST} more", count)
        took_s, more = submitted(client, ALL + BURST, QUEUED, SUBMITTING_S)
        jobs = f"{ALL + BURST + more:,} jobs"
        yield Figure(f"to {jobs}: submitted in a second", more / took_s, "jobs/s")
        count = len(decisions_s(folder, 0))
        for path in ("/jobs", "/state?most=200", "/metrics"):
            yield Figure(f"{jobs}: GET {path}", answered_s(client, path), "s", LIST_S)
        time.sleep(SETTLING_S)
        yield from decided(folder, jobs, count)
        assert len(client.ask("GET", "/jobs")) == ALL + BURST + more


def main(policies: list[str]) -> int:
    """Prints the figures; returns the exit code."""
    met = True
    print(f"{NODES} pretended nodes with {SLOTS} slots; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    for policy in policies:
        print(f"\npolicy={policy}")
        with tempfile.TemporaryDirectory(prefix="synergy-service-") as folder:
            for figure in measured(policy, Path(folder)):
                print(figure, flush=True)
                met &= figure.met
    return 0 if met else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--agents"]:
        asyncio.run(agents(*sys.argv[2:]))
    elif sys.argv[1:2] == ["--controller"]:
        control(Path(sys.argv[2]), sys.argv[3])
    else:
        sys.exit(main(sys.argv[1:] or ["las", "synergy"]))
