"""Gradients in 8, 4 or 2 bits, rounded at random so that their expectation is kept (QSGD, in rows as in CGX).

`q8`, `q4`, `q2` cut gradients into rows of 512 numbers, each with its smallest number and level distance in fp32. Two
collectives: each rank gets its part of all ranks' rows, sums it in fp32 and rounds the sums, which all then gather.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from synergy_core.performance.goodput.compression._compressor import Compressor
from synergy_core.performance.goodput.compression.quantised import BUCKET, Quantised
from synergy_exec.training.compression.layers import GradientPiece, by_compressor
from synergy_exec.training.compression.wire import Watch, Wire

_ENDS_BYTES = 8
_MIDDLE = 0.5 + 2**-17
"""Added to `_noise` ÷ 2¹⁶, it gives numbers in (0, 1) with mean 1/2."""


def row_bytes(bits: int) -> int:
    """Bytes of one encoded row."""
    return BUCKET * bits // 8 + _ENDS_BYTES


def exchange(pieces: Sequence[GradientPiece], wire: Wire, watch: Watch | None) -> None:
    """Makes every piece's gradient the mean over the replicas (see the folder's `__init__`)."""
    groups = [(_bits(compressor), chosen) for compressor, chosen in by_compressor(pieces).items()]
    sums = _summed(groups, wire, watch)
    own = []
    for (bits, _), rows in zip(groups, sums, strict=True):
        again = _encode(rows, bits, wire.generator)
        if watch is not None:
            watch.second.append((rows.square().sum(), (_decode(again, bits) - rows).square().sum()))
        own.append(again.flatten())
    every = torch.split(wire.gather(torch.cat(own)), [len(each) for each in own], dim=1)
    for (bits, chosen), sent in zip(groups, every, strict=True):
        rows = _decode(sent.reshape(-1, row_bytes(bits)), bits)
        for piece, part in zip(chosen, _by_piece(rows, chosen), strict=True):
            piece.gradient.copy_(part.flatten()[: piece.layer.numbers])


def _summed(groups: Sequence[tuple[int, list[GradientPiece]]], wire: Wire, watch: Watch | None) -> list[Tensor]:
    """(rows, 512) for each group: this rank's part of the group's rows, summed over the replicas."""
    sent = []
    for bits, chosen in groups:
        rows = torch.cat([_rows_of(piece.gradient) for piece in chosen])
        # Every replica gets the same number of rows.
        rows = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % wire.replicas))
        encoded = _encode(rows, bits, wire.generator)
        if watch is not None:
            error = _decode(encoded, bits) - rows
            for piece, given, lost in zip(chosen, _by_piece(rows, chosen), _by_piece(error, chosen), strict=True):
                watch.note(piece.layer.name, given, lost)
        sent.append(encoded.view(wire.replicas, -1))
    swapped = wire.swap(torch.cat(sent, dim=1))
    parts = torch.split(swapped, [rows.shape[1] for rows in sent], dim=1)
    return [
        _decode(part.reshape(-1, row_bytes(bits)), bits).view(wire.replicas, -1, BUCKET).sum(0)
        for (bits, _), part in zip(groups, parts, strict=True)
    ]


def _by_piece(rows: Tensor, pieces: Sequence[GradientPiece]) -> Sequence[Tensor]:
    counts = [-(-piece.layer.numbers // BUCKET) for piece in pieces]
    return torch.split(rows[: sum(counts)], counts)


def _encode(rows: Tensor, bits: int, generator: torch.Generator) -> Tensor:
    """Encodes (rows, 512) into bytes, (rows, row_bytes). One NaN or infinity spoils its whole row."""
    low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
    step = (high - low) / (2**bits - 1)
    levels = (rows - (low - _MIDDLE * step)).div_(torch.where(step == 0, 1, step))
    levels.add_(_noise(rows, generator), alpha=2**-16).floor_().clamp_(0, 2**bits - 1)
    packed, width = levels.to(torch.uint8), bits
    while width < 8:
        # A number of the first half shares a byte with one of the second half, so that both halves are read in order.
        half = packed.shape[1] // 2
        packed, width = packed[:, :half] << width | packed[:, half:], 2 * width
    return torch.cat([torch.cat([low, step], dim=1).view(torch.uint8), packed], dim=1)


def _decode(sent: Tensor, bits: int) -> Tensor:
    """Decodes bytes, (rows, row_bytes), into (rows, 512)."""
    ends = sent[:, :_ENDS_BYTES].contiguous().view(torch.float32)
    levels, width = sent[:, _ENDS_BYTES:], 8
    while width > bits:
        width //= 2
        levels = torch.cat([levels >> width, levels & 2**width - 1], dim=1)
    return levels.float().mul_(ends[:, 1:]).add_(ends[:, :1])


def _noise(like: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform random integers from −2¹⁵ to 2¹⁵ − 1 in the shape of a tensor; four are drawn at once.

    Their step of 2⁻¹⁶ levels is finer than the rounding of fp32 for a number among 256 levels.
    """
    drawn = torch.empty(-(-like.numel() // 4), dtype=torch.int64, device=like.device)
    drawn.random_(-(2**63), None, generator=generator)
    return drawn.view(torch.int16)[: like.numel()].view(like.shape)


def _bits(compressor: Compressor) -> int:
    assert isinstance(compressor, Quantised)
    return compressor.bits


def _rows_of(gradient: Tensor) -> Tensor:
    """Cuts (numbers,) into (rows, 512); zeros fill the last row."""
    return torch.nn.functional.pad(gradient.float(), (0, -len(gradient) % BUCKET)).view(-1, BUCKET)
