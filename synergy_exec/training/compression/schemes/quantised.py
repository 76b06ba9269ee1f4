"""Gradients in 8, 4 or 2 bits, rounded at random so that their expectation is kept (QSGD, as CGX cuts it)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from synergy_core.errors import InputError
from synergy_exec.training.compression.scheme import GradientLayer, Piece, SharedScheme
from synergy_exec.training.compression.wire import Watch, Wire

ROW = 512
"""Numbers between whose smallest and largest the levels lie."""
_ENDS_BYTES = 8
_BITS = (8, 4, 2)


@dataclass(frozen=True, slots=True)
class Quantised(SharedScheme):
    """`q8`, `q4`, `q2`: rows of 512 numbers, each with its smallest and the distance of its levels in fp32.

    Two collectives: each rank gets its part of everybody's rows, sums it in fp32, rounds the sum again, and all gather
    the sums. Shards take the first alone, and their sums stay in fp32.
    """

    EXAMPLES: ClassVar = ("q8", "q4", "q2")

    bits: int

    @classmethod
    def named(cls, name: str) -> Self | None:
        if not (name[:1] == "q" and name[1:].isdecimal()):
            return None
        if int(name[1:]) not in _BITS:
            raise InputError(f"there is no compressor '{name}' of {name[1:]} bits; write q8, q4 or q2.")
        return cls(int(name[1:]))

    @property
    def name(self) -> str:
        return f"q{self.bits}"

    @property
    def row_bytes(self) -> int:
        """Of a row as it is sent."""
        return ROW * self.bits // 8 + _ENDS_BYTES

    def sent_bytes(self, layer: GradientLayer, replicas: int) -> float:
        return 2 * (replicas - 1) / replicas * _rows(layer.numbers) * self.row_bytes

    def shared_bytes(self, numbers: int, replicas: int, number_bytes: int = 4) -> float:
        return (replicas - 1) * _rows(numbers) * self.row_bytes

    def encode(self, rows: Tensor, generator: torch.Generator) -> Tensor:
        """(rows, 512) → (rows, row_bytes) of bytes. What is no number makes its whole row so."""
        low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
        step = (high - low) / (2**self.bits - 1)
        levels = (rows - (low - _MIDDLE * step)).div_(torch.where(step == 0, 1, step))
        levels.add_(_noise(rows, generator), alpha=2**-16).floor_().clamp_(0, 2**self.bits - 1)
        packed, width = levels.to(torch.uint8), self.bits
        while width < 8:
            # Halves rather than neighbours share a byte: both are read in order.
            half = packed.shape[1] // 2
            packed, width = packed[:, :half] << width | packed[:, half:], 2 * width
        return torch.cat([torch.cat([low, step], dim=1).view(torch.uint8), packed], dim=1)

    def decode(self, sent: Tensor) -> Tensor:
        """(rows, row_bytes) of bytes → (rows, 512)."""
        ends = sent[:, :_ENDS_BYTES].contiguous().view(torch.float32)
        levels, width = sent[:, _ENDS_BYTES:], 8
        while width > self.bits:
            width //= 2
            levels = torch.cat([levels >> width, levels & 2**width - 1], dim=1)
        return levels.float().mul_(ends[:, 1:]).add_(ends[:, :1])

    @classmethod
    def exchange(cls, pieces: Sequence[Piece], wire: Wire, watch: Watch | None) -> None:
        groups = _by_bits(pieces)
        sums = _summed({scheme: _dealt_out(chosen, wire.replicas) for scheme, chosen in groups}, groups, wire, watch)
        own = []
        for scheme, rows in sums.items():
            again = scheme.encode(rows, wire.generator)
            if watch is not None:
                watch.second.append((rows.square().sum(), (scheme.decode(again) - rows).square().sum()))
            own.append(again.flatten())
        every = torch.split(wire.gather(torch.cat(own)), [len(each) for each in own], dim=1)
        for (scheme, chosen), sent in zip(groups, every, strict=True):
            rows = scheme.decode(sent.reshape(-1, scheme.row_bytes))
            counts = [_rows(piece.layer.numbers) for piece in chosen]
            for piece, part in zip(chosen, torch.split(rows[: sum(counts)], counts), strict=True):
                piece.gradient.copy_(part.flatten()[: piece.layer.numbers])

    @classmethod
    def share_out(cls, pieces: Sequence[Piece], wire: Wire, watch: Watch | None) -> list[Tensor]:
        groups = _by_bits(pieces)
        given = {scheme: torch.cat([_rows_of(piece.gradient) for piece in chosen], dim=1) for scheme, chosen in groups}
        sums = _summed(given, groups, wire, watch)
        shards: dict[str, Tensor] = {}
        for scheme, chosen in groups:
            counts = [_rows(piece.gradient.shape[1]) for piece in chosen]
            for piece, part in zip(chosen, torch.split(sums[scheme], counts), strict=True):
                shards[piece.layer.name] = part.flatten()[: piece.gradient.shape[1]]
        return [shards[piece.layer.name] for piece in pieces]


_MIDDLE = 0.5 + 2**-17
"""What makes `_noise` ÷ 2¹⁶ lie in (0, 1), 1/2 on average."""


def _noise(like: Tensor, generator: torch.Generator) -> Tensor:
    """Numbers from −2¹⁵ to 2¹⁵ − 1, all as likely, in the shape of a tensor; four are drawn at once.

    Of a level, 2⁻¹⁶ is less than what fp32 leaves of a number that is one of 256 levels.
    """
    drawn = torch.empty(-(-like.numel() // 4), dtype=torch.int64, device=like.device)
    drawn.random_(-(2**63), None, generator=generator)
    return drawn.view(torch.int16)[: like.numel()].view(like.shape)


Groups = list[tuple[Quantised, list[Piece]]]


def _rows(numbers: int) -> int:
    return -(-numbers // ROW)


def _by_bits(pieces: Sequence[Piece]) -> Groups:
    groups = ((Quantised(bits), [piece for piece in pieces if piece.scheme == Quantised(bits)]) for bits in _BITS)
    return [(scheme, chosen) for scheme, chosen in groups if chosen]


def _rows_of(gradient: Tensor) -> Tensor:
    """(…, numbers) → (…, rows, 512), the last row filled up with zeros."""
    padded = torch.nn.functional.pad(gradient.float(), (0, -gradient.shape[-1] % ROW))
    return padded.view(*gradient.shape[:-1], -1, ROW)


def _dealt_out(pieces: Sequence[Piece], replicas: int) -> Tensor:
    """(replicas, rows, 512): the rows of all pieces one after another, as many for each replica."""
    rows = torch.cat([_rows_of(piece.gradient) for piece in pieces])
    rows = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % replicas))
    return rows.view(replicas, -1, ROW)


def _summed(given: dict[Quantised, Tensor], groups: Groups, wire: Wire, watch: Watch | None) -> dict[Quantised, Tensor]:
    """(rows, 512) of each: the sum over the replicas of this rank's rows. given: (replicas, rows, 512) of each."""
    sent = {scheme: scheme.encode(rows.flatten(0, 1), wire.generator) for scheme, rows in given.items()}
    if watch is not None:
        for scheme, chosen in groups:
            _note(watch, chosen, given[scheme], scheme.decode(sent[scheme]).view_as(given[scheme]) - given[scheme])
    swapped = wire.swap(torch.cat([each.view(wire.replicas, -1) for each in sent.values()], dim=1))
    parts = torch.split(swapped, [each.numel() // wire.replicas for each in sent.values()], dim=1)
    return {
        scheme: scheme.decode(part.reshape(-1, scheme.row_bytes)).view(wire.replicas, -1, ROW).sum(0)
        for scheme, part in zip(sent, parts, strict=True)
    }


def _note(watch: Watch, pieces: Sequence[Piece], rows: Tensor, error: Tensor) -> None:
    squares = torch.stack([rows.square().sum(-1), error.square().sum(-1)])
    if pieces[0].gradient.dim() > 1:
        parts = torch.split(squares, [_rows(piece.gradient.shape[1]) for piece in pieces], dim=2)
    else:
        counts = [_rows(piece.layer.numbers) for piece in pieces]
        parts = torch.split(squares.flatten(1)[:, : sum(counts)], counts, dim=1)
    for piece, part in zip(pieces, parts, strict=True):
        watch.put(piece.layer.name, *part.flatten(1).sum(1))
