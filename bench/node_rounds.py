"""Rounds for bench/allocator.py in which jobs take CPUs and memory beside GPUs, and what follows on a round.

Jobs of three classes. Image: throughput grows as CPUs^0.75 from 3 CPUs per GPU up to 4, 6, 9 or 12; the last with
125 GB, the others with 62.5 GB. Speech: half gain up to 2.5 times with 6 CPUs and 187.5 GB, half nothing beyond 3 CPUs.
Language: 1 CPU and 20 GB. Up to 5 levels of share each, on 1 to 16 GPUs; speed saturates with GPUs, types are up to 3ˣ
as fast; utility is a weight (log-normal) times the root of relative speed. jitter: each job's share is off by up to
that part.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from synergy_core.allocator.nodes import NodeGroups, NodeProblem, NodeSolution, Pieces
from synergy_core.units import GB

SIZES = np.array([1, 2, 4, 8, 16])
LEVELS = 5
SPEED = 0.75
IMAGE = ((1, 2, 3, 4), (1, 2, 3, 4, 6), (1, 3, 5, 6, 9), (1, 3, 6, 9, 12))
SPEECH = (
    ((1, 62.5, 1 / 3), (3, 62.5, 1.0), (6, 62.5, 1.5), (6, 125.0, 2.0), (6, 187.5, 2.5)),
    ((1, 62.5, 1 / 3), (2, 62.5, 2 / 3), (3, 62.5, 1.0)),
)
Mix = tuple[float, float, float]
Shape = tuple[int, int, float, float]
"""Nodes, GPUs of each, CPUs, GB."""


def image_levels(cpus: tuple[int, ...]) -> list[tuple[float, float, float]]:
    """CPUs, GB and relative throughput of each level."""
    return [(each, 125.0 if each == 12 else 62.5, min(each / 3, (each / 3) ** SPEED)) for each in cpus]


@dataclass(frozen=True, slots=True)
class Jobs:
    """Jobs as drawn: utility, cpus, memory_bytes (J, C)."""

    utility: np.ndarray
    cpus: np.ndarray
    memory_bytes: np.ndarray


def groups_of(shapes: tuple[Shape, ...]) -> NodeGroups:
    """Node groups, each of a GPU type of its own."""
    nodes, gpus, cpus, memory = (np.array(each) for each in zip(*shapes, strict=True))
    return NodeGroups(np.arange(len(shapes)), nodes, gpus, cpus.astype(float), memory * GB)


def jobs_of(nodes: NodeGroups, jobs: int, mix: Mix, jitter: float, seed: int) -> Jobs:
    """Jobs drawn; rows whose share no node has are −inf."""
    rng = np.random.default_rng(seed)
    types = len(nodes.nodes)
    gpus, kind = rows_of(types)
    share = np.zeros((3, jobs, LEVELS))
    share[2] = -np.inf
    for job, which in enumerate(rng.choice(3, jobs, p=mix)):
        if which == 0:
            levels = image_levels(IMAGE[rng.integers(len(IMAGE))])
        else:
            levels = [(1.0, 20.0, 1.0)] if which == 1 else list(SPEECH[rng.integers(len(SPEECH))])
        share[:, job, : len(levels)] = np.array(levels).T
        if which != 1:
            share[:2, job] *= rng.uniform(1 - jitter, 1 + jitter)
    wide = np.tile(share, (1, 1, types * len(SIZES)))
    speed = np.linspace(1, 3, types)[kind] ** rng.uniform(0.3, 1.2, (jobs, 1))
    goodput = speed * gpus / (1 + gpus / 2.0 ** rng.uniform(0, 5, (jobs, 1)))
    weight = rng.lognormal(0, 1, (jobs, 1))
    on_node = np.minimum(gpus, nodes.gpus[kind])
    fits = (wide[0] * on_node <= nodes.cpus[kind]) & (wide[1] * GB * on_node <= nodes.memory_bytes[kind])
    fits &= (wide[2] > -np.inf) & (gpus <= (nodes.nodes * nodes.gpus)[kind])
    relative = np.where(fits, goodput * wide[2], 0.0)
    utility = weight * np.sqrt(relative / np.maximum(relative.max(axis=1, keepdims=True), 1e-12))
    return Jobs(np.where(fits, utility, -np.inf), wide[0], wide[1] * GB)


def rows_of(types: int) -> tuple[np.ndarray, np.ndarray]:
    """(C,) GPUs and GPU type."""
    return np.tile(np.repeat(SIZES, LEVELS), types), np.repeat(np.arange(types), len(SIZES) * LEVELS)


def first_round(nodes: NodeGroups, jobs: Jobs) -> NodeProblem:
    """Nobody runs yet."""
    gpus, kind = rows_of(len(nodes.nodes))
    return NodeProblem(jobs.utility, gpus, kind, jobs.cpus, jobs.memory_bytes, nodes)


def next_round(
    problem: NodeProblem, found: NodeSolution, jobs: Jobs, other: Jobs, restart: np.ndarray, job: int
) -> tuple[NodeProblem, Jobs]:
    """The round after: one running job has ended and another came for it; the others hold what they got.

    restart: (J,) part of its utility that a job keeps where it starts anew: in another row, or on other nodes.
    """
    fresh = [each.copy() for each in (jobs.utility, jobs.cpus, jobs.memory_bytes)]
    for into, source in zip(fresh, (other.utility, other.cpus, other.memory_bytes), strict=True):
        into[job] = source[job]
    drawn = Jobs(*fresh)
    left = found.placed.job != job
    held = Pieces(found.placed.job[left], found.placed.node[left], found.placed.gpus[left])
    count = np.bincount(held.job, held.gpus, len(restart))
    kind = np.full(len(restart), -1)
    kind[held.job] = problem.nodes.gpu_type[problem.nodes.group_of[held.node]]
    same = (problem.gpus == count[:, None]) & (problem.gpu_type == kind[:, None])
    kept = np.where(same | (count == 0)[:, None], 1.0, restart[:, None])
    utility = np.where(drawn.utility > -np.inf, np.maximum(drawn.utility, 0.0) * kept, -np.inf)
    cost = (1.0 - restart) * np.max(utility, axis=1, initial=0.0, where=same)
    more = {"cpus": drawn.cpus, "memory_bytes": drawn.memory_bytes, "held": held, "move_cost": cost}
    return replace(problem, utility=utility, **more), drawn
