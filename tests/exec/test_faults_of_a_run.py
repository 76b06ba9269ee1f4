"""Whole runs with real workers, in which something is killed, hangs, fails or runs full: what the user is left with."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from exec.waiting import wait_until
from family import descendants

from synergy_core.errors import InputError
from synergy_exec.client import Client, client_for
from synergy_exec.controller import processes
from synergy_exec.recorded import open_journal, recorded_jobs

JOBS = Path(__file__).with_name("agents_jobs.py")
DETECTION_S = 10.0
QUICK = ("round_s=0.3", "hang_s=1.5", "leave_s=15", "checkpoint_interval_s=1")


class Served:
    """`python -m synergy_exec serve=true` on two cores of this machine, for whom a test submits jobs.

    given: more of its keys. seen: every process that it started, directly or not, with when that began; looked for as
    long as it runs.
    """

    def __init__(self, results: Path, *given: str) -> None:
        self.results, self.given = results, given
        self.work = results / "served" / "las-0.work"
        self.seen: set[tuple[int, int]] = set()
        self._process: subprocess.Popen[bytes] | None = None
        self._over = threading.Event()
        threading.Thread(target=self._look, daemon=True).start()

    def start(self) -> None:
        given = ("serve=true", "policy=[las]", f"results_dir={self.results}", "live=false", "figures=false")
        command = [sys.executable, "-m", "synergy_exec", *given, *QUICK, *self.given, "backend.options.slots=2"]
        self._process = subprocess.Popen(command, stderr=(self.results / "said.txt").open("ab"))
        wait_until(lambda: self._answers(), 60.0)

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self.results / "said.txt").read_text()
        with contextlib.suppress(InputError):
            return self.client().ask("GET", "/state")["slots"] > 0
        return False

    def client(self) -> Client:
        return client_for(self.results, None)

    def submit(self, name: str, kind: str, arguments: dict[str, Any] | None = None, **more: Any) -> None:
        values = {"initial_batch": 8, "work": 100, "slots": 1, **more}
        self.client().ask(
            "POST", "/jobs", {"class": f"{JOBS}:{kind}", "arguments": arguments or {}, **values, "name": name}
        )

    def jobs(self) -> dict[str, dict[str, Any]]:
        return {each["name"]: each for each in self.client().ask("GET", "/jobs")}

    def agent(self) -> int:
        """Its process, when it has one; after it come its parent of workers and those, in `descendants`."""
        wait_until(lambda: len(self._agents()) == 1, DETECTION_S)
        return self._agents()[0]

    def _agents(self) -> list[int]:
        mine = (pid for pid, began in set(self.seen) if processes.lives(pid, began))
        return [pid for pid in mine if "synergy_exec.agent" in command_line(pid)]

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def leave(self) -> None:
        """As Ctrl-C does it; then nobody is left."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait(30)
        self._over.set()
        wait_until(lambda: not [each for each in self.seen if processes.lives(*each)], 10.0)

    def _look(self) -> None:
        while not self._over.wait(0.05):
            if self._process is not None:
                for pid in descendants(self._process.pid):
                    with contextlib.suppress(OSError, ValueError, IndexError):
                        self.seen.add((pid, processes.began(pid)))


def command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return ""


@pytest.fixture
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path, *getattr(request, "param", ()))
    made.start()
    try:
        yield made
    finally:
        made.leave()


def trained(work: Path) -> dict[str, list[tuple[int, int]]]:
    """By job, (step, batch) of every step that counts."""
    return {job.file.name: [(step.number, step.batch) for step in job.steps] for job in recorded_jobs(work)}


