"""Repeats the published comparisons of Rubick and Arena, on their own traces and measured step times.

    SYNERGY_DATA=… OPENBLAS_NUM_THREADS=1 python bench/published_plans.py rubick|arena [--trace FILE] [--workers 2]

Every policy knows the measured times, and jobs run under the best plan for what they are given. Rubick: all its jobs
are run to their end. Arena: its simulator stops after 2,000 rounds, so the jobs that have finished by then are counted;
*padded* counts every other job with the longest JCT of all policies, as its plots do; *all* runs every job to its end.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from accuracy_runs import compose
from accuracy_tables import NONE, table

HORIZON_S = 2_000 * 300.0
"""End of Arena's simulation."""
ARTIFACT = {"mean": 3_638.3, "median": 1_816.7, "p90": 7_592.8, "p99": 29_183.4, "makespan": 58_680.0}
"""Seconds, by Rubick's own simulator on its base trace (its artifact, run as published; also on bp)."""
SLOWER = 1.5
"""How many times slower than requested Rubick lets a guaranteed job be."""
OSDI22 = ("cluster.cpus_per_node=96", "cluster.memory_gb_per_node=1600", "cluster.storage_mb_per_s=500")
RUBICK: dict[str, tuple[str, ...]] = {
    "rubick": (),
    "rubick(most_changes=1000)": (),
    "fifo": (),
    "fifo+tune": OSDI22,
    "sia": (),
    "sia+plans(like=synergy)": (),
    "synergy(information=shared)": (),
    "synergy": (),
}
SEARCHES = ("restart_s=300", "testbed.launch_s=300")
"""Arena's baselines search plans for up to 600 s, of which its simulator lets one round of 300 s pass without work."""
ARENA: dict[str, tuple[str, ...]] = {
    "fifo": SEARCHES,
    "gavel": SEARCHES,
    "sia": SEARCHES,
    "crius": (),
    "sia+plans(like=synergy)": (),
    "synergy": (),
}
PUBLISHED = {"fifo": "fcfs"}
"""Names in Arena's results, where they differ."""


def jobs_of(experiment: str, trace: str | None, asked: tuple[str, tuple[str, ...]]) -> Any:
    """The jobs of one run, as a table."""
    import pandas as pd

    from synergy_sim.run import simulate_all

    policy, settings = asked
    words = [f"experiment={experiment}", f'policy=["{policy}"]', *settings, "same_information=false", "figures=false"]
    words += [f"trace.path={trace}"] if trace else []
    with tempfile.TemporaryDirectory() as folder:
        made, values = compose([*words, "progress=false"])
        (into,) = simulate_all(made, values, Path(folder), say=False)
        return pd.read_parquet(into / "jobs.parquet")


def bound(experiment: str, trace: str | None) -> Any:
    """The same if no job waited and all trained on the fastest measured shape: a bound on completion times."""
    import pandas as pd

    from synergy_sim.prepare import prepared_runs

    words = [f"experiment={experiment}", "policy=[synergy]", *([f"trace.path={trace}"] if trace else [])]
    run = next(prepared_runs(compose(words)[0]))
    jobs, launch_s = run.workload, run.execution.costs.launch_s
    alone_s = [
        launch_s + steps * min(row.step_s for row in run.truth.profile[jobs.models[model]].rows
                               if row.plan.global_batch == batch)
        for model, batch, steps in zip(jobs.model_code, jobs.global_batch, jobs.iterations, strict=True)
    ]  # fmt: skip
    made = pd.DataFrame({"submit_time_s": jobs.submit_time_s, "jct_s": alone_s, "restarts": np.nan})
    return made.assign(virtual_cluster="", finish_s=made.submit_time_s + made.jct_s)


