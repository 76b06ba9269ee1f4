"""The agent of a node: carries out the controller's orders, and exits when the connection to it is lost."""

from __future__ import annotations

import asyncio
import errno
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

import aiohttp

from synergy_core.errors import InputError
from synergy_exec.agent.cores import CoreGrant, Cores, Slot
from synergy_exec.agent.forkserver import Forkserver
from synergy_exec.agent.node_run import NodeRun
from synergy_exec.job_folder import CHECKPOINTS
from synergy_exec.messages import (
    KILLED,
    Hello,
    Kill,
    Launch,
    Message,
    Noted,
    Reserve,
    Reserved,
    Reshare,
    Retune,
    Shutdown,
    Stop,
)
from synergy_exec.training.checkpoint_folder import saving_s
from synergy_exec.wire import Ear, decode, farewell, speak
from synergy_exec.worker import processes

# The port at which the ranks of a run meet. The agent of rank 0 opens it, and rank 0's store uses the open socket.


def listen(host: str, ports: str, given: Collection[int] = ()) -> socket.socket | None:
    """Returns a socket that listens at this address; None if none of the ports is free.

    ports: such as 29500-29599, inclusive; "" for any port. given: ports of runs that may open theirs later. Raises
    OSError if this machine does not have the address.
    """
    first, _, last = ports.partition("-")
    for port in range(int(first), int(last) + 1) if ports else [0]:
        if port in given:
            continue
        try:
            return socket.create_server(
                (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=128
            )
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
    return None


_KILLING_S, _LOOK_S = 3.0, 0.2
_STARTING_S = 120.0
"""Maximum time for the forkserver to start. On a machine that is not busy it takes seconds."""
_PORTS_S = 0.5
"""Seconds between two searches for a free port of the range."""
_CONNECTING_S = 60.0
"""Timeout for connecting. It fails at once if there is no controller; a busy controller takes longer to answer."""


class Agent:
    """The slots of one node and the runs on them.

    gpu_type: `cpu` if slots are CPU cores. cores: CPU cores that are divided among runs launched with a share.
    """

    def __init__(self, node: int, slots: Sequence[Slot], gpu_type: str, cores: Sequence[int]) -> None:
        self._node, self._slots, self._gpu_type = node, slots, gpu_type
        self._cpus, self._cores = len(cores), Cores(cores)
        self._runs: dict[int, NodeRun] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._stores: dict[int, socket.socket] = {}
        self._reserving: dict[int, asyncio.Task[None]] = {}
        self._outbox: asyncio.Queue[Message] = asyncio.Queue()
        self._leave, self._until_s = asyncio.Event(), math.inf
        self._why = ""

    async def serve(self, url: str, token: str) -> None:
        """Runs until the agent is told to exit, or the controller or forkserver is gone. Leaves no process behind.

        Raises InputError if the controller cannot be reached or refuses the token, and ConnectionError if the
        forkserver has died, because every worker has then died with it.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._leave_because, f"it was told to by {number.name}")
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"}) as session:
            # Connect first, because that may fail at once; the forkserver takes seconds to start.
            connection = await _connect(session, url)
            hearing = asyncio.create_task(self._hear(connection))
            self._forkserver = await self._started()
            try:
                await self._converse(connection, hearing)
                print(f"agent: exiting: {self._why}", file=sys.stderr, flush=True)
            finally:
                await self._forkserver.close()
        if self._forkserver.died.is_set():
            raise ConnectionError(self._forkserver.why)

    async def _started(self) -> Forkserver:
        """Starts the forkserver. Raises ConnectionError if the agent must exit first or the start takes too long."""
        starting, leaving = asyncio.create_task(Forkserver.start()), asyncio.create_task(self._leave.wait())
        await asyncio.wait((starting, leaving), timeout=_STARTING_S, return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        if starting.done():
            return await starting
        # Somebody may have stopped the forkserver (SIGSTOP). It would then neither start nor exit by itself.
        await asyncio.to_thread(processes.end_all)
        with suppress(InputError):
            await (await starting).close()
        raise ConnectionError(self._why or f"the parent of workers did not start within {_STARTING_S:g} s")

    async def _converse(self, connection: aiohttp.ClientWebSocketResponse, hearing: asyncio.Task[None]) -> None:
        self._say(
            Hello(
                node=self._node,
                host=socket.gethostname(),
                pid=os.getpid(),
                slots=len(self._slots),
                gpu_type=self._gpu_type,
                cpus=self._cpus,
                memory_bytes=_memory_bytes() * self._cpus // (os.cpu_count() or self._cpus),
            )
        )
        speaking = asyncio.create_task(speak(self._outbox, connection))
        ends = (hearing, asyncio.create_task(self._leave.wait()), asyncio.create_task(self._forkserver.died.wait()))
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if self._forkserver.died.is_set():
            self._leave_because(self._forkserver.why)
        await self._end_runs()
        for task in (hearing, *ends[1:]):
            task.cancel()
        if not connection.closed:
            said = asyncio.create_task(self._outbox.join())
            await asyncio.wait((said, speaking), timeout=_KILLING_S, return_when=asyncio.FIRST_COMPLETED)
            said.cancel()
        speaking.cancel()
        await connection.close(code=aiohttp.WSCloseCode.GOING_AWAY, message=farewell(self._why))

    async def _hear(self, connection: aiohttp.ClientWebSocketResponse) -> None:
        ear = Ear(connection)
        while (text := await ear.text()) is not None:
            self._obey(decode(text), connection)
        self._leave_because(f"the controller is gone: {ear.gone}")

    def _obey(self, message: Message, connection: aiohttp.ClientWebSocketResponse) -> None:
        match message:
            case Reserve(opens_port=False):
                self._say(Reserved(run=message.run, host="", port=0))
            case Reserve():
                self._reserving[message.run] = asyncio.create_task(
                    self._reserve(message, connection.get_extra_info("sockname")[0])
                )
            case Launch():
                self._launch(message)
            case Stop() | Retune() | Kill():
                self._steer(message)
            case Reshare():
                self._reshare(message)
            case Shutdown():
                if message.within_s is not None:
                    self._until_s = time.monotonic() + message.within_s
                self._leave_because("it was told to by the controller")

    async def _reserve(self, asked: Reserve, host: str) -> None:
        said = False
        try:
            while (
                store := listen(host, asked.ports, [run.launch.node.store_port for run in self._runs.values()])
            ) is None:
                if not said:
                    self._say(Noted(run=asked.run, text=f"waits until one of ports={asked.ports} is free on {host}"))
                said = True
                await asyncio.sleep(_PORTS_S)
        except OSError as error:  # so no run can have its store on this node
            self._leave_because(f"it cannot listen on {host}: {error.strerror}")
            return
        self._stores[asked.run] = store
        del self._reserving[asked.run]
        self._say(Reserved(run=asked.run, host=host, port=store.getsockname()[1]))

    def _launch(self, launch: Launch) -> None:
        store = self._stores.pop(launch.run, None)
        slots = [self._slots[slot] for slot in launch.node.slots]
        grants: dict[int, CoreGrant] = {}
        if launch.share is not None:
            owners = [(launch.run, launch.node.first_rank + place) for place in range(len(slots))]
            for owner in owners:
                self._cores.take(owner, launch.share.cpus)
            grants = {rank: self._cores.grant((number, rank)) for number, rank in owners}
        run = self._runs[launch.run] = NodeRun(launch, self._forkserver, self._say, grants)
        self._tasks[launch.run] = asyncio.create_task(self._carry_out(run, slots, store))

    async def _carry_out(self, run: NodeRun, slots: list[Slot], store: socket.socket | None) -> None:
        launch = run.launch
        try:
            await run.carry_out(slots, store)
        finally:
            del self._runs[launch.run], self._tasks[launch.run]
            for place in range(len(slots)):
                self._regrant(self._cores.leave((launch.run, launch.node.first_rank + place)))

    def _reshare(self, message: Reshare) -> None:
        run = self._runs.get(message.run)
        if run is None:
            return
        run.remember(message.share.memory_bytes)
        for place in range(len(run.launch.node.slots)):
            self._regrant(self._cores.take((message.run, run.launch.node.first_rank + place), message.share.cpus))

    def _regrant(self, owners: set[tuple[int, int]]) -> None:
        """Moves ranks, given as (run, rank), to the cores that they have now."""
        for number, rank in sorted(owners):
            if number in self._runs:
                self._runs[number].grant(rank, self._cores.grant((number, rank)))

    def _steer(self, message: Stop | Retune | Kill) -> None:
        run = self._runs.get(message.run)
        if run is None:
            # The run has ended or was never launched here. In both cases no rank will meet at its store.
            if isinstance(message, Retune):
                return
            if message.run in self._reserving:
                self._reserving.pop(message.run).cancel()
            if message.run in self._stores:
                self._stores.pop(message.run).close()
        elif isinstance(message, Kill):
            run.kill(KILLED)
        else:
            run.tell(message)

    async def _end_runs(self) -> None:
        """Stops all runs, and kills those left after the longest grace, or sooner if the controller says so meanwhile.
        The grace is at least the time to write the newest checkpoint again.

        The worker of a command kills it after its own grace.
        """
        began_s = time.monotonic()
        for number, run in self._runs.items():
            run.tell(Stop(run=number))
        launches = [run.launch for run in self._runs.values()]
        graces_s = [
            max(each.grace_s, 0.0 if each.file.command else saving_s(Path(each.folder) / CHECKPOINTS))
            for each in launches
        ]
        self._until_s = min(self._until_s, began_s + max(graces_s, default=0.0) + _KILLING_S)
        while self._tasks and (left_s := self._until_s - time.monotonic()) > 0:
            await asyncio.wait(list(self._tasks.values()), timeout=min(left_s, _LOOK_S))
        for run in self._runs.values():
            run.kill(f"had not saved {time.monotonic() - began_s:.0f} s after its agent was told to leave")
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()), timeout=_KILLING_S)

    def _leave_because(self, why: str) -> None:
        self._why = self._why or why
        self._leave.set()

    def _say(self, message: Message) -> None:
        self._outbox.put_nowait(message)


def _memory_bytes() -> int:
    """Memory of the whole machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


async def _connect(session: aiohttp.ClientSession, url: str) -> aiohttp.ClientWebSocketResponse:
    try:
        return await asyncio.wait_for(session.ws_connect(f"{url}/agents", autoping=False), _CONNECTING_S)
    except aiohttp.WSServerHandshakeError as error:
        hint = "; is SYNERGY_TOKEN this controller's?" if error.status in (401, 403) else ""
        raise InputError(f"the controller at {url} answered {error.status} {error.message}{hint}") from None
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise InputError(f"no controller at {url}: {error or 'it does not answer'}") from None
