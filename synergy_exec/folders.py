"""The folders of runs. Trained work is never deleted: a run that has ended keeps its folders.

    results/demo/2026-11-23_07-02-13/    one command, by its start
        synergy-0.work/                  journal, checkpoints and logs of a policy's run, running or ended
        synergy-0/                       its results, once it has ended

A lock gives a work folder to one process at a time and ends with the process. On a shared file system without locks the
controller that begins last wins: the other stops at its next commit (`Journal.take_over`).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from synergy_core.errors import InputError, unknown
from synergy_exec import job_folder
from synergy_exec.controller.journal import NAME, Journal, open_journal, restore_if_damaged
from synergy_exec.settings import CHANGEABLE, OF_TRAINING
from synergy_runs.outputs.results import is_unended, same_run

LOCK = "lock"
WORK = ".work"


class Place(NamedTuple):
    """The two folders of a policy's run. done: whether it has ended, so that the results are there."""

    results: Path
    work: Path
    done: bool


def unfinished(parent: Path, settings: Mapping[str, dict[str, Any]], *, is_service: bool = False) -> Path | None:
    """The newest folder in `parent` of the same command, if it was interrupted; else None.

    settings: of each run, by `<policy>-<seed>`. A folder whose journal is lost is named and passed over. is_service:
    the queue belongs to the folder, whatever the policy and other settings were: its work folder is renamed. Raises
    InputError if its jobs cannot go on under these settings, or a controller runs there.
    """
    for into in sorted(parent.glob("*-*_*"), reverse=True):
        works = {into / f"{base}{WORK}": own for base, own in settings.items()}
        there = set(into.glob(f"*{WORK}"))
        if is_service and len(there) == 1:
            works = dict(zip(there, works.values(), strict=True))
        if works.keys() != there:
            continue
        try:
            if not is_unended(into) and all((work / NAME).is_file() for work in works):
                continue  # there may be hundreds, and opening a journal takes long
            metas = {work: meta_of(work) for work in works}
        except InputError as error:
            print(error, file=sys.stderr)
            continue
        if is_service and not all(meta.get("written") for meta in metas.values()):
            ((work, meta),), ((base, own),) = metas.items(), settings.items()
            before = meta.get("settings", own)
            if other := [f"{name}={before.get(name)}" for name in OF_TRAINING if before.get(name) != own[name]]:
                raise InputError(
                    f"{work}: its jobs train with {', '.join(other)}. To go on with them type python -m synergy_exec "
                    f"resume {work}; to begin another queue, results_dir=DIR."
                )
            with lock(work):
                work.rename(into / f"{base}{WORK}")
            return into
        same = all(same_run(_fixed(metas[work].get("settings", {})), _fixed(own)) for work, own in works.items())
        if same and not all(meta.get("written") for meta in metas.values()):
            return into
    return None


def claim(into: Path, settings: Mapping[str, dict[str, Any]], held: contextlib.ExitStack) -> list[Place]:
    """Locks the work folders of a command's runs, and writes each run's settings into its journal.

    settings: by `<policy>-<seed>`. held: collects the locks. Raises InputError if another process works in one.
    """
    places = []
    for base, own in settings.items():
        work = into / f"{base}{WORK}"
        held.enter_context(lock(work))
        with contextlib.closing(Journal(work / "journal.sqlite")) as journal:
            journal.set_meta("settings", json.loads(json.dumps(own, default=str)))
            places.append(Place(into / base, work, bool(journal.meta().get("written"))))
    return places


def meta_of(work: Path) -> dict[str, Any]:
    """Reads the settings and facts of a run (`Journal.meta`) from the journal in its work folder.

    A damaged journal is first replaced by its backup. The key `bfloat16` of older journals is read as `precision`.
    """
    try:
        meta = _meta(work)
    except InputError:
        with lock(work):
            meta = _meta(work)
    values = meta.get("settings", {})
    if (old := values.pop("bfloat16", None)) is not None:
        values.setdefault("precision", "auto" if old else "fp32")
    return meta


def _meta(work: Path) -> dict[str, Any]:
    with contextlib.closing(open_journal(work)) as journal:
        return journal.meta()


def _fixed(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a command must share with an interrupted one to go on with it, as the journal keeps them."""
    plain = json.loads(json.dumps(values, default=str))
    return {name: value for name, value in plain.items() if name not in CHANGEABLE}


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


def works_below(folder: Path) -> list[Path]:
    """The work folder itself, or those below it: in results_dir, results_dir/<trace>, or the folder of a command."""
    if folder.name.endswith(WORK) or (folder / "journal.sqlite").is_file():
        return [folder]
    found = {each.resolve() for form in ("*", "*/*", "*/*/*") for each in folder.glob(form + WORK) if each.is_dir()}
    return sorted(found)


def works(folder: Path) -> list[Path]:
    """The same. Raises InputError if there is none."""
    if found := works_below(folder):
        return found
    raise InputError(f"{folder}: no run is in it; expected a results_dir, or RUN.work, the work folder of a run.")


def under_way(folder: Path) -> Path:
    """The only unfinished run below a folder. Raises InputError if there is none or several."""
    found = []
    for work in works(folder):
        if not (work / "journal.sqlite").is_file():
            continue
        with contextlib.closing(Journal(work / "journal.sqlite")) as journal:
            if journal.jobs() and not journal.meta().get("written"):
                found.append(work)
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
    folder: Path


def find_job(folder: Path, wanted: str) -> FoundJob:
    """Finds a job by name or number in the runs below a folder.

    If several runs have one, the run that last wrote into its job's folder counts. Raises InputError if there is none,
    or if several jobs of that run have the name.
    """
    jobs = [
        FoundJob(work, number, job_folder.name_of(path), path)
        for work in works(folder)
        for number, path in job_folder.folders(work).items()
    ]
    found = [each for each in jobs if each.name == wanted] or [each for each in jobs if str(each.number) == wanted]
    if not found:
        raise unknown("job", wanted, {each.name for each in jobs})
    last = max(found, key=lambda each: max((path.stat().st_mtime for path in each.folder.iterdir()), default=0.0))
    if len(same := [each for each in found if each.work == last.work]) > 1:
        numbers = ", ".join(str(each.number) for each in same)
        raise InputError(f"{len(same)} jobs are named {wanted} in {last.work}; give one of their numbers: {numbers}.")
    if len(found) > 1:
        print(f"{last.work}: the newest of {len(found)} jobs {wanted}; --dir RUN.work takes another", file=sys.stderr)
    return last
