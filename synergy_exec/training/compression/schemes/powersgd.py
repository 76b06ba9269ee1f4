"""Gradients as products of two thin matrices (PowerSGD, Vogels et al. 2019, arXiv 1905.13727)."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from synergy_core.errors import InputError
from synergy_exec.training.compression.scheme import GradientLayer, Piece, Scheme, held_back
from synergy_exec.training.compression.wire import Watch, Wire


@dataclass(frozen=True, slots=True)
class PowerSgd(Scheme):
    """`powersgd-4`: of rank 4, or of what rank the matrix has, if that is less.

    Two all-reduces: of P = M Q, which is then made orthonormal, and of Q = Mᵀ P, with which the next step starts.
    torch's own hook keys what it holds by the number of a bucket, and buckets change after the first step and with
    every plan; by layer it can be saved.
    """

    FEEDBACK = True
    EXAMPLES: ClassVar = ("powersgd-4",)

    rank: int

    @classmethod
    def named(cls, name: str) -> Self | None:
        kind, _, amount = name.partition("-")
        if kind != "powersgd":
            return None
        if not amount.isdecimal() or int(amount) < 1:
            raise InputError(f"compressor '{name}' has rank '{amount}'; write a whole number from 1, as in powersgd-4.")
        return cls(int(amount))

    @property
    def name(self) -> str:
        return f"powersgd-{self.rank}"

    def of(self, layer: GradientLayer) -> Scheme:
        return PowerSgd(min(self.rank, layer.rows, layer.columns))

    def takes(self, layer: GradientLayer) -> bool:
        # Twice fewer numbers at least, as torch's `min_compression_rate` has it: two products are not for nothing.
        return Scheme.takes(self, layer) and 2 * self.rank * (layer.rows + layer.columns) < layer.numbers

    def sent_bytes(self, layer: GradientLayer, replicas: int) -> float:
        return 2 * (replicas - 1) / replicas * 4 * self.rank * (layer.rows + layer.columns)

    @classmethod
    def exchange(cls, pieces: Sequence[Piece], wire: Wire, watch: Watch | None) -> None:
        matrices = [_matrix(piece) for piece in pieces]
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
            held_back(piece.memory, error.flatten(), mean)
            norms = torch.linalg.vector_norm(right, dim=0, keepdim=True)
            piece.memory.start = torch.where((norms > 0) & torch.isfinite(norms), right / norms, start)
            piece.gradient.copy_(mean.flatten())


def _matrix(piece: Piece) -> Tensor:
    whole = piece.gradient.float()
    if piece.memory.error is not None:
        whole = whole + piece.memory.error
    return whole.view(piece.layer.rows, piece.layer.columns)


def _start(piece: Piece) -> Tensor:
    """(columns, rank): what the last step left, or random numbers that follow from the layer's name."""
    assert isinstance(piece.scheme, PowerSgd)
    shape = (piece.layer.columns, piece.scheme.rank)
    if piece.memory.start is not None and piece.memory.start.shape == shape:
        return piece.memory.start
    generator = torch.Generator().manual_seed(zlib.crc32(piece.layer.name.encode()))
    return torch.randn(shape, generator=generator).to(piece.gradient.device)


def _sums(factors: list[Tensor], wire: Wire) -> list[Tensor]:
    whole = torch.cat([each.flatten() for each in factors])
    wire.sum(whole)
    parts = torch.split(whole, [each.numel() for each in factors])
    return [part.view_as(factor) for part, factor in zip(parts, factors, strict=True)]
