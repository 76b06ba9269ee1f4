"""Python programs that start at once: forks of a process that has imported torch and Synergy already.

Importing them takes seconds of CPU, and an executor imports them in its controller, in every agent, in every agent's
parent of workers and in every command that is typed. `Popen` and `run` are subprocess's, except that a command that
begins with `sys.executable` runs in such a fork, and so do the commands that it starts itself. All else is as after an
exec: arguments, environment, folder, open files, signals and parents. `test_adding.py` starts all as users do.
"""

from __future__ import annotations

import _posixsubprocess
import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import io
import logging
import multiprocessing.util
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import thread as threads
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from synergy_exec.worker import start

PROGRAMS = tuple(f"synergy_exec.{each}" for each in ("run", "agent.agent", "agent.forkserver", "controller.api"))
"""Programs whose modules are imported before the first fork, beside those of workers."""
TESTS = Path(__file__).resolve().parents[1]
_PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 15, 36
_prctl = ctypes.CDLL(None).prctl
ADOPTED_S = 10.0
_OWN_FLAGS = {"-u", "-B"}
"""Flags of the interpreter that a fork can ignore. A command with any other flag is started as users start it."""


class Program(NamedTuple):
    """A program that a fork becomes. standard: three files, -1 to inherit. keep: other files that stay open."""

    command: list[str]
    cwd: str | None
    environment: dict[str, str] | None
    standard: tuple[int, int, int]
    keep: tuple[int, ...]
    own_session: bool
    group: int


def _is_python(command: Sequence[Any]) -> bool:
    if len(command) < 2:
        return False
    first, second = (os.fsdecode(each) for each in command[:2])
    return first == sys.executable and (not second.startswith("-") or second in {"-m", "-c", *_OWN_FLAGS})


def _fork_exec(fork: Callable[[Program], int]) -> Callable[..., int]:
    """Replaces `_posixsubprocess.fork_exec`, which both subprocess and multiprocessing call."""

    def fork_exec(command: Any, executables: Any, close: bool, keep: Any, cwd: Any, env: Any, *more: Any) -> int:
        p2cread, _, _, c2pwrite, _, errwrite, _, errors, _, own_session, group, *_ = more
        if not _is_python(command):
            return int(_exec(command, executables, close, keep, cwd, env, *more))
        environment = None if env is None else dict(os.fsdecode(each).split("=", 1) for each in env)
        words = [os.fsdecode(each) for each in command]
        standard, keep = (p2cread, c2pwrite, errwrite), tuple(each for each in keep if each != errors)
        return fork(Program(words, cwd and os.fsdecode(cwd), environment, standard, keep, bool(own_session), group))

    return fork_exec


_exec = subprocess._fork_exec


# In a fork


def _fork_here(program: Program) -> int:
    for each in (sys.stdout, sys.stderr):
        each.flush()
    return os.fork() or _become(program)


def _become(program: Program) -> NoReturn:
    """Turns this fork into the program; never returns."""
    code = 1
    try:
        gc.freeze()  # what the parent had open is not closed a second time
        threads._threads_queues.clear()  # its threads are not here
        _take_files(program)
        if program.own_session:
            os.setsid()
        if program.group >= 0:
            os.setpgid(0, program.group)
        if program.cwd is not None:
            os.chdir(program.cwd)
        if program.environment is not None:
            os.environ.clear()
            os.environ |= program.environment
        _reset_signals()
        subprocess._fork_exec = _posixsubprocess.fork_exec = _fork_exec(_fork_here)
        code = _run(program.command[1:])
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            multiprocessing.util._exit_function()
        for each in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                each.flush()
        os._exit(code)


def _take_files(program: Program) -> None:
    copies = [os.dup(target if given == -1 else given) for target, given in enumerate(program.standard)]
    for target, each in enumerate(copies):
        os.dup2(each, target)
    for each in map(int, os.listdir("/proc/self/fd")):
        if each > 2 and each not in program.keep:
            with contextlib.suppress(OSError):
                os.close(each)
    at_once = bool((program.environment or os.environ).get("PYTHONUNBUFFERED"))
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(open(0, "rb", closefd=False))  # noqa: SIM115
    sys.stdout = sys.__stdout__ = _writer(1, write_through=at_once)
    sys.stderr = sys.__stderr__ = _writer(2, line_buffering=True, errors="backslashreplace")


def _writer(number: int, **more: Any) -> io.TextIOWrapper:
    return io.TextIOWrapper(open(number, "wb", closefd=False), encoding="utf-8", **more)


