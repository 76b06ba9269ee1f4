"""What a way to send gradients must say and do, and what it is given."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Self

import torch
from torch import Tensor

from synergy_exec.training.compression.wire import Watch, Wire

FEWEST_NUMBERS = 1024
"""Of a layer that is compressed; smaller ones, and vectors, are sent as they are."""


@dataclass(frozen=True, slots=True)
class GradientLayer:
    """A parameter as replicas exchange its gradient: rows × columns numbers of `number_bytes` each; a vector has one
    column. weight: what its squares count where ranks that split layers all hold this one whole; else 1.
    """

    name: str
    rows: int
    columns: int
    number_bytes: int = 4
    weight: float = 1.0

    @property
    def numbers(self) -> int:
        """How many numbers."""
        return self.rows * self.columns


@dataclass(slots=True)
class HeldBack:
    """What a layer's scheme keeps from step to step. error: what was held back of this replica's share of the mean
    gradient, flat. start: PowerSGD's right factor, (columns, rank).
    """

    error: Tensor | None = None
    start: Tensor | None = None


@dataclass(slots=True)
class Piece:
    """A layer's gradient on its way. gradient: flat, this replica's share of the mean (its own ÷ replicas), and
    after the exchange the mean; changed in place.
    """

    layer: GradientLayer
    scheme: Scheme
    gradient: Tensor
    memory: HeldBack = field(default_factory=HeldBack)


class Scheme(ABC):
    """A way to send gradients; a frozen dataclass whose fields say how much of them.

    FEEDBACK: whether what is held back is added to the next gradient (the scheme is biased; else it is unbiased).
    EXAMPLES: names, for messages.
    """

    FEEDBACK: ClassVar[bool] = False
    EXAMPLES: ClassVar[tuple[str, ...]]

    @classmethod
    @abstractmethod
    def named(cls, name: str) -> Self | None:
        """The scheme of that name; None: it is another's. Raises InputError where only the amount is odd."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Such as `q4`."""

    def of(self, layer: GradientLayer) -> Scheme:
        """The scheme as this layer takes it."""
        return self

    def takes(self, layer: GradientLayer) -> bool:
        """Whether it is worth its while for a layer: by default, for large ones that are no vectors."""
        return layer.columns > 1 and layer.numbers >= FEWEST_NUMBERS

    @abstractmethod
    def sent_bytes(self, layer: GradientLayer, replicas: int) -> float:
        """That leave each rank in a step for a layer, as its part of a bucket; `Wire` says how collectives count."""

    @classmethod
    @abstractmethod
    def exchange(cls, pieces: Sequence[Piece], wire: Wire, watch: Watch | None) -> None:
        """Makes every piece's gradient the mean over the wire's replicas; all of them call it with the same layers.

        watch: takes the squares of what is sent and of the error; None on steps that are not measured.
        """


class SharedScheme(Scheme):
    """One that can also sum to shards (FSDP), of which each rank gets its own."""

    @abstractmethod
    def shared_bytes(self, numbers: int, replicas: int, number_bytes: int = 4) -> float:
        """`sent_bytes` where each rank gets a shard of that many numbers alone."""

    @classmethod
    @abstractmethod
    def share_out(cls, pieces: Sequence[Piece], wire: Wire, watch: Watch | None) -> list[Tensor]:
        """The mean over the replicas of this rank's shard of every piece.

        Gradients are (replicas, a shard's numbers), whole ones of a replica, padded, and are not changed.
        """


def joined(pieces: Sequence[Piece], dtype: torch.dtype = torch.float32) -> Tensor:
    """All gradients one after another, copied."""
    return torch.cat([piece.gradient.to(dtype) for piece in pieces])


def dealt(joined: Tensor, pieces: Sequence[Piece]) -> None:
    """Puts what `joined` made back."""
    for piece, part in zip(pieces, torch.split(joined, [piece.layer.numbers for piece in pieces]), strict=True):
        piece.gradient.copy_(part)


def held_back(memory: HeldBack, error: Tensor, mean: Tensor) -> None:
    """Keeps an error, unless the exchange gave something that is no number: that step's gradient is not carried on.

    mean: what was exchanged, the same on every replica, so that all of them keep or none.
    """
    before = torch.zeros_like(error) if memory.error is None else memory.error
    memory.error = torch.where(torch.isfinite(mean).all(), error, before)
