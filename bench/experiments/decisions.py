"""Measures one decision of synergy at the scale of a data centre: its cost and its gap to the optimum.

The page is docs/resources.md.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
from runner.experiment import Experiment, Results, measurement
from runner.tables import NONE, number, table
from yardstick import simpy_cpu_s

from synergy_core.scheduling.jobs.cluster import Cluster, NodeType
from synergy_core.scheduling.policies import get_policy
from synergy_core.units import DAY_S, GB, HOUR_S
from synergy_runs.inputs.workload import Workload, from_rows
from synergy_runs.traces.rows import TraceRows
from synergy_sim.assignment import by_class, mixed
from synergy_sim.execution import ExecutionModel
from synergy_sim.simulate import Simulation
from synergy_sim.truth import Truth

NODES = {
    "four GPU types": [(name, 1, 0.0, 0.0) for name in ("a100", "v100", "rtx2080ti", "t4")],
    "24 CPUs": [("v100", 4, 24.0, 500.0)],
    "24, 48 and 96 CPUs": [("v100", 2, 24.0, 500.0), ("v100", 1, 48.0, 1_000.0), ("v100", 1, 96.0, 1_000.0)],
}
"""GPU type, quarters of the nodes, CPUs and GB of each node; without CPUs, shares are ignored. Nodes have 8 GPUs."""
ROUND_S = 60.0
GPUS, CHANCES = (1, 2, 4, 8, 16), (0.7, 0.1, 0.1, 0.08, 0.02)
MEAN_LOG_S, SPREAD, MAX_S = np.log(12 * HOUR_S) - 1.8**2 / 2, 1.8, 30 * DAY_S
"""Run times on the requested GPUs: log-normal with a mean of 12 hours, cut at 30 days."""


def decisions(nodes: str, gpus: int, jobs: int, classes: tuple[float, ...], later_rounds: int) -> dict[str, Any]:
    """Measures each decision in units (CPU seconds ÷ those of the yardstick), active jobs and the gap, by round.

    All jobs arrive before the first round, when nothing is known of their models. In each later round a twentieth as
    many arrive, and some end. classes: image, language and speech jobs in %; () for the models of Pollux.
    """
    cluster, truth = Cluster(tuple(
        NodeType(f"{gpu_type}-{cpus:g}", gpu_type, quarters * gpus // 32, 8, cpus, memory_gb * GB)
        for gpu_type, quarters, cpus, memory_gb in NODES[nodes]
    )), Truth(None)  # fmt: skip
    workload = arrivals(jobs, later_rounds)
    if classes:
        workload = by_class(workload, cluster, truth, classes)
    else:
        workload = mixed(workload, cluster, truth, np.random.default_rng(1))
    unit_s = min(simpy_cpu_s() for _ in range(3))
    simulation = Simulation(workload, cluster, get_policy("synergy"), ExecutionModel(round_s=ROUND_S), truth)
    engine, decide, cpu_s = simulation.engine, simulation.scheduler.decide, []

    def timed(now_s: float) -> Any:
        began_s = time.process_time()
        decision = decide(now_s)
        cpu_s.append(time.process_time() - began_s)
        return decision

    simulation.scheduler.decide = timed
    engine.begin(simulation.driver)
    while len(engine.decisions) <= later_rounds:
        engine.env.step()
    found = engine.decisions.decisions()
    active = found.running + found.queued
    return {"units": [each / unit_s for each in cpu_s], "jobs": active.tolist(), "gaps": found.gap.tolist()}


def arrivals(jobs: int, later_rounds: int) -> Workload:
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
    return from_rows(rows, name="rounds", first_s=0.0)


ROWS = (
    ("four GPU types", 10_000, 2_000, ()),
    ("four GPU types", 65_536, 20_000, ()),
    ("24 CPUs", 2_048, 1_000, (20, 70, 10)),
    ("24 CPUs", 2_048, 3_000, (20, 70, 10)),
    ("24 CPUs", 2_048, 2_000, (33, 34, 33)),
    ("24, 48 and 96 CPUs", 2_048, 2_000, (50, 0, 50)),
    ("24 CPUs", 10_000, 10_000, (20, 70, 10)),
)
RUNS = {
    row: measurement(
        decisions,
        **{"policies": ["synergy"], "is_timed": True, "later_rounds": 8},
        **dict(zip(("nodes", "gpus", "jobs", "classes"), row, strict=True)),
    )
    for row in ROWS
}


def _tables(results: Results) -> dict[str, str]:
    rows = []
    for (nodes, gpus, _, classes), run in RUNS.items():
        first, *later = results[run]["units"]
        jobs, gap = np.median(results[run]["jobs"][1:]), max(results[run]["gaps"])
        units = (first, float(np.median(later)), max(later))
        words = [nodes, "/".join(map(str, classes)) or NONE]
        rows.append([*words, f"{gpus:,}", f"{jobs:,.0f}", *map(number, units), f"{100 * gap:.3f} %"])
    head = ("nodes", "jobs in %", "GPUs", "jobs", "first", "median of later ones", "greatest", "largest gap")
    return {"units": table(head, rows, 2)}


DECISIONS = Experiment(lambda: list(RUNS.values()), _tables)
