"""A testbed put at one caller's disposal: agents of a backend, and runs started on slots of one's choice."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from pathlib import Path

from synergy_core.cluster import Cluster, Share
from synergy_core.errors import InputError
from synergy_core.jobs.record import Placed
from synergy_core.planner.plan import Plan
from synergy_core.units import GB
from synergy_exec.backends import Backend, Meeting
from synergy_exec.messages import (
    Failure,
    Granted,
    Hello,
    Launch,
    Message,
    Outcome,
    Rebuild,
    Report,
    Started,
)
from synergy_exec.nodes.agents import Agents
from synergy_exec.nodes.listening import listening
from synergy_exec.nodes.runs import Run, Runs
from synergy_exec.settings import Settings


class TestbedError(InputError):
    """Agents are lost again and again, so that nothing can be measured any more."""


class Copy:
    """One copy of a job, and what it has reported. left: how its run ended.

    has_started: its first step is done; stepped_s: when that was, on the monotonic clock. last: the newest report that
    was read.
    """

    def __init__(self, left: asyncio.Future[tuple[Outcome, str]]) -> None:
        self.left = left
        self.stepped_s = float("nan")
        self.reports: asyncio.Queue[Report] = asyncio.Queue()
        self.last: Report | None = None
        self._stepped: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def has_started(self) -> bool:
        return self._stepped.done()

    async def first_step(self) -> None:
        """Waits until its first step is done. Raises InputError if the run ends before."""
        await asyncio.wait((self._stepped, self.left), return_when=asyncio.FIRST_COMPLETED)
        self._check()

    def start(self) -> None:
        """Its first step is done."""
        self.stepped_s = time.monotonic()
        self._stepped.set_result(None)

    async def report(self) -> Report:
        """The next report. Raises InputError if the run ends before."""
        getting = asyncio.ensure_future(self.reports.get())
        await asyncio.wait((getting, self.left), return_when=asyncio.FIRST_COMPLETED)
        if not getting.done():
            getting.cancel()
            self._check()
        self.last = await getting
        return self.last

    def _check(self) -> None:
        if self.left.done():
            raise InputError(self.left.result()[1] or "the run ended by itself")


class RunOnTestbed(Copy):
    """One run. launched_s: when it was asked for, on the monotonic clock.

    copies: the copies of its job; a run that was not rebuilt is its own only copy. granted: by rank, the CPUs that it
    was last granted. out_of_memory: whether it failed for lack of memory.
    """

    def __init__(self, testbed: Testbed, number: int) -> None:
        super().__init__(asyncio.get_running_loop().create_future())
        self._testbed = testbed
        self.number = number
        self.launched_s = time.monotonic()
        self.copies: list[Copy] = [self]
        self.granted: dict[int, Granted] = {}
        self.out_of_memory = False

    def standstill_s(self, step_s: float) -> float:
        """Seconds from its launch until all copies had started their first step, which took `step_s`."""
        return max(copy.stepped_s for copy in self.copies) - self.launched_s - step_s

    def retune(self, plan: Plan, steps: int = 0, seconds: float = 0.0) -> None:
        """Makes it go on with another micro-batch or accumulation. steps, seconds: see `Rebuild`."""
        self._testbed.retune(self.number, plan, steps, seconds)

    def rebuild(self, plan: Plan, copies: list[list[int]], steps: int, seconds: float) -> None:
        """Makes it build its model again; see `Rebuild`. Its copies are new ones, which have reported nothing."""
        self.copies = [Copy(self.left) for _ in copies]
        self._testbed.rebuild(Rebuild(run=self.number, plan=plan, copies=copies, steps=steps, seconds=seconds))

    def reshare(self, share: Share) -> None:
        """Has it go on with other CPUs and memory; it was started with some."""
        self._testbed.reshare(self.number, share)

    async def stop(self) -> float:
        """Has it save and leave; the seconds until it has."""
        began_s = time.monotonic()
        self._testbed.stop(self.number)
        outcome, reason = await self.left
        if outcome not in ("paused", "done"):
            raise InputError(reason)
        return time.monotonic() - began_s

    def kill(self) -> None:
        """Has it leave at once, unsaved; its slots are free again when it has."""
        self._testbed.kill(self.number)

    def lose(self, reason: str) -> None:
        """Fails what waits for the run, of which nothing will be heard any more."""
        if not self.left.done():
            self.left.set_result(("lost", reason))


class Testbed:
    """The agents of a backend; where one is lost another is started.

    cluster: what they make. losses: of agents; what was measured across one does not count.
    """

    def __init__(self, backend: Backend, launch_of: Callable[[Run], Launch], settings: Settings) -> None:
        self.agents = Agents(backend, self, at_once=settings.agents_per_hour, patience_s=settings.nodes_s)
        self._settings = settings
        self._runs = Runs(launch_of, settings.ports or "")
        self._mine: dict[int, RunOnTestbed] = {}
        self._broken: TestbedError | None = None
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.losses = 0
        self.cluster: Cluster

    def start(self, job: int, placed: Placed, plan: Plan, share: Share | None = None) -> RunOnTestbed:
        """Launches a run there, as soon as its slots are free. Raises TestbedError."""
        self.check()
        number = len(self._mine)
        mine = self._mine[number] = RunOnTestbed(self, number)
        self._runs.start(Run(number, job, placed, plan, share))
        self._flush()
        return mine

    def stop(self, number: int) -> None:
        """Has a run save and leave."""
        self._runs.stop(number)
        self._flush()

    def kill(self, number: int) -> None:
        """Has a run leave at once, unsaved."""
        self._runs.kill(number)
        self._flush()

    def retune(self, number: int, plan: Plan, steps: int = 0, seconds: float = 0.0) -> None:
        """Has a run go on at another micro-batch or accumulation."""
        self._runs.retune(number, plan, steps, seconds)
        self._flush()

    def rebuild(self, order: Rebuild) -> None:
        """Makes a run build its model again."""
        self._runs.rebuild(order)
        self._flush()

    def reshare(self, number: int, share: Share) -> None:
        """Has a run go on with other CPUs and memory."""
        self._runs.reshare(number, share)
        self._flush()

    def cores(self, node: int) -> int:
        """CPU cores of a node of the cluster, as its agent says."""
        return self.agents.there()[node].cpus

    def memory_bytes(self, nodes: Collection[int]) -> float:
        """That a job may use for each of its slots on these nodes, by the settings; inf where one keeps no limit."""
        limit_gb = self._settings.memory_gb_per_slot
        there = [hello for node, hello in self.agents.there().items() if node in nodes]
        return math.inf if limit_gb is None or any(each.no_limit for each in there) else limit_gb * GB

    def check(self) -> None:
        """Raises TestbedError where nothing can be measured here any more."""
        if self._broken is not None:
            raise self._broken

    # What agents do (`nodes.agents.Listener`)

    def hello(self, hello: Hello) -> None:
        pass

    def agent_came(self, node: int) -> None:
        self._runs.agent_came(node)
        self._flush()

    def heard(self, node: int, message: Message) -> None:
        if isinstance(message, Started) and message.run in self._mine:
            self._mine[message.run].copies[message.copy].start()
        if isinstance(message, Report) and message.run in self._mine:
            copies = self._mine[message.run].copies
            # A copy that has not started did not send this: it is the last report under the plan before.
            if message.copy < len(copies) and copies[message.copy].has_started:
                copies[message.copy].reports.put_nowait(message)
        if isinstance(message, Granted) and message.run in self._mine:
            self._mine[message.run].granted[message.rank] = message
        if isinstance(message, Failure) and message.run in self._mine:
            self._mine[message.run].out_of_memory |= message.out_of_memory
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
        for each in self._mine.values():
            each.lose(str(self._broken))

    def _flush(self) -> None:
        self.agents.say(self._runs.outbox)
        for each in self._runs.happened:
            mine = self._mine[each.run.number]
            if each.what == "left" and not mine.left.done():
                mine.left.set_result((each.outcome, each.reason))
            elif each.what == "dropped":
                mine.lose("it was told to leave before it began")
        self._runs.happened.clear()

    async def gather(self, meeting: Meeting) -> None:
        """Waits until all agents are there. Raises InputError where they do not come."""
        cluster = await self.agents.gather(meeting, self._over)
        self.check()
        assert cluster is not None
        self.cluster = cluster
        for node in self.agents.there():
            self._runs.agent_came(node)


@asynccontextmanager
async def testbed(
    backend: Backend, folder: Path, launch_of: Callable[[Run], Launch], settings: Settings
) -> AsyncIterator[Testbed]:
    """All agents of a backend, until the block ends; then no process of them is left."""
    made = Testbed(backend, launch_of, settings)
    async with listening(made.agents, folder, host=settings.host, port=settings.port) as meeting:
        try:
            await made.gather(meeting)
            yield made
        finally:
            await made.agents.dismiss(settings.leave_s)
