"""The controller's port for agents and users: checks tokens and answers errors as sentences."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from synergy_core.errors import InputError
from synergy_exec.backends import Meeting
from synergy_exec.nodes.agents import Agents
from synergy_exec.plain import MOST_SHOWN, plain
from synergy_runs.files import atomic_file


class RefusedError(InputError):
    """Refuses a request with a status other than 400."""

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


def _said(status: int, sentence: str) -> web.Response:
    """An HTTP response with an error message."""
    return web.json_response({"error": sentence}, status=status)
