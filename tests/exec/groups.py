"""Groups of gloo processes, each of which runs many cases in one lifetime.

`python groups.py` reads what to run as a pickle, imports torch once, forks the ranks of one group after the other, and
writes rank 0's answers as a pickle. It never runs an operator of torch itself, so its children may.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exec import warm

if TYPE_CHECKING:
    import pytest

Case = tuple[Any, ...]
"""A function that can be imported, and its arguments."""
TIMEOUT_S = 900


def run(*groups: Mapping[int, Sequence[Case]], folder: Path | None = None) -> dict[Case, Any]:
    """What each case's function returns on rank 0 of a group of so many ranks. folder: in which they run."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    more = {"env": environment, "cwd": folder, "timeout": TIMEOUT_S, "text": False}
    ended = warm.run([sys.executable, __file__], given=pickle.dumps(groups), **more)
    if ended.returncode:
        raise AssertionError(ended.stderr.decode()[-6000:])
    return pickle.loads(ended.stdout)


def run_once(folders: pytest.TempPathFactory, name: str, *groups: Mapping[int, Sequence[Case]]) -> dict[Case, Any]:
    """The same in a folder of that name, by the first of the processes in which the tests run; the others read it."""
    folder = folders.getbasetemp()
    if together := os.environ.get("PYTEST_XDIST_TESTRUNUID"):
        folder = folder.parent / together
    answers = folder / f"{name}.answers"
    (folder / name).mkdir(parents=True, exist_ok=True)
    with answers.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not answers.exists():
            answers.write_bytes(pickle.dumps(run(*groups, folder=folder / name)))
    return pickle.loads(answers.read_bytes())


def _main() -> None:
    answers: dict[Case, Any] = {}
    for world, cases in (each for groups in pickle.load(sys.stdin.buffer) for each in groups.items()):
        with tempfile.TemporaryDirectory() as folder:
            codes = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in forked(world, cases, Path(folder))]
            if any(codes):
                sys.exit(f"ranks of {world} left with {codes}")
            answers |= pickle.loads((Path(folder) / "answers").read_bytes())
    sys.stdout.buffer.write(pickle.dumps(answers))


def forked(world: int, cases: Sequence[Case], folder: Path) -> list[int]:
    """The processes of a group that meets in the folder, and leaves rank 0's answers there."""
    return [_fork(rank, world, cases, folder) for rank in range(world)]


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


def _rank(rank: int, world: int, cases: Sequence[Case], folder: Path) -> dict[Case, Any]:
    from torch import distributed

    if world > 1:
        store = distributed.FileStore(str(folder / "store"), world)
        timeout = timedelta(seconds=30)
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
    answers = {}
    for case in cases:
        function, *arguments = case
        try:
            answers[case] = function(*arguments)
        except BaseException as error:
            error.add_note(f"in the case {case}")
            raise
    if world > 1:
        distributed.barrier()
        distributed.destroy_process_group()
    return answers


if __name__ == "__main__":
    _main()
