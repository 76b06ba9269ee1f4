"""Encodes messages as lines of JSON and decodes them; a message with missing or wrong fields is refused."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import mmap
import typing
from collections.abc import Coroutine
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from aiohttp import ClientError, ClientWebSocketResponse, WSMsgType, web

from synergy_core.errors import InputError
from synergy_core.scheduling.jobs.cluster import Share
from synergy_exec.messages import Message, OfCause, OfProgress, OfRun
from synergy_runs.inputs.keys import alternatives

MESSAGES = {each.__name__: each for base in (Message, OfRun, OfCause, OfProgress) for each in base.__subclasses__()}


def encode(message: Message) -> str:
    """The message as a line of JSON."""
    return json.dumps({"kind": type(message).__name__, **dataclasses.asdict(message)}, separators=(",", ":"))


def decode(text: str | bytes) -> Message:
    """The message in a line of JSON. Raises InputError for anything else."""
    try:
        values = json.loads(text)
        message_class = MESSAGES[values.pop("kind")]
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise InputError(f"not a message: {text[:100]!r} ({type(error).__name__})") from None
    try:
        message: Message = _made(message_class, values)
    except (TypeError, ValueError) as error:
        raise InputError(f"{message_class.__name__}: {error}") from None
    return message


def _made(part: Any, values: Any) -> Any:
    """The object of a message's part from its plain values. Raises TypeError for missing or wrong fields."""
    if part is Share:
        return Share(*map(float, values))
    hints = _types(part)
    parts = {name: alternatives(hints[name])[0] for name in values if name in hints and values[name] is not None}
    made = {name: _made(each, values[name]) for name, each in parts.items() if each is Share or is_dataclass(each)}
    return part(**{**values, **made})


_types = functools.cache(typing.get_type_hints)


# Receives messages over a websocket until the other end is gone.
#
# When a process dies, the kernel closes its connections, which the other end notices at once. Silence, as of a node
# without power or network, counts as the end only after a long time, because a busy machine is silent, too. The time is
# counted in pings that this process has sent, not in seconds: an event loop that stood still for a minute has sent only
# one ping, and reads the messages that came meanwhile before it sends another.


_MOST_REASON_BYTES = 123
PING_S = 5.0
PINGS = 12
"""The connection counts as lost after this many pings without an answer: a minute of this loop's time."""


def farewell(reason: str) -> bytes:
    """The reason, cut to the length that a websocket's close message may have."""
    return reason.encode()[:_MOST_REASON_BYTES].decode(errors="ignore").encode()


class Ear:
    """Receives from one connection, which was made with autoping=False and without a heartbeat.

    gone: why the connection ended, as the end of a sentence with `because`; "" before.
    """

    def __init__(self, channel: web.WebSocketResponse | ClientWebSocketResponse) -> None:
        self._channel = channel
        self.gone = ""

    async def text(self) -> str | None:
        """The next message; None if the other end is gone."""
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
        # Sending never ends if the other end reads nothing more. The next `receive` reports a broken connection.
        with contextlib.suppress(TimeoutError, ConnectionError):
            await asyncio.wait_for(sending, PING_S)


async def speak(queue: asyncio.Queue[Message], channel: web.WebSocketResponse | ClientWebSocketResponse) -> None:
    """Sends queued messages in order until it is cancelled. Those for a lost connection are dropped: `Ear` notices."""
    while True:
        message = await queue.get()
        with contextlib.suppress(ConnectionError, ClientError):
            await channel.send_str(encode(message))
        queue.task_done()


# Files that grow line by line. A crash or a full disk may have cut off the last line.


def whole_lines(path: Path) -> list[str]:
    """The complete lines of a file; none if there is no file."""
    if not path.is_file():
        return []
    return path.read_text(encoding="utf-8", errors="replace").rpartition("\n")[0].splitlines()


def cut_to_lines(path: Path) -> None:
    """Cuts off an incomplete last line, so that the next line does not continue it."""
    if path.is_file() and path.stat().st_size:
        # Mapped, because the file of a long job may be larger than the memory that a worker may have.
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            file.truncate(text.rfind(b"\n") + 1)
