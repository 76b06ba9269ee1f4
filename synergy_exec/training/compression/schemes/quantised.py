"""Gradients in 8, 4 or 2 bits, rounded at random so that their expectation is kept (QSGD, as CGX cuts it).

`q8`, `q4`, `q2`: rows of 512 numbers, each with its smallest and the distance of its levels in fp32. Two collectives:
each rank gets its part of everybody's rows, sums it in fp32, rounds the sum again, and all gather the sums. Shards take
the first alone, and their sums stay in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from synergy_core.goodput.compression._compressor import Compressor
from synergy_core.goodput.compression.quantised import BUCKET, Quantised
from synergy_exec.training.compression.layers import Piece, by_compressor
from synergy_exec.training.compression.wire import Watch, Wire

_ENDS_BYTES = 8
_MIDDLE = 0.5 + 2**-17
"""What makes `_noise` ÷ 2¹⁶ lie in (0, 1), 1/2 on average."""


def row_bytes(bits: int) -> int:
    """Of a row as it is sent."""
    return BUCKET * bits // 8 + _ENDS_BYTES


def exchange(pieces: Sequence[Piece], wire: Wire, watch: Watch | None) -> None:
    """See the folder's `__init__`."""
    groups = by_compressor(pieces)
    given = {compressor: _dealt_out(chosen, wire.replicas) for compressor, chosen in groups.items()}
    own = []
    for compressor, rows in _summed(given, groups, wire, watch).items():
        again = _encode(rows, _bits(compressor), wire.generator)
        if watch is not None:
            error = _decode(again, _bits(compressor)) - rows
            watch.second.append((rows.square().sum(), error.square().sum()))
        own.append(again.flatten())
    every = torch.split(wire.gather(torch.cat(own)), [len(each) for each in own], dim=1)
    for (compressor, chosen), sent in zip(groups.items(), every, strict=True):
        bits = _bits(compressor)
        rows = _decode(sent.reshape(-1, row_bytes(bits)), bits)
        counts = [_rows(piece.layer.numbers) for piece in chosen]
        for piece, part in zip(chosen, torch.split(rows[: sum(counts)], counts), strict=True):
            piece.gradient.copy_(part.flatten()[: piece.layer.numbers])


def share_out(pieces: Sequence[Piece], wire: Wire, watch: Watch | None) -> list[Tensor]:
    """See the folder's `__init__`."""
    groups = by_compressor(pieces)
    given = {
        compressor: torch.cat([_rows_of(piece.gradient) for piece in chosen], dim=1)
        for compressor, chosen in groups.items()
    }
    sums = _summed(given, groups, wire, watch)
    shards: dict[str, Tensor] = {}
    for compressor, chosen in groups.items():
        counts = [_rows(piece.gradient.shape[1]) for piece in chosen]
        for piece, part in zip(chosen, torch.split(sums[compressor], counts), strict=True):
            shards[piece.layer.name] = part.flatten()[: piece.gradient.shape[1]]
    return [shards[piece.layer.name] for piece in pieces]


def _encode(rows: Tensor, bits: int, generator: torch.Generator) -> Tensor:
    """(rows, 512) → (rows, row_bytes) of bytes. What is no number makes its whole row so."""
    low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
    step = (high - low) / (2**bits - 1)
    levels = (rows - (low - _MIDDLE * step)).div_(torch.where(step == 0, 1, step))
    levels.add_(_noise(rows, generator), alpha=2**-16).floor_().clamp_(0, 2**bits - 1)
    packed, width = levels.to(torch.uint8), bits
    while width < 8:
        # Halves rather than neighbours share a byte: both are read in order.
        half = packed.shape[1] // 2
        packed, width = packed[:, :half] << width | packed[:, half:], 2 * width
    return torch.cat([torch.cat([low, step], dim=1).view(torch.uint8), packed], dim=1)


def _decode(sent: Tensor, bits: int) -> Tensor:
    """(rows, row_bytes) of bytes → (rows, 512)."""
    ends = sent[:, :_ENDS_BYTES].contiguous().view(torch.float32)
    levels, width = sent[:, _ENDS_BYTES:], 8
    while width > bits:
        width //= 2
        levels = torch.cat([levels >> width, levels & 2**width - 1], dim=1)
    return levels.float().mul_(ends[:, 1:]).add_(ends[:, :1])


def _noise(like: Tensor, generator: torch.Generator) -> Tensor:
    """Numbers from −2¹⁵ to 2¹⁵ − 1, all as likely, in the shape of a tensor; four are drawn at once.

    Of a level, 2⁻¹⁶ is less than what fp32 leaves of a number that is one of 256 levels.
    """
    drawn = torch.empty(-(-like.numel() // 4), dtype=torch.int64, device=like.device)
    drawn.random_(-(2**63), None, generator=generator)
    return drawn.view(torch.int16)[: like.numel()].view(like.shape)


def _bits(compressor: Compressor) -> int:
    assert isinstance(compressor, Quantised)
    return compressor.bits


def _rows(numbers: int) -> int:
    return -(-numbers // BUCKET)


def _rows_of(gradient: Tensor) -> Tensor:
    """(…, numbers) → (…, rows, 512), the last row filled up with zeros."""
    padded = torch.nn.functional.pad(gradient.float(), (0, -gradient.shape[-1] % BUCKET))
    return padded.view(*gradient.shape[:-1], -1, BUCKET)


def _dealt_out(pieces: Sequence[Piece], replicas: int) -> Tensor:
    """(replicas, rows, 512): the rows of all pieces one after another, as many for each replica."""
    rows = torch.cat([_rows_of(piece.gradient) for piece in pieces])
    rows = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % replicas))
    return rows.view(replicas, -1, BUCKET)


def _summed(
    given: Mapping[Compressor, Tensor],
    groups: Mapping[Compressor, Sequence[Piece]],
    wire: Wire,
    watch: Watch | None,
) -> dict[Compressor, Tensor]:
    """(rows, 512) of each: the sum over the replicas of this rank's rows. given: (replicas, rows, 512) of each."""
    sent = {each: _encode(rows.flatten(0, 1), _bits(each), wire.generator) for each, rows in given.items()}
    if watch is not None:
        for each, chosen in groups.items():
            error = _decode(sent[each], _bits(each)).view_as(given[each]) - given[each]
            _note(watch, chosen, given[each], error)
    swapped = wire.swap(torch.cat([rows.view(wire.replicas, -1) for rows in sent.values()], dim=1))
    parts = torch.split(swapped, [rows.numel() // wire.replicas for rows in sent.values()], dim=1)
    return {
        each: _decode(part.reshape(-1, row_bytes(_bits(each))), _bits(each)).view(wire.replicas, -1, BUCKET).sum(0)
        for each, part in zip(sent, parts, strict=True)
    }


def _note(watch: Watch, pieces: Sequence[Piece], rows: Tensor, error: Tensor) -> None:
    squares = torch.stack([rows.square().sum(-1), error.square().sum(-1)])
    if pieces[0].gradient.dim() > 1:
        parts = torch.split(squares, [_rows(piece.gradient.shape[1]) for piece in pieces], dim=2)
    else:
        counts = [_rows(piece.layer.numbers) for piece in pieces]
        parts = torch.split(squares.flatten(1)[:, : sum(counts)], counts, dim=1)
    for piece, part in zip(pieces, parts, strict=True):
        watch.layers[piece.layer.name] = tuple(part.flatten(1).sum(1))
