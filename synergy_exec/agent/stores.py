"""Where a run's ranks meet: the port on which the agent of rank 0 listens for their store."""

from __future__ import annotations

import errno
import socket


def listen(host: str, ports: str) -> socket.socket | None:
    """A socket that listens at this address of the machine; None while none of the ports is free.

    ports: such as 29500-29599, both included; "": any. Raises OSError for an address that is not this machine's.
    """
    first, _, last = ports.partition("-")
    for port in range(int(first), int(last) + 1) if ports else [0]:
        try:
            return socket.create_server(
                (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=128
            )
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
    return None
