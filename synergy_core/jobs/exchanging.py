"""ExchangingTask: a job whose compressor is chosen together with its batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import isnan

import numpy as np
from numpy.typing import ArrayLike

from synergy_core.arrays import Bools, Floats, Ints
from synergy_core.goodput.batch import best_batch, best_batch_one, goodput_at
from synergy_core.goodput.compressed import GIVEN_WEIGHT, GradientErrors, mixed_error
from synergy_core.goodput.efficiency import noise_scale
from synergy_core.goodput.exchange import ExchangeTerms, compressed_sync, plain_sync
from synergy_core.goodput.throughput import exchange_time, overlapped, sync_time
from synergy_core.jobs.exchange import MARGIN, GradientExchange
from synergy_core.jobs.fitted import PaceAsked, SynergyTask, as_requested
from synergy_core.jobs.reports import Theta
from synergy_core.jobs.seen_exchanges import ExchangeReport, Quantity, RatioOf
from synergy_core.jobs.training import Shape, StepReport
from synergy_core.planner.plan import NO_COMPRESSOR, Plan

GAMMA = 6


class ExchangingTask(SynergyTask):
    """A task whose spec has an `exchange`. Models are of uncompressed steps throughout; the rest follows from them."""

    __slots__ = ()

    @property
    def exchange(self) -> GradientExchange:
        """What its gradients' exchange may be."""
        assert self.spec.exchange is not None
        return self.spec.exchange

    def may_exchange(self, exchange: GradientExchange) -> None:
        """What its exchange may be from now on, as its layers have become known. All jobs that share its observations
        are told the same.
        """
        self.spec = replace(self.spec, exchange=exchange)
        self._believe_otherwise()

    def _believe_otherwise(self) -> None:
        """What was made of beliefs before is made again."""
        self.pool.version += 1
        self.pool.choices.clear()

    # What the running job reports

    def _without_accumulation(self, step: StepReport) -> tuple[float, float]:
        """Seconds as they would be without compression, by the model's overlap; without a model, none.

        A small error of an exchange of few bytes is a large one of the whole: no more than was ever seen uncompressed,
        or, where nobody tells exchanging and computing apart, than uncompressed steps made the model believe.
        """
        step_s, sync_s = super()._without_accumulation(step)
        name, (gpu_type, nodes, gpus) = step.plan.compressor, step.shape
        if gpus == 1:
            return step_s, sync_s
        if name == NO_COMPRESSOR:
            seen = self._saw_plain(step.shape)
            if not isnan(step.sync_s):
                seen.append((step_s, sync_s))
            return step_s, sync_s
        compute_s, theta = step_s - sync_s, self.models.get(gpu_type)
        gamma = 1.0 if theta is None else theta[GAMMA]
        exchanged_s = exchange_time(step_s, compute_s, gamma)
        plain_s = plain_sync(exchanged_s, self._terms(name, step.shape))
        plain_s = np.minimum(plain_s, self._most_seen_s(gpu_type, nodes > 1, gamma))
        if theta is not None and isnan(step.sync_s):
            plain_s = np.minimum(plain_s, sync_time(theta, nodes, gpus))
        whole_s = float(overlapped(compute_s, plain_s, gamma))
        return whole_s, whole_s - compute_s

    def _saw_plain(self, shape: Shape) -> list[tuple[float, float]]:
        """What is known of uncompressed exchanges like this one, of which now at least one was seen."""
        return self.pool.plain_exchanges.setdefault((shape.gpu_type, shape.nodes > 1), [])

    def recall(self, shape: Shape, micro_batch: int, step_s: float, sync_s: float) -> None:
        super().recall(shape, micro_batch, step_s, sync_s)
        if shape.gpus > 1:
            self._saw_plain(shape)

    def observe_exchange(self, seen: ExchangeReport) -> None:
        """A compressed exchange of the running job: it corrects what is believed of that compressor."""
        name, (gpu_type, nodes, gpus) = seen.plan.compressor, seen.shape
        if gpus == 1 or name == NO_COMPRESSOR:
            return
        exchange, known, where = self.exchange, self.pool.exchanges, (gpu_type, nodes > 1)
        offer, codec_s = exchange.offer(name), exchange.codec_s(name, gpu_type, gpus)
        changed = known.add(RatioOf("sent", name, *where), seen.sent_bytes, float(offer.sent_bytes(gpus)))
        changed |= known.add(RatioOf("codec", name, *where), seen.codec_s, codec_s)
        if (statistics := self.believed_statistics) is not None:
            phi = noise_scale(*statistics, self.spec.initial_batch)
            lost = mixed_error(offer.errors.signal, offer.errors.noise, phi, seen.plan.global_batch / gpus)
            weight = 1.0 if offer.errors.unbiased else GIVEN_WEIGHT
            changed |= known.add(RatioOf("error", name), weight * seen.lost, float(lost))
        if changed:
            self._believe_otherwise()

    # What is believed of its exchange: formulas, corrected by what was seen

    def _ratios(self, quantity: Quantity, gpu_type: str = "", across: bool = False) -> Floats:
        """Of all offers, (offers,)."""
        known = self.pool.exchanges
        places = (RatioOf(quantity, each.name, gpu_type, across) for each in self.exchange.offers)
        return np.array([known.ratio(place) for place in places])

    def _terms(self, name: str, shape: Shape) -> ExchangeTerms:
        found, known = self.exchange.terms(name, *shape), self.pool.exchanges
        if not known:
            return found
        where = shape.gpu_type, shape.nodes > 1
        sent, codec = (known.ratio(RatioOf(quantity, name, *where)) for quantity in ("sent", "codec"))
        return replace(found, sent=np.multiply(found.sent, sent), codec_s=np.multiply(found.codec_s, codec))

    def _many_terms(self, gpu_type: str, nodes: Ints, gpus: Ints) -> ExchangeTerms:
        """Of all offers, arrays (offers, shapes)."""
        found = self.exchange.many_terms(gpu_type, nodes, gpus)
        if not self.pool.exchanges:
            return found
        sent, codec = (
            np.where(nodes > 1, *(self._ratios(quantity, gpu_type, each)[:, None] for each in (True, False)))
            for quantity in ("sent", "codec")
        )
        return replace(found, sent=np.multiply(found.sent, sent), codec_s=np.multiply(found.codec_s, codec))

    @property
    def _errors(self) -> GradientErrors:
        """Of all offers, (offers,); no more is lost than there is."""
        believed = self.exchange.believed_errors
        if not self.pool.exchanges:
            return believed
        ratio, most = self._ratios("error"), np.where(believed.unbiased, np.inf, 1.0)
        signal, noise = (np.minimum(np.multiply(each, ratio), most) for each in (believed.signal, believed.noise))
        return replace(believed, signal=signal, noise=noise)

    # How it trains

    @property
    def keeps_batch(self) -> bool:
        """Whether it trains at its requested batch."""
        return self.spec.fixed_batch or self.exchange.keeps_batch

    def train_on(self, shape: Shape, held: Plan | None = None, *, requested: bool = False) -> Plan:
        """As any task. held: whose compressor stays where it may be changed, unless another promises `MARGIN` more:
        steps after a change are slower, and some schemes forget what was held back.
        """
        if not (requested or self.keeps_batch):
            if held is None or shape.gpus == 1:
                return super().train_on(shape)
            spec, statistics = self.spec, self.believed_statistics
            also = ("held", held.compressor, *shape, statistics, spec.initial_batch, spec.max_batch)
            plan = self.pool.choices.get(also)
            if plan is None:
                plan = self.pool.choices[also] = self._best(shape, statistics, held.compressor)
            return plan
        if shape.gpus == 1:
            return as_requested(self.spec, shape)
        asked = ("requested", *shape, self.believed_statistics, self.spec.requested_batch)
        plan = self.pool.choices.get(asked)
        if plan is None:
            plan = self.pool.choices[asked] = self._as_requested(shape)
        return plan

    def _as_requested(self, shape: Shape) -> Plan:
        """At the requested batch, with the best compressor for that."""
        plan, theta = as_requested(self.spec, shape), self.models.get(shape.gpu_type)
        statistics = self.believed_statistics
        if theta is None or statistics is None:
            return replace(plan, compressor=self._untold)
        one = np.array([shape.nodes]), np.array([shape.gpus])
        goodput, _ = self._at_requested(theta, shape.gpu_type, statistics, *one)
        chosen = int(self.exchange.best(goodput, self._has_seen(shape.gpu_type, shape.nodes))[0])
        return replace(plan, compressor=self.exchange.offers[chosen].name)

    def _has_seen(self, gpu_type: str, nodes: ArrayLike) -> Bools:
        """Whether uncompressed exchanges were seen on one node, or across nodes, as there are (…,) `nodes`."""
        within, across = ((gpu_type, each) in self.pool.plain_exchanges for each in (False, True))
        return np.where(np.asarray(nodes) > 1, across, within)

    def _most_seen_s(self, gpu_type: str, across: bool, gamma: float) -> float:
        """The longest T_sync that uncompressed exchanges showed, within a node or across; inf where none did."""
        seen = self.pool.plain_exchanges.get((gpu_type, across))
        if not seen:
            return float("inf")
        step_s, sync_s = np.array(seen).T
        return float(exchange_time(step_s, step_s - sync_s, gamma).max())

    def sync_s(self, theta: Theta, gpu_type: str, nodes: ArrayLike, gpus: ArrayLike, terms: ExchangeTerms) -> Floats:
        """T_sync with a compressor: the model's, less what compression saves of what exchanges were seen to take.

        A model may take for synchronisation what several GPUs lose otherwise, such as to the slowest of them.
        """
        plain_s = sync_time(theta, nodes, gpus)
        within, across = (self._most_seen_s(gpu_type, each, theta[GAMMA]) for each in (False, True))
        seen_s = np.minimum(plain_s, np.where(np.asarray(nodes) > 1, across, within))
        return plain_s + (compressed_sync(seen_s, terms) - seen_s)

    @property
    def _untold(self) -> str:
        """The compressor of several replicas of which nothing is known yet."""
        return self.exchange.only or NO_COMPRESSOR

    def _best(self, shape: Shape, statistics: tuple[float, float] | None, held: str | None = None) -> Plan:
        if shape.gpus == 1:
            return super()._best(shape, statistics)
        theta, spec, exchange = self.models.get(shape.gpu_type), self.spec, self.exchange
        if theta is None or statistics is None:
            return replace(super()._best(shape, statistics), compressor=self._untold)
        smallest, largest = spec.local_batches[shape.gpu_type]
        believed = self._errors
        choices = [
            best_batch_one(
                theta,
                *statistics,
                initial_batch=spec.initial_batch,
                max_batch=spec.max_batch,
                min_local=smallest,
                max_local=largest,
                nodes=shape.nodes,
                gpus=shape.gpus,
                sync_s=float(self.sync_s(theta, *shape, self._terms(each.name, shape))),
                errors=_row(believed, at),
            )
            for at, each in enumerate(exchange.offers)
        ]
        known = self._has_seen(shape.gpu_type, shape.nodes)
        at = int(exchange.best(np.array([each.goodput for each in choices]), known))
        names = [each.name for each in exchange.offers]
        if held in names and known and choices[at].goodput < MARGIN * choices[names.index(held)].goodput:
            at = names.index(held)
        found, name = choices[at], exchange.offers[at].name
        if not found.local_batch:  # more GPUs than its largest batch can feed
            return replace(super()._best(shape, statistics), compressor=name)
        return Plan(data=shape.gpus, micro_batch=found.local_batch, accumulation=found.accumulation, compressor=name)

    # What policies ask

    def _largest_batch(self, *, requested: bool) -> int:
        return self.spec.requested_batch if self.keeps_batch else super()._largest_batch(requested=requested)

    @classmethod
    def _paces(cls, asked: Sequence[PaceAsked], nodes: Ints, gpus: Ints) -> Floats:
        found = []
        for task, theta, source, most in asked:
            assert isinstance(task, ExchangingTask)
            found.append(task._pace(theta, source, most, nodes, gpus))
        return np.stack(found)

    def _pace(self, theta: Theta, source: str, most: int, nodes: Ints, gpus: Ints) -> Floats:
        """(2, shapes): goodput under the best offer there, and samples per second meanwhile."""
        exchange, spec = self.exchange, self.spec
        statistics = self.believed_statistics or (1.0, 0.0)
        if self.keeps_batch:
            goodput, pace = self._at_requested(theta, source, statistics, nodes, gpus)
        else:
            count = len(exchange.offers)
            smallest, largest = spec.local_batches[source]
            found = best_batch(
                np.broadcast_to(theta, (count, len(theta))),
                grad_sqr=np.full(count, statistics[0]),
                grad_var=np.full(count, statistics[1]),
                initial_batch=np.full(count, spec.initial_batch),
                max_batch=np.full(count, most),
                min_local=np.full(count, smallest),
                max_local=np.full(count, largest),
                nodes=nodes,
                gpus=gpus,
                sync_s=self.sync_s(theta, source, nodes, gpus, self._many_terms(source, nodes, gpus)),
                errors=self._errors,
            )
            goodput, pace = found.goodput, found.throughput
        chosen = exchange.best(goodput, self._has_seen(source, nodes))
        at = np.arange(len(gpus))
        return np.stack((goodput[chosen, at], pace[chosen, at]))

    def _at_requested(
        self, theta: Theta, gpu_type: str, statistics: tuple[float, float], nodes: Ints, gpus: Ints
    ) -> tuple[Floats, Floats]:
        """(offers, shapes): goodput and samples per second at the requested batch; 0 where it feeds too many GPUs."""
        spec = self.spec
        plans = [as_requested(spec, Shape(gpu_type, *one)) for one in zip(nodes.tolist(), gpus.tolist(), strict=True)]
        local, micro = (np.array([getattr(each, name) for each in plans]) for name in ("micro_batch", "accumulation"))
        goodput, pace = goodput_at(
            theta,
            *statistics,
            spec.initial_batch,
            local,
            micro,
            gpus,
            sync_s=self.sync_s(theta, gpu_type, nodes, gpus, self._many_terms(gpu_type, nodes, gpus)),
            errors=_column(self._errors),
        )
        smallest, largest = spec.local_batches[gpu_type]
        fits = (local >= smallest) & (local <= largest)
        return np.where(fits, goodput, 0.0), np.where(fits, pace, 0.0)


def _row(errors: GradientErrors, at: int) -> GradientErrors:
    """Of one offer."""
    return GradientErrors(*(np.asarray(each)[at] for each in _fields(errors)))


def _column(errors: GradientErrors) -> GradientErrors:
    """(offers,) → (offers, 1)."""
    return GradientErrors(*(np.asarray(each)[:, None] for each in _fields(errors)))


def _fields(errors: GradientErrors) -> tuple[object, ...]:
    return errors.signal, errors.noise, errors.unbiased, errors.rounds_sum
