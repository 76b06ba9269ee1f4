"""Starts the agents of a backend, listens for them, exchanges messages with them, and restarts lost ones."""

from __future__ import annotations

import asyncio
import hmac
import math
import secrets
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from synergy_core.errors import InputError
from synergy_core.scheduling.jobs.cluster import Cluster, NodeType
from synergy_core.units import HOUR_S
from synergy_exec.backends import Backend, Meeting
from synergy_exec.messages import Hello, Message, Shutdown
from synergy_exec.plain import MOST_SHOWN, plain, plain_lines
from synergy_exec.wire import Ear, decode, farewell, speak
from synergy_runs.files import atomic_file

MAX_MESSAGE_BYTES = 1_000_000


class Listener(Protocol):
    """Receives events of agents. Nodes have the cluster's numbers; before that is known only `hello` is called."""

    def hello(self, hello: Hello) -> None: ...

    def agent_came(self, node: int) -> None: ...

    def heard(self, node: int, message: Message) -> None: ...

    def agent_left(self, node: int) -> None: ...

    def fail(self, error: Exception) -> None: ...


@dataclass(slots=True)
class AgentLink:
    """One agent's connection. left: why it ended, in a few words; empty before."""

    hello: Hello
    left: asyncio.Future[str]
    queue: asyncio.Queue[Message] = field(default_factory=asyncio.Queue)


def cluster_of(hellos: list[Hello], *, storage_bytes_per_s: float | None = None) -> tuple[Cluster, list[int]]:
    """The cluster of these agents, and for each of its nodes the number of its agent.

    The cluster groups equal nodes, in the order of the first of each kind. storage_bytes_per_s: rate at which a node
    reads data from storage, if CPUs and memory are shared out, too; else None.
    """
    alike: dict[tuple[str, int, int, int], list[int]] = {}
    for hello in sorted(hellos, key=lambda each: each.node):
        shared = storage_bytes_per_s is not None
        host = (hello.cpus, hello.memory_bytes) if shared else (0, 0)
        alike.setdefault((hello.gpu_type, hello.slots, *host), []).append(hello.node)
    storage = math.inf if storage_bytes_per_s is None else storage_bytes_per_s
    types = [
        NodeType(f"{gpu_type}-{index}", gpu_type, len(nodes), slots, float(cpus), float(memory_bytes), storage)
        for index, ((gpu_type, slots, cpus, memory_bytes), nodes) in enumerate(alike.items())
    ]
    return Cluster(tuple(types)), [node for nodes in alike.values() for node in nodes]


LOOK_S = 0.1
EXITING_S = 1.0
"""Seconds to wait for the end of an agent's process after its connection has ended."""
PAUSE_S, LONGEST_PAUSE_S = 10.0, 600.0
"""Seconds between restarts when agents are lost too often and the service continues: at first, and at most."""


