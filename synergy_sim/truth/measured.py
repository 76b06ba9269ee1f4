"""The truth from measured tables (profiles in $SYNERGY_DATA), and from the catalog's constants."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from synergy_core.commands.measurements._table import Table, read_table
from synergy_core.errors import InputError
from synergy_core.performance.catalog import CatalogModel, layers_of, nearest_type, transferred
from synergy_core.performance.goodput.calibration import Calibrated
from synergy_core.performance.goodput.compression import compressor_named
from synergy_core.performance.goodput.efficiency import compressed_sync
from synergy_core.performance.goodput.pipeline import PipelineTable
from synergy_core.performance.goodput.throughput import GAMMA, overlapped
from synergy_core.performance.planner.plan import NO_COMPRESSOR
from synergy_core.scheduling.jobs.exchange import all_reduce_latency_s
from synergy_core.units import GB
from synergy_sim.truth.application import DataParallelApplication, GradientStatistics, NodeGpus, Step, between

MAX_NODES = 16  # more nodes count as 16, as in the simulators of Pollux and Sia, whose tables end there
MAY_BE_ZERO = frozenset({"sync_time", "grad_sqr", "grad_var"})
Curve = tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]
"""Three arrays (points,): samples per GPU, increasing; seconds of a step; seconds of its synchronisation."""


class _MeasuredSteps:
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
        self.curves: dict[NodeGpus, Curve] = {
            node_gpus: tuple(np.array(sorted(rows), dtype=np.float64).T) for node_gpus, rows in grouped.items()
        }
        points = [(*counts, *np.mean(times, axis=0)) for counts, times in sorted(by_counts.items())]
        scalability = folder / f"scalability-{gpu_type}.csv"
        wider_columns = ("num_nodes", "num_replicas", *columns)
        wider = _numbers(read_table(scalability), wider_columns) if scalability.is_file() else []
        self.points = np.array([*points, *wider], dtype=np.float64)
        self.min_batch = int(self.points[:, 2].min())
        self.max_batch = int(self.points[:, 2].max())
        self.most_nodes = int(self.points[:, 0].max())
        self.max_local_batch = lru_cache(maxsize=None)(self._max_local_batch)
        self.most_inside = lru_cache(maxsize=None)(self._most_inside)

    def _max_local_batch(self, node_gpus: NodeGpus) -> int:
        """The largest batch per GPU measured on that placement, else on any with at least as many nodes and GPUs."""
        curve = self.curves.get(smallest_rotation(node_gpus))
        if curve is not None:
            return int(curve[0][-1])
        nodes, gpus = min(len(node_gpus), self.most_nodes), sum(node_gpus)
        wider = self.points[(self.points[:, 0] >= nodes) & (self.points[:, 1] >= gpus)]
        return int(wider[:, 2].max()) if len(wider) else self.max_batch

    def step(self, node_gpus: NodeGpus, local_batch: int) -> Step:
        """A step on that placement: interpolated between measured batches, constant below them, `_scaled` above."""
        curve = self.curves.get(smallest_rotation(node_gpus))
        if curve is None:
            return self._interpolated(node_gpus, local_batch)
        batch, step_s, sync_s = curve
        held = Step(float(np.interp(local_batch, batch, step_s)), float(np.interp(local_batch, batch, sync_s)))
        return held if local_batch <= batch[-1] else _scaled(held, local_batch / float(batch[-1]))

    def _interpolated(self, node_gpus: NodeGpus, local_batch: int) -> Step:
        """A step interpolated over (nodes, GPUs, samples per GPU); above the largest possible batch, `_scaled`."""
        nodes, gpus = min(len(node_gpus), self.most_nodes, MAX_NODES), sum(node_gpus)
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
        """The largest batch in the measured range on this many nodes and GPUs; 0 if there is none."""
        batches = np.arange(self.min_batch, self.max_batch + 1)
        inside = batches[~np.isnan(self._surface(nodes, gpus, batches)[:, 0])]
        return int(inside[-1]) if len(inside) else 0

    def _nearest(self, nodes: int, gpus: int, local_batch: int) -> Step:
        """A step outside the measured range: that of the nearest point, `_scaled` if the point has fewer samples."""
        scale = np.array([1.0, 1.0, 1.0 / max(1.0, self.max_batch / 16)])
        distance = (np.abs(self.points[:, :3] - (nodes, gpus, local_batch)) * scale).sum(axis=1)
        nearest = self.points[int(np.argmin(distance))]
        return _scaled(Step(float(nearest[3]), float(nearest[4])), max(1.0, local_batch / float(nearest[2])))


def _scaled(step: Step, times: float) -> Step:
    """The step with `times` as many samples: its compute time is multiplied, its synchronisation time is the same."""
    return Step((step.step_s - step.sync_s) * times + step.sync_s, step.sync_s)


def smallest_rotation(node_gpus: NodeGpus) -> NodeGpus:
    """The smallest rotation of a placement, used as its key, because all rotations count as equally fast."""
    return min(node_gpus[i:] + node_gpus[:i] for i in range(len(node_gpus)))


class MeasuredApplication(DataParallelApplication):
    """An application's folder of `placements-GPU.csv`, `scalability-GPU.csv` and `validation-BATCH.csv`."""

    def __init__(
        self, folder: Path, *, otherwise: DataParallelApplication | None = None, max_local_batch: int | None = None
    ) -> None:
        """otherwise: the application that is used for GPU types without measurements."""
        super().__init__()
        self._otherwise = otherwise
        self.name = folder.name
        self._most_local = max_local_batch
        self._profiles = {
            path.stem.removeprefix("placements-"): _MeasuredSteps(folder, path.stem.removeprefix("placements-"))
            for path in sorted(folder.glob("placements-*.csv"))
        }
        runs = sorted((int(re.sub(r"\D", "", path.stem)), path) for path in folder.glob("validation-*.csv"))
        if not runs or not self._profiles:
            raise InputError(f"{folder}: expected placements-GPU.csv and validation-BATCH.csv files, found none.")
        self._batches = [batch for batch, _ in runs]
        columns = ("progress", "iteration", "grad_sqr", "grad_var")
        table = np.array([_numbers(read_table(path), columns) for _, path in runs])
        self.work_at_epoch_end = tuple(table[:, :, 0].min(axis=0).tolist())
        self._iterations = table[:, :, 1]
        self._statistics = table[:, :, 2:]
        self.initial_batch, self.max_batch = self._batches[0], self._batches[-1]

    def _profile(self, gpu_type: str) -> _MeasuredSteps:
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


