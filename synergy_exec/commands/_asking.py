"""`submit`, `list`, `cancel`, `retry` and `explain`: requests to a running controller."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from synergy_core.commands import Parser
from synergy_exec.client import Client, client_for, running
from synergy_exec.controller.journal import retry_in
from synergy_exec.folders import find_job, lock
from synergy_exec.job_file import read_job_file
from synergy_exec.plain import plain, plain_lines
from synergy_exec.settings import Settings


def submit(given: argparse.Namespace, client: Client) -> None:
    """Submits the job of a file. The job is on disk once its number is printed."""
    job = given.job_file
    made = client.ask("POST", "/jobs", job.values())
    print(f"job {made['job']} ({plain(made['name'])})")


_WHOSE = {"user": "user", "virtual cluster": "virtual_cluster", "priority": "priority"}
"""Columns that are shown if some job has a value."""


def list_jobs(given: argparse.Namespace, client: Client) -> None:
    """Lists all jobs, and excluded nodes."""
    jobs = client.ask("GET", "/jobs")
    if given.json:
        print(json.dumps(jobs, indent=1))
        return
    more = {heading: key for heading, key in _WHOSE.items() if any(job.get(key) for job in jobs)}
    cells = [_cells(job) | {heading: plain(str(job.get(key) or "-")) for heading, key in more.items()} for job in jobs]
    rows = [list(cells[0]), *(list(each.values()) for each in cells)] if jobs else [["no jobs"]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for job in jobs:
        if job["state"] == "failed":
            print(f"job {job['job']} ({plain(job['name'])}) failed: {plain_lines(job['reason'])}")
        elif job["note"]:
            print(f"job {job['job']} ({plain(job['name'])}): {plain_lines(job['note'])}")
    for sentence in client.ask("GET", "/state?most=0")["aside"]:
        print(plain(sentence))


def _cells(job: dict[str, Any]) -> dict[str, str]:
    """The cells of a job's row in the table, by column heading. job: from the controller's API."""
    goodput, loss = job["goodput"], job["loss"]
    done = 1.0 if job["state"] == "done" else min(1.0, job["work"] / job["work_total"])  # a command may end sooner
    return {
        "job": str(job["job"]),
        "name": plain(job["name"]),
        "state": job["state"],
        "slots": f"{job['slots']} of {job['slots_asked']}",
        "plan": job["plan"] or "-",
        "compressor": job["compressor"] or "-",
        "batch": str(job["batch"] or "-"),
        "step": str(job["step"]),
        "done": f"{done:.0%}",
        "goodput": "-" if goodput is None else f"{goodput:.1f}/s",
        "loss": "-" if loss is None else f"{loss:.4g}",
        "restarts": str(job["restarts"]),
    }


def cancel(given: argparse.Namespace, client: Client) -> None:
    """Cancels a job and kills its workers."""
    job = client.ask("DELETE", f"/jobs/{quote(given.job, safe='')}")
    print(f"job {job['job']} ({plain(job['name'])}) is {job['state']}")


def retry(given: argparse.Namespace) -> None:
    """Makes a failed or cancelled job wait again, from its last checkpoint.

    Without a running controller it writes this into the journal.
    """
    if given.url is not None or running(given.dir):
        path = f"/jobs/{quote(given.job, safe='')}/retry"
        job = client_for(given.dir, given.url).ask("POST", path, {"from_start": given.from_start})
        print(f"job {job['job']} ({plain(job['name'])}) is {job['state']}")
        return
    job = find_job(given.dir, given.job)
    with lock(job.work):
        retry_in(job.work, job.number, from_start=given.from_start)
    print(f"job {job.number} ({plain(job.name)}) waits; to go on: python -m synergy_exec resume {job.work}")


def explain(given: argparse.Namespace, client: Client) -> None:
    """Explains a job's allocation in the last decision."""
    found = client.ask("GET", f"/jobs/{quote(given.job, safe='')}/explain")
    text = found.pop("text")
    print(json.dumps(found, indent=1) if given.json else f"decision at {found['time_s']:.0f} s\n{plain_lines(text)}")


COMMANDS: dict[str, Callable[..., None]] = {
    "submit": submit,
    "list": list_jobs,
    "cancel": cancel,
    "retry": retry,
    "explain": explain,
}


def main(name: str, arguments: Sequence[str]) -> int:
    """Runs one of these commands; returns the exit code. Raises InputError."""
    command = COMMANDS[name]
    parser = Parser(prog=f"python -m synergy_exec {name}", description=command.__doc__)
    if name == "submit":
        parser.add_argument("file", type=Path, metavar="JOB.yaml", help="the job; docs/executor.md says what is in it")
    elif name in ("cancel", "explain", "retry"):
        parser.add_argument("job", help="its name, or its number")
    if name == "retry":
        put_aside = "from step 0; what it had trained is put aside in its folder"
        parser.add_argument("--from-start", action="store_true", help=put_aside)
    if name in ("list", "explain"):
        parser.add_argument("--json", action="store_true", help="print JSON")
    where = "results_dir, or RUN.work" if name == "retry" else "the results folder of the controller"
    parser.add_argument("--dir", type=Path, default=Settings().results_dir, help=where)
    parser.add_argument("--url", default=None, help="the controller's address, such as http://127.0.0.1:8080")
    given = parser.parse_args(arguments)
    if name == "submit":
        given.job_file = read_job_file(given.file)  # errors of the job file come before errors of the connection
    if name == "retry":
        retry(given)
        return 0
    command(given, client_for(given.dir, given.url))
    return 0
