"""What running jobs report, and the throughput models fitted to it; of one job, or of all jobs of one application."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from synergy_core.jobs.inputs import InputReports
from synergy_core.jobs.seen_exchanges import SeenExchanges
from synergy_core.planner.plan import Plan

Theta = NDArray[np.float64]
Table = NDArray[np.float64]
"""Rows of nodes, GPUs, samples per GPU, step and synchronisation seconds."""
Point = tuple[int, int, int]
"""Where something was observed: nodes, GPUs, and samples per GPU; of jobs with parallel plans, the global batch."""

MOST_OBSERVED = 60
"""A fit reads at most so many observations, evenly taken from all: its seven constants change little with more."""


class Observations:
    """Step times by GPU type and point, the gradient statistics first seen, and the models they make.

    most_gpus: the largest number of GPUs anything was observed on. overhead: wall time of iterations ÷ what measured
    step times add up to. plain_exchanges: by GPU type and whether across nodes, of exchanges that nothing compressed,
    where some may be, the step and synchronisation seconds, as far as the two were told apart. exchanges: what
    compressed ones showed. version: grows with every new model. Of jobs with plans,
    ratios of observed to planned step times stand instead of models. inputs: how fast their input is prepared, None
    where that is not learned.
    """

    __slots__ = (
        "_pending",
        "_pending_ratios",
        "_ratios",
        "_stale",
        "_steps",
        "choices",
        "exchanges",
        "first_statistics",
        "inputs",
        "models",
        "most_gpus",
        "overhead",
        "plain_exchanges",
        "serial",
        "version",
    )

    _made = 0

    def __init__(self, inputs: InputReports | None = None) -> None:
        self.inputs = inputs
        self._steps: dict[str, dict[Point, tuple[float, float]]] = {}
        self._stale: dict[str, None] = {}
        self._pending: list[tuple[str, Point, tuple[float, float]]] = []
        self._ratios: dict[str, dict[Point, float]] = {}
        self._pending_ratios: list[tuple[str, Point, float]] = []
        self.first_statistics: tuple[float, float] | None = None
        self.models: dict[str, Theta] = {}
        self.plain_exchanges: dict[tuple[str, bool], list[tuple[float, float]]] = {}
        self.exchanges = SeenExchanges()
        self.choices: dict[tuple[object, ...], Plan] = {}
        self.most_gpus = 0
        self.overhead = 1.0
        self.version = 0
        Observations._made += 1
        self.serial = Observations._made

    @property
    def stale(self) -> bool:
        """Whether something was observed that no model has seen."""
        return bool(self._stale)

    def knows(self, gpu_type: str, point: Point) -> bool:
        """Whether that was observed."""
        steps = self._steps.get(gpu_type)
        return steps is not None and point in steps

    def add(self, gpu_type: str, point: Point, step_s: float, sync_s: float) -> None:
        """Adds a mean step time, which counts at once."""
        self._steps.setdefault(gpu_type, {})[point] = (step_s, sync_s)
        self._stale[gpu_type] = None
        self.most_gpus = max(self.most_gpus, point[1])

    def add_later(self, gpu_type: str, point: Point, step_s: float, sync_s: float) -> None:
        """Adds a mean step time, which counts from the next decision on: others learn of it only then."""
        self._pending.append((gpu_type, point, (step_s, sync_s)))

    def merge(self) -> None:
        """What was added for later counts from now on."""
        for gpu_type, point, (step_s, sync_s) in self._pending:
            if not self.knows(gpu_type, point):
                self.add(gpu_type, point, step_s, sync_s)
        self._pending.clear()
        for gpu_type, point, ratio in self._pending_ratios:
            self.add_ratio(gpu_type, point, ratio)
        self._pending_ratios.clear()

    def add_ratio(self, gpu_type: str, point: Point, ratio: float, *, later: bool = False) -> None:
        """Adds an observed step time ÷ the planned one; the first of a point stands. point: with the global batch.

        later: it counts from the next decision on.
        """
        of_type = self._ratios.setdefault(gpu_type, {})
        if point in of_type:
            return
        if later:
            self._pending_ratios.append((gpu_type, point, ratio))
            return
        of_type[point] = ratio
        self.most_gpus = max(self.most_gpus, point[1])
        self.version += 1

    def ratio(self, gpu_type: str) -> float:
        """What to multiply planned step times on that type by: the geometric mean of observed ratios; 1 without any."""
        of_type = self._ratios.get(gpu_type)
        return float(np.exp(np.mean(np.log(list(of_type.values()))))) if of_type else 1.0

    def take_stale(self) -> list[tuple[str, Table]]:
        """The types whose models are out of date, with what to fit; they count as fitted from now on."""
        tables = [(gpu_type, _table(self._steps[gpu_type])) for gpu_type in self._stale]
        self._stale.clear()
        return tables


def _table(steps: dict[Point, tuple[float, float]]) -> Table:
    points = sorted(steps)
    if len(points) > MOST_OBSERVED:
        points = [points[i * len(points) // MOST_OBSERVED] for i in range(MOST_OBSERVED)]
    return np.array([(*point, *steps[point]) for point in points], dtype=np.float64)


class Fitter:
    """Fits whatever is out of date in one call, and remembers: jobs that begin alike observe alike."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[bytes, Theta] = {}

    def refresh(self, pools: Iterable[Observations]) -> None:
        """Fits every model of these pools that has observations it has not seen."""
        wanted: list[tuple[Observations, str, bytes]] = []
        missing: dict[bytes, Table] = {}
        for pool in pools:
            if pool.stale:
                for gpu_type, table in pool.take_stale():
                    key = table.tobytes()
                    wanted.append((pool, gpu_type, key))
                    if key not in self._known:
                        missing[key] = table
        if missing:
            from synergy_core.goodput.fit import ObservedSteps, fit

            fits = fit([ObservedSteps(*table.T) for table in missing.values()])
            self._known.update(zip(missing, fits.theta, strict=True))
        for pool, gpu_type, key in wanted:
            pool.models[gpu_type] = self._known[key]
            pool.version += 1
            pool.choices.clear()
