"""What the executor's controller costs, and how long people wait for it: docs/executor.md.

Controller and agents are processes of their own. The agents only pretend: they answer as real ones do, and report on
every job once a second, but train nothing, so the controller's CPU seconds do not depend on what jobs compute.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from runner.experiment import Experiment, Result, Results, measurement
from runner.tables import met, number, table

NODES, SLOTS = 25, 8
FEW_JOBS, SLOT_JOBS, BURST_JOBS, QUEUED_JOBS = 20, NODES * SLOTS, 500, 10_000
WATCHED_S, SETTLING_S = 15.0, 8.0
CONNECTIONS, TRIES = 16, 5
MAX_CORES = {FEW_JOBS: 0.01, SLOT_JOBS: 0.05}
MAX_DECISION_S, MAX_REQUEST_S = 1.0, 0.2
JOB: dict[str, Any] = {"class": "synergy_exec.examples.mlp:Mlp", "initial_batch": 32, "max_batch": 32, "work": 1e9}
STEP_S = 0.1


class _Node:
    """What a node that pretends has to say."""

    def __init__(self) -> None:
        self._launched: dict[int, tuple[Any, float]] = {}

    def answer(self, told: Any) -> Any:
        """What a real agent says to a message in the end; None for nothing."""
        from synergy_exec.messages import Ended, Kill, Launch, Reserve, Reserved, Started, Stop

        if isinstance(told, Reserve):
            return Reserved(run=told.run, host="127.0.0.1", port=20_000 + told.run % 40_000)
        if isinstance(told, Launch):
            self._launched[told.run] = told, time.monotonic()
            parts = {"launch_s": 0.1, "build_s": 0.1, "load_s": 0.1, "first_step_s": 0.1}
            return Started(run=told.run, step=0, samples=0, work=0.0, **parts) if told.first_rank == 0 else None
        if isinstance(told, Stop | Kill) and self._launched.pop(told.run, None):
            return Ended(run=told.run, outcome="paused" if isinstance(told, Stop) else "lost", reason="")
        return None

    def reports(self) -> Iterator[Any]:
        """Of all its runs."""
        from synergy_exec.messages import Report

        seen: dict[str, Any] = {"step_s": STEP_S, "steps": 10, "sync_s": 0.0, "grad_sqr": 1.0, "grad_var": 4.0}
        for launch, began_s in self._launched.values():
            plan, seconds = launch.plan, time.monotonic() - began_s
            steps = int(seconds / STEP_S)
            cut = {"micro_batch": plan.micro_batch, "accumulation": plan.accumulation}
            done = {"step": steps, "samples": steps * plan.global_batch, "work": float(steps)}
            if launch.first_rank == 0:
                yield Report(run=launch.run, loss=1 / (1 + seconds), memory_bytes=3e8, **done, **cut, **seen)


async def _agent(session: Any, url: str, number: int) -> None:
    """A node that pretends, until it is told to leave."""
    from synergy_exec.messages import Hello, Shutdown
    from synergy_exec.wire import decode, encode

    node = _Node()
    async with session.ws_connect(f"{url}/agents") as channel:
        hello = Hello(node=number, slots=SLOTS, gpu_type="cpu", host=socket.gethostname(), pid=os.getpid())
        await channel.send_str(encode(hello))
        due_s = time.monotonic() + 1.0 + number / NODES  # not all at the same instant
        while True:
            with contextlib.suppress(TimeoutError):
                heard = await channel.receive(timeout=max(0.001, due_s - time.monotonic()))
                if not isinstance(heard.data, str) or isinstance(told := decode(heard.data), Shutdown):
                    return
                if (said := node.answer(told)) is not None:
                    await channel.send_str(encode(said))
            if time.monotonic() >= due_s:
                due_s += 1.0
                for report in node.reports():
                    await channel.send_str(encode(report))


def _agents(url: str, token: str) -> None:
    import aiohttp

    async def all_of_them() -> None:
        headers = {"Authorization": f"Bearer {token}"}
        async with aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=0)) as session:
            await asyncio.gather(*(_agent(session, url, number) for number in range(NODES)))

    asyncio.run(all_of_them())


class Pretended:
    """A backend of such agents, all in one process."""

    nodes = NODES
    _process: SpawnProcess | None = None

    async def start(self, node: int, meeting: Any) -> None:
        if self._process is None:
            token = (meeting.folder / "token").read_text(encoding="utf-8").strip()
            self._process = _started(_agents, meeting.url, token)

    def lost(self) -> dict[int, str]:
        is_gone = self._process is not None and not self._process.is_alive()
        return dict.fromkeys(range(NODES), "their process ended") if is_gone else {}

    async def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()


def _started(function: Any, *arguments: Any) -> SpawnProcess:
    process = multiprocessing.get_context("spawn").Process(target=function, args=arguments)
    process.start()
    return process


def _control(folder: Path, policy: str) -> None:
    from synergy_core.jobs.testbed_profiles import Profile
    from synergy_core.policies import get_policy
    from synergy_exec.controller.controller import Controller
    from synergy_exec.settings import Settings

    settings = Settings(serve=True, leave_s=5.0)
    asyncio.run(Controller(get_policy(policy), [], Pretended(), settings, folder, Profile()).run())


@contextlib.contextmanager
def _service(folder: Path, policy: str) -> Iterator[tuple[Any, int]]:
    """A client of a controller that has answered, and the number of the controller's process."""
    from synergy_core.errors import InputError
    from synergy_exec.commands._asking import client_for

    process = _started(_control, folder, policy)
    try:
        for _ in range(300):
            time.sleep(0.2)
            with contextlib.suppress(InputError):
                client = client_for(folder, None)
                client.ask("GET", "/jobs")
                break
        yield client, process.pid or 0
    finally:
        process.terminate()
        process.join(30.0)
        process.kill()


