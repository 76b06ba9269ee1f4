"""How fast jobs would train by the share that goes with their GPUs, at a few levels of it per configuration."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from synergy_core.arrays import Floats, Ints
from synergy_core.cluster import Cluster, NodeType
from synergy_core.goodput.pipeline import InputPipeline
from synergy_core.jobs.configurations import Configurations
from synergy_core.jobs.fitted import SynergyTask

TARGETS = (1.0, 0.85, 0.7, 0.5, 0.3)
"""Levels: the cheapest share with which a job is at least so fast, of what it can be at best there."""
CPU_STEPS = (0.05, 0.1, 0.2, 1 / 3, 0.5, 2 / 3, 5 / 6, 1.0, 7 / 6, 4 / 3, 1.5, 5 / 3, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0)
MEMORY_STEPS = (0.02, 0.1, 1 / 3, 2 / 3, 1.0, 1.5, 2.0, 3.0, 4.0)
"""Of the proportional share: what is tried."""
BOTH = 0.1
"""A share costs the larger of its two parts of the proportional one, and so much of their sum."""


@dataclass(frozen=True, slots=True)
class ShareLevels:
    """L levels per job and configuration, all (jobs, configurations, L).

    cpus, memory_bytes: of each GPU. speed: in (0, 1], what is left of the goodput that its GPUs would give.
    """

    cpus: Floats
    memory_bytes: Floats
    speed: Floats


def share_levels(
    cluster: Cluster, tasks: tuple[SynergyTask, ...], rows: Configurations, samples_per_s: Floats
) -> ShareLevels:
    """The levels of every job in every configuration.

    samples_per_s: (jobs, configurations), as fast as its GPUs are; 0 where nobody knows. A job whose pipeline nobody
    knows, or whose pace, has its proportional share at full speed on every level.
    """
    shape = (len(tasks), len(rows), len(TARGETS))
    own = cluster.proportional
    cpus = np.broadcast_to(np.array([own[kind].cpus for kind in rows.gpu_type])[:, None], shape).copy()
    memory = np.broadcast_to(np.array([own[kind].memory_bytes for kind in rows.gpu_type])[:, None], shape).copy()
    speed = np.ones(shape)
    alike: dict[int, list[int]] = {}
    for at, task in enumerate(tasks):
        if task.spec.pipeline is not None:
            alike.setdefault(id(task.spec.pipeline), []).append(at)
    for members in alike.values():
        jobs = np.array(members)
        pipeline = tasks[members[0]].spec.pipeline
        assert pipeline is not None
        for row in range(len(rows)):
            known = jobs[samples_per_s[jobs, row] > 0]
            if len(known):
                tried = _tried(cluster, rows, row, pipeline)
                gpu_s = rows.gpus[row] / samples_per_s[known, row]
                chosen, kept = _chosen(gpu_s, *tried)
                cpus[known, row], memory[known, row], speed[known, row] = tried[0][chosen], tried[1][chosen], kept
    return ShareLevels(cpus, memory, speed)


def _tried(
    cluster: Cluster, rows: Configurations, row: int, pipeline: InputPipeline
) -> tuple[Floats, Floats, Floats, Floats]:
    """CPUs, memory, cost and seconds per sample of every share that is tried in a configuration, (K,) each."""
    gpu_type, gpus = cluster.gpu_types[rows.gpu_type[row]], int(rows.gpus[row])
    own = cluster.proportional[rows.gpu_type[row]]
    node = _largest(cluster, gpu_type)
    most = min(gpus, node.gpus_per_node)
    fewest = gpus % node.gpus_per_node or most
    cpus, memory = (
        each.ravel()
        for each in np.meshgrid(
            np.minimum(own.cpus * np.array(CPU_STEPS), node.cpus / most),
            np.minimum(own.memory_bytes * np.array(MEMORY_STEPS), node.memory_bytes / most),
        )
    )
    parts = np.stack((cpus / own.cpus, memory / own.memory_bytes))
    storage = node.storage_bytes_per_s / node.gpus_per_node
    seconds = pipeline.sample_s(cpus, memory, storage_bytes_per_s=storage, node_gpus=min(fewest, most))
    return cpus, memory, parts.max(axis=0) + BOTH * parts.sum(axis=0), seconds


def _largest(cluster: Cluster, gpu_type: str) -> NodeType:
    """The node of that type with most GPUs; of equals, the one with least beside them."""
    nodes = [each for each in cluster.node_types if each.gpu_type == gpu_type]
    return min(nodes, key=lambda each: (-each.gpus_per_node, each.cpus, each.memory_bytes))


def _chosen(gpu_s: Floats, cpus: Floats, memory: Floats, cost: Floats, sample_s: Floats) -> tuple[Ints, Floats]:
    """(jobs, L): for each target the cheapest share that reaches it, and the speed with that.

    gpu_s: (jobs,) seconds per sample of one GPU.
    """
    order = np.argsort(cost, kind="stable")
    speed = gpu_s[:, None] / np.maximum(gpu_s[:, None], sample_s[order])
    best = speed.max(axis=1, keepdims=True)
    enough = speed[:, None, :] >= np.array(TARGETS)[None, :, None] * best[:, None, :] * (1.0 - 1e-9)
    first = enough.argmax(axis=2)
    return order[first], np.take_along_axis(speed, first, axis=1)
