"""Throughput models that are fitted to the reports of data-parallel jobs: they predict speed, and choose the batch.

The models describe uncompressed steps. A task that has an `exchange` chooses a compressor together with its batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isnan
from typing import ClassVar, NamedTuple

import numpy as np

from synergy_core.performance.goodput.batch import JobOnShape, best_batch, best_batch_of_one
from synergy_core.performance.goodput.throughput import gradient_time, step_terms
from synergy_core.performance.planner.plan import NO_COMPRESSOR, Plan
from synergy_core.scheduling.jobs.reports import Theta
from synergy_core.scheduling.jobs.spec import Configurations, JobSpec, Shape, StepReport, data_parallel
from synergy_core.scheduling.jobs.task import Belief, SynergyTask
from synergy_core.units import Floats, Ints

MAX_SYNC_FRACTION = 0.95
"""Largest fraction of a step that can be attributed to synchronisation."""


class _Request(NamedTuple):
    """A job whose batch is to be chosen."""

    task: SynergyTask
    theta: Theta
    """Constants of the model to use."""
    gpu_type: str
    """The GPU type of the model and of the limits to samples per GPU."""
    max_batch: int
    """Largest total batch allowed."""


@dataclass(frozen=True, eq=False)
class FittedSpeeds:
    """The speed model of data-parallel jobs: Pollux's formula of the step time, fitted to reports (`Observations`)."""

    gpu_types: tuple[str, ...]
    """The cluster's GPU types."""
    scheduled: ClassVar[bool] = False

    def observe(self, task: SynergyTask, step: StepReport) -> StepReport | None:
        """Records a step. Returns it without accumulation and compression, or None if such a step is known."""
        if task.knows(step.shape, step.plan.micro_batch):
            return None
        gpu_type, nodes, gpus = step.shape
        point = (nodes, gpus, step.plan.micro_batch)
        step_s, sync_s = _without_accumulation(task.pool.models.get(gpu_type), step)
        if task.exchange is not None:
            step_s, sync_s = task.exchange.uncompressed(step, step_s, sync_s)
        task.pool.add(gpu_type, point, step_s, sync_s, later=task.shared)
        return StepReport(step.shape, Plan(data=gpus, micro_batch=step.plan.micro_batch), step_s, sync_s)

    def requested_rate(self, task: SynergyTask, gpu_type: str) -> float:
        """Iterations per second with the requested GPUs and batch, from an offline profile; 0 without a profile."""
        return task.spec.requested_rate.get(gpu_type, 0.0)

    def train_on(self, task: SynergyTask, shape: Shape, held: Plan | None, *, requested: bool) -> Plan:
        spec, choices, statistics = task.spec, task.pool.choices, task.believed_statistics
        # A single replica exchanges nothing.
        exchanges = task.exchange is not None and shape.gpus > 1
        keeps = requested or task.keeps_batch
        if not exchanges and keeps:
            return as_requested(spec, shape)
        name = held.compressor if exchanges and held is not None and not keeps else None
        key = (keeps, name, *shape, statistics, spec.initial_batch, spec.max_batch, keeps and spec.requested_batch)
        plan: Plan | None = choices.get(key)
        if plan is None:
            choices[key] = plan = self._best(task, shape, name, exchanges=exchanges, keeps=keeps)
        return plan

    def _best(self, task: SynergyTask, shape: Shape, held: str | None, *, exchanges: bool, keeps: bool) -> Plan:
        """The plan with the best compressor, at the best batch or the requested one. held: the compressor to keep."""
        spec, exchange, (gpu_type, nodes, gpus) = task.spec, task.exchange if exchanges else None, shape
        theta, compressor = task.pool.models.get(gpu_type), NO_COMPRESSOR
        if theta is None or task.believed_statistics is None:
            if exchange is not None:
                compressor = exchange.offered.only or NO_COMPRESSOR
            smallest, _ = spec.local_batches[gpu_type]
            batch = spec.requested_batch if keeps else max(spec.initial_batch, smallest * gpus)
            return replace(as_requested(spec, shape, batch), compressor=compressor)
        request, choice = _Request(task, theta, gpu_type, spec.max_batch), None
        if exchange is not None:
            on_nodes, kept = np.array([nodes]), [as_requested(spec, shape)] if keeps else []
            job = _on_shapes([request], on_nodes, np.array([gpus]))
            chosen, choice = exchange.best(job, theta, gpu_type, on_nodes, kept, held)
            compressor = exchange.offered.offers[int(chosen[0])].name
            if keeps:
                return replace(kept[0], compressor=compressor)
        if choice is None or not choice.local_batch.any():
            choice = best_batch_of_one(_on_shapes([request], nodes, gpus))
        local_batch, accumulation = choice.local_batch.item(), choice.accumulation.item()
        if not local_batch:  # there are more GPUs than the job's largest batch can feed
            return replace(as_requested(spec, shape, spec.max_batch), compressor=compressor)
        return Plan(data=gpus, micro_batch=local_batch, accumulation=accumulation, compressor=compressor)

    def goodputs(
        self, tasks: Sequence[SynergyTask], rows: Configurations, known: dict[Belief, Floats], *, requested: bool
    ) -> Floats:
        result, gpu_types = np.full((2, len(tasks), len(rows)), np.nan), self.gpu_types
        result[1] = 0.0
        for index, gpu_type in enumerate(gpu_types):
            columns = np.flatnonzero(rows.gpu_type == index)
            if not len(columns):
                continue
            missing: dict[Belief, _Request] = {}
            keys: list[tuple[int, Belief, float]] = []
            for job, task in enumerate(tasks):
                statistics, models, spec = task.believed_statistics, task.pool.models, task.spec
                source = gpu_type if gpu_type in models else next((each for each in gpu_types if each in models), None)
                if source is None or statistics is None:
                    continue
                largest = spec.max_batch
                if task.exchange is not None and task.keeps_batch:
                    largest = spec.requested_batch
                elif requested:
                    largest = min(largest, max(spec.requested_batch, spec.initial_batch))
                ratio = 1.0 if source == gpu_type else spec.single_gpu_rate[gpu_type] / spec.single_gpu_rate[source]
                code = gpu_types.index(source) * len(gpu_types) + index
                learnt = models[source].tobytes() if task.exchange is None else (task.pool.serial, task.pool.version)
                key = (learnt, code, statistics, largest, spec.initial_batch, *spec.local_batches[source])
                keys.append((job, key, ratio))
                if key not in known and key not in missing:
                    missing[key] = _Request(task, models[source], source, largest)
            if missing:
                paces = _paces(list(missing.values()), rows.nodes[columns], rows.gpus[columns])
                known.update(zip(missing, paces, strict=True))
            if keys:
                jobs, beliefs, ratios = zip(*keys, strict=True)
                paces = np.stack([known[belief] for belief in beliefs], axis=1) * np.array(ratios)[:, None]
                result[:, np.array(jobs)[:, None], columns] = paces
        return result