class Agents:
    """All agents of a backend.

    links: of connected agents, by the backend's node number. The listener gets the cluster's node numbers, which group
    equal nodes. losses: how often an agent was lost or did not connect. at_once: restarts within an hour without a
    pause; after these it is an error (give_up), or pauses become longer and longer. patience_s: time for an agent to
    connect. grace_s: tells how long an agent that lost its connection may still have its commands save.
    """

    def __init__(
        self, backend: Backend, listener: Listener, *, at_once: int, patience_s: float, give_up: bool = True
    ) -> None:
        self.backend, self._listener = backend, listener
        self._at_once, self._patience_s, self._give_up = at_once, patience_s, give_up
        self.links: dict[int, AgentLink] = {}
        self.losses = 0
        self.grace_s: Callable[[], float] = lambda: 0.0
        self._dismissed_s = math.inf
        self._known: dict[int, Hello] = {}
        self._order: list[int] = []
        self._lost_s: defaultdict[int, list[float]] = defaultdict(list)
        self._all_there = asyncio.Event()
        self._keepers: list[asyncio.Task[None]] = []

    async def gather(
        self, meeting: Meeting, over: asyncio.Future[Any], *, storage_bytes_per_s: float | None = None
    ) -> Cluster | None:
        """Starts all agents and waits for them. Returns their cluster, or None if `over` was set first.

        storage_bytes_per_s: see `cluster_of`.
        """
        for node in range(self.backend.nodes):
            await self.backend.start(node, meeting)
            self._keepers.append(asyncio.create_task(self._keep(node, meeting)))
        there = asyncio.ensure_future(self._all_there.wait())
        await asyncio.wait({there, over}, return_when=asyncio.FIRST_COMPLETED)
        there.cancel()
        if over.done():
            return None
        cluster, self._order = cluster_of(list(self._known.values()), storage_bytes_per_s=storage_bytes_per_s)
        return cluster

    async def _keep(self, node: int, meeting: Meeting) -> None:
        """Restarts the node's agent whenever it is lost or does not connect, and tells the user."""
        try:
            while True:
                reason = await self._until_lost(node)
                self.losses += 1
                self._lost_s[node].append(time.monotonic())
                times = self._lost_lately(node)
                beyond = times - self._at_once
                pause_s = min(PAUSE_S * 2.0 ** min(beyond - 1, 10), LONGEST_PAUSE_S) if beyond > 0 else 0.0
                if beyond > 0 and (self._give_up or not self._order):
                    raise InputError(f"node {node}: its agent was lost {times} times within an hour; at last: {reason}")
                when = (
                    f"{times} times within an hour; another starts in {pause_s:g} s" if pause_s else "starting another"
                )
                print(f"node {node}: its agent was lost: {plain_lines(reason)}\n{when}", file=sys.stderr, flush=True)
                await asyncio.sleep(pause_s)
                await self.backend.start(node, meeting)
        except Exception as error:
            self._listener.fail(error)

    async def _until_lost(self, node: int) -> str:
        """Waits until the node's agent is lost or does not connect. Returns why, from its connection and exit code."""
        until_s = time.monotonic() + self._patience_s
        while (link := self.links.get(node)) is None:
            if exit := self.backend.lost().get(node):
                return exit
            if time.monotonic() > until_s:
                if self._give_up and not self._order:
                    raise InputError(f"no agent from node {node} within {self._patience_s:g} s; see its log.")
                return f"none came within {self._patience_s:g} s; see its log"
            await asyncio.sleep(LOOK_S)
        reason = await asyncio.shield(link.left)  # this task may be cancelled before the connection ends
        until_s = time.monotonic() + EXITING_S + self.grace_s()
        while not (exit := self.backend.lost().get(node, "")) and time.monotonic() < until_s:
            await asyncio.sleep(LOOK_S)
        return f"{reason}; {exit}" if exit else reason

    def _lost_lately(self, node: int) -> int:
        """Number of times that the node's agent was lost or did not connect within the last hour."""
        self._lost_s[node] = [each for each in self._lost_s[node] if each > time.monotonic() - HOUR_S]
        return len(self._lost_s[node])

    async def connection(self, request: web.Request) -> web.WebSocketResponse:
        channel = web.WebSocketResponse(autoping=False, max_msg_size=MAX_MESSAGE_BYTES)
        await channel.prepare(request)
        ear = Ear(channel)
        try:
            # The first message may take long, because an agent starts torch first. `_until_lost` limits the wait.
            text = await ear.text()
            if text is None:
                return channel
            hello = decode(text)
            if not isinstance(hello, Hello):
                raise InputError(f"expected hello first; got {type(hello).__name__}.")
            self._check(hello)
        except InputError as error:
            await channel.close(code=1008, message=farewell(str(error)))
            return channel
        link = self.links[hello.node] = AgentLink(hello, asyncio.get_running_loop().create_future())
        sender = asyncio.create_task(speak(link.queue, channel))
        try:
            self._came(hello)
            while (text := await ear.text()) is not None:
                message = decode(text)
                if self._order:
                    self._listener.heard(self._order.index(hello.node), message)
            if not channel.closed and request.transport is not None:
                request.transport.abort()  # a close message would wait for an answer
        except InputError as error:
            ear.gone = f"it said what no agent says: {error}"
            await channel.close(code=1008, message=farewell(str(error)))
        except Exception as error:
            self._listener.fail(error)
        finally:
            sender.cancel()
            del self.links[hello.node]
            self._all_there.clear()
            link.left.set_result(ear.gone)
            if self._order:
                self._listener.agent_left(self._order.index(hello.node))
        return channel

    def _check(self, hello: Hello) -> None:
        known = self._known.get(hello.node)
        if not 0 <= hello.node < self.backend.nodes:
            raise InputError(f"node {hello.node}: expected 0 to {self.backend.nodes - 1}.")
        if hello.node in self.links:
            raise InputError(f"node {hello.node} has an agent already.")
        if known is not None and (known.slots, known.gpu_type) != (hello.slots, hello.gpu_type):
            raise InputError(
                f"node {hello.node} had {known.slots} {known.gpu_type}; now {hello.slots} {hello.gpu_type}."
            )

    def _came(self, hello: Hello) -> None:
        self._known[hello.node] = hello
        self._listener.hello(hello)
        if self._order:
            self._listener.agent_came(self._order.index(hello.node))
        if len(self.links) == self.backend.nodes:
            self._all_there.set()

    def there(self) -> dict[int, Hello]:
        return {self._order.index(node): link.hello for node, link in self.links.items()}

    def away(self) -> set[int]:
        """The cluster's numbers of nodes that have no agent and lost more than `at_once` agents in the last hour."""
        lost = [node for node in self._order if node not in self.links and self._lost_lately(node) > self._at_once]
        return {self._order.index(node) for node in lost}

    def say(self, outbox: list[tuple[int, Message]]) -> None:
        """Queues messages for the cluster's nodes in order and empties the box; drops those for lost agents."""
        for number, message in outbox:
            link = self.links.get(self._order[number])
            if link is not None:
                link.queue.put_nowait(message)
        outbox.clear()

    async def dismiss(self, patience_s: float) -> None:
        """Tells all agents to save and exit, and kills those that have not done so in time."""
        for keeper in self._keepers:
            keeper.cancel()
        for link in self.links.values():
            link.queue.put_nowait(Shutdown())
        self._dismissed_s = time.monotonic() + patience_s
        while self.links and time.monotonic() < self._dismissed_s:
            await asyncio.sleep(0.05)
        await self.backend.stop()

    def dismiss_within(self, seconds: float) -> None:
        """Tells agents that are leaving to kill every run that has not saved within these seconds."""
        for link in self.links.values():
            link.queue.put_nowait(Shutdown(within_s=seconds))
        self._dismissed_s = min(self._dismissed_s, time.monotonic() + seconds + EXITING_S)


