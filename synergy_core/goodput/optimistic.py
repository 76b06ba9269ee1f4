"""Optimistic profiling: a job's sensitivity to CPUs and memory from a few short runs (Mohan et al., OSDI 2022).

Only the CPU axis is measured, all data in memory, at CPU counts that a search chooses. The memory axis is predicted:
what a cache holds is hit once an epoch, so that a sample takes the longer of what CPUs need at that share and what
storage needs for the part that is not cached. Saved is every run on every other memory, and most CPU counts of a job
that hardly needs any.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from synergy_core.errors import InputError
from synergy_core.goodput.pipeline import PipelineTable

ALIKE = 0.1
"""Two steps that differ by less than this part are alike: fewer CPUs are tried by halves while they are."""
AS_FAST = 1.03
"""A share is as good as the best one if its step takes at most this many times as long: noise of short runs."""
CACHED_FRACTIONS = np.linspace(0.0, 1.0, 11)
"""Parts of the data set for which the memory axis is predicted."""


def searched_steps(seconds_of: Callable[[int], float], most_cpus: int, *, gpus: int = 1) -> dict[int, float]:
    """Step seconds by the job's CPUs, of those counts that the search tries, all data in memory.

    seconds_of: measures a step with so many CPUs; the first call is at the most. While a step is like the one before
    it the CPUs are halved, else they go down by one per GPU, to 1. Raises InputError for no CPU or no time.
    """
    if most_cpus < 1 or gpus < 1:
        raise InputError(f"profiling from {most_cpus} CPUs on {gpus} GPUs; expected at least 1 of both.")
    found: dict[int, float] = {}
    cpus, before = most_cpus, np.nan
    while cpus >= 1:
        found[cpus] = seconds = seconds_of(cpus)
        if not 0 < seconds < np.inf:
            raise InputError(f"a step with {cpus} CPUs was measured as {seconds:g} s; expected more than 0.")
        changed = abs(seconds - before) > ALIKE * before  # never at the first, which has none before it
        cpus = cpus - gpus if changed else cpus // 2
        before = seconds
    return found


def predicted_table(
    steps: Mapping[int, float],
    *,
    gpus: int,
    samples: int,
    sample_bytes: float,
    data_bytes: float,
    storage_bytes_per_s: float,
) -> PipelineTable:
    """Speeds by CPUs and memory per GPU, from steps measured with all data in memory.

    steps: seconds by the job's CPUs, at least two counts. gpus: of the job, on one node. samples: per GPU and step.
    storage_bytes_per_s: at which each GPU's part of the job reads. Raises InputError for fewer than two counts.
    """
    if len(steps) < 2:
        raise InputError(f"a table needs steps at two CPU counts or more, got {len(steps)}; measure at more.")
    cpus = sorted(steps)
    prepared = np.array([steps[each] for each in cpus]) / samples
    read = sample_bytes * (1.0 - CACHED_FRACTIONS) / storage_bytes_per_s
    seconds = np.maximum(prepared[:, None], read)
    enough = seconds <= AS_FAST * seconds.min()
    most = len(CACHED_FRACTIONS) - 1
    fewest = int(np.argmax(enough[:, most]))
    least = int(np.argmax(enough[fewest]))
    memory = CACHED_FRACTIONS * data_bytes / gpus
    return PipelineTable(
        [each / gpus for each in cpus], memory.tolist(), seconds, (cpus[fewest] / gpus, float(memory[least]))
    )
