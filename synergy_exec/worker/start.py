"""How a worker process starts: its arguments, inherited descriptors, heartbeats, and the GPUs that it may see."""

from __future__ import annotations

import importlib
import mmap
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from synergy_core.units import GB
from synergy_exec.messages import Granted, Launch, Message, Retune, Stop
from synergy_exec.wire import decode, encode
from synergy_exec.worker.processes import adopt_orphans, die_with


@dataclass(frozen=True, slots=True)
class Start:
    """Arguments of one rank of a run.

    cores: CPU cores that it may use. cpus: its share of these cores, which other ranks may use, too. gpus: index of its
    CUDA device, or of the devices of all slots of a command; empty for slots of CPU cores. launched_s: time.time() when
    the agent was told to launch the run. environment: of a command, the variables that the controller was started with.
    """

    launch: Launch
    rank: int
    cores: tuple[int, ...]
    cpus: float
    gpus: tuple[int, ...]
    launched_s: float
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Descriptors:
    """Open files that a worker inherits.

    cache: the run's data cache on this node. store: where ranks meet. This is an anonymous file in memory if all ranks
    are on this node; otherwise the listening socket, on rank 0. When multiprocessing pickles this object for another
    process, it sends the open files with it.
    """

    agent: int
    heartbeat: int
    log: int
    cache: int
    store: int | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        here = (self.agent, self.heartbeat, self.log, self.cache, self.store)
        return _received, tuple(None if each is None else reduction.DupFd(each) for each in here)


def _received(*sent: Any) -> Descriptors:
    numbers: list[Any] = [None if each is None else each.detach() for each in sent]
    for number in numbers:
        if number is not None:
            os.set_inheritable(number, False)  # programs that a worker starts do not inherit it
    return Descriptors(*numbers)


# The code that runs in a fork of the forkserver.


WARM = (
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "synergy_exec.worker.rank",
)
"""Modules that the forkserver imports before it forks workers (`warm.py`)."""


def ready(answer: Connection) -> None:
    """Sends the process id of the forkserver, which is this process's parent."""
    answer.send(os.getppid())


def work(start: Start, descriptors: Descriptors) -> NoReturn:
    """Runs one rank, from its fork to its exit."""
    code = FAILED
    try:
        # A process group of its own can be killed as a whole, and gets no signals from the terminal.
        os.setpgid(0, 0)
        die_with(os.getppid(), signal.SIGKILL)
        adopt_orphans()
        for number, stream in ((1, sys.stdout), (2, sys.stderr)):
            os.dup2(descriptors.log, number)
            # All ranks print into one file. Each line is written at once, even with PYTHONUNBUFFERED, so none is torn.
            stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
        _limit_memory(start.launch)
        module = "script" if start.launch.file.command else "rank"
        code = importlib.import_module(f"synergy_exec.worker.{module}").run(start, descriptors)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        # Not sys.exit: threads of torch may still wait for other ranks.
        os._exit(code)


def _limit_memory(launch: Launch) -> None:
    """Limits the memory of this process, and of each that it starts, to `memory_gb_per_slot`, as on a full GPU."""
    if launch.settings.memory_gb_per_slot is not None:
        slots = len(launch.node.slots) if launch.file.command else 1
        limit_bytes = int(launch.settings.memory_gb_per_slot * slots * GB)
        resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))


# Exit codes of a worker, besides 0 (done) and PAUSED (saved and left on request).


FAILED = 1
"""An error of the job itself."""
PEER_LOST = 76
"""Another rank is gone or silent (EX_PROTOCOL). That rank or its agent reports why."""


class Heartbeat:
    """Heartbeats of a worker and its agent in shared memory, so that a step costs no message.

    The worker writes the time of its last heartbeat and how long the next may take; the agent writes when it last
    looked. All are seconds of the monotonic clock, which the processes of a machine share.
    """

    _FORM = struct.Struct("ddd")

    def __init__(self, descriptor: int) -> None:
        """descriptor: the shared memory. It may be closed afterwards."""
        self._memory = mmap.mmap(descriptor, self._FORM.size)

    @staticmethod
    def create() -> int:
        descriptor = os.memfd_create("heartbeat")
        os.ftruncate(descriptor, Heartbeat._FORM.size)
        return descriptor

    def beat(self, allowed_s: float) -> None:
        """The worker's heartbeat: it lives, and the next heartbeat comes within `allowed_s`."""
        struct.pack_into("dd", self._memory, 0, time.monotonic(), allowed_s)

    def silence_s(self) -> float:
        """Seconds since the worker's last heartbeat if it is overdue, else 0."""
        beat_s, allowed_s, _ = self._FORM.unpack_from(self._memory)
        silence_s: float = time.monotonic() - beat_s
        return silence_s if silence_s > allowed_s else 0.0

    def answer(self) -> None:
        struct.pack_into("d", self._memory, 16, time.monotonic())

    def unanswered_s(self) -> float:
        """Seconds since the agent last looked. It has done so once before the worker begins."""
        return time.monotonic() - float(self._FORM.unpack_from(self._memory)[2])


class AgentConnection:
    """A worker's connection to its agent: one message per line. The worker polls it at every step; no thread waits."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._unread = b""

    def say(self, message: Message) -> None:
        self._socket.sendall(encode(message).encode() + b"\n")

    def wait(self, seconds: float) -> None:
        """Returns after this time, or as soon as a message has arrived. A signal does not end the wait."""
        select.select([self._socket], [], [], seconds)

    def heard(self) -> list[Stop | Retune | Granted]:
        while True:
            try:
                received = self._socket.recv(4096, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            if not received:
                # The agent is gone, and the kernel is about to kill this process.
                break
            self._unread += received
        *lines, self._unread = self._unread.split(b"\n")
        return [each for line in lines if isinstance(each := decode(line), Stop | Retune | Granted)]


_VARIABLES = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
"""ROCm reads both, HIP's first (HIP documentation, "GPU isolation techniques"); CUDA reads its own."""


def visible(environment: Mapping[str, str]) -> tuple[str, list[str]]:
    """The variable that says which GPUs a process may see, and their names in it; no names if it may see all."""
    name = next((each for each in _VARIABLES if environment.get(each)), _VARIABLES[-1])
    return name, [each.strip() for each in environment[name].split(",")] if environment.get(name) else []


def see_only(gpus: Sequence[int], environment: Mapping[str, str]) -> dict[str, str]:
    """The environment variable that lets a process see only these GPUs.

    gpus: indices among those visible in `environment`. A library that uses the first GPU it finds then gets one of
    these.
    """
    name, names = visible(environment)
    return {name: ",".join(names[each] if names else str(each) for each in gpus)}
