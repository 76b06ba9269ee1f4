"""A controller for tests of backends: a thread that many agents dial in to, and that a test speaks through."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from synergy_exec.backends import Meeting
from synergy_exec.messages import Hello, Message
from synergy_exec.wire import decode, encode

TOKEN = "a-token-of-tests"


class Controller:
    """Context manager. heard: (node, message), in order. hellos: of the agents that are connected."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.heard: list[tuple[int, Message]] = []
        self.hellos: dict[int, Hello] = {}
        self._sockets: dict[int, web.WebSocketResponse] = {}
        self._changed = threading.Condition()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()), daemon=True)
        self._ready = threading.Event()
        self._port = 0

    def __enter__(self) -> Controller:
        (self._folder / "token").write_text(TOKEN + "\n")
        self._thread.start()
        assert self._ready.wait(10)
        self.meeting = Meeting(
            url=f"http://127.0.0.1:{self._port}", token_file=self._folder / "token", folder=self._folder
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(10)

    def say(self, node: int, message: Message) -> None:
        asyncio.run_coroutine_threadsafe(self._sockets[node].send_str(encode(message)), self._loop).result(10)

    def wait(self, such: Callable[[], Any], timeout_s: float) -> Any:
        """What `such` gives, once that is true; it is asked after every message, hello and farewell."""
        with self._changed:
            assert self._changed.wait_for(such, timeout_s), f"not in {timeout_s:g} s\n{self.told()}"
            return such()

    def of(self, node: int, kind: type[Any]) -> list[Any]:
        return [message for sender, message in self.heard if sender == node and isinstance(message, kind)]

    def told(self) -> str:
        """What there is to see when a test fails."""
        logs = [f"{log}:\n{log.read_text()[-2000:]}" for log in sorted(self._folder.rglob("*.txt"))]
        return "\n".join([f"heard {self.heard[-10:]}", *logs])

    async def _serve(self) -> None:
        self._end = asyncio.Event()
        application = web.Application()
        application.add_routes([web.get("/agents", self._agent)])
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self._port = runner.addresses[0][1]
        self._ready.set()
        await self._end.wait()
        for channel in list(self._sockets.values()):
            await channel.close()
        await runner.cleanup()

    async def _agent(self, request: web.Request) -> web.WebSocketResponse:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise web.HTTPUnauthorized
        channel = web.WebSocketResponse()
        await channel.prepare(request)
        hello = decode(await channel.receive_str())
        assert isinstance(hello, Hello)
        self._sockets[hello.node] = channel
        self._note(lambda: self.hellos.update({hello.node: hello}))
        async for received in channel:
            message = decode(received.data)
            self._note(lambda message=message: self.heard.append((hello.node, message)))
        self._note(lambda: self.hellos.pop(hello.node))
        return channel

    def _note(self, change: Callable[[], object]) -> None:
        with self._changed:
            change()
            self._changed.notify_all()
