"""`submit`, `list`, `cancel`, `retry` and `explain`: requests to a running controller.

A controller is found by the files in its run's folder.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from synergy_core.cli import Parser
from synergy_core.commands._settings import table
from synergy_core.errors import InputError
from synergy_exec.controller.journal import retry_in
from synergy_exec.folders import find_job, lock, works_below
from synergy_exec.job_file import read_job_file
from synergy_exec.plain import plain, plain_lines
from synergy_exec.settings import Settings
from synergy_exec.worker.processes import lives

PATIENCE_S, COPYING_S = 10.0, 120.0
"""Seconds to wait for an answer, and for the answer to a submission, before which the job's code is copied."""


@dataclass(frozen=True, slots=True)
class Client:
    """A client of one controller. url: without a path; https if a proxy is in front of it. token: the controller's."""

    url: str
    token: str

    def ask(self, method: str, path: str, body: Any = None, patience_s: float = PATIENCE_S) -> Any:
        """Returns the JSON of the controller's answer. Raises InputError with its error, or why there is no answer."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data=data, headers=headers, method=method)
        # The controller is on this machine, or named by the user: HTTP_PROXY is not meant for it.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=patience_s) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            raise InputError(_sentence(error)) from None
        except (urllib.error.URLError, TimeoutError, ConnectionError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise InputError(f"no controller answers at {self.url} ({reason}).") from None


def _sentence(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(error.read())["error"])
    except (ValueError, KeyError, TypeError):
        return f"the controller answered {error.code} {error.reason}."


def client_for(folder: Path, url: str | None) -> Client:
    """A client of the controller below `folder` or at `url`, with the token below `folder` or in SYNERGY_TOKEN."""
    token = os.environ.get("SYNERGY_TOKEN", "")
    if url is not None and token:
        return Client(url.rstrip("/"), token)
    found = _controllers(folder)
    if not found:
        raise InputError(
            f"no controller runs below {folder}. Start one: python -m synergy_exec serve=true "
            f"results_dir={folder}; or say where it is with --dir or --url."
        )
    if len(found) > 1:
        places = ", ".join(str(path) for path, _ in found)
        raise InputError(f"{len(found)} controllers run below {folder}; take one with --dir: {places}.")
    path, values = found[0]
    try:
        token = (path / "token").read_text(encoding="utf-8").strip()
    except OSError as error:
        raise InputError(f"{path / 'token'}: the token cannot be read ({error.strerror}).") from error
    return Client((url or values["url"]).rstrip("/"), token)


def running(folder: Path) -> bool:
    """Whether a controller runs below the folder."""
    return bool(_controllers(folder))


def _controllers(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Folders of running controllers, with the contents of their controller.json."""
    found = []
    for work in works_below(folder):
        with contextlib.suppress(FileNotFoundError):
            values = json.loads((work / "controller.json").read_text(encoding="utf-8"))
            if values["host"] != os.uname().nodename or lives(values["pid"], values["began"]):
                found.append((work, values))
    return found


# The commands.


def submit(given: argparse.Namespace, client: Client) -> None:
    """Submits the jobs of files. A job is on disk once its number is printed."""
    for job in given.job_files:
        made = client.ask("POST", "/jobs", job.values(), COPYING_S)
        print(f"job {made['job']} ({plain(made['name'])})", flush=True)
        if made["note"]:
            print(plain_lines(made["note"]), file=sys.stderr)


_WHOSE = {key.replace("_", " "): key for key in ("user", "virtual_cluster", "priority", "compressor")}
"""Columns that are shown if some job has a value."""
_NOTHING = (None, "", 0, "none")


def list_jobs(given: argparse.Namespace, client: Client) -> None:
    """Lists all jobs, and excluded nodes."""
    jobs = client.ask("GET", "/jobs")
    if given.json:
        print(json.dumps(jobs, indent=1))
        return
    more = {heading: key for heading, key in _WHOSE.items() if any(job.get(key) not in _NOTHING for job in jobs)}
    cells = [_cells(job) | {heading: plain(str(job.get(key) or "-")) for heading, key in more.items()} for job in jobs]
    header = list(cells[0]) if jobs else ["no jobs"]
    print(table(header, [list(each.values()) for each in cells], left=len(header)))
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
        "batch": str(job["batch"] or "-"),
        "step": str(job["step"] or "-"),
        "done": f"{done:.0%}",
        "goodput": "-" if goodput is None else f"{goodput:.1f}/s",
        "loss": "-" if loss is None else f"{loss:.4g}",
        "restarts": str(job["restarts"]),
        "submitted": _instant(job["submitted_unix_s"]),
        "started": _instant(job["started_unix_s"]),
    }


def _instant(unix_s: float | None) -> str:
    return "-" if unix_s is None else time.strftime("%m-%d %H:%M", time.localtime(unix_s))


def cancel(given: argparse.Namespace, client: Client) -> None:
    """Cancels a job and kills its workers."""
    job = client.ask("DELETE", f"/jobs/{quote(given.job, safe='')}")
    print(f"job {job['job']} ({plain(job['name'])}) is {job['state']}")


def retry(given: argparse.Namespace, client: Client | None) -> None:
    """Makes a failed or cancelled job wait again, from its last checkpoint.

    Without a running controller it writes this into the journal.
    """
    if client is not None:
        path = f"/jobs/{quote(given.job, safe='')}/retry"
        job = client.ask("POST", path, {"from_start": given.from_start})
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
        files = "job files (docs/executor.md), and keys that are to be others in all of them, such as slots=2"
        parser.add_argument("words", nargs="+", metavar="JOB.yaml KEY=VALUE", help=files)
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
        keys = [word for word in given.words if "=" in word and not Path(word).exists()]
        jobs = [read_job_file(Path(word), keys) for word in given.words if word not in keys]
        if not jobs:
            parser.error("no job file")
        given.job_files = [each for job in jobs for each in job.each()]  # their errors come before the connection's
    alone = name == "retry" and given.url is None and not running(given.dir)
    command(given, None if alone else client_for(given.dir, given.url))
    return 0
