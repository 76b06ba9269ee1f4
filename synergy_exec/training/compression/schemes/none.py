"""No compression: one all-reduce in the gradients' own type."""

from __future__ import annotations

from collections.abc import Sequence

from synergy_exec.training.compression.layers import GradientPiece
from synergy_exec.training.compression.schemes.half import add_up
from synergy_exec.training.compression.wire import Watch, Wire


def exchange(pieces: Sequence[GradientPiece], wire: Wire, watch: Watch | None) -> None:
    """Makes every piece's gradient the mean over the replicas (see the folder's `__init__`)."""
    add_up(pieces, pieces[0].gradient.dtype, wire, watch)
