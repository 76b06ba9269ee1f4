"""Random faults for as long as one likes over a service with many jobs: is anything lost, doubled or left behind?

    python bench/chaos.py SEED MINUTES [--jobs 50] [--slots 4] [--keep DIR]

Starts `python -m synergy_exec serve=true` on this machine's cores, submits the jobs of `chaos_job.py`, and does
something bad to it every few seconds: kills a worker, the agent, the parent of workers or the controller (which is
started again, as its service manager would); stops one of them for some seconds, or freezes the parent of workers for
good; flips a byte of a job's newest checkpoint or cuts a file of it off; fills the disk up for some seconds (where it
may mount one of its own, in memory). Only processes that it started and files that they wrote are touched.

Then it checks that every job is done, that every step was trained once, in order, on the right data (`verify.py`: each
loss and the final weights are within 1e-6 of those of one undisturbed process), that the service did not end by itself,
and that no process is left. The exit code is 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from synergy_core.errors import InputError
from synergy_exec.commands._asking import Client, client_for
from synergy_exec.commands.verify import recorded_jobs
from synergy_exec.controller.journal import open_journal
from synergy_exec.worker import processes
from synergy_exec.worker.processes import children, descendants

JOB = Path(__file__).with_name("chaos_job.py")
STEP_S = 0.05
FAULT_EVERY_S = 6.0
"""On average."""
STOPPED_S = (2.0, 8.0)
ENDING_S = 300.0
"""How long jobs may take without a step until they end, once the faults are over; and LONGEST_S: in all, or as long as
there were faults."""
LONGEST_S = 900.0
BUSY = 0.35
"""The part of slots' time that faults leave, of which the jobs' work is made."""
DISK_MB = 600
FREE_BYTES = 500_000
"""What a full disk has left: a journal's next page fits, a checkpoint does not."""
LIMIT = "1e-6"
"""Largest difference of a loss or a weight from undisturbed training."""
_INSIDE = "CHAOS_DISK"
_SETTINGS = (
    *("serve=true", "policy=[las]", "figures=false", "round_s=1"),
    *("checkpoint_interval_s=2", "leave_s=15", "hang_s=12", "start_s=60"),
)
_PATIENT = ("retries=100000", "agents_per_hour=100000")
"""Faults come far closer than a sound machine's, and are no job's fault."""


class Service:
    """The controller's process, and all that it ever started. ended: how often it did without being asked."""

    def __init__(self, results: Path, slots: int) -> None:
        self.results, self._slots = results, slots
        self.seen: set[tuple[int, int]] = set()
        self.ended: list[str] = []
        self.process: subprocess.Popen[bytes] | None = None
        self._over = threading.Event()
        threading.Thread(target=self._look, daemon=True).start()

    @property
    def work(self) -> Path:
        """The work folder, which a controller that goes on keeps."""
        (work,) = self.results.glob("served/*-*_*/las-0.work")
        return work

    def start(self) -> None:
        """Starts it, again where it ended."""
        given = [*_SETTINGS, *_PATIENT, f"results_dir={self.results}", f"backend.options.slots={self._slots}"]
        with self.said.open("ab") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "synergy_exec", *given],
                stderr=said,
                stdout=said,
                env=os.environ | {"CHAOS_STEP_S": str(STEP_S)},
            )

    @property
    def said(self) -> Path:
        """What it wrote to the terminal."""
        return self.results / "said.txt"

    def client(self) -> Client:
        """For asking it. Raises InputError while it does not answer."""
        return client_for(self.results, None)

    def jobs(self) -> list[dict[str, Any]]:
        """All jobs, as it says; none while it does not answer."""
        try:
            found: list[dict[str, Any]] = self.client().ask("GET", "/jobs")
        except InputError:
            return []
        return found

    def tend(self) -> None:
        """Starts it again where it has ended by itself, which counts."""
        assert self.process is not None
        if (code := self.process.poll()) is not None:
            self.ended.append(f"exit code {code}: {self.said.read_text(errors='replace')[-400:]}")
            self.start()

    def agents(self) -> list[int]:
        """Its agents' processes."""
        assert self.process is not None
        return [each for each in children(self.process.pid) if "synergy_exec.agent" in _command(each)]

    def forkservers(self) -> list[int]:
        """The parents of workers."""
        below = (each for agent in self.agents() for each in children(agent))
        return [each for each in below if "multiprocessing.forkserver" in _command(each)]

    def workers(self) -> list[int]:
        """One process for each rank."""
        return [each for parent in self.forkservers() for each in children(parent)]

    def leave(self) -> list[str]:
        """Ends it as Ctrl-C does; the processes that are left after a while, in words."""
        assert self.process is not None
        self.process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(60)
        until_s = time.monotonic() + 15
        while time.monotonic() < until_s and any(processes.lives(*each) for each in self.seen):
            time.sleep(0.2)
        self._over.set()
        left = [(pid, began) for pid, began in self.seen if processes.lives(pid, began)]
        found = [_described(pid) for pid, _ in left]
        for pid, _ in left:
            os.kill(pid, signal.SIGKILL)
        return found

    def _look(self) -> None:
        while not self._over.wait(0.05):
            if self.process is not None:
                for pid in (self.process.pid, *descendants(self.process.pid)):
                    if began := processes.began(pid):
                        self.seen.add((pid, began))


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
    return ""


