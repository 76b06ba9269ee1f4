"""Groups of gloo processes, each of which runs many cases in one lifetime.

`python groups.py` reads what to run as a pickle, imports torch once, forks the ranks of one group after the other, and
writes rank 0's answers as a pickle. It never runs an operator of torch itself, so its children may.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

Case = tuple[str, str, tuple[Any, ...]]
"""Name, `module:function` on the path of the tests, arguments."""
HERE = Path(__file__).parent


def run(groups: Mapping[int, Sequence[Case]], *, timeout_s: float) -> dict[str, Any]:
    """What each case's function returns on rank 0 of a group of so many ranks, by the cases' names."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(
        [sys.executable, __file__],
        input=pickle.dumps(dict(groups)),
        capture_output=True,
        timeout=timeout_s,
        env=environment,
    )
    if ended.returncode:
        raise AssertionError(ended.stderr.decode()[-6000:])
    answers: dict[str, Any] = pickle.loads(ended.stdout)
    return answers


def run_once(
    folders: pytest.TempPathFactory, name: str, groups: Mapping[int, Sequence[Case]], *, timeout_s: float
) -> dict[str, Any]:
    """The same, run by the first of the processes in which the tests run, and read by the others."""
    folder = folders.getbasetemp()
    if together := os.environ.get("PYTEST_XDIST_TESTRUNUID"):
        folder = folder.parent / together
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{'-'.join(map(str, groups))}"
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            path.write_bytes(pickle.dumps(run(groups, timeout_s=timeout_s)))
    answers: dict[str, Any] = pickle.loads(path.read_bytes())
    return answers


def _main() -> None:
    groups = pickle.load(sys.stdin.buffer)
    for _, function, _ in (case for cases in groups.values() for case in cases):
        importlib.import_module(function.partition(":")[0])
    answers: dict[str, Any] = {}
    for world, cases in groups.items():
        with tempfile.TemporaryDirectory() as folder:
            ranks = [_fork(rank, world, cases, Path(folder)) for rank in range(world)]
            codes = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
            if any(codes):
                sys.exit(f"ranks of {world} left with {codes}")
            answers |= pickle.loads((Path(folder) / "answers").read_bytes())
    sys.stdout.buffer.write(pickle.dumps(answers))


def _fork(rank: int, world: int, cases: Sequence[Case], folder: Path) -> int:
    if child := os.fork():
        return child
    code = 1
    try:
        answers = _rank(rank, world, cases, folder)
        if rank == 0:
            (folder / "answers").write_bytes(pickle.dumps(answers))
        code = 0
    except BaseException:
        print(f"rank {rank} of {world}", traceback.format_exc(), file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def _rank(rank: int, world: int, cases: Sequence[Case], folder: Path) -> dict[str, Any]:
    from torch import distributed

    if world > 1:
        store = distributed.FileStore(str(folder / "store"), world)
        timeout = timedelta(seconds=30)
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
    answers = {}
    for name, function, arguments in cases:
        module, _, attribute = function.partition(":")
        try:
            answers[name] = getattr(importlib.import_module(module), attribute)(*arguments)
        except BaseException as error:
            error.add_note(f"in the case {name}")
            raise
    if world > 1:
        distributed.barrier()
        distributed.destroy_process_group()
    return answers


if __name__ == "__main__":
    _main()