def test_jobs_that_fail_say_why_and_the_others_run_on(served: Served) -> None:
    served.submit("good", "Plain", {"pause_s": 0.02}, work=150)
    served.submit("wide", "Plain", {"pause_s": 0.02}, work=100, slots=2)
    served.submit("raises", "Breaking", {"way": "raise"})
    served.submit("unbuilt", "Unbuilt")
    served.submit("too-large", "Breaking", {"way": "out_of_memory"})
    served.submit("killed", "Breaking", {"way": "kill"})
    served.submit("hangs", "Breaking", {"way": "hang"})
    served.submit("no-class", "Nothing")
    served.submit("odd", "Plain", initial_batch=3, max_batch=4, work=20, slots=2)
    with pytest.raises(InputError, match="batch of 3 does not divide among slots=2, and max_batch=3"):
        served.submit("undivided", "Plain", initial_batch=3, work=20, slots=2)
    with pytest.raises(InputError, match="slots=8; the cluster has 2"):
        served.submit("too-wide", "Plain", slots=8)
    with pytest.raises(InputError, match="Did you mean 'work'"):
        served.submit("mistyped", "Plain", wrok=3)
    with pytest.raises(InputError, match="token"):
        Client(served.client().url, "a guess").ask("GET", "/jobs")
    wait_until(lambda: all(each["state"] in ("done", "failed") for each in served.jobs().values()), 120.0)
    jobs = served.jobs()
    assert len(jobs) == 9
    said = {
        "raises": "the data is gone",
        "unbuilt": "width",
        "too-large": "memory",
        "killed": "SIGKILL",
        "hangs": "no step for",
        "no-class": "Nothing",
    }
    for name, words in said.items():
        assert jobs[name]["state"] == "failed", jobs[name]
        assert words in jobs[name]["reason"], jobs[name]
    assert {jobs[name]["state"] for name in ("good", "wide", "odd")} == {"done"}
    steps = trained(served.work)
    assert steps["good"] == [(number, 8) for number in range(1, 151)]
    assert steps["odd"][0] == (1, 4)
    assert steps["wide"] == [(number, 8) for number in range(1, 101)]


def test_what_can_be_remedied_does_not_end_a_job(served: Served) -> None:
    """Memory that runs out; replicas of which one goes without a layer."""
    served.submit("greedy", "Greedy", work=40, initial_batch=16)
    served.submit("sparing", "Sparing", work=40, slots=2)
    wait_until(lambda: all(each["state"] in ("done", "failed") for each in served.jobs().values()), 120.0)
    jobs = served.jobs()
    assert {name: each["state"] for name, each in jobs.items()} == {"greedy": "done", "sparing": "done"}, jobs
    assert jobs["greedy"]["note"] == "memory ran out at micro-batch 8: from now on at most 4"
    assert jobs["sparing"]["note"].startswith("some of its parameters have no part")
    assert trained(served.work)["greedy"] == [(number, 16) for number in range(1, 41)]
    assert trained(served.work)["sparing"] == [(number, 8) for number in range(1, 41)]


def test_whatever_is_killed_every_sample_is_trained_once(served: Served) -> None:
    """A worker, the agent, the controller: each is noticed in time, and both jobs go on from a checkpoint."""
    served.submit("long", "Plain", {"pause_s": 0.05}, work=400)
    served.submit("other", "Plain", {"pause_s": 0.05}, work=400)
    kill_in_turn(served, jobs=2)
    assert {each["state"] for each in served.jobs().values()} == {"done"}
    assert trained(served.work) == {name: [(number, 8) for number in range(1, 401)] for name in ("long", "other")}


@pytest.mark.parametrize("served", [("compression=uniform", "compressor=powersgd-2")], indirect=True)
def test_whatever_is_killed_a_compressed_job_trains_every_sample_once(served: Served) -> None:
    """On two replicas, which lose with a worker what they held back since the checkpoint, and with it the steps."""
    served.submit("wide", "Wide", {"pause_s": 0.05}, work=200, slots=2)
    kill_in_turn(served, jobs=1)
    assert served.jobs()["wide"]["state"] == "done"
    assert trained(served.work) == {"wide": [(number, 8) for number in range(1, 201)]}
    compressed = [run.plan["compressor"] for run in runs_of(served)]
    assert set(compressed) == {"powersgd-2"}
    said = logs(served)
    # The first run's layers were not known when it was launched.
    assert said[0].count("compressor powersgd-2: 1 of 6 layers; as they are: 0.weight, 0.bias,") == 1
    (job,) = recorded_jobs(served.work)
    assert all("compressor powersgd-2" in said[run] for run in {step.run for step in job.steps})


@pytest.mark.parametrize("served", [("compression=uniform", "compressor=powersgd-500")], indirect=True)
def test_gradients_that_cannot_be_compressed_are_said_and_trained_on(served: Served) -> None:
    """A rank above the matrix's, where no layer would shrink; then layers too small."""
    served.submit("wide", "Wide", work=60, slots=2)
    served.submit("small", "Plain", work=60, slots=2)
    wait_until(lambda: all(each["state"] in ("done", "failed") for each in served.jobs().values()), 120.0)
    assert {each["state"] for each in served.jobs().values()} == {"done"}
    second = "compressor powersgd-500: 0 of"
    assert all(second in each for each in logs(served).values())


