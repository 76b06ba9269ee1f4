"""SynergyTask: what a scheduler believes of one job, and how the job trains on what it is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from synergy_core.goodput.batch import best_batch_one, fixed_batch
from synergy_core.jobs.reports import Observations, Theta
from synergy_core.jobs.spec import JobSpec

if TYPE_CHECKING:
    from synergy_core.planner.plan import Plan

Batch = tuple[int, int]
"""Samples per GPU and micro-batch; accumulation steps."""


class SynergyTask:
    """One job's beliefs.

    spec: what was submitted. pool: its own observations, or its application's. statistics: (squared norm, variance)
    of the gradient as last reported. done_work: iterations at the initial batch it has reported. shared: whether the
    pool is other jobs' too. declares: whether its declared work may be believed.
    """

    __slots__ = ("declares", "done_work", "pool", "shared", "spec", "statistics")

    def __init__(self, spec: JobSpec, pool: Observations, *, shared: bool, declares: bool) -> None:
        self.spec = spec
        self.pool = pool
        self.shared = shared
        self.declares = declares
        self.statistics: tuple[float, float] | None = None
        self.done_work = 0.0

    def observe(self, gpu_type: str, nodes: int, gpus: int, local_batch: int, step_s: float, sync_s: float) -> bool:
        """A mean step time of the running job; whether it is news."""
        shape = (nodes, gpus, local_batch)
        if self.pool.knows(gpu_type, shape):
            return False
        if self.shared:
            self.pool.add_later(gpu_type, shape, step_s, sync_s)
        else:
            self.pool.add(gpu_type, shape, step_s, sync_s)
        return True

    def report(self, statistics: tuple[float, float]) -> bool:
        """The gradient's statistics of the running job; whether they have changed."""
        if statistics == self.statistics:
            return False
        self.statistics = statistics
        if self.pool.first_statistics is None:
            self.pool.first_statistics = statistics
        return True

    @property
    def believed_statistics(self) -> tuple[float, float] | None:
        """Its own latest, else the first that its pool has seen."""
        return self.statistics or self.pool.first_statistics

    @property
    def models(self) -> Mapping[str, Theta]:
        """The throughput model of each GPU type that was observed."""
        return self.pool.models

    def choose(self, gpu_type: str, nodes: int, gpus: int) -> Batch:
        """The batch of most goodput on that shape, by what is believed; the initial one while nothing is.

        Pollux (OSDI 2021), section 4.1; goodput_policies.md, section 1.3.
        """
        statistics = self.believed_statistics
        spec, choices = self.spec, self.pool.choices
        asked = (gpu_type, nodes, gpus, statistics, spec.initial_batch, spec.max_batch, spec.requested_batch)
        batch: Batch | None = choices.get(asked)
        if batch is None:
            batch = choices[asked] = self._choose(gpu_type, nodes, gpus, statistics)
        return batch

    def _choose(self, gpu_type: str, nodes: int, gpus: int, statistics: tuple[float, float] | None) -> Batch:
        spec = self.spec
        smallest, largest = spec.local_batches[gpu_type]
        theta = self.pool.models.get(gpu_type)
        if spec.fixed_batch:
            return fixed_batch(spec.requested_batch, gpus, spec.initial_batch, spec.max_batch, largest)
        if theta is None or statistics is None:
            total = max(spec.initial_batch, smallest * gpus)
            return fixed_batch(total, gpus, spec.initial_batch, spec.max_batch, largest)
        choice = best_batch_one(
            theta,
            *statistics,
            initial_batch=spec.initial_batch,
            max_batch=spec.max_batch,
            min_local=smallest,
            max_local=largest,
            nodes=nodes,
            gpus=gpus,
        )
        if not choice.local_batch:  # more GPUs than its largest batch can feed
            return fixed_batch(spec.max_batch, gpus, spec.initial_batch, spec.max_batch, largest)
        return choice.local_batch, choice.accumulation

    def choose_plan(
        self, gpu_type: str, nodes: int, gpus: int, held: Plan | None = None, *, requested: bool = False
    ) -> Plan | None:
        """The parallel plan to train under there, batch included; None where its driver chooses, as here.

        held: under which it runs there now. requested: at the requested batch.
        """
        return None

    def requested_rate(self, kind: str) -> float:
        """Iterations per second with the requested GPUs and batch, by a profile made offline; 0 without one."""
        return self.spec.requested_rate.get(kind, 0.0)

    def declared_remaining(self) -> float:
        """Iterations at the initial batch still to do; NaN where nothing is declared, or more than that was done."""
        left = self.spec.declared_work - self.done_work
        return left if self.declares and 0 < left < np.inf else float("nan")
