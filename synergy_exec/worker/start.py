"""What a worker is started with: a request, descriptors in a fixed order, and the GPUs that it may see."""

from __future__ import annotations

import importlib
import mmap
import os
import resource
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from synergy_core.units import GB
from synergy_exec.messages import Granted, Launch, Message, Retune, Stop
from synergy_exec.wire import decode, encode
from synergy_exec.worker.processes import adopt_orphans, die_with


@dataclass(frozen=True, slots=True)
class Start:
    """One rank of a run.

    cores: of the CPU, that it may use. cpus: how many of them are its own, for others may have a part of one. gpu:
    index of its CUDA device, None without; gpus: of all its slots, of a command. launched_s: time.time() at which the
    agent was told to launch the run.
    """

    launch: Launch
    rank: int
    cores: tuple[int, ...]
    cpus: float
    gpu: int | None
    launched_s: float
    gpus: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Descriptors:
    """Open files that a worker is given. cache: of the memory for data that the run has on this node. store: where
    ranks meet, a file in memory without a name where all are on this node; else on rank 0 the listening socket.

    Where multiprocessing sends one to another process, the files go along.
    """

    agent: int
    pulse: int
    log: int
    cache: int
    store: int | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        here = (self.agent, self.pulse, self.log, self.cache, self.store)
        return _received, tuple(None if each is None else reduction.DupFd(each) for each in here)


def _received(*sent: Any) -> Descriptors:
    numbers: list[Any] = [None if each is None else each.detach() for each in sent]
    for number in numbers:
        if number is not None:
            os.set_inheritable(number, False)  # what a worker runs as another program does not get them
    return Descriptors(*numbers)


# What runs in a fork of the forkserver.


WARM = (
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "synergy_exec.worker.rank",
)
"""What a worker needs and the forkserver has imported (`warm.py`)."""


def ready(answer: Connection) -> None:
    """Answers with the process id of the forkserver, which is this process's parent."""
    answer.send(os.getppid())


def work(start: Start, descriptors: Descriptors) -> NoReturn:
    """Runs one rank, from its fork to its exit."""
    code = FAILED
    try:
        # Its own process group can be bound to other cores as a whole, and gets no signals from the terminal.
        os.setpgid(0, 0)
        die_with(os.getppid(), signal.SIGKILL)
        adopt_orphans()
        for stream in (1, 2):
            os.dup2(descriptors.log, stream)
        _limit_memory(start.launch)
        code = importlib.import_module(_module_for(start.launch)).run(start, descriptors)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        # Threads of torch may still wait for peers; nothing of this process is needed any more.
        os._exit(code)


def _limit_memory(launch: Launch) -> None:
    """Beyond `memory_gb_per_slot` this process, and each that it starts, gets no memory: an error as on a full GPU."""
    if launch.memory_gb_per_slot is not None:
        slots = len(launch.slots) if launch.command else 1
        limit_bytes = int(launch.memory_gb_per_slot * slots * GB)
        resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))


def _module_for(launch: Launch) -> str:
    """The module that carries a launch out."""
    if launch.command:
        return "synergy_exec.worker.script"
    return "synergy_exec.profiling.measuring" if launch.measure else "synergy_exec.worker.rank"


# Exit codes of a worker, beside 0 (done) and PAUSED (saved and left as asked).


FAILED = 1
"""The job's own error."""
PEER_LOST = 76
"""Another rank is gone or silent (EX_PROTOCOL); why, that one or its agent knows."""


class Pulse:
    """Signs of life of a worker and of its agent: numbers in memory that both share, so that a step costs no message.

    The worker writes when it last gave a sign, and for how long that may be its last; the agent when it last looked.
    All are seconds on the clock that all processes of a machine share.
    """

    _FORM = struct.Struct("ddd")

    def __init__(self, descriptor: int) -> None:
        """descriptor: of the shared memory; it may be closed afterwards."""
        self._memory = mmap.mmap(descriptor, self._FORM.size)

    @staticmethod
    def create() -> int:
        descriptor = os.memfd_create("pulse")
        os.ftruncate(descriptor, Pulse._FORM.size)
        return descriptor

    def beat(self, allowed_s: float) -> None:
        """The worker says: alive; and the next beat comes within `allowed_s`."""
        struct.pack_into("dd", self._memory, 0, time.monotonic(), allowed_s)

    def silence_s(self) -> float:
        """Seconds that the worker has been silent if that is longer than it may be; else 0."""
        beat_s, allowed_s, _ = self._FORM.unpack_from(self._memory)
        silence_s: float = time.monotonic() - beat_s
        return silence_s if silence_s > allowed_s else 0.0

    def answer(self) -> None:
        struct.pack_into("d", self._memory, 16, time.monotonic())

    def unanswered_s(self) -> float:
        """Seconds since the agent last said so; it has before the worker begins."""
        return time.monotonic() - float(self._FORM.unpack_from(self._memory)[2])


class AgentConnection:
    """Lines both ways. Every step asks what has come; nothing waits and no thread listens."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._unread = b""

    def say(self, message: Message) -> None:
        self._socket.sendall(encode(message).encode() + b"\n")

    def heard(self) -> list[Stop | Retune | Granted]:
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
        return [each for line in lines if isinstance(each := decode(line), Stop | Retune | Granted)]


_VARIABLES = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
"""ROCm heeds both, and looks at its own first (HIP's documentation, "GPU isolation techniques"); CUDA heeds its own."""


def see_only(gpus: Sequence[int], environment: Mapping[str, str]) -> dict[str, str]:
    """What is to be in the environment of a process that sees only these of the GPUs that are seen in `environment`: a
    library that takes the first it finds takes one of them.
    """
    name = next((each for each in _VARIABLES if environment.get(each)), _VARIABLES[-1])
    visible = environment.get(name, "").split(",")
    return {name: ",".join(str(each) if visible == [""] else visible[each] for each in gpus)}