def _described(pid: int) -> str:
    with contextlib.suppress(OSError):
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
        return f"process {pid} (state {state}, parent {parent}: {_command(pid)})"
    return f"process {pid}"


def _tracebacks(said: str) -> list[str]:
    """Where each begins in what a service said, with what stands around it."""
    return [said[max(0, at.start() - 300) : at.start() + 2500] for at in re.finditer(r"^.*Traceback", said, re.M)]


class Faults:
    """What may be done to a service. Each answers what it did, "" where there was nothing to do it to."""

    def __init__(self, service: Service, dice: random.Random, *, own_disk: bool) -> None:
        self._service, self._dice, self._own_disk = service, dice, own_disk
        self._damaged: set[Path] = set()

    def all(self) -> list[Callable[[], str]]:
        """One of them for each part of the chance that it is taken."""
        some = [*[self.kill_worker] * 3, *[self.kill_agent] * 2, *[self.kill_controller] * 2, *[self.flip] * 2]
        some += [self.kill_forkserver, self.freeze_forkserver, *[self.cut] * 2]
        some += [self.stop_worker, self.stop_agent, self.stop_controller]
        return [*some, self.fill] if self._own_disk else some

    def kill_worker(self) -> str:
        return self._signal(self._service.workers(), "worker killed")

    def kill_agent(self) -> str:
        return self._signal(self._service.agents(), "agent killed")

    def kill_forkserver(self) -> str:
        return self._signal(self._service.forkservers(), "parent of workers killed")

    def kill_controller(self) -> str:
        assert self._service.process is not None
        self._service.process.kill()
        self._service.process.wait()
        self._service.start()
        return "controller killed"

    def stop_worker(self) -> str:
        return self._stop(self._service.workers(), "worker stopped")

    def stop_agent(self) -> str:
        return self._stop(self._service.agents(), "agent stopped")

    def stop_controller(self) -> str:
        assert self._service.process is not None
        return self._stop([self._service.process.pid], "controller stopped")

    def freeze_forkserver(self) -> str:
        return self._signal(self._service.forkservers(), "parent of workers frozen", signal.SIGSTOP)

    def flip(self) -> str:
        """A byte of the newest checkpoint of some job, which has an older one."""
        path = self._file_of_checkpoint()
        if path is None:
            return ""
        with path.open("r+b") as file:
            at = self._dice.randrange(path.stat().st_size)
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << self._dice.randrange(8)]))
        return "byte of a checkpoint flipped"

    def cut(self) -> str:
        """A file of the newest checkpoint of some job."""
        path = self._file_of_checkpoint()
        if path is None:
            return ""
        os.truncate(path, self._dice.randrange(path.stat().st_size))
        return "file of a checkpoint cut off"

    def fill(self) -> str:
        """The disk, for some seconds."""
        filler = self._service.results / "filler"
        free = shutil.disk_usage(self._service.results).free - FREE_BYTES
        if free <= 0:
            return ""
        with filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, free)
        time.sleep(self._dice.uniform(*STOPPED_S))
        filler.unlink()
        return "disk full"

    def _signal(self, pids: list[int], what: str, number: int = signal.SIGKILL) -> str:
        if not pids:
            return ""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._dice.choice(sorted(pids)), number)
        return what

    def _stop(self, pids: list[int], what: str) -> str:
        if not pids:
            return ""
        pid = self._dice.choice(sorted(pids))
        began = processes.began(pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(self._dice.uniform(*STOPPED_S))
            if processes.lives(pid, began):
                os.kill(pid, signal.SIGCONT)
        return what

    def _file_of_checkpoint(self) -> Path | None:
        """Damages only what has an undamaged one before it: two at once no executor could survive."""
        jobs = sorted(self._service.work.glob("jobs/*/checkpoints"))
        self._dice.shuffle(jobs)
        for folder in jobs:
            found = sorted(folder.glob("step-*"))
            if len(found) > 1 and not self._damaged & set(found):
                files = [each for each in sorted(found[-1].iterdir()) if each.is_file() and each.stat().st_size]
                if files:
                    self._damaged.add(found[-1])
                    return self._dice.choice(files)
        return None


def submit(service: Service, jobs: int, steps: int) -> None:
    """All jobs; every third asks for two slots."""
    for number in range(jobs):
        job: dict[str, Any] = {"class": f"{JOB}:Paced", "arguments": {"number": number}, "name": f"job-{number}"}
        job |= {"initial_batch": 8, "work": steps, "slots": 2 if number % 3 == 2 else 1}
        service.client().ask("POST", "/jobs", job)


def disturbed(service: Service, dice: random.Random, minutes: float, *, own_disk: bool) -> Counter[str]:
    """Faults, until the time is over; how many of each."""
    faults, done = Faults(service, dice, own_disk=own_disk), Counter[str]()
    until_s = time.monotonic() + 60 * minutes
    while time.monotonic() < until_s and not ended(service):
        time.sleep(dice.expovariate(1 / FAULT_EVERY_S))
        service.tend()
        try:
            what = dice.choice(faults.all())()
        except OSError:  # what it was done to went away meanwhile
            continue
        if what:
            done[what] += 1
            print(f"{minutes * 60 - until_s + time.monotonic():6.0f} s  {what}", file=sys.stderr, flush=True)
    return done


def ended(service: Service) -> bool:
    """Whether no job has anything left to do."""
    jobs = service.jobs()
    return bool(jobs) and all(each["state"] in ("done", "failed", "cancelled") for each in jobs)


def wrong(service: Service, jobs: int, left: list[str]) -> list[str]:
    """Everything that should not be."""
    journal = open_journal(service.work)
    found = [f"job {each.name} is {each.state}: {each.reason}" for each in journal.jobs() if each.state != "done"]
    if (known := len(journal.jobs())) != jobs:
        found.append(f"{known} of {jobs} jobs are known")
    journal.close()
    for job in recorded_jobs(service.work):
        numbers = [step.number for step in job.steps]
        if numbers != list(range(1, len(numbers) + 1)):
            found.append(f"job {job.name}: its steps are not each number once, in order")
    found += [f"the service ended by itself: {each}" for each in service.ended]
    found += [f"{each} is left" for each in left]
    found += [f"a traceback: {each}" for each in _tracebacks(service.said.read_text(errors="replace"))]
    environment = os.environ | {"CHAOS_STEP_S": "0"}
    command = [sys.executable, "-m", "synergy_exec", "verify", str(service.work), "--limit", LIMIT]
    verified = subprocess.run(command, capture_output=True, text=True, env=environment)
    if verified.returncode:
        found.append(f"verify: {verified.stdout[-3000:]}{verified.stderr[-500:]}")
    else:
        print(verified.stdout.splitlines()[-2])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seed", type=int)
    parser.add_argument("minutes", type=float)
    parser.add_argument("--jobs", type=int, default=50)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--keep", type=Path, help="where what it ran in is copied to if anything is wrong")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        if _INSIDE not in os.environ and (code := _on_own_disk(Path(folder))) is not None:
            return code
        return run(given, Path(os.environ.get(_INSIDE) or folder), own_disk=bool(os.environ.get(_INSIDE)))


def run(given: argparse.Namespace, folder: Path, *, own_disk: bool) -> int:
    """All of it, in a folder of its own."""
    dice = random.Random(given.seed)
    steps = max(20, int(given.minutes * 60 * given.slots * BUSY / given.jobs / STEP_S))
    service = Service(folder, given.slots)
    service.start()
    until_s = time.monotonic() + 60
    while not service.jobs() and time.monotonic() < until_s:
        try:
            submit(service, given.jobs, steps)
        except InputError:
            time.sleep(0.5)
    done = disturbed(service, dice, given.minutes, own_disk=own_disk)
    until_s, trained = time.monotonic() + ENDING_S, 0
    last_s = time.monotonic() + max(LONGEST_S, 60 * given.minutes)
    while not ended(service) and time.monotonic() < min(until_s, last_s):
        service.tend()
        time.sleep(1.0)
        if (now := sum(each["step"] for each in service.jobs())) > trained:
            until_s, trained = time.monotonic() + ENDING_S, now
    left = service.leave()
    found = wrong(service, given.jobs, left)
    runs = open_journal(service.work).runs()
    lost = sum(each.outcome == "lost" for each in runs)
    counts = f"{sum(done.values())} faults, {len(runs)} runs, {lost} of them lost"
    print(f"seed {given.seed}: {given.jobs} jobs of {steps} steps, {counts}")
    print(", ".join(f"{count} × {what}" for what, count in sorted(done.items())))
    print(*(found or ["nothing is wrong"]), sep="\n")
    if found and given.keep:
        shutil.copytree(folder, given.keep, dirs_exist_ok=True, ignore=shutil.ignore_patterns("filler"))
        print(f"kept in {given.keep}")
    return 1 if found else 0


def _on_own_disk(folder: Path) -> int | None:
    """The same command on a disk in memory, mounted for it alone; None where that is not allowed."""
    namespace = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--mount"]
    mount = ["sh", "-c", f'mount -t tmpfs -o size={DISK_MB}m none {folder} && exec "$@"', "sh"]
    if shutil.which("unshare") is None or subprocess.run([*namespace, *mount, "true"], capture_output=True).returncode:
        print("no disk of its own can be mounted here: it is never filled", file=sys.stderr)
        return None
    again = subprocess.Popen([*namespace, *mount, sys.executable, *sys.argv], env=os.environ | {_INSIDE: str(folder)})
    try:
        return again.wait()
    except KeyboardInterrupt:
        return again.wait()


if __name__ == "__main__":
    sys.exit(main())
