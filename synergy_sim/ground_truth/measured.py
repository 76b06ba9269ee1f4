"""The truth from measured tables: step times by placement, gradient statistics by epoch (SYNERGY_DATA: profiles)."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from synergy_core.errors import InputError
from synergy_core.measurements import Table, read_table
from synergy_sim.ground_truth.application import DataParallelApplication, GradientStatistics, NodeGpus, Step, between

MOST_NODES = 16  # more count as 16, as in the simulators of Pollux and Sia, whose tables end there
MAY_BE_ZERO = frozenset({"sync_time", "grad_sqr", "grad_var"})
Curve = tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]
"""Three arrays (points,): samples per GPU, increasing; seconds of a step; seconds of its synchronisation."""


class _Profile:
    """Step times of one application on one GPU type."""

    def __init__(self, folder: Path, gpu_type: str) -> None:
        self.where = f"{folder.name} on {gpu_type}"
        placements = read_table(folder / f"placements-{gpu_type}.csv")
        columns = ("local_bsz", "step_time", "sync_time")
        grouped: dict[NodeGpus, list[tuple[float, float, float]]] = defaultdict(list)
        by_counts: dict[tuple[int, int, float], list[tuple[float, float]]] = defaultdict(list)
        for node_gpus, (batch, step_s, sync_s) in zip(placements.shapes(), _numbers(placements, columns), strict=True):
            grouped[smallest_rotation(node_gpus)].append((batch, step_s, sync_s))
            by_counts[len(node_gpus), sum(node_gpus), batch].append((step_s, sync_s))
        self.curves = {node_gpus: _curve(rows) for node_gpus, rows in grouped.items()}
        points = [(*counts, *np.mean(times, axis=0)) for counts, times in sorted(by_counts.items())]
        scalability = folder / f"scalability-{gpu_type}.csv"
        wider = _read(scalability, ("num_nodes", "num_replicas", *columns)) if scalability.is_file() else []
        self.points = np.array([*points, *wider], dtype=np.float64)
        self.min_batch = int(self.points[:, 2].min())
        self.max_batch = int(self.points[:, 2].max())
        self.most_nodes = int(self.points[:, 0].max())
        self.max_local_batch = lru_cache(maxsize=None)(self._max_local_batch)
        self.most_inside = lru_cache(maxsize=None)(self._most_inside)

    def _max_local_batch(self, node_gpus: NodeGpus) -> int:
        """The largest measured on that placement, else on at least as many nodes and GPUs."""
        curve = self.curves.get(smallest_rotation(node_gpus))
        if curve is not None:
            return int(curve[0][-1])
        nodes, gpus = min(len(node_gpus), self.most_nodes), sum(node_gpus)
        wider = self.points[(self.points[:, 0] >= nodes) & (self.points[:, 1] >= gpus)]
        return int(wider[:, 2].max()) if len(wider) else self.max_batch

    def step(self, node_gpus: NodeGpus, local_batch: int) -> Step:
        """A step on that placement: linear between measured batches; below them the first, beyond them `_scaled`."""
        curve = self.curves.get(smallest_rotation(node_gpus))
        if curve is None:
            return self._interpolated(node_gpus, local_batch)
        batch, step_s, sync_s = curve
        held = Step(float(np.interp(local_batch, batch, step_s)), float(np.interp(local_batch, batch, sync_s)))
        return held if local_batch <= batch[-1] else _scaled(held, local_batch / float(batch[-1]))

    def _interpolated(self, node_gpus: NodeGpus, local_batch: int) -> Step:
        """Piecewise linear over (nodes, GPUs, samples per GPU); `_scaled` beyond the largest batch there."""
        nodes, gpus = min(len(node_gpus), self.most_nodes, MOST_NODES), sum(node_gpus)
        step_s, sync_s = self._surface(nodes, gpus, local_batch).reshape(2).tolist()
        if not math.isnan(step_s):
            return Step(step_s, sync_s)
        largest = self.most_inside(nodes, gpus) or self.max_local_batch(node_gpus)
        if local_batch <= largest:
            return self._nearest(nodes, gpus, local_batch)
        return _scaled(self._interpolated(node_gpus, largest), local_batch / largest)

    @cached_property
    def _surface(self) -> Any:
        from scipy.interpolate import LinearNDInterpolator

        return LinearNDInterpolator(self.points[:, :3], self.points[:, 3:])

    def _most_inside(self, nodes: int, gpus: int) -> int:
        """The largest batch inside the hull of what was measured, on so many nodes and GPUs; 0 where none is."""
        batches = np.arange(self.min_batch, self.max_batch + 1)
        inside = batches[~np.isnan(self._surface(nodes, gpus, batches)[:, 0])]
        return int(inside[-1]) if len(inside) else 0

    def _nearest(self, nodes: int, gpus: int, local_batch: int) -> Step:
        """Outside everything measured: the nearest point, its compute time in proportion to the samples beyond it."""
        scale = np.array([1.0, 1.0, 1.0 / max(1.0, self.max_batch / 16)])
        distance = (np.abs(self.points[:, :3] - (nodes, gpus, local_batch)) * scale).sum(axis=1)
        nearest = self.points[int(np.argmin(distance))]
        return _scaled(Step(float(nearest[3]), float(nearest[4])), max(1.0, local_batch / float(nearest[2])))


def _scaled(step: Step, times: float) -> Step:
    """The step with so many times the samples: computing takes so many times as long, synchronisation as before."""
    return Step((step.step_s - step.sync_s) * times + step.sync_s, step.sync_s)


def smallest_rotation(node_gpus: NodeGpus) -> NodeGpus:
    """The placement as tables store it, once for all its rotations: the smallest of them."""
    return min(node_gpus[i:] + node_gpus[:i] for i in range(len(node_gpus)))


def _curve(rows: list[tuple[float, float, float]]) -> Curve:
    batch, step_s, sync_s = np.array(sorted(rows), dtype=np.float64).T
    return batch, step_s, sync_s


class MeasuredApplication(DataParallelApplication):
    """An application's folder of `placements-GPU.csv`, `scalability-GPU.csv` and `validation-BATCH.csv`."""

    def __init__(
        self, folder: Path, *, otherwise: DataParallelApplication | None = None, max_local_batch: int | None = None
    ) -> None:
        """otherwise: answers for GPU types that were not measured."""
        super().__init__()
        self._otherwise = otherwise
        self.name = folder.name
        self._most_local = max_local_batch
        self._profiles = {
            path.stem.removeprefix("placements-"): _Profile(folder, path.stem.removeprefix("placements-"))
            for path in sorted(folder.glob("placements-*.csv"))
        }
        runs = sorted((int(re.sub(r"\D", "", path.stem)), path) for path in folder.glob("validation-*.csv"))
        if not runs or not self._profiles:
            raise InputError(f"{folder}: expected placements-GPU.csv and validation-BATCH.csv files, found none.")
        self._batches = [batch for batch, _ in runs]
        columns = ("progress", "iteration", "grad_sqr", "grad_var")
        table = np.array([_read(path, columns) for _, path in runs])
        self.work_at_epoch_end = tuple(table[:, :, 0].min(axis=0).tolist())
        self._iterations = table[:, :, 1]
        self._statistics = table[:, :, 2:]
        self.initial_batch, self.max_batch = self._batches[0], self._batches[-1]

    @property
    def gpu_types(self) -> tuple[str, ...]:
        """The GPU types that were measured."""
        return tuple(self._profiles)

    def _profile(self, gpu_type: str) -> _Profile:
        if gpu_type not in self._profiles:
            raise InputError(f"{self.name} was not measured on GPU type {gpu_type}; measured: {list(self._profiles)}.")
        return self._profiles[gpu_type]

    def measure(self, gpu_type: str, node_gpus: NodeGpus, local_batch: int) -> Step:
        if gpu_type not in self._profiles and self._otherwise is not None:
            return self._otherwise.measure(gpu_type, node_gpus, local_batch)
        return self._profile(gpu_type).step(node_gpus, local_batch)

    def statistics(self, global_batch: int, epoch: int) -> GradientStatistics:
        lower, upper, share = between(self._batches, global_batch)
        sqr, var = (1 - share) * self._statistics[lower, epoch] + share * self._statistics[upper, epoch]
        return GradientStatistics(float(sqr), float(var))

    def local_batches(self, gpu_type: str, node_gpus: NodeGpus = (1,)) -> tuple[int, int]:
        if gpu_type not in self._profiles and self._otherwise is not None:
            return self._otherwise.local_batches(gpu_type, node_gpus)
        profile = self._profile(gpu_type)
        most = profile.max_local_batch(node_gpus)
        return profile.min_batch, min(most, self._most_local or most)

    def iterations(self, global_batch: int) -> Sequence[float]:
        lower, upper, share = between(self._batches, global_batch)
        between_runs = (1 - share) * self._iterations[lower] + share * self._iterations[upper]
        return [float(each) for each in between_runs]


def _read(path: Path, columns: Sequence[str]) -> list[tuple[float, ...]]:
    """Those columns of a CSV file, by name. Raises InputError for what is no number, negative, or an impossible 0."""
    return _numbers(read_table(path), columns)


def _numbers(table: Table, columns: Sequence[str]) -> list[tuple[float, ...]]:
    return list(zip(*(_column(table, name) for name in columns), strict=True))


def _column(table: Table, name: str) -> list[float]:
    if name in MAY_BE_ZERO:
        return table.numbers(name, "a number ≥ 0", lambda value: value >= 0)
    return table.numbers(name, "a number > 0", lambda value: value > 0)
