"""A port on which agents connect: the token, a websocket per agent, and what is said on it."""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from synergy_core.errors import InputError
from synergy_exec.backends import Meeting
from synergy_exec.messages import Hello, Message
from synergy_exec.nodes.agents import AgentLink
from synergy_exec.plain import MOST_SHOWN, plain
from synergy_exec.users import OWNER, User
from synergy_exec.wire import Ear, Tls, decode, farewell
from synergy_runs.files import atomic_file

MOST_MESSAGE_BYTES = 1_000_000
AGENTS = "/agents"
ASKING: ContextVar[User | None] = ContextVar("ASKING")
"""Who asks, while a request is answered; None where that needs no token."""


class RefusedError(InputError):
    """A request that is answered with another status than 400."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class Listener(ABC):
    """Who agents connect to."""

    def who(self, token: bytes) -> User | None:
        """Who has that token, which is not the one in the folder; None: nobody, and the request is refused."""
        return None

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
    tls: Tls | None = None,
) -> AsyncIterator[Meeting]:
    """Listens until the block ends. The token is new each time and stands in the folder's `token`, its owner's alone.

    routes: what else is answered, to whom `Listener.who` knows, too. public: paths of those that need no token. tls:
    None where connections are not encrypted. Raises InputError for a port that is taken, and for a certificate that
    cannot be used.
    """
    secure = None if tls is None else tls.shown()
    token = secrets.token_urlsafe()
    token_file = folder / "token"
    with atomic_file(token_file) as partial:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as stream:
            stream.write(token + "\n")
    app = web.Application(middlewares=[_checked(listener, token, public, most_bytes)], client_max_size=most_bytes)
    app.add_routes([web.get(AGENTS, _agents(listener)), *routes])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port, ssl_context=secure).start()
        except OSError as error:
            raise InputError(f"port={port}: {error.strerror}. port=0 takes a free one.") from error
        url = f"{'http' if tls is None else 'https'}://{host}:{runner.addresses[0][1]}"
        authority = "" if tls is None else str(tls.authority)
        yield Meeting(url=url, token_file=token_file, folder=folder, authority=authority)
    finally:
        await runner.cleanup()


def _checked(listener: Listener, token: str, public: Collection[str], most_bytes: int) -> Middleware:
    @web.middleware
    async def checked(request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuses requests without a token, and turns what a user can mend into a sentence."""
        given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        its_own = hmac.compare_digest(given, f"Bearer {token}".encode())
        scheme, _, users_token = given.partition(b" ")
        user = OWNER if its_own else listener.who(users_token) if scheme == b"Bearer" else None
        if request.path not in public and (user is None or (request.path == AGENTS and not its_own)):
            where = "it stands in the file `token` beside controller.json, a user's in SYNERGY_TOKEN"
            return _said(401, f"the token is missing or wrong; {where}.")
        ASKING.set(user)
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
