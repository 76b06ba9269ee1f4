"""The agents that are connected: their first messages, and a queue of what is to be sent to each."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field

from aiohttp import web

from synergy_core.cluster import Cluster, NodeType
from synergy_core.errors import InputError
from synergy_exec.messages import Hello, Message
from synergy_exec.wire import encode


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
