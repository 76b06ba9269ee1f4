"""The agent's side of the zygote: forks, ends, and news of workers that have left."""

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
from functools import partial
from pathlib import Path
from typing import Any

from synergy_core.errors import InputError
from synergy_exec.worker import processes
from synergy_exec.worker.processes import die_with
from synergy_exec.worker.start import Descriptors, Start
from synergy_exec.worker.zygote import LONGEST_PACKET, PING_S

# Whether a process does anything, by the kernel's account of it.


LEAST_CPU = 0.02
"""Of the time that passes: what a process uses that only waits is less."""
LEAST_BYTES_PER_S = 100_000.0


class Activity:
    """Looks at a process again and again."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._cpu_s, self._bytes = _used(pid)

    def since(self, passed_s: float) -> bool:
        """Whether it has computed, read or written something worth the name in the time since it was last asked."""
        cpu_s, moved = _used(self._pid)
        active = cpu_s - self._cpu_s > LEAST_CPU * passed_s or moved - self._bytes > LEAST_BYTES_PER_S * passed_s
        self._cpu_s, self._bytes = cpu_s, moved
        return active


def _used(pid: int) -> tuple[float, float]:
    """CPU-seconds, of children that it has waited for too, and bytes read and written; zeros of one that is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        rows = (line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
        moved = {name: int(value) for name, value in rows}
    except (OSError, ValueError):
        return 0.0, 0.0
    ticks = sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK"), float(moved["rchar"] + moved["wchar"])


_LARGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}
"""Torch asks the kernel for pages of 2 MB for tensors of at least that size. Every rank is a new process, and gradients
are allocated again at each step: with pages of 4 kB half of the CPU time of such a step can be the kernel's."""
_LEAVING_S = 2.0
_SWEEPING_S = 3.0
"""How long what a zygote left behind may hold the agent up."""
_PINGS = 4
"""So many without an answer mean that it stands still: 6 s of the agent's own time."""
_IDLE = 20
"""So many times `PING_S` in which it does nothing mean that it stands still while it imports."""
_GONE = "the parent of workers is gone, and every worker with it"
_STANDS_STILL = f"the parent of workers did not answer for {_PINGS * PING_S:.0f} s and was killed, and every worker too"


class Zygote:
    """A zygote process, whose orphans this process adopts.

    died: set when it is gone, and all that came of its workers. why: of that, in words; "" before.
    """

    def __init__(self, process: subprocess.Popen[bytes], connection: socket.socket) -> None:
        self._process, self._connection = process, connection
        self._numbers = itertools.count()
        self._forked: dict[int, tuple[asyncio.Future[int], Callable[[int], None]]] = {}
        self._leavers: dict[int, Callable[[int], None]] = {}
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks: list[asyncio.Task[None]] = []
        self._unanswered = 0
        self.why = ""
        self.died = asyncio.Event()
        asyncio.get_running_loop().add_reader(connection, self._hear)

    @staticmethod
    async def start() -> Zygote:
        """A zygote with torch imported. Raises InputError if it does not start; what it says is on standard error."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        command = [sys.executable, "-m", "synergy_exec.worker.zygote", str(theirs.fileno()), str(os.getpid())]
        # Threads would not survive a fork; workers set their own number.
        environment = {**_LARGE_PAGES, **os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        with theirs:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                # From its first instruction on: one that is stopped while Python starts would outlive the agent.
                preexec_fn=partial(die_with, os.getpid(), signal.SIGKILL),
            )
        zygote = Zygote(process, ours)
        watching = asyncio.create_task(zygote._watch_import())
        try:
            await zygote._ready
        except ConnectionError:
            raise InputError(
                f"the parent of workers left with exit code {process.wait()} while importing torch; "
                "is synergy-cluster[exec] installed here? What it said stands above."
            ) from None
        finally:
            watching.cancel()
        zygote._tasks.append(asyncio.create_task(zygote._ask()))
        return zygote

    async def fork(self, start: Start, descriptors: Descriptors, left: Callable[[int], None], cgroup: str = "") -> int:
        """A new worker's process id. cgroup: the folder of the worker's own, "" for none.

        left: called once, when nothing is left of the worker and of what it started, with its exit code, or minus the
        number of a signal. Raises OSError.
        """
        request = next(self._numbers)
        packet = json.dumps({"fork": request, "start": start.text(), "cgroup": cgroup}).encode()
        if len(packet) > LONGEST_PACKET:
            raise OSError(f"the job's arguments take {len(packet)} bytes; at most {LONGEST_PACKET} can be given")
        if self.why:
            raise OSError(self.why)
        forked: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._forked[request] = forked, left
        socket.send_fds(self._connection, [packet], descriptors.all())
        return await forked

    def end(self, pids: Iterable[int]) -> None:
        """Kills workers and all that they have started; those that have left are passed over."""
        self._say(end=list(pids))

    def show(self, pid: int) -> None:
        """Has a worker write into its log where it stands."""
        self._say(show=[pid])

    async def close(self) -> None:
        """Ends it, and with it every worker that is left."""
        self._hang_up()
        for task in self._tasks:
            task.cancel()
        await self._bury(_LEAVING_S)

    async def _watch_import(self) -> None:
        """It answers no pings while it imports, which may take minutes, but in which it always computes or reads."""
        activity, idle = Activity(self._process.pid), 0
        while idle < _IDLE:
            await asyncio.sleep(PING_S)
            idle = 0 if activity.since(PING_S) else idle + 1
        self._process.kill()

    async def _ask(self) -> None:
        while not self.why:
            if self._unanswered == _PINGS:
                self.why = _STANDS_STILL
                # That its end of the connection is closed is heard, as ever.
                self._process.kill()
                return
            self._unanswered += 1
            self._say(ping=next(self._numbers))
            await asyncio.sleep(PING_S)

    async def _bury(self, patience_s: float) -> None:
        """Waits for the process, which is killed after so many seconds, and ends what it has left behind."""
        try:
            await asyncio.to_thread(self._process.wait, patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        # Wardens know by now that it is gone.
        await asyncio.to_thread(processes.end_all, _SWEEPING_S, grace_s=_SWEEPING_S / 2)

    def _hear(self) -> None:
        try:
            text = self._connection.recv(LONGEST_PACKET)
        except BlockingIOError:
            return
        except ConnectionResetError:
            text = b""
        self._unanswered = 0
        if text:
            self._heard(json.loads(text))
            return
        self._hang_up()
        self.why = self.why or _GONE
        self._tasks.append(asyncio.create_task(self._lose()))

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
        elif "ready" in packet:
            self._ready.set_result(None)

    async def _lose(self) -> None:
        await self._bury(0.0)
        self.died.set()
        if not self._ready.done():
            self._ready.set_exception(ConnectionError(self.why))
        for forked, _ in self._forked.values():
            forked.set_exception(ConnectionError(self.why))
        leavers, self._leavers = self._leavers, {}
        for left in leavers.values():
            left(-signal.SIGKILL)

    def _hang_up(self) -> None:
        if self._connection.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._connection)
            self._connection.close()

    def _say(self, **packet: Any) -> None:
        if self._connection.fileno() >= 0:
            self._connection.send(json.dumps(packet).encode())
