"""`logs`: prints the output of a job's workers in all its runs, from files; no controller needs to run."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from synergy_core.commands import Parser
from synergy_exec.agent.logs import logs
from synergy_exec.controller.journal import ENDED
from synergy_exec.folders import FoundJob, find_job
from synergy_exec.recorded import open_journal
from synergy_exec.settings import Settings

_LOOK_S = 0.5


def main(arguments: Sequence[str]) -> None:
    """Prints the logs. Raises InputError."""
    parser = Parser(prog="python -m synergy_exec logs", description=__doc__)
    parser.add_argument("job", help="its name, or its number")
    parser.add_argument("--follow", action="store_true", help="go on as it grows, until the job has ended")
    parser.add_argument(
        "--dir", type=Path, default=Settings().results_dir, help="results, or a run's folder, such as synergy-0.work"
    )
    given = parser.parse_args(arguments)
    job = find_job(given.dir, given.job)
    printer = _Printer(job)
    printer.print_new()
    if given.follow:
        journal = open_journal(job.work)
        ended = False
        while not ended:
            time.sleep(_LOOK_S)
            # Ask before the last look, so that the last look sees everything that the job printed.
            ended = any(row.job == job.number and row.state in ENDED for row in journal.jobs())
            printer.print_new()
        journal.close()


class _Printer:
    """Prints new output of all runs of a job, with a heading for each run."""

    def __init__(self, job: FoundJob) -> None:
        self._job = job
        self._printed: dict[int, int] = {}
        self._last: int | None = None

    def print_new(self) -> None:
        for run, paths in logs(self._job.folder).items():
            self._print(run, paths)

    def _print(self, run: int, paths: list[Path]) -> None:
        # First the part of the log from before it was truncated.
        old = b"" if run in self._printed else b"".join(path.read_bytes() for path in paths[:-1])
        with paths[-1].open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            printed = self._printed.get(run, 0)
            # A log that has become shorter was truncated meanwhile.
            file.seek(printed if printed <= size else 0)
            text = old + file.read()
            self._printed[run] = file.tell()
        if text and run != self._last:
            print(f"--- run {run}")
            self._last = run
        sys.stdout.flush()
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()
