"""The agents of a backend: gathered, told things, dismissed; whether one that was lost is to come back."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from synergy_core.cluster import Cluster, NodeType
from synergy_core.errors import InputError
from synergy_core.units import HOUR_S
from synergy_exec.backends import Backend, Meeting
from synergy_exec.messages import Hello, Message, Shutdown
from synergy_exec.plain import plain_lines
from synergy_exec.wire import encode

# The agents that are connected: their first messages, and a queue of what is to be sent to each.


@dataclass(slots=True)
class AgentLink:
    """One agent's connection."""

    hello: Hello
    socket: web.WebSocketResponse
    queue: asyncio.Queue[Message] = field(default_factory=asyncio.Queue)

    async def send_all(self) -> None:
        """Sends what is queued, in order, until it is cancelled or the connection is lost."""
        while True:
            message = await self.queue.get()
            try:
                await self.socket.send_str(encode(message))
            except ConnectionError:
                return


def cluster_of(hellos: list[Hello], *, storage_bytes_per_s: float | None = None) -> tuple[Cluster, list[int]]:
    """The cluster that these agents make, and the agent's node of each of its nodes.

    Nodes that are alike stand together, in the order of their first; the cluster numbers them so. storage_bytes_per_s:
    at which each node reads data that it has not in memory, where CPUs and memory are shared out, too; None where they
    are not. Raises InputError where an agent does not say what its node has of them.
    """
    alike: dict[tuple[str, int, int, int], list[int]] = {}
    for hello in sorted(hellos, key=lambda each: each.node):
        if hello.slots < 1:
            raise InputError(f"node {hello.node} ({hello.host}) has no slots; give it at least one.")
        shared = storage_bytes_per_s is not None
        if shared and not (hello.cpus and hello.memory_bytes):
            raise InputError(
                f"node {hello.node} ({hello.host}) does not say how many CPUs and how much memory it has, which the "
                "policy shares out; start its agent with this version of Synergy."
            )
        host = (hello.cpus, hello.memory_bytes) if shared else (0, 0)
        alike.setdefault((hello.gpu_type, hello.slots, *host), []).append(hello.node)
    storage = math.inf if storage_bytes_per_s is None else storage_bytes_per_s
    types = [
        NodeType(f"{gpu_type}-{index}", gpu_type, len(nodes), slots, float(cpus), float(memory_bytes), storage)
        for index, ((gpu_type, slots, cpus, memory_bytes), nodes) in enumerate(alike.items())
    ]
    return Cluster(tuple(types)), [node for nodes in alike.values() for node in nodes]


LOOK_S = 0.5
EXITING_S = 1.0
"""From an agent's last word to its end."""
PAUSE_S, LONGEST_PAUSE_S = 10.0, 600.0
"""Between tries, where agents are lost too often and a service goes on."""


