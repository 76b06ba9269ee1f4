"""The folders of runs. Trained work is never deleted: a run that has ended keeps its folders.

    results/demo/synergy-0.work      journal, checkpoints and logs of a run, running or ended
    results/demo/synergy-0.2.work    the same for a second run of the same command, started after the first had ended
    results/demo/2026-11-23_07-02-13/synergy-0    results of a run; synergy-0.work beside it links to its work folder

A lock gives a work folder to one process at a time and ends with the process. On a shared file system without locks the
controller that begins last wins: the other stops at its next commit (`Journal.take_over`).
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
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from synergy_core.errors import InputError, unknown
from synergy_exec import job_folder
from synergy_exec.controller.journal import Journal, restore_if_damaged
from synergy_exec.settings import CHANGEABLE
from synergy_runs.results import same_run

LOCK = "lock"
WORK = ".work"


class Place(NamedTuple):
    """The two folders of a run. results: None if it has no results folder yet, or somebody removed it."""

    results: Path | None
    work: Path


Places = dict[str, tuple[Place, bool]]
"""By policy: the place of its run, and whether the run is done already."""
RESULTS = "results"
"""Key in a journal's `meta`: path of the results, relative to the parent of the work folder."""
State = Literal["free", "under way", "done", "taken"]
"""What a place holds for a run with given settings. free: nothing. under way, done: this run. taken: another run, which
has ended."""


def newest(base: Path) -> Path:
    """The last of the work folders `base.work`, `base.2.work`, …; the first if none exists."""
    return _numbered(base, _last(base))


def results_of(work: Path, meta: Mapping[str, Any]) -> Path | None:
    """The results folder of the run in a work folder, by its journal's `meta`; None if it has none."""
    work = work.resolve() if work.is_symlink() else work
    results = work.parent / meta[RESULTS] if meta.get(RESULTS) else None
    return results if results is not None and results.parent.is_dir() else None


def claimed(
    bases: Mapping[str, Path],
    settings: Mapping[str, dict[str, Any]],
    held: contextlib.ExitStack,
    *,
    anew: bool = True,
) -> Places:
    """Claims a place for each policy's run, and writes its settings into its journal.

    If the same command was interrupted before, finished runs stay and the others resume. If it had ended, every run
    gets a new place, which is announced. bases: `<policy>-<seed>` by policy. settings: by policy. held: collects the
    locks. anew: whether an ended command may run again; if not, that is an error. Raises InputError for a place that
    another process uses, and for an unfinished run with other settings.
    """
    works = {name: newest(base) for name, base in bases.items()}
    states = {name: _taken(work, settings[name], held) for name, work in works.items()}
    again = all(state == "done" for state in states.values())
    if not anew and (again or "taken" in states.values()):
        ended = ", ".join(map(str, works.values()))
        raise InputError(
            f"{ended}: it has ended; there is nothing to go on with. A job of it that failed waits again with python "
            "-m synergy_exec retry JOB; the command that began it begins another run."
        )
    places: dict[str, Place] = {}
    for name, base in bases.items():
        if again or states[name] == "taken":
            works[name], states[name] = _next(base, works[name], held), "free"
        journal = Journal(works[name] / "journal.sqlite")
        if states[name] != "done":
            journal.set_meta("settings", _plain(settings[name]))
        places[name] = Place(results_of(works[name], journal.meta()), works[name])
        journal.close()
    return {name: (places[name], states[name] == "done") for name in bases}


