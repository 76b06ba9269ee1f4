"""Synergy against sia given the same information, by offered load, on generated and real Philly: docs/accuracy.md."""

from __future__ import annotations

import numpy as np
from runner.experiment import ROOT, Experiment, Result, Results, Simulation, compose, measurement
from runner.tables import mean_half, number, ratios, table, with_half

OURS, THEIRS = "synergy", "sia(like=synergy)"
JOBS = ("+trace=philly", "trace.window=2017-10-16/4d", "trace.sample=0.25", "cluster.nodes=15", "trace.carry_in=false")
"""No parameter was chosen on these days."""
TRACES = {"generated Philly": (*JOBS, "trace.find=[]"), "real Philly": JOBS}
LOADS, SEEDS = (0.7, 1.0, 1.3), range(4)
FIGURES = {
    "mean_jct_s": "mean JCT",
    "p99_jct_s": "p99 JCT",
    "makespan_s": "makespan",
    "worst_finish_time_fairness": "worst ρ",
    "p99_slowdown": "p99 slowdown",
    "p99_waiting_s": "p99 wait",
}
OWN = {"max_waiting_s": "longest wait, min", "max_restarts": "most restarts"}
"""Figures of synergy, with those of sia in brackets; the largest over seeds."""
UNITS = {"max_waiting_s": 60.0, "max_restarts": 1.0}


def measure(overrides: tuple[str, ...], load: float, seed: int) -> Result:
    """Synergy's figures ÷ sia's, and both of `OWN`."""
    from synergy_runs.outputs.metrics import summarise
    from synergy_sim.prepare import prepared_runs
    from synergy_sim.simulate import simulate

    words = (*overrides, f"seed={seed}", f"policy=[{THEIRS},{OURS}]", f"cluster.offered_load={load}")
    theirs, ours = (
        summarise(simulate(run.workload, run.cluster, run.policy, run.execution, truth=run.truth, seed=seed))
        for run in prepared_runs(compose(words)[0])
    )
    own = {name: [ours[name] / unit, theirs[name] / unit] for name, unit in UNITS.items()}
    return {name: ours[name] / theirs[name] for name in FIGURES} | own


RUNS = {
    (trace, load): [
        measurement(measure, policies=(OURS, "sia"), overrides=overrides, load=load, seed=seed) for seed in SEEDS
    ]
    for trace, overrides in TRACES.items()
    for load in LOADS
}


WEEKS = ("2017-10-10/4d", "2017-10-17/4d", "2017-11-14/4d", "2017-11-28/4d", "2017-12-05/4d")
"""No parameter was chosen on these days of the real log either."""
OF_WEEK = {
    window: [
        Simulation(policy, ("+trace=philly", f"trace.window={window}", "same_information=false"))
        for policy in (OURS, THEIRS)
    ]
    for window in WEEKS
}


def tables(results: Results) -> dict[str, str]:
    """Makes the tables by offered load, and draws docs/load.png."""
    of_weeks = ratios([[tuple(results[run]["mean_jct_s"] for run in runs)] for runs in OF_WEEK.values()])
    weeks = []
    for at, (window, (ours, theirs)) in enumerate(OF_WEEK.items()):
        most = [_beside(results[ours][name] / unit, results[theirs][name] / unit) for name, unit in UNITS.items()]
        load = f"{results[ours]['offered_load_fraction']:.0%}"
        weeks.append([window, f"{results[ours]['jobs']:,}", load, number(of_weeks.files[at], 3), *most])
    rows, means = [], {}
    for (trace, load), runs in RUNS.items():
        found = {name: [results[run][name] for run in runs] for name in FIGURES}
        jct = mean_half(found.pop("mean_jct_s"))
        means.setdefault(trace, []).append((load, *jct))
        others = [number(float(np.mean(each))) for each in found.values()]
        most = {name: np.max([results[run][name] for run in runs], axis=0) for name in OWN}
        own = [_beside(ours, theirs) for ours, theirs in most.values()]
        rows.append([trace, f"{load:g}", with_half(*jct), *others, *own])
    _draw(means)
    return {
        "ratios": table(("trace", "load", *FIGURES.values(), *OWN.values()), rows, 2),
        "weeks": table(("window", "jobs", "load", "mean JCT", *OWN.values()), weeks),
        "equal-weeks": with_half(of_weeks.mean, of_weeks.files_half),
        "equal-drawn": with_half(*means["generated Philly"][1][1:]),
        "equal-real": with_half(*means["real Philly"][1][1:]),
    }


def _beside(ours: float, theirs: float) -> str:
    """The figure of synergy, with that of sia in brackets; one decimal below 10."""
    return " ".join(
        text.format(number(value, 0 if value >= 10 or value == round(value) else 1))
        for text, value in (("{}", ours), ("({})", theirs))
    )


def _draw(means: dict[str, list[tuple[float, float, float]]]) -> None:
    """Draws the ratios of mean JCTs by load, with their intervals; each trace is a line."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.axhline(1.0, color="0.6", linewidth=1)
    for trace, points in means.items():
        axes.errorbar(*zip(*points, strict=True), marker="o", capsize=3, label=trace)
    axes.set(xlabel="offered load", ylabel="mean JCT ÷ sia's, given the same")
    axes.set_ylim(bottom=0.0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(ROOT / "docs" / "load.png", dpi=150)


LOAD = Experiment(
    lambda: [run for runs in (*RUNS.values(), *OF_WEEK.values()) for run in runs],
    tables,
    needs=("data",),
    reads=("conf/trace/philly.yaml", "traces/philly.json", "synergy_core/performance/catalog/models"),
)
