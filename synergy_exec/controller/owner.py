"""Whose a run's folder is: of several controllers, that of the highest number, and numbers only grow.

    owner-00000003      host and process of the third, and a beat that goes up while it lives

A lock says as much within one machine, but not every file system that machines share keeps locks between them. A
number's file can be made once, wherever two try to. Nobody's clock is compared with another's: who wants the folder
watches whether the beat changes, by his own clock. Who finds a higher number than his own stops at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from synergy_core.errors import InputError
from synergy_runs.files import atomic_file

# Processes of this machine told apart from later ones of the same number, by when they began.


_BEGAN = 19
"""Index of a process's start time in /proc/PID/stat after the name in brackets: field 22, counted from the third."""


def began(pid: int) -> int:
    """When the process began, in the kernel's ticks; 0 if there is none, a zombie counting as none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] == "Z" else int(fields[_BEGAN])


def lives(pid: int, since: int) -> bool:
    """Whether the very process that began then is still there."""
    return since > 0 and began(pid) == since


def wait_or_kill(processes: list[tuple[int, int]], *, patience_s: float) -> list[int]:
    """Waits until the (pid, began) have left, then kills those that have not; returns their pids."""
    until_s = time.monotonic() + patience_s
    while time.monotonic() < until_s and any(lives(*each) for each in processes):
        time.sleep(0.1)
    left = [(pid, since) for pid, since in processes if lives(pid, since) and pid != os.getpid()]
    for pid, _ in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return [pid for pid, _ in left]


BEAT_S = 2.0
TRUSTED_S = 10.0
"""So long after a beat its owner may write without looking again."""
WATCH_S = 20.0
"""So long without a beat, and an owner on another machine is dead. It leaves what began in `TRUSTED_S` time to end."""
LOOK_S = 0.5
FENCED_OUT = 3
"""Exit code of a controller that finds another in its place."""

_NAME = re.compile(r"owner-(\d{8,})")


@dataclass(frozen=True, slots=True)
class Owner:
    """What an owner's file says. machine: of this boot, and its process numbers' namespace. left: it has gone."""

    host: str
    pid: int
    began: int
    machine: str
    nonce: str
    beat: int = 0
    left: bool = False

    @property
    def here(self) -> bool:
        """Whether its process number means something to this process."""
        return self.machine == machine()

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def me() -> Owner:
    """This process as an owner."""
    return Owner(socket.gethostname(), os.getpid(), began(os.getpid()), machine(), secrets.token_hex(8))


def machine() -> str:
    """This boot of this machine, and the namespace of process numbers: a container has its own."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return socket.gethostname()


class Ownership:
    """A folder that this process owns. fenced: called with a sentence once it does not any more."""

    def __init__(self, work: Path, number: int, owner: Owner, fenced: Callable[[str], None]) -> None:
        self._work, self._number, self._owner, self._fenced = work, number, owner, fenced
        self._beat_s = time.monotonic()
        self._one = threading.Lock()
        self._gone = threading.Event()

    def check(self) -> None:
        """Before anything is written: whether the folder is still ours. Looks only where the last beat is long ago."""
        if time.monotonic() - self._beat_s > TRUSTED_S:
            self.beat()

    def beat(self) -> None:
        """Shows that this process lives; finds out whether it is the owner still.

        Where the disk refuses the beat, each `check` looks anew; where it does not even say who the owner is, so too.
        """
        with self._one, contextlib.suppress(InputError, OSError):
            began_s = time.monotonic()
            number, holder = newest(self._work)
            if number != self._number or (holder is not None and holder.nonce != self._owner.nonce):
                why = f"{holder} has taken it over" if number > self._number else f"{self._path.name} is gone"
                self._fenced(
                    f"{self._work} does not belong to {self._owner} any more: {why}. It stops at once and writes "
                    "nothing; its workers save and leave."
                )
                return
            self._owner = replace(self._owner, beat=self._owner.beat + 1)
            _write(self._path, self._owner)
            self._beat_s = began_s

    def keep_beating(self) -> None:
        """Beats until `leave`."""
        while not self._gone.wait(BEAT_S):
            self.beat()

    def leave(self) -> None:
        """The folder is nobody's; its number stays taken."""
        self._gone.set()
        with self._one, contextlib.suppress(InputError, OSError):
            if newest(self._work)[0] == self._number:
                _write(self._path, replace(self._owner, left=True))

    @property
    def _path(self) -> Path:
        return _path(self._work, self._number)


