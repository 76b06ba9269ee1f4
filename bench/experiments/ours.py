"""Synergy beside sia on Sia's workloads, each of its parts alone, and disturbances: docs/accuracy.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from runner.experiment import Experiment, Result, Results, Simulation, Tables, simulations
from runner.tables import Ratios, each, marked, met, number, paired, table, with_half

from experiments.pollux import READS
from experiments.sia import HOMOGENEOUS, LONG, SHORT, SIA_SOSP23, short
from synergy_core.units import HOUR_S

FILES = (*SHORT, *LONG)


@dataclass(frozen=True)
class Case:
    """A policy as typed, with the overrides of its run."""

    policy: str
    overrides: tuple[str, ...] = ()

    def on(self, file: str) -> list[Simulation]:
        """Its simulations on a file: under two seeds, or under one if the file has 960 jobs."""
        seeds = (0,) if file in LONG else (0, 1)
        return simulations((SIA_SOSP23, *self.overrides), [self.policy], seeds, [f"sia/{file}"], worst_fairness)


Rows = Mapping[str, tuple[Case, Case]]
"""The pairs of cases to compare, by the row's name."""


def _ratio(
    results: Results, ours: Case, theirs: Case, files: Sequence[str] = SHORT, figure: str = "mean_jct_s"
) -> Ratios:
    return paired(results, [ours.on(file) for file in files], [theirs.on(file) for file in files], figure)


# Synergy beside sia, on both clusters

SAME = "sia(information=all,growth=4,first_gpus=4,batch_limit=max)"
COMPARED = {"sia given the same": SAME, "synergy, own": "synergy(information=own)", "synergy": "synergy"}
CLUSTERS = {"heterogeneous": (), "homogeneous": HOMOGENEOUS}
GOALS = (("synergy", 0.82, ""), ("synergy, own", 0.90, ""), ("synergy", 0.75, " (the aim)"))
BOUND = 1.05
"""Largest allowed ratio to sia's value, for figures other than the mean JCT."""
BOUNDED = {"p99_jct_s": "p99 JCT", "makespan_s": "makespan", "worst_fairness": "worst finish-time fairness"}


def _goals(results: Results) -> str:
    rows = []
    for cluster, more in CLUSTERS.items():
        sia, synergy = Case("sia", more), Case("synergy", more)
        for name, goal, aim in GOALS:
            found = _ratio(results, Case(COMPARED[name], more), sia, FILES)
            what = f"{name}: mean ratio of six files at most {goal}{aim}"
            rows.append([cluster, what, _over_files(found), met(found.mean <= goal)])
        same = _ratio(results, synergy, Case(SAME, more), FILES)
        rows.append([cluster, "synergy ÷ sia given the same: below 1", _over_files(same), met(same.mean < 1)])
        for figure, name in BOUNDED.items():
            files = _ratio(results, synergy, sia, FILES, figure).files
            worst = int(np.argmax(files))
            what = f"synergy: {name} on no file above {BOUND} of sia's"
            rows.append([cluster, what, f"{files[worst]:.2f} ({short(FILES[worst])})", met(files[worst] <= BOUND)])
        waits_h = [_most(results, synergy, file, "max_waiting_s") / HOUR_S for file in FILES]
        same_h = [_most(results, Case(SAME, more), file, "max_waiting_s") / HOUR_S for file in FILES]
        limits_h = [max(1.0, 2 * each) for each in same_h]
        worst = int(np.argmax(np.divide(waits_h, limits_h)))
        what = "synergy: longest wait at most 1 h, or twice that of sia given the same"
        found_h = f"{waits_h[worst]:.2f} h ({short(FILES[worst])}; sia given the same {same_h[worst]:.2f} h)"
        rows.append([cluster, what, found_h, met(waits_h[worst] <= limits_h[worst])])
        most = max(_most(results, synergy, file, "max_restarts") for file in FILES)
        rows.append([cluster, "synergy: restarts of one job at most 250", f"{most:.0f}", met(most <= 250)])
    return table(("cluster", "goal", "found", ""), rows, 2)


def _most(results: Results, case: Case, file: str, figure: str) -> float:
    """The largest value of a figure over the seeds."""
    return max(float(results[run][figure]) for run in case.on(file))


def _means(results: Results, more: tuple[str, ...]) -> str:
    rows = []
    for name, policy in COMPARED.items():
        found = _ratio(results, Case(policy, more), Case("sia", more), FILES)
        four = _ratio(results, Case(policy, more), Case("sia", more))
        cells = [number(value, 3) for value in found.files]
        rows.append([name, *cells, number(four.mean, 3), _over_files(found)])
    return table(("mean JCT ÷ sia's", *map(short, FILES), "mean of first four", "mean of six"), rows)


