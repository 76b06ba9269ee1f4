"""What one GPU of each stage exchanges with its replicas, as matrices, and which compressors may be had for it.

Tensor and expert parallelism split matrices, pipelines deal layers out: so each stage has its own layers and, layer by
layer, its own choice of compressors; the stage that sends most decides how long the exchange takes, and the errors of
all stages add up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property

import numpy as np

from synergy_core.arrays import Bools
from synergy_core.goodput.compressed import GradientErrors
from synergy_core.goodput.compression import (
    NUMBER_BYTES,
    Compressor,
    Gpu,
    Gradients,
    LayerSizes,
    compressor_named,
    compressors,
    speed_by_sheet,
)
from synergy_core.goodput.exchange import ExchangeTerms
from synergy_core.goodput.layerwise import frontier, least_of_slowest
from synergy_core.goodput.offers import (
    POINTS,
    Offer,
    layerwise_name,
    sizes_and_errors,
    uniform,
    with_none,
    within_error_name,
)
from synergy_core.planner.plan import NO_COMPRESSOR
from synergy_core.planner.work import Amount, Block, Work

NOTHING = compressor_named(NO_COMPRESSOR)


@dataclass(frozen=True, eq=False)
class Stage:
    """One GPU's gradients on stages that are alike.

    expert: (L,), which rows only ranks with the same experts exchange. stages: how many there are.
    """

    layers: LayerSizes
    expert: Bools
    stages: int

    @property
    def numbers(self) -> float:
        """In one stage's gradients."""
        return float((self.layers.numbers * self.layers.count).sum())


def stages_of(work: Work, pipeline: int, at: int) -> tuple[Stage, ...]:
    """The stages of the plan at that row of `work`, alike ones together: layers dealt out in their order, as evenly as
    their number allows, the first stages with one more.
    """
    runs = [(each.block, round(_at(each.count, at))) for each in work.layers]
    count = sum(times for _, times in runs)
    found: dict[tuple[tuple[int, int], ...], tuple[list[tuple[Block, int]], int]] = {}
    first = 0
    for stage in range(pipeline):
        after = first + count // pipeline + (stage < count % pipeline)
        held: dict[int, tuple[Block, int]] = {}
        if stage == 0:
            held[id(work.before)] = work.before, 1
        start = 0
        for block, times in runs:
            own = min(start + times, after) - max(start, first)
            if own > 0:
                held[id(block)] = block, held.get(id(block), (block, 0))[1] + own
            start += times
        if stage == pipeline - 1:
            held[id(work.after)] = work.after, 1
        key = tuple((each, times) for each, (_, times) in held.items())
        found[key] = list(held.values()), found.get(key, ([], 0))[1] + 1
        first = after
    return tuple(_stage(blocks, at, stages) for blocks, stages in found.values())


def _stage(blocks: Sequence[tuple[Block, int]], at: int, stages: int) -> Stage:
    rows = list(_rows(blocks, at))
    columns = [np.array([row[each] for row in rows], dtype=np.int64) for each in range(3)]
    return Stage(LayerSizes(*columns), np.array([row[3] for row in rows], dtype=np.bool_), stages)


def _rows(blocks: Sequence[tuple[Block, int]], at: int) -> Iterator[tuple[int, int, int, bool]]:
    """Rows, columns, count and whether they are of experts: of products, tables, and vectors, which are the rest."""
    for block, times in blocks:
        held, expert_held = 0.0, 0.0
        for each in block.gemms:
            stored = _at(each.count if each.stored is None else each.stored, at)
            numbers = _at(each.n, at) * _at(each.k, at)
            if stored * numbers >= 1.0:
                yield round(_at(each.n, at)), round(_at(each.k, at)), round(stored * times), each.expert
            held += 0.0 if each.expert else stored * numbers
            expert_held += stored * numbers if each.expert else 0.0
        for rows, columns in block.tables:
            if _at(rows, at) >= 1.0:
                yield round(_at(rows, at)), round(_at(columns, at)), times, False
            held += _at(rows, at) * _at(columns, at)
        for parameters, taken, expert in (
            (block.parameters, held, False),
            (block.expert_parameters, expert_held, True),
        ):
            if (left := round(_at(parameters, at) - taken)) >= 1:
                yield left, 1, times, expert


def _at(amount: Amount, at: int) -> float:
    values = np.asarray(amount, dtype=np.float64)
    return float(values if values.ndim == 0 else values[at])


