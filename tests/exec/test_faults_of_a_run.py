"""Whole runs with real workers, in which something is killed, hangs, fails or runs full: what the user is left with."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from exec import warm
from exec.pretended import refuses
from exec.real import JOBS, Service, descendants, runs, wait_until

from synergy_exec.commands._asking import Client
from synergy_exec.controller.journal import open_journal
from synergy_exec.job_folder import described, folders
from synergy_exec.run import recorded
from synergy_exec.worker import processes

DETECTION_S = 10.0
QUICK = ("round_s=0.3", "hang_s=1.5", "leave_s=15", "checkpoint_interval_s=1")


class Served(Service):
    """A service with four slots, for whom a test submits jobs. given: more of its keys."""

    def __init__(self, results, *given):
        super().__init__(results)
        self.given = given

    def start(self):
        given = ("serve=true", "policy=[las]", f"results_dir={self.results}", "figures=false")
        super().start(*given, *QUICK, *self.given, "backend.options.slots=4")

    @property
    def work(self):
        (work,) = self.results.glob("served/*-*_*/las-0.work")
        return work

    def submit(self, name, kind, arguments=None, **more):
        values = {"initial_batch": 8, "work": 60, "slots": 1, "arguments": arguments or {}, **more, "name": name}
        self.client().ask("POST", "/jobs", {"class": f"{JOBS}:{kind}", **values})

    def ended(self, patience_s=120.0):
        wait_until(lambda: all(each["state"] in ("done", "failed") for each in self.jobs().values()), patience_s)
        return self.jobs()

    def trained(self):
        """The (step, batch) pairs of all steps that count, by job."""
        found = {}
        for folder in folders(self.work).values():
            steps = recorded(folder / "steps.csv")
            found[described(folder).file.name] = list(zip(steps["step"], steps["batch"], strict=True))
        return found

    def runs(self):
        with contextlib.closing(open_journal(self.work)) as journal:
            return journal.runs()

    def agent(self):
        """Its process, when it has one; after it come its parent of workers and those, in `descendants`."""

        def there():
            mine = [pid for pid, began in self.seen if processes.lives(pid, began)]
            found = [pid for pid in mine if runs(pid, "synergy_exec.agent", "agent")]
            return found if len(found) == 1 else []

        return wait_until(there, DETECTION_S)[0]


FAILING = {
    "raise": ("Breaking", {"way": "raise"}, "rank 0, step 6: RuntimeError: the data is gone"),
    "of a peer": ("Breaking", {"way": "raise", "rank": 1}, "rank 1, step 6: RuntimeError: the data is gone"),
    "exit": ("Breaking", {"way": "exit"}, "rank 0, step 6: SystemExit: 0"),
    "end": ("Breaking", {"way": "end"}, "the job's code ended rank 0 with exit code 0 in the middle of its work"),
    "reset": (
        "Breaking",
        {"way": "reset", "rank": 1},
        "rank 1, step 6: ConnectionResetError: Connection reset by peer",
    ),
    "out of memory": ("Breaking", {"way": "out_of_memory"}, "memory"),
    "killed": ("Breaking", {"way": "kill"}, "SIGKILL"),
    "hangs": ("Breaking", {"way": "hang"}, "no step for"),
    "unbuilt": ("Odd", {"way": "unbuilt"}, "rank 0, building: KeyError: 'width'"),
    "unsavable": ("Odd", {"way": "unsavable"}, "rank 0, step 1: model._extra_state is a dict"),
    "unknown": ("Plane", {}, "Did you mean 'Plain'?"),
    "misspelt": ("Plain", {"pause": 1}, "rank 0, building: "),
    "unheard": (
        "Noting",
        {"note": "/dev/null", "way": "raise"},
        "rank 0, on_step of step 3: ValueError: nobody listens",
    ),
}
"""Jobs that end, and the reason. Those of which rank 1 breaks have two."""


def test_jobs_that_fail_say_why_and_the_others_run_on(tmp_path):
    """Memory that runs out and replicas of which one goes without a layer are remedied; they end no job."""
    with Served(tmp_path, "retries=1") as served:
        served.start()
        served.submit("good", "Plain", {"pause_s": 0.02}, work=150)
        served.submit("wide", "Plain", slots=2)
        served.submit("odd", "Plain", initial_batch=3, max_batch=4, work=20, slots=2)
        served.submit("greedy", "Odd", {"way": "greedy"}, work=40, initial_batch=16)
        served.submit("sparing", "Sparing", work=40, slots=2)
        served.submit("nan", "Breaking", {"way": "nan"})
        served.submit("impure", "Odd", {"way": "impure"}, slots=2)
        for name, (kind, arguments, _) in FAILING.items():
            served.submit(name, kind, arguments, slots=1 + arguments.get("rank", 0))
        says = "batch of 3 does not divide among slots=2, and max_batch=3"
        refuses(says, served.submit, "undivided", "Plain", initial_batch=3, work=20, slots=2)
        refuses("token", Client(served.client().url, "a guess").ask, "GET", "/jobs")
        jobs, steps = served.ended(), served.trained()
    for name, (*_, words) in FAILING.items():
        assert jobs[name]["state"] == "failed", jobs[name]
        assert words in jobs[name]["reason"], jobs[name]
    assert {jobs[name]["state"] for name in jobs.keys() - FAILING} == {"done"}
    assert steps["good"] == [(number, 8) for number in range(1, 151)]
    assert steps["odd"][0] == (1, 4)
    assert steps["wide"] == [(number, 8) for number in range(1, 61)]
    assert jobs["greedy"]["note"] == "memory ran out at micro-batch 8: from now on at most 4"
    assert jobs["sparing"]["note"].startswith("some of its parameters have no part")
    assert "step 6: the gradient's norm is nan" in jobs["nan"]["note"]
    assert "other samples when it is called again" in jobs["impure"]["note"]
    assert steps["greedy"] == [(number, 16) for number in range(1, 41)]
    assert steps["sparing"] == [(number, 8) for number in range(1, 41)]


NAMES = {"long": ("Plain", 1), "other": ("Plain", 1), "wide": ("Wide", 2)}


def test_whatever_is_killed_every_sample_is_trained_once(tmp_path):
    """A worker, the agent, the controller: each is noticed in time, and all jobs go on from a checkpoint.

    The wide one is on two compressing replicas, which lose with a worker what they held back since the checkpoint.
    """
    with Served(tmp_path, "compression=uniform", "compressor=powersgd-2") as served:
        served.start()
        for name, (kind, slots) in NAMES.items():
            served.submit(name, kind, {"pause_s": 0.1}, work=150, slots=slots)

        def running():
            """Runs that were launched and have not ended."""
            return {run.run for run in served.runs() if run.launched and not run.outcome}

        def saved():
            return len({path.parents[1] for path in served.work.glob("jobs/*/checkpoints/step-*")})

        for victim in ("worker", "agent", "controller"):
            wait_until(lambda: saved() == len(running()) == len(NAMES), 30.0)
            before, began_s = running(), time.monotonic()
            if victim == "controller":
                agent = served.agent()
                served.kill()
                served.start()
                assert served.agent() != agent
            else:
                os.kill(descendants(served.agent())[-1 if victim == "worker" else 0], signal.SIGKILL)
                wait_until(lambda: before & {run.run for run in served.runs() if run.outcome == "lost"}, DETECTION_S)  # noqa: B023
            assert time.monotonic() - began_s < 4 * DETECTION_S
        assert {each["state"] for each in served.ended().values()} == {"done"}
        assert sum(run.outcome == "lost" for run in served.runs()) >= 3
        assert served.trained() == {name: [(number, 8) for number in range(1, 151)] for name in NAMES}
        assert {run.plan["compressor"] for run in served.runs() if run.plan["data"] == 2} == {"powersgd-2"}


ON_A_SMALL_DISK = """
import ctypes, os, pathlib, shutil, subprocess, sys
small, kept, *words = sys.argv[1:]
maps = {"uid_map": f"0 {os.getuid()} 1", "setgroups": "deny", "gid_map": f"0 {os.getgid()} 1"}
assert ctypes.CDLL(None).unshare(0x10000000 | 0x20000) == 0  # CLONE_NEWUSER, CLONE_NEWNS
for name, text in maps.items():
    pathlib.Path("/proc/self", name).write_text(text)
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "none", small], check=True)
code = subprocess.run([sys.executable, "-m", "synergy_exec", *words]).returncode
shutil.copytree(small, kept, symlinks=True)
sys.exit(code)
"""


def test_full_disk_fails_the_job_that_does_not_fit_alone(tmp_path):
    """On a file system that holds the checkpoints of small jobs and not that of a large one."""
    namespace = ["unshare", "--map-root-user", "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*namespace, "true"], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here without being root")
    rows = ["0,small-0,cnn,1,20", "0.1,large,gpt,1,8", "0.2,small-1,cnn,1,20"]
    (tmp_path / "three.csv").write_text("\n".join(["submit_s,job,model,gpus,iterations", *rows]) + "\n")
    small, kept = tmp_path / "small", tmp_path / "kept"
    small.mkdir()
    given = ["+trace=file", f"trace.path={tmp_path / 'three.csv'}", f"results_dir={small}", "policy=[las]", *QUICK]
    given += ["profile=null", "figures=false", "backend.options.slots=2", "retries=1"]
    done = warm.run([sys.executable, "-c", ON_A_SMALL_DISK, small, kept, *given])
    assert done.returncode == 1, done.stderr
    assert "las-0: 1 of 3 jobs failed:\n  job 1 (large): " in done.stderr
    (summary,) = (json.loads(path.read_text()) for path in kept.glob("*/latest/*/summary.json"))
    assert (summary["jobs"], summary["jobs_failed"], summary["jobs_unfinished"]) == (3, 1, 0)
    (work,) = kept.glob("*/*-*_*/*.work")
    with contextlib.closing(open_journal(work)) as journal:
        states = {job.name: job.state for job in journal.jobs()}
        assert "too little room" in next(job.reason for job in journal.jobs() if job.name == "large")
    assert states == {"small-0": "done", "large": "failed", "small-1": "done"}


CHAOS = Path(__file__).parents[2] / "bench" / "chaos.py"


@pytest.mark.thorough
def test_nothing_is_lost_doubled_or_left_behind_by_random_faults(tmp_path):
    """A minute and a half of faults over eight jobs, and all losses computed again."""
    command = [sys.executable, CHAOS, "7", "1.5", "--jobs", "8", "--keep", tmp_path]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=2_400)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    faults = [line for line in ended.stderr.splitlines() if " s  " in line]
    assert len(faults) >= 3, ended.stderr
