"""The warm parent of workers: it has imported torch, and forks a worker in a fraction of a second.

    python -m synergy_exec.worker.zygote DESCRIPTOR PARENT

DESCRIPTOR is a seqpacket socket to the agent PARENT. Each packet is a JSON object:
    agent → zygote   {"fork": REQUEST, "start": text, "cgroup": folder or ""}, with descriptors;
                     {"end": [pid, ...]}; {"show": [pid, ...]}; {"ping": number}
    zygote → agent   {"ready": pid}; {"forked": REQUEST, "pid": pid}, or {"forked": REQUEST, "error": text};
                     {"left": pid, "code": exit code, or minus the signal's number}; {"pong": number}
A warden stands between it and each worker (warden.py): `left` means that nothing is left of what the worker has
started. It runs no operator, starts no thread and touches no GPU, so its children may do all three.
"""

from __future__ import annotations

import errno
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from synergy_exec.worker import processes
from synergy_exec.worker.processes import adopt_orphans, die_with
from synergy_exec.worker.start import Descriptors, Start

# A worker's parent, which stays until nothing is left of what the worker has started.
#
# A fork of the zygote that touches next to no memory. It adopts what the worker's processes leave behind, so their
# sessions, groups and early ends do not matter. When the worker has ended the rest is killed and reaped; only then
# does
# the warden leave, and only then is the worker's slot free. When the zygote is gone it ends the worker by itself. A
# warden that is killed takes the worker along, and what else there was comes to the zygote.
#
# It reports two numbers to the zygote, packed by `FORM`: at once the worker's process number, or minus the errno where
# it
# could not be forked; at the end its exit code, or minus the signal's number.


FORM = struct.Struct("i")
END, SHOW = signal.SIGUSR2, signal.SIGUSR1
"""What a warden is told by: to end its worker; to have it write where it stands. SIGTERM is not among them: Slurm sends
it to every process of a step at once, and workers are to save then."""
_HEARD = {signal.SIGCHLD, END, SHOW}


def guard(
    zygote: int, report: int, cgroup: str, descriptors: Iterable[int], become_worker: Callable[[int], NoReturn]
) -> NoReturn:
    """Turns this fork of the zygote into a warden, and a fork of it into the worker.

    report: the pipe to the zygote. cgroup: of this worker alone, "" for none. descriptors: the worker's.
    become_worker: called in the worker, with the warden's process number.
    """
    # Taken one by one by sigwait: none interrupts anything, none is missed.
    signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
    os.setpgid(0, 0)
    die_with(zygote, END)
    adopt_orphans()
    warden = os.getpid()
    try:
        worker = os.fork()
    except OSError as error:
        os.write(report, FORM.pack(-(error.errno or 1)))
        os._exit(1)
    if worker == 0:
        os.close(report)
        _enter(cgroup)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HEARD)
        become_worker(warden)
    os.write(report, FORM.pack(worker))
    for each in descriptors:
        os.close(each)
    code = _outlive(worker)
    _kill_all_in(cgroup)
    processes.end_all()
    with suppress(BrokenPipeError):  # the zygote is gone
        os.write(report, FORM.pack(code))
    os._exit(0)


def _outlive(worker: int) -> int:
    """The worker's exit code, once it has ended; reaps its orphans meanwhile."""
    while True:
        number = signal.sigwait(_HEARD)
        if number == END:
            os.kill(worker, signal.SIGKILL)
        elif number == SHOW:
            os.kill(worker, SHOW)
        ended = dict(processes.reaped())
        if worker in ended:
            return ended[worker]


def _enter(cgroup: str) -> None:
    if cgroup:
        try:
            Path(cgroup, "cgroup.procs").write_text("0")
        except OSError as error:
            print(f"{cgroup} cannot be entered: {error.strerror}", flush=True)


def _kill_all_in(cgroup: str) -> None:
    """At one stroke, which nothing can fork out of; kernels before 5.14 cannot."""
    if cgroup:
        with suppress(OSError):
            Path(cgroup, "cgroup.kill").write_text("1")


LONGEST_PACKET = 1 << 17
PING_S = 1.5
"""Between two pings of the agent."""
_MOST_WAITS = 40
"""An agent from which nothing came for so many times `PING_S` is gone. They are counted, as in hearing.py: after a
standstill of the whole machine one has passed."""
_ENDING_S = 1.5
"""How long it waits for its workers' ends before its own."""
WARM = (
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "synergy_exec.worker.rank",
)


def main() -> None:
    """Forks workers until the agent closes its end, or is silent for too long; then none is left."""
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    die_with(parent, signal.SIGKILL)
    adopt_orphans()
    # For the agent, which ends this; Slurm tells all processes of a step. Workers put a handler in its place.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if not os.path.exists(f"/proc/{os.getpid()}/task/{os.getpid()}/children"):
        sys.exit("zygote: this kernel does not tell a process's children (CONFIG_PROC_CHILDREN)")
    for module in WARM:
        importlib.import_module(module)
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        sys.exit(f"zygote: {threads} threads after the imports, so it must not fork; set OPENBLAS_NUM_THREADS=1")
    # To look through all this for garbage would copy it, in every fork.
    gc.freeze()
    Forker(socket.socket(fileno=descriptor)).serve()
    # By their wardens: should this process be killed meanwhile, they go on.
    processes.end_all(_ENDING_S, grace_s=_ENDING_S)
    # Taking torch down in order takes seconds.
    os._exit(0)


