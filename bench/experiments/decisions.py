"""What one decision of synergy costs at the scale of a data centre, and how far from the optimum it can be:
docs/resources.md."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
from runner.experiment import Experiment, Results, measurement
from runner.tables import number, table
from yardstick import simpy_cpu_s

from synergy_core.cluster import Cluster, NodeType
from synergy_core.policies import get_policy
from synergy_core.units import DAY_S, HOUR_S
from synergy_runs.traces.rows import TraceRows
from synergy_runs.workload import Workload, from_rows
from synergy_sim.assignment import mixed
from synergy_sim.execution import ExecutionModel
from synergy_sim.simulate import Simulation
from synergy_sim.truth import Truth

GPU_TYPES = ("a100", "v100", "rtx2080ti", "t4")
NODE_GPUS = 8
ROUND_S = 60.0
GPUS, CHANCES = (1, 2, 4, 8, 16), (0.7, 0.1, 0.1, 0.08, 0.02)
MEAN_LOG_S, SPREAD, MAX_S = np.log(12 * HOUR_S) - 1.8**2 / 2, 1.8, 30 * DAY_S
"""Run times on the requested GPUs: log-normal with a mean of 12 hours, cut at 30 days."""


def decisions(gpus: int, jobs: int, later_rounds: int) -> dict[str, Any]:
    """Units (CPU seconds ÷ those of the yardstick) of each decision, active jobs and the gap, by round.

    All jobs arrive before the first round, when nothing is known of their models. In each later round a twentieth as
    many arrive, and some end.
    """
    nodes = gpus // NODE_GPUS // len(GPU_TYPES)
    cluster, truth = Cluster(tuple(NodeType(name, name, nodes, NODE_GPUS) for name in GPU_TYPES)), Truth(None)
    workload = arrivals(jobs, later_rounds, cluster, truth)
    unit_s = min(simpy_cpu_s() for _ in range(3))
    simulation = Simulation(workload, cluster, get_policy("synergy"), ExecutionModel(round_s=ROUND_S), truth)
    engine, decide, cpu_s = simulation.engine, simulation.scheduler.decide, []

    def timed(now_s: float) -> Any:
        began_s = time.process_time()
        decision = decide(now_s)
        cpu_s.append(time.process_time() - began_s)
        return decision

    simulation.scheduler.decide = timed  # type: ignore[method-assign]
    engine.begin(simulation.driver)
    while len(engine.decisions) <= later_rounds:
        engine.env.step()
    found = engine.decisions.decisions()
    active = found.running + found.queued
    return {"units": [each / unit_s for each in cpu_s], "jobs": active.tolist(), "gaps": found.gap.tolist()}


def arrivals(jobs: int, later_rounds: int, cluster: Cluster, truth: Truth) -> Workload:
    """That many jobs at once, and a twentieth as many in the middle of each later round."""
    random = np.random.default_rng(0)
    later_s = ROUND_S * (np.repeat(np.arange(later_rounds), jobs // 20) + 0.5)
    submit_s = np.concatenate((np.zeros(jobs), later_s))
    count = len(submit_s)
    rows = TraceRows(Path("generated"), "bench/experiments/decisions.py")
    rows.add(
        np.zeros(count),
        submit_s=submit_s,
        duration_s=np.minimum(random.lognormal(MEAN_LOG_S, SPREAD, count), MAX_S),
        gpus=random.choice(GPUS, count, p=CHANCES),
        job_name=[str(job) for job in range(count)],
    )
    return mixed(from_rows(rows, name="rounds", first_s=0.0), cluster, truth, random)


RUNS = {
    gpus: measurement(decisions, policies=["synergy"], is_timed=True, gpus=gpus, jobs=jobs, later_rounds=8)
    for gpus, jobs in ((10_000, 2_000), (65_536, 20_000))
}


def _tables(results: Results) -> dict[str, str]:
    rows = []
    for gpus, run in RUNS.items():
        first, *later = results[run]["units"]
        jobs, gap = np.median(results[run]["jobs"][1:]), max(results[run]["gaps"])
        units = (first, float(np.median(later)), max(later))
        rows.append([f"{gpus:,}", f"{jobs:,.0f}", *map(number, units), f"{100 * gap:.3f} %"])
    return {"units": table(("GPUs", "jobs", "first", "median of later ones", "greatest", "largest gap"), rows, 0)}


DECISIONS = Experiment(lambda: list(RUNS.values()), _tables)
