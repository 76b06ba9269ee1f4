"""A testbed for profiling: agents of a backend, and runs on chosen slots."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from synergy_core.errors import InputError
from synergy_core.performance.planner.plan import Plan
from synergy_core.scheduling.jobs.cluster import Cluster, Share
from synergy_core.scheduling.jobs.record import Placed
from synergy_exec.backends import Backend, Meeting
from synergy_exec.job_file import JobFile
from synergy_exec.messages import Ended, Hello, Launch, Message, Report, Reporting, Started
from synergy_exec.nodes.agents import Agents, listening
from synergy_exec.nodes.runs import JobRun, Runs
from synergy_exec.settings import AgentSettings, RunSettings

ENDLESS = 1e15
"""Work, or seconds between checkpoints, that no run ever reaches."""


class TestbedError(InputError):
    """Agents are lost again and again, so nothing can be measured any more."""


class TestbedRun:
    """One run. launched_s: monotonic time at which it was requested. stepped: time of its first step. left: how it
    ended. reports: of rank 0.
    """

    def __init__(self, launch: Launch) -> None:
        loop = asyncio.get_running_loop()
        self.launch = launch
        self.launched_s = time.monotonic()
        self.stepped: asyncio.Future[float] = loop.create_future()
        self.left: asyncio.Future[Ended] = loop.create_future()
        self.reports: asyncio.Queue[Report] = asyncio.Queue()

    @property
    def out_of_memory(self) -> bool:
        """Whether it failed for lack of memory."""
        return self.left.done() and self.left.result().out_of_memory

    async def first_step(self) -> float:
        """Seconds from its launch until its first step was done. Raises InputError if the run ends before."""
        await self._unless_it_ends(self.stepped)
        return self.stepped.result() - self.launched_s

    async def report(self) -> Report:
        """The next report. Raises InputError if the run ends before."""
        next_one = asyncio.ensure_future(self.reports.get())
        try:
            await self._unless_it_ends(next_one)
            return next_one.result()
        finally:
            next_one.cancel()

    async def _unless_it_ends(self, future: asyncio.Future[Any]) -> None:
        await asyncio.wait((future, self.left), return_when=asyncio.FIRST_COMPLETED)
        if not future.done():
            raise InputError(self.left.result().reason or "the run ended by itself")


class Testbed:
    """The agents of a backend; lost agents are restarted.

    cluster: the agents' nodes. losses: number of lost agents; a measurement that fails during a loss is repeated.
    settings: of its runs.
    """

    def __init__(self, backend: Backend, folder: Path, agents: AgentSettings, settings: RunSettings) -> None:
        self.agents = Agents(backend, self, at_once=agents.agents_per_hour, patience_s=agents.nodes_s)
        self.settings, self._folder = settings, folder
        self._runs = Runs(lambda run: self._mine[run.number].launch, agents.ports or "")
        self._mine: list[TestbedRun] = []
        self._broken: TestbedError | None = None
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.losses = 0
        self.cluster: Cluster

    def start(
        self, file: JobFile, job: int, placed: Placed, plan: Plan, reporting: Reporting, share: Share | None = None
    ) -> TestbedRun:
        """Launches a run as soon as its slots are free. The run trains without end.

        job: a number chosen by the caller; runs with the same number run one after another and share a folder. Raises
        TestbedError.
        """
        self.check()
        number = len(self._mine)
        assert file.trained is not None
        trained = dataclasses.replace(file.trained, weights="", tensorboard=False)
        launch = Launch(
            run=number,
            job=job,
            file=dataclasses.replace(file, work=ENDLESS, trained=trained),
            plan=plan,
            folder=str(self.folder_of(job)),
            settings=dataclasses.replace(self.settings.of_job(file.precision), checkpoint_interval_s=ENDLESS),
            reporting=reporting,
            observed=False,
        )
        self._mine.append(TestbedRun(launch))
        self._runs.start(JobRun(number, job, placed, plan, share))
        self._flush()
        return self._mine[-1]

    async def stop(self, run: TestbedRun) -> float:
        """Stops a run with a checkpoint; returns the seconds that took. Raises InputError if the run fails."""
        began_s = time.monotonic()
        self._runs.stop(run.launch.run)
        self._flush()
        ended = await run.left
        if ended.outcome not in ("paused", "done"):
            raise InputError(ended.reason)
        return time.monotonic() - began_s

    async def kill(self, *runs: TestbedRun) -> None:
        """Kills runs without saving and waits until none of their processes is left."""
        for run in runs:
            self._runs.kill(run.launch.run)
        self._flush()
        for run in runs:
            await run.left

    def folder_of(self, job: int) -> Path:
        return self._folder / "jobs" / str(job)

    def retune(self, run: TestbedRun, plan: Plan) -> None:
        """Changes the micro-batch and accumulation of a run."""
        run.launch = dataclasses.replace(run.launch, plan=plan)
        self._runs.retune(run.launch.run, plan)
        self._flush()

    def reshare(self, run: TestbedRun, share: Share) -> None:
        """Changes the CPUs and memory of a run that was started with a share."""
        self._runs.reshare(run.launch.run, share)
        self._flush()

    def check(self) -> None:
        """Raises TestbedError if agents were lost too often."""
        if self._broken is not None:
            raise self._broken

    # Messages of agents (`nodes.agents.Listener`)

    def hello(self, hello: Hello) -> None:
        pass

    def agent_came(self, node: int) -> None:
        self._runs.agent_came(node)
        self._flush()

    def heard(self, node: int, message: Message) -> None:
        if isinstance(message, Started | Report) and 0 <= message.run < len(self._mine):
            run = self._mine[message.run]
            if isinstance(message, Report):
                run.reports.put_nowait(message)
            elif not run.stepped.done():
                run.stepped.set_result(time.monotonic())
        self._runs.heard(node, message)
        self._flush()

    def agent_left(self, node: int) -> None:
        self.losses += 1
        self._runs.agent_left(node)
        self._flush()

    def fail(self, error: Exception) -> None:
        self._broken = self._broken or TestbedError(str(error) or repr(error))
        if not self._over.done():
            self._over.set_result(None)
        for run in self._mine:
            if not run.left.done():
                run.left.set_result(Ended(run=run.launch.run, outcome="lost", reason=str(self._broken)))

    def _flush(self) -> None:
        self.agents.say(self._runs.outbox)
        for each in self._runs.happened:
            left = self._mine[each.run.number].left
            if left.done():
                continue
            if each.ended is not None:
                left.set_result(each.ended)
            elif each.what == "dropped":
                reason = "it was told to leave before it began"
                left.set_result(Ended(run=each.run.number, outcome="lost", reason=reason))
        self._runs.happened.clear()

    async def gather(self, meeting: Meeting) -> None:
        """Waits until all agents are there. Raises InputError if they do not connect."""
        cluster = await self.agents.gather(meeting, self._over)
        self.check()
        assert cluster is not None
        self.cluster = cluster
        for node in self.agents.there():
            self._runs.agent_came(node)


@asynccontextmanager
async def testbed(
    backend: Backend, folder: Path, agents: AgentSettings, settings: RunSettings
) -> AsyncIterator[Testbed]:
    """A testbed of all agents of a backend until the block ends; no process is left afterwards."""
    made = Testbed(backend, folder, agents, settings)
    async with listening(made.agents, folder, host=agents.host, port=agents.port) as meeting:
        try:
            await made.gather(meeting)
            yield made
        finally:
            await made.agents.dismiss(agents.leave_s)