_owned: dict[Path, Ownership] = {}


@contextlib.contextmanager
def owned(work: Path) -> Iterator[None]:
    """The folder belongs to this process until the block ends. Raises InputError while another is alive in it."""
    ownership = claim(work)
    key = work.resolve()
    _owned[key] = ownership
    threading.Thread(target=ownership.keep_beating, name="owner", daemon=True).start()
    try:
        yield
    finally:
        del _owned[key]
        ownership.leave()


def check(work: Path) -> None:
    """Before a file of the folder is written that another controller may have: stops this process if one has it."""
    if _owned and (ownership := _owned.get(work.resolve())) is not None:
        ownership.check()


def claim(
    work: Path, *, wait: Callable[[float], None] = time.sleep, fenced: Callable[[str], None] | None = None
) -> Ownership:
    """The folder under the next number. Raises InputError while another is alive in it, which it says.

    On this machine a process is there or not; elsewhere its beat is watched for `WATCH_S`. wait: lets seconds pass.
    """
    number, holder = newest(work)
    if number and (holder is None or not holder.left) and _lives(work, number, holder, wait):
        raise InputError(taken(work))
    own = me()
    path = _path(work, number + 1)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(_text(own))
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        raise InputError(taken(work)) from None
    except OSError as error:
        raise InputError(
            f"{path}: cannot be written ({error.strerror}). Name another place with results_dir=DIR."
        ) from error
    for earlier in _found(work):
        if earlier <= number:
            _path(work, earlier).unlink(missing_ok=True)
    return Ownership(work, number + 1, own, _leave_at_once if fenced is None else fenced)


def newest(work: Path) -> tuple[int, Owner | None]:
    """The highest number and who has it; 0 for none, None where the file does not say who."""
    number = max(_found(work), default=0)
    try:
        values = json.loads(_path(work, number).read_text(encoding="utf-8"))
        return number, Owner(**values)
    except (OSError, ValueError, TypeError):
        return number, None


def _lives(work: Path, number: int, holder: Owner | None, wait: Callable[[float], None]) -> bool:
    if holder is not None and holder.here:
        mine = (holder.pid, holder.began) == (os.getpid(), began(os.getpid()))
        return work.resolve() in _owned if mine else lives(holder.pid, holder.began)
    print(
        f"{work}: {holder or 'a process that is not known'} worked here last; whether it still does shows in "
        f"{WATCH_S:.0f} s",
        file=sys.stderr,
        flush=True,
    )
    until_s = time.monotonic() + WATCH_S
    while time.monotonic() < until_s:
        wait(LOOK_S)
        if (now := newest(work)) != (number, holder):
            return now[1] is None or not now[1].left
    return False


def taken(work: Path) -> str:
    """That another has the folder: who, and what to type."""
    _, holder = newest(work)
    who = f"process {holder.pid} on {holder.host}" if holder is not None else "one that has just begun"
    dead = ""
    if holder is None or not holder.here:
        dead = f" If it has died since, type the same again: it counts as dead after {WATCH_S:.0f} s without a sign."
    return f"{work}: a controller runs here already, {who}. Stop it, or name another place with results_dir=DIR.{dead}"


def _found(work: Path) -> list[int]:
    # Not by `glob`, which finds nothing where the file system does not answer.
    return [int(match[1]) for each in os.listdir(work) if (match := _NAME.fullmatch(each))]


def _path(work: Path, number: int) -> Path:
    return work / f"owner-{number:08d}"


def _write(path: Path, owner: Owner) -> None:
    with atomic_file(path) as partial:
        partial.write_text(_text(owner), encoding="utf-8")


def _text(owner: Owner) -> str:
    return json.dumps(asdict(owner)) + "\n"


def _leave_at_once(sentence: str) -> None:
    # Not by an error: what ends a run in good order writes, and nothing may be written.
    print(f"synergy_exec: {sentence}", file=sys.stderr, flush=True)
    os._exit(FENCED_OUT)
