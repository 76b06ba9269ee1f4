"""What may be offered to a job: one compressor for all of its layers, or layer by layer one of a scheme."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from synergy_core.arrays import Floats, Ints
from synergy_core.goodput.compressed import GradientErrors
from synergy_core.goodput.compression import CodecSpeed, Compressor, Gradients, LayerSizes, codec_s, compressor_named
from synergy_core.goodput.layerwise import frontier, least_bytes

PAIR = 2
"""Replicas for which layers choose: bytes of a scheme's compressors are in the same proportion at any number, but for
topk's, which grow alike."""
POINTS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5)
"""Squared errors, relative to the gradient's squared norm, at which layer-wise choices are offered."""


@dataclass(frozen=True, eq=False)
class Offer:
    """Compressors of one scheme for the layers of a model, told apart by `name` in a `Plan`.

    parts: the compressors; choice: (L,), which of them each layer has.
    """

    name: str
    layers: LayerSizes
    gradients: Gradients
    parts: tuple[Compressor, ...]
    choice: Ints

    @property
    def compresses(self) -> bool:
        """Whether anything is compressed at all."""
        return any(np.any(each.compresses(self.layers) & (self.choice == at)) for at, each in enumerate(self.parts))

    @property
    def collectives(self) -> int:
        """One after another: schemes do all layers together."""
        return max(int(self.parts[at].collectives) for at in np.unique(self.choice).tolist())

    @cached_property
    def errors(self) -> GradientErrors:
        """Of the whole gradient: squared errors of layers add up."""
        used = [self.parts[at] for at in np.unique(self.choice) if self.parts[at].compresses(self.layers).any()]
        signal, noise = (
            float(each.shares(self.layers) @ self._chosen([part.error(self.layers, each) for part in self.parts]))
            for each in (self.gradients.signal, self.gradients.noise)
        )
        return GradientErrors(signal, noise, all(each.unbiased for each in used), any(each.rounds_sum for each in used))

    def sent_bytes(self, replicas: ArrayLike) -> Floats:
        """That leave each rank in a step; of the shape of `replicas`."""
        result: Floats = self.layers_sent_bytes(replicas).sum(axis=-1)
        return result

    def layers_sent_bytes(self, replicas: ArrayLike) -> Floats:
        """The same of each row of layers, (…, L)."""
        return self._chosen([each.sent_bytes(self.layers, replicas) for each in self.parts])

    def codec_s(self, replicas: ArrayLike, speed_of: Callable[[Compressor], CodecSpeed]) -> Floats:
        """To encode and decode in a step; of the shape of `replicas`."""
        result: Floats = self.layers_codec_s(replicas, speed_of).sum(axis=-1)
        return result

    def layers_codec_s(self, replicas: ArrayLike, speed_of: Callable[[Compressor], CodecSpeed]) -> Floats:
        """The same of each row of layers, (…, L)."""
        seconds = [codec_s(each.codec_work(self.layers, replicas), speed_of(each)) for each in self.parts]
        return self._chosen(seconds)

    @property
    def state_bytes(self) -> float:
        """What is kept on each GPU from step to step."""
        return float(self._chosen([each.state_bytes(self.layers) for each in self.parts]).sum())

    def _chosen(self, values: Sequence[Floats]) -> Floats:
        """Of every part's (…, L) the part that each layer has."""
        every = np.stack(values)
        choice = np.broadcast_to(self.choice, every.shape[1:])[None]
        result: Floats = np.take_along_axis(every, choice, axis=0)[0]
        return result


def uniform(compressor: Compressor, layers: LayerSizes, gradients: Gradients) -> Offer:
    """That compressor for every layer."""
    nobody_chooses = np.zeros(layers.rows.shape, dtype=np.int64)
    return Offer(compressor.name, layers, gradients, (compressor,), nobody_chooses)


def within_error_of(compressor: Compressor, layers: LayerSizes, gradients: Gradients) -> Offer:
    """L-GreCo: the fewest bytes with no more squared error than that compressor for all makes.

    Layers choose among its likes (`Compressor.alike`) and none. Errors are those of a local gradient of which half is
    noise; how much of it is changes as a job trains, and the choice with it, which is not followed.
    """
    parts = with_none(compressor.alike())
    sizes, errors = sizes_and_errors(parts, layers, gradients)
    own = [each.name for each in parts].index(compressor.name)
    found = least_bytes(sizes, errors, float(errors[:, own].sum()))
    return Offer(within_error_name(compressor), layers, gradients, parts, found.choice)


def within_error_name(compressor: Compressor) -> str:
    """Of a choice by layer within the error of that compressor."""
    return f"layerwise-{compressor.name}"


def along_frontier(compressors: Sequence[Compressor], layers: LayerSizes, gradients: Gradients) -> tuple[Offer, ...]:
    """Points of the curve of bytes against errors, at most one for each of `POINTS`; named by scheme and error."""
    parts = with_none(compressors)
    curve = frontier(*sizes_and_errors(parts, layers, gradients))
    points = {curve.within(each): each for each in reversed(POINTS)}
    return tuple(
        Offer(layerwise_name(compressors, points[at]), layers, gradients, parts, curve.choices(at))
        for at in sorted(points)
    )


def layerwise_name(compressors: Sequence[Compressor], error: float) -> str:
    """Of an offer along the curve of a scheme's compressors."""
    return f"layerwise-{compressors[0].name.rstrip('-.0123456789')}-{error:g}"


def with_none(compressors: Sequence[Compressor]) -> tuple[Compressor, ...]:
    """What layers may choose among: `none` first."""
    return compressor_named("none"), *(each for each in compressors if each.name != "none")


def sizes_and_errors(parts: Sequence[Compressor], layers: LayerSizes, gradients: Gradients) -> tuple[Floats, Floats]:
    """Bytes, and parts of the squared norm of the whole gradient, (layers, parts)."""
    halves = (gradients.signal, gradients.noise)
    errors = [sum(0.5 * each.shares(layers) * part.error(layers, each) for each in halves) for part in parts]
    return np.stack([part.sent_bytes(layers, PAIR) for part in parts], axis=1), np.stack(errors, axis=1)
