"""Random faults for as long as one likes in a service with many jobs: is anything lost, done twice or left behind?

    python bench/chaos.py SEED MINUTES [--jobs 50] [--slots 4] [--keep DIR]

Starts `python -m synergy_exec serve=true` on this machine's cores, submits jobs of the class `Paced` below, and every
few seconds it kills, stops or freezes a process of the service, damages a job's newest checkpoint, or fills the disk
(if it may mount one of its own, in memory). A controller that was killed is started again, as its service manager
would. Only processes that it started and files that they wrote are touched.

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
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from synergy_core.errors import InputError
from synergy_exec.commands._asking import client_for
from synergy_exec.controller.journal import open_journal
from synergy_exec.training.job import TrainingJob
from synergy_exec.worker import processes
from synergy_exec.worker.processes import children, descendants

STEP_S = 0.05
MEAN_FAULT_INTERVAL_S = 6.0
STOPPED_S = (2.0, 8.0)
MAX_SECONDS_WITHOUT_STEP = 300.0
"""After the faults, until the jobs count as stuck."""
MIN_ENDING_S = 900.0
"""Time that jobs have to end, or as long as there were faults if that is longer."""
BUSY_FRACTION = 0.35
"""Share of the slots' time that faults leave for training."""
DISK_MB = 600
FREE_BYTES = 500_000
"""Left on a full disk: a journal's next page fits, a checkpoint does not."""
LIMIT = "1e-6"
"""Largest difference of a loss or a weight from undisturbed training."""
OWN_DISK = "CHAOS_DISK"
"""Environment variable with the folder on the mounted disk."""
SETTINGS = (
    *("serve=true", "policy=[las]", "figures=false", "round_s=1"),
    *("checkpoint_interval_s=2", "leave_s=15", "hang_s=12", "start_s=60"),
    # Faults come far more often than on a sound machine, and no job causes them.
    *("retries=100000", "agents_per_hour=100000"),
)


class Paced(TrainingJob):
    """A small regression whose steps take $CHAOS_STEP_S. number: the seed of its data.

    It computes in double precision, where rounding stays far below the effect of a step that is lost or trained twice.
    """

    learning_rate_rule: ClassVar = "adascale"

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self._step_s = float(os.environ.get("CHAOS_STEP_S", "0"))

    def build_model(self) -> nn.Module:
        layers = nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 4)
        return nn.Sequential(*layers).double()

    def batch(self, step: int, size: int) -> tuple[Tensor, Tensor]:
        time.sleep(self._step_s)
        generator = torch.Generator().manual_seed(1_000_003 * self.number + step)
        inputs = torch.randn(size, 16, generator=generator, dtype=torch.float64)
        return inputs, inputs[:, :4].sin()

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(output, target)

    def build_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


class Service:
    """The controller's process, and every process that it ever started. ended: how it ended without being asked."""

    process: subprocess.Popen[bytes]

    def __init__(self, results: Path, slots: int) -> None:
        self.results, self._slots = results, slots
        self.output = results / "output.txt"
        self.ended: list[str] = []
        self._seen: set[tuple[int, int]] = set()
        self._over = threading.Event()
        self.start()
        threading.Thread(target=self._remember_processes, daemon=True).start()

    @property
    def work(self) -> Path:
        (work,) = self.results.glob("served/*-*_*/las-0.work")
        return work

    def start(self) -> None:
        given = [*SETTINGS, f"results_dir={self.results}", f"backend.options.slots={self._slots}"]
        environment = os.environ | {"CHAOS_STEP_S": str(STEP_S)}
        with self.output.open("ab") as output:
            command = [sys.executable, "-m", "synergy_exec", *given]
            self.process = subprocess.Popen(command, stderr=output, stdout=output, env=environment)

    def submit(self, jobs: int, steps: int) -> None:
        """All jobs; every third one asks for two slots."""
        for number in range(jobs):
            job = {"class": f"{Path(__file__).resolve()}:Paced", "arguments": {"number": number}, "work": steps}
            job |= {"name": f"job-{number}", "initial_batch": 8, "slots": 2 if number % 3 == 2 else 1}
            client_for(self.results, None).ask("POST", "/jobs", job)

    def jobs(self) -> list[dict[str, Any]]:
        """All jobs as the controller reports them; none while it does not answer."""
        try:
            found: list[dict[str, Any]] = client_for(self.results, None).ask("GET", "/jobs")
        except InputError:
            return []
        return found

    def all_ended(self) -> bool:
        jobs = self.jobs()
        return bool(jobs) and all(each["state"] in ("done", "failed", "cancelled") for each in jobs)

    def restart_if_ended(self) -> None:
        if (code := self.process.poll()) is not None:
            self.ended.append(f"exit code {code}: {self.output.read_text(errors='replace')[-400:]}")
            self.start()

    def agents(self) -> list[int]:
        return [each for each in children(self.process.pid) if "synergy_exec.agent" in _command(each)]

    def forkservers(self) -> list[int]:
        below = (each for agent in self.agents() for each in children(agent))
        return [each for each in below if "multiprocessing.forkserver" in _command(each)]

    def workers(self) -> list[int]:
        return [each for parent in self.forkservers() for each in children(parent)]

    def leave(self) -> list[str]:
        """Ends it as Ctrl-C does; kills and describes the processes that are left after a while."""
        self.process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(60)
        until_s = time.monotonic() + 15
        while time.monotonic() < until_s and any(processes.lives(*each) for each in self._seen):
            time.sleep(0.2)
        self._over.set()
        left = [pid for pid, began in self._seen if processes.lives(pid, began)]
        described = [f"process {pid} is left: {_command(pid)}" for pid in left]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        return described

    def _remember_processes(self) -> None:
        while not self._over.wait(0.05):
            for pid in (self.process.pid, *descendants(self.process.pid)):
                if began := processes.began(pid):
                    self._seen.add((pid, began))


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
    return ""