def _reset_signals() -> None:
    faulthandler.unregister(signal.SIGUSR1)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for each in (signal.SIGTERM, signal.SIGCONT, signal.SIGCHLD):
        if callable(signal.getsignal(each)):
            signal.signal(each, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _run(words: list[str]) -> int:
    """Runs a command line as the interpreter does, and returns the exit code."""
    while words[0] in _OWN_FLAGS:
        words.pop(0)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    ours = [each for each in sys.path if not Path(each).is_relative_to(TESTS)]
    name = "forkserver" if words[0] == "-c" and "forkserver" in words[1] else words[words[0] == "-m"].rpartition(".")[2]
    _prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()))
    try:
        if words[0] == "-m":
            sys.argv, sys.path = words[1:], [os.getcwd(), *filter(None, paths), *ours]
            sys.modules.pop(f"{words[1]}.__main__", None)  # runpy warns of what is there already
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        elif words[0] == "-c":
            sys.argv, sys.path = ["-c", *words[2:]], ["", *filter(None, paths), *ours]
            sys.modules.pop("synergy_exec.worker.warm", None)
            exec(words[1], {"__name__": "__main__", "__builtins__": __builtins__})
        else:
            sys.argv, sys.path = words, [str(Path(words[0]).resolve().parent), *filter(None, paths), *ours]
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as left:
        if isinstance(left.code, str):
            print(left.code, file=sys.stderr)
        return left.code if isinstance(left.code, int) else int(left.code is not None)
    return 0


# The process that forks, and whoever has it fork


class _Zygote:
    """A fork of this process, made before it has run anything of torch's: after that its own forks could not train."""

    def __init__(self) -> None:
        self._here, there = socket.socketpair()
        self._one, self._owner = threading.Lock(), os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self._here.close()
                self._serve(there)
            finally:
                os._exit(0)
        there.close()
        atexit.register(self.close)

    def fork(self, program: Program) -> int:
        """The process id of a child of this process."""
        files = [target if given == -1 else given for target, given in enumerate(program.standard)]
        with self._one:
            # The fork's parent leaves at once, and then this process is the next that adopts orphans.
            _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._here, [pickle.dumps((program, os.getcwd(), dict(os.environ)))], files)
                return int(self._here.recv(100))
            finally:
                _prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    def close(self) -> None:
        if os.getpid() == self._owner:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)

    def _serve(self, requests: socket.socket) -> None:
        _take_files(Program([], None, None, (-1, -1, -1), (requests.fileno(),), False, -1))
        os.setsid()
        faulthandler.disable()
        logging.getLogger().handlers.clear()
        sys.meta_path[:] = [each for each in sys.meta_path if "pytest" not in type(each).__module__]
        while True:
            asked, files, *_ = socket.recv_fds(requests, 1 << 20, 3)
            if not asked:
                return
            for each in (*start.WARM, *PROGRAMS):
                importlib.import_module(each)
            gc.freeze()
            program, cwd, environment = pickle.loads(asked)
            reading, writing = os.pipe()
            if (between := os.fork()) == 0:
                if child := os.fork():
                    os.write(writing, str(child).encode())
                    os._exit(0)
                until_s = time.monotonic() + ADOPTED_S
                while os.getppid() != self._owner:
                    time.sleep(0.001)
                    assert time.monotonic() < until_s, "whoever asked for this program is gone"
                given = {"cwd": program.cwd or cwd, "environment": program.environment or environment}
                _become(program._replace(**given, standard=tuple(files)))
            os.waitpid(between, 0)
            requests.send(os.read(reading, 100))
            for each in (reading, writing, *files):
                os.close(each)


_zygote: _Zygote | None = None


def prepare() -> None:
    """Before the first test."""
    global _zygote
    _zygote = _Zygote()


class Popen(subprocess.Popen[Any]):
    """subprocess's, of a program that starts at once if it is one of Python's."""

    def _execute_child(self, *given: Any) -> None:
        if _zygote is None:
            super()._execute_child(*given)
            return
        subprocess._fork_exec = _fork_exec(_zygote.fork)
        try:
            super()._execute_child(*given)
        finally:
            subprocess._fork_exec = _exec


def run(command: Sequence[Any], *, timeout: float = 240.0, given: Any = None, text: bool = True, **more: Any) -> Any:
    """Runs a program to its end, like subprocess.run. given: its input."""
    pipes = {"stdin": None if given is None else subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    words = [os.fspath(each) if isinstance(each, os.PathLike) else each for each in command]
    with Popen(words, text=text, **pipes, **more) as process:
        try:
            said = process.communicate(given, timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return subprocess.CompletedProcess(words, process.returncode, *said)
