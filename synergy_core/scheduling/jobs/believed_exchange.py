"""A job's gradient exchange as its scheduler believes it: formulas, corrected by what running jobs report.

Throughput models describe uncompressed steps. The effect of a compressor is predicted from the model and from observed
exchanges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isnan

import numpy as np
from numpy.typing import ArrayLike

from synergy_core.performance.goodput.batch import BatchChoice, JobOnShape, best_batch, goodput_of
from synergy_core.performance.goodput.efficiency import (
    MEASURED_ERROR_WEIGHT,
    ExchangeTerms,
    GradientErrors,
    compressed_sync,
    mixed_error,
    noise_scale,
    plain_sync,
)
from synergy_core.performance.goodput.throughput import GAMMA, exchange_time, overlapped, sync_time
from synergy_core.performance.planner.plan import NO_COMPRESSOR, Plan
from synergy_core.scheduling.jobs.exchange import MARGIN, GradientExchange
from synergy_core.scheduling.jobs.reports import ExchangeReport, Observations, RatioOf, Theta
from synergy_core.scheduling.jobs.spec import Shape, StepReport
from synergy_core.units import Bools, Floats, Ints, columns_of, rows_at


@dataclass(frozen=True, slots=True, eq=False)
class BelievedExchange:
    """The exchange of one job's gradients: which compressor it uses, how long that takes and what it costs."""

    offered: GradientExchange
    """The allowed compressors, with formulas for their time and error."""
    pool: Observations
    """Observations that correct the formulas."""

    # What the running job reports

    def plain_steps(self, shape: Shape) -> list[tuple[float, float]]:
        """The list of observed uncompressed exchanges on that GPU type, within a node or across; created if missing."""
        return self.pool.plain_exchanges.setdefault((shape.gpu_type, shape.nodes > 1), [])

    def uncompressed(self, step: StepReport, step_s: float, sync_s: float) -> tuple[float, float]:
        """Seconds of a reported step, and of its synchronisation, as if it had not been compressed.

        step_s, sync_s: the same for the step as it was, without accumulation. An uncompressed step is also recorded.
        """
        if step.shape.gpus == 1:
            return step_s, sync_s
        if step.plan.compressor != NO_COMPRESSOR:
            return self._as_if_plain(step, step_s, sync_s)
        observed = self.plain_steps(step.shape)
        if not isnan(step.sync_s):
            observed.append((step_s, sync_s))
        return step_s, sync_s

    def _as_if_plain(self, step: StepReport, step_s: float, sync_s: float) -> tuple[float, float]:
        """`uncompressed` of a compressed step.

        The model gives the overlap with computing; without a model, no overlap is assumed. Extrapolation from few bytes
        to all bytes also scales measurement errors. So the estimate is at most the time of the longest observed
        uncompressed exchange and, if the exchange was not measured apart from computing, the model's T_sync.
        """
        compute_s, (gpu_type, nodes, gpus) = step_s - sync_s, step.shape
        theta = self.pool.models.get(gpu_type)
        gamma = 1.0 if theta is None else theta[GAMMA]
        plain_s = plain_sync(exchange_time(step_s, compute_s, gamma), self.terms(step.plan.compressor, step.shape))
        plain_s = np.minimum(plain_s, self._longest_exchange_s(gpu_type, nodes > 1, gamma))
        if theta is not None and isnan(step.sync_s):
            plain_s = np.minimum(plain_s, sync_time(theta, nodes, gpus))
        whole_s = float(overlapped(compute_s, plain_s, gamma))
        return whole_s, whole_s - compute_s

    def observe(self, seen: ExchangeReport, statistics: tuple[float, float] | None, initial_batch: int) -> None:
        """Corrects the beliefs about the compressor that was used. statistics: of the job's gradient, if known."""
        name, (gpu_type, nodes, gpus) = seen.plan.compressor, seen.shape
        if gpus == 1 or name == NO_COMPRESSOR:
            return
        known, where = self.pool.exchanges, (gpu_type, nodes > 1)
        offer, codec_s = self.offered.offer(name), self.offered.codec_s(name, gpu_type, gpus)
        changed = known.add(RatioOf("sent", name, *where), seen.sent_bytes, float(offer.sent_bytes(gpus)))
        changed |= known.add(RatioOf("codec", name, *where), seen.codec_s, codec_s)
        if statistics is not None:
            phi = noise_scale(*statistics, initial_batch)
            lost = mixed_error(offer.errors.signal, offer.errors.noise, phi, seen.plan.global_batch / gpus)
            weight = 1.0 if offer.errors.unbiased else MEASURED_ERROR_WEIGHT
            changed |= known.add(RatioOf("error", name), weight * seen.lost, float(lost))
        if changed:
            self.pool.forget_choices()

    # Times and errors

    def terms(self, name: str, shape: Shape) -> ExchangeTerms:
        """How a compressor changes T_sync on that shape."""
        terms, seen, where = self.offered.terms(name, *shape), self.pool.exchanges, (shape.gpu_type, shape.nodes > 1)
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
    def errors(self) -> GradientErrors:
        """The gradient errors of every offer, (offers,); those of biased compressors are at most 1."""
        believed, known = self.offered.believed_errors, self.pool.exchanges
        if not known:
            return believed
        ratio = np.array([known.ratio(RatioOf("error", each.name)) for each in self.offered.offers])
        limit = np.where(believed.unbiased, np.inf, 1.0)
        signal, noise = (np.minimum(np.multiply(each, ratio), limit) for each in (believed.signal, believed.noise))
        return replace(believed, signal=signal, noise=noise)

    # The choice of compressor and batch

    def best(
        self, job: JobOnShape, theta: Theta, gpu_type: str, nodes: Ints, kept: Sequence[Plan], held: str | None = None
    ) -> tuple[Ints, BatchChoice]:
        """(shapes,): the index of the best offer on each shape, and its batch.

        job: without compression, (1, shapes). kept: for a job that keeps its batch, its plan on each shape; else empty,
        and every offer has its own best batch. held: name of the present compressor. It stays unless another has
        `MARGIN` times its goodput: steps after a change are slower, and some schemes lose the gradients that they hold
        back.
        """
        choices = self._choices(job, theta, gpu_type, nodes, kept)
        has_seen = self._has_seen(gpu_type, nodes)
        chosen = self.offered.best(choices.goodput, has_seen)
        names = [offer.name for offer in self.offered.offers]
        shapes = np.arange(len(nodes))
        if held in names:
            stays = choices.goodput[chosen, shapes] < MARGIN * choices.goodput[names.index(held)]
            chosen = np.where(has_seen & stays, names.index(held), chosen)
        return chosen, BatchChoice._make(each[chosen, shapes] for each in choices)

    def _choices(self, job: JobOnShape, theta: Theta, gpu_type: str, nodes: Ints, kept: Sequence[Plan]) -> BatchChoice:
        """(offers, shapes): the batch under each offer."""
        gpus = np.asarray(job.gpus)
        shapes = [Shape(gpu_type, *one) for one in zip(nodes.tolist(), gpus.tolist(), strict=True)]
        terms = [columns_of([self.terms(offer.name, shape) for shape in shapes]) for offer in self.offered.offers]
        compressed = job._replace(
            sync_s=self.sync_s(theta, gpu_type, nodes, gpus, columns_of(terms)),
            errors=rows_at(self.errors, (slice(None), None)),
        )
        if not kept:
            return best_batch(compressed)
        return goodput_of(compressed, [plan.micro_batch for plan in kept], [plan.accumulation for plan in kept])
