"""Two jobs on this machine's cores, one of them hungry for CPU: decided shares against equal ones, and the formula.

    python bench/cpu_shares.py

Both jobs are synergy_exec.examples.pictures, which waits where an accelerator would compute: a machine of two cores
has none beside them. Their input is profiled first, each alone. Then `fifo+tune` shares out the CPUs, and both train
side by side, by turns with equal and with decided shares, which change while they train. A repetition in which other
processes of the machine took more than a tenth of a core is not counted. Where there is none that counts all are shown,
and nothing is judged: then only the formula of the CPUs that the jobs really used says something.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from synergy_core.cluster import Cluster, NodeType, Share
from synergy_core.jobs.testbed_profiles import Profile, ProfiledCosts, ProfiledInput, ProfiledModel
from synergy_core.planner.plan import Plan
from synergy_core.policies import get_policy
from synergy_core.scheduling.scheduler import scheduler_for
from synergy_core.units import GB
from synergy_exec.backends import get_backend
from synergy_exec.controller.jobs import ExecutedJob
from synergy_exec.job_file import JobFile
from synergy_exec.messages import Report
from synergy_exec.profiling.profile import Effort, add_to_profile
from synergy_exec.profiling.testbed import Testbed, TestbedRun, testbed
from synergy_exec.settings import Settings
from synergy_exec.worker import processes

POLICY = "fifo+tune"
BATCH, PICTURES, ITEM_BYTES = 16, 2048, 832
GOAL = 0.10
"""Of the measured throughput: the formula's may be off by so much."""
QUIET_CPUS = 0.1
SETTLING_S = 1.5
"""After a change of shares: batches that were made before it are used up."""
ARGUMENTS: dict[str, dict[str, float]] = {
    "hungry": {"cpu_s": 0.010, "accelerator_s": 0.003},
    "modest": {"cpu_s": 0.001, "accelerator_s": 0.010},
}
ENDLESS = 1e15


@dataclass(frozen=True, slots=True)
class Window:
    """Some seconds of both jobs. rates: samples/s. cpus: that each really used. others: CPUs of anybody else."""

    rates: dict[str, float]
    cpus: dict[str, float]
    others: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=7, help="that count; the median of each figure is shown")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each repetition and setting")
    parser.add_argument("--tries", type=int, default=40, help="repetitions at most, those that do not count included")
    given = parser.parse_args()
    files = {name: file_of(name) for name in ARGUMENTS}
    with tempfile.TemporaryDirectory(prefix="synergy-cpu-shares-") as folder:
        inputs = profiled(Path(folder), files)
        return asyncio.run(compared(Path(folder), files, inputs, given.repetitions, given.seconds, given.tries))


async def compared(
    folder: Path,
    files: Mapping[str, JobFile],
    inputs: Mapping[str, ProfiledInput],
    repetitions: int,
    seconds: float,
    tries: int,
) -> int:
    async with testbed(get_backend("local", {"slots": 2}), folder, Settings()) as bench:
        cores = bench.cores(0)
        equal = dict.fromkeys(files, Share(cores / len(files), GB))
        shares = {"equal": equal, "decided": decided(files, inputs, cores)}
        windows, judged = await by_turns(bench, files, shares, repetitions, seconds, tries)
    return shown(inputs, shares, windows, judged)


def file_of(name: str) -> JobFile:
    return JobFile(
        job_class="synergy_exec.examples.pictures:Pictures",
        arguments={**ARGUMENTS[name], "pictures": PICTURES},
        name=name,
        initial_batch=BATCH,
        max_batch=BATCH,
        work=ENDLESS,
    )


def profiled(folder: Path, files: Mapping[str, JobFile]) -> dict[str, ProfiledInput]:
    backend, effort = get_backend("local", {"slots": 2}), Effort(seconds=4.0, every_batch=False, noise_s=0.0)
    made = add_to_profile(
        folder / "profile.json", list(files.values()), backend, "here", effort, lambda _: None, Settings()
    )
    return {model.name: model.input for model in made.models if model.input is not None}


def decided(files: Mapping[str, JobFile], inputs: Mapping[str, ProfiledInput], cores: int) -> dict[str, Share]:
    """What the policy gives each job on this machine."""
    models = {
        name: ProfiledModel(name, BATCH, BATCH, 0.0, (), ProfiledCosts(1.0, 1.0, 1.0), (), given)
        for name, given in inputs.items()
    }
    cluster = Cluster((NodeType("here", "cpu", 1, len(files), float(cores), len(files) * GB),))
    scheduler = scheduler_for(get_policy(POLICY), cluster)
    jobs = [
        ExecutedJob(number, name, file, 0.0, gpu_types=("cpu",), restart_s=1.0, profile=Profile(models))
        for number, (name, file) in enumerate(files.items())
    ]
    for job in jobs:
        scheduler.arrive(job)
    scheduler.decide(0.0)
    given = {job.name: job.share for job in jobs}
    return {name: share for name, share in given.items() if share is not None}


