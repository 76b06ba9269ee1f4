"""`logs`: prints what a job's workers printed, of all its runs; from the files of a run, whether it goes on or not."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from synergy_core.commands import Parser
from synergy_core.errors import InputError
from synergy_exec.agent.logs import logs
from synergy_exec.folders import once
from synergy_exec.recorded import open_journal
from synergy_exec.settings import Settings

_LOOK_S = 0.5
_ENDED = ("done", "failed", "cancelled")


class LoggedJob(NamedTuple):
    """A job that was launched. work: the run's folder. name: as it was submitted."""

    work: Path
    number: int
    name: str

    @property
    def folder(self) -> Path:
        """Where its logs are."""
        return self.work / "jobs" / str(self.number)

    @property
    def changed_s(self) -> float:
        """When something was last written into its folder's logs, seconds since 1970; 0 where there is none."""
        return max((path.stat().st_mtime for paths in logs(self.folder).values() for path in paths), default=0.0)


def main(arguments: Sequence[str]) -> None:
    """Prints them. Raises InputError."""
    parser = Parser(prog="python -m synergy_exec logs", description=__doc__)
    parser.add_argument("job", help="its name, or its number")
    parser.add_argument("--run", type=int, default=None, metavar="N", help="of that run alone, as in log-N.txt")
    parser.add_argument("--follow", action="store_true", help="go on as it grows, until the job has ended")
    parser.add_argument(
        "--dir", type=Path, default=Settings().results_dir, help="results, or a run's folder, such as synergy-0.work"
    )
    given = parser.parse_args(arguments)
    job = found(given.dir, given.job)
    if given.run is not None and given.run not in logs(job.folder):
        runs = ", ".join(map(str, logs(job.folder))) or "none"
        raise InputError(f"--run {given.run}: job {job.name} has no log of that run; it has those of: {runs}.")
    printer = _Printer(job, given.run)
    printer.print_new()
    if given.follow:
        journal = open_journal(job.work)
        ended = False
        while not ended:
            time.sleep(_LOOK_S)
            # Asked before the last look: what it printed at its end is there then.
            ended = any(row.job == job.number and row.state in _ENDED for row in journal.jobs())
            printer.print_new()
        journal.close()


def found(folder: Path, wanted: str) -> LoggedJob:
    """The job of that name or number, in the run that was last written to. Raises InputError."""
    jobs = list(_jobs(folder))
    named = [each for each in jobs if each.name == wanted] or [each for each in jobs if str(each.number) == wanted]
    if not named:
        names = ", ".join(dict.fromkeys(each.name for each in jobs)) or "none"
        raise InputError(f"no job '{wanted}' was launched in a run below {folder}; those that were: {names}.")
    last = max(named, key=lambda each: each.changed_s)
    if len(same := [each for each in named if each.work == last.work]) > 1:
        numbers = ", ".join(str(each.number) for each in same)
        raise InputError(f"{len(same)} jobs are called {wanted} in {last.work}; take a number: {numbers}.")
    if len(named) > 1:
        print(f"of {last.work}, written to last; others: --dir RUN.work", file=sys.stderr)
    return last


def _jobs(folder: Path) -> Iterator[LoggedJob]:
    for work in once((folder, *folder.glob("*"), *folder.glob("*/*"))):
        for path in sorted(work.glob("jobs/*/job.json")):
            try:
                values = json.loads(path.read_text(encoding="utf-8"))
                yield LoggedJob(work, int(values["job"]), str(values["submitted_as"]))
            except (OSError, ValueError, KeyError, TypeError):
                continue


class _Printer:
    """Prints what it has not printed yet. run: of that one alone; None: of all, with a heading each."""

    def __init__(self, job: LoggedJob, run: int | None) -> None:
        self._job, self._only = job, run
        self._printed: dict[int, int] = {}
        self._last: int | None = None

    def print_new(self) -> None:
        for run, paths in logs(self._job.folder).items():
            if self._only in (None, run):
                self._print(run, paths)

    def _print(self, run: int, paths: list[Path]) -> None:
        # What a log was before it was turned over, at first.
        old = b"" if run in self._printed else b"".join(path.read_bytes() for path in paths[:-1])
        with paths[-1].open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            printed = self._printed.get(run, 0)
            # One that has become shorter was turned over meanwhile.
            file.seek(printed if printed <= size else 0)
            text = old + file.read()
            self._printed[run] = file.tell()
        if text and self._only is None and run != self._last:
            print(f"--- run {run}")
            self._last = run
        sys.stdout.flush()
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()
