"""Gradients as they are: one all-reduce, in the gradients' own type."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from synergy_exec.training.compression.layers import Piece
from synergy_exec.training.compression.schemes.half import add_up, add_up_shards
from synergy_exec.training.compression.wire import Watch, Wire


def exchange(pieces: Sequence[Piece], wire: Wire, watch: Watch | None) -> None:
    """See the folder's `__init__`."""
    add_up(pieces, pieces[0].gradient.dtype, wire, watch)


def share_out(pieces: Sequence[Piece], wire: Wire, watch: Watch | None) -> list[Tensor]:
    """See the folder's `__init__`."""
    return add_up_shards(pieces, pieces[0].gradient.dtype, wire, watch)