class Ward(NamedTuple):
    """What a warden guards. report: the pipe on which it says how the worker has ended."""

    worker: int
    report: int


class Forker:
    """The agent's socket, and the wardens that have not been reaped."""

    def __init__(self, agent: socket.socket, *, ping_s: float = PING_S) -> None:
        self._agent, self._ping_s = agent, ping_s
        self._wards: dict[int, Ward] = {}
        self._unguarded: list[int] = []
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)

    def serve(self) -> None:
        """Forks and reaps until the agent's end is closed, or the agent is silent for too long; has all workers end."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        waiting = selectors.DefaultSelector()
        waiting.register(self._agent, selectors.EVENT_READ)
        waiting.register(self._woken, selectors.EVENT_READ)
        self._say(ready=os.getpid())
        waits = 0
        while waits < _MOST_WAITS:
            ready = [key.fileobj for key, _ in waiting.select(self._ping_s)]
            if self._woken in ready:
                self._woken.recv(4096)
                self._reap()
            if self._agent in ready:
                waits = 0
                if not self._hear():
                    break
            elif not ready:
                waits += 1
        if waits:
            print(f"zygote: nothing from the agent for {waits * self._ping_s:g} s; ends its workers", file=sys.stderr)
        self._tell([ward.worker for ward in self._wards.values()], END)

    def _hear(self) -> bool:
        text, descriptors = _receive(self._agent)
        if not text:
            return False
        packet = json.loads(text)
        if "fork" in packet:
            self._fork(packet["fork"], packet["start"], packet["cgroup"], descriptors)
        elif "ping" in packet:
            self._say(pong=packet["ping"])
        elif "end" in packet:
            self._tell(packet["end"], END)
        else:
            self._tell(packet["show"], SHOW)
        return True

    def _fork(self, request: int, start: str, cgroup: str, descriptors: list[int]) -> None:
        zygote = os.getpid()
        report, reporting = os.pipe()
        worker = -errno.EAGAIN
        try:
            child = os.fork()
        except OSError as error:
            child, worker = 0, -(error.errno or errno.EAGAIN)
        else:
            if child == 0:
                os.close(report)
                self._become_warden(zygote, reporting, start, cgroup, descriptors)
        for each in (reporting, *descriptors):
            os.close(each)
        if child:
            worker = _reported(report) or worker
        if worker > 0:
            self._wards[child] = Ward(worker, report)
            self._say(forked=request, pid=worker)
        else:
            os.close(report)
            self._say(forked=request, error=f"cannot fork: {os.strerror(-worker)}")

    def _become_warden(self, zygote: int, report: int, start: str, cgroup: str, descriptors: list[int]) -> NoReturn:
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for end in (self._agent, self._woken, self._waker):
                end.close()
            for ward in self._wards.values():
                os.close(ward.report)
            become_worker = partial(_become_worker, start, Descriptors(*descriptors))
            guard(zygote, report, cgroup, descriptors, become_worker)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    def _reap(self) -> None:
        for pid, _ in processes.reaped():
            ward = self._wards.pop(pid, None)
            if ward is None:
                continue
            code = _reported(ward.report)
            os.close(ward.report)
            if code is None:
                self._unguarded.append(ward.worker)
            else:
                self._say(left=ward.worker, code=code)
        # Of a warden that was killed; the end of each wakes this up again.
        strays = [pid for pid in processes.children(os.getpid()) if pid not in self._wards]
        processes.kill(strays)
        if not strays:
            for worker in self._unguarded:
                self._say(left=worker, code=-signal.SIGKILL)
            self._unguarded.clear()

    def _tell(self, workers: list[int], number: signal.Signals) -> None:
        """Their wardens, which are not reaped yet: so no number has gone to another process."""
        for pid, ward in self._wards.items():
            if ward.worker in workers:
                os.kill(pid, number)
                if number == END:
                    # Its worker may have stopped it.
                    os.kill(pid, signal.SIGCONT)

    def _say(self, **packet: Any) -> None:
        # An agent that is gone is found out by what is to be heard of it next.
        with suppress(BrokenPipeError, ConnectionResetError):
            self._agent.send(json.dumps(packet).encode())


def _become_worker(start: str, descriptors: Descriptors, parent: int) -> NoReturn:
    code = 1
    try:
        # Its own process group can be bound to other cores as a whole, and gets no signals from the terminal.
        os.setpgid(0, 0)
        die_with(parent, signal.SIGKILL)
        for stream in (1, 2):
            os.dup2(descriptors.log, stream)
        rank = importlib.import_module("synergy_exec.worker.rank")
        code = rank.run(Start.parse(start), descriptors)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        # Threads of torch may still wait for peers; nothing of this process is needed any more.
        os._exit(code)


def _reported(report: int) -> int | None:
    """The next number that a warden reports; None where it is gone."""
    packed = os.read(report, FORM.size)
    return FORM.unpack(packed)[0] if packed else None


def _receive(agent: socket.socket) -> tuple[bytes, list[int]]:
    try:
        # What a worker runs as another program does not inherit them.
        text, descriptors, _, _ = socket.recv_fds(agent, LONGEST_PACKET, 8, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        return b"", []
    return text, descriptors


if __name__ == "__main__":
    main()
