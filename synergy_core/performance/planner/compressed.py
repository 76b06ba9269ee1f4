"""Finds the fastest plan of a model for every compressor of the gradients that its replicas exchange.

Each pipeline stage has its own layers, and each layer its own compressor. The stage that sends most determines how long
the exchange takes; the errors of all stages add up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

import numpy as np

from synergy_core.errors import unknown
from synergy_core.performance.goodput.compression import compressor_named, compressors
from synergy_core.performance.goodput.compression._compressor import (
    CONVOLUTIONAL,
    NUMBER_BYTES,
    Compressor,
    GpuRates,
    Gradients,
    LayerSizes,
    speed_by_sheet,
)
from synergy_core.performance.goodput.efficiency import (
    POINTS,
    ExchangeTerms,
    GradientErrors,
    Offer,
    layerwise_name,
    sizes_and_errors,
    uniform,
    with_none,
    within_error_name,
)
from synergy_core.performance.goodput.layerwise import frontier, least_of_slowest
from synergy_core.performance.planner.communication import ReplicaTerms
from synergy_core.performance.planner.machine import Constants, Machine
from synergy_core.performance.planner.memory import usable_bytes
from synergy_core.performance.planner.plan import NO_COMPRESSOR, Plan, Plans, plans_of
from synergy_core.performance.planner.search import Model, fitting, sized_plans
from synergy_core.performance.planner.step_time import computation
from synergy_core.performance.planner.work import Amount, Block, Work
from synergy_core.units import Bools, Floats, Ints, columns_of

_UNCOMPRESSED = compressor_named(NO_COMPRESSOR)


@dataclass(frozen=True, eq=False)
class Stage:
    """The gradient matrices of one GPU, for a group of identical pipeline stages.

    expert: (matrices,), whether only ranks with the same experts exchange a matrix. stages: number of identical stages.
    """

    layers: LayerSizes
    expert: Bools
    stages: int

    @property
    def numbers(self) -> float:
        """Number of elements in the gradients of one stage."""
        return float((self.layers.numbers * self.layers.count).sum())


def stages_of(work: Work, pipeline: int, at: int) -> tuple[Stage, ...]:
    """Groups of identical stages of plan number `at`. If layers do not divide evenly, first stages get one more."""
    blocks = {id(each): each for each in (work.before, *(run.block for run in work.layers), work.after)}
    layers = [id(run.block) for run in work.layers for _ in range(round(_at(run.count, at)))]
    parts = [each.tolist() for each in np.array_split(np.array(layers), pipeline)]
    parts[0].insert(0, id(work.before))
    parts[-1].append(id(work.after))
    result = []
    for held, stages in Counter(tuple(Counter(each).items()) for each in parts).items():
        tensors = [row for block, times in held for row in _tensors(blocks[block], times, at)]
        rows, columns, count, expert = (np.array(each) for each in zip(*tensors, strict=True))
        result.append(Stage(LayerSizes(rows, columns, count), expert, stages))
    return tuple(result)


def _tensors(block: Block, times: int, at: int) -> Iterator[tuple[int, int, int, bool]]:
    """Yields (rows, columns, count, is_expert) of each parameter matrix, and of all other parameters as a vector."""
    held = {False: 0.0, True: 0.0}
    for each in block.gemms:
        stored = _at(each.count if each.stored is None else each.stored, at)
        numbers = _at(each.n, at) * _at(each.k, at)
        if stored * numbers >= 1.0:
            yield round(_at(each.n, at)), round(_at(each.k, at)), round(stored * times), each.expert
        held[each.expert] += stored * numbers
    for rows, columns in block.tables:
        if _at(rows, at) >= 1.0:
            yield round(_at(rows, at)), round(_at(columns, at)), times, False
        held[False] += _at(rows, at) * _at(columns, at)
    for parameters, expert in ((block.parameters, False), (block.expert_parameters, True)):
        if (left := round(_at(parameters, at) - held[expert])) >= 1:
            yield left, 1, times, expert


def _at(amount: Amount, at: int) -> float:
    values = np.asarray(amount, dtype=np.float64)
    return float(values if values.ndim == 0 else values[at])


@dataclass(frozen=True, eq=False)
class ShardOffer:
    """One compressor for all layers of a plan, or one for each layer. offers: that choice for each of `stages`."""

    name: str
    stages: tuple[Stage, ...]
    offers: tuple[Offer, ...]
    _known: dict[tuple[float, ...], ExchangeTerms] = field(default_factory=dict, repr=False)

    @cached_property
    def compresses(self) -> bool:
        return any(each.compresses for each in self.offers)

    @cached_property
    def errors(self) -> GradientErrors:
        weights = np.array([each.stages * each.numbers for each in self.stages])
        each = columns_of([offer.errors for offer in self.offers])
        signal, noise = (float(weights @ one / weights.sum()) for one in (each.signal, each.noise))
        return GradientErrors(signal, noise, bool(np.all(each.unbiased)), bool(np.any(each.rounds_sum)))

    @cached_property
    def state_bytes(self) -> float:
        """Bytes of compressor state on the GPU that keeps most."""
        return max(each.state_bytes for each in self.offers)

    def terms(self, replicas: int, gradient_bytes: float, gpu: GpuRates, *, expert: bool) -> ExchangeTerms:
        """How the compressor changes the time and size of the gradient exchange among replicas. Results are cached.

        gradient_bytes: bytes per uncompressed gradient. expert: whether experts' gradients or all others are exchanged.
        A layer that the compressor would enlarge is sent uncompressed.
        """
        key = replicas, expert, gradient_bytes, gpu.memory_bandwidth_bytes_per_s, gpu.fp32_flops_per_s
        if key in self._known:
            return self._known[key]
        speed = speed_by_sheet(gpu)
        sent, plain, codec = [], [], []
        for stage, offer in zip(self.stages, self.offers, strict=True):
            own = stage.expert == expert
            uncompressed = _UNCOMPRESSED.sent_bytes(stage.layers, replicas) * (gradient_bytes / NUMBER_BYTES)
            sent.append(float(np.minimum(offer.layers_sent_bytes(replicas), uncompressed)[own].sum()))
            plain.append(float(uncompressed[own].sum()))
            codec.append(float(offer.layers_codec_s(replicas, lambda _: speed)[own].sum()))
        terms = ExchangeTerms()
        if max(plain) > 0.0:
            collectives = max(each.collectives for each in self.offers)
            terms = ExchangeTerms(collectives, 0.0, max(sent) / max(plain), max(codec))
        self._known[key] = terms
        return terms


Offering = Callable[[tuple[Stage, ...], Gradients], tuple[ShardOffer, ...]]
"""Returns the offers for a plan's stages, `none` first."""


