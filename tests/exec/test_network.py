"""Which interface ranks talk over, and where they meet."""

from __future__ import annotations

import ipaddress
import os
import socket
from pathlib import Path

import pytest
from agents_controller import Controller

from synergy_core.errors import InputError
from synergy_exec.messages import Kill, Noted, Reserve, Reserved
from synergy_exec.settings import Settings
from synergy_exec.worker import network
from synergy_runs.settings import build


def test_own_addresses_are_found_and_lead_to_their_interfaces() -> None:
    found = network.addresses()
    assert ("lo", ipaddress.ip_address("127.0.0.1")) in found
    for name, address in found:
        if address.version == 4:
            assert network.interface_to(str(address)) == name
    assert network.interface_to("127.0.0.2") == "lo"
    assert network.interface_to("no such host") == ""


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_a_store_at_an_address_of_the_new_kind_is_no_error() -> None:
    assert network.interface_to("::1") in ("lo", "")


def test_what_is_set_goes_before_what_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    network.talk_over(None, "127.0.0.1")
    assert _variables() == ("lo", "ib0")
    network.talk_over("lo", "127.0.0.1")
    assert _variables() == ("lo", "lo")
    with pytest.raises(InputError, match="unknown interface 'eth7'"):
        network.talk_over("eth7", "127.0.0.1")


def _variables() -> tuple[str | None, str | None]:
    return os.environ.get("GLOO_SOCKET_IFNAME"), os.environ.get("NCCL_SOCKET_IFNAME")


def test_ranks_meet_at_ports_of_the_range_and_wait_for_one(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, Controller(tmp_path) as controller:
        port = taken.getsockname()[1]
        controller.start_agent()
        controller.say(Reserve(run=7, ports=f"{port}-{port}"))
        said = controller.wait(Noted, lambda each: each.run == 7)
        assert said.text == f"waits until one of ports={port}-{port} is free on 127.0.0.1"
        assert not [each for each in controller.heard if isinstance(each, Reserved)]
        taken.close()
        assert controller.wait(Reserved, lambda each: each.run == 7).port == port


def test_a_run_that_waits_for_a_port_can_be_dropped(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, Controller(tmp_path) as controller:
        port = taken.getsockname()[1]
        controller.start_agent()
        controller.say(Reserve(run=7, ports=f"{port}-{port}"))
        controller.wait(Noted)
        controller.say(Kill(run=7))
        taken.close()
        controller.say(Reserve(run=8, ports=f"{port}-{port}"))
        assert controller.wait(Reserved).run == 8


@pytest.mark.parametrize("ports", ["29500", "29600-29500", "0-5", "29500-70000", "a-b"])
def test_a_range_of_ports_that_is_none_is_refused(ports: str) -> None:
    with pytest.raises(InputError, match=r"expected two ports such as 29500-29599, or null"):
        build(Settings, {"ports": ports})


def test_ranks_meet_at_the_address_that_the_controller_reaches_and_at_no_other(tmp_path: Path) -> None:
    with Controller(tmp_path) as controller:
        controller.start_agent()
        controller.say(Reserve(run=7, ports=""))
        at = controller.wait(Reserved, lambda each: each.run == 7)
        assert at.host == "127.0.0.1"
        socket.create_connection((at.host, at.port), timeout=5).close()
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.9", at.port), timeout=5)
