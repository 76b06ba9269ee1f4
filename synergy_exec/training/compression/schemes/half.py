"""Gradients in half precision: one all-reduce that sums in that type; shards cross once and are summed in fp32.

What is summed are the replicas' shares of the mean, which overflow fp16 no sooner than the mean itself does. torch's
own hooks do the same; they are not used because bf16's refuses to run on CPUs, and neither goes by layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from synergy_exec.training.compression.layers import Piece, by_compressor, dealt
from synergy_exec.training.compression.wire import Watch, Wire

_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def exchange(pieces: Sequence[Piece], wire: Wire, watch: Watch | None) -> None:
    """See the folder's `__init__`."""
    for compressor, chosen in by_compressor(pieces).items():
        add_up(chosen, _TYPES[compressor.name], wire, watch)


def share_out(pieces: Sequence[Piece], wire: Wire, watch: Watch | None) -> list[Tensor]:
    """See the folder's `__init__`."""
    shards: dict[str, Tensor] = {}
    for compressor, chosen in by_compressor(pieces).items():
        means = add_up_shards(chosen, _TYPES[compressor.name], wire, watch)
        shards |= {piece.layer.name: mean for piece, mean in zip(chosen, means, strict=True)}
    return [shards[piece.layer.name] for piece in pieces]


def add_up(pieces: Sequence[Piece], dtype: torch.dtype, wire: Wire, watch: Watch | None) -> None:
    """Sums the pieces over the replicas in that type."""
    whole = torch.cat([_rounded(piece, dtype, watch) for piece in pieces])
    wire.sum(whole)
    dealt(whole, pieces)


def add_up_shards(pieces: Sequence[Piece], dtype: torch.dtype, wire: Wire, watch: Watch | None) -> list[Tensor]:
    """This rank's shards, sent in that type and summed in fp32 at least."""
    rows = torch.cat([_rounded(piece, dtype, watch) for piece in pieces], dim=1)
    shard = wire.swap(rows).sum(0, dtype=torch.promote_types(pieces[0].gradient.dtype, torch.float32))
    return list(torch.split(shard, [piece.gradient.shape[1] for piece in pieces]))


def _rounded(piece: Piece, dtype: torch.dtype, watch: Watch | None) -> Tensor:
    rounded = piece.gradient.to(dtype)
    if watch is not None:
        watch.note(piece.layer.name, piece.gradient, piece.gradient - rounded.to(piece.gradient.dtype))
    return rounded