def _without_accumulation(theta: Theta | None, step: StepReport) -> tuple[float, float]:
    """Seconds of one micro-batch with synchronisation, and of the synchronisation alone.

    A step has accumulation − 1 micro-batches without synchronisation and one with it. If synchronisation was not
    measured apart from the backward pass that it overlaps, it is the step's time minus the model's computing time.
    """
    count, sync_s = step.plan.accumulation, step.sync_s
    if isnan(sync_s):
        sync_s = 0.0
        if step.shape.gpus > 1 and theta is not None:
            compute_s = float(gradient_time(theta, step.plan.micro_batch))
            sync_s = min(max(step.step_s - count * compute_s, 0.0), MAX_SYNC_FRACTION * step.step_s)
    return (step.step_s + (count - 1) * sync_s) / count, sync_s


def _paces(requests: Sequence[_Request], nodes: Ints, gpus: Ints) -> Floats:
    """(requests, 2, shapes): goodput, and samples per second, at the best batch and compressor."""
    result = np.empty((len(requests), 2, len(gpus)))
    plain = [index for index, request in enumerate(requests) if request.task.exchange is None]
    if plain:
        best = best_batch(_on_shapes([requests[index] for index in plain], nodes, gpus))
        result[plain] = np.stack((best.goodput, best.throughput), axis=1)
    for index, request in enumerate(requests):
        task, theta, gpu_type, _ = request
        if task.exchange is None:
            continue
        shapes = zip(nodes.tolist(), gpus.tolist(), strict=True)
        kept = [as_requested(task.spec, Shape(gpu_type, *each)) for each in shapes] if task.keeps_batch else []
        _, best = task.exchange.best(_on_shapes([request], nodes, gpus), theta, gpu_type, nodes, kept)
        result[index] = best.goodput, best.throughput
    return result


def _on_shapes(requests: Sequence[_Request], nodes: Ints | int, gpus: Ints | int) -> JobOnShape:
    """What is believed about jobs, (requests, 1), on these shapes, (shapes,) or one."""
    thetas = np.array([request.theta for request in requests])[:, None]
    alpha_s, beta_s, gamma, sync_s = step_terms(thetas, nodes, gpus)
    rows = [
        (
            *(task.believed_statistics or (1.0, 0.0)),
            *(task.spec.initial_batch, max_batch),
            *task.spec.local_batches[gpu_type],
        )
        for task, _, gpu_type, max_batch in requests
    ]
    grad_sqr, grad_var, initial_batch, max_batch, min_local, max_local = np.array(rows).T[..., None]
    return JobOnShape(
        alpha_s, beta_s, gamma, sync_s, grad_sqr, grad_var, initial_batch, max_batch, min_local, max_local, gpus
    )


def as_requested(spec: JobSpec, shape: Shape, batch: int | None = None) -> Plan:
    """The plan of a data-parallel job at `batch`, by default the requested batch."""
    largest = spec.local_batches[shape.gpu_type][1]
    limits = {"initial_batch": spec.initial_batch, "max_batch": spec.max_batch, "max_local": largest}
    return data_parallel(spec.requested_batch if batch is None else batch, shape.gpus, **limits)