class Faults:
    """What may be done to a service. A fault returns what it did, or "" if it found nothing to damage."""

    def __init__(self, service: Service, dice: random.Random, *, own_disk: bool) -> None:
        self._service, self._dice = service, dice
        self._damaged: set[Path] = set()
        some: list[tuple[int, Callable[[], str]]] = [
            (3, lambda: self._signal(service.workers(), "worker killed")),
            (2, lambda: self._signal(service.agents(), "agent killed")),
            (1, lambda: self._signal(service.forkservers(), "parent of workers killed")),
            (1, lambda: self._signal(service.forkservers(), "parent of workers frozen", signal.SIGSTOP)),
            (2, self._kill_controller),
            (1, lambda: self._stop(service.workers(), "worker stopped")),
            (1, lambda: self._stop(service.agents(), "agent stopped")),
            (1, lambda: self._stop([service.process.pid], "controller stopped")),
            (2, self._flip_bit),
            (2, self._truncate),
            (1 if own_disk else 0, self._fill_disk),
        ]
        self._all = [fault for weight, fault in some for _ in range(weight)]

    def one(self) -> str:
        """Does one of them. Raises OSError if what it was done to went away meanwhile."""
        return self._dice.choice(self._all)()

    def _signal(self, pids: list[int], what: str, number: int = signal.SIGKILL) -> str:
        if not pids:
            return ""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._dice.choice(sorted(pids)), number)
        return what

    def _stop(self, pids: list[int], what: str) -> str:
        """Stops one for some seconds."""
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

    def _kill_controller(self) -> str:
        self._service.process.kill()
        self._service.process.wait()
        self._service.start()
        return "controller killed"

    def _flip_bit(self) -> str:
        if (path := self._file_of_checkpoint()) is None:
            return ""
        stored = bytearray(path.read_bytes())
        stored[self._dice.randrange(len(stored))] ^= 1 << self._dice.randrange(8)
        path.write_bytes(stored)
        return "bit of a checkpoint flipped"

    def _truncate(self) -> str:
        if (path := self._file_of_checkpoint()) is None:
            return ""
        os.truncate(path, self._dice.randrange(path.stat().st_size))
        return "file of a checkpoint truncated"

    def _file_of_checkpoint(self) -> Path | None:
        """A file of some job's newest checkpoint, if an undamaged one precedes it: no executor survives two."""
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

    def _fill_disk(self) -> str:
        """For some seconds."""
        filler = self._service.results / "filler"
        free = shutil.disk_usage(self._service.results).free - FREE_BYTES
        if free <= 0:
            return ""
        with filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, free)
        time.sleep(self._dice.uniform(*STOPPED_S))
        filler.unlink()
        return "disk full"


def disturbed(service: Service, dice: random.Random, seconds: float, *, own_disk: bool) -> Counter[str]:
    """Faults until the time is over; how many of each."""
    faults, done = Faults(service, dice, own_disk=own_disk), Counter[str]()
    began_s = time.monotonic()
    while time.monotonic() - began_s < seconds and not service.all_ended():
        time.sleep(dice.expovariate(1 / MEAN_FAULT_INTERVAL_S))
        service.restart_if_ended()
        with contextlib.suppress(OSError):
            if what := faults.one():
                done[what] += 1
                print(f"{time.monotonic() - began_s:6.0f} s  {what}", file=sys.stderr, flush=True)
    return done


