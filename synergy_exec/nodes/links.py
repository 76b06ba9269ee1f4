"""The agents that are connected: their first messages, and a queue of what is to be sent to each."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from aiohttp import web

from synergy_core.cluster import Cluster, NodeType
from synergy_core.errors import InputError
from synergy_exec.messages import Hello, Message, encode


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


def cluster_of(hellos: list[Hello]) -> tuple[Cluster, list[int]]:
    """The cluster that these agents make, and the agent's node of each of its nodes.

    Nodes that are alike stand together, in the order of their first; the cluster numbers them so.
    """
    alike: dict[tuple[str, int], list[int]] = {}
    for hello in sorted(hellos, key=lambda each: each.node):
        if hello.slots < 1:
            raise InputError(f"node {hello.node} ({hello.host}) has no slots; give it at least one.")
        alike.setdefault((hello.gpu_type, hello.slots), []).append(hello.node)
    types = [
        NodeType(f"{gpu_type}-{index}", gpu_type, len(nodes), slots)
        for index, ((gpu_type, slots), nodes) in enumerate(alike.items())
    ]
    return Cluster(tuple(types)), [node for nodes in alike.values() for node in nodes]
