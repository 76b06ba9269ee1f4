"""What schedulers read of the planner: per GPU type and number of GPUs, how long a step takes, and under which plan."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from synergy_core.planner.plan import Plans

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PlannedTable:
    """One row per machine and number of GPUs, machines outermost.

    machine: an index into those asked about. step_time_s: inf where nothing fits; `plans` then mean nothing.
    """

    machine: Ints
    gpus: Ints
    step_time_s: Floats
    plans: Plans


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """An architecture of the catalog, as schedulers see it.

    seq_len: tokens of a sample. checkpoint_bytes: weights and what the optimizer keeps.
    """

    name: str
    parameters: float
    seq_len: int
    checkpoint_bytes: float
