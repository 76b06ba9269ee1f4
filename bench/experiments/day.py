"""Measures what a service needs after many short jobs, and after a restart: docs/executor.md."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from runner.experiment import Experiment, Result, Results, measurement
from runner.tables import number, table

JOBS, EVERY, SLOTS = 2_000, 500, 4
"""Jobs altogether and between two looks at the service, and its slots."""
ARRAY, MAX_QUEUED = 25, 50
"""Jobs of an array, and the largest number of jobs that wait or run at the same time."""
SCRIPT = 'sleep "$(shuf -n 1 -e 0.1 0.3 0.5)"; echo "job $SYNERGY_ARRAY has ended" > result.txt\n'
LOOK_S, SETTLING_S = 0.2, 3.0
MB = 1e6


def day(jobs: int, every: int, policy: str) -> Result:
    """Submits so many short commands, half of them in arrays, as fast as a service takes them, and restarts it."""
    from chaos import Service

    from synergy_exec.job_file import job_of

    with tempfile.TemporaryDirectory() as name:
        code = Path(name, "code")
        code.mkdir()
        (code / "train.sh").write_text(SCRIPT, encoding="utf-8")
        values = {"command": ["sh", "train.sh"], "directory": str(code), "max_seconds": 60}
        array = job_of({**values, "name": "array", "array": f"1-{ARRAY}"}, "day").each()
        alone = [job_of({**values, "name": "alone"}, "day")] * ARRAY
        settings = ("serve=true", f"policy=[{policy}]", "figures=false", f"backend.options.slots={SLOTS}")
        service = Service(Path(name), settings)
        looks = [_answering(service)]
        began_s, submitted = time.monotonic(), 0
        while submitted < jobs:
            for several in (array, alone):
                _until(lambda: submitted - _ended(service) <= MAX_QUEUED - ARRAY)  # noqa: B023
                for each in several:
                    service.ask("POST", "/jobs", each.values())
                submitted += ARRAY
            if submitted % every == 0:
                _until(lambda: _ended(service) == submitted)  # noqa: B023
                looks.append({"seconds": time.monotonic() - began_s, **_look(service)})
        # A queue whose jobs have all ended is left alone; one with a job that goes on is taken over.
        service.ask("POST", "/jobs", job_of({"command": ["sleep", "600"]}, "day").values())
        _until(lambda: service.ask("GET", "/state")["counts"]["running"] == 1)
        left = service.leave()
        service.start()
        looks.append(_answering(service))
        left += service.leave()
        assert not left, left
        return {"looks": looks}


def _until(true: Callable[[], bool]) -> None:
    while not true():
        time.sleep(LOOK_S)


def _ended(service: Any) -> int:
    """How many jobs are done. Raises AssertionError if one has failed."""
    counts = service.ask("GET", "/state?most=0")["counts"]
    assert not counts["failed"], counts
    return int(counts["done"])


def _answering(service: Any) -> dict[str, float]:
    """Waits until a service that has just started answers, and looks at it."""
    from synergy_core.errors import InputError

    began_s = time.monotonic()
    while True:
        try:
            service.ask("GET", "/state")
            return {"starting_s": time.monotonic() - began_s, **_look(service)}
        except InputError:
            time.sleep(LOOK_S)


def _look(service: Any) -> dict[str, float]:
    """Measures the memory of the service's processes, the size of its folder, and the time it takes to answer."""
    from chaos import AGENTS, FORKSERVERS

    from synergy_exec.worker import processes

    time.sleep(SETTLING_S)
    found: dict[str, float] = {"processes": 1 + len(processes.descendants(service.process.pid))}
    pids = {
        who: service.pids(words)[0] for who, words in (("controller", ()), ("agent", AGENTS), ("parent", FORKSERVERS))
    }
    for who, pid in pids.items():
        status = dict(line.split(":", 1) for line in processes.told(pid, "status").splitlines())
        found[f"{who}_mb"] = int(status["VmRSS"].split()[0]) * 1024 / MB
        found[f"{who}_cpu_s"] = processes.cpu_s([pid])
    found["files"] = sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids.values())
    found["threads"] = sum(len(os.listdir(f"/proc/{pid}/task")) for pid in pids.values())
    for what, path in (("list", "/jobs"), ("state", "/state?most=200"), ("history", "/history")):
        began_s = time.perf_counter()
        service.ask("GET", path)
        found[f"{what}_ms"] = 1e3 * (time.perf_counter() - began_s)
    found["journal_mb"] = sum(path.stat().st_size for path in service.work.glob("journal.sqlite*")) / MB
    files = [path.lstat() for path in (service.work / "jobs").rglob("*")]
    return found | {"job_files": len(files), "jobs_mb": sum(each.st_blocks * 512 for each in files) / MB}


TASK = measurement(day, is_timed=True, jobs=JOBS, every=EVERY, policy="synergy")
ROWS = {
    "memory of the controller, MB": ("controller_mb", 0),
    "… of the agent": ("agent_mb", 0),
    "… of the parent of workers": ("parent_mb", 0),
    "processes": ("processes", 0),
    "their threads": ("threads", 0),
    "their open files": ("files", 0),
    "journal, MB": ("journal_mb", 1),
    "folders of jobs, MB": ("jobs_mb", 0),
    "files in them": ("job_files", 0),
    "`GET /jobs`, ms": ("list_ms", 0),
    "the page: `GET /state`, ms": ("state_ms", 0),
    "… and `GET /history`": ("history_ms", 0),
}
CPU = {"controller": "controller", "agent": "agent", "parent of workers": "parent"}


def _tables(results: Results) -> dict[str, str]:
    looks = results[TASK]["looks"]
    *served, again = looks
    spans = list(pairwise(served))
    rows = [[name, *(number(look[key], digits) for look in looks)] for name, (key, digits) in ROWS.items()]
    for name, who in CPU.items():
        per_100 = [(b[f"{who}_cpu_s"] - a[f"{who}_cpu_s"]) * 100 / EVERY for a, b in spans]
        rows.append([f"CPU seconds per 100 jobs, {name}", *map(number, (None, *per_100, None))])
    header = ("", "at the beginning", *(f"{EVERY * at:,} jobs" for at in range(1, len(served))), "restarted")
    took = f"{JOBS:,} jobs in {number(served[-1]['seconds'] / 60, 1)} minutes"
    answered = f"{number(served[0]['starting_s'], 1)} s after its start, and {number(again['starting_s'], 1)} s after"
    return {"looks": table(header, rows), "took": took, "answered": answered}


DAY = Experiment(lambda: [TASK], _tables)
