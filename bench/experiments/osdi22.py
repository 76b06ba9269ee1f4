"""Resource-sensitive Synergy (OSDI 2022): its published figure; mechanisms by load, mix, node and order; synergy with
CPUs and memory on the same jobs: docs/accuracy.md."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
from runner.experiment import Experiment, Results, Simulation, Tables, compose, data_file, measurement, simulations
from runner.tables import NONE, Ratios, below, mean_half, met, number, paired, table, with_half

from synergy_core.units import HOUR_S
from synergy_runs.generators.by_class import CLASSES

EXPERIMENT = "experiment=synergy_osdi22"
READS = tuple(f"synergy_core/performance/catalog/models/{name}.yaml" for _, models in CLASSES for name in models)
SEEDS = (0, 1, 2)
PUBLISHED_SEED = 42
PUBLISHED_H = (21.8766, 156.933, 170.612)
"""Mean, p99 and p99.9 of the JCT of jobs 4000-4999 under fifo+tune: README of the published simulator."""

PROPORTIONAL, GREEDY, TUNE = "fifo+proportional", "fifo+greedy", "fifo+tune"
DEFAULT = "fifo+tune(sticky=true,hand_out=true)"
"""tune with its default parameters; the experiment sets the published ones."""
OPT = "fifo+opt(sticky=false)"

WHOLE = ("trace.jobs=5500", "trace.measured_jobs=4000-4999")
QUICK = ("trace.jobs=2500", "trace.measured_jobs=1000-1999")
"""Fewer jobs, for loads at which the queue drains and for comparisons between cases."""
AT_8 = (*QUICK, "trace.jobs_per_hour=8")
LOADS = {5.0: QUICK, 8.0: WHOLE, 8.5: WHOLE, 9.0: WHOLE}
"""Workload size by load, in jobs per hour."""
MIXES = {
    "33,33,33, 8": (*AT_8, "trace.class_mix=[33,33,33]"),
    "50,0,50, 8": (*AT_8, "trace.class_mix=[50,0,50]"),
    "20,70,10, Philly's GPUs, 6": (*QUICK, "trace.jobs_per_hour=6", "trace.job_gpus=philly"),
}
NODES = {24: AT_8, **{cpus: (*AT_8, f"cluster.cpus_per_node={cpus}") for cpus in (32, 48)}}
ORDERS = ("fifo", "srtf", "las", "ftf")


def _runs(policy: str, overrides: Sequence[str], seeds: Sequence[int] = SEEDS) -> list[Simulation]:
    return simulations((EXPERIMENT, *overrides), [policy], seeds)


def _published(policy: str) -> Simulation:
    """Simulates the policy on the published jobs."""
    return _runs(policy, WHOLE, (PUBLISHED_SEED,))[0]


def _at(load: float) -> tuple[str, ...]:
    return (*LOADS[load], f"trace.jobs_per_hour={load:g}")


def capacity() -> dict[str, float]:
    """Jobs an hour that the cluster can serve in the long run, by the law of run times and the published profiles."""
    trace = compose([EXPERIMENT])[0].trace
    share, first, last = np.array(trace.run_times).T  # log-uniform between these powers of ten of minutes
    run_s = float((share * 60 * (10**last - 10**first) / (last - first)).sum() / np.log(10))
    with data_file("resource_sensitivity", "models.csv").open(newline="", encoding="utf-8") as stream:
        fastest = {row["model"]: float(row["best_speedup"]) for row in csv.DictReader(stream)}
    classes = zip(trace.class_mix, CLASSES, strict=True)
    saved = sum(share / 100 * np.mean([1 / fastest[each] for each in models]) for share, (_, models) in classes)
    served = trace.nodes * trace.gpus_per_node * HOUR_S / run_s
    return {"run_h": run_s / HOUR_S, "proportional": served, "gain": float(1 / saved), "best": float(served / saved)}


CAPACITY = measurement(capacity)


def _tasks() -> list[Any]:
    runs = [_published(each) for each in (TUNE, PROPORTIONAL, GREEDY, DEFAULT, OPT)]
    cases = [*product((PROPORTIONAL, TUNE), map(_at, LOADS))]
    cases += product((PROPORTIONAL, GREEDY, TUNE), MIXES.values())
    cases += product((PROPORTIONAL, TUNE), NODES.values())
    cases += [(f"{order}+{name}", AT_8) for order in ORDERS for name in ("proportional", "tune")]
    runs += [run for case in cases for run in _runs(*case)]
    return [CAPACITY, *dict.fromkeys(runs)]


def _tables(results: Results) -> Tables:
    found = results[CAPACITY]
    loads = [results[run]["offered_load_fraction"] for run in _runs(TUNE, _at(9.0))]
    drawn = results[_published(PROPORTIONAL)]["mean_jct_s"] / results[_published(TUNE)]["mean_jct_s"]
    return {
        "published": _published_table(results),
        "run-hours": number(found["run_h"], 1),
        "served": number(found["proportional"]),
        "best": number(found["best"]),
        "gain": number(found["gain"], 3),
        "offered": f"{min(loads):.3f} to {max(loads):.3f}",
        "drawn": number(drawn),
        "loads": _by_load(results),
        "mixes": _mixes(results),
        "nodes": _nodes(results),
        "orders": _orders(results),
    }


def _published_table(results: Results) -> str:
    rows = []
    for policy in (TUNE, PROPORTIONAL, GREEDY, DEFAULT, OPT):
        hours = [results[_published(policy)][f"{name}_jct_s"] / HOUR_S for name in ("mean", "p99", "p999")]
        row = [policy, *(f"{each:.4f}" for each in hours), NONE, NONE]
        if policy == TUNE:
            off = max(abs(ours / theirs - 1) for ours, theirs in zip(hours, PUBLISHED_H, strict=True))
            row[-2:] = [" / ".join(map(str, PUBLISHED_H)), f"{met(off <= 0.001)} (off by {off:.4%} at most)"]
        rows.append(row)
    return table(("", "mean JCT, h", "p99", "p99.9", "published", "goal: within 0.1 %"), rows)


def _ratio(results: Results, top: str, bottom: str, more: Sequence[str]) -> Ratios:
    return paired(results, [_runs(top, more)], [_runs(bottom, more)])


def _mean(results: Results, policy: str, more: Sequence[str]) -> str:
    return with_half(*mean_half([results[run]["mean_jct_s"] / HOUR_S for run in _runs(policy, more)]), 2)


def _by_load(results: Results) -> str:
    rows = []
    for load in LOADS:
        even = _ratio(results, PROPORTIONAL, TUNE, _at(load))
        goal = {5.0: 1.15, 8.0: 2.1}.get(load)
        if goal is not None:
            outside = "inside" if abs(even.mean - goal) <= even.mean_half else "**outside**"
            said = f"{goal}: {outside} the interval"
        else:
            said = f"above 3: {met(even.mean > 3)}" if load == 8.5 else NONE
        rows.append([f"{load:g}", _mean(results, TUNE, _at(load)), even.said(), said])
    return table(("jobs an hour", "tune, h", "proportional ÷ tune", "goal"), rows)


def _mixes(results: Results) -> str:
    rows = []
    for name, more in MIXES.items():
        ratios = [_ratio(results, each, TUNE, more).said() for each in (PROPORTIONAL, GREEDY)]
        rows.append([name, _mean(results, TUNE, more), *ratios])
    return table(("mix, jobs an hour", "tune, h", "proportional ÷ tune", "greedy ÷ tune"), rows)


def _nodes(results: Results) -> str:
    rows = []
    for cpus, more in NODES.items():
        hours = [_mean(results, each, more) for each in (TUNE, PROPORTIONAL)]
        rows.append([f"{cpus} ({cpus / 8:g})", *hours, _ratio(results, PROPORTIONAL, TUNE, more).said()])
    return table(("CPUs a node (a GPU)", "tune, h", "proportional, h", "proportional ÷ tune"), rows)


def _orders(results: Results) -> str:
    rows = []
    for order in ORDERS:
        tune = f"{order}+tune"
        even = _ratio(results, f"{order}+proportional", tune, AT_8).said()
        to_fifo = "1" if order == "fifo" else _ratio(results, tune, TUNE, AT_8).said()
        rows.append([order + "*" * (order in ("srtf", "ftf")), _mean(results, tune, AT_8), even, to_fifo])
    return table(("order", "with tune, h", "proportional ÷ tune", "with tune ÷ fifo+tune"), rows)


OSDI22 = Experiment(_tasks, _tables, needs=("data",), reads=READS)

# synergy with CPUs and memory among its configurations

FIXED = "truth.fixed_gpus={" + ",".join(f"{model}: 1" for _, models in CLASSES for model in models) + "}"
FEW = ("trace.jobs=1000", "trace.measured_jobs=500-799", "trace.jobs_per_hour=8", FIXED)
"""synergy takes longer to decide."""
SYNERGY, EVEN_SYNERGY = "synergy", "synergy(shares=false)"


def _shares_tables(results: Results) -> Tables:
    ours, even = (_ratio(results, policy, DEFAULT, FEW) for policy in (SYNERGY, EVEN_SYNERGY))
    rows = [[SYNERGY, ours.said(), f"at most 1: {met(below(ours.mean, 1.0))}"], [EVEN_SYNERGY, even.said(), NONE]]
    return {"ratios": table(("policy", "÷ tune", "goal"), rows)}


SHARES = Experiment(
    lambda: [run for policy in (DEFAULT, SYNERGY, EVEN_SYNERGY) for run in _runs(policy, FEW)],
    _shares_tables,
    needs=("data",),
    reads=READS,
)
