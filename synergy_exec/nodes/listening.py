"""A port on which agents connect: the token, a websocket per agent, and what is said on it."""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from synergy_core.errors import InputError
from synergy_exec.backends import Meeting
from synergy_exec.messages import Hello, Message
from synergy_exec.nodes.agents import AgentLink
from synergy_exec.plain import MOST_SHOWN, plain
from synergy_exec.wire import Ear, decode, farewell
from synergy_runs.files import atomic_file

MOST_MESSAGE_BYTES = 1_000_000
AGENTS = "/agents"


class RefusedError(InputError):
    """A request that is answered with another status than 400."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class Listener(ABC):
    """Who agents connect to."""

    @abstractmethod
    async def agent(self, hello: Hello, channel: web.WebSocketResponse) -> AgentLink:
        """An agent has said hello. Raises InputError for one that is not expected."""

    @abstractmethod
    def heard(self, link: AgentLink, message: Message) -> None:
        """One message of an agent."""

    @abstractmethod
    def agent_left(self, link: AgentLink, reason: str) -> None:
        """An agent's connection has ended, for a reason in a few words."""

    @abstractmethod
    def fail(self, error: Exception) -> None:
        """Something went wrong that no agent can be blamed for."""


@asynccontextmanager
async def listening(
    listener: Listener,
    folder: Path,
    *,
    host: str,
    port: int,
    routes: Iterable[web.RouteDef] = (),
    public: Collection[str] = (),
    most_bytes: int = 1_000_000,
) -> AsyncIterator[Meeting]:
    """Listens until the block ends. Each time a new token is written to the file `token`, which only its owner reads.

    routes: further requests that are answered. public: their paths that need no token. most_bytes: largest request.
    Raises InputError for a port that is taken.
    """
    token = secrets.token_urlsafe()
    token_file = folder / "token"
    with atomic_file(token_file) as partial:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as stream:
            stream.write(token + "\n")
    app = web.Application(middlewares=[_checked(token, public, most_bytes)], client_max_size=most_bytes)
    app.add_routes([web.get(AGENTS, _agents(listener)), *routes])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise InputError(f"port={port}: {error.strerror}. port=0 takes a free one.") from error
        yield Meeting(url=f"http://{host}:{runner.addresses[0][1]}", token_file=token_file, folder=folder)
    finally:
        await runner.cleanup()


def _checked(token: str, public: Collection[str], most_bytes: int) -> Middleware:
    @web.middleware
    async def checked(request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuses requests without a token, and turns what a user can mend into a sentence."""
        given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if request.path not in public and not hmac.compare_digest(given, f"Bearer {token}".encode()):
            return _said(401, "the token is missing or wrong; it is in the file `token` beside controller.json.")
        try:
            # Before it is read: who says that much may never send it.
            if (request.content_length or 0) > most_bytes:
                raise web.HTTPRequestEntityTooLarge(most_bytes, request.content_length or 0)
            return await handler(request)
        except RefusedError as error:
            return _said(error.status, str(error))
        except InputError as error:
            return _said(400, str(error))
        except web.HTTPRequestEntityTooLarge:
            return _said(413, f"the request is too large; a job file has at most {most_bytes:,} bytes.")
        except web.HTTPException as error:
            return _said(error.status, f"{request.method} {plain(request.path, MOST_SHOWN)}: {error.reason}.")
        except web.RequestPayloadError as error:
            return _said(400, f"the request's body cannot be read: {plain(str(error), MOST_SHOWN)}.")

    return checked


def _agents(listener: Listener) -> Handler:
    async def agents(request: web.Request) -> web.StreamResponse:
        """An agent's connection, from its hello to its end."""
        channel = web.WebSocketResponse(autoping=False, max_msg_size=MOST_MESSAGE_BYTES)
        await channel.prepare(request)
        ear = Ear(channel)
        try:
            # It may be long in coming, since an agent imports torch first; who waits for all of them has a limit.
            text = await ear.text()
            if text is None:
                return channel
            hello = decode(text)
            if not isinstance(hello, Hello):
                raise InputError(f"expected hello first; got {hello.KIND}.")
            link = await listener.agent(hello, channel)
        except InputError as error:
            await channel.close(code=1008, message=farewell(str(error)))
            return channel
        sender = asyncio.ensure_future(link.send_all())
        try:
            while (text := await ear.text()) is not None:
                listener.heard(link, decode(text))
            if not channel.closed and request.transport is not None:
                request.transport.abort()  # a farewell would wait for an answer
        except InputError as error:
            ear.gone = f"it said what no agent says: {error}"
            await channel.close(code=1008, message=farewell(str(error)))
        except Exception as error:
            listener.fail(error)
        finally:
            sender.cancel()
            listener.agent_left(link, ear.gone)
        return channel

    return agents


def _said(status: int, sentence: str) -> web.Response:
    """An HTTP answer that carries an error."""
    return web.json_response({"error": sentence}, status=status)
