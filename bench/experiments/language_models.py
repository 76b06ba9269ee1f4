"""Language models with parallel plans on clusters of several GPU types, by policy: docs/language_models.md."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from runner.experiment import Experiment, Results, Simulation, simulations
from runner.tables import NONE, table

OURS = "synergy"
LARGE = ("experiment=llm_heterogeneous",)
SMALL = (
    *LARGE,
    "trace.sample=0.1125",
    "cluster.node_types=[{gpu_type:a100,nodes:10,gpus_per_node:4},{gpu_type:v100,nodes:2,gpus_per_node:16},"
    "{gpu_type:a40,nodes:20,gpus_per_node:2},{gpu_type:a10,nodes:20,gpus_per_node:2}]",
)
"""An eighth of the cluster and of the jobs."""
SAME = "information=all"
KNOWN = (*SMALL, SAME, "truth.planned.known=true")
SMALL_SEEDS = range(2)
FIGURES = (
    ("mean_jct_s", "avg JCT h", 3600.0),
    ("p99_jct_s", "p99 h", 3600.0),
    ("makespan_s", "makespan h", 3600.0),
    ("mean_finish_time_fairness", "mean FTF", 1.0),
    ("worst_finish_time_fairness", "worst FTF", 1.0),
    ("restarts_per_job", "restarts", 1.0),
    ("decision_p99_s", "p99 decision ms", 1e-3),
    ("simulation_cpu_s", "CPU s", 1.0),
)
"""Key of summary.json, title, and unit in that of the key."""
Rows = dict[str, list[Simulation]]
"""Runs of each seed, by what their row is called."""


def _rows(overrides: Sequence[str], policies: Sequence[str], seeds: Sequence[int]) -> Rows:
    return {policy: simulations(overrides, [policy], seeds) for policy in policies}


TABLES: dict[str, Rows] = {
    "large": _rows(LARGE, ("fifo", "sia", "crius", OURS), range(1)),
    "small": _rows(SMALL, ("fifo", "gavel", "sia", "sia+plans"), SMALL_SEEDS)
    | {f"sia+plans, {SAME}": simulations((*SMALL, SAME), ["sia+plans"], SMALL_SEEDS)}
    | _rows(SMALL, ("crius", OURS), SMALL_SEEDS),
    "known": _rows(KNOWN, ("sia+plans", OURS), SMALL_SEEDS),
}


def _table(rows: Rows, results: Results) -> str:
    """Means over seeds. Raises ValueError if a job did not finish, since means would then be of different jobs."""
    if cut := [str(run) for runs in rows.values() for run in runs if results[run]["jobs_unfinished"]]:
        raise ValueError(f"some jobs did not finish: {'; '.join(cut)}")
    means = {
        name: {key: float(np.mean([results[run][key] for run in runs])) for key, *_ in FIGURES}
        for name, runs in rows.items()
    }
    lines = [
        [
            name,
            *(f"{mean[key] / unit:.4g}" for key, _, unit in FIGURES),
            NONE if name == OURS else f"{means[OURS]['mean_jct_s'] / mean['mean_jct_s']:.3f}",
        ]
        for name, mean in means.items()
    ]
    return table(["policy", *(title for _, title, _ in FIGURES), f"{OURS} ÷ it"], lines)


LANGUAGE_MODELS = Experiment(
    lambda: [run for rows in TABLES.values() for runs in rows.values() for run in runs],
    lambda results: {name: _table(rows, results) for name, rows in TABLES.items()},
    needs=("data",),
    reads=("synergy_core/performance/catalog/gpus", "synergy_core/performance/catalog/architectures", "plans"),
)