def _numbers(table: Table, columns: Sequence[str]) -> list[tuple[float, ...]]:
    """The values of these columns by row. Raises InputError for text, negative numbers and impossible zeros."""
    found = [
        table.numbers(name, "a number ≥ 0", lambda value: value >= 0)
        if name in MAY_BE_ZERO
        else table.numbers(name, "a number > 0", lambda value: value > 0)
        for name in columns
    ]
    return list(zip(*found, strict=True))


OTHER_MODELS = frozenset({"bert"})
"""Published models to skip: the catalog has another application of this name (iterations of seconds, not 11 ms)."""


def published_pipelines(folder: Path) -> dict[str, PipelineTable]:
    """Measured speed of each published model as a function of CPUs and memory (SYNERGY_DATA: resource_sensitivity).

    Reads two tables of Synergy's simulator (Mohan et al., OSDI 2022). `models.csv` has a row per model: its batch, its
    iteration time at the proportional share, and the share with which it is fastest. `cpu_memory_throughput.csv` has
    its throughput on one GPU relative to the proportional share, by CPUs and memory. At 20.83 GB, all models that gain
    from memory have 0.1, whatever their CPUs: a placeholder for "far too little", not a measurement. It is kept as the
    lower end of the table. From there to the first measured memory, speed rises at least in proportion to memory, so
    giving up memory in this range never pays.

    Raises InputError, with file and line, for missing or duplicate rows and for values that are not numbers > 0.
    """
    speeds, models = read_table(folder / "cpu_memory_throughput.csv"), read_table(folder / "models.csv")
    measured: dict[str, dict[tuple[float, ...], float]] = {}
    columns = _numbers(speeds, ("cpus_per_gpu", "memory_gb_per_gpu", "relative_throughput"))
    for model, (*share, relative), line in zip(speeds.cells("model"), columns, speeds.lines, strict=True):
        grid = measured.setdefault(model, {})
        if tuple(share) in grid:
            raise InputError(
                f"{speeds.path}, line {line}: {model} with {share[0]:g} CPUs and {share[1]:g} GB has two rows; "
                "delete one of them."
            )
        grid[tuple(share)] = relative
    names = models.cells("model")
    if odd := [name for name in measured if name not in names]:
        raise InputError(f"{models.path}: has no row of {odd[0]}, but {speeds.path} has; expected one.")
    found = {}
    fields = ("batch_size", "iter_time_s_at_proportional", "best_cpus_per_gpu", "best_memory_gb_per_gpu")
    rows = zip(names, _numbers(models, fields), models.lines, strict=True)
    for name, (batch, iteration_s, best_cpus, best_gb), line in rows:
        grid = measured.get(name, {})
        if names.count(name) > 1 or not grid:
            raise InputError(
                f"{models.path}, line {line}: {name} has {names.count(name)} rows here and {len(grid)} in "
                f"{speeds.path}; expected one row here and one row per share there."
            )
        cpus, memory_gb = (sorted({share[axis] for share in grid}) for axis in (0, 1))
        if missing := [each for each in product(cpus, memory_gb) if each not in grid]:
            raise InputError(
                f"{speeds.path}: {len(missing)} rows of {name} are missing, such as {name},"
                f"{missing[0][0]:g},{missing[0][1]:g},THROUGHPUT; expected one per combination of CPUs and memory."
            )
        if min(len(cpus), len(memory_gb)) < 2:
            raise InputError(
                f"{speeds.path}: {name} was measured at {len(cpus)} values of CPUs and {len(memory_gb)} of memory; "
                "expected two or more of each to interpolate between."
            )
        if name not in OTHER_MODELS:
            throughput = np.array([grid[each] for each in product(cpus, memory_gb)]).reshape(len(cpus), -1)
            best = best_cpus, best_gb * GB
            found[name] = PipelineTable(cpus, [each * GB for each in memory_gb], iteration_s / throughput / batch, best)
    return found


