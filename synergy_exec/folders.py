"""Where a command's runs lie. What has been trained is never deleted: a run that has ended keeps its folders.

    results/demo/synergy-0      synergy-0.work      results, and beside them the journal, the checkpoints, the logs
    results/demo/synergy-0.2    synergy-0.2.work    of the same command, typed again when the first had ended

A work folder belongs to one process at a time, by a lock that goes with the process, whatever the way it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import os
import re
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from synergy_core.errors import InputError
from synergy_exec.controller import processes
from synergy_exec.controller.journal import Journal
from synergy_runs.filing import same_run

LOCK = "lock"
WORK = ".work"


class Place(NamedTuple):
    """A run's two folders."""

    results: Path
    work: Path


Places = dict[str, tuple[Place, bool]]
"""By policy: where its run goes, and whether that is done already."""
State = Literal["free", "under way", "done", "taken"]
"""What a place holds, for a run with certain settings. free: nothing. under way, done: that very run, which is filed
when it is done. taken: another run, which has ended."""


def newest(base: Path) -> Place:
    """The last of the runs that are filed as `base`, `base.2`, …; the first where there is none."""
    return _numbered(base, _last(base))


def claimed(bases: Mapping[str, Path], settings: Mapping[str, dict[str, Any]], held: contextlib.ExitStack) -> Places:
    """Where each policy's run goes, and whether it is done already; its settings stand in its journal then.

    Where the same command was broken off before, what is done stays done and the rest goes on; where it had ended,
    every run gets a place of its own, which is said. bases: `<policy>-<seed>`, by policy. settings: by policy.
    held: what gives the places free again. Raises InputError for a place that a process works in, and for a run under
    way with other settings.
    """
    places = {name: newest(base) for name, base in bases.items()}
    states = {name: _taken(place, settings[name], held) for name, place in places.items()}
    again = all(state == "done" for state in states.values())
    for name, base in bases.items():
        if again or states[name] == "taken":
            places[name], states[name] = _next(base, places[name], held), "free"
        if states[name] != "done":
            journal = Journal(places[name].work / "journal.sqlite")
            journal.set_meta("settings", _plain(settings[name]))
            journal.close()
    return {name: (places[name], states[name] == "done") for name in bases}


@contextlib.contextmanager
def lock(work: Path) -> Iterator[None]:
    """Makes the folder, and keeps others out of it until the block ends, or this process does, even by SIGKILL.

    Its file `lock` says who has it, or had it last. Raises InputError, which says that too.
    """
    try:
        work.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(work / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise InputError(
            f"results_dir: {work} cannot be written ({error.strerror}). Name another place with results_dir=DIR."
        ) from error
    try:
        holder = _holder(work / LOCK)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # On a file system without locks what stands in the file must do.
            if isinstance(error, BlockingIOError) or _lives(holder):
                raise InputError(
                    f"{work}: a controller runs here already, process {holder.get('pid', '?')} on "
                    f"{holder.get('host', '?')}. Stop it, or name another place with results_dir=DIR."
                ) from None
        me = {"host": socket.gethostname(), "pid": os.getpid(), "began": processes.began(os.getpid())}
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, (json.dumps(me) + "\n").encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _holder(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _lives(holder: Mapping[str, Any]) -> bool:
    here = holder.get("host") == socket.gethostname()
    return here and processes.lives(int(holder.get("pid", 0)), int(holder.get("began", 0)))


def _numbered(base: Path, number: int) -> Place:
    results = base if number == 1 else base.with_name(f"{base.name}.{number}")
    return Place(results, results.with_name(results.name + WORK))


def _last(base: Path) -> int:
    form = re.compile(rf"{re.escape(base.name)}\.(\d+)(?:{re.escape(WORK)})?")
    there = base.parent.glob(glob.escape(base.name) + ".*")
    return max([1, *(int(found[1]) for each in there if (found := form.fullmatch(each.name)))])


def _next(base: Path, kept: Place, held: contextlib.ExitStack) -> Place:
    place = _numbered(base, _last(base) + 1)
    held.enter_context(lock(place.work))
    checkpoints = f", with its checkpoints in {kept.work.name}" if kept.work.exists() else ""
    print(f"{kept.results} is kept{checkpoints}; this run goes to {place.results}", file=sys.stderr)
    return place


def _taken(place: Place, own: dict[str, Any], held: contextlib.ExitStack) -> State:
    """What the place holds; its work folder, if there is one, is locked from now on."""
    if place.results.exists() and not place.work.exists():
        return "taken"
    held.enter_context(lock(place.work))
    path = place.work / "journal.sqlite"
    if not path.is_file():
        return "free"
    journal = Journal(path)
    meta, begun = journal.meta(), bool(journal.jobs())
    journal.close()
    filed = bool(meta.get("written")) and (place.results / "summary.json").is_file()
    if not begun:
        return "free"
    if same_run(meta.get("settings", own), _plain(own)):
        return "done" if filed else "under way"
    if filed or meta.get("over"):
        return "taken"
    raise InputError(
        f"{place.work} holds a run under way with other settings. Give those to go on with it, name another place with "
        "results_dir=DIR, or remove that folder."
    )


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """The values as they come back from JSON."""
    plain: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return plain
