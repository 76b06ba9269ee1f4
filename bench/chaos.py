"""Checks that random faults in a service with many jobs lose nothing, repeat nothing and leave nothing behind.

    python bench/chaos.py SEED MINUTES [--jobs 50] [--keep DIR]

Starts `python -m synergy_exec serve=true` on this machine's cores, submits jobs of the class `Paced` below, and every
few seconds it kills, stops or freezes a process of the service, damages a job's newest checkpoint, or fills the disk
(if it may mount one of its own, in memory). A controller that was killed is started again, as a service manager would
do. Only processes that it started and files that they wrote are touched.

Then it checks that every job is done, that every step was trained once, in order, on the right data (each loss and the
final weights are within 1e-6 of those of undisturbed training), that the service did not end by itself, and that no
process is left. The exit code is 1 if anything is wrong.
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
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from synergy_core.errors import InputError
from synergy_exec.commands._asking import client_for
from synergy_exec.controller.journal import ENDED, open_journal
from synergy_exec.examples.mlp import Mlp
from synergy_exec.worker import processes

SLOTS = 4
STEP_S = 0.05
MEAN_FAULT_INTERVAL_S = 6.0
STOPPED_S = (2.0, 8.0)
MAX_SECONDS_WITHOUT_STEP = 300.0
"""After the faults, jobs count as stuck if none of them trains a step for this long."""
BUSY_FRACTION = 0.35
"""Assumed share of the slots' time that faults leave for training."""
DISK_MB = 600
FREE_BYTES = 500_000
"""Room left on a full disk: enough for a page of the journal, too little for a checkpoint."""
LIMIT = "1e-6"
"""Largest difference of a loss or a weight from undisturbed training."""
OWN_DISK = "CHAOS_DISK"
"""Environment variable with the folder on the mounted disk."""
SETTINGS = (
    *("serve=true", "policy=[las]", "figures=false", "round_s=1", f"backend.options.slots={SLOTS}"),
    *("checkpoint_interval_s=2", "leave_s=15", "hang_s=12", "start_s=60"),
    # Faults come far more often than on a sound machine, and no job causes them.
    *("retries=100000", "agents_per_hour=100000"),
)


class Paced(Mlp):
    """Trains the example's perceptron in double precision; a step takes $CHAOS_STEP_S. number: the seed of its data.

    Rounding in double precision stays far below the effect of a step that is lost or trained twice.
    """

    def __init__(self, number: int = 0) -> None:
        super().__init__(width=96, depth=1)
        self._first_batch = 1_000_003 * number
        self._step_s = float(os.environ.get("CHAOS_STEP_S", "0"))

    def build_model(self) -> nn.Module:
        return super().build_model().double()

    def batch(self, step: int, size: int) -> tuple[Tensor, Tensor]:
        time.sleep(self._step_s)
        points, classes = super().batch(self._first_batch + step, size)
        return points.double(), classes


AGENTS = ("synergy_exec.agent",)
FORKSERVERS = (*AGENTS, "multiprocessing.forkserver")
WORKERS = (*FORKSERVERS, "")
"""Words in the command of a process and of its parents below the controller."""


class Service:
    """The controller's process. ended: how it ended without being asked. damaged: checkpoints that faults damaged."""

    process: subprocess.Popen[bytes]

    def __init__(self, results: Path, settings: Sequence[str] = SETTINGS) -> None:
        self.results, self.settings = results, settings
        self.output = results / "output.txt"
        self.ended: list[str] = []
        self.damaged: set[Path] = set()
        processes.adopt_orphans()  # whatever the service leaves behind becomes a child of this process
        self.start()

    @property
    def work(self) -> Path:
        (work,) = self.results.glob("served/*-*_*/*.work")
        return work

    def start(self) -> None:
        command = [sys.executable, "-m", "synergy_exec", *self.settings, f"results_dir={self.results}"]
        with self.output.open("ab") as output:
            environment = os.environ | {"CHAOS_STEP_S": str(STEP_S)}
            self.process = subprocess.Popen(command, stderr=output, stdout=output, env=environment)

    def restart_if_ended(self) -> None:
        if (code := self.process.poll()) is not None:
            self.ended.append(f"exit code {code}: {self.output.read_text(errors='replace')[-400:]}")
            self.start()

    def ask(self, *what: Any) -> Any:
        """The controller's answer. what: see `Client.ask`. Raises InputError."""
        return client_for(self.results, None).ask(*what)

    def submit(self, jobs: int, steps: int) -> None:
        """Submits all jobs; every third one asks for two slots."""
        for number in range(jobs):
            job = {"class": f"{Path(__file__).resolve()}:Paced", "arguments": {"number": number}, "work": steps}
            job |= {"name": f"job-{number}", "initial_batch": 8, "slots": 2 if number % 3 == 2 else 1}
            self.ask("POST", "/jobs", job)

    def jobs(self) -> list[dict[str, Any]]:
        """All jobs as the controller reports them; none while it does not answer."""
        try:
            return self.ask("GET", "/jobs")
        except InputError:
            return []

    def have_jobs_ended(self) -> bool:
        jobs = self.jobs()
        return bool(jobs) and all(each["state"] in ENDED for each in jobs)

    def pids(self, commands: tuple[str, ...]) -> list[int]:
        """Finds the controller, or its descendants with these words in their commands, one for each generation."""
        found = [self.process.pid]
        for words in commands:
            found = [each for parent in found for each in processes.children(parent) if words in _command(each)]
        return sorted(found)

    def leave(self) -> list[str]:
        """Ends the service as Ctrl-C does; kills and describes processes that are left after a while."""
        self.process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(60)
        below = {pid: _command(pid) for pid in processes.descendants(os.getpid())}
        left = processes.wait_or_kill([(pid, processes.began(pid)) for pid in below], patience_s=15.0)
        return [f"process {pid} is left: {below[pid]}" for pid in left]


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
    return ""


