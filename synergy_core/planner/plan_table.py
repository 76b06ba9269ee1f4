"""What a search answers: plans as columns, and why a GPU count has none."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from synergy_core.arrays import Floats, Ints
from synergy_core.planner.machine import Machine
from synergy_core.planner.plan import Plans
from synergy_core.planner.step_time import StepTime


@dataclass(frozen=True, slots=True)
class Infeasible:
    """A GPU count without a plan. factor: batch, memory, or degrees (that were fixed). missing_bytes: per GPU, of the
    leanest plan.
    """

    gpus: int
    factor: str
    message: str
    missing_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class PlanTable:
    """Plans as columns (rows,), by GPU count and then by rank; rank 0 is the one to take.

    step_time_s with its parts; memory_bytes: what the fullest GPU needs (`Memory.needed`). timed: plans whose time was
    computed.
    """

    machine: Machine
    gpus: Ints
    nodes: Ints
    rank: Ints
    step_time_s: Floats
    memory_bytes: Floats
    plans: Plans
    parts: StepTime
    infeasible: tuple[Infeasible, ...]
    timed: int

    def __len__(self) -> int:
        return len(self.gpus)

    def take(self, rows: NDArray[np.int64] | NDArray[np.bool_]) -> PlanTable:
        """Some rows, by index or by mask."""
        columns = {name: getattr(self, name)[rows] for name in _COLUMNS}
        return PlanTable(
            machine=self.machine,
            plans=self.plans.take(rows),
            parts=taken(self.parts, rows),
            infeasible=self.infeasible,
            timed=self.timed,
            **columns,
        )

    def best(self) -> PlanTable:
        """One row per count that has a plan."""
        return self.take(self.rank == 0)

    def of(self, gpus: int) -> PlanTable:
        """The rows of one count."""
        return self.take(self.gpus == gpus)

    def efficient(self) -> PlanTable:
        """Best rows that no other with as few GPUs is as fast as: what an allocator need look at."""
        best = self.best()
        fastest_before = np.minimum.accumulate(np.append(np.inf, best.step_time_s))[:-1]
        return best.take(best.step_time_s < fastest_before)


_COLUMNS = ("gpus", "nodes", "rank", "step_time_s", "memory_bytes")


def taken(parts: StepTime, rows: NDArray[Any]) -> StepTime:
    """Some rows of step times."""
    return StepTime(**{each.name: getattr(parts, each.name)[rows] for each in fields(parts)})