@contextlib.contextmanager
def lock(work: Path) -> Iterator[None]:
    """Creates the folder and locks it until the block or this process ends, even by SIGKILL.

    A damaged journal is replaced by its backup. Raises InputError that names the process with the lock.
    """
    try:
        work.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(work / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise InputError(
            f"results_dir: {work} cannot be written ({error.strerror}). Name another place with results_dir=DIR."
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 300, 0).decode(errors="replace").strip() or "one that has just begun"
            raise InputError(
                f"{work}: a controller runs here already, {holder}. Stop it, or name another place: results_dir=DIR."
            ) from None
        except OSError:
            pass  # a file system without locks
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        restore_if_damaged(work)
        yield
    finally:
        os.close(descriptor)


def _numbered(base: Path, number: int) -> Path:
    return base.with_name(f"{base.name}{'' if number == 1 else f'.{number}'}{WORK}")


def _last(base: Path) -> int:
    form = re.compile(rf"{re.escape(base.name)}\.(\d+)(?:{re.escape(WORK)})?")
    there = base.parent.glob(glob.escape(base.name) + ".*")
    return max([1, *(int(found[1]) for each in there if (found := form.fullmatch(each.name)))])


def _next(base: Path, kept: Path, held: contextlib.ExitStack) -> Path:
    work = _numbered(base, _last(base) + 1)
    held.enter_context(lock(work))
    print(f"{kept} has ended and is kept, with its results and checkpoints; this run goes to {work}", file=sys.stderr)
    return work


def _taken(work: Path, own: dict[str, Any], held: contextlib.ExitStack) -> State:
    """Locks the place; returns what it holds."""
    held.enter_context(lock(work))
    path = work / "journal.sqlite"
    if not path.is_file():
        if any((folder / job_folder.DESCRIPTION).exists() for folder in job_folder.folders(work).values()):
            raise InputError(
                f"{work}: folders of jobs are in it, and no journal. Name another place with results_dir=DIR."
            )
        return "free"
    journal = Journal(path)
    meta, begun = journal.meta(), bool(journal.jobs())
    journal.close()
    results = results_of(work, meta)
    filed = bool(meta.get("written")) and results is not None and (results / "summary.json").is_file()
    if not begun:
        return "free"
    before, now = (
        {name: value for name, value in each.items() if name not in CHANGEABLE}
        for each in (meta.get("settings", own), _plain(own))
    )
    if same_run(before, now):
        return "done" if filed else "under way"
    if filed or meta.get("over"):
        return "taken"
    others = ", ".join(name for name in before if not same_run({name: before[name]}, {name: now.get(name)}))
    raise InputError(
        f"{work} holds a run under way with other settings ({others}). Give those to go on with it, name another "
        "place with results_dir=DIR, or remove that folder."
    )


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """The values after a round trip through JSON."""
    plain: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return plain


def works(folder: Path) -> list[Path]:
    """The work folder itself, or those below it: in results_dir or results_dir/<trace>."""
    if folder.name.endswith(WORK) or (folder / "journal.sqlite").is_file():
        return [folder]
    found = once(each for form in ("*", "*/*") for each in folder.glob(form + WORK) if each.is_dir())
    if not found:
        raise InputError(f"{folder}: no run is in it; expected a results_dir, or RUN.work, the work folder of a run.")
    return found


def once(paths: Iterable[Path]) -> list[Path]:
    """The paths, sorted, without links to folders that are also in the list."""
    links_first = sorted(paths, key=lambda each: not each.is_symlink())
    return sorted({each.resolve(): each for each in links_first}.values())


def under_way(folder: Path) -> Path:
    """The only unfinished run below a folder. Raises InputError if there is none or several."""
    found = []
    for work in works(folder):
        if not (work / "journal.sqlite").is_file():
            continue
        journal = Journal(work / "journal.sqlite")
        if journal.jobs() and not journal.meta().get("written"):
            found.append(work)
        journal.close()
    if len(found) == 1:
        return found[0]
    if found:
        raise InputError(f"{len(found)} runs are under way below {folder}; say which: {', '.join(map(str, found))}.")
    raise InputError(
        f"there is no unfinished run below {folder}. A run that has ended resumes after one of its jobs is retried: "
        "python -m synergy_exec retry JOB"
    )


class FoundJob(NamedTuple):
    """A job in a run's work folder. name: as it was submitted."""

    work: Path
    number: int
    name: str

    @property
    def folder(self) -> Path:
        return self.work / "jobs" / str(self.number)


def find_job(folder: Path, wanted: str) -> FoundJob:
    """Finds a job by name or number in the runs below a folder.

    If several runs have one, the run that last wrote into its job's folder counts. Raises InputError if there is none,
    or if several jobs of that run have the name.
    """
    jobs = [
        FoundJob(work, number, _name(path))
        for work in works(folder)
        for number, path in job_folder.folders(work).items()
    ]
    found = [each for each in jobs if each.name == wanted] or [each for each in jobs if str(each.number) == wanted]
    if not found:
        raise unknown("job", wanted, {each.name for each in jobs})
    last = max(found, key=lambda each: max((path.stat().st_mtime for path in each.folder.iterdir()), default=0.0))
    if len(same := [each for each in found if each.work == last.work]) > 1:
        numbers = ", ".join(str(each.number) for each in same)
        raise InputError(f"{len(same)} jobs are called {wanted} in {last.work}; take a number: {numbers}.")
    if len(found) > 1:
        print(f"{last.work}: the newest of {len(found)} jobs {wanted}; --dir RUN.work takes another", file=sys.stderr)
    return last


def _name(folder: Path) -> str:
    try:
        return job_folder.described(folder).name
    except InputError:
        return folder.name