# The controller's port for agents and users: it checks tokens and answers errors as sentences.


class RefusedError(InputError):
    """Refuses a request with a status other than 400; any InputError may have a `status`."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


@asynccontextmanager
async def listening(
    agents: Agents,
    folder: Path,
    *,
    host: str,
    port: int,
    routes: Iterable[web.RouteDef] = (),
    public: Collection[str] = (),
    most_bytes: int = 1_000_000,
) -> AsyncIterator[Meeting]:
    """Listens until the block ends. It writes a new token to the file `token`, which only its owner can read.

    routes: handlers of users' requests. public: paths that need no token. most_bytes: largest request. Raises
    InputError for a port that is in use.
    """
    token = secrets.token_urlsafe()
    with atomic_file(folder / "token") as partial:
        partial.touch(mode=0o600)
        partial.write_text(token + "\n", encoding="utf-8")
    app = web.Application(middlewares=[_checked(token, public, most_bytes)], client_max_size=most_bytes)
    app.add_routes([web.get("/agents", agents.connection), *routes])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise InputError(f"port={port}: {error.strerror}. port=0 takes a free one.") from error
        yield Meeting(url=f"http://{host}:{runner.addresses[0][1]}", token=token, folder=folder)
    finally:
        await runner.cleanup()


def _checked(token: str, public: Collection[str], most_bytes: int) -> Middleware:
    @web.middleware
    async def checked(request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuses requests without a token, and answers an InputError with its sentence."""
        given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if request.path not in public and not hmac.compare_digest(given, f"Bearer {token}".encode()):
            return _said(401, "the token is missing or wrong; it is in the file `token` beside controller.json.")
        try:
            # Refuse the request before reading it, because a client that announces so much may never send it.
            if (request.content_length or 0) > most_bytes:
                raise web.HTTPRequestEntityTooLarge(most_bytes, request.content_length or 0)
            return await handler(request)
        except InputError as error:
            return _said(getattr(error, "status", 400), str(error))
        except web.HTTPRequestEntityTooLarge:
            return _said(413, f"the request is too large; a job file has at most {most_bytes:,} bytes.")
        except web.HTTPException as error:
            return _said(error.status, f"{request.method} {plain(request.path, MOST_SHOWN)}: {error.reason}.")
        except web.RequestPayloadError as error:
            return _said(400, f"the request's body cannot be read: {plain(str(error), MOST_SHOWN)}.")

    return checked


def _said(status: int, sentence: str) -> web.Response:
    """An HTTP response with an error message."""
    return web.json_response({"error": sentence}, status=status)
