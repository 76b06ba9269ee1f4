"""What `allocate` takes for a round with CPUs and memory, and how far from the optimum it can be: docs/resources.md."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
from runner.experiment import Experiment, Measurement, Results, measurement
from runner.tables import number, table
from yardstick import simpy_cpu_s

from synergy_core.allocator.nodes import NodeGroups, NodeProblem, NodeSolution, Pieces, allocate
from synergy_core.units import GB, Floats

NODES = {
    "alike": ((256, 8, 24.0, 500.0),),
    "mixed": ((96, 8, 24.0, 500.0), (64, 8, 48.0, 1_000.0), (64, 8, 96.0, 1_000.0), (64, 4, 16.0, 250.0)),
}
"""Nodes, GPUs of each, CPUs and GB, by GPU type."""
GPUS = np.array([1, 2, 4, 8, 16])
LEVELS = 5
Share = tuple[float, float, float]
"""CPUs and GB per GPU, and the relative speed with them."""


def _image(cpus: tuple[int, ...]) -> list[Share]:
    """Speed grows as CPUs^0.75 beyond 3 CPUs per GPU; the last level also needs more memory."""
    return [(each, 125.0 if each == 12 else 62.5, min(each / 3, (each / 3) ** 0.75)) for each in cpus]


SHARES: tuple[list[list[Share]], ...] = (
    [_image(cpus) for cpus in ((1, 2, 3, 4), (1, 2, 3, 4, 6), (1, 3, 5, 6, 9), (1, 3, 6, 9, 12))],
    [[(1, 20.0, 1.0)]],
    [
        [(1, 62.5, 1 / 3), (3, 62.5, 1.0), (6, 62.5, 1.5), (6, 125.0, 2.0), (6, 187.5, 2.5)],
        [(1, 62.5, 1 / 3), (2, 62.5, 2 / 3), (3, 62.5, 1.0)],
    ],
)
"""Levels of share of image, language and speech jobs. A class has several kinds, which are equally likely."""


def drawn(nodes: NodeGroups, jobs: int, mix: tuple[float, ...], random: np.random.Generator) -> Floats:
    """Utility, CPUs and bytes per GPU (3, jobs, columns); the utility of a share that no node has is −inf.

    Speed saturates with GPUs, and the last GPU type is up to 3 times as fast as the first. Utility is a log-normal
    weight times the root of the speed relative to the job's best.
    """
    kinds = [levels for each in SHARES for levels in each]
    chances = [part / len(each) for part, each in zip(mix, SHARES, strict=True) for _ in each]
    share = np.zeros((len(kinds), 3, LEVELS))
    share[:, 2] = -np.inf
    for kind, levels in enumerate(kinds):
        share[kind, :, : len(levels)] = np.array(levels).T
    gpus, gpu_type = columns_of(nodes)
    cpus, memory_gb, speed = np.tile(
        share[random.choice(len(kinds), jobs, p=chances)].swapaxes(0, 1), (1, 1, len(gpus) // LEVELS)
    )
    on_node = np.minimum(gpus, nodes.gpus[gpu_type])
    fits = (cpus * on_node <= nodes.cpus[gpu_type]) & (memory_gb * GB * on_node <= nodes.memory_bytes[gpu_type])
    speed = speed * np.linspace(1, 3, len(nodes.nodes))[gpu_type] ** random.uniform(0.3, 1.2, (jobs, 1))
    speed = speed * gpus / (1 + gpus / 2.0 ** random.uniform(0, 5, (jobs, 1)))
    speed = np.where(fits & (speed > 0), speed, 0.0)
    utility = random.lognormal(0, 1, (jobs, 1)) * np.sqrt(speed / speed.max(axis=1, keepdims=True))
    return np.stack((np.where(speed > 0, utility, -np.inf), cpus, memory_gb * GB))


def columns_of(nodes: NodeGroups) -> tuple[Any, Any]:
    """GPUs and GPU type of each column."""
    types = len(nodes.nodes)
    return np.tile(np.repeat(GPUS, LEVELS), types), np.repeat(np.arange(types), len(GPUS) * LEVELS)


def allocations(
    nodes: str, scale: int, jobs: int, mix: tuple[float, ...], later_rounds: int, seed: int
) -> dict[str, Any]:
    """Units (CPU seconds ÷ those of the yardstick), gap, moved and running jobs of a first round and later ones.

    In each later round a running job has ended and another came, and starting anew costs a job 1–40 % of its utility.
    """
    random = np.random.default_rng(seed)
    count, gpus, cpus, memory_gb = (np.array(each) for each in zip(*NODES[nodes], strict=True))
    groups = NodeGroups(np.arange(len(count)), count * scale, gpus, cpus, memory_gb * GB)
    present, coming = (drawn(groups, jobs, mix, random) for _ in range(2))
    kept = random.uniform(0.6, 0.99, (jobs, 1))
    problem = NodeProblem(present[0], *columns_of(groups), *present[1:], groups)
    unit_s = min(simpy_cpu_s() for _ in range(3))
    found, rounds = None, []
    for _ in range(1 + later_rounds):
        if found is not None:
            ended = int(random.choice(np.nonzero(found.choice >= 0)[0]))
            present[:, ended] = coming[:, ended]
            problem = following(problem, found, present, kept, ended)
        began_s = time.process_time()
        found = allocate(problem, prices=None if found is None else found.prices)
        took_s = time.process_time() - began_s
        rounds.append((took_s / unit_s, found.gap, int(found.moved.sum()), int((found.choice >= 0).sum())))
    units, gaps, moved, running = (list(each) for each in zip(*rounds, strict=True))
    return {"gpus": int(groups.nodes @ gpus), "units": units, "gaps": gaps, "moved": moved, "running": running}


def following(problem: NodeProblem, found: NodeSolution, present: Floats, kept: Floats, ended: int) -> NodeProblem:
    """The next round: all jobs but one hold what they got. kept: part of its utility that a job that starts keeps."""
    left = found.placed.job != ended
    held = Pieces(found.placed.job[left], found.placed.node[left], found.placed.gpus[left])
    count = np.bincount(held.job, held.gpus, len(kept))[:, None]
    gpu_type = np.full((len(kept), 1), -1)
    gpu_type[held.job, 0] = problem.nodes.gpu_type[problem.nodes.group_of[held.node]]
    same = (problem.gpus == count) & (problem.gpu_type == gpu_type)
    utility = np.where(same | (count == 0), present[0], present[0] * kept)
    move_cost = (1 - kept[:, 0]) * np.max(utility, axis=1, initial=0.0, where=same)
    return replace(problem, utility=utility, cpus=present[1], memory_bytes=present[2], held=held, move_cost=move_cost)


MOSTLY_LANGUAGE, THIRDS, NO_LANGUAGE = (0.2, 0.7, 0.1), (0.33, 0.34, 0.33), (0.5, 0.0, 0.5)
ROWS = (
    ("alike", 1, 1_024, MOSTLY_LANGUAGE),
    ("alike", 1, 3_072, MOSTLY_LANGUAGE),
    ("mixed", 1, 3_072, MOSTLY_LANGUAGE),
    ("alike", 1, 2_048, THIRDS),
    ("mixed", 1, 2_048, NO_LANGUAGE),
    ("alike", 5, 15_000, MOSTLY_LANGUAGE),
    ("mixed", 5, 15_000, MOSTLY_LANGUAGE),
    ("alike", 5, 10_000, THIRDS),
)
SEEDS = (0, 1)


def _run(row: tuple[str, int, int, tuple[float, ...]], seed: int) -> Measurement:
    nodes, scale, jobs, mix = row
    return measurement(
        allocations, is_timed=True, nodes=nodes, scale=scale, jobs=jobs, mix=mix, later_rounds=3, seed=seed
    )


def _tables(results: Results) -> dict[str, str]:
    rows = []
    for row in ROWS:
        runs = [results[_run(row, seed)] for seed in SEEDS]
        first, later = max(run["units"][0] for run in runs), max(max(run["units"][1:]) for run in runs)
        gap = max(max(run["gaps"]) for run in runs)
        moved = np.mean([run["moved"][1:] for run in runs])
        running = np.mean([run["running"] for run in runs])
        mix = "/".join(f"{100 * part:.0f}" for part in row[3])
        numbers = [number(first), number(later), f"{100 * gap:.2f} %", f"{moved:,.1f} of {running:,.0f}"]
        rows.append([row[0], mix, f"{runs[0]['gpus']:,}", f"{row[2]:,}", *numbers])
    return {"nodes": table(("nodes", "jobs in %", "GPUs", "jobs", "first", "later", "largest gap", "moved"), rows, 2)}


ALLOCATOR = Experiment(lambda: [_run(row, seed) for row in ROWS for seed in SEEDS], _tables)
