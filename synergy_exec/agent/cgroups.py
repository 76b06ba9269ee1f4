"""A cgroup (v2) for each run whose memory is limited, where this machine lets the agent make them.

    <the agent's own>/synergy-<pid>/run-<number>

Linux lets a process divide its cgroup where it may write there: as root, or with systemd's Delegate=yes. Limits it
allows only where no process is in the divided cgroup itself; so the agent moves itself and what it was started by to
`synergy-own`, if nobody else is there. See https://docs.kernel.org/admin-guide/cgroup-v2.html, "No Internal Process
Constraint".
"""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from synergy_exec.worker import processes

_OWN = "synergy-own"


def own_folder(mounts: Path = Path("/proc/self/mounts"), own: Path = Path("/proc/self/cgroup")) -> Path | None:
    """The folder of this process's cgroup; None where no cgroup2 file system is mounted."""
    points = [line.split()[1] for line in mounts.read_text().splitlines() if line.split()[2] == "cgroup2"]
    names = [line.removeprefix("0::/") for line in own.read_text().splitlines() if line.startswith("0::/")]
    if not (points and names):
        return None
    folder = Path(points[0], names[0])
    # Where an agent before this one has moved what it was started by.
    return folder.parent if folder.name == _OWN else folder


class Cgroups:
    """The cgroups of an agent's runs. no_limit: why memory cannot be limited here; "" if it can."""

    def __init__(self, own: Path | None, family: Collection[int] = ()) -> None:
        """own: the folder that is divided. family: processes in it that may be moved."""
        self.no_limit = "no cgroup2 file system is mounted"
        if own is None:
            return
        _clear_away(own)
        self._folder = own / f"synergy-{os.getpid()}"
        try:
            self._folder.mkdir()
        except OSError as error:
            self.no_limit = f"{own} may not be divided ({error.strerror})"
            return
        self.no_limit = _without_limit(own, self._folder, family)
        if self.no_limit:
            _remove(self._folder)

    def of_run(self, number: int, limit_bytes: int) -> RunCgroup | None:
        """Makes a run's cgroup; None where there can be none. limit_bytes: of all its ranks here together."""
        if self.no_limit:
            return None
        try:
            return RunCgroup(self._folder / f"run-{number}", limit_bytes)
        except OSError as error:
            print(f"run {number} has no cgroup: {error}", flush=True)
            return None

    def close(self) -> None:
        """Removes it; no run is left."""
        if not self.no_limit:
            _remove(self._folder)


class RunCgroup:
    """Of the ranks of a run on this node."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.folder, self._limit_bytes = folder, limit_bytes
        folder.mkdir()
        (folder / "memory.max").write_text(str(limit_bytes))
        # When memory runs out the kernel kills the whole run: ranks cannot go on without each other.
        (folder / "memory.oom.group").write_text("1")
        with suppress(OSError):  # a kernel without swap has none
            (folder / "memory.swap.max").write_text("0")

    def used_up(self) -> str:
        """What it did, in words, where its memory ran out and the kernel killed it; "" else."""
        events = dict(line.split() for line in (self.folder / "memory.events").read_text().splitlines())
        # Where the whole machine ran out, `oom` is 0.
        if not (int(events.get("oom", 0)) and int(events.get("oom_kill", 0))):
            return ""
        return (
            f"its ranks on this node used more than the {self._limit_bytes / 1e9:g} GB of memory that they may; raise "
            "memory_gb_per_slot, or have the job use less"
        )

    def close(self) -> None:
        """Removes it; no process is left in it."""
        _remove(self.folder)


def _without_limit(own: Path, folder: Path, family: Collection[int]) -> str:
    """Has the kernel limit memory below `folder`, if it does; else why not."""
    if "memory" not in (own / "cgroup.controllers").read_text().split():
        return f"{own} has no controller of memory"
    try:
        if not _enabled(own) and (there := _processes(own)) and there <= {os.getpid(), *family}:
            apart = own / _OWN
            apart.mkdir(exist_ok=True)
            for pid in there:
                with suppress(ProcessLookupError):  # it has just ended
                    (apart / "cgroup.procs").write_text(str(pid))
        for each in (own, folder):
            (each / "cgroup.subtree_control").write_text("+memory")
    except OSError as error:
        others = sorted(_processes(own) - {os.getpid(), *family})
        why = f"other processes are in it, such as {others[0]}" if others else error.strerror
        return f"the controller of memory of {own} cannot be used: {why}"
    return ""


def _enabled(folder: Path) -> bool:
    return "memory" in (folder / "cgroup.subtree_control").read_text().split()


def _processes(folder: Path) -> set[int]:
    return {int(each) for each in (folder / "cgroup.procs").read_text().split()}


def _clear_away(own: Path) -> None:
    """Removes what agents left behind that were killed; one in which anything lives stays."""
    for folder in own.glob("synergy-[0-9]*"):
        if not Path("/proc", folder.name.removeprefix("synergy-")).exists():
            with suppress(FileNotFoundError):  # another agent clears it away as well
                for each in list(folder.glob("run-*")):
                    _remove(each)
            _remove(folder)


def _remove(folder: Path) -> None:
    # The kernel refuses while anything in it lives.
    with suppress(OSError):
        folder.rmdir()


def family_of(parent: int | None) -> set[int]:
    """The process that started this one, and all below it; this one alone where none is given."""
    level = [os.getpid() if parent is None else parent]
    found = set(level)
    while level:
        level = [each for pid in level for each in processes.children(pid)]
        found.update(level)
    return found
