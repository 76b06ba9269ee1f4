"""`logs`: prints the output of a job's workers in all its runs, from files; no controller needs to run."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from synergy_core.cli import Parser
from synergy_exec.controller.journal import ENDED, open_journal
from synergy_exec.folders import find_job
from synergy_exec.job_folder import LOG, OLD_LOG
from synergy_exec.settings import Settings

_LOOK_S = 0.5


def main(arguments: Sequence[str]) -> None:
    """Prints the logs. Raises InputError."""
    parser = Parser(prog="python -m synergy_exec logs", description=__doc__)
    parser.add_argument("job", help="its name, or its number")
    parser.add_argument("--follow", action="store_true", help="go on as it grows, until the job has ended")
    parser.add_argument("--tail", type=int, default=None, metavar="N", help="begin with the last N lines")
    parser.add_argument(
        "--dir", type=Path, default=Settings().results_dir, help="results, or a run's folder, such as synergy-0.work"
    )
    given = parser.parse_args(arguments)
    job = find_job(given.dir, given.job)
    parts = [path.read_bytes() if path.is_file() else b"" for path in (job.folder / OLD_LOG, job.folder / LOG)]
    lines, printed = b"".join(parts).splitlines(keepends=True), len(parts[1])
    sys.stdout.buffer.write(b"".join(lines[max(0, len(lines) - given.tail) :] if given.tail is not None else lines))
    sys.stdout.buffer.flush()
    if given.follow:
        journal = open_journal(job.work)
        ended = False
        while not ended:
            time.sleep(_LOOK_S)
            # Ask before the last look, so that the last look sees everything that the job printed.
            row = journal.job(job.number)
            ended = row is not None and row.state in ENDED
            printed = _print(job.folder / LOG, printed)
        journal.close()


def _print(path: Path, since: int) -> int:
    """Prints a file from that byte on; from the beginning if it was emptied meanwhile. Returns where it ended."""
    if not path.is_file():
        return 0
    with path.open("rb") as file:
        file.seek(since if since <= path.stat().st_size else 0)
        sys.stdout.flush()
        sys.stdout.buffer.write(file.read())
        sys.stdout.buffer.flush()
        return file.tell()
