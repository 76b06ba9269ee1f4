"""Gradients as products of two thin matrices (PowerSGD, Vogels et al. 2019, arXiv 1905.13727).

A gradient matrix M takes two all-reduces: of P = M Q, which is then made orthonormal, and of Q = Mᵀ P, with which the
next step starts. Torch's own hook keeps its error feedback by number of bucket, and buckets change after the first step
and with every plan. Here it is kept by layer, so that checkpoints can save it.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from synergy_core.performance.goodput.compression.powersgd import PowerSgd
from synergy_exec.training.compression.layers import GradientPiece
from synergy_exec.training.compression.wire import Watch, Wire


def exchange(pieces: Sequence[GradientPiece], wire: Wire, watch: Watch | None) -> None:
    """Makes every piece's gradient the mean over the replicas (see the folder's `__init__`)."""
    matrices = [piece.memory.added_to(piece.gradient).view(piece.layer.rows, piece.layer.columns) for piece in pieces]
    starts = [_start(piece) for piece in pieces]
    lefts = _sums([matrix @ start for matrix, start in zip(matrices, starts, strict=True)], wire)
    # Unlike dividing by norms this gives an orthonormal P also where the gradient is 0.
    lefts = [torch.linalg.qr(left).Q for left in lefts]
    rights = _sums([matrix.T @ left for matrix, left in zip(matrices, lefts, strict=True)], wire)
    for piece, matrix, start, left, right in zip(pieces, matrices, starts, lefts, rights, strict=True):
        mean = left @ right.T
        error = matrix - mean / wire.replicas
        if watch is not None:
            watch.note(piece.layer.name, matrix, error)
        piece.memory.keep(error.flatten(), mean)
        norms = torch.linalg.vector_norm(right, dim=0, keepdim=True)
        piece.memory.start = torch.where((norms > 0) & torch.isfinite(norms), right / norms, start)
        piece.gradient.copy_(mean.flatten())


def _start(piece: GradientPiece) -> Tensor:
    """(columns, rank): the right factor that the last step kept, or random numbers seeded by the layer's name."""
    assert isinstance(piece.compressor, PowerSgd)
    shape = (piece.layer.columns, piece.compressor.rank)
    if piece.memory.start is not None and piece.memory.start.shape == shape:
        return piece.memory.start
    generator = torch.Generator().manual_seed(zlib.crc32(piece.layer.name.encode()))
    return torch.randn(shape, generator=generator).to(piece.gradient.device)


def _sums(factors: list[Tensor], wire: Wire) -> list[Tensor]:
    whole = torch.cat([each.flatten() for each in factors])
    wire.sum(whole)
    parts = torch.split(whole, [each.numel() for each in factors])
    return [part.view_as(factor) for part, factor in zip(parts, factors, strict=True)]
