"""What each part of the allocator is worth: the same rounds with one part left out.

    SYNERGY_DATA=… python bench/allocator_parts.py [--only NAME …]

Whole simulations: the mean gap of the rounds, the CPU seconds of all decisions ÷ those with every part, and the mean
JCT. Large rounds, as in `bench/allocator.py`: CPU seconds of one cold and one warm round, and their larger gap. The
parts of rounds with CPUs and memory are in `bench/allocator_ways.py`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
from accuracy_runs import compose, path_of
from allocator import SIZES, next_round, round_of

from synergy_core.allocator import Problem, Solution, priced, solve
from synergy_core.allocator.exact import solve_exact
from synergy_core.allocator.prices import COARSEST, OpenJobs, minimise_all
from synergy_core.units import Floats, on_grid
from synergy_runs.facts import Kind, Run
from synergy_sim.prepare import prepared_runs
from synergy_sim.simulate import simulate

SIA = ("experiment=sia_sosp23", "information=all")
PHILLY = ("+trace=philly", "trace.window=2017-11-20/1d", "trace.carry_in=false", "same_information=false")
OSDI22 = ("experiment=synergy_osdi22", "trace.jobs=300", "trace.measured_jobs=null", "cluster.cpus_per_node=null")
EXPERIMENTS: dict[str, Callable[[], tuple[str, ...]]] = {
    "sia": lambda: (*SIA, f"trace.path={path_of('sia/philly/workload-1')}", "policy=sia"),
    "sia, synergy": lambda: (*SIA, f"trace.path={path_of('sia/philly/workload-1')}", "policy=synergy"),
    "philly, synergy": lambda: (*PHILLY, "policy=synergy"),
    "osdi22, synergy": lambda: (*OSDI22, "cluster.memory_gb_per_node=null", "policy=synergy"),
}
LARGE = "large rounds"


def whole_programme(problem: Problem, *, small: bool = False, **more: Any) -> Solution:
    return solve_exact(problem, **more)


def prices_of_all_columns(work: OpenJobs, prices: Floats | None) -> Floats:
    if prices is None or not prices.any():
        return minimise_all(work, None, smooth=COARSEST)
    return minimise_all(work, prices, smooth=priced.WARM)


PARTS: dict[str, Callable[[], Any]] = {
    "none": nullcontext,
    "table of states (integer programme instead)": lambda: patch.object(priced, "MAX_TABLE_S", 0.0),
    "way for small problems": lambda: patch.object(priced, "is_small", lambda problem: False),
    "prices (the whole integer programme)": lambda: patch.object(priced, "solve_priced", whole_programme),
    "optimum (greedy steps)": lambda: patch.object(priced, "solve_priced", priced.solve_by_steps),
}
PARTS_OF_LARGE: dict[str, Callable[[], Any]] = {
    "none": nullcontext,
    "sample and boxes of prices": lambda: patch.object(priced, "find_prices", prices_of_all_columns),
}


def simulated(name: str) -> None:
    """Prints the rows of one experiment."""
    settings, _ = compose(EXPERIMENTS[name]())
    (prepared,) = prepared_runs(settings)
    whole_s = np.nan
    for part, left_out in PARTS.items():
        with left_out():
            done = simulate(
                prepared.workload, prepared.cluster, prepared.policy, prepared.execution, truth=prepared.truth
            )
        took_s = float(np.sum(done.decisions.decision_s))
        whole_s = took_s if part == "none" else whole_s
        gap, jct_h = float(np.nanmean(done.decisions.gap)), float(mean_jct_s(done)) / 3600
        print(f"| {name} | {part} | {gap:.3%} | {took_s / whole_s:.2f} | {jct_h:.3f} |", flush=True)


def mean_jct_s(done: Run) -> float:
    """Mean completion time of all jobs."""
    ends = done.events.kind == Kind.FINISH
    return float(np.mean(done.events.time_s[ends] - on_grid(done.workload.submit_time_s)[done.events.job_id[ends]]))


def large_rounds(seeds: int = 3) -> None:
    """Prints the rows of large rounds, medians over seeds."""
    print("\n| GPUs | jobs | part left out | cold s | warm s | gap |\n|---:|---:|---|---:|---:|---:|")
    for gpus, jobs, types, rows, _, gap, _ in SIZES[-3:]:
        for part, left_out in PARTS_OF_LARGE.items():
            seen = []
            for seed in range(seeds):
                first = round_of(jobs, gpus, types, rows, -0.5, seed)
                second = next_round(first, round_of(jobs, gpus, types, rows, -0.5, seed + 1_000), seed)
                with left_out():
                    start = time.process_time()
                    cold = solve(first, method="priced", gap=gap)
                    between = time.process_time()
                    warm = solve(second, method="priced", gap=gap, prices=cold.prices)
                    seen.append((between - start, time.process_time() - between, max(cold.gap, warm.gap)))
            cold_s, warm_s, most = (*np.median(seen, axis=0)[:2], max(each[2] for each in seen))
            print(f"| {gpus:,} | {jobs:,} | {part} | {cold_s:.3f} | {warm_s:.3f} | {most:.3%} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*EXPERIMENTS, LARGE]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    chosen = parser.parse_args()
    print("| experiment | part left out | mean gap | CPU of decisions | mean JCT, h |\n|---|---|---:|---:|---:|")
    for name in chosen.only:
        if name != LARGE:
            simulated(name)
    if LARGE in chosen.only:
        large_rounds()


if __name__ == "__main__":
    main()
