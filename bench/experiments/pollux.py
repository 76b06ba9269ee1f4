"""Pollux's published completion times beside ours, job by job and on average: docs/accuracy.md."""

from __future__ import annotations

import csv
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from runner.experiment import Experiment, Result, Results, Simulation, Tables, data_file
from runner.tables import below, met, number, table

WORKLOADS = ("workload-1", "workload-2", "workload-3", "workload-4")
READS = tuple(
    f"synergy_core/performance/catalog/models/{name}.yaml"
    for name in ("bert", "cifar10", "deepspeech2", "imagenet", "ncf", "yolov3")
)
"""The models of these jobs and of Sia's."""


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


def _run(policy: str, workload: str) -> Simulation:
    return Simulation(policy, ("experiment=pollux_osdi21",), 0, f"pollux/{workload}", beside_published)


EXACT = [*product(("tiresias", "optimus"), WORKLOADS)]


def _tasks() -> list[Simulation]:
    return [_run(*each) for each in (*EXACT, *product(["pollux"], WORKLOADS))]


def _tables(results: Results) -> Tables:
    exact = []
    for policy, workload in EXACT:
        found = results[_run(policy, workload)]
        equal, all_jobs = found["equal_jobs"], found["published_jobs"]
        means = [number(found["mean_jct_s"]), number(found["published_mean_jct_s"])]
        exact.append([policy, _short(workload), *means, f"{equal} of {all_jobs}", met(equal == all_jobs)])
    header = ("policy", "workload", "mean JCT, s", "published, s", "jobs equal to the second", "goal: all")
    return {"exact": table(header, exact, 2), "searched": _searched(results)}


def _searched(results: Results) -> str:
    found = [results[_run("pollux", workload)] for workload in WORKLOADS]
    means_s = [(each["mean_jct_s"], each["published_mean_jct_s"]) for each in found]
    rows = [
        [_short(workload), *_compared(*each, within=0.10)] for workload, each in zip(WORKLOADS, means_s, strict=True)
    ]
    rows.append(["mean of four", *_compared(*np.mean(means_s, axis=0), within=0.05)])
    return table(("workload", "mean JCT, s", "published, s", "ratio", "goal: ± 10 %, mean ± 5 %"), rows)


def _compared(ours_s: float, published_s: float, *, within: float) -> list[str]:
    ratio = ours_s / published_s
    return [number(ours_s, 0), number(published_s, 0), number(ratio, 3), met(below(abs(ratio - 1), within))]


def _short(workload: str) -> str:
    return workload.replace("workload", "pollux")


POLLUX = Experiment(_tasks, _tables, needs=("data",), reads=READS)
