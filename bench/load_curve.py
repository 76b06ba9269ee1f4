"""Synergy against sia given the same information, by offered load: on generated and on real Philly.

    SYNERGY_DATA=… OPENBLAS_NUM_THREADS=1 python bench/load_curve.py [--seeds 5] [--loads 0.5 …] [--figure FILE]

A quarter of the jobs of four days, drawn by the seed, as training jobs of the catalog's models, on 15 × 8 GPUs that are
empty at first. Load is run time × GPUs in the log of these jobs ÷ what the cluster has until the last submission;
arrivals are made denser or sparser until a seed has the load asked for. Every figure is synergy's ÷ sia's, seed by
seed; ±: 95 % by Student's t. Both policies have their default parameters.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from accuracy_runs import compose
from accuracy_tables import student, table, with_half

OURS, THEIRS = "synergy", "sia(like=synergy)"
LOADS = (0.5, 0.7, 0.9, 1.0, 1.1, 1.3)
JOBS = ("trace.sample=0.25", "cluster.nodes=15", "trace.carry_in=false")
TRACES = {
    "generated Philly": ("+trace=philly", "trace.find=[]", "trace.window=2017-10-16/4d", *JOBS),
    "real Philly": ("+trace=philly", "trace.window=2017-10-16/4d", *JOBS),
}
"""No parameter was chosen on these days."""
FIGURES = {
    "mean_jct_s": "mean JCT",
    "p99_jct_s": "p99 JCT",
    "makespan_s": "makespan",
    "worst_finish_time_fairness": "worst ρ",
    "p99_waiting_s": "p99 wait",
    "p99_slowdown": "p99 slowdown",
}


def measure(words: tuple[str, ...], load: float, seed: int) -> dict[str, float]:
    """Synergy's figures ÷ sia's."""
    from synergy_runs.metrics import summarise
    from synergy_sim.prepare import prepared_runs
    from synergy_sim.simulate import simulate

    words = (*words, f"seed={seed}", f"policy=[{THEIRS},{OURS}]")
    (logged, *_) = prepared_runs(compose(words)[0])
    by_log = logged.workload.offered_load_fraction(logged.cluster.gpus)
    theirs, ours = (
        summarise(simulate(run.workload, run.cluster, run.policy, run.execution, truth=run.truth, seed=seed))
        for run in prepared_runs(compose((*words, f"cluster.load={load / by_log}"))[0])
    )
    return {name: ours[name] / theirs[name] for name in FIGURES}


def half_width(values: np.ndarray) -> float:
    """Half of the 95 % interval of these values' mean."""
    return student(len(values) - 1) * float(values.std(ddof=1)) / len(values) ** 0.5


def draw(found: dict[tuple[str, float], np.ndarray], loads: list[float], path: Path) -> None:
    """Ratios of the mean JCT over load, a line for each trace."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.axhline(1.0, color="0.6", linewidth=1)
    for name in TRACES:
        ratios = [found[name, load] for load in loads]
        axes.errorbar(loads, [each.mean() for each in ratios], [half_width(each) for each in ratios],
                      marker="o", capsize=3, label=name)  # fmt: skip
    axes.set_xlabel("offered load")
    axes.set_ylabel("mean JCT ÷ sia's, given the same")
    axes.set_ylim(bottom=0.0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--loads", type=float, nargs="+", default=LOADS)
    parser.add_argument("--figure", type=Path, help="also draw the ratios of the mean JCT here")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    chosen = parser.parse_args()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    cases = [(name, load, seed) for name in TRACES for load in chosen.loads for seed in range(chosen.seeds)]
    with ProcessPoolExecutor(chosen.workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        words, loads, seeds = zip(*((TRACES[name], load, seed) for name, load, seed in cases), strict=True)
        measured = list(pool.map(measure, words, loads, seeds))
    rows, means = [], {}
    for name in TRACES:
        for load in chosen.loads:
            mine = [each for each, case in zip(measured, cases, strict=True) if case[:2] == (name, load)]
            jct = means[name, load] = np.array([each["mean_jct_s"] for each in mine])
            others = [f"{np.mean([each[figure] for each in mine]):.2f}" for figure in FIGURES if figure != "mean_jct_s"]
            rows.append([name, f"{load:g}", with_half(jct.mean(), half_width(jct)), *others])
    print(table(("trace", "load", *FIGURES.values()), rows, 2))
    if chosen.figure:
        draw(means, chosen.loads, chosen.figure)


if __name__ == "__main__":
    main()
