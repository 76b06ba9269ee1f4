"""How often a run is called overloaded, by its load: queues of known load, windows of 7, 14 and 28 days.

    python bench/overload.py [--seeds 4]

Poisson arrivals, 1 to 16 GPUs, log-normal run times cut at 30 days, on 60 × 8 GPUs, with 35 days of history. A window's
own load differs from the arrivals' rate by luck: in a short one at 0.95 the queue does grow at times.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from synergy_core.cluster import Cluster, NodeType
from synergy_core.policies import get_policy
from synergy_core.units import DAY_S, HOUR_S
from synergy_runs.inputs import cut
from synergy_runs.metrics import OVERLOAD_FRACTION, growth_until
from synergy_runs.traces.rows import TraceRows
from synergy_runs.workload import Workload, from_rows
from synergy_sim.simulate import simulate

LOADS = (0.7, 0.8, 0.9, 0.95, 1.05, 1.1, 1.2, 1.3)
DAYS = (7, 14, 28)
HISTORY_S = 35 * DAY_S
POLICIES = ("fifo", "backfill", "srtf")
SIZES, CHANCES = np.array([1, 2, 4, 8, 16]), np.array([0.7, 0.1, 0.1, 0.08, 0.02])
MEAN_S, SPREAD, LONGEST_S = 12 * HOUR_S, 1.8, 30 * DAY_S
MACHINES = Cluster((NodeType("v100", "v100", 60, 8),))


def durations_s(random: np.random.Generator, jobs: int) -> np.ndarray:
    """Log-normal, mean `MEAN_S` before they are cut."""
    return np.minimum(np.exp(random.normal(np.log(MEAN_S) - SPREAD**2 / 2, SPREAD, jobs)), LONGEST_S)


def arrivals(load: float, seed: int) -> Workload:
    """Jobs of that load on average, and what was running when their window started."""
    random = np.random.default_rng((seed, int(load * 100)))
    work_gpu_s = durations_s(np.random.default_rng(0), 400_000).mean() * (SIZES @ CHANCES)
    length_s = max(DAYS) * DAY_S + HISTORY_S
    jobs = random.poisson(load * MACHINES.gpus / work_gpu_s * length_s)
    rows = TraceRows(Path("generated"), "bench/overload.py")
    rows.add(
        np.zeros(jobs),
        submit_s=np.sort(random.uniform(0, length_s, jobs)),
        duration_s=durations_s(random, jobs),
        gpus=random.choice(SIZES, jobs, p=CHANCES),
        job_name=[str(number) for number in range(jobs)],
    )
    return cut(from_rows(rows, name="poisson", first_s=HISTORY_S, before=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4)
    chosen = parser.parse_args()
    called = {(policy, days, load): 0 for policy in POLICIES for days in DAYS for load in LOADS}
    for load in LOADS:
        for seed in range(chosen.seeds):
            work = arrivals(load, seed)
            for policy in POLICIES:
                run = simulate(work, MACHINES, get_policy(policy))
                for days in DAYS:  # what comes after a window changes nothing in it
                    slope, late = growth_until(run, days * DAY_S)
                    called[policy, days, load] += slope >= OVERLOAD_FRACTION and late >= OVERLOAD_FRACTION
        print(f"load {load} done", file=sys.stderr, flush=True)
    print(f"called overloaded, of {chosen.seeds}\n{'policy':>9} {'days':>5}", *(f"{load:>6}" for load in LOADS))
    for policy in POLICIES:
        for days in DAYS:
            print(f"{policy:>9} {days:>5}", *(f"{called[policy, days, load]:>6}" for load in LOADS))


if __name__ == "__main__":
    main()
