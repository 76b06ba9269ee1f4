"""`retry`: has a job that failed, was cancelled or lost its workers too often wait again, from its last checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from synergy_core.parser import Parser
from synergy_exec.client import client_for, running
from synergy_exec.controller.retry import retry_in
from synergy_exec.folders import lock
from synergy_exec.plain import plain
from synergy_exec.settings import Settings
from synergy_exec.works import work_of


def main(arguments: Sequence[str]) -> None:
    """Asks the controller that runs; where none does, writes it into the journal. Raises InputError."""
    parser = Parser(prog="python -m synergy_exec retry", description=__doc__)
    parser.add_argument("job", help="its name, or its number")
    parser.add_argument(
        "--from-start", action="store_true", help="from step 0; what it had trained is put aside in its folder"
    )
    parser.add_argument("--dir", type=Path, default=Settings().results_dir, help="results_dir, or RUN.work")
    parser.add_argument("--url", default=None, help="the controller's address, such as http://127.0.0.1:8080")
    given = parser.parse_args(arguments)
    if given.url is not None or running(given.dir):
        client = client_for(given.dir, given.url)
        job = client.ask("POST", f"/jobs/{quote(given.job, safe='')}/retry", {"from_start": given.from_start})
        print(f"job {job['job']} ({plain(job['name'])}) is {job['state']}")
        return
    work = work_of(given.dir, given.job)
    with lock(work):
        row = retry_in(work, given.job, from_start=given.from_start)
    print(f"job {row.job} ({row.name}) waits; to go on: python -m synergy_exec resume {work}")