def _over_files(found: Ratios) -> str:
    """The mean ratio with its interval over files and, in brackets, that over seeds, which move submissions by 1 s."""
    seeds = f" (over seeds ± {number(found.mean_half, 3)})" if np.isfinite(found.mean_half) else ""
    return with_half(found.mean, found.files_half) + seeds


def _bounds(results: Results, more: tuple[str, ...]) -> str:
    rows = []
    for name, policy in COMPARED.items():
        found = [_ratio(results, Case(policy, more), Case("sia", more), FILES, figure).files for figure in BOUNDED]
        rows.append([name, *(each(of, lambda value: marked(value, BOUND)) for of in zip(*found, strict=True))])
    return table(("÷ sia's", *map(short, FILES)), rows)


# Each part alone


def _beside_sia(cases: Mapping[str, str]) -> dict[str, tuple[Case, Case]]:
    return {name: (Case(policy), Case("sia")) for name, policy in cases.items()}


def _bare(**changes: Any) -> str:
    """synergy's objective with all else as in sia, and some of its own settings put back."""
    bare = {"information": "own", "batch_limit": "requested", "growth": 2, "first_gpus": 1}
    bare |= {"rank_power": 0, "restart_charge": 0} | changes
    return f"synergy({','.join(f'{key}={value}' for key, value in bare.items())})"


REMOVED = _beside_sia({
    "synergy": "synergy",
    "batch limit: as requested": "synergy(batch_limit=requested)",
    "own observations": "synergy(information=declared)",
    "no rank weights (rank_power=0)": "synergy(rank_power=0)",
    "no restart charge (restart_charge=0)": "synergy(restart_charge=0)",
    "charge over all remaining time (horizon_s=10⁹)": "synergy(horizon_s=1.0e9)",
    "restarts cost as much if frequent (restart_interval_s=0)": "synergy(restart_interval_s=0)",
    "waits count for nothing (patience_s=10⁹)": "synergy(patience_s=1.0e9)",
    "linear utility (utility_power=1)": "synergy(utility_power=1)",
    "undeclared work": "synergy(information=shared)",
    "greedy in place of the optimum": "synergy(method=steps)",
})  # fmt: skip
ADDED = _beside_sia({
    "batch limit: the job's maximum": "sia(batch_limit=max)",
    "shared observations": "sia(information=shared)",
    "both, first start up to 4 GPUs, growth 4 (sia given the same)": SAME,
})  # fmt: skip
OBJECTIVE = _beside_sia({
    "synergy's objective alone": _bare(),
    "+ rank weights, restart charge, declared work": _bare(rank_power=1, restart_charge=1.5, information="declared"),
})  # fmt: skip
ELASTIC = {
    f"a resize takes {fraction:g} of a restart": (
        Case("synergy", (f"testbed.resize_fraction={fraction}",)),
        Case("sia"),
    )
    for fraction in (0.5, 0.1)
}
FREE = ("testbed=pollux", "testbed.launch_s=0", "testbed.restart_s=0", "testbed.free_moves=true")
ROOM = {
    "synergy": (Case("synergy"), Case(SAME)),
    "starts and restarts cost synergy nothing": (Case("synergy", FREE), Case(SAME)),
    "they cost neither anything": (Case("synergy", FREE), Case(SAME, FREE)),
}
NOISE, CHECKPOINTS = ("truth.noise_fraction=0.2",), ("testbed.checkpoint_interval_s=600",)
DISTURBED = {
    "as it is": (Case("synergy"), Case("sia")),
    "declared work wrong, σ = 0.3": (Case("synergy", ("truth.declared_error=0.3",)), Case("sia")),
    "declared work wrong, σ = 1.5": (Case("synergy", ("truth.declared_error=1.5",)), Case("sia")),
    "applications split into 20 labels": (Case("synergy", ("truth.labels=20",)), Case("sia")),
    "noise in observations, σ = 0.2": (Case("synergy", NOISE), Case("sia", NOISE)),
    "checkpoints every 600 s": (Case("synergy", CHECKPOINTS), Case("sia", CHECKPOINTS)),
}  # fmt: skip
"""sia reads no declared work and shares nothing between jobs, so only noise and checkpoints reach it."""


def _against(results: Results, rows: Rows, *, beside_synergy: bool = False) -> str:
    """Per row the ratios on the four files of 160 jobs. beside_synergy: whether to add the ratio to synergy's."""
    found = []
    for name, (ours, theirs) in rows.items():
        ratios = _ratio(results, ours, theirs)
        restarts = np.mean([results[run]["restarts_per_job"] for file in SHORT for run in ours.on(file)])
        row = [name, *(number(value, 3) for value in ratios.files), ratios.said()]
        row += [number(_ratio(results, ours, theirs, figure="p99_jct_s").mean), number(float(restarts), 1)]
        if beside_synergy:
            row.append("1" if ours == Case("synergy") else _ratio(results, ours, Case("synergy")).said())
        found.append(row)
    header = ["", *map(short, SHORT), "mean of four", "p99", "restarts a job"]
    return table([*header, "÷ synergy"] if beside_synergy else header, found)


