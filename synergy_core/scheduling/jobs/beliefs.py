"""A scheduler's beliefs about its jobs: makes the jobs' tasks, pools their observations, and computes goodputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

import numpy as np

from synergy_core.errors import unknown
from synergy_core.scheduling.jobs.believed_exchange import BelievedExchange
from synergy_core.scheduling.jobs.fitted import FittedSpeeds
from synergy_core.scheduling.jobs.planned import PlannedSpeeds, ProfiledSpeeds
from synergy_core.scheduling.jobs.reports import InputReports, Observations, Theta, refresh_models
from synergy_core.scheduling.jobs.spec import Configurations, JobSpec
from synergy_core.scheduling.jobs.task import Belief, SpeedModel, SynergyTask
from synergy_core.units import Floats

Information = Literal["own", "declared", "shared", "all"]
"""What a policy may know besides a job's own reports: nothing, its declared work, other jobs' reports, or both."""
InputKnowledge = Literal["known", "learned"]
"""Source of input speeds: offline profiles, or only the reports of jobs that `Information` allows."""
BatchLimit = Literal["max", "requested"]

MAX_CACHED_ROWS = 50_000
"""Maximum number of cached rows of `Beliefs.paces`, per set of configurations; a cache that exceeds it is emptied."""


class Beliefs:
    """What the scheduler believes about training jobs: predicts their speed on each configuration from their reports.

    shared: whether a job's reports count for all jobs of its application. declares: whether declared work is known.
    learns_input: whether input speeds are fitted to reports; else they were measured beforehand. tells_types: whether
    a model is fitted for each GPU type; else one is fitted to all observations as if they were of one type. speeds: the
    planner's step times of jobs with plans. profiled: measured step times of models in a testbed's profile. Both may be
    None.
    """

    def __init__(
        self,
        gpu_types: Sequence[str],
        information: Information = "own",
        speeds: PlannedSpeeds | None = None,
        profiled: ProfiledSpeeds | None = None,
        *,
        learns_input: bool = False,
        tells_types: bool = True,
    ) -> None:
        if information not in get_args(Information):
            raise unknown("information", information, get_args(Information))
        self.shared = information in ("shared", "all")
        self.declares = information in ("declared", "all")
        self._learns_input = learns_input
        self._one_type = () if tells_types else tuple(gpu_types)
        self._speeds = speeds
        self._profiled = profiled
        self._fitted = FittedSpeeds(tuple(gpu_types))
        self._fits: dict[bytes, Theta] = {}
        self._pools: dict[str, Observations] = {}
        self._rows: dict[bytes, dict[Belief, Floats]] = {}

    def task(self, spec: JobSpec) -> SynergyTask:
        """A new job's task, whose spec has the declared work and the input profile only if policies may know them."""
        if not self.declares:
            spec = replace(spec, declared_work=float("inf"))
        if self._learns_input:
            spec = replace(spec, pipeline=None)
        pool = self._pools.get(spec.application)
        if pool is None:
            pool = Observations(InputReports() if self._learns_input else None, one_type=self._one_type)
            if self.shared:
                self._pools[spec.application] = pool
        speed: SpeedModel = self._fitted
        exchange, keeps_batch = None, spec.fixed_batch
        if self._profiled is not None and spec.architecture in self._profiled.profile:
            speed = self._profiled
        elif spec.architecture and self._speeds is not None:
            speed = self._speeds
            keeps_batch |= spec.plan_exchange is not None and spec.plan_exchange.keeps_batch
        elif spec.exchange is not None:
            exchange = BelievedExchange(spec.exchange, pool)
            keeps_batch |= spec.exchange.keeps_batch
        return SynergyTask(
            spec, pool, speed, exchange, keeps_batch=keeps_batch, shared=self.shared, declares=self.declares
        )

    def refresh(self, tasks: Sequence[SynergyTask]) -> None:
        """Updates the models of all these jobs in one call."""
        refresh_models((task.pool for task in tasks), self._fits)

    def merge(self) -> None:
        """Shares with other jobs what each job has reported since the last decision, and updates the models."""
        for pool in self._pools.values():
            pool.merge()
        refresh_models(self._pools.values(), self._fits)

    def goodput(self, tasks: Sequence[SynergyTask], rows: Configurations, batch: BatchLimit) -> Floats:
        """(jobs, configurations): initial-batch iterations per second; the first of the two arrays of `paces`."""
        return np.asarray(self.paces(tasks, rows, batch)[0])

    def paces(self, tasks: Sequence[SynergyTask], rows: Configurations, batch: BatchLimit) -> Floats:
        """(2, jobs, configurations): initial-batch iterations per second at the best batch, 0 where no batch fits; and
        samples per second at that batch, 0 where unknown.

        A job's row is computed again only when its model or statistics have changed. batch: whether the batch may grow
        to the job's maximum or only to what its user requested. A GPU type without a model uses the model of the first
        type that has one, times the ratio of the two one-GPU rates (Sia, SOSP 2023, section 3.2). Without observations,
        a job's goodputs are NaN, unless it has plans.
        """
        known = self._rows.setdefault(rows.key() + batch.encode(), {})
        if len(known) > MAX_CACHED_ROWS:
            known.clear()
        outdated: dict[SpeedModel, list[SynergyTask]] = {}
        for task in tasks:
            inputs = id(known), task.pool.version, task.believed_statistics
            if task.paces is None or task.paces[0] != inputs:
                task.paces = inputs, np.zeros(0)
                outdated.setdefault(task.speed, []).append(task)
        for speed, of_speed in outdated.items():
            computed = speed.goodputs(of_speed, rows, known, requested=batch == "requested")
            for index, task in enumerate(of_speed):
                assert task.paces is not None
                task.paces = task.paces[0], computed[:, index].ravel()
        paces = np.concatenate([task.paces[1] for task in tasks if task.paces is not None])
        return paces.reshape(len(tasks), 2, len(rows)).swapaxes(0, 1)
