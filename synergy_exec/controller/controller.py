"""The controller put on a clock and a port: arrivals, rounds, agents, people; one thread, asyncio."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from aiohttp import web

from synergy_core.errors import InputError
from synergy_core.jobs.testbed_profiles import Profile
from synergy_core.policies import Policy, SharingPolicy
from synergy_core.units import MB, on_grid
from synergy_exec.backends import Backend, Meeting
from synergy_exec.controller import processes
from synergy_exec.controller.api import routes
from synergy_exec.controller.execution import Execution
from synergy_exec.controller.journal import Journal
from synergy_exec.controller.resume import resume
from synergy_exec.job_file import MOST_BYTES, JobFile
from synergy_exec.messages import Hello, Message
from synergy_exec.nodes.agents import Agents
from synergy_exec.nodes.links import AgentLink
from synergy_exec.nodes.listening import Listener, listening
from synergy_exec.settings import Settings
from synergy_runs.atomic import atomic_file

LATE_S = 0.25
"""A round that is late by no more than this is not left out."""


class Arrival(NamedTuple):
    """A row of the workload: when it arrives, seconds from the start, and what."""

    submit_s: float
    name: str
    file: JobFile


class Controller(Listener):
    """One policy on one backend; `run` once. execution: None until all agents are there. closing: it is ending.

    No other may work in its folder meanwhile: `folders.lock`. The clock stands still while no controller runs: a
    resumed run goes on at the time of its last fact.
    """

    def __init__(
        self,
        policy: Policy,
        arrivals: Sequence[Arrival],
        backend: Backend,
        settings: Settings,
        folder: Path,
        profile: Profile,
    ) -> None:
        self.policy, self.arrivals = policy, arrivals
        self.agents = Agents(backend)
        self.settings, self.folder, self.profile = settings, folder, profile
        self.execution: Execution | None = None
        self.interrupted = False
        self._something = asyncio.Event()
        self._arrived_all = False
        self.closing = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._origin_s, self._began_s, self._last_s = 0.0, time.monotonic(), 0.0

    def now_s(self) -> float:
        """Seconds since the start, on the grid; never less than before."""
        self._last_s = max(self._last_s, on_grid(self._origin_s + time.monotonic() - self._began_s))
        return self._last_s

    async def run(self) -> None:
        """Runs until every job has ended (serve: until it is interrupted). Raises InputError for what a user can mend.

        After an interruption `interrupted` is true; the journal holds what is needed to go on.
        """
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        journal = Journal(self.folder / "journal.sqlite")
        try:
            await asyncio.to_thread(self._wait_for_old_agents, journal.agents())
            journal.agents_left()
            journal.commit()
            async with listening(
                self,
                self.folder,
                host=self.settings.host,
                port=self.settings.port,
                routes=routes(self),
                most_bytes=MOST_BYTES,
            ) as self.meeting:
                self._announce(self.meeting)
                for number in (signal.SIGINT, signal.SIGTERM):
                    asyncio.get_running_loop().add_signal_handler(number, self._interrupt)
                try:
                    await self._begin(journal)
                    self._task(self._arrive())
                    self._task(self._rounds())
                    await self._over
                finally:
                    await self._leave()
        finally:
            (self.folder / "controller.json").unlink(missing_ok=True)
            journal.set_meta("over", self.execution is not None and self._over_with_it())
            journal.agents_left()
            journal.close()

    # Beginning

    def _wait_for_old_agents(self, agents: list[tuple[int, str, int, int]]) -> None:
        """Agents of a controller that died save and leave by themselves; those that do not are killed."""
        here = [(pid, since) for _, host, pid, since in agents if host == socket.gethostname()]
        for pid in processes.wait_or_kill(here, patience_s=self.settings.leave_s):
            print(f"an agent of an earlier controller, process {pid}, had to be killed", file=sys.stderr)

    def _announce(self, meeting: Meeting) -> None:
        """Writes the file by which commands find this controller."""
        me = {"url": meeting.url, "host": socket.gethostname(), "pid": os.getpid()}
        with atomic_file(self.folder / "controller.json") as partial:
            partial.write_text(json.dumps({**me, "began": processes.began(os.getpid())}) + "\n", encoding="utf-8")

    async def _begin(self, journal: Journal) -> None:
        """Makes the execution, once all agents are there and the cluster is known."""
        self._journal = journal
        storage_bytes_per_s = self._storage_bytes_per_s() if isinstance(self.policy, SharingPolicy) else None
        cluster = await self.agents.gather(
            self.meeting, self.settings.nodes_s, self._over, storage_bytes_per_s=storage_bytes_per_s
        )
        if cluster is None:
            return
        for row, arrival in enumerate(self.arrivals):
            if arrival.file.slots > cluster.gpus:
                raise InputError(
                    f"job {arrival.name} (row {row}) asks for {arrival.file.slots} slots; "
                    f"the cluster has {cluster.gpus}: {cluster.describe()}."
                )
        execution = Execution(journal, self.policy, cluster, self.settings, self.folder, self.profile)
        execution.next_job = len(self.arrivals)
        self._origin_s, self._began_s = journal.last_s(), time.monotonic()
        resume(execution, self.now_s())
        for link in self.agents.links.values():
            execution.agent_came(self.agents.number(link), self.now_s())
        self.execution = execution
        self._flush()

    def _storage_bytes_per_s(self) -> float:
        given = self.settings.storage_mb_per_s
        return math.inf if given is None else given * MB

    # Agents

    async def agent(self, hello: Hello, channel: web.WebSocketResponse) -> AgentLink:
        """An agent has said hello. Raises InputError for one that is not expected."""
        link = self.agents.came(hello, channel)
        since = processes.began(hello.pid) if hello.host == socket.gethostname() else 0
        self._journal.agent(hello.node, hello.host, hello.pid, since)
        self._journal.commit()
        if self.execution is not None:
            self.execution.agent_came(self.agents.number(link), self.now_s())
            self._flush()
        return link

    def heard(self, link: AgentLink, message: Message) -> None:
        """One message of an agent."""
        if self.execution is not None:
            self.execution.heard(self.agents.number(link), message, self.now_s())
            self._flush()

    def agent_left(self, link: AgentLink, reason: str) -> None:
        """An agent's connection has ended; another is started on its node, a few times."""
        self.agents.left(link)
        if self.execution is not None:
            self.execution.agent_left(self.agents.number(link), self.now_s())
            self._flush()
        if not self.closing:
            self._task(self._bring_back(link, reason))

    async def _bring_back(self, link: AgentLink, reason: str) -> None:
        try:
            await self.agents.bring_back(link, reason, self.meeting, self.settings.nodes_s)
        except InputError as error:
            how = "What was done is kept; the same command goes on, with backend.options for the nodes that are left."
            raise InputError(f"{error}\n{how}") from None

    # Time passing

    async def _arrive(self) -> None:
        assert self.execution is not None
        there = {job.row for job in self.execution.jobs.values()}
        for row, arrival in enumerate(self.arrivals):
            if row in there:
                continue
            await asyncio.sleep(max(0.0, arrival.submit_s - self.now_s()))
            self.execution.submit(arrival.name, arrival.file, self.now_s(), row=row)
            self.changed()
        self._arrived_all = True
        self.changed()

    async def _rounds(self) -> None:
        """A decision at whole multiples of the round, as in the simulator; none while there is no job to decide on."""
        assert self.execution is not None
        round_s, decided_s = self.settings.round_s, -math.inf
        while True:
            while not self.execution.active:
                self._something.clear()
                await self._something.wait()
            due_s = max(decided_s + round_s, math.ceil((self.now_s() - LATE_S) / round_s) * round_s)
            await asyncio.sleep(max(0.0, due_s - self.now_s()))
            self.execution.decide(self.now_s())
            self._flush()
            decided_s = due_s

    def changed(self) -> None:
        """A job came, or was cancelled."""
        self._something.set()
        self._flush()

    def _flush(self) -> None:
        """Queues what is to be sent, the journal holding why; ends the run where nothing is left to do."""
        assert self.execution is not None
        self.agents.say(self.execution.outbox)
        if self.execution.idle and (self.interrupted or (self._arrived_all and not self.settings.serve)):
            self._end()

    # Ending

    def fail(self, error: Exception) -> None:
        """Ends the run with this error."""
        if not self._over.done():
            self._over.set_exception(error)

    def _interrupt(self) -> None:
        """Ends the run; where every job has ended, as soon as the last one's processes have left, or if asked twice."""
        again, self.interrupted = self.interrupted, True
        execution = self.execution
        if execution is None or execution.decider.active or execution.idle or again:
            self._end()
        else:
            asyncio.get_running_loop().call_later(self.settings.leave_s, self._end)

    def _end(self) -> None:
        if not self._over.done():
            self._over.set_result(None)

    def _task(self, work: Coroutine[Any, Any, None]) -> None:
        async def guarded() -> None:
            try:
                await work
            except Exception as error:
                self.fail(error)

        task = asyncio.ensure_future(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _leave(self) -> None:
        """Agents save and leave, then everything that was started is ended."""
        self.closing = True
        for task in list(self._tasks):
            task.cancel()
        await self.agents.dismiss(self.settings.leave_s)

    def _over_with_it(self) -> bool:
        assert self.execution is not None
        return self._arrived_all and self.execution.idle