Fault = Callable[[Service, random.Random], bool]
"""Does something to a service; returns whether it found anything to damage."""


def signals(number: signal.Signals, commands: tuple[str, ...], *, is_resumed: bool = False) -> Fault:
    """Sends the signal to one of these processes. is_resumed: whether the process goes on after some seconds."""

    def fault(service: Service, dice: random.Random) -> bool:
        if not (pids := service.pids(commands)):
            return False
        pid = dice.choice(pids)
        began = processes.began(pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            if is_resumed:
                time.sleep(dice.uniform(*STOPPED_S))
                if processes.lives(pid, began):
                    os.kill(pid, signal.SIGCONT)
        return True

    return fault


def kill_controller(service: Service, dice: random.Random) -> bool:
    service.process.kill()
    service.process.wait()
    service.start()
    return True


def flip_bit(service: Service, dice: random.Random) -> bool:
    if path := file_of_checkpoint(service, dice):
        stored = bytearray(path.read_bytes())
        stored[dice.randrange(len(stored))] ^= 1 << dice.randrange(8)
        path.write_bytes(stored)
    return path is not None


def truncate(service: Service, dice: random.Random) -> bool:
    if path := file_of_checkpoint(service, dice):
        os.truncate(path, dice.randrange(path.stat().st_size))
    return path is not None


def file_of_checkpoint(service: Service, dice: random.Random) -> Path | None:
    """Chooses a file of a job's newest checkpoint if the one before it is undamaged: no executor survives two."""
    jobs = sorted(service.work.glob("jobs/*/checkpoints"))
    for folder in dice.sample(jobs, len(jobs)):
        found = sorted(folder.glob("step-*"))
        if len(found) > 1 and not service.damaged & set(found):
            files = [each for each in sorted(found[-1].iterdir()) if each.is_file() and each.stat().st_size]
            if files:
                service.damaged.add(found[-1])
                return dice.choice(files)
    return None


def fill_disk(service: Service, dice: random.Random) -> bool:
    """Leaves almost no room on the disk for some seconds."""
    filler = service.results / "filler"
    free = shutil.disk_usage(service.results).free - FREE_BYTES
    if free > 0:
        with filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, free)
        time.sleep(dice.uniform(*STOPPED_S))
        filler.unlink()
    return free > 0


FAULTS: dict[str, tuple[int, Fault]] = {
    "worker killed": (3, signals(signal.SIGKILL, WORKERS)),
    "agent killed": (2, signals(signal.SIGKILL, AGENTS)),
    "parent of workers killed": (1, signals(signal.SIGKILL, FORKSERVERS)),
    "parent of workers frozen": (1, signals(signal.SIGSTOP, FORKSERVERS)),
    "controller killed": (2, kill_controller),
    "worker stopped": (1, signals(signal.SIGSTOP, WORKERS, is_resumed=True)),
    "agent stopped": (1, signals(signal.SIGSTOP, AGENTS, is_resumed=True)),
    "controller stopped": (1, signals(signal.SIGSTOP, (), is_resumed=True)),
    "bit of a checkpoint flipped": (2, flip_bit),
    "file of a checkpoint truncated": (2, truncate),
    "disk full": (1, fill_disk),
}
"""Weight and function of each kind of fault."""


