"""The agent's side of the zygote: forks, signals, and news of workers that have left."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import Any

from synergy_core.errors import InputError
from synergy_exec.worker.start import Descriptors, Start
from synergy_exec.worker.zygote import LONGEST_PACKET

_LEAVING_S = 2.0
_GONE = "the parent of workers is gone"


class Zygote:
    """A zygote process. `died` is set when it is gone, and all its workers with it."""

    def __init__(self, process: subprocess.Popen[bytes], connection: socket.socket) -> None:
        self._process, self._connection = process, connection
        self._requests = itertools.count()
        self._forked: dict[int, tuple[asyncio.Future[int], Callable[[int], None]]] = {}
        self._leavers: dict[int, Callable[[int], None]] = {}
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.died = asyncio.Event()
        asyncio.get_running_loop().add_reader(connection, self._hear)

    @staticmethod
    async def start() -> Zygote:
        """A zygote with torch imported. Raises InputError if it does not start; what it says is on standard error."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        command = [sys.executable, "-m", "synergy_exec.worker.zygote", str(theirs.fileno()), str(os.getpid())]
        # Threads would not survive a fork; workers set their own number.
        environment = os.environ | dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"), "1")
        with theirs:
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True
            )
        zygote = Zygote(process, ours)
        try:
            await zygote._ready
        except ConnectionError:
            raise InputError(
                f"the parent of workers left with exit code {process.wait()} while importing torch; "
                "is synergy-cluster[exec] installed here? What it said stands above."
            ) from None
        return zygote

    async def fork(self, start: Start, descriptors: Descriptors, left: Callable[[int], None]) -> int:
        """A new worker's process id. left: called once with its exit code, or minus the number of a signal.

        Raises OSError.
        """
        request = next(self._requests)
        packet = json.dumps({"fork": request, "start": start.text()}).encode()
        if len(packet) > LONGEST_PACKET:
            raise OSError(f"the job's arguments take {len(packet)} bytes; at most {LONGEST_PACKET} can be given")
        if self.died.is_set():
            raise OSError(_GONE)
        forked: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._forked[request] = forked, left
        socket.send_fds(self._connection, [packet], descriptors.all())
        return await forked

    def signal(self, pids: Iterable[int], number: signal.Signals) -> None:
        """Sends a signal to workers, those that have left excepted; SIGKILL also to all that they have started."""
        if not self.died.is_set():
            self._connection.send(json.dumps({"signal": number, "pids": list(pids)}).encode())

    async def close(self) -> None:
        """Ends it, and with it every worker that is left."""
        if not self.died.is_set():
            asyncio.get_running_loop().remove_reader(self._connection)
            self._connection.close()
        try:
            await asyncio.to_thread(self._process.wait, _LEAVING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)

    def _hear(self) -> None:
        try:
            text = self._connection.recv(LONGEST_PACKET)
        except BlockingIOError:
            return
        except ConnectionResetError:
            text = b""
        if text:
            self._heard(json.loads(text))
        else:
            self._lose()

    def _heard(self, packet: dict[str, Any]) -> None:
        if "left" in packet:
            self._leavers.pop(packet["left"])(packet["code"])
        elif "forked" in packet:
            forked, left = self._forked.pop(packet["forked"])
            if "pid" in packet:
                self._leavers[packet["pid"]] = left
                forked.set_result(packet["pid"])
            else:
                forked.set_exception(OSError(packet["error"]))
        else:
            self._ready.set_result(None)

    def _lose(self) -> None:
        asyncio.get_running_loop().remove_reader(self._connection)
        self._connection.close()
        self.died.set()
        if not self._ready.done():
            self._ready.set_exception(ConnectionError(_GONE))
        for forked, _ in self._forked.values():
            forked.set_exception(ConnectionError(_GONE))
        leavers, self._leavers = self._leavers, {}
        for left in leavers.values():
            left(-signal.SIGKILL)