@cache
def every_offer(layerwise: Compressor) -> Offering:
    """Offers every compressor for all layers, and layer-wise choices among those with the scheme of `layerwise`."""
    known = compressors()
    of_scheme = [each for each in known if type(each) is type(layerwise)]
    budgets = {layerwise_name(of_scheme, error): error for error in POINTS}

    def offers(stages: tuple[Stage, ...], gradients: Gradients) -> tuple[ShardOffer, ...]:
        uniform_offers = (_uniform(each, stages, gradients) for each in known)
        return *uniform_offers, *_along_curves(of_scheme, stages, gradients, budgets)

    return offers


@cache
def only_offer(compressor: Compressor) -> Offering:
    """Offers no compression, and this compressor for all layers."""
    both = dict.fromkeys((_UNCOMPRESSED, compressor))
    return lambda stages, gradients: tuple(_uniform(each, stages, gradients) for each in both)


@cache
def within_error_offer(compressor: Compressor) -> Offering:
    """Offers no compression, and L-GreCo's layer-wise choice whose total error is at most that of this compressor."""

    def offers(stages: tuple[Stage, ...], gradients: Gradients) -> tuple[ShardOffer, ...]:
        errors = _uniform(compressor, stages, gradients).errors
        budget = 0.5 * (float(np.asarray(errors.signal)) + float(np.asarray(errors.noise)))
        named = {within_error_name(compressor): budget}
        return _uniform(_UNCOMPRESSED, stages, gradients), *_along_curves(compressor.nearby(), stages, gradients, named)

    return offers


