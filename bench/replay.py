"""How fast a trace is replayed: CPU seconds of the simulation alone, and jobs per CPU-second.

    python bench/replay.py [--quick] [--json FILE]
    python bench/replay.py --units [REPETITIONS]

Whole Philly (the real log where SYNERGY_DATA has it) on 60 × 8 GPUs, where counts decide what fits (`spread`, for which
the goals are) and where GPUs must lie together (`consolidate`), then 10⁴, 10⁵ and 10⁶ Helios-like jobs on 262 × 8
at an offered load of 0.85. Every line is a process of its own, so that peak memory is its own. Beside each, in the same
process, a bare heapq loop over the same number of events (a push and a pop each, 1,000 pending): what no simulator in
Python can beat. Goals are those of the project's issue.

--units: whole Philly on 60 × 8 GPUs under `spread`, in units of what SimPy itself needs for as many processes of two
timeouts (bench/yardstick.py). Policies and yardstick take turns; of each the least CPU time counts.
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import json
import multiprocessing
import random
import statistics
import time

PHILLY = (("fifo", 1.5), ("backfill", 1.5), ("sjf", 1.5), ("srtf", 8.0), ("mlfq", 8.0), ("easy", None),
          ("las", None), ("tiresias", None), ("qssf", None), ("themis", None))  # fmt: skip
HELIOS = (("backfill", 15.0), ("sjf", 15.0), ("srtf", 40.0), ("mlfq", 40.0))
UNITS = {"fifo": 3.0, "backfill": 3.0, "sjf": 3.0, "easy": 5.0, "srtf": 6.0, "las": 10.0, "themis": 15.0}
"""Goals, in units of the yardstick."""
COLUMNS = (
    "workload",
    "jobs",
    "gpus",
    "placement",
    "policy",
    "cpu_s",
    "goal_s",
    "jobs_per_cpu_s",
    "events",
    "us_per_event",
    "heapq_cpu_s",
    "peak_mb",
)


def philly():
    from synergy_runs.generators import generate
    from synergy_runs.traces import read_trace
    from synergy_runs.traces._download import find_philly
    from synergy_runs.workload import from_rows

    path = find_philly()
    rows = read_trace(path) if path else generate("philly", jobs=82_247)
    return from_rows(rows, name="philly" if path else "philly (generated)")


def helios(jobs: int):
    from synergy_runs.generators import generate
    from synergy_runs.workload import from_rows, scaled

    work = from_rows(generate("saturn", jobs=jobs), name=f"saturn {jobs:,}")
    return scaled(work, 0.85 / work.offered_load_fraction(262 * 8))


def bare_heapq_s(events: int) -> float:
    draw = random.Random(0).random
    pending = [(draw(), serial) for serial in range(1_000)]
    heapq.heapify(pending)
    began = time.process_time()
    for serial in range(events):
        now, _ = heapq.heappop(pending)
        heapq.heappush(pending, (now + draw(), serial))
    return time.process_time() - began


def measure(what: str, nodes: int, placement: str, policy: str, repeats: int, goal_s: float | None, queue) -> None:
    import numpy as np

    from synergy_core.cluster import Cluster, NodeType
    from synergy_core.policies import get_policy
    from synergy_runs.workload import with_estimates
    from synergy_sim.execution import Costs, ExecutionModel
    from synergy_sim.simulate import simulate

    work = with_estimates(philly() if what == "philly" else helios(int(what)), 4.0, np.random.default_rng(0))
    machines = Cluster((NodeType("v100", "v100", nodes, 8),), placement=placement)
    seconds = []
    for _ in range(repeats):
        run = simulate(work, machines, get_policy(policy), ExecutionModel(Costs(restart_s=0.0)))
        seconds.append(run.simulation_cpu_s)
    cpu_s = statistics.median(seconds)
    events = len(run.events.time_s)
    row = (work.name, len(work), machines.gpus, placement, policy, round(cpu_s, 3), goal_s, round(len(work) / cpu_s),
           events, round(cpu_s / events * 1e6, 2), round(bare_heapq_s(events), 3),
           round(run.peak_memory_bytes / 1e6))  # fmt: skip
    queue.put(dict(zip(COLUMNS, row, strict=True)))


def rows(quick: bool):
    repeats = 1 if quick else 3
    cases = [("philly", 60, "spread", policy, repeats, goal_s) for policy, goal_s in PHILLY]
    cases += [("philly", 60, "consolidate", policy, repeats, None) for policy, _ in PHILLY]
    for jobs in (10_000, 100_000) if quick else (10_000, 100_000, 1_000_000):
        last = jobs == 1_000_000
        cases += [
            (str(jobs), 262, "spread", policy, 1 if last else repeats, goal_s if last else None)
            for policy, goal_s in HELIOS
        ]
    context = multiprocessing.get_context("spawn")
    for case in cases:
        queue = context.Queue()
        process = context.Process(target=measure, args=(*case, queue))
        process.start()
        yield queue.get()
        process.join()


def print_units(repetitions: int) -> None:
    import numpy as np
    from yardstick import simpy_cpu_s

    from synergy_core.cluster import Cluster, NodeType
    from synergy_core.policies import get_policy
    from synergy_runs.workload import with_estimates
    from synergy_sim.execution import Costs, ExecutionModel
    from synergy_sim.simulate import simulate

    work = with_estimates(philly(), 4.0, np.random.default_rng(0))
    machines = Cluster((NodeType("v100", "v100", 60, 8),), placement="spread")
    free = ExecutionModel(Costs(restart_s=0.0))
    unit_s, cpu_s, digest = float("inf"), dict.fromkeys(UNITS, float("inf")), {}
    for _ in range(repetitions):
        unit_s = min(unit_s, simpy_cpu_s(len(work)))
        for policy in UNITS:
            run = simulate(work, machines, get_policy(policy), free)
            cpu_s[policy] = min(cpu_s[policy], run.simulation_cpu_s)
            columns = ("time_s", "kind", "job_id", "part", "node", "gpu_mask")
            events = b"".join([getattr(run.events, name).tobytes() for name in columns])
            digest[policy] = hashlib.sha256(events).hexdigest()[:12]
    print(f"{work.name}, {len(work):,} jobs; the unit is {unit_s:.3f} CPU-seconds; least of {repetitions}")
    print(f"{'policy':10} {'CPU s':>7} {'units':>7} {'goal':>6}  events")
    for policy, goal in UNITS.items():
        seconds = cpu_s[policy]
        print(f"{policy:10} {seconds:7.3f} {seconds / unit_s:7.2f} {goal:6.1f}  {digest[policy]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one repeat, no million jobs")
    parser.add_argument("--json", metavar="FILE", help="also write the rows here")
    parser.add_argument("--units", type=int, nargs="?", const=5, metavar="REPETITIONS", help="ratios to SimPy itself")
    chosen = parser.parse_args()
    if chosen.units:
        return print_units(chosen.units)
    done = []
    print("  ".join(f"{name:>14}" for name in COLUMNS))
    for row in rows(chosen.quick):
        done.append(row)
        print("  ".join(f"{'' if row[name] is None else row[name]!s:>14}" for name in COLUMNS), flush=True)
    if chosen.json:
        with open(chosen.json, "w", encoding="utf-8") as stream:
            json.dump(done, stream, indent=1)


if __name__ == "__main__":
    main()
