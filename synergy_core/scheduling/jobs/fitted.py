"""SynergyTask: what a scheduler believes about one job, and how the job trains on its GPUs.

All throughput models describe uncompressed steps. A task whose spec has an `exchange` chooses a compressor together
with its batch; the compressor's effect is predicted from the model and from observed compressed exchanges.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from math import inf, isnan, nan
from typing import ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike

from synergy_core.performance.goodput.batch import BatchChoice, JobOnShape, best_batch, best_batch_of_one, goodput_of
from synergy_core.performance.goodput.efficiency import (
    MEASURED_ERROR_WEIGHT,
    ExchangeTerms,
    GradientErrors,
    compressed_sync,
    mixed_error,
    noise_scale,
    plain_sync,
)
from synergy_core.performance.goodput.pipeline import InputPipeline
from synergy_core.performance.goodput.throughput import (
    GAMMA,
    exchange_time,
    gradient_time,
    overlapped,
    step_terms,
    sync_time,
)
from synergy_core.performance.planner.plan import NO_COMPRESSOR, Plan
from synergy_core.scheduling.jobs.exchange import MARGIN, GradientExchange
from synergy_core.scheduling.jobs.reports import ExchangeReport, Observations, RatioOf, Theta
from synergy_core.scheduling.jobs.spec import Configurations, JobSpec, Shape, StepReport, data_parallel
from synergy_core.units import Bools, Floats, Ints, columns_of, rows_at

MAX_SYNC_FRACTION = 0.95
"""Largest fraction of a step that can be attributed to synchronisation."""
Belief = tuple[object, ...]
"""Cache key of a job's goodputs: all values that they depend on, such as a model's constants, GPU types, statistics and
batch limits. With compression or plans, the key has the pool's serial number and version in place of the constants."""
PaceRequest = tuple["SynergyTask", Theta, str, int]
"""A task, the model and GPU type to use, and the largest batch allowed."""


