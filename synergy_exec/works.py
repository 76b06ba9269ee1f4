"""Work folders of runs below a folder, and what a person means by a job's name in them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from synergy_core.errors import InputError, unknown
from synergy_exec import job_folder
from synergy_exec.controller.journal import Journal
from synergy_exec.folders import WORK


def works(folder: Path) -> list[Path]:
    """The folder itself, if it is a run's, else those below it: in results_dir, or results_dir/<trace>."""
    if folder.name.endswith(WORK) or (folder / "journal.sqlite").is_file():
        return [folder]
    found = once(each for form in ("*", "*/*") for each in folder.glob(form + WORK) if each.is_dir())
    if not found:
        raise InputError(f"{folder}: no run is in it; expected a results_dir, or RUN.work, the work folder of a run.")
    return found


def once(paths: Iterable[Path]) -> list[Path]:
    """The paths, sorted; of a folder and links to it, which runs' results have, the folder alone."""
    links_first = sorted(paths, key=lambda each: not each.is_symlink())
    return sorted({each.resolve(): each for each in links_first}.values())


def under_way(folder: Path) -> Path:
    """The one run below a folder that has begun and was not filed as ended. Raises InputError for none or several."""
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
        f"no run below {folder} is under way; one that has ended goes on once a job of it waits again: "
        "python -m synergy_exec retry JOB"
    )


def work_of(folder: Path, wanted: str) -> Path:
    """The one run below a folder that has a job of that name or number. Raises InputError for none or several."""
    found, names = [], []
    for work in works(folder):
        here = [each for path in job_folder.folders(work).values() for each in _names(path)]
        names += here
        found += [work] * (wanted in here)
    if len(found) == 1:
        return found[0]
    if found:
        raise InputError(
            f"{len(found)} runs below {folder} have a job {wanted}; say which with --dir: {', '.join(map(str, found))}."
        )
    raise unknown("job", wanted, names)


def number_of(work: Path, wanted: str) -> int:
    """The number of the job with that name, or number, by the folders of a run's jobs. Raises InputError."""
    folders = job_folder.folders(work)
    named = [number for number, path in folders.items() if wanted == _names(path)[0]]
    if not named and wanted.isdecimal() and int(wanted) in folders:
        return int(wanted)
    if len(named) == 1:
        return named[0]
    if named:
        raise InputError(f"{len(named)} jobs are called {wanted}; take a number: {', '.join(map(str, named))}.")
    raise unknown("job", wanted, [_names(path)[0] for path in folders.values()])


def _names(folder: Path) -> tuple[str, str]:
    try:
        return job_folder.described(folder).name, folder.name
    except InputError:
        return folder.name, folder.name
