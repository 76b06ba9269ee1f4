"""How fast orders × mechanisms are simulated: jobs per CPU-second on the published jobs of Synergy (OSDI 2022).

    python bench/mechanisms.py [--orders fifo …] [--mechanisms tune …] [--jobs 9000] [--set KEY=VALUE …] [--json FILE]

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

from accuracy_runs import compose

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
    from synergy_runs.log import Kind
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--orders", nargs="+", default=list(ORDERS), metavar="ORDER", help=", ".join(ORDERS))
    parser.add_argument("--mechanisms", nargs="+", default=list(MECHANISMS), metavar="MECHANISM")
    parser.add_argument("--jobs", type=int, default=9_000, help="the first so many of the published jobs (9000)")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings, such as those of the mix")
    parser.add_argument("--json", metavar="FILE", help="also write the rows here")
    chosen = parser.parse_args()
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