async def by_turns(
    bench: Testbed,
    files: Mapping[str, JobFile],
    shares: Mapping[str, Mapping[str, Share]],
    repetitions: int,
    seconds: float,
    tries: int,
) -> tuple[list[dict[str, Window]], bool]:
    """Repetitions by setting: those that count, else all of them, and False."""
    first = next(iter(shares.values()))
    plan = Plan(micro_batch=BATCH)
    runs = {
        name: bench.start(file, job, ((0, 1 << job),), plan, first[name], noise=False, report_s=0.25)
        for job, (name, file) in enumerate(files.items())
    }
    for run in runs.values():
        await run.first_step()
    found: list[dict[str, Window]] = []
    quiet: list[dict[str, Window]] = []
    while len(quiet) < repetitions and len(found) < tries:
        found.append({setting: await window(bench, runs, shares[setting], seconds) for setting in shares})
        if max(each.others for each in found[-1].values()) <= QUIET_CPUS:
            quiet.append(found[-1])
        others = ", ".join(f"{each.others:.2f}" for each in found[-1].values())
        print(f"repetition {len(found)}: CPUs of others {others}", file=sys.stderr, flush=True)
    await asyncio.gather(*(bench.stop(run) for run in runs.values()))
    print(f"{len(found)} repetitions, in {len(quiet)} of which others used at most {QUIET_CPUS:g} of a core\n")
    return (quiet, True) if quiet else (found, False)


async def window(bench: Testbed, runs: Mapping[str, TestbedRun], shares: Mapping[str, Share], seconds: float) -> Window:
    """The jobs with these shares. Those who give cores up come first."""
    for name in sorted(runs, key=lambda name: shares[name].cpus):
        bench.reshare(runs[name], shares[name])
    await asyncio.sleep(SETTLING_S)
    began = {name: await fresh(run, shares[name].cpus) for name, run in runs.items()}
    busy_s, own_s, began_s = busy(), own(), time.monotonic()
    await asyncio.sleep(seconds)
    took_s = time.monotonic() - began_s
    others = (busy() - busy_s - (own() - own_s)) / took_s
    ended = {name: await fresh(run, shares[name].cpus) for name, run in runs.items()}
    rates = {
        name: BATCH * (ended[name][1].step - began[name][1].step) / (ended[name][0] - began[name][0]) for name in runs
    }
    return Window(rates, {name: rates[name] * ended[name][1].cpu_s / BATCH for name in runs}, others)


async def fresh(run: TestbedRun, cpus: float) -> tuple[float, Report]:
    """The first report that comes from now on, of steps with that share, and when it came."""
    while not run.reports.empty():
        run.reports.get_nowait()
    while True:
        report = await run.reports.get()
        if abs(report.cpus - cpus) < 1e-2 and report.cpu_s:
            return time.monotonic(), report


def busy() -> float:
    """CPU-seconds of all processes of the machine."""
    fields = [int(each) for each in Path("/proc/stat").read_text(encoding="ascii").split("\n")[0].split()[1:]]
    idle = fields[3] + fields[4]
    # Guests are counted in the first two.
    return (sum(fields[:8]) - idle) / os.sysconf("SC_CLK_TCK")


def own() -> float:
    """CPU-seconds of this process and all that it has started, and that lives."""
    parents: dict[int, int] = {}
    for each in os.listdir("/proc"):
        try:
            text = Path(f"/proc/{each}/stat").read_text(encoding="ascii", errors="replace")
            parents[int(each)] = int(text.rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
    mine = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in mine} - mine:
        mine |= more
    return processes.cpu_s(mine)


def shown(
    inputs: Mapping[str, ProfiledInput],
    shares: Mapping[str, Mapping[str, Share]],
    windows: list[dict[str, Window]],
    judged: bool,
) -> int:
    print(f"{'profiled alone':16} {'ms of CPU a sample':>20} {'ms without waiting':>20}")
    for name, given in inputs.items():
        print(f"{name:16} {1e3 * given.cpu_s:20.2f} {1e3 * given.gpu_s / given.batch:20.2f}")
    print(
        f"\n{'':19} {'CPUs':>13} {'samples/s':>10} {'formula, of CPUs given':>24} {'of CPUs used':>18}\n"
        f"{'shares':10} {'job':8} {'given':>6} {'used':>6} {'measured':>10} {'':15} {'off by':>8} {'':9} {'off by':>8}"
    )
    worst = 0.0
    rates: dict[tuple[str, str], tuple[float, float]] = {}
    for setting in shares:
        for name, given in inputs.items():
            cpus = shares[setting][name].cpus
            rate = statistics.median(each[setting].rates[name] for each in windows)
            used = statistics.median(each[setting].cpus[name] for each in windows)
            formula, of_used = (given.batch / given.step_s(each) for each in (cpus, used))
            rates[setting, name] = rate, formula
            worst = max(worst, abs(formula / rate - 1.0))
            print(
                f"{setting:10} {name:8} {cpus:6.2f} {used:6.2f} {rate:10.1f} "
                f"{formula:15.1f} {formula / rate - 1:+8.1%} {of_used:9.1f} {of_used / rate - 1:+8.1%}"
            )
    print()
    for name in inputs:
        gains = [each["decided"].rates[name] / each["equal"].rates[name] for each in windows]
        formula = rates["decided", name][1] / rates["equal", name][1]
        print(
            f"{name}: decided ÷ equal {statistics.median(gains):.2f} "
            f"({min(gains):.2f} to {max(gains):.2f}), by the formula {formula:.2f}"
        )
    if not judged:
        print(f"goal, formula within {GOAL:.0%}: not judged, for others used the machine all the time")
        return 0
    print(f"goal, formula within {GOAL:.0%}: {'met' if worst <= GOAL else 'missed'}, off by {worst:.1%} at most")
    return 0 if worst <= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