def _uniform(compressor: Compressor, stages: tuple[Stage, ...], gradients: Gradients) -> ShardOffer:
    each = tuple(uniform(compressor, stage.layers, gradients) for stage in stages)
    return ShardOffer(compressor.name, stages, each)


def _along_curves(
    compressors: Sequence[Compressor], stages: tuple[Stage, ...], gradients: Gradients, budgets: Mapping[str, float]
) -> tuple[ShardOffer, ...]:
    """One layer-wise offer for each error budget. budgets: total errors, by name of the offer."""
    parts = with_none(compressors)
    total = sum(each.stages * each.numbers for each in stages)
    curves = []
    for stage in stages:
        sizes, errors = sizes_and_errors(parts, stage.layers, gradients)
        curves.append(frontier(sizes, errors * (stage.numbers / total)))
    chosen = least_of_slowest(curves, [each.stages for each in stages], list(budgets.values()))
    return tuple(
        ShardOffer(
            name,
            stages,
            tuple(
                Offer(name, stage.layers, gradients, parts, curve.choices(at))
                for stage, curve, at in zip(stages, curves, points, strict=True)
            ),
        )
        for name, points in zip(budgets, chosen, strict=True)
    )


_Split = tuple[int, int, int]
"""Degrees of tensor, pipeline and expert parallelism, which determine the gradients of each GPU."""


@dataclass(frozen=True, eq=False)
class CompressedPlans:
    """The fastest plan for each compressor, `none` first, for one number of GPUs and global batch; arrays (offers,).

    replicas: number of gradients that are compressed separately in a step: one per rank, and under ZeRO-3 one per rank
    and micro-batch. errors: the errors that compression adds to these gradients.
    """

    plans: tuple[Plan, ...]
    step_s: Floats
    replicas: Floats
    errors: GradientErrors

    def __len__(self) -> int:
        return len(self.plans)

    def goodput(self, noise_scale: float, initial_batch: float) -> Floats:
        """(offers,): samples/s × progress per sample ÷ that at the initial batch. noise_scale: in samples."""
        batch = np.array([each.global_batch for each in self.plans], dtype=np.float64)
        scale, variance = batch / initial_batch, noise_scale / initial_batch
        worth = self.errors.gain_ratio(scale, 1.0, variance, initial_batch, self.replicas)
        gain = (variance + 1.0) / (variance / scale + 1.0)
        return initial_batch * gain * worth / self.step_s


