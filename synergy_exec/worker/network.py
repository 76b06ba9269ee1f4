"""Chooses the network interface of a rank."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from pathlib import Path

from synergy_core.errors import unknown

_SIOCGIFADDR = 0x8915
_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def check_interface(name: str) -> None:
    """Raises InputError if this machine has no interface of that name."""
    known = [each for _, each in socket.if_nameindex()]
    if name not in known:
        hint = f"These are the interfaces of {socket.gethostname()}; null finds the right one."
        raise unknown("interface", name, known, hint=hint)


def talk_over(interface: str | None, store_host: str) -> None:
    """Makes gloo and NCCL use an interface.

    interface: its name; None for the one by which this machine reaches the store, unless the environment names another.
    (By default gloo looks up the machine's own name, which may fail.) store_host: "" if all ranks are on this machine;
    they then use the loopback interface, which no other machine reaches. Raises InputError if there is no such
    interface.
    """
    if interface is not None:
        check_interface(interface)
    within = "" if store_host else "lo"
    chosen = within or interface or interface_to(store_host)
    # NCCL takes a name as a prefix unless "=" comes first (NCCL documentation, "NCCL_SOCKET_IFNAME"); gloo as it is.
    for each, name in zip(_VARIABLES, (chosen, f"={chosen}"), strict=True):
        if chosen and (within or interface or each not in os.environ):
            os.environ[each] = name


def interface_to(host: str) -> str:
    """The interface by which this machine reaches a host; "" if unknown."""
    try:
        family, socket_type, protocol, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket_type, protocol) as asking:
            asking.connect(address)  # sends nothing: the kernel only looks up the route
            own = ipaddress.ip_address(str(asking.getsockname()[0]).partition("%")[0])
    except OSError:
        return ""
    return next((name for name, each in addresses() if each == own), "lo" if own.is_loopback else "")


def addresses() -> list[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    """Pairs of interface and address of this machine."""
    found: list[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no IPv4 address
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                found.append((name, ipaddress.IPv4Address(answer[20:24])))
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            found.append((name, ipaddress.IPv6Address(bytes.fromhex(digits))))
    return found
