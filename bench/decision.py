"""What one decision costs at the scale of a data centre: all from a round's beginning to its starts and stops.

    OPENBLAS_NUM_THREADS=1 python bench/decision.py [--sizes 10000 65536] [--policy synergy] [--rounds 8] [--profile]

Training jobs of the catalog's models, with the sizes and run times of bench/experiments/metrics.py, on nodes of 8 GPUs
of four types. All jobs are new in the first round, when nothing is known of their models; in each later round a
twentieth as many arrive, and some end. Costs are in units: CPU seconds ÷ those of bench/yardstick.py, the least of
three. median, greatest: of later rounds' decisions. between: the simulator's own work from one decision to the next.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import median

import numpy as np
from experiments.metrics import CHANCES, SIZES, durations_s
from yardstick import simpy_cpu_s

from synergy_core.cluster import Cluster, NodeType
from synergy_core.policies import get_policy
from synergy_runs.traces.rows import TraceRows
from synergy_runs.workload import Workload, from_rows
from synergy_sim.assignment import mixed
from synergy_sim.execution import ExecutionModel
from synergy_sim.simulate import Simulation
from synergy_sim.truth import Truth

GPU_TYPES = ("a100", "v100", "rtx2080ti", "t4")
JOBS = {10_000: 2_000, 65_536: 20_000}
"""Active jobs in the first round, by the cluster's GPUs."""
GOALS = {10_000: 0.5, 65_536: 3.0}
ROUND_S = 60.0


def workload(jobs: int, rounds: int, machines: Cluster, truth: Truth) -> Workload:
    """That many jobs at once, and a twentieth as many in each of the later rounds."""
    random = np.random.default_rng(0)
    later_s = ROUND_S * (np.repeat(np.arange(rounds), jobs // 20) + 0.5)
    submit_s = np.concatenate((np.zeros(jobs), later_s))
    rows = TraceRows(Path("generated"), "bench/decision.py")
    rows.add(
        np.zeros(len(submit_s)),
        submit_s=submit_s,
        duration_s=durations_s(random, len(submit_s)),
        gpus=random.choice(SIZES, len(submit_s), p=CHANCES),
        job_name=[str(number) for number in range(len(submit_s))],
    )
    return mixed(from_rows(rows, name="rounds", first_s=0.0), machines, truth, random)


def measure(
    gpus: int, policy: str, rounds: int, profiler: cProfile.Profile | None
) -> tuple[list[int], list[float], list[float]]:
    """Active jobs and CPU seconds of each decision, and CPU seconds between decisions."""
    each = gpus // 8 // len(GPU_TYPES)
    machines, truth = Cluster(tuple(NodeType(name, name, each, 8) for name in GPU_TYPES)), Truth(None)
    jobs = workload(JOBS[gpus], rounds, machines, truth)
    simulation = Simulation(jobs, machines, get_policy(policy), ExecutionModel(round_s=ROUND_S), truth)
    scheduler, decide = simulation.scheduler, simulation.scheduler.decide
    active, began_s, ended_s = [], [], []

    def timed(now_s: float):
        began_s.append(time.process_time())
        with profiler if profiler and active else nullcontext():
            decision = decide(now_s)
        ended_s.append(time.process_time())
        active.append(len(scheduler.last[0]))
        return decision

    scheduler.decide = timed
    simulation.engine.begin(simulation.driver)
    while len(active) <= rounds:
        simulation.engine.env.step()
    began, ended = np.array(began_s), np.array(ended_s)
    return active, (ended - began).tolist(), (began[1:] - ended[:-1]).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--policy", default="synergy")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--profile", action="store_true", help="also print the heaviest functions of the later rounds")
    chosen = parser.parse_args()
    unit_s = min(simpy_cpu_s() for _ in range(3))
    print(f"one unit: {unit_s:.2f} CPU s")
    print(f"{'GPUs':>7} {'jobs':>7} {'first':>7} {'median':>7} {'greatest':>8} {'goal':>5} {'between':>8}")
    for gpus in chosen.sizes:
        profiler = cProfile.Profile() if chosen.profile else None
        active, cpu_s, between_s = measure(gpus, chosen.policy, chosen.rounds, profiler)
        first, *later = (each / unit_s for each in cpu_s)
        print(f"{gpus:>7,} {int(median(active[1:])):>7,} {first:>7.2f} {median(later):>7.2f} {max(later):>8.2f} "
              f"{GOALS[gpus]:>5} {median(between_s) / unit_s:>8.2f}", flush=True)  # fmt: skip
        if profiler:
            for order in ("tottime", "cumtime"):
                pstats.Stats(profiler).sort_stats(order).print_stats(25)


if __name__ == "__main__":
    main()
