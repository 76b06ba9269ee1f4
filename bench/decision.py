"""What one decision costs at the scale of a data centre: all from a round's beginning to its starts and stops.

    OPENBLAS_NUM_THREADS=1 python bench/decision.py [--sizes 10000 65536] [--policy synergy] [--rounds 8] [--profile]

Training jobs of the catalog's models, log-normal run times, 1 to 16 GPUs requested, on nodes of 8 GPUs of four types. A
twentieth as many arrive in each round after the first, and some end. first: all jobs are new and nothing is known of
them, so that a round at its fullest is among the others: median and greatest of the rounds after. Units: CPU seconds ÷
bench/yardstick.py's, least of three in this process. look-ahead: the simulator's own work between two decisions.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from pathlib import Path
from statistics import median

import numpy as np
from yardstick import simpy_cpu_s

from synergy_core.cluster import Cluster, NodeType
from synergy_core.policies import get_policy
from synergy_core.scheduling.scheduler import scheduler_for
from synergy_runs.traces.rows import TraceRows
from synergy_runs.workload import Workload, from_rows
from synergy_sim.assignment import mixed
from synergy_sim.execution import Costs, ExecutionModel
from synergy_sim.simulate import Simulation
from synergy_sim.truth import Truth

GPU_TYPES = ("a100", "v100", "rtx2080ti", "t4")
JOBS = {10_000: 2_000, 65_536: 20_000}
"""Active jobs by the cluster's GPUs."""
GOALS = {10_000: 0.5, 65_536: 3.0}
ROUND_S = 60.0
MEAN_S, SPREAD = 4 * 3600.0, 1.5


def workload(jobs: int, rounds: int, machines: Cluster, truth: Truth) -> Workload:
    """So many at once, and a twentieth in each round after."""
    random = np.random.default_rng(0)
    more = jobs // 20
    submit_s = np.concatenate([np.zeros(jobs), *(np.full(more, ROUND_S * (at + 0.5)) for at in range(rounds))])
    rows = TraceRows(Path("generated"), "bench/decision.py")
    rows.add(
        np.zeros(len(submit_s)),
        submit_s=submit_s,
        duration_s=np.exp(random.normal(np.log(MEAN_S) - SPREAD**2 / 2, SPREAD, len(submit_s))),
        gpus=random.choice([1, 2, 4, 8, 16], len(submit_s), p=[0.4, 0.2, 0.2, 0.15, 0.05]),
        job_name=[str(number) for number in range(len(submit_s))],
    )
    return mixed(from_rows(rows, name="rounds", first_s=0.0), machines, truth, random)


class Timed:
    """A scheduler whose decisions are timed; the rest of it is the scheduler's own."""

    def __init__(self, scheduler, profiler: cProfile.Profile | None) -> None:
        self.scheduler, self.profiler = scheduler, profiler
        self.decided: list[tuple[int, float, float]] = []
        """Active jobs, CPU seconds of the decision, and when it ended on this process' CPU clock."""

    def __getattr__(self, name: str):
        return getattr(self.scheduler, name)

    def decide(self, now_s: float):
        began = time.process_time()
        if self.decided and self.profiler:
            self.profiler.enable()
        decision = self.scheduler.decide(now_s)
        if self.profiler:
            self.profiler.disable()
        ended = time.process_time()
        self.decided.append((len(self.scheduler.last[0]), ended - began, ended))
        return decision


Round = tuple[int, float, float]
"""Active jobs, CPU seconds of the decision, and of the simulator before it."""


def measure(gpus: int, jobs: int, policy: str, rounds: int, profiler: cProfile.Profile | None) -> list[Round]:
    """The rounds, the first last."""
    each = gpus // 8 // len(GPU_TYPES)
    machines = Cluster(tuple(NodeType(name, name, each, 8) for name in GPU_TYPES))
    truth = Truth(None)
    timed: list[Timed] = []

    def make(*arguments, **more):
        timed.append(Timed(scheduler_for(*arguments, **more), profiler))
        return timed[0]

    execution = ExecutionModel(Costs(restart_s=30.0), round_s=ROUND_S)
    jobs_of = workload(jobs, rounds, machines, truth)
    simulation = Simulation(jobs_of, machines, get_policy(policy), execution, truth, make_scheduler=make)
    simulation.engine.begin(simulation.driver)
    while len(timed[0].decided) <= rounds:
        simulation.engine.env.step()
    decided = timed[0].decided
    before = [ended for _, _, ended in decided[:-1]]
    return [
        (active, cpu_s, ended - cpu_s - ended_before)
        for (active, cpu_s, ended), ended_before in zip(decided[1:], before, strict=True)
    ] + [(decided[0][0], decided[0][1], float("nan"))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--policy", default="synergy")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--profile", action="store_true", help="also print the heaviest functions of the rounds after")
    chosen = parser.parse_args()
    unit_s = min(simpy_cpu_s() for _ in range(3))
    print(f"one unit: {unit_s:.2f} CPU s")
    print(f"{'GPUs':>7} {'jobs':>7} {'first':>7} {'median':>7} {'greatest':>8} {'goal':>5} {'look-ahead':>10}")
    for gpus in chosen.sizes:
        profiler = cProfile.Profile() if chosen.profile else None
        *after, first = measure(gpus, JOBS[gpus], chosen.policy, chosen.rounds, profiler)
        units = [cpu_s / unit_s for _, cpu_s, _ in after]
        ahead = median(between for _, _, between in after) / unit_s
        print(f"{gpus:>7,} {int(median(active for active, _, _ in after)):>7,} {first[1] / unit_s:>7.2f} "
              f"{median(units):>7.2f} {max(units):>8.2f} {GOALS[gpus]:>5} {ahead:>10.2f}", flush=True)  # fmt: skip
        if profiler:
            for order in ("tottime", "cumtime"):
                pstats.Stats(profiler).sort_stats(order).print_stats(25)


if __name__ == "__main__":
    main()