def _runs() -> Iterator[Simulation]:
    for file in FILES:
        for more in CLUSTERS.values():
            for policy in ("sia", *COMPARED.values()):
                yield from Case(policy, more).on(file)
    for rows in (REMOVED, ADDED, OBJECTIVE, ELASTIC, ROOM, DISTURBED):
        for ours, theirs in rows.values():
            for file in SHORT:
                yield from (*ours.on(file), *theirs.on(file))


def _tables(results: Results) -> Tables:
    same = {
        f"equal-{name}": _ratio(results, Case("synergy", more), Case(SAME, more), FILES)
        for name, more in CLUSTERS.items()
    }
    return {
        **{name: with_half(found.mean, found.files_half) for name, found in same.items()},
        "goals": _goals(results),
        **{name: _means(results, more) for name, more in CLUSTERS.items()},
        **{f"{name}-bounds": _bounds(results, more) for name, more in CLUSTERS.items()},
        "removed": _against(results, REMOVED, beside_synergy=True),
        "added": _against(results, ADDED),
        "objective": _against(results, OBJECTIVE),
        "elastic": _against(results, ELASTIC),
        "room": _against(results, ROOM),
        "disturbed": _against(results, DISTURBED, beside_synergy=True),
    }


OURS = Experiment(lambda: list(dict.fromkeys(_runs())), _tables, needs=("data",), reads=READS)


# Finish-time fairness as Sia defines it


def worst_fairness(folder: Path, settings: Any) -> Result:
    """The greatest of all jobs: Σ over GPU types of their share of the GPUs × JCT ÷ run time in an equal share of that
    type.

    The share of N active jobs (N: mean over the job's life) is 1/N of the cluster's GPUs, all of that type; the run
    time there is that of the fastest allowed size within it, with the best batch of every epoch, started once.
    """
    import pandas as pd

    from synergy_runs.inputs.from_settings import cluster_of, workload_of
    from synergy_sim.prepare import execution_of, truth_of

    jobs = pd.read_parquet(folder / "jobs.parquet", columns=["jct_s", "mean_contention"])
    workload = workload_of(settings.trace, settings.cluster, 0)
    cluster = cluster_of(settings.cluster, settings.trace, workload)
    truth, execution = truth_of(settings, 0), execution_of(settings)
    per_node = {node.gpu_type: node.gpus_per_node for node in cluster.node_types}
    fairness = np.zeros(len(jobs))
    for at, (jct_s, active) in enumerate(jobs.itertuples(index=False)):
        model = workload.jobs["model"][at]
        app = truth.application(model)
        launch_s = execution.costs_by_model.get(model, execution.costs).launch_s
        for gpu_type in cluster.gpu_types:
            most = min(max(1, int(cluster.gpus / active)), cluster.gpus_of(gpu_type))
            inside = [1 << power for power in range(10) if 1 << power <= min(most, per_node[gpu_type])]
            sizes = [*inside, *range(per_node[gpu_type], most + 1, per_node[gpu_type])]
            fastest_s = min(_run_time_s(app, gpu_type, gpus, per_node[gpu_type]) for gpus in sizes)
            alone_s = launch_s + truth.slowdown.get(model, 1.0) * fastest_s
            fairness[at] += cluster.gpus_of(gpu_type) / cluster.gpus * jct_s / alone_s
    return {"worst_fairness": float(fairness.max())}


_known_s: dict[tuple[str, str, int, int], float] = {}


def _run_time_s(app: Any, gpu_type: str, gpus: int, per_node: int) -> float:
    """Of the whole application on so many GPUs, with the best batch of every epoch."""
    from synergy_core.performance.planner.plan import Plan
    from synergy_sim.truth.application import packed

    key = (app.name, gpu_type, gpus, per_node)
    if key not in _known_s:
        shape = packed(gpus, per_node)
        low, high = app.local_batches(gpu_type, shape)
        epochs = np.diff((0.0, *app.work_at_epoch_end))
        rate = np.zeros(len(epochs))
        for local in sorted({low, *np.geomspace(low, high, 10).astype(int).tolist(), app.initial_batch // gpus}):
            for accumulation in (1, 2, 4, 8, 16) if local == high else (1,):
                plan = Plan(data=gpus, micro_batch=local, accumulation=accumulation)
                if low <= local <= high and app.initial_batch <= plan.global_batch <= app.max_batch:
                    gain = np.asarray(app.gains(plan.global_batch))
                    rate = np.maximum(rate, gain / app.iteration_s(gpu_type, shape, plan))
        with np.errstate(divide="ignore"):
            _known_s[key] = float((epochs / rate).sum())
    return _known_s[key]
