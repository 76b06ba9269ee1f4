"""How ranks connect: interfaces, ports, the store of a run, and lost connections."""

import asyncio
import ipaddress
import os
import socket
import time
from pathlib import Path

import aiohttp
import groups
import pytest
from aiohttp import web
from exec.pretended import refuses
from exec.real import Controller

from synergy_exec import wire as hearing
from synergy_exec.messages import Kill, Noted, Reserve, Reserved
from synergy_exec.training.ranks import Ranks
from synergy_exec.wire import Ear, farewell
from synergy_exec.worker import network, processes


def test_own_addresses_are_found_and_lead_to_their_interfaces():
    found = network.addresses()
    assert ("lo", ipaddress.ip_address("127.0.0.1")) in found
    for name, address in found:
        if address.version == 4:
            assert network.interface_to(str(address)) == name
    assert network.interface_to("127.0.0.2") == "lo"
    assert network.interface_to("no such host") == ""
    assert network.interface_to("::1") in ("lo", "")


def test_what_is_set_goes_before_what_is_found(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    network.talk_over(None, "127.0.0.1")
    assert _variables() == ("lo", "ib0")
    network.talk_over("lo", "127.0.0.1")
    assert _variables() == ("lo", "=lo")
    refuses("unknown interface 'eth7'", network.talk_over, "eth7", "127.0.0.1")


def _variables():
    return os.environ.get("GLOO_SOCKET_IFNAME"), os.environ.get("NCCL_SOCKET_IFNAME")


def test_ranks_meet_at_ports_of_the_range_and_at_the_address_that_the_controller_reaches_alone(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken, Controller(tmp_path) as controller:
        port = taken.getsockname()[1]
        controller.start_agent()
        controller.say(Reserve(run=7, ports=f"{port}-{port}"))
        said = controller.wait(Noted, lambda each: each.run == 7)
        assert f"ports={port}-{port}" in said.text
        controller.say(Reserve(run=8, ports=f"{port}-{port}"))
        controller.wait(Noted, lambda each: each.run == 8)
        controller.say(Kill(run=8))  # one that waits can be dropped
        assert not [each for each in controller.heard if isinstance(each[1], Reserved)]
        taken.close()
        assert controller.wait(Reserved, lambda each: each.run == 7).port == port
        at = controller.reserved(9)
        assert at.host == "127.0.0.1"
        socket.create_connection((at.host, at.port), timeout=5).close()
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.9", at.port), timeout=5)


# Where the ranks of a run on one machine meet, and that what they exchange is data

TWO = 2
TOLD = {"a": [None, True, 0.1, "b"]}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Both ranks of a run that trains, by process number."""
    with Controller(tmp_path_factory.mktemp("run")) as controller:
        controller.start_agent(slots=TWO)
        launch = controller.launch("Plain", {"pause_s": 0.1}, world=TWO, work=1e9)
        controller.reached(launch, 2)
        yield [pid for pid in processes.descendants(os.getpid()) if stores(pid)]
        controller.say(Kill(run=launch.run))
        controller.ended(launch)


def stores(pid):
    """What a process has open of the ranks' store: memory without a name, so no other user can open it."""
    try:
        return [each for each in Path(f"/proc/{pid}/fd").iterdir() if os.readlink(each).startswith("/memfd:store")]
    except OSError:
        return []


def test_ranks_on_one_machine_listen_on_its_loopback_interface_alone(ranks):
    assert len(ranks) == TWO
    listening = [address for pid in ranks for address in listens(pid)]
    assert listening  # gloo's own connections between ranks
    assert {address.partition(":")[0] for address in listening} == {"0100007F"}


def listens(pid):
    """Addresses on which a process listens over TCP, as the kernel writes them."""
    inodes = {os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir() if each.exists() or each.is_symlink()}
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]


class OddError(Exception):
    """One that neither Python nor Synergy has."""


def exchanged(case):
    ranks = Ranks()
    if case == "values":
        return ranks.together(lambda: (ranks.rank, TOLD))
    if case == "long":
        return ranks.together(lambda: "é" * 3000 * ranks.rank)

    def fail():
        if ranks.rank == 1:
            raise {"known": OSError(28, "No space left"), "odd": OddError("why")}[case]

    try:
        ranks.together(fail)
    except Exception as error:
        return [ranks.rank, type(error).__name__, str(error)]
    return None


def test_ranks_tell_each_other_values_and_errors():
    found = groups.run({TWO: [(exchanged, case) for case in ("values", "long", "known", "odd")]})
    assert found[exchanged, "values"] == [[rank, TOLD] for rank in range(TWO)]
    assert found[exchanged, "long"] == ["", "é" * 3000]
    assert found[exchanged, "known"] == [0, "OSError", "[Errno 28] No space left"]
    assert found[exchanged, "odd"] == [0, "RuntimeError", "OddError: why"]


# When the other end of a connection is taken for gone


async def silent(channel):
    await channel.send_str("hello")
    await asyncio.sleep(60)


async def answering(channel):
    for _ in range(10):
        ping = await channel.receive()
        assert ping.type == aiohttp.WSMsgType.PING
        await channel.pong(ping.data)
    await channel.send_str("still here")
    await channel.close(message=farewell("it has had enough"))


async def speaking(channel):
    for number in range(4):
        await channel.send_str(str(number))
        await asyncio.sleep(0.01)
    await channel.close()


async def dying(channel):
    await channel.send_str("hello")
    channel._response.connection.transport.abort()
    await asyncio.sleep(60)


@pytest.mark.parametrize(
    ("other", "stall_s", "said", "why"),
    [
        (silent, 0.0, ["hello"], "it has not answered for 0 s"),
        (answering, 0.0, ["still here"], "it has had enough"),
        # A loop that stands still for as long as ten allowances hears what was said meanwhile.
        (speaking, 1.0, ["0", "1", "2", "3"], "it closed the connection"),
        (dying, 0.0, ["hello"], "its connection broke"),
    ],
)
def test_an_end_that_answers_lives_and_one_that_is_gone_is_noticed(monkeypatch, other, stall_s, said, why):
    """stall_s: for which this end's loop stands still after each message."""
    monkeypatch.setattr(hearing, "PING_S", 0.1)
    monkeypatch.setattr(hearing, "PINGS", 3)
    heard, ended = [], asyncio.Queue()

    async def listen(request):
        channel = web.WebSocketResponse(autoping=False)
        await channel.prepare(request)
        ear = Ear(channel)
        while (text := await ear.text()) is not None:
            heard.append(text)
            time.sleep(stall_s)
        ended.put_nowait(ear.gone)
        if request.transport is not None:
            request.transport.abort()
        return channel

    async def through():
        application = web.Application()
        application.add_routes([web.get("/", listen)])
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
        async with aiohttp.ClientSession() as session, session.ws_connect(url, autoping=False) as channel:
            talking = asyncio.ensure_future(other(channel))
            try:
                return await ended.get()
            finally:
                talking.cancel()
                await runner.cleanup()

    assert asyncio.run(asyncio.wait_for(through(), 30)) == why
    assert heard == said
