"""When the other end of a connection is taken for gone: closed at once, silent late, and never for one's own stall."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from synergy_exec import hearing
from synergy_exec.backends import get_backend
from synergy_exec.hearing import Ear, farewell
from synergy_exec.profiling import testbed as profiling
from synergy_exec.settings import Settings

Other = Callable[[aiohttp.ClientWebSocketResponse], Awaitable[None]]


def heard(other: Other, then: Callable[[], None] = lambda: None) -> tuple[list[str], str]:
    """What was heard of such another end, and why that ended. then: done in this end's loop after each message."""
    said: list[str] = []
    ended: asyncio.Future[str]

    async def listen(request: web.Request) -> web.WebSocketResponse:
        channel = web.WebSocketResponse(autoping=False)
        await channel.prepare(request)
        ear = Ear(channel)
        while (text := await ear.text()) is not None:
            said.append(text)
            then()
        if not ended.done():
            ended.set_result(ear.gone)
        if request.transport is not None:
            request.transport.abort()
        return channel

    async def through() -> str:
        nonlocal ended
        ended = asyncio.get_running_loop().create_future()
        application = web.Application()
        application.add_routes([web.get("/", listen)])
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
        async with aiohttp.ClientSession() as session, session.ws_connect(url, autoping=False) as channel:
            speaking = asyncio.ensure_future(other(channel))
            try:
                return await ended
            finally:
                speaking.cancel()
                await runner.cleanup()

    return said, asyncio.run(asyncio.wait_for(through(), 30))


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hearing, "PING_S", 0.1)
    monkeypatch.setattr(hearing, "PINGS", 3)


@pytest.mark.usefixtures("hasty")
def test_other_end_that_says_nothing_is_gone_after_so_many_pings() -> None:
    async def silent(channel: aiohttp.ClientWebSocketResponse) -> None:
        await channel.send_str("hello")
        await asyncio.sleep(60)

    assert heard(silent) == (["hello"], "it has not answered for 0 s")


@pytest.mark.usefixtures("hasty")
def test_other_end_that_only_answers_lives() -> None:
    async def answering(channel: aiohttp.ClientWebSocketResponse) -> None:
        for _ in range(10):
            ping = await channel.receive()
            assert ping.type == aiohttp.WSMsgType.PING
            await channel.pong(ping.data)
        await channel.send_str("still here")
        await channel.close(message=farewell("it has had enough"))

    assert heard(answering) == (["still here"], "it has had enough")


@pytest.mark.usefixtures("hasty")
def test_own_stall_is_not_counted_against_the_other_end() -> None:
    """A loop that stands still for as long as ten allowances hears what was said meanwhile."""

    async def speaking(channel: aiohttp.ClientWebSocketResponse) -> None:
        for number in range(4):
            await channel.send_str(str(number))
            await asyncio.sleep(0.01)
        await channel.close()

    assert heard(speaking, lambda: time.sleep(1.0)) == (["0", "1", "2", "3"], "it closed the connection")


def test_connection_that_breaks_is_noticed_at_once() -> None:
    async def dying(channel: aiohttp.ClientWebSocketResponse) -> None:
        await channel.send_str("hello")
        transport = channel.get_extra_info("socket")
        assert transport is not None
        channel._response.connection.transport.abort()  # type: ignore[union-attr]
        await asyncio.sleep(60)

    assert heard(dying) == (["hello"], "its connection broke")


def test_farewell_is_cut_between_characters() -> None:
    assert farewell("no") == b"no"
    assert farewell("ü" * 100).decode() == "ü" * 61


def test_agent_outlives_a_controller_that_stands_still(tmp_path: Path) -> None:
    """As when plans were enumerated in the event loop: eight seconds in which nobody answers the agent."""

    async def through() -> None:
        backend = get_backend("local", {"slots": 1})
        async with profiling.testbed(backend, tmp_path, lambda run: None, Settings()) as bench:  # type: ignore[arg-type,return-value]
            link = bench.agents.links[0]
            time.sleep(8.0)
            await asyncio.sleep(1.0)
            assert bench.agents.links.get(0) is link, (tmp_path / "agent-0.txt").read_text()

    asyncio.run(asyncio.wait_for(through(), 120))
