"""How fast orders × mechanisms are simulated: jobs per CPU-second on the published jobs of Synergy (OSDI 2022).

    python bench/mechanisms.py [--orders fifo …] [--mechanisms tune …] [--jobs 9000] [--set KEY=VALUE …] [--json FILE]
    python bench/mechanisms.py --rounds 1000

`--rounds` draws so many random rounds instead, and prints in how many of them each mechanism's total speed is less
than, equal to and greater than that of opt, the upper bound.

`experiment=synergy_osdi22`: 9,000 jobs, 9 an hour, on 16 nodes of 8 GPUs. *anew*: as the experiment has it, where
everybody is placed afresh in each round; *sticky*: jobs stay on their nodes, and tune hands out what is left over. Only
`simulate` counts: not the start, nor drawing the jobs. Every line is a process of its own. Needs no data, but with
SYNERGY_DATA the profiles are the published tables. moves: stops a job; under *anew* most of them cost the job nothing,
and the simulator what any stop and start do. digest: of all events and shares; equal where all decisions are. The goal
is the project's issue's; the public simulator has 17–20 jobs a CPU-second, with opt 1.8.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
from accuracy_runs import compose

from synergy_core.cluster import Cluster, NodeType, Share
from synergy_core.policies.mechanisms import get_mechanism
from synergy_core.policies.mechanisms._round import Applicant, SharingRound, least
from synergy_core.policies.mechanisms.opt import total_speed
from synergy_core.units import GB

ORDERS = ("fifo", "srtf", "las", "ftf")
MECHANISMS = ("proportional", "greedy", "tune", "opt")
GOAL = 1_000
COLUMNS = ("policy", "placed", "jobs", "cpu_s", "jobs_per_cpu_s", "goal", "decisions", "moves", "digest")
WAYS = {
    "anew": ("parameters.opt.sticky=false",),
    "sticky": ("parameters.proportional.sticky=true", "parameters.greedy.sticky=true", "parameters.tune.sticky=true",
               "parameters.tune.hand_out=true"),
}  # fmt: skip


def measure(policy: str, placed: str, jobs: int, more: list[str]) -> dict[str, Any]:
    """One line of the table."""
    from synergy_runs.facts import Kind
    from synergy_sim.prepare import prepared_runs
    from synergy_sim.simulate import simulate

    overrides = ["experiment=synergy_osdi22", f"policy=[{policy}]", f"trace.jobs={jobs}", *WAYS[placed]]
    overrides += ["trace.measured_jobs=null", *more]
    settings, _ = compose(overrides)
    (what,) = prepared_runs(settings)
    run = simulate(what.workload, what.cluster, what.policy, what.execution, truth=what.truth, seed=what.seed)
    digest = hashlib.sha256(run.events.digest().encode())
    assert run.shares is not None
    for column in (run.shares.time_s, run.shares.job_id, run.shares.cpus, run.shares.memory_bytes):
        digest.update(column.tobytes())
    cpu_s, stops = run.simulation_cpu_s, int((run.events.kind == int(Kind.STOP)).sum())
    row = (policy, placed, jobs, round(cpu_s, 2), round(jobs / cpu_s), GOAL, len(run.decisions.time_s),
           round(stops / jobs, 1), digest.hexdigest()[:12])  # fmt: skip
    return dict(zip(COLUMNS, row, strict=True))


def rows(orders: list[str], mechanisms: list[str], jobs: int, more: list[str]) -> Iterator[dict[str, Any]]:
    """A line for every order × mechanism × way."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
        for mechanism in mechanisms:
            for order in orders:
                for placed in WAYS:
                    yield pool.submit(measure, f"{order}+{mechanism}", placed, jobs, more).result()


def _random_round(random: np.random.Generator) -> SharingRound:
    """Jobs of 1 to 8 GPUs that all wait, each of which needs its own CPUs and memory to be as fast as it can be."""
    node = NodeType("v", "v100", int(random.integers(1, 5)), 8, 24.0, 500 * GB)
    cluster = Cluster((node,))
    own = node.proportional
    jobs = []
    for _ in range(random.integers(2, 25)):
        gpus = int(random.choice((1, 1, 1, 2, 4, 8)))
        cpus = min(float(random.uniform(0.2, 5.0)) * own.cpus, node.cpus / gpus)
        memory_bytes = min(float(random.uniform(0.1, 3.0)) * own.memory_bytes, node.memory_bytes / gpus)
        wanted = Share(cpus, memory_bytes)

        def speed(kind: int, share: Share, wanted: Share = wanted) -> float:
            def rate(has: Share) -> float:
                return min(1.0, has.cpus / wanted.cpus, has.memory_bytes / wanted.memory_bytes)

            return rate(share) / rate(own)

        jobs.append(Applicant(gpus, (0,), (wanted,), (least(wanted, own),), 0, (), None, speed))
    return SharingRound(jobs, cluster, [float("inf")], bool(random.integers(2)))


def print_bounds(rounds: int) -> None:
    """In how many random rounds each mechanism is slower than opt, as fast, and faster; and by how much at most."""
    mechanisms = {name: get_mechanism(name) for name in MECHANISMS}
    ratios: dict[str, list[float]] = {name: [] for name in MECHANISMS if name != "opt"}
    for seed in range(rounds):
        drawn = _random_round(np.random.default_rng(seed))
        bound = total_speed(drawn, mechanisms["opt"].share_out(drawn))
        for name, found in ratios.items():
            found.append(total_speed(drawn, mechanisms[name].share_out(drawn)) / bound)
    print(f"{rounds:,} random rounds: total speed ÷ that of opt")
    print("  ".join(f"{name:>17}" for name in ("mechanism", "less", "equal", "greater", "mean", "greatest")))
    for name, each in ratios.items():
        less, greater = sum(ratio < 1 - 1e-9 for ratio in each), sum(ratio > 1 + 1e-9 for ratio in each)
        row = (name, less, rounds - less - greater, greater, round(sum(each) / rounds, 3), round(max(each), 3))
        print("  ".join(f"{value!s:>17}" for value in row))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--orders", nargs="+", default=list(ORDERS), metavar="ORDER", help=", ".join(ORDERS))
    parser.add_argument("--mechanisms", nargs="+", default=list(MECHANISMS), metavar="MECHANISM")
    parser.add_argument("--jobs", type=int, default=9_000, help="the first so many of the published jobs (9000)")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings, such as those of the mix")
    parser.add_argument(
        "--rounds", type=int, metavar="N", help="compare mechanisms with opt in N random rounds instead"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the rows here")
    chosen = parser.parse_args()
    if chosen.rounds:
        print_bounds(chosen.rounds)
        return
    done = []
    print("  ".join(f"{name:>17}" for name in COLUMNS))
    for row in rows(chosen.orders, chosen.mechanisms, chosen.jobs, chosen.set):
        done.append(row)
        print("  ".join(f"{row[name]!s:>17}" for name in COLUMNS), flush=True)
    if chosen.json:
        with open(chosen.json, "w", encoding="utf-8") as stream:
            json.dump(done, stream, indent=1)


if __name__ == "__main__":
    main()
