"""What the other end of a websocket says, until it is gone.

A connection that is closed, as the kernel closes those of a process that has died, is known at once. Silence, as of a
node without power or network, is taken for an end only after a long while: a busy machine is silent too. It is counted
in pings that this end's own loop has sent, not in seconds: a loop that stood still for a minute has asked once, and
reads what came meanwhile before it asks again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any

from aiohttp import ClientWebSocketResponse, WSMsgType, web

_MOST_REASON_BYTES = 123
PING_S = 5.0
PINGS = 12
"""So many without an answer are an end: a minute of this loop's time."""


def farewell(reason: str) -> bytes:
    """The reason, cut to what a websocket's closing message can hold."""
    return reason.encode()[:_MOST_REASON_BYTES].decode(errors="ignore").encode()


class Ear:
    """Hears one connection, which was made with autoping=False and without a heartbeat.

    gone: why nothing more will be heard, in a few words that follow on `because`; "" until then.
    """

    def __init__(self, channel: web.WebSocketResponse | ClientWebSocketResponse) -> None:
        self._channel = channel
        self.gone = ""

    async def text(self) -> str | None:
        """The next message; None when the other end is gone."""
        unanswered = 0
        while unanswered < PINGS:
            try:
                message = await self._channel.receive(timeout=PING_S)
            except TimeoutError:
                unanswered += 1
                await self._answer(self._channel.ping())
                continue
            unanswered = 0
            if message.type == WSMsgType.TEXT:
                return str(message.data)
            if message.type == WSMsgType.PING:
                await self._answer(self._channel.pong(message.data))
            elif message.type == WSMsgType.CLOSE:
                self.gone = message.extra or "it closed the connection"
                return None
            elif message.type in (WSMsgType.CLOSING, WSMsgType.CLOSED, WSMsgType.ERROR):
                self.gone = "its connection broke"
                return None
        self.gone = f"it has not answered for {PINGS * PING_S:.0f} s"
        return None

    @staticmethod
    async def _answer(sending: Coroutine[Any, Any, None]) -> None:
        # To an end that takes nothing any more sending never ends; what has broken, the next `receive` says.
        with contextlib.suppress(TimeoutError, ConnectionError):
            await asyncio.wait_for(sending, PING_S)
