"""What a scheduler believes of all its jobs: tasks, shared or own observations, and goodput for many jobs at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from synergy_core.arrays import Floats
from synergy_core.errors import unknown
from synergy_core.goodput.batch import best_batch
from synergy_core.jobs.configurations import Configurations
from synergy_core.jobs.fitted import SynergyTask
from synergy_core.jobs.planned import PlannedSpeeds, PlannedTask
from synergy_core.jobs.profiled import ProfiledSpeeds, ProfiledTask
from synergy_core.jobs.reports import Fitter, Observations, Theta
from synergy_core.jobs.spec import JobSpec

Information = Literal["own", "declared", "shared", "all"]
"""What a policy may know beside what each job has reported itself: its declared work, other jobs' reports, or both."""
BatchLimit = Literal["max", "requested"]

MOST_REMEMBERED = 50_000
_Key = tuple[int, int, int, tuple[float, float], int, int]


class Beliefs:
    """Makes the task of each job, keeps models up to date, and answers what jobs would get from configurations.

    shared: whether what one job reports is known of all jobs of its application. declares: whether declared work is.
    speeds: what may be read of the planner about jobs with plans, profiled: of measurements of them; None: there are no
    such jobs.
    """

    def __init__(
        self,
        gpu_types: Sequence[str],
        information: Information = "own",
        speeds: PlannedSpeeds | None = None,
        profiled: ProfiledSpeeds | None = None,
    ) -> None:
        if information not in get_args(Information):
            raise unknown("information", information, get_args(Information))
        self.shared = information in ("shared", "all")
        self.declares = information in ("declared", "all")
        self._speeds = speeds
        self._profiled = profiled
        self._types = tuple(gpu_types)
        self._fitter = Fitter()
        self._pools: dict[str, Observations] = {}
        self._rows: dict[bytes, dict[_Key, Floats]] = {}

    def task(self, spec: JobSpec) -> SynergyTask:
        """The beliefs about a job that was just submitted. They hold its declared work only where that may be known."""
        if not self.declares:
            spec = replace(spec, declared_work=float("inf"))
        pool = self._pools.setdefault(spec.application, Observations()) if self.shared else Observations()
        if self._profiled is not None and spec.architecture in self._profiled.profile:
            return ProfiledTask(spec, pool, self._profiled, shared=self.shared, declares=self.declares)
        if spec.architecture and self._speeds is not None:
            return PlannedTask(spec, pool, self._speeds, shared=self.shared, declares=self.declares)
        return SynergyTask(spec, pool, shared=self.shared, declares=self.declares)

    def refresh(self, tasks: Sequence[SynergyTask]) -> None:
        """Brings the models of these jobs up to date, in one call for all."""
        self._fitter.refresh(task.pool for task in tasks)

    def merge(self) -> None:
        """What jobs have reported since the last decision becomes known to others."""
        for pool in self._pools.values():
            pool.merge()
        self._fitter.refresh(self._pools.values())

    def goodput(self, tasks: Sequence[SynergyTask], rows: Configurations, batch: BatchLimit) -> Floats:
        """(jobs, configurations): initial-batch iterations per second at the best batch; 0 where none is feasible.

        batch: whether the batch may grow to the job's maximum or only to what its user requested. A GPU type without
        a model takes the curve of the first type that has one, times the ratio of their one-GPU rates
        (Sia, SOSP 2023, section 3.2). NaN throughout for a job of which nothing is known. A job with plans is known
        from the start.
        """
        result = np.full((len(tasks), len(rows)), np.nan)
        remembered = self._rows.setdefault(rows.key() + batch.encode(), {})
        if len(remembered) > MOST_REMEMBERED:
            remembered.clear()
        for index, kind in enumerate(self._types):
            columns = np.flatnonzero(rows.gpu_type == index)
            if len(columns):
                self._fill(result, tasks, rows, batch, kind, columns, remembered)
        self._fill_planned(result, tasks, rows, batch, remembered)
        return result

    def _fill_planned(
        self,
        result: Floats,
        tasks: Sequence[SynergyTask],
        rows: Configurations,
        batch: BatchLimit,
        remembered: dict[_Key, Floats],
    ) -> None:
        """The rows of jobs with plans."""
        for at, task in enumerate(tasks):
            if isinstance(task, PlannedTask):
                statistics, spec = task.believed_statistics or (0.0, 0.0), task.spec
                key = (task.pool.serial, task.pool.version, -1, statistics, spec.max_batch, spec.requested_batch)
                if key not in remembered:
                    remembered[key] = task.goodput(rows, requested=batch == "requested")
                result[at] = remembered[key]

    def _fill(
        self,
        result: Floats,
        tasks: Sequence[SynergyTask],
        rows: Configurations,
        batch: BatchLimit,
        kind: str,
        columns: NDArray[np.int64],
        remembered: dict[_Key, Floats],
    ) -> None:
        """The columns of one GPU type: models evaluated once for all jobs that believe the same."""
        missing: dict[_Key, tuple[SynergyTask, Theta, str, int]] = {}
        keys: list[tuple[int, _Key, float]] = []
        for at, task in enumerate(tasks):
            statistics = task.believed_statistics
            source = kind if kind in task.models else next((each for each in self._types if each in task.models), None)
            if source is None or statistics is None:
                continue
            spec = task.spec
            most = (
                spec.max_batch if batch == "max" else min(spec.max_batch, max(spec.requested_batch, spec.initial_batch))
            )
            ratio = 1.0 if source == kind else spec.single_gpu_rate[kind] / spec.single_gpu_rate[source]
            code = self._types.index(source) * len(self._types) + self._types.index(kind)
            key = (task.pool.serial, task.pool.version, code, statistics, most, spec.initial_batch)
            keys.append((at, key, ratio))
            if key not in remembered and key not in missing:
                missing[key] = (task, task.models[source], source, most)
        if missing:
            chosen = list(missing.values())
            limits = [task.spec.local_batches[source] for task, _, source, _ in chosen]
            statistics_of = [task.believed_statistics or (1.0, 0.0) for task, _, _, _ in chosen]
            choice = best_batch(
                np.array([theta for _, theta, _, _ in chosen]),
                [sqr for sqr, _ in statistics_of],
                [var for _, var in statistics_of],
                [task.spec.initial_batch for task, _, _, _ in chosen],
                [most for _, _, _, most in chosen],
                [low for low, _ in limits],
                [high for _, high in limits],
                rows.nodes[columns],
                rows.gpus[columns],
            )
            remembered.update(zip(missing, choice.goodput, strict=True))
        for at, key, ratio in keys:
            result[at, columns] = remembered[key] * ratio
