"""What a scheduler believes of all its jobs: tasks, shared or own observations, and goodput for many jobs at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

import numpy as np

from synergy_core.arrays import Floats
from synergy_core.errors import unknown
from synergy_core.jobs.configurations import Configurations
from synergy_core.jobs.exchanging import ExchangingTask
from synergy_core.jobs.fitted import Belief, SynergyTask
from synergy_core.jobs.inputs import InputReports
from synergy_core.jobs.planned import ExchangingPlannedTask, PlannedSpeeds, PlannedTask
from synergy_core.jobs.profiled import ProfiledSpeeds, ProfiledTask
from synergy_core.jobs.reports import Fitter, Observations
from synergy_core.jobs.spec import JobSpec

Information = Literal["own", "declared", "shared", "all"]
"""What a policy may know beside what each job has reported itself: its declared work, other jobs' reports, or both."""
InputKnowledge = Literal["known", "learned"]
"""How fast input is prepared: by profiles made before, or only by what jobs report, those that `Information` allows."""
BatchLimit = Literal["max", "requested"]

MOST_REMEMBERED = 50_000


class Beliefs:
    """Makes the task of each job, keeps models up to date, and answers what jobs would get from configurations.

    shared: whether what one job reports is known of all jobs of its application. declares: whether declared work is.
    learns_input: whether profiles of input are unknown, and fitted to what jobs report.
    speeds: step times of jobs with plans, from the planner; profiled: of jobs whose model was profiled, as measured;
    None: there are no such jobs.
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
        self._fitter = Fitter()
        self._pools: dict[str, Observations] = {}
        self._rows: dict[bytes, dict[Belief, Floats]] = {}

    def task(self, spec: JobSpec) -> SynergyTask:
        """The beliefs about a job that was just submitted. They hold its declared work and the profile of its input
        only where those may be known.
        """
        if not self.declares:
            spec = replace(spec, declared_work=float("inf"))
        if self._learns_input:
            spec = replace(spec, pipeline=None)
        pool = self._pools.get(spec.application) if self.shared else None
        if pool is None:
            pool = Observations(InputReports() if self._learns_input else None)
        if self.shared:
            self._pools[spec.application] = pool
        if self._profiled is not None and spec.architecture in self._profiled.profile:
            return ProfiledTask(spec, pool, self._profiled, shared=self.shared, declares=self.declares)
        if spec.architecture and self._speeds is not None:
            planned = PlannedTask if spec.plan_exchange is None else ExchangingPlannedTask
            return planned(spec, pool, self._speeds, shared=self.shared, declares=self.declares)
        kind = SynergyTask if spec.exchange is None else ExchangingTask
        return kind(spec, pool, shared=self.shared, declares=self.declares)

    def refresh(self, tasks: Sequence[SynergyTask]) -> None:
        """Brings the models of these jobs up to date, in one call for all."""
        self._fitter.refresh(task.pool for task in tasks)

    def merge(self) -> None:
        """What jobs have reported since the last decision becomes known to others."""
        for pool in self._pools.values():
            pool.merge()
        self._fitter.refresh(self._pools.values())

    def goodput(self, tasks: Sequence[SynergyTask], rows: Configurations, batch: BatchLimit) -> Floats:
        """(jobs, configurations): the first half of `paces`."""
        goodput: Floats = self.paces(tasks, rows, batch)[0]
        return goodput

    def paces(self, tasks: Sequence[SynergyTask], rows: Configurations, batch: BatchLimit) -> Floats:
        """(2, jobs, configurations): initial-batch iterations per second at the best batch, 0 where none is feasible;
        and samples per second meanwhile, 0 where nobody knows.

        batch: whether the batch may grow to the job's maximum or only to what its user requested. A GPU type without
        a model takes the curve of the first type that has one, times the ratio of their one-GPU rates
        (Sia, SOSP 2023, section 3.2). NaN throughout for a job of which nothing is known. A job with plans is known
        from the start.
        """
        known = self._rows.setdefault(rows.key() + batch.encode(), {})
        if len(known) > MOST_REMEMBERED:
            known.clear()
        result = np.empty((2, len(tasks), len(rows)))
        for task_class in dict.fromkeys(type(task) for task in tasks):
            at = [index for index, task in enumerate(tasks) if type(task) is task_class]
            alike = [tasks[index] for index in at]
            result[:, at] = task_class.goodputs(alike, rows, self._types, known, requested=batch == "requested")
        return result