STAGES = 24
"""Number of intervals of equal work into which training is divided; the noise scale is constant within each one."""


def no_layers(setting: str, application: str) -> InputError:
    """The error for an application whose gradient bytes are needed but unknown."""
    return InputError(
        f"{setting}: the layers of {application} are not known, so the size of its gradients is unknown. Give its jobs "
        f"one GPU (truth.fixed_gpus.{application}=1), or add "
        f"synergy_core/performance/catalog/layers/{application}.yaml."
    )


class ModelledApplication(DataParallelApplication):
    """An application from the catalog's constants, for machines and GPU types without measured tables.

    For a GPU type without measurements, the constants of the most similar type are converted by data sheets.

    network_bytes_per_s: speed of all-reduces between nodes; None: as measured.
    """

    def __init__(
        self, profile: CatalogModel, *, max_local_batch: int | None = None, network_bytes_per_s: float | None = None
    ) -> None:
        super().__init__()
        if profile.noise is None:
            raise InputError(f"{profile.name}: the catalog lacks its gradient noise, so it cannot be simulated.")
        self.name = profile.name
        self.profile = profile
        self.initial_batch, self.max_batch = profile.initial_batch, profile.max_batch
        self._most_local = max_local_batch
        self._network_bytes_per_s = network_bytes_per_s
        ends = np.linspace(0.0, 1.0, STAGES + 1)
        self.work_at_epoch_end = tuple((ends[1:] * profile.total_work).tolist())
        self._noise_scale = profile.noise.noise_scale((ends[1:] + ends[:-1]) / 2).tolist()
        self._models: dict[str, Calibrated] = {}
        self._limits: dict[str, tuple[int, int]] = {}

    def _known_type(self, gpu_type: str) -> str:
        """The type itself if it was measured, else the most similar measured type."""
        known = self.profile.gpu_types
        return gpu_type if gpu_type in known else nearest_type(gpu_type, tuple(known))

    def _model(self, gpu_type: str) -> Calibrated:
        if gpu_type not in self._models:
            known = self._known_type(gpu_type)
            model = self.profile.gpu_types[known].calibrated
            self._models[gpu_type] = model if known == gpu_type else transferred(model, known, gpu_type)[0]
        return self._models[gpu_type]

    def measure(self, gpu_type: str, node_gpus: NodeGpus, local_batch: int) -> Step:
        if self._network_bytes_per_s is not None and len(node_gpus) > 1:
            return self.measure_compressed(gpu_type, node_gpus, local_batch, NO_COMPRESSOR)
        model, gpus = self._model(gpu_type), sum(node_gpus)
        step_s = float(model.step_time(len(node_gpus), gpus, local_batch, max(node_gpus)))
        compute_s = float(model.gradient_time(local_batch, gpus))
        return Step(step_s, max(step_s - compute_s, 0.0))

    def measure_compressed(self, gpu_type: str, node_gpus: NodeGpus, local_batch: int, compressor: str) -> Step:
        """A step with compressed gradients: their T_sync follows from that of `sync_s` and from the compressor."""
        model, gpus = self._model(gpu_type), sum(node_gpus)
        compute_s = float(model.gradient_time(local_batch, gpus))
        sync_s = self.sync_s(gpu_type, node_gpus)
        if compressor != NO_COMPRESSOR:
            assert self.exchange is not None
            terms = self.exchange.terms(compressor, gpu_type, len(node_gpus), gpus)
            sync_s = float(compressed_sync(sync_s, terms))
        step_s = float(overlapped(compute_s, sync_s, model.theta[GAMMA]))
        return Step(step_s, max(step_s - compute_s, 0.0))

    def sync_s(self, gpu_type: str, node_gpus: NodeGpus) -> float:
        """T_sync (s) of uncompressed gradients: measured or, across nodes of a given network, latency + bytes ÷ speed.

        Raises InputError if the bytes of the gradients are unknown.
        """
        model, gpus, nodes = self._model(gpu_type), sum(node_gpus), len(node_gpus)
        network = self._network_bytes_per_s
        if network is None or nodes == 1:
            return float(model.form.sync_time(model.theta, nodes, gpus, max(node_gpus)))
        layers = layers_of(self.name)
        if layers is None:
            raise no_layers("cluster.network_gbps", self.name)
        carried = float(compressor_named(NO_COMPRESSOR).sent_bytes(layers, gpus).sum())
        return all_reduce_latency_s(gpu_type, nodes, gpus, network) + carried / network

    def statistics(self, global_batch: int, epoch: int) -> GradientStatistics:
        return GradientStatistics(1.0, self._noise_scale[epoch] / self.initial_batch)

    def local_batches(self, gpu_type: str, node_gpus: NodeGpus = (1,)) -> tuple[int, int]:
        limits = self._limits.get(gpu_type)
        if limits is None:
            profile = self.profile.gpu_types[self._known_type(gpu_type)]
            limits = profile.min_local, min(profile.max_local, self._most_local or profile.max_local)
            self._limits[gpu_type] = limits
        return limits