def wait_for_jobs(service: Service, longest_s: float) -> None:
    """Until all have ended, or none has trained a step for long."""
    began_s = last_step_s = time.monotonic()
    trained = 0
    while not service.all_ended() and (now_s := time.monotonic()) - began_s < longest_s:
        if now_s - last_step_s > MAX_SECONDS_WITHOUT_STEP:
            return
        service.restart_if_ended()
        time.sleep(1.0)
        if (steps := sum(each["step"] for each in service.jobs())) > trained:
            last_step_s, trained = now_s, steps


def wrong(service: Service, jobs: int) -> list[str]:
    """Everything that should not be, after the service has ended."""
    from synergy_exec.commands.verify import recorded_jobs  # slow to import, and workers import this file

    with contextlib.closing(open_journal(service.work)) as journal:
        known = journal.jobs()
    found = [f"job {each.name} is {each.state}: {each.reason}" for each in known if each.state != "done"]
    if len(known) != jobs:
        found.append(f"{len(known)} of {jobs} jobs are known")
    for job in recorded_jobs(service.work):
        if [step.number for step in job.steps] != list(range(1, len(job.steps) + 1)):
            found.append(f"job {job.name}: its steps are not each number once, in order")
    found += [f"the service ended by itself: {each}" for each in service.ended]
    said = service.output.read_text(errors="replace")
    for at in re.finditer(r"^.*Traceback", said, re.M):
        found.append(f"a traceback: {said[max(0, at.start() - 300) : at.start() + 2500]}")
    command = [sys.executable, "-m", "synergy_exec", "verify", str(service.work), "--limit", LIMIT]
    verified = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"CHAOS_STEP_S": "0"})
    if verified.returncode:
        found.append(f"verify: {verified.stdout[-3000:]}{verified.stderr[-500:]}")
    else:
        print(verified.stdout.splitlines()[-2])
    return found


def run(given: argparse.Namespace, folder: Path, *, own_disk: bool) -> int:
    """All of it, in a folder of its own."""
    seconds = 60 * given.minutes
    steps = max(20, int(seconds * given.slots * BUSY_FRACTION / given.jobs / STEP_S))
    service = Service(folder, given.slots)
    until_s = time.monotonic() + 60
    while not service.jobs() and time.monotonic() < until_s:
        try:
            service.submit(given.jobs, steps)
        except InputError:
            time.sleep(0.5)
    done = disturbed(service, random.Random(given.seed), seconds, own_disk=own_disk)
    wait_for_jobs(service, max(MIN_ENDING_S, seconds))
    found = service.leave()
    found += wrong(service, given.jobs)
    with contextlib.closing(open_journal(service.work)) as journal:
        outcomes = [each.outcome for each in journal.runs()]
    counts = f"{sum(done.values())} faults, {len(outcomes)} runs, {outcomes.count('lost')} of them lost"
    print(f"seed {given.seed}: {given.jobs} jobs of {steps} steps, {counts}")
    print(", ".join(f"{count} × {what}" for what, count in sorted(done.items())))
    print(*(found or ["nothing is wrong"]), sep="\n")
    if found and given.keep:
        shutil.copytree(folder, given.keep, dirs_exist_ok=True, ignore=shutil.ignore_patterns("filler"))
        print(f"kept in {given.keep}")
    return 1 if found else 0


def on_own_disk(folder: Path) -> int | None:
    """The same command on a disk in memory that is mounted for it alone; None if that is not allowed."""
    namespace = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--mount"]
    mount = ["sh", "-c", f'mount -t tmpfs -o size={DISK_MB}m none {folder} && exec "$@"', "sh"]
    if shutil.which("unshare") is None or subprocess.run([*namespace, *mount, "true"], capture_output=True).returncode:
        print("no disk of its own can be mounted here, so it is never filled", file=sys.stderr)
        return None
    again = subprocess.Popen([*namespace, *mount, sys.executable, *sys.argv], env=os.environ | {OWN_DISK: str(folder)})
    try:
        return again.wait()
    except KeyboardInterrupt:
        return again.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seed", type=int)
    parser.add_argument("minutes", type=float)
    parser.add_argument("--jobs", type=int, default=50)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--keep", type=Path, help="copy the folder there if anything is wrong")
    given = parser.parse_args()
    if mounted := os.environ.get(OWN_DISK):
        return run(given, Path(mounted), own_disk=True)
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        code = on_own_disk(Path(folder))
        return run(given, Path(folder), own_disk=False) if code is None else code


if __name__ == "__main__":
    sys.exit(main())
