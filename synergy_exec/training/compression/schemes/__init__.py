"""How compressors exchange gradients: a file per scheme of the core's goodput/compression, with the same name.

A module has a function `exchange(pieces, wire, watch)`, which makes every piece's gradient the mean over the wire's
replicas; all replicas call it with the same layers. `watch` records the squared norms of the compressor's input and of
its error; it is None on steps that are not measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from synergy_core import modules_of
from synergy_exec.training.compression.layers import GradientPiece
from synergy_exec.training.compression.wire import Watch, Wire


@cache
def schemes() -> dict[str, Any]:
    """The modules of this folder by file name, sorted; a bucket's schemes are carried out in this order."""
    return {module.__name__.rpartition(".")[2]: module for module in modules_of(__name__)}


def send(pieces: Sequence[GradientPiece], wire: Wire, watch: Watch | None) -> None:
    """Exchanges the pieces of each scheme together."""
    for name, module in schemes().items():
        if chosen := [each for each in pieces if each.compressor.scheme == name]:
            module.exchange(chosen, wire, watch)
