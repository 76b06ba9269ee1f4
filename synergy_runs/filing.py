"""Where a command's results go: a folder of its own, which no other command writes into (docs/results.md)."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from synergy_core.errors import InputError
from synergy_runs import run_record
from synergy_runs.atomic import PARTIAL
from synergy_runs.comparison import compare
from synergy_runs.report.write import write_comparison
from synergy_runs.run_record import NOT_OF_THE_RUN, RunRecord, new_record, read_record, write_record
from synergy_runs.stored import LATEST, read_run
from synergy_runs.tables import print_comparison

STAMP = "%Y-%m-%d_%H-%M-%S"
_NO_RESULTS = (run_record.FILE, "multirun.yaml")
_TRIES = 20


def typed_words() -> list[str]:
    """The settings of this command line; of a job of a sweep, its own."""
    from hydra.core.hydra_config import HydraConfig

    return list(HydraConfig.get().overrides.task) if HydraConfig.initialized() else sys.argv[1:]


@contextlib.contextmanager
def new_run(parent: Path, program: str, words: Sequence[str], *, name: str | None = None) -> Iterator[Path]:
    """A new folder in `parent` for what one command makes: whole when the block has ended, `latest` from then on.

    name: its name, of a run within a sweep, which no `latest` points to; else the second in which it began. Where
    nothing was put into it nothing is left. Raises InputError where it cannot be made.
    """
    record = new_record(program, words)
    missing = [each for each in (parent, *parent.parents) if not each.exists()]
    folder = claimed(parent, record.begun_at.strftime(STAMP) if name is None else name, only=name is not None)
    try:
        write_record(record, folder)
        yield folder
        end(folder, latest=name is None)
    finally:
        if not _has_results(folder):
            _remove_empty(folder, missing)


@contextlib.contextmanager
def going_on(folder: Path) -> Iterator[None]:
    """This process goes on with the run in the folder, which is whole when the block has ended."""
    mine = new_record("", [])
    write_record(
        replace(_record(folder), host=mine.host, pid=mine.pid, version=mine.version, commit=mine.commit), folder
    )
    yield
    end(folder)


def is_unended(folder: Path) -> bool:
    """Whether a run is in the folder that is not whole."""
    record = read_record(folder)
    return record is not None and record.ended is None


def end(folder: Path, *, latest: bool = True) -> None:
    """The run in the folder is whole. latest: whether `latest` beside it is to point to it."""
    if _has_results(folder):
        write_record(replace(_record(folder), ended=run_record.now()), folder)
        if latest:
            point(folder.parent / LATEST, folder.name)


def point(link: Path, name: str) -> None:
    """Has the link lead to its sibling of that name: at no instant to nothing. A file with the name where links cannot
    be made; a folder that is called like the link stays.
    """
    partial = link.parent / PARTIAL.format(name=link.name, pid=os.getpid())
    try:
        partial.unlink(missing_ok=True)
        try:
            partial.symlink_to(name, target_is_directory=True)
        except (OSError, NotImplementedError):
            partial.write_text(name + "\n", encoding="utf-8")
        partial.replace(link)
    except OSError as error:
        print(f"{link} was not set to {name}: {error.strerror}", file=sys.stderr)
    finally:
        partial.unlink(missing_ok=True)


def same_run(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two configurations run the same, however it is shown and wherever it is filed."""
    return {**one, **dict.fromkeys(NOT_OF_THE_RUN)} == {**other, **dict.fromkeys(NOT_OF_THE_RUN)}


def show(folders: Sequence[Path], into: Path, *, figures: bool) -> None:
    """Writes the figures and the report if they are wanted, then prints the table. into: the run's folder."""
    runs = [read_run(each) for each in folders]
    try:
        report = write_comparison(runs, into, command=command_of(into)) if figures else None
    finally:  # a report that fails keeps nobody from the table
        print_comparison(compare(runs))
    if report is not None:
        print(f"report: {report}")
    print(f"results: {into}/, and {into.parent / LATEST}/ until the next run")


def command_of(folder: Path) -> str:
    """What was typed for the run in the folder; "" where that is not known."""
    record = read_record(folder)
    return record.command if record else ""


def claimed(parent: Path, name: str, *, only: bool = False) -> Path:
    """The first of `name`, `name-2`, … that did not exist, made. only: `name` and no other will do."""
    number, tries = 1, _TRIES
    while True:
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir()
            return folder
        except OSError as error:
            # A parent may be gone: another command has just removed what it had made in vain.
            tries -= isinstance(error, FileNotFoundError)
            if only or not tries or not (folder.exists() or isinstance(error, FileNotFoundError)):
                raise InputError(
                    f"results_dir: {folder} cannot be made ({error.strerror}). Name another place with results_dir=DIR."
                ) from error
            number += isinstance(error, FileExistsError)


def _has_results(folder: Path) -> bool:
    return folder.is_dir() and any(each.name not in _NO_RESULTS for each in folder.iterdir())


def _remove_empty(folder: Path, made: Sequence[Path]) -> None:
    with contextlib.suppress(OSError):
        for name in _NO_RESULTS:
            (folder / name).unlink(missing_ok=True)
        for each in (folder, *made):
            each.rmdir()


def _record(folder: Path) -> RunRecord:
    record = read_record(folder)
    if record is None:
        raise InputError(f"{folder / run_record.FILE} is gone; somebody has removed it while the run went on.")
    return record
