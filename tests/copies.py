"""Commands `python -m MODULE …` of a copy of the project, each in a fork of one process that has imported its packages.

    with Programs(copy) as programs:
        status, said, cpu_s = programs.run(["synergy_sim", "+trace=philly"])

Importing takes most of the seconds of a small command. A fork begins as a new program does, but for the imports.
"""

from __future__ import annotations

import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Self

IMPORTED_FIRST = ("pandas", "pyarrow.parquet", "scipy.optimize", "matplotlib.figure", "hydra", "synergy_sim.run")
TIMEOUT_S = 600


def environment_of(copy: Path) -> dict[str, str]:
    """That of someone new: no data, this Python, and the copy's code wherever a script lies."""
    kept = {name: value for name, value in os.environ.items() if name != "SYNERGY_DATA"}
    path = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", "")])
    return {**kept, "PATH": path, "PYTHONPATH": str(copy)}


class Programs:
    def __init__(self, copy: Path) -> None:
        command = [sys.executable, "-P", "-W", "ignore::RuntimeWarning:runpy", __file__, *IMPORTED_FIRST]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "start_new_session": True}
        self.process = subprocess.Popen(command, cwd=copy, env=environment_of(copy), **pipes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.stdin.close()
        self.process.wait()

    def run(self, typed: list[str]) -> tuple[int, str, float]:
        """Exit status, what was said on both streams and CPU seconds, of what stands behind `python -m`."""
        with tempfile.NamedTemporaryFile("r", encoding="utf-8") as said:
            print(json.dumps([said.name, *typed]), file=self.process.stdin, flush=True)
            if not select.select([self.process.stdout], [], [], TIMEOUT_S)[0]:
                os.killpg(self.process.pid, signal.SIGKILL)
                return -signal.SIGKILL, f"had not ended after {TIMEOUT_S} s; said:\n{said.read()}", 0.0
            status, cpu_s = json.loads(self.process.stdout.readline())
            return status, said.read(), cpu_s


def serve() -> None:
    """Reads commands from standard input, and prints how each ended."""
    for line in sys.stdin:
        said, *typed = json.loads(line)
        child = os.fork()
        if not child:
            _as_program(said, typed)
        _, status, used = os.wait4(child, 0)
        print(json.dumps([os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime]), flush=True)


def _as_program(said: str, typed: list[str]) -> None:
    """Never returns. Its streams end as a new program's would, with what could not be printed."""
    status = 1
    for stream, target in ((0, os.open(os.devnull, os.O_RDONLY)), (1, os.open(said, os.O_WRONLY | os.O_APPEND))):
        os.dup2(target, stream)
    os.dup2(1, 2)
    sys.argv = typed[:]
    try:
        runpy.run_module(typed[0], run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        __import__(name)
    serve()