@dataclass(frozen=True, eq=False)
class CompressedSearch:
    """Searches plans of one model and software. gradients: their statistics. offering: compressors that may be used."""

    model: Model
    gradients: Gradients
    offering: Offering
    _offers: dict[_Split, dict[str, ShardOffer]] = field(default_factory=dict, repr=False)

    def plans(
        self,
        machine: Machine,
        constants: Constants,
        gpus: int,
        global_batch: int,
        fixed: Mapping[str, int] | None = None,
    ) -> CompressedPlans | None:
        """The fastest plan for every compressor; None if no plan fits. fixed: values that degrees must have.

        A compressor's state takes memory too. Error feedback needs whole gradients on every rank, so biased compressors
        are only used at ZeRO stage 0. A compressor is left out if none of the plans that can use it has replicas.
        """
        held = fixed or {}
        sized = sized_plans(self.model, machine, np.array([gpus]), global_batch, held)
        plans, needed = fitting(self.model, machine, sized.plans.take(sized.fits), held, sharding_apart=True)
        if not len(plans):
            return None
        free_bytes = usable_bytes(machine) - needed
        timed = computation(self.model.work(plans), plans, machine, self.model.software, constants)
        ranks = plans.data * plans.context
        splits = list(zip(plans.tensor.tolist(), plans.pipeline.tolist(), plans.expert.tolist(), strict=True))
        offers = {each: self._offers_of(each, timed.work, splits.index(each)) for each in dict.fromkeys(splits)}
        best: list[tuple[ShardOffer, int, float]] = []
        for name in dict.fromkeys(name for each in offers.values() for name in each):
            own = [offers[split].get(name) for split in splits]
            allowed = np.array(
                [
                    each is not None and (zero == 0 or each.errors.unbiased is True) and each.state_bytes <= free
                    for each, zero, free in zip(own, plans.zero, free_bytes, strict=True)
                ]
            )
            if name != NO_COMPRESSOR:
                allowed &= (ranks > 1) & np.array([each is not None and each.compresses for each in own])
            if not allowed.any():
                continue
            terms = None if name == NO_COMPRESSOR else self._terms(plans, own, machine)
            step_s = np.where(allowed, timed.step_time(terms).total_s, np.inf)
            at = int(step_s.argmin())
            offer = own[at]
            assert offer is not None
            best.append((offer, at, float(step_s[at])))
        rows = np.array([at for _, at, _ in best])
        zero, accumulation = plans.zero[rows], plans.accumulation[rows]
        errors = columns_of([offer.errors for offer, _, _ in best])
        return CompressedPlans(
            tuple(replace(plans.plan(at), compressor=offer.name) for offer, at, _ in best),
            np.array([step_s for _, _, step_s in best]),
            np.where(zero == 3, ranks[rows] * accumulation, ranks[rows]).astype(np.float64),
            # Shards of gradients are summed after decoding and are not compressed again.
            replace(errors, rounds_sum=np.asarray(errors.rounds_sum) & (zero == 0)),
        )

    def errors(self, plan: Plan) -> tuple[GradientErrors, float]:
        """Errors of the plan's compressor, and the number of gradients that are compressed separately.

        Raises InputError for a compressor that is not offered.
        """
        split = plan.tensor, plan.pipeline, plan.expert
        known = self._offers_of(split, self.model.work(plans_of([plan])), 0)
        if plan.compressor not in known:
            raise unknown("offered compressor", plan.compressor, known)
        errors = known[plan.compressor].errors
        replicas = plan.data * plan.context * (plan.accumulation if plan.zero == 3 else 1)
        return replace(errors, rounds_sum=bool(errors.rounds_sum) and plan.zero == 0), float(replicas)

    def _offers_of(self, split: _Split, work: Work, at: int) -> dict[str, ShardOffer]:
        if split not in self._offers:
            stages = stages_of(work, split[1], at)
            self._offers[split] = {each.name: each for each in self.offering(stages, self.gradients)}
        return self._offers[split]

    def _terms(self, plans: Plans, own: list[ShardOffer | None], machine: Machine) -> ReplicaTerms:
        """How the compressor offered for each plan changes its exchange of gradients. own: None for no offer."""
        ranks, gradient_bytes = np.maximum(plans.data * plans.context, 2), self.model.software.gradient_bytes

        def of_all(replicas: Ints, *, expert: bool) -> ExchangeTerms:
            each = [
                offer.terms(count, gradient_bytes, machine.gpu, expert=expert) if offer else ExchangeTerms()
                for offer, count in zip(own, replicas.tolist(), strict=True)
            ]
            return columns_of(each)

        return of_all(ranks, expert=False), of_all(np.maximum(ranks // plans.expert, 2), expert=True)


def gradients_of(model: Model) -> Gradients:
    """Assumed statistics of a model's gradients. A model that does not read tokens counts as convolutional."""
    return Gradients() if model.limits.seq_len else CONVOLUTIONAL
