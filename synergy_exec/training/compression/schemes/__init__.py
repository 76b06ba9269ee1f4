"""How compressors exchange gradients: a file per scheme of synergy_core/goodput/compression, with the same name.

A module has a function `exchange(pieces, wire, watch)`, which makes every piece's gradient the mean over the wire's
replicas; all of them call it with the same layers. `watch` takes the squares of what is sent and of the error; it is
None on steps that are not measured. A scheme that is unbiased also has `share_out(pieces, wire, watch)`: the mean over
the replicas of this rank's shard of every piece, in their order; it leaves the pieces as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from torch import Tensor

from synergy_core import modules_of
from synergy_exec.training.compression.layers import Piece
from synergy_exec.training.compression.wire import Watch, Wire


@cache
def schemes() -> dict[str, Any]:
    """Every module of this folder by the name of its file: the order in which those of a bucket are sent."""
    return {module.__name__.rpartition(".")[2]: module for module in modules_of(__name__)}


def send(pieces: Sequence[Piece], wire: Wire, watch: Watch | None) -> None:
    """Exchanges each piece as its compressor does, those of one scheme together."""
    for scheme, chosen in _by_scheme(pieces):
        scheme.exchange(chosen, wire, watch)


def share_out(pieces: Sequence[Piece], wire: Wire, watch: Watch | None) -> list[Tensor]:
    """The mean of this rank's shard of each piece, those of one scheme together."""
    shards: dict[str, Tensor] = {}
    for scheme, chosen in _by_scheme(pieces):
        means = scheme.share_out(chosen, wire, watch)
        shards |= {piece.layer.name: mean for piece, mean in zip(chosen, means, strict=True)}
    return [shards[piece.layer.name] for piece in pieces]


def _by_scheme(pieces: Sequence[Piece]) -> list[tuple[Any, list[Piece]]]:
    groups = (
        (module, [each for each in pieces if each.compressor.scheme == name]) for name, module in schemes().items()
    )
    return [(module, chosen) for module, chosen in groups if chosen]
