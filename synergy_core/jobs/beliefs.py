"""What a scheduler believes of all its jobs: tasks, shared or own observations, and goodput for many jobs at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

import numpy as np

from synergy_core.errors import unknown
from synergy_core.jobs.fitted import Belief, SynergyTask
from synergy_core.jobs.planned import PlannedSpeeds, PlannedTask, ProfiledSpeeds, ProfiledTask
from synergy_core.jobs.reports import InputReports, Observations, Theta, refresh_models
from synergy_core.jobs.spec import Configurations, JobSpec
from synergy_core.units import Floats

Information = Literal["own", "declared", "shared", "all"]
"""What a policy may know besides each job's own reports: the job's declared work, other jobs' reports, or both."""
InputKnowledge = Literal["known", "learned"]
"""Source of input speeds: offline profiles, or only the reports of jobs that `Information` allows."""
BatchLimit = Literal["max", "requested"]

MAX_REMEMBERED = 50_000


class Beliefs:
    """Makes each job's task, keeps models up to date, and says how fast jobs would train on configurations.

    shared: whether a job's reports count for all jobs of its application. declares: whether declared work is known.
    learns_input: whether input speeds are fitted to reports instead of profiled. speeds: planner's step times of jobs
    with plans; profiled: measured step times of profiled models; None if there are no such jobs.
    """

    def __init__(
        self,
        gpu_types: Sequence[str],
        information: Information = "own",
        speeds: PlannedSpeeds | None = None,
        profiled: ProfiledSpeeds | None = None,
        *,
        learns_input: bool = False,
    ) -> None:
        if information not in get_args(Information):
            raise unknown("information", information, get_args(Information))
        self.shared = information in ("shared", "all")
        self.declares = information in ("declared", "all")
        self._learns_input = learns_input
        self._speeds = speeds
        self._profiled = profiled
        self._types = tuple(gpu_types)
        self._fits: dict[bytes, Theta] = {}
        self._pools: dict[str, Observations] = {}
        self._rows: dict[bytes, dict[Belief, Floats]] = {}

    def task(self, spec: JobSpec) -> SynergyTask:
        """The beliefs about a new job, with its declared work and its input profile only if they may be known."""
        if not self.declares:
            spec = replace(spec, declared_work=float("inf"))
        if self._learns_input:
            spec = replace(spec, pipeline=None)
        pool = self._pools.get(spec.application)
        if pool is None:
            pool = Observations(InputReports() if self._learns_input else None)
            if self.shared:
                self._pools[spec.application] = pool
        knows = {"shared": self.shared, "declares": self.declares}
        if self._profiled is not None and spec.architecture in self._profiled.profile:
            return ProfiledTask(spec, pool, speeds=self._profiled, **knows)
        if spec.architecture and self._speeds is not None:
            return PlannedTask(spec, pool, speeds=self._speeds, **knows)
        return SynergyTask(spec, pool, **knows)

    def refresh(self, tasks: Sequence[SynergyTask]) -> None:
        """Updates the models of all these jobs in one call."""
        refresh_models((task.pool for task in tasks), self._fits)

    def merge(self) -> None:
        """Makes known to other jobs what jobs have reported since the last decision."""
        for pool in self._pools.values():
            pool.merge()
        refresh_models(self._pools.values(), self._fits)

    def goodput(self, tasks: Sequence[SynergyTask], rows: Configurations, batch: BatchLimit) -> Floats:
        """(jobs, configurations): the first half of `paces`."""
        return np.asarray(self.paces(tasks, rows, batch)[0])

    def paces(self, tasks: Sequence[SynergyTask], rows: Configurations, batch: BatchLimit) -> Floats:
        """(2, jobs, configurations): initial-batch iterations per second at the best batch, 0 where no batch fits; and
        samples per second at that batch, 0 where unknown.

        A job's row is made again only when its model or statistics have changed.
        batch: whether the batch may grow to the job's maximum or only to what its user requested. A GPU type without a
        model takes the curve of the first type with one, times the ratio of their one-GPU rates (Sia, SOSP 2023,
        section 3.2). A job without observations has NaN throughout; a job with plans is known from the start.
        """
        known = self._rows.setdefault(rows.key() + batch.encode(), {})
        if len(known) > MAX_REMEMBERED:
            known.clear()
        outdated: dict[type[SynergyTask], list[SynergyTask]] = {}
        for task in tasks:
            made_of = id(known), task.pool.version, task.believed_statistics
            if task.paces is None or task.paces[0] != made_of:
                task.paces = made_of, np.zeros(0)
                outdated.setdefault(type(task), []).append(task)
        for task_class, alike in outdated.items():
            made = task_class.goodputs(alike, rows, self._types, known, requested=batch == "requested")
            for at, task in enumerate(alike):
                assert task.paces is not None
                task.paces = task.paces[0], made[:, at].ravel()
        found = np.concatenate([task.paces[1] for task in tasks if task.paces is not None])
        return found.reshape(len(tasks), 2, len(rows)).swapaxes(0, 1)
