"""A worker's side of the socket to its agent."""

from __future__ import annotations

import socket

from synergy_exec.messages import Granted, Message, Rebuild, Retune, Stop
from synergy_exec.wire import decode, encode


class AgentConnection:
    """Lines both ways. Every step asks what has come; nothing waits and no thread listens."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._unread = b""

    def say(self, message: Message) -> None:
        """Sends a message to the agent."""
        self._socket.sendall(encode(message).encode() + b"\n")

    def heard(self) -> list[Stop | Retune | Rebuild | Granted]:
        """What the agent has said since the last call."""
        while True:
            try:
                received = self._socket.recv(4096, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            if not received:
                # The agent is gone; the kernel ends this process next.
                break
            self._unread += received
        *lines, self._unread = self._unread.split(b"\n")
        return [each for line in lines if isinstance(each := decode(line), Stop | Retune | Rebuild | Granted)]