def disturb(service: Service, dice: random.Random, seconds: float, *, own_disk: bool) -> Counter[str]:
    """Causes faults for this long, then waits until all jobs have ended, or none has trained a step for long.

    Returns how many faults there were of each kind.
    """
    kinds = {what: fault for what, (_, fault) in FAULTS.items() if own_disk or fault is not fill_disk}
    weights, done = [FAULTS[what][0] for what in kinds], Counter[str]()
    began_s = last_step_s = time.monotonic()
    steps = 0
    while not service.have_jobs_ended() and (now_s := time.monotonic()) - last_step_s < MAX_SECONDS_WITHOUT_STEP:
        service.restart_if_ended()
        if now_s - began_s < seconds:
            last_step_s = now_s
            time.sleep(dice.expovariate(1 / MEAN_FAULT_INTERVAL_S))
            (what,) = dice.choices(list(kinds), weights)
            with contextlib.suppress(OSError):  # what it would have damaged may be gone
                if kinds[what](service, dice):
                    done[what] += 1
                    print(f"{time.monotonic() - began_s:6.0f} s  {what}", file=sys.stderr, flush=True)
        else:
            time.sleep(1.0)
            if (trained := sum(each["step"] for each in service.jobs())) > steps:
                last_step_s, steps = now_s, trained
    return done


def wrong(service: Service, jobs: int) -> list[str]:
    """Describes everything that is wrong after the service has ended."""
    from synergy_exec.commands.verify import recorded_jobs  # slow to import, and workers import this file

    with contextlib.closing(open_journal(service.work)) as journal:
        known = journal.jobs()
    found = [f"job {each.name} is {each.state}: {each.reason}" for each in known if each.state != "done"]
    found += [f"{len(known)} of {jobs} jobs are known"] * (len(known) != jobs)
    found += [
        f"job {job.name}: its steps are not each number once, in order"
        for job in recorded_jobs(service.work)
        if [step.number for step in job.steps] != list(range(1, len(job.steps) + 1))
    ]
    found += [f"the service ended by itself: {each}" for each in service.ended]
    said = service.output.read_text(errors="replace")
    tracebacks = [each.start() for each in re.finditer(r"^.*Traceback", said, re.M)]
    found += [f"a traceback: {said[max(0, at - 300) : at + 2500]}" for at in tracebacks]
    command = [sys.executable, "-m", "synergy_exec", "verify", str(service.work), "--limit", LIMIT]
    verified = subprocess.run(command, capture_output=True, text=True)
    if verified.returncode:
        found.append(f"verify: {verified.stdout[-3000:]}{verified.stderr[-500:]}")
    else:
        print(verified.stdout.splitlines()[-2])
    return found


def run(given: argparse.Namespace, folder: Path, *, own_disk: bool) -> int:
    """Starts a service in the folder, disturbs it, waits, checks and reports; returns the exit code."""
    seconds = 60 * given.minutes
    steps = max(20, int(seconds * SLOTS * BUSY_FRACTION / given.jobs / STEP_S))
    service = Service(folder)
    until_s = time.monotonic() + 60
    while not service.jobs() and time.monotonic() < until_s:
        try:
            service.submit(given.jobs, steps)
        except InputError:
            time.sleep(0.5)
    done = disturb(service, random.Random(given.seed), seconds, own_disk=own_disk)
    found = service.leave() + wrong(service, given.jobs)
    with contextlib.closing(open_journal(service.work)) as journal:
        outcomes = [each.outcome for each in journal.runs()]
    counts = f"{done.total()} faults, {len(outcomes)} runs, {outcomes.count('lost')} of them lost"
    print(f"seed {given.seed}: {given.jobs} jobs of {steps} steps, {counts}")
    print(", ".join(f"{count} × {what}" for what, count in sorted(done.items())))
    print(*(found or ["nothing is wrong"]), sep="\n")
    if found and given.keep:
        shutil.copytree(folder, given.keep, dirs_exist_ok=True, ignore=shutil.ignore_patterns("filler"))
        print(f"kept in {given.keep}")
    return 1 if found else 0


def main() -> int:
    """Runs itself again on a disk in memory that is mounted for it alone, or else here if that is not allowed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seed", type=int)
    parser.add_argument("minutes", type=float)
    parser.add_argument("--jobs", type=int, default=50)
    parser.add_argument("--keep", type=Path, help="copy the folder there if anything is wrong")
    given = parser.parse_args()
    if mounted := os.environ.get(OWN_DISK):
        return run(given, Path(mounted), own_disk=True)
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        mount = ["sh", "-c", f'mount -t tmpfs -o size={DISK_MB}m none {folder} && exec "$@"', "sh"]
        mount = ["unshare", *(() if os.geteuid() == 0 else ("--map-root-user",)), "--mount", *mount]
        if shutil.which("unshare") and subprocess.run([*mount, "true"], capture_output=True).returncode == 0:
            return subprocess.call([*mount, sys.executable, *sys.argv], env=os.environ | {OWN_DISK: folder})
        print("no disk of its own can be mounted here, so it is never filled", file=sys.stderr)
        return run(given, Path(folder), own_disk=False)


if __name__ == "__main__":
    sys.exit(main())
