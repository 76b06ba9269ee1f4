"""Language models with parallel plans on clusters of several GPU types: synergy against crius, sia and gavel.

    SYNERGY_DATA=… OPENBLAS_NUM_THREADS=1 python bench/llm.py [KEY=VALUE …] [--small] [--seeds N] [--only POLICY …]
        [--json FILE]

Jobs: Philly's, those of 2 GPUs or more, as language models (conf/experiment/llm_heterogeneous.yaml). Cluster: Arena's
1,280 GPUs; --small: an eighth of them, and of the jobs. What a policy may know of plans stands in its name: sia+plans
reads the planner's tables in full, sia knows one plan of each job, in replicas; every job runs with the best plan for
what it is given. Every start and restart costs what the size of its checkpoint says. Means over seeds, each of which
draws jobs, models and the planner's errors. Ratios are of the mean JCTs, without an interval: samples of one log are
one workload (docs/metrics.md, "Interval").
"""

from __future__ import annotations

import argparse
import json
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from accuracy_runs import commit, compose, machine, typed_command, write_atomically

EXPERIMENT = "experiment=llm_heterogeneous"
OURS = "synergy"
GOAL = 0.75
"""Synergy's average JCT ÷ that of crius and of sia+plans."""
EIGHTH = (
    "cluster.node_types=[{gpu_type:a100,nodes:10,gpus_per_node:4},{gpu_type:v100,nodes:2,gpus_per_node:16},"
    "{gpu_type:a40,nodes:20,gpus_per_node:2},{gpu_type:a10,nodes:20,gpus_per_node:2}]"
)
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


def run(small: bool, seeds: int, only: list[str], more: list[str]) -> dict[str, list[dict[str, Any]]]:
    """By policy, a summary per seed; `jct_s` beside it. Every job must have finished."""
    from synergy_runs.invariants import check
    from synergy_runs.metrics import summarise
    from synergy_sim.prepare import prepared_runs
    from synergy_sim.simulate import simulate

    overrides = [EXPERIMENT, f"seed=[{','.join(map(str, range(seeds)))}]", *more]
    overrides += [f"policy=[{','.join(only)}]"] if only else []
    settings, _ = compose(overrides)
    if small:
        settings, _ = compose([*overrides, EIGHTH, f"trace.sample={settings.trace.sample / 8:g}"])
    found: dict[str, list[dict[str, Any]]] = {}
    for each in prepared_runs(settings):
        done = simulate(each.workload, each.cluster, each.policy, each.execution, truth=each.truth, seed=each.seed)
        check(done)
        summary = summarise(done)
        assert summary["jobs_unfinished"] == 0, each.policy.name
        found.setdefault(each.policy.name, []).append(summary)
        print(
            f"# {each.policy.name}, seed {each.seed}: {len(each.workload)} jobs, "
            f"load {summary['offered_load_fraction']:.2f}, average JCT {summary['mean_jct_s'] / 3600:.2f} h",
            flush=True,
        )
    return found


def table(found: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """A row per policy."""
    rows = []
    for policy, runs in found.items():
        row: dict[str, Any] = {"policy": policy}
        row |= {title: float(np.mean([each[key] for each in runs])) / unit for key, title, unit in FIGURES}
        if OURS in found and policy != OURS:
            ours = [each["mean_jct_s"] for each in found[OURS]]
            row["synergy ÷ it"] = float(np.mean(ours)) / float(np.mean([each["mean_jct_s"] for each in runs]))
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="an eighth of the cluster and of the jobs")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=[], metavar="POLICY")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="such as information=all, for every policy")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows here")
    chosen = parser.parse_args()
    rows = table(run(chosen.small, chosen.seeds, chosen.only, chosen.overrides))
    titles = ["policy", *(title for _, title, _ in FIGURES), "synergy ÷ it"]
    print("  ".join(f"{title:>{max(12, len(title))}}" for title in titles))
    for row in rows:
        cells = [f"{row[title]:.3f}" if isinstance(row.get(title), float) else row.get(title, "") for title in titles]
        print("  ".join(f"{cell:>{max(12, len(title))}}" for cell, title in zip(cells, titles, strict=True)))
    against = [row for row in rows if row["policy"] in ("crius", "sia+plans") and "synergy ÷ it" in row]
    met = [row["synergy ÷ it"] <= GOAL for row in against]
    if met:
        print(f"goal, at most {GOAL:g} of crius and of sia+plans: {'met' if all(met) else 'not met'}")
    told = {"command": typed_command(), "version": commit(), "machine": machine()}
    if chosen.json:
        write_atomically(chosen.json, json.dumps({**told, "date": str(date.today()), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
