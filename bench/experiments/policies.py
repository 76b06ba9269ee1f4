"""Shows what parameters of las and tiresias do, and how themis depends on estimates: docs/policies.md."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from runner.experiment import Experiment, Measurement, Results, measurement
from runner.tables import number, table

from synergy_core.performance.goodput.calibration import spearman
from synergy_core.scheduling.jobs.cluster import Cluster, NodeType
from synergy_core.scheduling.jobs.views import Allocations, ClusterState, OracleClusterState
from synergy_core.scheduling.policies import Policy, get_policy
from synergy_core.units import DAY_S, HOUR_S, on_grid
from synergy_runs.generators import generate
from synergy_runs.inputs.workload import Workload, from_rows
from synergy_runs.outputs.metrics import job_table, mean, percentile
from synergy_sim.execution import Costs, ExecutionModel
from synergy_sim.simulate import simulate

CLUSTER = Cluster((NodeType("v100", "v100", 60, 8),))
Parameters = tuple[tuple[str, Any], ...]


@cache
def philly() -> Workload:
    """Draws four weeks with seed 0."""
    return from_rows(generate("philly", window_s=28 * DAY_S, seed=np.random.SeedSequence(0)), name="philly")


@cache
def estimates() -> dict[str, np.ndarray]:
    """Draws run times that users could have declared, by how they are drawn."""
    random = np.random.default_rng(0)
    true_s = philly().jobs["duration_s"]
    return {
        "true": true_s,
        "true × (1 + 4·U)": on_grid(true_s * (1 + 4 * random.random(len(true_s)))),
        "true × (1 + 100·U)": on_grid(true_s * (1 + 100 * random.random(len(true_s)))),
        "true × 10^N(0, 1)": on_grid(true_s * 10 ** random.normal(size=len(true_s))),
        "another job's": random.permutation(true_s),
        "an hour": np.full(len(true_s), HOUR_S),
    }


SPREAD = "true × (1 + 4·U)"


def replay(policy: str, parameters: Parameters = (), estimate: str = SPREAD) -> dict[str, Any]:
    """Simulates the four weeks under one policy or a variant of themis."""
    chosen = VARIANTS[policy]() if policy in VARIANTS else get_policy(policy).with_parameters(**dict(parameters))
    jobs = philly().with_columns(estimate_s=estimates()[estimate])
    done = simulate(jobs, CLUSTER, chosen, ExecutionModel(Costs(restart_s=30.0)))
    found = job_table(done)
    jct_h = found.jct_s / HOUR_S
    return {
        "mean_jct_h": mean(jct_h),
        "p50_jct_h": percentile(jct_h, 50),
        "p99_jct_h": percentile(jct_h, 99),
        "preemptions": int(found.preemptions.sum()),
        "decisions": len(done.decisions.time_s),
        "rank_correlation": spearman(estimates()[estimate], philly().jobs["duration_s"]),
    }


def _themis(*, contention: bool = True, waiting: bool = True) -> Policy:
    """Returns themis without one of its terms."""

    def allocate(state: ClusterState) -> Allocations:
        ran_s = state.attained_service_gpu_s / state.gpus
        left_s = np.maximum(state.estimate_s - ran_s, 0.0)
        crowd = np.maximum(1.0, state.gpus * (len(state) / state.cluster.gpus)) if contention else 1.0
        age_s = state.now_s - state.submit_time_s if waiting else 0.0
        rho = (age_s + left_s) / (np.maximum(state.estimate_s, 1.0) * crowd)
        return state.in_order(np.lexsort((state.job_id, state.submit_time_s, -rho)))

    return dataclasses.replace(get_policy("themis"), allocate=allocate)


def _shortest_service_first() -> Policy:
    """Returns srtf in themis's rounds, by remaining GPU-time rather than time."""

    def allocate(state: OracleClusterState) -> Allocations:
        return state.in_order(np.lexsort((state.job_id, state.remaining_s * state.gpus)))

    return dataclasses.replace(get_policy("themis"), allocate=allocate, view=OracleClusterState)


VARIANTS: dict[str, Callable[[], Policy]] = {
    "`srtf*` by remaining GPU-time, in rounds": _shortest_service_first,
    "`themis` without contention": lambda: _themis(contention=False),
    "`themis` without time since submission": lambda: _themis(waiting=False),
}
COLUMNS = ("mean JCT, h", "median, h", "p99, h", "preemptions", "decisions")


def _run(policy: str, parameters: Parameters = (), estimate: str = SPREAD) -> Measurement:
    known = (policy,) if policy not in VARIANTS else ()
    return measurement(replay, policies=known, policy=policy, parameters=parameters, estimate=estimate)


def _table(labels: tuple[str, ...], rows: dict[tuple[str, ...], Measurement], results: Results) -> str:
    """Makes a table with a row of figures behind the labels of each run."""
    cells = []
    for words, run in rows.items():
        found = results[run]
        jct = [number(found["mean_jct_h"]), number(found["p50_jct_h"]), number(found["p99_jct_h"], 1)]
        cells.append([*words, *jct, f"{found['preemptions']:,}", f"{found['decisions']:,}"])
    return table((*labels, *COLUMNS), cells, len(labels))


LAS_ROWS = {
    (f"`las`, {quantum_s:,.0f} s{' (default)' * (quantum_s == 3_600.0)}",): _run("las", (("quantum_s", quantum_s),))
    for quantum_s in (360.0, 1_800.0, 3_600.0, 14_400.0)
} | {("`mlfq`",): _run("mlfq")}
LAS = Experiment(lambda: list(LAS_ROWS.values()), lambda results: {"quanta": _table(("policy",), LAS_ROWS, results)})

TIRESIAS_ROWS = {
    (", ".join(f"{each:,.0f}" for each in limits), f"{knob:g}" if knob else "0 (off)"): _run(
        "tiresias", (("queue_limits_gpu_s", limits), ("promote_knob", knob))
    )
    for limits, knob in (
        ((3_250.0, 7_200.0), 0.0),
        ((3_250.0, 57_600.0), 0.0),
        ((57_600.0,), 0.0),
        ((3_250.0, 7_200.0), 1.0),
        ((3_250.0, 7_200.0), 8.0),
    )
}
TIRESIAS = Experiment(
    lambda: list(TIRESIAS_ROWS.values()),
    lambda results: {"limits": _table(("limits, GPU-s", "`promote_knob`"), TIRESIAS_ROWS, results)},
)

OTHER_ESTIMATES = ("true", "true × (1 + 100·U)", "true × 10^N(0, 1)", "another job's", "an hour")
THEMIS_ROWS = {
    ("`srtf*`", "not read"): _run("srtf"),
    **{(name, SPREAD if "themis" in name else "not read"): _run(name) for name in VARIANTS},
    **{("`themis`", estimate): _run("themis", estimate=estimate) for estimate in (SPREAD, *OTHER_ESTIMATES)},
    **{(f"`{name}`", "not read"): _run(name) for name in ("las", "backfill")},
}


def _themis_tables(results: Results) -> dict[str, str]:
    rows = {
        (name, estimate, number(results[run]["rank_correlation"]) if "themis" in name else ""): run
        for (name, estimate), run in THEMIS_ROWS.items()
    }
    return {"estimates": _table(("policy", "estimates", "rank correlation"), rows, results)}


THEMIS = Experiment(lambda: list(THEMIS_ROWS.values()), _themis_tables, policies=("themis",))