@pytest.mark.parametrize("served", [("compression=uniform", "compressor=topk-0.01")], indirect=True)
def test_gradients_that_are_nothing_or_no_numbers_are_said_and_trained_on(served: Served) -> None:
    for way in ("zero", "nan"):
        served.submit(way, "Wide", {"way": way, "pause_s": 0.03}, work=60, slots=2, max_batch=16)
    wait_until(lambda: all(each["state"] in ("done", "failed") for each in served.jobs().values()), 120.0)
    jobs = served.jobs()
    assert {each["state"] for each in jobs.values()} == {"done"}, jobs
    losses = {job.name: [step.loss for step in job.steps] for job in recorded_jobs(served.work)}
    assert set(losses["zero"][5:]) == {0.0}
    assert all(math.isnan(each) for each in losses["nan"][5:])
    said = [each for _, each in sorted(logs(served).items())]
    assert ["the gradient's norm is nan" in each for each in said] == [False, True]
    assert all("compressor topk-0.01: 1 of 6 layers" in each for each in said)


def logs(served: Served) -> dict[int, str]:
    """What each run wrote, by its number."""
    paths = served.work.glob("jobs/*/log-*.txt")
    return {int(path.stem.partition("-")[2]): path.read_text() for path in paths}


def kill_in_turn(served: Served, *, jobs: int) -> None:
    """A worker, the agent, the controller, each when all jobs run and have a checkpoint; returns when they are done."""
    for victim in ("worker", "agent", "controller"):
        wait_until(lambda: checkpoints(served) == len(running_of(served)) == jobs, 30.0)
        running = running_of(served)
        began_s = time.monotonic()
        if victim == "controller":
            before = served.agent()
            served.kill()
            served.start()
            assert served.agent() != before
        else:
            os.kill(descendants(served.agent())[-1 if victim == "worker" else 0], signal.SIGKILL)
            wait_until(lambda: running & {run.run for run in runs_of(served) if run.outcome == "lost"}, DETECTION_S)  # noqa: B023
        assert time.monotonic() - began_s < 4 * DETECTION_S
    wait_until(lambda: all(each["state"] in ("done", "failed") for each in served.jobs().values()), 90.0)
    assert sum(run.outcome == "lost" for run in runs_of(served)) >= 3


def running_of(served: Served) -> set[int]:
    """Runs that were launched and have not ended."""
    return {run.run for run in runs_of(served) if run.launched and not run.outcome}


def runs_of(served: Served) -> list[Any]:
    journal = open_journal(served.work)
    try:
        return journal.runs()
    finally:
        journal.close()


def checkpoints(served: Served) -> int:
    """Jobs that have one."""
    return len({path.parents[1] for path in served.work.glob("jobs/*/checkpoints/step-*")})


def test_full_disk_fails_the_job_that_does_not_fit_alone(tmp_path: Path) -> None:
    """On a file system that holds the checkpoints of small jobs and not that of a large one."""
    namespace = ["unshare", "--map-root-user", "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*namespace, "true"], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here without being root")
    rows = ["0,small-0,cnn,1,40", "0.1,large,mlp,1,8", "0.2,small-1,cnn,1,40"]
    (tmp_path / "three.csv").write_text("\n".join(["submit_s,job,model,gpus,iterations", *rows]) + "\n")
    small, kept = tmp_path / "small", tmp_path / "kept"
    small.mkdir()
    given = ["+trace=file", f"trace.path={tmp_path / 'three.csv'}", f"results_dir={small}", "policy=[las]", *QUICK]
    given += ["profile=null", "live=false", "figures=false", "backend.options.slots=2"]
    command = " ".join([sys.executable, "-m", "synergy_exec", *(f"'{each}'" for each in given)])
    script = f"mount -t tmpfs -o size=24m none {small} && {command}; code=$?; cp -r {small} {kept}; exit $code"
    done = subprocess.run([*namespace, "sh", "-c", script], capture_output=True, text=True, timeout=180)
    assert done.returncode == 1, done.stderr
    assert "las-0: 1 of 3 jobs failed:\n  job 1 (large): " in done.stderr
    (summary,) = (json.loads(path.read_text()) for path in kept.glob("*/latest/*/summary.json"))
    assert (summary["jobs"], summary["jobs_failed"], summary["jobs_unfinished"]) == (3, 1, 0)
    (work,) = kept.glob("*/*.work")
    journal = open_journal(work)
    reasons = {job.name: (job.state, job.reason) for job in journal.jobs()}
    journal.close()
    assert reasons["large"][0] == "failed"
    assert "too little room" in reasons["large"][1]
    assert {reasons[name][0] for name in ("small-0", "small-1")} == {"done"}
