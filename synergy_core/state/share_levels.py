"""How fast jobs would train by the share that goes with their GPUs, at a few levels of it per configuration."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from synergy_core.arrays import Floats, Ints
from synergy_core.cluster import Cluster, NodeType, Share
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
    alike: dict[InputPipeline, list[int]] = {}
    for at, task in enumerate(tasks):
        pipeline = task.pipeline
        if pipeline is not None:
            alike.setdefault(pipeline, []).append(at)
    nodes = [_largest(cluster, gpu_type) for gpu_type in cluster.gpu_types]
    for pipeline, members in alike.items():
        jobs = np.array(members)
        for row, (kind, gpus) in enumerate(zip(rows.gpu_type.tolist(), rows.gpus.tolist(), strict=True)):
            known = jobs[samples_per_s[jobs, row] > 0]
            if len(known):
                worth = _worth_trying(pipeline, nodes[kind], own[kind], gpus)
                chosen, kept = _chosen(gpus / samples_per_s[known, row], worth.sample_s)
                cpus[known, row], memory[known, row] = worth.cpus[chosen], worth.memory_bytes[chosen]
                speed[known, row] = kept
    return ShareLevels(cpus, memory, speed)


class _Tried(NamedTuple):
    """Shares that are tried in a configuration, (K,) each, the cheapest first: each is faster than all before it."""

    cpus: Floats
    memory_bytes: Floats
    sample_s: Floats


@lru_cache(maxsize=4_096)
def _worth_trying(pipeline: InputPipeline, node: NodeType, own: Share, gpus: int) -> _Tried:
    """Of all combinations of steps, those than which none cheaper is as fast, for so many GPUs on such nodes."""
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
    order = np.argsort(parts.max(axis=0) + BOTH * parts.sum(axis=0), kind="stable")
    cpus, memory = cpus[order], memory[order]
    storage = node.storage_bytes_per_s / node.gpus_per_node
    seconds = pipeline.sample_s(cpus, memory, storage_bytes_per_s=storage, node_gpus=min(fewest, most))
    before = np.minimum.accumulate(np.concatenate(([np.inf], seconds[:-1])))
    faster = seconds < before
    return _Tried(cpus[faster], memory[faster], seconds[faster])


def _largest(cluster: Cluster, gpu_type: str) -> NodeType:
    """The node of that type with most GPUs; of equals, the one with least beside them."""
    nodes = [each for each in cluster.node_types if each.gpu_type == gpu_type]
    return min(nodes, key=lambda each: (-each.gpus_per_node, each.cpus, each.memory_bytes))


def _chosen(gpu_s: Floats, sample_s: Floats) -> tuple[Ints, Floats]:
    """(jobs, L): for each target the cheapest share that reaches it, and the speed with that.

    gpu_s: (jobs,) seconds per sample of one GPU. sample_s: (K,) falling.
    """
    speed = gpu_s[:, None] / np.maximum(gpu_s[:, None], sample_s)
    least = np.array(TARGETS) * speed[:, -1:] * (1.0 - 1e-9)
    first = (speed[:, None, :] >= least[:, :, None]).argmax(axis=2)
    return first, np.take_along_axis(speed, first, axis=1)
