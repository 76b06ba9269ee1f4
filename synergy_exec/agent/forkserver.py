"""Starts workers as forks of multiprocessing's forkserver, which has imported torch.

Each worker leads its own process group. It adopts orphans among its descendants; when the worker exits, the forkserver
adopts its remaining processes (`processes.adopt_orphans`). The agent kills these before it reports that the worker has
exited, so nothing runs on a free slot.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from multiprocessing.context import ForkServerContext, ForkServerProcess

from synergy_core.errors import InputError
from synergy_exec.worker import processes
from synergy_exec.worker.start import Descriptors, Start, ready, work

_ENVIRONMENT = {
    # Lets torch request pages of 2 MB for large tensors. Every rank is a new process and allocates gradients again at
    # each step; with pages of 4 kB the kernel can take half of a step's CPU time.
    "THP_MEM_ALLOC_ENABLE": "1",
    # Threads do not survive a fork; workers set their own number.
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}
JOBS_PATH = "SYNERGY_PYTHONPATH"
"""Variable in an agent's environment with the PYTHONPATH of commands; the agent's own has Synergy's folder, too."""
_OF_A_STEP = re.compile(
    r"(SLURM_(STEP.*|PROCID|LOCALID|NODEID|GTIDS|TASK_PID|TASKS_PER_NODE|N?TASKS.*|NPROCS|CPU_BIND.*|SRUN_.*)|PMIX?_.*)"
)
"""Variables of a step of Slurm and its tasks. A library would take them for those of the command's ranks."""
_PRELOAD = "synergy_exec.worker.warm"
_LOOK_S = 2.0
_LOST_PARENT = 255
"""multiprocessing's exit code of a process whose forkserver has died or is dying."""
_DYING_S = 0.5
_PAUSE_S = 0.002


class Forkserver:
    """The forkserver of one agent.

    inherited: the environment of commands. died: set when the forkserver and every worker are gone. why: the cause in
    words; "" while the forkserver lives.
    """

    def __init__(self, context: ForkServerContext, pid: int, inherited: Mapping[str, str]) -> None:
        self._context, self._pid, self.inherited = context, pid, inherited
        self._began = processes.began(pid)
        self._workers: dict[int, tuple[ForkServerProcess, Callable[[int], None]]] = {}
        self._others = set(processes.children(os.getpid()))
        self._one = asyncio.Lock()
        self._cleaning: set[asyncio.Task[None]] = set()
        self.why = ""
        self.died = asyncio.Event()
        self._watching = asyncio.create_task(self._watch())

    @staticmethod
    async def start() -> Forkserver:
        """Starts a forkserver; waits until it has imported torch. Raises InputError if that fails; stderr says why."""
        inherited = {name: value for name, value in os.environ.items() if not _OF_A_STEP.fullmatch(name)}
        own = inherited.pop("PYTHONPATH", "")
        if path := inherited.pop(JOBS_PATH, own):
            inherited["PYTHONPATH"] = path
        os.environ |= {name: value for name, value in _ENVIRONMENT.items() if name not in os.environ}
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([_PRELOAD])

        def asked() -> int:
            ours, theirs = context.Pipe(duplex=False)
            first = context.Process(target=ready, args=(theirs,))
            first.start()
            theirs.close()
            pid = int(ours.recv())
            first.join()
            return pid

        try:
            return Forkserver(context, await asyncio.to_thread(asked), inherited)
        except (EOFError, OSError) as error:
            raise InputError(
                f"the parent of workers does not start ({error or 'it has left'}); is synergy-cluster[exec] installed "
                "here? What it said stands above."
            ) from None

    async def fork(self, start: Start, descriptors: Descriptors, left: Callable[[int], None]) -> int:
        """Starts a worker and returns its process id. Raises OSError.

        left: called once, when the worker and all processes that it started are gone, with its exit code or minus the
        number of the signal that killed it.
        """
        process = self._context.Process(target=work, args=(start, descriptors))
        async with self._one:
            if self.why:
                raise OSError(self.why)
            try:
                await asyncio.to_thread(process.start)
            except EOFError:
                raise OSError("the parent of workers has just died") from None
        assert process.pid is not None
        self._workers[process.pid] = process, left
        asyncio.get_running_loop().add_reader(process.sentinel, self._ended, process.pid)
        return process.pid

    def end(self, pids: Iterable[int]) -> None:
        """Kills workers. Processes that they started are killed before `left` is called."""
        processes.send(signal.SIGKILL, self._workers.keys() & pids)

    def show(self, pid: int) -> None:
        """Makes a worker write its stack into its log."""
        processes.send(signal.SIGUSR1, self._workers.keys() & {pid})

    async def close(self) -> None:
        """Kills the forkserver and every remaining worker."""
        self._watching.cancel()
        if processes.lives(self._pid, self._began):
            processes.send(signal.SIGKILL, [self._pid])
        await asyncio.to_thread(processes.end_all)

    def _ended(self, pid: int) -> None:
        process, left = self._workers.pop(pid)
        asyncio.get_running_loop().remove_reader(process.sentinel)
        process.join()
        code = process.exitcode
        assert code is not None
        process.close()
        cleaning = asyncio.create_task(self._clean(left, code))
        self._cleaning.add(cleaning)
        cleaning.add_done_callback(self._cleaning.discard)

    async def _clean(self, left: Callable[[int], None], code: int) -> None:
        if code == _LOST_PARENT:
            await asyncio.sleep(_DYING_S)
            code = code if processes.lives(self._pid, self._began) else -signal.SIGKILL
        async with self._one:  # a worker that is being forked now is not in `_workers` yet
            await asyncio.to_thread(self._sweep)
        left(code)

    def _sweep(self) -> None:
        """Kills processes that exited workers left behind, and waits until the forkserver has reaped them."""
        while strays := self._strays():
            processes.kill(strays)
            time.sleep(_PAUSE_S)

    def _strays(self) -> set[int]:
        """Returns the orphans that the forkserver has adopted; once it is gone, those that this process has adopted."""
        if processes.lives(self._pid, self._began):
            return set(processes.children(self._pid)) - self._workers.keys()
        left = set(processes.children(os.getpid())) - self._others
        for pid in left:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        return left

    async def _watch(self) -> None:
        """Waits until the forkserver is gone. Kills it if it was stopped (SIGSTOP): it could not start workers."""
        stopped = 0
        while processes.lives(self._pid, self._began):
            stopped = stopped + 1 if processes.is_stopped(self._pid) else 0
            if stopped > 1:
                self.why = "the parent of workers was stopped, and is killed with every worker"
                processes.send(signal.SIGKILL, [self._pid])
            await asyncio.sleep(_LOOK_S)
        self.why = self.why or "the parent of workers is gone, and every worker with it"
        self.died.set()
