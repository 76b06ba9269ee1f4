"""Numbers from rank 0 to all ranks, of which each keeps what it owns, a few at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from synergy_exec.training.ranks import Ranks

_AT_ONCE_BYTES = 4 << 20
_ALIGNED_BYTES = 16
"""More than the size of a number of any kind."""


class Outline(NamedTuple):
    """Of a whole tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class _Piece(NamedTuple):
    """The rows from `first` to before `end` of a tensor, whose bytes begin at `at`."""

    outline: Outline
    first: int
    end: int
    at: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.end - self.first, *self.outline.shape[1:])

    def within(self, buffer: Tensor) -> Tensor:
        size = _row_bytes(self.outline) * (self.end - self.first)
        return buffer[self.at : self.at + size].view(self.outline.dtype).view(self.shape)


class Handing:
    """given: on rank 0, what is handed out, by name; it is let go on the way."""

    def __init__(self, given: dict[str, Tensor], ranks: Ranks) -> None:
        self._given, self._ranks = given, ranks
        # One for all: many would leave holes between what stays.
        self._buffer = torch.empty(_AT_ONCE_BYTES, dtype=torch.uint8)

    def hand_out(self, outlines: Iterable[Outline], taken: Mapping[str, Sequence[Tensor]]) -> None:
        """Fills the tensors that this rank has of these, whole or, as a DTensor, its part.

        taken: what this rank has, by name. All ranks call it together, with the same outlines.
        """
        for pieces, size in _loads(outlines):
            if size > len(self._buffer):
                self._buffer = torch.empty(size, dtype=torch.uint8)
            load = self._buffer[:size]
            if self._ranks.rank == 0:
                for piece in pieces:
                    self._take_from(piece, load)
            distributed.broadcast(load, src=0, group=self._ranks.group)
            for piece in pieces:
                for each in taken.get(piece.outline.name, ()):
                    _fill(each, piece, piece.within(load))

    def _take_from(self, piece: _Piece, load: Tensor) -> None:
        rows = _rows(self._given[piece.outline.name])
        piece.within(load).copy_(rows[piece.first : piece.end])
        if piece.end == len(rows):
            del self._given[piece.outline.name]


def _loads(outlines: Iterable[Outline]) -> Iterator[tuple[list[_Piece], int]]:
    """Pieces that go together, and their bytes."""
    load: list[_Piece] = []
    size = 0
    for outline in outlines:
        rows = outline.shape[0] if outline.shape else 1
        row_bytes = max(_row_bytes(outline), 1)
        step = max(_AT_ONCE_BYTES // row_bytes, 1)
        for first in range(0, rows, step):
            end = min(first + step, rows)
            if load and size + row_bytes * (end - first) > _AT_ONCE_BYTES:
                yield load, size
                load, size = [], 0
            load.append(_Piece(outline, first, end, size))
            size += -(-row_bytes * (end - first) // _ALIGNED_BYTES) * _ALIGNED_BYTES
    if load:
        yield load, size


def _row_bytes(outline: Outline) -> int:
    return int(torch.Size(outline.shape[1:]).numel()) * outline.dtype.itemsize


def _rows(tensor: Tensor) -> Tensor:
    """With a first dimension, where it has none."""
    return tensor.detach() if tensor.dim() else tensor.detach().reshape(1)


def _fill(tensor: Tensor, piece: _Piece, values: Tensor) -> None:
    if not isinstance(tensor, DTensor):
        _rows(tensor)[piece.first : piece.end].copy_(values)
        return
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    first, end = max(piece.first, offset[0]), min(piece.end, offset[0] + shape[0])
    if first < end:
        others = tuple(slice(start, start + size) for start, size in zip(offset[1:], shape[1:], strict=True))
        part = values[(slice(first - piece.first, end - piece.first), *others)]
        tensor.to_local().detach()[first - offset[0] : end - offset[0]].copy_(part)
