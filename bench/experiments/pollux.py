"""Pollux's published completion times beside ours, job by job and on average: docs/accuracy.md."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
from runner.experiment import Experiment, Result, Results, Simulation, Tables, data_file
from runner.tables import below, each, met, number, table

WORKLOADS = ("workload-1", "workload-2", "workload-3", "workload-4")
READS = tuple(
    f"synergy_core/catalog/models/{name}.yaml"
    for name in ("bert", "cifar10", "deepspeech2", "imagenet", "ncf", "yolov3")
)
"""The models of these jobs and of Sia's."""
SEEDS = (0, 1)
"""Of the policy pollux, a random search; the others are deterministic."""


def beside_published(folder: Path, settings: Any) -> Result:
    """How many jobs' completion times are equal to the published second, and the published mean."""
    import pandas as pd

    workload, policy = settings.trace.path.stem, settings.policy[0].partition("(")[0]
    with data_file("workloads", "pollux", "published_job_jct.csv").open(newline="", encoding="utf-8") as stream:
        published_s = {
            row["job"]: int(row["jct_s"])
            for row in csv.DictReader(stream)
            if float(row["load"]) == 1.0 and (row["policy"], row["workload"]) == (policy, workload)
        }
    jobs = pd.read_parquet(folder / "jobs.parquet", columns=["job_name", "jct_s"])
    equal = sum(published_s.get(name) == jct_s for name, jct_s in jobs.itertuples(index=False))
    return {
        "equal_jobs": equal,
        "published_jobs": len(published_s),
        "published_mean_jct_s": float(np.mean([*published_s.values()])),
    }


def _run(policy: str, workload: str, seed: int = 0) -> Simulation:
    name = f"pollux(seed={seed})" if policy == "pollux" else policy
    return Simulation(name, ("experiment=pollux_osdi21",), seed, f"pollux/{workload}", beside_published)


EXACT = [(policy, workload) for policy in ("tiresias", "optimus") for workload in WORKLOADS]


def _tasks() -> list[Simulation]:
    return [_run(*each) for each in EXACT] + [_run("pollux", each, seed) for each in WORKLOADS for seed in SEEDS]


def _tables(results: Results) -> Tables:
    exact = []
    for policy, workload in EXACT:
        found = results[_run(policy, workload)]
        equal, all_jobs = found["equal_jobs"], found["published_jobs"]
        means = [number(found["mean_jct_s"]), number(found["published_mean_jct_s"])]
        exact.append([policy, _short(workload), *means, f"{equal} of {all_jobs}", met(equal == all_jobs)])
    header = ("workload", "mean JCT by seed, s", "mean, s", "published, s", "ratio", "goal: ± 10 %, mean ± 5 %")
    return {
        "exact": table(
            ("policy", "workload", "mean JCT, s", "published, s", "jobs equal to the second", "goal: all"), exact, 2
        ),
        "searched": table(header, _searched(results)),
    }


def _searched(results: Results) -> list[list[str]]:
    rows, means_s, published_s = [], [], []
    for workload in WORKLOADS:
        found = [results[_run("pollux", workload, seed)] for seed in SEEDS]
        by_seed = [one["mean_jct_s"] for one in found]
        means_s.append(float(np.mean(by_seed)))
        published_s.append(found[0]["published_mean_jct_s"])
        by_seed_text = each(by_seed, lambda value: number(value, 0))
        rows.append([_short(workload), by_seed_text, *_compared(means_s[-1], published_s[-1], within=0.10)])
    mean = _compared(float(np.mean(means_s)), float(np.mean(published_s)), within=0.05)
    return [*rows, ["mean of four", "", *mean]]


def _compared(ours_s: float, published_s: float, *, within: float) -> list[str]:
    ratio = ours_s / published_s
    return [number(ours_s, 0), number(published_s, 0), number(ratio, 3), met(below(abs(ratio - 1), within))]


def _short(workload: str) -> str:
    return workload.replace("workload", "pollux")


POLLUX = Experiment(_tasks, _tables, needs=("data",), reads=READS)