@dataclass(slots=True, eq=False)
class SynergyTask:
    """Beliefs about one data-parallel job: throughput models that are fitted to its reports."""

    spec: JobSpec
    """The job as its user submitted it, without the declared work or input profile if the policy may not know them."""
    pool: Observations
    """Observations of the job alone or, if jobs share reports, of all jobs of its application."""
    _: KW_ONLY
    shared: bool
    """Whether other jobs use the pool too."""
    declares: bool
    """Whether declared work is known."""
    statistics: tuple[float, float] | None = field(default=None, init=False)
    """(squared norm, variance) of the gradient as last reported; None before the first report."""
    done_work: float = field(default=0.0, init=False)
    """Reported progress, in iterations at the initial batch."""
    gpu_slowdown: float | None = field(default=None, init=False)
    """GPU time per sample in the last reported step ÷ that at `spec.requested_rate`; None before the first report."""
    paces: tuple[object, Floats] | None = field(default=None, init=False)
    """A key of all inputs, and the job's row of `Beliefs.paces` computed from them: goodputs, then samples per second.
    None before it is computed."""

    scheduled: ClassVar[bool] = False
    """Whether the scheduler chooses the plan when it decides, because another plan may need a restart. Otherwise the
    job chooses its plan as it trains."""

    @property
    def exchange(self) -> GradientExchange | None:
        """How the job may exchange its gradients; None if it never compresses them."""
        return self.spec.exchange

    def may_exchange(self, exchange: GradientExchange) -> None:
        """Sets the exchange once the model's layers are known. Jobs that share observations need equal exchanges."""
        self.spec = replace(self.spec, exchange=exchange)
        self._forget_choices()

    def _forget_choices(self) -> None:
        """Drops cached choices after beliefs have changed."""
        self.pool.version += 1
        self.pool.choices.clear()

    # What the running job reports

    def knows(self, shape: Shape, micro_batch: int) -> bool:
        """Whether a step on this shape with this many samples per GPU was observed, so that another adds nothing."""
        return self.pool.knows(shape.gpu_type, (shape.nodes, shape.gpus, micro_batch))

    def observe(self, step: StepReport) -> StepReport | None:
        """Records a mean step of the job. Returns the step without accumulation, or None if such a step is known."""
        if self.knows(step.shape, step.plan.micro_batch):
            return None
        gpu_type, nodes, gpus = step.shape
        point = (nodes, gpus, step.plan.micro_batch)
        step_s, sync_s = self._without_accumulation(step)
        self.pool.add(gpu_type, point, step_s, sync_s, later=self.shared)
        return StepReport(step.shape, Plan(data=gpus, micro_batch=step.plan.micro_batch), step_s, sync_s)

    def recall(self, shape: Shape, micro_batch: int, step_s: float, sync_s: float) -> None:
        """Restores an observation that `observe` returned before the scheduler restarted."""
        self.pool.add(shape.gpu_type, (shape.nodes, shape.gpus, micro_batch), step_s, sync_s, later=self.shared)
        if self.exchange is not None and shape.gpus > 1:
            self._plain_exchanges(shape)

    def _without_accumulation(self, step: StepReport) -> tuple[float, float]:
        """Seconds of one micro-batch with synchronisation, and of the synchronisation alone, both uncompressed.

        A step has accumulation − 1 micro-batches without synchronisation and one with it. If synchronisation was not
        measured apart from the backward pass that it overlaps, it is the step's time minus the model's computing time.
        """
        count, sync_s = step.plan.accumulation, step.sync_s
        if isnan(sync_s):
            theta, sync_s = self.models.get(step.shape.gpu_type), 0.0
            if step.shape.gpus > 1 and theta is not None:
                compute_s = float(gradient_time(theta, step.plan.micro_batch))
                sync_s = min(max(step.step_s - count * compute_s, 0.0), MAX_SYNC_FRACTION * step.step_s)
        step_s = (step.step_s + (count - 1) * sync_s) / count
        if self.exchange is None or step.shape.gpus == 1:
            return step_s, sync_s
        if step.plan.compressor != NO_COMPRESSOR:
            return self._as_if_plain(step, step_s, sync_s)
        observed = self._plain_exchanges(step.shape)
        if not isnan(step.sync_s):
            observed.append((step_s, sync_s))
        return step_s, sync_s

    def _as_if_plain(self, step: StepReport, step_s: float, sync_s: float) -> tuple[float, float]:
        """Estimates the seconds of a compressed step, and of its synchronisation, as if it had not been compressed.

        The model gives the overlap with computing; without a model, no overlap is assumed. Extrapolation from few bytes
        to all bytes also scales measurement errors. So the estimate is at most the time of the longest observed
        uncompressed exchange and, if the exchange was not measured apart from computing, the model's T_sync.
        """
        compute_s, (gpu_type, nodes, gpus) = step_s - sync_s, step.shape
        theta = self.models.get(gpu_type)
        gamma = 1.0 if theta is None else theta[GAMMA]
        plain_s = plain_sync(exchange_time(step_s, compute_s, gamma), self._terms(step.plan.compressor, step.shape))
        plain_s = np.minimum(plain_s, self._longest_exchange_s(gpu_type, nodes > 1, gamma))
        if theta is not None and isnan(step.sync_s):
            plain_s = np.minimum(plain_s, sync_time(theta, nodes, gpus))
        whole_s = float(overlapped(compute_s, plain_s, gamma))
        return whole_s, whole_s - compute_s

    def _plain_exchanges(self, shape: Shape) -> list[tuple[float, float]]:
        """The list of observed uncompressed exchanges on that GPU type, within a node or across; created if missing."""
        return self.pool.plain_exchanges.setdefault((shape.gpu_type, shape.nodes > 1), [])

    def observe_exchange(self, seen: ExchangeReport) -> None:
        """Corrects the beliefs about a compressor with measurements of an exchange in which the job used it."""
        name, (gpu_type, nodes, gpus), exchange = seen.plan.compressor, seen.shape, self.exchange
        if exchange is None or gpus == 1 or name == NO_COMPRESSOR:
            return
        known, where = self.pool.exchanges, (gpu_type, nodes > 1)
        offer, codec_s = exchange.offer(name), exchange.codec_s(name, gpu_type, gpus)
        changed = known.add(RatioOf("sent", name, *where), seen.sent_bytes, float(offer.sent_bytes(gpus)))
        changed |= known.add(RatioOf("codec", name, *where), seen.codec_s, codec_s)
        if (statistics := self.believed_statistics) is not None:
            phi = noise_scale(*statistics, self.spec.initial_batch)
            lost = mixed_error(offer.errors.signal, offer.errors.noise, phi, seen.plan.global_batch / gpus)
            weight = 1.0 if offer.errors.unbiased else MEASURED_ERROR_WEIGHT
            changed |= known.add(RatioOf("error", name), weight * seen.lost, float(lost))
        if changed:
            self._forget_choices()

    def observe_input(self, step: StepReport) -> None:
        """Learns input speeds from a mean step of the running job, unless they come from offline profiles."""
        gpu_step_s, rate = step.step_s - step.waited_s, self.spec.requested_rate.get(step.shape.gpu_type)
        if self.pool.inputs is None or step.given is None or not rate or gpu_step_s <= 0:
            return
        self.pool.inputs.add(step)
        requested_gpu_s = self.spec.requested_gpus / (rate * self.spec.requested_batch)  # per sample
        self.gpu_slowdown = gpu_step_s * step.shape.gpus / step.plan.global_batch / requested_gpu_s

    def report(self, statistics: tuple[float, float]) -> bool:
        """Records the running job's gradient statistics; returns whether they have changed."""
        if statistics == self.statistics:
            return False
        self.statistics = statistics
        if self.pool.first_statistics is None:
            self.pool.first_statistics = statistics
        return True

    @property
    def believed_statistics(self) -> tuple[float, float] | None:
        """The job's own latest gradient statistics, else the first in its pool."""
        return self.statistics or self.pool.first_statistics

    @property
    def models(self) -> Mapping[str, Theta]:
        return self.pool.models

    @property
    def pipeline(self) -> InputPipeline | None:
        """How fast the job's input is prepared, from profiles or reports; None while unknown."""
        return self.spec.pipeline if self.pool.inputs is None else self.pool.inputs.believed

    # Beliefs about gradient exchanges: formulas, corrected by observations

    def _terms(self, name: str, shape: Shape) -> ExchangeTerms:
        """How a compressor changes T_sync on that shape."""
        assert self.exchange is not None
        terms, seen, where = self.exchange.terms(name, *shape), self.pool.exchanges, (shape.gpu_type, shape.nodes > 1)
        if not seen:
            return terms
        sent, codec = (seen.ratio(RatioOf(quantity, name, *where)) for quantity in ("sent", "codec"))
        return replace(terms, sent=np.multiply(terms.sent, sent), codec_s=np.multiply(terms.codec_s, codec))

    def sync_s(self, theta: Theta, gpu_type: str, nodes: ArrayLike, gpus: ArrayLike, terms: ExchangeTerms) -> Floats:
        """The model's T_sync minus what compression saves of it, or of the longest observed exchange if this is less.

        The model's T_sync may include time that compression cannot save, such as waiting for the slowest GPU.
        """
        plain_s = sync_time(theta, nodes, gpus)
        within, across = (self._longest_exchange_s(gpu_type, each, theta[GAMMA]) for each in (False, True))
        exchange_s = np.minimum(plain_s, np.where(np.asarray(nodes) > 1, across, within))
        return plain_s + (compressed_sync(exchange_s, terms) - exchange_s)

    def _longest_exchange_s(self, gpu_type: str, across: bool, gamma: float) -> float:
        """The longest T_sync of observed uncompressed exchanges, within a node or across; inf if there are none."""
        observed = self.pool.plain_exchanges.get((gpu_type, across))
        if not observed:
            return float("inf")
        step_s, sync_s = np.array(observed).T
        return float(exchange_time(step_s, step_s - sync_s, gamma).max())

    def _has_seen(self, gpu_type: str, nodes: ArrayLike) -> Bools:
        """(…,): whether uncompressed exchanges were observed: within a node where `nodes` is 1, else across nodes."""
        within, across = ((gpu_type, each) in self.pool.plain_exchanges for each in (False, True))
        return np.where(np.asarray(nodes) > 1, across, within)

    @property
    def _errors(self) -> GradientErrors:
        """The gradient errors of every offer, (offers,); those of biased compressors are at most 1."""
        exchange = self.exchange
        assert exchange is not None
        believed, known = exchange.believed_errors, self.pool.exchanges
        if not known:
            return believed
        ratio = np.array([known.ratio(RatioOf("error", each.name)) for each in exchange.offers])
        limit = np.where(believed.unbiased, np.inf, 1.0)
        signal, noise = (np.minimum(np.multiply(each, ratio), limit) for each in (believed.signal, believed.noise))
        return replace(believed, signal=signal, noise=noise)

    # How the job trains

    @property
    def keeps_batch(self) -> bool:
        return self.spec.fixed_batch or (self.exchange is not None and self.exchange.keeps_batch)

    def train_on(self, shape: Shape, held: Plan | None = None, *, requested: bool = False) -> Plan:
        """The plan and batch of highest believed goodput on these GPUs; the initial batch while goodput is unknown.

        Pollux (OSDI 2021), section 4.1; `goodput.batch` has the rule for batches. held: the present plan.
        Its compressor stays unless another has `MARGIN` times its goodput: steps after a change are slower, and some
        schemes lose the gradients that they hold back. Tasks whose plans change only with a restart also consider its
        cost. requested: use the requested batch. Raises InputError if none of a job's parallel plans fits.
        """
        spec, choices, statistics = self.spec, self.pool.choices, self.believed_statistics
        # A single replica exchanges nothing.
        exchange = self.exchange if shape.gpus > 1 else None
        keeps = requested or self.keeps_batch
        if exchange is None and keeps:
            return as_requested(spec, shape)
        name = held.compressor if exchange is not None and held is not None and not keeps else None
        key = (keeps, name, *shape, statistics, spec.initial_batch, spec.max_batch, keeps and spec.requested_batch)
        plan: Plan | None = choices.get(key)
        if plan is None:
            choices[key] = plan = self._best(exchange, shape, name, keeps=keeps)
        return plan

    def _best(self, exchange: GradientExchange | None, shape: Shape, held: str | None, *, keeps: bool) -> Plan:
        """The plan with the best compressor, at the best batch or the requested one. held: the compressor to keep."""
        spec, (gpu_type, nodes, gpus) = self.spec, shape
        theta, statistics, compressor = self.models.get(gpu_type), self.believed_statistics, NO_COMPRESSOR
        if theta is None or statistics is None:
            if exchange is not None:
                compressor = exchange.only or NO_COMPRESSOR
            batch = spec.requested_batch if keeps else max(spec.initial_batch, spec.local_batches[gpu_type][0] * gpus)
            return replace(as_requested(spec, shape, batch), compressor=compressor)
        local_batch = accumulation = 0
        if exchange is not None:
            one_shape = np.array([nodes]), np.array([gpus])
            choices = self._choices(exchange, theta, gpu_type, spec.max_batch, *one_shape, keeps=keeps)
            goodput, names = choices.goodput[:, 0], [offer.name for offer in exchange.offers]
            has_seen = self._has_seen(gpu_type, nodes)
            best = int(exchange.best(goodput, has_seen))
            if held in names and has_seen and goodput[best] < MARGIN * goodput[names.index(held)]:
                best = names.index(held)
            compressor = names[best]
            if keeps:
                return replace(as_requested(spec, shape), compressor=compressor)
            local_batch, accumulation = int(choices.local_batch[best, 0]), int(choices.accumulation[best, 0])
        if not local_batch:
            choice = best_batch_of_one(_on_shapes([(self, theta, gpu_type, spec.max_batch)], nodes, gpus))
            local_batch, accumulation = int(choice.local_batch), int(choice.accumulation)
        if not local_batch:  # there are more GPUs than the job's largest batch can feed
            return replace(as_requested(spec, shape, spec.max_batch), compressor=compressor)
        return Plan(data=gpus, micro_batch=local_batch, accumulation=accumulation, compressor=compressor)

    # What policies read

    @classmethod
    def goodputs(
        cls,
        tasks: Sequence[Self],
        rows: Configurations,
        gpu_types: Sequence[str],
        known: dict[Belief, Floats],
        *,
        requested: bool,
    ) -> Floats:
        """(2, jobs, configurations): `Beliefs.paces` of tasks of this class.

        known: the cached rows by `Belief`. Missing rows are computed once for all jobs with equal beliefs, and added.
        """
        result = np.full((2, len(tasks), len(rows)), np.nan)
        result[1] = 0.0
        for index, gpu_type in enumerate(gpu_types):
            columns = np.flatnonzero(rows.gpu_type == index)
            if not len(columns):
                continue
            missing: dict[Belief, PaceRequest] = {}
            keys: list[tuple[int, Belief, float]] = []
            for job, task in enumerate(tasks):
                statistics, models, spec = task.believed_statistics, task.models, task.spec
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
                    missing[key] = task, models[source], source, largest
            if missing:
                shapes = rows.nodes[columns], rows.gpus[columns]
                known.update(zip(missing, cls._paces(list(missing.values()), *shapes), strict=True))
            if keys:
                jobs, beliefs, ratios = zip(*keys, strict=True)
                paces = np.stack([known[belief] for belief in beliefs], axis=1) * np.array(ratios)[:, None]
                result[:, np.array(jobs)[:, None], columns] = paces
        return result

    @classmethod
    def _paces(cls, requests: Sequence[PaceRequest], nodes: Ints, gpus: Ints) -> Floats:
        """(requests, 2, shapes): goodput, and samples per second."""
        result = np.empty((len(requests), 2, len(gpus)))
        shapes = np.arange(len(gpus))
        plain = [index for index, (task, *_) in enumerate(requests) if task.exchange is None]
        for index, (task, theta, source, max_batch) in enumerate(requests):
            if (exchange := task.exchange) is None:
                continue
            choices = task._choices(exchange, theta, source, max_batch, nodes, gpus, keeps=task.keeps_batch)
            chosen = exchange.best(choices.goodput, task._has_seen(source, nodes))
            result[index] = choices.goodput[chosen, shapes], choices.throughput[chosen, shapes]
        if plain:
            best = best_batch(_on_shapes([requests[index] for index in plain], nodes, gpus))
            result[plain] = np.stack((best.goodput, best.throughput), axis=1)
        return result

    def _choices(
        self,
        exchange: GradientExchange,
        theta: Theta,
        gpu_type: str,
        max_batch: int,
        nodes: Ints,
        gpus: Ints,
        *,
        keeps: bool,
    ) -> BatchChoice:
        """(offers, shapes): the best batch up to `max_batch` under each offer. keeps: use the requested batch instead,
        with goodput 0 where it does not fit the GPUs.
        """
        shapes = [Shape(gpu_type, *one) for one in zip(nodes.tolist(), gpus.tolist(), strict=True)]
        terms = [columns_of([self._terms(offer.name, shape) for shape in shapes]) for offer in exchange.offers]
        job = _on_shapes([(self, theta, gpu_type, max_batch)], nodes, gpus)._replace(
            sync_s=self.sync_s(theta, gpu_type, nodes, gpus, columns_of(terms)),
            errors=rows_at(self._errors, (slice(None), None)),
        )
        if not keeps:
            return best_batch(job)
        plans = [as_requested(self.spec, shape) for shape in shapes]
        return goodput_of(job, [plan.micro_batch for plan in plans], [plan.accumulation for plan in plans])

    def requested_rate(self, gpu_type: str) -> float:
        """Iterations per second with the requested GPUs and batch, from an offline profile; 0 without a profile."""
        return self.spec.requested_rate.get(gpu_type, 0.0)

    def declared_remaining(self) -> float:
        """Remaining iterations at the initial batch; NaN if no work was declared or the declared work is done."""
        left = self.spec.declared_work - self.done_work
        return left if self.declares and 0 < left < inf else nan


def _on_shapes(requests: Sequence[PaceRequest], nodes: Ints | int, gpus: Ints | int) -> JobOnShape:
    """What the tasks believe about jobs, (requests, 1), on these shapes, (shapes,) or one."""
    alpha_s, beta_s, gamma, sync_s = step_terms(np.array([theta for _, theta, *_ in requests])[:, None], nodes, gpus)
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
