"""The layers whose gradients replicas exchange, the compressor of each, and its error feedback.

The core defines the compressors: names, layers that they can compress, and bytes sent
(synergy_core/performance/goodput/compression). `schemes/` carries them out, one file per scheme.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from synergy_core.errors import InputError
from synergy_core.performance.goodput.compression import compressor_named
from synergy_core.performance.goodput.compression._compressor import Compressor, LayerSizes, all_reduced

PLAIN = compressor_named("none")


@dataclass(frozen=True, slots=True)
class GradientLayer:
    """A parameter as replicas exchange its gradient: rows × columns numbers of `number_bytes` each; a vector has one
    column.
    """

    name: str
    rows: int
    columns: int
    number_bytes: int = 4

    @classmethod
    def of_shape(cls, name: str, shape: torch.Size, number_bytes: int) -> GradientLayer:
        """A parameter as a matrix: its first dimension, and all others."""
        rows = shape[0] if shape else 1
        return cls(name, rows, shape.numel() // rows if rows else 0, number_bytes)

    @property
    def numbers(self) -> int:
        """Number of elements."""
        return self.rows * self.columns

    def sent_bytes(self, compressor: Compressor, replicas: int) -> float:
        """Bytes that each rank sends per step under a compressor that can compress the layer."""
        if compressor == PLAIN:
            return float(all_reduced(self.number_bytes * self.numbers, replicas))
        return float(compressor.sent_bytes(self._sizes, replicas).sum())

    def may_be_sent_by(self, compressor: Compressor, replicas: int) -> bool:
        """Whether the compressor can compress the layer and makes it smaller."""
        if not self.numbers or not compressor.compresses(self._sizes).all():
            return False
        return self.sent_bytes(compressor, replicas) < self.sent_bytes(PLAIN, replicas)

    @property
    def _sizes(self) -> LayerSizes:
        return LayerSizes.of_shapes([(self.rows, self.columns)])


@dataclass(frozen=True, slots=True)
class CompressorByLayer:
    """Compressors by parameter. layers: (pattern of names, compressor); the first match counts, else `rest`."""

    rest: Compressor
    layers: tuple[tuple[str, Compressor], ...] = ()

    @classmethod
    def named(cls, text: str) -> CompressorByLayer:
        """Reads the form of `Plan.compressor`: `q4`, by layer `q4,token.weight=none,layers.*=q2`. Raises InputError."""
        rest, *layers = text.split(",")
        chosen = []
        for each in layers:
            pattern, equals, name = each.partition("=")
            if not (pattern and equals):
                raise InputError(f"compressor '{text}': '{each}' is no choice for a layer; write NAME=COMPRESSOR.")
            chosen.append((pattern, compressor_named(name)))
        return cls(compressor_named(rest), tuple(chosen))

    @property
    def every(self) -> list[Compressor]:
        """All compressors that some layer may use."""
        return [self.rest, *(compressor for _, compressor in self.layers)]

    @property
    def is_plain(self) -> bool:
        """Whether no layer is compressed."""
        return all(each == PLAIN for each in self.every)

    def of(self, layer: GradientLayer, replicas: int) -> Compressor:
        """The compressor of a layer: the chosen one if it can compress the layer, else none."""
        found = (compressor for pattern, compressor in self.layers if fnmatchcase(layer.name, pattern))
        chosen = next(found, self.rest)
        return chosen if layer.may_be_sent_by(chosen, replicas) else PLAIN


@dataclass(slots=True)
class HeldBack:
    """The state that a layer's compressor keeps between steps.

    error: the part of this replica's share of the mean gradient that was not sent, flat. start: PowerSGD's right
    factor, (columns, rank).
    """

    error: Tensor | None = None
    start: Tensor | None = None

    def added_to(self, gradient: Tensor) -> Tensor:
        """The gradient in fp32, plus the error that was held back before."""
        return gradient.float() if self.error is None else gradient.float() + self.error

    def keep(self, error: Tensor, mean: Tensor) -> None:
        """Keeps the error. If the exchanged mean has a NaN or an infinity, that step's error is dropped.

        mean: the exchanged mean. It is the same on every replica, so either all replicas keep their error or none does.
        """
        before = torch.zeros_like(error) if self.error is None else self.error
        self.error = torch.where(torch.isfinite(mean).all(), error, before)


@dataclass(slots=True)
class GradientPiece:
    """A layer's gradient while it is exchanged. gradient: flat, this replica's share of the mean (its own ÷ replicas);
    the exchange replaces it by the mean, in place.
    """

    layer: GradientLayer
    compressor: Compressor
    gradient: Tensor
    memory: HeldBack = field(default_factory=HeldBack)


def by_compressor(pieces: Sequence[GradientPiece]) -> dict[Compressor, list[GradientPiece]]:
    """Groups the pieces by compressor, in the same order on all replicas."""
    groups: dict[Compressor, list[GradientPiece]] = {}
    for piece in pieces:
        groups.setdefault(piece.compressor, []).append(piece)
    return groups
