"""The largest numbers of a gradient, with what is held back added to the next (Stich et al. 2018)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from synergy_core.errors import InputError
from synergy_exec.training.compression.scheme import GradientLayer, Piece, Scheme, held_back
from synergy_exec.training.compression.wire import Watch, Wire


@dataclass(frozen=True, slots=True)
class TopK(Scheme):
    """`topk-0.01`: of every layer this part of its numbers, as fp32 with their places as int32; one gather."""

    FEEDBACK = True
    EXAMPLES: ClassVar = ("topk-0.01",)

    part: float

    @classmethod
    def named(cls, name: str) -> Self | None:
        kind, _, amount = name.partition("-")
        if kind != "topk":
            return None
        try:
            part = float(amount)
        except ValueError:
            part = 0.0
        if not 0 < part < 1:
            raise InputError(f"compressor '{name}' sends '{amount}' of each layer; write a part, as in topk-0.01.")
        return cls(part)

    @property
    def name(self) -> str:
        return f"topk-{self.part:g}"

    def sent_of(self, layer: GradientLayer) -> int:
        """How many numbers of a layer are sent."""
        return max(1, round(self.part * layer.numbers))

    def sent_bytes(self, layer: GradientLayer, replicas: int) -> float:
        return (replicas - 1) * 8 * self.sent_of(layer)

    @classmethod
    def exchange(cls, pieces: Sequence[Piece], wire: Wire, watch: Watch | None) -> None:
        wholes, values, places = [], [], []
        for piece in pieces:
            assert isinstance(piece.scheme, TopK)
            whole = piece.gradient.float()
            if piece.memory.error is not None:
                whole = whole + piece.memory.error
            # What is no number counts as the largest, so it is sent and all replicas see it.
            place = whole.abs().topk(piece.scheme.sent_of(piece.layer), sorted=False).indices
            wholes.append(whole)
            values.append(whole[place])
            places.append(place)
        counts = [len(each) for each in places]
        integers = torch.cat(places).to(torch.int32)
        sent = wire.gather(torch.cat([torch.cat(values), integers.view(torch.float32)]))
        floats, bits = torch.split(sent, sum(counts), dim=1)
        every_value = torch.split(floats, counts, dim=1)
        every_place = torch.split(bits.contiguous().view(torch.int32).long(), counts, dim=1)
        for at, piece in enumerate(pieces):
            mean = torch.zeros_like(wholes[at])
            for value, place in zip(every_value[at], every_place[at], strict=True):
                # One replica after another: no place twice in an addition, so the sum is the same on all devices.
                mean[place] += value
            error = wholes[at].index_fill(0, places[at], 0)
            if watch is not None:
                watch.note(piece.layer.name, wholes[at], error)
            held_back(piece.memory, error, mean)
            piece.gradient.copy_(mean)
