"""Gradients as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from synergy_exec.training.compression.scheme import GradientLayer, Piece, SharedScheme, dealt, joined
from synergy_exec.training.compression.wire import Watch, Wire


@dataclass(frozen=True, slots=True)
class Plain(SharedScheme):
    """`none`: one all-reduce, in the gradients' own type."""

    EXAMPLES: ClassVar = ("none",)

    @classmethod
    def named(cls, name: str) -> Self | None:
        return cls() if name == "none" else None

    @property
    def name(self) -> str:
        return "none"

    def takes(self, layer: GradientLayer) -> bool:
        return True

    def sent_bytes(self, layer: GradientLayer, replicas: int) -> float:
        return 2 * (replicas - 1) / replicas * layer.number_bytes * layer.numbers

    def shared_bytes(self, numbers: int, replicas: int, number_bytes: int = 4) -> float:
        return (replicas - 1) * number_bytes * numbers

    @classmethod
    def exchange(cls, pieces: Sequence[Piece], wire: Wire, watch: Watch | None) -> None:
        whole = joined(pieces, pieces[0].gradient.dtype)
        _note(pieces, watch)
        wire.sum(whole)
        dealt(whole, pieces)

    @classmethod
    def share_out(cls, pieces: Sequence[Piece], wire: Wire, watch: Watch | None) -> list[Tensor]:
        _note(pieces, watch)
        shard = wire.swap(torch.cat([piece.gradient for piece in pieces], dim=1)).sum(0)
        return list(torch.split(shard, [piece.gradient.shape[1] for piece in pieces]))


def _note(pieces: Sequence[Piece], watch: Watch | None) -> None:
    if watch is not None:
        for piece in pieces:
            watch.note(piece.layer.name, piece.gradient)
