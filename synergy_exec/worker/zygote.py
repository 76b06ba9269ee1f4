"""The warm parent of workers: it has imported torch, and forks a worker in a fraction of a second.

    python -m synergy_exec.worker.zygote DESCRIPTOR PARENT

DESCRIPTOR is a seqpacket socket to the agent PARENT. Each packet is a JSON object:
    agent → zygote   {"fork": REQUEST, "start": text}, with descriptors; {"signal": number, "pids": [...]}
    zygote → agent   {"ready": pid}; {"forked": REQUEST, "pid": pid}, or {"forked": REQUEST, "error": text};
                     {"left": pid, "code": exit code, or minus the signal's number}
It runs no operator, starts no thread and touches no GPU, so its children may do all three.
"""

from __future__ import annotations

import importlib
import json
import os
import selectors
import signal
import socket
import sys
import traceback
from typing import Any

from synergy_exec.worker.parent import adopt_orphans, die_with
from synergy_exec.worker.start import Descriptors, Start

LONGEST_PACKET = 1 << 17
WARM = (
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "synergy_exec.worker.rank",
)


def main() -> None:
    """Forks workers until the agent closes its end; then none is left."""
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    die_with(parent, signal.SIGKILL)
    adopt_orphans()
    for module in WARM:
        importlib.import_module(module)
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        sys.exit(f"zygote: {threads} threads after the imports, so it must not fork; set OPENBLAS_NUM_THREADS=1")
    Forker(socket.socket(fileno=descriptor)).serve()
    # Taking torch down in order takes seconds.
    os._exit(0)


class Forker:
    """The agent's socket, and the workers that have not been reaped."""

    def __init__(self, agent: socket.socket) -> None:
        self._agent = agent
        self._workers: set[int] = set()
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)

    def serve(self) -> None:
        """Forks and reaps workers until the agent's end is closed."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        waiting = selectors.DefaultSelector()
        waiting.register(self._agent, selectors.EVENT_READ)
        waiting.register(self._woken, selectors.EVENT_READ)
        self._say(ready=os.getpid())
        while True:
            ready = [key.fileobj for key, _ in waiting.select()]
            if self._woken in ready:
                self._woken.recv(4096)
                self._reap()
            if self._agent in ready and not self._hear():
                self._signal(self._workers, signal.SIGKILL)
                return

    def _hear(self) -> bool:
        text, descriptors = _receive(self._agent)
        if not text:
            return False
        packet = json.loads(text)
        if "fork" in packet:
            self._fork(packet["fork"], packet["start"], descriptors)
        else:
            # Only those not yet reaped: a number may have gone to another process since.
            self._signal(self._workers.intersection(packet["pids"]), packet["signal"])
        return True

    def _fork(self, request: int, start: str, descriptors: list[int]) -> None:
        zygote = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            self._say(forked=request, error=f"cannot fork: {error.strerror}")
        else:
            if pid == 0:
                self._become_worker(zygote, start, Descriptors(*descriptors))
            self._workers.add(pid)
            self._say(forked=request, pid=pid)
        for each in descriptors:
            os.close(each)

    def _become_worker(self, zygote: int, start: str, descriptors: Descriptors) -> None:
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            # A session of its own: what it starts can be killed with it, and the terminal's signals pass it by.
            os.setsid()
            die_with(zygote, signal.SIGKILL)
            for end in (self._agent, self._woken, self._waker):
                end.close()
            for stream in (1, 2):
                os.dup2(descriptors.log, stream)
            rank = importlib.import_module("synergy_exec.worker.rank")
            code = rank.run(Start.parse(start), descriptors)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            # Threads of torch may still wait for peers; nothing of this process is needed any more.
            os._exit(code)

    def _reap(self) -> None:
        while True:
            try:
                left = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if left is None:
                return
            ours = left.si_pid in self._workers
            if ours:
                # While it is unreaped its group cannot be another's.
                self._signal([left.si_pid], signal.SIGKILL)
                self._workers.discard(left.si_pid)
            _, status = os.waitpid(left.si_pid, 0)
            if ours:
                self._say(left=left.si_pid, code=os.waitstatus_to_exitcode(status))

    def _signal(self, pids: Any, number: int) -> None:
        for pid in pids:
            try:
                if number == signal.SIGKILL:
                    os.killpg(pid, number)
                else:
                    os.kill(pid, number)
            except ProcessLookupError:
                # Just forked, and not yet the leader of its group.
                os.kill(pid, number)

    def _say(self, **packet: Any) -> None:
        self._agent.send(json.dumps(packet).encode())


def _receive(agent: socket.socket) -> tuple[bytes, list[int]]:
    try:
        text, descriptors, _, _ = socket.recv_fds(agent, LONGEST_PACKET, 8)
    except ConnectionResetError:
        return b"", []
    return text, descriptors


if __name__ == "__main__":
    main()
