"""Gradients in half precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from synergy_exec.training.compression.scheme import GradientLayer, Piece, SharedScheme, dealt
from synergy_exec.training.compression.wire import Watch, Wire

_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Half(SharedScheme):
    """`bf16`, `fp16`: one all-reduce that sums in that type; shards cross once and are summed in fp32.

    What is summed are the replicas' shares of the mean, which overflow fp16 no sooner than the mean itself does.
    torch's own hooks do the same; they are not used because bf16's refuses to run on CPUs, and neither goes by layer.
    """

    EXAMPLES: ClassVar = ("bf16", "fp16")

    type_name: str

    @classmethod
    def named(cls, name: str) -> Self | None:
        return cls(name) if name in _TYPES else None

    @property
    def name(self) -> str:
        return self.type_name

    def takes(self, layer: GradientLayer) -> bool:
        return True

    def sent_bytes(self, layer: GradientLayer, replicas: int) -> float:
        return 2 * (replicas - 1) / replicas * 2 * layer.numbers

    def shared_bytes(self, numbers: int, replicas: int, number_bytes: int = 4) -> float:
        return (replicas - 1) * 2 * numbers

    @classmethod
    def exchange(cls, pieces: Sequence[Piece], wire: Wire, watch: Watch | None) -> None:
        for chosen in _by_type(pieces):
            whole = torch.cat([_rounded(piece, watch) for piece in chosen])
            wire.sum(whole)
            dealt(whole, chosen)

    @classmethod
    def share_out(cls, pieces: Sequence[Piece], wire: Wire, watch: Watch | None) -> list[Tensor]:
        shards: dict[str, Tensor] = {}
        for chosen in _by_type(pieces):
            shard = wire.swap(torch.cat([_rounded(piece, watch) for piece in chosen], dim=1)).float().sum(0)
            parts = torch.split(shard, [piece.gradient.shape[1] for piece in chosen])
            shards |= {piece.layer.name: part for piece, part in zip(chosen, parts, strict=True)}
        return [shards[piece.layer.name] for piece in pieces]


def _by_type(pieces: Sequence[Piece]) -> list[list[Piece]]:
    groups = ([piece for piece in pieces if piece.scheme.name == name] for name in _TYPES)
    return [group for group in groups if group]


def _rounded(piece: Piece, watch: Watch | None) -> Tensor:
    rounded = piece.gradient.to(_TYPES[piece.scheme.name])
    if watch is not None:
        watch.note(piece.layer.name, piece.gradient, piece.gradient - rounded.to(piece.gradient.dtype))
    return rounded
