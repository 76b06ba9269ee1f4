"""Which shares of a node's CPUs and memory are worth giving to a job, by the speed that its input pipeline reaches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from synergy_core.performance.goodput.pipeline import InputPipeline
from synergy_core.units import Floats

SPEED_LEVELS = (1.0, 0.85, 0.7, 0.5, 0.3)
"""Fractions of a job's best speed in a configuration; for each, the cheapest share that reaches it is a "level"."""
CPU_STEPS = (0.05, 0.1, 0.2, 1 / 3, 0.5, 2 / 3, 5 / 6, 1.0, 7 / 6, 4 / 3, 1.5, 5 / 3, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0)
MEMORY_STEPS = (0.02, 0.1, 1 / 3, 2 / 3, 1.0, 1.5, 2.0, 3.0, 4.0)
"""The CPU and memory shares that are tried, as multiples of the proportional share."""
SUM_WEIGHT = 0.1
"""Weight of the sum in a share's cost. With CPUs and memory as multiples of the proportional share, the cost is the
larger of the two plus this weight times their sum."""


class SharedNode(NamedTuple):
    """A node whose GPUs share CPUs, memory and storage."""

    gpus: int
    """Number of GPUs."""
    cpus: float
    """Cores of the node."""
    memory_bytes: float
    """Host memory of the node."""
    storage_bytes_per_s: float
    """Rate at which the node reads training data; inf if reading is never a bottleneck."""
    own_cpus: float
    """CPUs of the proportional share, per GPU."""
    own_memory_bytes: float
    """Memory of the proportional share, per GPU."""


class ShareLevels(NamedTuple):
    """L levels of share per job and configuration; all arrays are (jobs, configurations, L)."""

    cpus: Floats
    """CPUs per GPU."""
    memory_bytes: Floats
    """Memory per GPU."""
    speed: Floats
    """Fraction of the GPUs' goodput that the share allows, in (0, 1]."""


def share_levels(
    pipelines: Sequence[InputPipeline | None], samples_per_s: Floats, nodes: Sequence[SharedNode], gpus: Sequence[int]
) -> ShareLevels:
    """The shares of CPUs and memory with which each job reaches each of `SPEED_LEVELS`, in every configuration.

    pipelines: by job; None if unknown. samples_per_s: (jobs, configurations), the speed of the GPUs without waiting for
    input; 0 if unknown. nodes: by configuration, the nodes of its GPU type. gpus: by configuration, the job's GPUs. If
    a job's pipeline or speed is unknown, each of the job's levels is the proportional share at full speed.
    """
    shape = (*samples_per_s.shape, len(SPEED_LEVELS))
    cpus, memory = (
        np.broadcast_to(np.array(each)[:, None], shape).copy()
        for each in ([node.own_cpus for node in nodes], [node.own_memory_bytes for node in nodes])
    )
    speed = np.ones(shape)
    by_pipeline: dict[InputPipeline, list[int]] = {}
    for job, pipeline in enumerate(pipelines):
        if pipeline is not None:
            by_pipeline.setdefault(pipeline, []).append(job)
    for pipeline, members in by_pipeline.items():
        jobs = np.array(members)
        for row, (node, count) in enumerate(zip(nodes, gpus, strict=True)):
            known = jobs[samples_per_s[jobs, row] > 0]
            if not len(known):
                continue
            worth = worth_trying(pipeline, node, count)
            gpu_s = (count / samples_per_s[known, row])[:, None]  # GPU-seconds per sample
            reached = gpu_s / np.maximum(gpu_s, worth.sample_s)
            least = np.array(SPEED_LEVELS) * reached[:, -1:] * (1.0 - 1e-9)
            first = (reached[:, None, :] >= least[:, :, None]).argmax(axis=2)
            cpus[known, row], memory[known, row] = worth.cpus[first], worth.memory_bytes[first]
            speed[known, row] = np.take_along_axis(reached, first, axis=1)
    return ShareLevels(cpus, memory, speed)


class TriedShares(NamedTuple):
    """The K shares worth trying in a configuration, (K,) each, by rising cost: each is faster than all cheaper ones."""

    cpus: Floats
    memory_bytes: Floats
    sample_s: Floats


@lru_cache(maxsize=4_096)
def worth_trying(pipeline: InputPipeline, node: SharedNode, gpus: int) -> TriedShares:
    """The shares, for this many GPUs on nodes like `node`, that are faster than every cheaper share."""
    most = min(gpus, node.gpus)
    fewest = gpus % node.gpus or most
    cpu_steps = np.minimum(node.own_cpus * np.array(CPU_STEPS), node.cpus / most)
    memory_steps = np.minimum(node.own_memory_bytes * np.array(MEMORY_STEPS), node.memory_bytes / most)
    cpus, memory = (pairs.ravel() for pairs in np.meshgrid(cpu_steps, memory_steps))
    multiples = np.stack((cpus / node.own_cpus, memory / node.own_memory_bytes))
    order = np.argsort(multiples.max(axis=0) + SUM_WEIGHT * multiples.sum(axis=0), kind="stable")
    cpus, memory = cpus[order], memory[order]
    storage = node.storage_bytes_per_s / node.gpus
    seconds = pipeline.sample_s(cpus, memory, storage_bytes_per_s=storage, node_gpus=min(fewest, most))
    faster = seconds < np.minimum.accumulate(np.concatenate(([np.inf], seconds[:-1])))
    return TriedShares(cpus[faster], memory[faster], seconds[faster])
