"""The published comparisons of Rubick and Arena, on their own traces and measured step times: docs/accuracy.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from runner.experiment import Experiment, Measurement, Result, Results, Simulation, compose, data_file, measurement
from runner.tables import NONE, number, table

from synergy_core.units import Floats

BOUND = "bound: nobody waits, fastest shape"


def bound(experiment: str) -> Result:
    """Returns completion times if no job waited and each trained on its fastest measured shape."""
    from synergy_sim.prepare import prepared_runs

    run = next(prepared_runs(compose([experiment, "policy=[synergy]"])[0]))
    jobs, rows = run.workload.jobs, run.truth.profile
    alone_s = np.empty(len(jobs))
    for model, batch in {*zip(jobs["model"], jobs["global_batch"].tolist(), strict=True)}:
        mine = (jobs["model"] == model) & (jobs["global_batch"] == batch)
        steps = [row.step_s for row in rows[model].rows if row.plan.global_batch == batch]
        alone_s[mine] = run.execution.costs.launch_s + jobs["iterations"][mine] * min(steps)
    p50_s, p90_s, p99_s = np.quantile(alone_s, (0.5, 0.9, 0.99)).tolist()
    ends_s = jobs["submit_time_s"] + alone_s
    return {
        "mean_jct_s": float(alone_s.mean()), "p50_jct_s": p50_s, "p90_jct_s": p90_s, "p99_jct_s": p99_s,
        "makespan_s": float(ends_s.max() - jobs["submit_time_s"].min()), "restarts_per_job": None,
    } | _finished(alone_s, ends_s)  # fmt: skip


# Rubick

ARTIFACT = {
    "mean_jct_s": 3_638.3, "p50_jct_s": 1_816.7, "p90_jct_s": 7_592.8, "p99_jct_s": 29_183.4, "makespan_s": 58_680.0,
    "restarts_per_job": None,
}  # fmt: skip
"""Results of Rubick's own simulator on its base trace (its artifact, run as published)."""
OSDI22 = ("cluster.cpus_per_node=96", "cluster.memory_gb_per_node=1600", "cluster.storage_mb_per_s=500")
ON_RUBICK = "experiment=rubick_mlsys25"
RUBICK_POLICIES = (
    *("rubick", "rubick(most_changes=1000)", "fifo", "fifo+tune", "sia", "sia+plans(like=synergy)"),
    *("synergy(information=shared)", "synergy"),
)
RUBICK_RUNS: dict[str, Simulation | Measurement] = {
    **{each: Simulation(each, (ON_RUBICK, *(OSDI22 if each == "fifo+tune" else ()))) for each in RUBICK_POLICIES},
    BOUND: measurement(bound, experiment=ON_RUBICK),
}


def _rubick_tables(results: Results) -> dict[str, str]:
    figures = {"the artifact's own run": ARTIFACT, **{name: results[run] for name, run in RUBICK_RUNS.items()}}
    rows = [
        [
            name,
            *(f"{each[key]:,.0f}" for key in list(ARTIFACT)[:5]),
            number(each["mean_jct_s"] / ARTIFACT["mean_jct_s"], 3),
            number(each["makespan_s"] / ARTIFACT["makespan_s"]),
            number(each["restarts_per_job"]),
        ]
        for name, each in figures.items()
    ]
    header = ("policy", "mean JCT, s", "median", "p90", "p99", "makespan, s", "mean ÷ first", "makespan ÷ first",
              "restarts a job")  # fmt: skip
    return {"jct": table(header, rows)}


RUBICK = Experiment(
    lambda: list(RUBICK_RUNS.values()),
    _rubick_tables,
    needs=("data",),
    reads=("conf/experiment/rubick_mlsys25.yaml", "conf/testbed/rubick.yaml"),
)

# Arena

HORIZON_S = 2_000 * 300.0
"""End of Arena's simulation. Jobs that have finished by then are counted."""
SEARCHES = ("restart_s=300", "testbed.launch_s=300")
"""Arena's baselines search plans for up to 600 s, of which its simulator lets one round of 300 s pass without work."""
PUBLISHED_AS = {"fifo": "fcfs"}
"""Names in Arena's results, where they differ."""
ON_ARENA = "experiment=arena_eurosys26"


def _finished(jct_s: Floats, finish_s: Floats) -> Result:
    done = jct_s[finish_s <= HORIZON_S]
    return {"jobs": len(jct_s), "finished": len(done), "finished_mean_s": done.mean(), "finished_longest_s": done.max()}


def jobs_within_horizon(into: Path, settings: Any) -> Result:
    """Number, mean and longest JCT of the jobs that Arena's simulator would have seen finish."""
    import pandas as pd

    jobs = pd.read_parquet(into / "jobs.parquet")
    return _finished(jobs.jct_s.to_numpy(), jobs.finish_s.to_numpy())


ARENA_POLICIES = {
    **dict.fromkeys(("fifo", "gavel", "sia"), SEARCHES),
    **dict.fromkeys(("crius", "sia+plans(like=synergy)", "synergy"), ()),
}
ARENA_RUNS: dict[str, Simulation | Measurement] = {
    **{each: Simulation(each, (ON_ARENA, *own), collect=jobs_within_horizon) for each, own in ARENA_POLICIES.items()},
    BOUND: measurement(bound, experiment=ON_ARENA),
}


def _arena_tables(results: Results) -> dict[str, str]:
    """Finished jobs and their mean JCT here and as published; then both ways of counting the unfinished ones."""
    import pandas as pd

    published = pd.read_csv(data_file("arena", "published_philly_results.csv")).set_index("policy")
    longest_s = max(results[run]["finished_longest_s"] for run in ARENA_RUNS.values())
    crius_s, their_crius_s = results[ARENA_RUNS["crius"]]["finished_mean_s"], published.jct_mean_finished_s["crius"]
    rows = []
    for name, run in ARENA_RUNS.items():
        found, theirs = results[run], [NONE] * 3
        if (known := PUBLISHED_AS.get(name, name)) in published.index:
            jobs, mean_s = published.loc[known, ["jobs_finished", "jct_mean_finished_s"]]
            theirs = [f"{jobs:.0f}", f"{mean_s:,.0f}", f"{their_crius_s / mean_s:.2f}"]
        count, mean_s = found["finished"], found["finished_mean_s"]
        padded_s = (count * mean_s + (found["jobs"] - count) * longest_s) / found["jobs"]
        ours = [f"{count}", f"{mean_s:,.0f}", f"{crius_s / mean_s:.2f}"]
        rows.append([name, *(cell for pair in zip(ours, theirs, strict=True) for cell in pair), f"{padded_s:,.0f}",
                     f"{found['mean_jct_s']:,.0f}", f"{found['p99_jct_s']:,.0f}",
                     number(found["restarts_per_job"])])  # fmt: skip
    header = ("policy", "finished", "published", "their mean JCT, s", "published", "crius ÷ it", "published",
              "padded mean, s", "all: mean, s", "all: p99, s", "restarts a job")  # fmt: skip
    return {"jct": table(header, rows)}


ARENA = Experiment(
    lambda: list(ARENA_RUNS.values()),
    _arena_tables,
    needs=("data",),
    reads=("conf/experiment/arena_eurosys26.yaml", "conf/testbed/arena.yaml"),
)