def rubick_table(runs: dict[str, Any], published: bool) -> str:
    """Completion times, in seconds, and their ratios to the artifact's."""
    figures = {
        name: {
            "mean": jobs.jct_s.mean(),
            **{key: jobs.jct_s.quantile(q) for key, q in (("median", 0.5), ("p90", 0.9), ("p99", 0.99))},
            "makespan": jobs.finish_s.max() - jobs.submit_time_s.min(),
            "restarts": jobs.restarts.mean(),
            "kept": kept(jobs),
        }
        for name, jobs in runs.items()
    }
    if published:
        figures = {"the artifact's own run": {**ARTIFACT, "restarts": np.nan, "kept": np.nan}, **figures}
    first = next(iter(figures.values()))
    rows = [
        [name, *(f"{each[key]:,.0f}" for key in ARTIFACT),
         f"{each['mean'] / first['mean']:.3f}", f"{each['makespan'] / first['makespan']:.2f}",
         shown(each["restarts"], "{:.2f}"), shown(each["kept"], "{:.0%}")]
        for name, each in figures.items()
    ]  # fmt: skip
    header = ("policy", "mean JCT, s", "median", "p90", "p99", "makespan, s", "mean ÷ first", "makespan ÷ first",
              "restarts a job", "guarantees kept")  # fmt: skip
    return table(header, rows, 1)


def kept(jobs: Any) -> float:
    """The fraction of guaranteed jobs that trained as fast as promised from their first start on; NaN for none."""
    mine = jobs[jobs.virtual_cluster == "guaranteed"]
    return float((mine.finish_s - mine.first_start_s <= SLOWER * mine.duration_s).mean()) if len(mine) else np.nan


def shown(value: float, form: str) -> str:
    return form.format(value) if np.isfinite(value) else NONE


def arena_table(runs: dict[str, Any]) -> str:
    """Finished jobs and their mean JCT here and as published; then both ways of counting the unfinished ones."""
    import pandas as pd

    theirs = pd.read_csv(Path(os.environ["SYNERGY_DATA"]) / "arena" / "published_philly_results.csv")
    theirs = theirs.set_index("policy")
    done = {name: jobs[jobs.finish_s <= HORIZON_S] for name, jobs in runs.items()}
    longest_s = max(each.jct_s.max() for each in done.values())
    rows = []
    crius_s, published_s = done["crius"].jct_s.mean(), theirs.jct_mean_finished_s["crius"]
    for name, jobs in runs.items():
        mine, known = done[name], PUBLISHED.get(name, name)
        padded_s = np.where(jobs.finish_s <= HORIZON_S, jobs.jct_s, longest_s).mean()
        cells = [NONE] * 3
        if known in theirs.index:
            row = theirs.loc[known]
            cells = [f"{row.jobs_finished:.0f}", f"{row.jct_mean_finished_s:,.0f}",
                     f"{published_s / row.jct_mean_finished_s:.2f}"]  # fmt: skip
        rows.append([name, f"{len(mine)}", cells[0], f"{mine.jct_s.mean():,.0f}", cells[1],
                     f"{crius_s / mine.jct_s.mean():.2f}", cells[2], f"{padded_s:,.0f}", f"{jobs.jct_s.mean():,.0f}",
                     f"{jobs.jct_s.quantile(0.99):,.0f}", shown(jobs.restarts.mean(), "{:.2f}")])  # fmt: skip
    header = ("policy", "finished", "published", "their mean JCT, s", "published", "crius ÷ it", "published",
              "padded mean, s", "all: mean, s", "all: p99, s", "restarts a job")  # fmt: skip
    return table(header, rows, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", choices=("rubick", "arena"))
    parser.add_argument("--trace", help="another trace of the same form")
    parser.add_argument("--workers", type=int, default=2, help="processes (2)")
    parser.add_argument("--policies", nargs="+", help="only these")
    chosen = parser.parse_args()
    known, experiment = (RUBICK, "rubick_mlsys25") if chosen.which == "rubick" else (ARENA, "arena_eurosys26")
    asked = {name: known[name] for name in chosen.policies or known}
    with ProcessPoolExecutor(chosen.workers) as pool:
        made = pool.map(partial(jobs_of, experiment, chosen.trace), asked.items())
        runs = dict(zip(asked, made, strict=True))
    runs["bound: nobody waits, fastest shape"] = bound(experiment, chosen.trace)
    print(rubick_table(runs, chosen.trace is None) if chosen.which == "rubick" else arena_table(runs))


if __name__ == "__main__":
    main()