def _cores_used(pid: int) -> float:
    """CPU seconds of a process ÷ seconds, over a while."""
    from synergy_exec.worker import processes

    began_s, before_s = time.monotonic(), processes.cpu_s({pid})
    time.sleep(WATCHED_S)
    return (processes.cpu_s({pid}) - before_s) / (time.monotonic() - began_s)


def _submit(client: Any, first: int, last: int) -> float:
    """Seconds until these jobs were acknowledged."""
    began_s = time.monotonic()
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        list(pool.map(lambda number: client.ask("POST", "/jobs", {**JOB, "name": f"j{number}"}), range(first, last)))
    return time.monotonic() - began_s


def _answered_s(client: Any, path: str) -> float:
    """Median seconds of a request."""
    taken = []
    for _ in range(TRIES):
        began_s = time.monotonic()
        client.ask("GET", path)
        taken.append(time.monotonic() - began_s)
    return statistics.median(taken)


def _decisions_s(folder: Path) -> list[float]:
    from synergy_exec.controller.journal import open_journal

    with contextlib.closing(open_journal(folder)) as journal:
        taken: list[float] = journal.decisions().decisions().decision_s.tolist()
    return taken


def service_costs(policy: str) -> Result:
    """Seconds and cores by what was measured, with 20 and 200 running jobs and 10,000 known ones."""
    found: Result = {}
    with tempfile.TemporaryDirectory(prefix="synergy-service-") as name, _service(Path(name), policy) as (client, pid):
        for jobs, before in ((FEW_JOBS, 0), (SLOT_JOBS, FEW_JOBS)):
            _submit(client, before, jobs)
            time.sleep(SETTLING_S)
            found[f"cores with {jobs} jobs"] = _cores_used(pid)
        for jobs, before in ((SLOT_JOBS + BURST_JOBS, SLOT_JOBS), (QUEUED_JOBS, SLOT_JOBS + BURST_JOBS)):
            decided = len(_decisions_s(Path(name)))
            found[f"submitting to {jobs} jobs"] = _submit(client, before, jobs)
            time.sleep(SETTLING_S)
            found[f"decisions with {jobs} jobs"] = _decisions_s(Path(name))[decided:]
        for path in ("/jobs", "/state?most=200"):
            found[f"GET {path}"] = _answered_s(client, path)
        assert len(client.ask("GET", "/jobs")) == QUEUED_JOBS
    return found


SERVICE_TASK = measurement(service_costs, is_timed=True, policies=("synergy",), policy="synergy")


def _service_tables(results: Results) -> dict[str, str]:
    found, rows = results[SERVICE_TASK], []

    def row(what: str, value: float, unit: str, goal: float | None = None) -> None:
        rows.append(
            [what, f"{number(value, 3)} {unit}", "" if goal is None else f"{goal:g} {unit}: {met(value <= goal)}"]
        )

    for jobs, goal in MAX_CORES.items():
        row(f"CPU of the controller, {jobs} running jobs", found[f"cores with {jobs} jobs"], "cores", goal)
    for jobs, more in ((SLOT_JOBS + BURST_JOBS, BURST_JOBS), (QUEUED_JOBS, QUEUED_JOBS - SLOT_JOBS - BURST_JOBS)):
        row(f"{more:,} jobs submitted at once, all acknowledged", found[f"submitting to {jobs} jobs"], "s")
        decisions_s = found[f"decisions with {jobs} jobs"] or [float("nan")]
        row(f"a decision with {jobs:,} jobs, median", statistics.median(decisions_s), "s", MAX_DECISION_S)
        row("the longest of them", max(decisions_s), "s")
    for path in ("/jobs", "/state?most=200"):
        row(f"`GET {path}` with {QUEUED_JOBS:,} jobs", found[f"GET {path}"], "s", MAX_REQUEST_S)
    return {"costs": table(("", "measured", "goal, at most"), rows)}


SERVICE = Experiment(lambda: [SERVICE_TASK], _service_tables)
