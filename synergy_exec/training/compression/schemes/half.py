"""Gradients in half precision: one all-reduce that sums in that type.

The sum is over the replicas' shares of the mean, which overflow fp16 no sooner than the mean itself does. Torch's own
hooks do the same. They are not used because the bf16 hook refuses to run on CPUs, and neither hook goes by layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from synergy_exec.training.compression.layers import GradientPiece, by_compressor
from synergy_exec.training.compression.wire import Watch, Wire

_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def exchange(pieces: Sequence[GradientPiece], wire: Wire, watch: Watch | None) -> None:
    """Makes every piece's gradient the mean over the replicas (see the folder's `__init__`)."""
    for compressor, chosen in by_compressor(pieces).items():
        add_up(chosen, _TYPES[compressor.name], wire, watch)


def add_up(pieces: Sequence[GradientPiece], dtype: torch.dtype, wire: Wire, watch: Watch | None) -> None:
    """Sums the pieces over the replicas in that type."""
    rounded = [piece.gradient.to(dtype) for piece in pieces]
    if watch is not None:
        for piece, sent in zip(pieces, rounded, strict=True):
            watch.note(piece.layer.name, piece.gradient, piece.gradient - sent.to(piece.gradient.dtype))
    whole = torch.cat(rounded)
    wire.sum(whole)
    for piece, mean in zip(pieces, torch.split(whole, [piece.layer.numbers for piece in pieces]), strict=True):
        piece.gradient.copy_(mean)