@dataclass(frozen=True, eq=False)
class ShardOffer:
    """A compressor, or a choice by layer, for every stage of a plan. offers: of the stages, in their order."""

    name: str
    stages: tuple[Stage, ...]
    offers: tuple[Offer, ...]
    _known: dict[tuple[float, ...], ExchangeTerms] = field(default_factory=dict, repr=False)

    @cached_property
    def compresses(self) -> bool:
        """Whether anything is compressed at all."""
        return any(each.compresses for each in self.offers)

    @cached_property
    def errors(self) -> GradientErrors:
        """Of the gradients of all stages together."""
        weights = np.array([each.stages * each.numbers for each in self.stages])
        each = [offer.errors for offer in self.offers]
        signal, noise = (
            float(weights @ [getattr(one, name) for one in each] / weights.sum()) for name in ("signal", "noise")
        )
        return GradientErrors(signal, noise, all(one.unbiased for one in each), any(one.rounds_sum for one in each))

    @cached_property
    def state_bytes(self) -> float:
        """Kept on the fullest GPU from step to step."""
        return max(each.state_bytes for each in self.offers)

    def terms(self, replicas: int, gradient_bytes: float, gpu: Gpu, *, expert: bool) -> ExchangeTerms:
        """What it makes of the exchange of dense gradients, or of experts', among so many replicas.

        gradient_bytes: of a number as it is exchanged without a compressor; a layer of which a compressor would send
        more than that is sent as it is. Remembered: a search asks for few numbers of replicas, on one type of GPU.
        """
        asked = replicas, expert, gradient_bytes, gpu.memory_bandwidth_bytes_per_s, gpu.fp32_flops_per_s
        if asked not in self._known:
            self._known[asked] = self._terms(replicas, expert, gradient_bytes, gpu)
        return self._known[asked]

    def _terms(self, replicas: int, expert: bool, gradient_bytes: float, gpu: Gpu) -> ExchangeTerms:
        speed = speed_by_sheet(gpu)
        sent, plain, codec = [], [], []
        for stage, offer in zip(self.stages, self.offers, strict=True):
            own = stage.expert == expert
            as_they_are = NOTHING.sent_bytes(stage.layers, replicas) * (gradient_bytes / NUMBER_BYTES)
            sent.append(float(np.minimum(offer.layers_sent_bytes(replicas), as_they_are)[own].sum()))
            plain.append(float(as_they_are[own].sum()))
            codec.append(float(offer.layers_codec_s(replicas, lambda _: speed)[own].sum()))
        if max(plain) == 0.0:
            return ExchangeTerms()
        return ExchangeTerms(max(each.collectives for each in self.offers), 0.0, max(sent) / max(plain), max(codec))


Offering = Callable[[tuple[Stage, ...], Gradients], tuple[ShardOffer, ...]]
"""What is offered to the stages of a plan, `none` first."""


@cache
def every_offer(layerwise: Compressor) -> Offering:
    """Every compressor for all layers, and points of the layer-wise curve of that one's scheme."""
    known = compressors()
    of_scheme = [each for each in known if type(each) is type(layerwise)]

    def offers(stages: tuple[Stage, ...], gradients: Gradients) -> tuple[ShardOffer, ...]:
        names = [layerwise_name(of_scheme, error) for error in POINTS]
        return *(_uniform(each, stages, gradients) for each in known), *_along_curves(
            of_scheme, stages, gradients, dict(zip(names, POINTS, strict=True))
        )

    return offers


@cache
def only_offer(compressor: Compressor) -> Offering:
    """That compressor for all layers, and none."""
    both = dict.fromkeys((NOTHING, compressor))
    return lambda stages, gradients: tuple(_uniform(each, stages, gradients) for each in both)


@cache
def within_error_offer(compressor: Compressor) -> Offering:
    """L-GreCo's choice among that compressor's likes, within the error it makes of all stages; and none."""

    def offers(stages: tuple[Stage, ...], gradients: Gradients) -> tuple[ShardOffer, ...]:
        errors = _uniform(compressor, stages, gradients).errors
        budget = 0.5 * (float(np.asarray(errors.signal)) + float(np.asarray(errors.noise)))
        named = {within_error_name(compressor): budget}
        return _uniform(NOTHING, stages, gradients), *_along_curves(compressor.alike(), stages, gradients, named)

    return offers


def _uniform(compressor: Compressor, stages: tuple[Stage, ...], gradients: Gradients) -> ShardOffer:
    each = tuple(uniform(compressor, stage.layers, gradients) for stage in stages)
    return ShardOffer(compressor.name, stages, each)


def _along_curves(
    compressors: Sequence[Compressor], stages: tuple[Stage, ...], gradients: Gradients, budgets: Mapping[str, float]
) -> tuple[ShardOffer, ...]:
    """Choices by layer within each budget, by name."""
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