class Agents:
    """All agents of a backend.

    links: of those that are connected, by the backend's number of their node. The cluster numbers nodes its own way,
    alike ones together; `number` says how. losses: how often one was lost, or did not come again. at_once: how often
    within an hour one that was lost is started again without a pause.
    """

    def __init__(self, backend: Backend, at_once: int) -> None:
        self.backend, self.at_once = backend, at_once
        self.links: dict[int, AgentLink] = {}
        self.losses = 0
        self._known: dict[int, Hello] = {}
        self._order: list[int] = []
        self._lost_s: dict[int, list[float]] = {}
        self._awaited: dict[int, asyncio.Event] = {}
        self._all_there = asyncio.Event()

    async def gather(
        self,
        meeting: Meeting,
        patience_s: float,
        over: asyncio.Future[Any] | None = None,
        *,
        storage_bytes_per_s: float | None = None,
    ) -> Cluster | None:
        """Starts all of them, and waits: the cluster that they make, None if `over` came first.

        storage_bytes_per_s: see `cluster_of`. Raises InputError where one leaves twice, or does not come in time.
        """
        for node in range(self.backend.nodes):
            await self.backend.start(node, meeting)
        until_s = time.monotonic() + patience_s
        there = asyncio.ensure_future(self._all_there.wait())
        either = {there} if over is None else {there, over}
        try:
            while not any(each.done() for each in either):
                await asyncio.wait(either, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                await self._look_after_missing(meeting, late=time.monotonic() > until_s, patience_s=patience_s)
        finally:
            there.cancel()
        if over is not None and over.done():
            return None
        cluster, self._order = cluster_of(list(self._known.values()), storage_bytes_per_s=storage_bytes_per_s)
        return cluster

    async def _look_after_missing(self, meeting: Meeting, *, late: bool, patience_s: float) -> None:
        """One that left before it was there is started again, for it may have been killed; as often as one that is lost
        later, at least once. Raises InputError then.
        """
        missing = sorted(set(range(self.backend.nodes)) - set(self.links))
        lost = self.backend.lost()
        for node in missing:
            if node in lost and node not in self._awaited:
                if self._count(node) > max(1, self.at_once):
                    raise InputError(f"node {node}: {lost[node]}")
                await self.backend.start(node, meeting)
        if missing and late:
            raise InputError(f"no agent from nodes {missing} within {patience_s:g} s; see their logs.")

    def came(self, hello: Hello, channel: web.WebSocketResponse) -> AgentLink:
        """An agent has said hello. Raises InputError for one that is not expected."""
        known = self._known.get(hello.node)
        if not 0 <= hello.node < self.backend.nodes:
            raise InputError(f"node {hello.node}: expected 0 to {self.backend.nodes - 1}.")
        if hello.node in self.links:
            raise InputError(f"node {hello.node} has an agent already.")
        if known is not None and (known.slots, known.gpu_type) != (hello.slots, hello.gpu_type):
            raise InputError(
                f"node {hello.node} had {known.slots} {known.gpu_type}; now {hello.slots} {hello.gpu_type}."
            )
        link = self.links[hello.node] = AgentLink(hello, channel)
        self._known[hello.node] = hello
        if hello.node in self._awaited:
            self._awaited.pop(hello.node).set()
        if len(self.links) == self.backend.nodes:
            self._all_there.set()
        return link

    def left(self, link: AgentLink) -> None:
        """Its connection has ended."""
        del self.links[link.hello.node]
        self._all_there.clear()

    def number(self, link: AgentLink) -> int:
        """The cluster's number of an agent's node; all were gathered before."""
        return self._order.index(link.hello.node)

    async def bring_back(
        self, link: AgentLink, reason: str, meeting: Meeting, patience_s: float, *, give_up: bool
    ) -> None:
        """Starts another agent where one was lost, until one is there; tells the user so, and why.

        reason: as far as the connection told. patience_s: for one to come. After several within an hour it raises
        InputError (give_up), or waits longer and longer between tries.
        """
        node = link.hello.node
        came = self._awaited[node] = asyncio.Event()
        if exit := await self._exit_of(node, EXITING_S, came):
            reason = f"{reason}; {exit}"
        while not came.is_set():
            times = self._count(node)
            pause_s = 0.0 if times <= self.at_once else self._pause_s(times - self.at_once)
            if pause_s and give_up:
                raise InputError(f"node {node}: its agent was lost {times} times within an hour; at last: {reason}")
            when = f"{times} times within an hour; another starts in {pause_s:g} s" if pause_s else "starting another"
            print(f"node {node}: its agent was lost: {plain_lines(reason)}\n{when}", file=sys.stderr, flush=True)
            await asyncio.sleep(pause_s)
            await self.backend.start(node, meeting)
            exit = await self._exit_of(node, patience_s, came)
            reason = exit or f"none came within {patience_s:g} s; see its log"

    def _pause_s(self, beyond: int) -> float:
        return float(min(PAUSE_S * 2.0 ** min(beyond - 1, 10), LONGEST_PAUSE_S))

    def _count(self, node: int) -> int:
        """How often it was lost within the last hour, this time included."""
        self.losses += 1
        self._lost_s.setdefault(node, []).append(time.monotonic())
        return self.lost_lately(node)

    def lost_lately(self, node: int) -> int:
        """How often the node's agent was lost, or did not come again, within the last hour."""
        since_s = time.monotonic() - HOUR_S
        self._lost_s[node] = [each for each in self._lost_s.get(node, []) if each > since_s]
        return len(self._lost_s[node])

    def away(self) -> set[int]:
        """The cluster's numbers of nodes that have no agent, though one was started as often as `at_once` says."""
        lost = [node for node in self._order if node not in self.links and self.lost_lately(node) > self.at_once]
        return {self._order.index(node) for node in lost}

    async def _exit_of(self, node: int, patience_s: float, came: asyncio.Event) -> str:
        """How the node's agent has left, as soon as its backend can tell; "" if one came, or none has left in time."""
        until_s = time.monotonic() + patience_s
        while time.monotonic() < until_s and not came.is_set():
            if node in (lost := self.backend.lost()):
                return lost[node]
            await asyncio.sleep(EXITING_S / 10)
        return ""

    def say(self, outbox: list[tuple[int, Message]]) -> None:
        """Queues messages for the cluster's nodes, in order, and empties the box; what is for a lost one is dropped."""
        for number, message in outbox:
            link = self.links.get(self._order[number])
            if link is not None:
                link.queue.put_nowait(message)
        outbox.clear()

    async def dismiss(self, patience_s: float) -> None:
        """Has all of them save and leave, and ends those that have not within so many seconds."""
        for link in self.links.values():
            link.queue.put_nowait(Shutdown())
        until_s = time.monotonic() + patience_s
        while self.links and time.monotonic() < until_s:
            await asyncio.sleep(0.05)
        await self.backend.stop()
