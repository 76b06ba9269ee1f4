"""What reports say of the exchange of gradients."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from synergy_exec.training.compression.exchange import Exchanged
from synergy_exec.training.compression.replicas import layer_of

_RECENT_STEPS = 20


class Exchanges:
    """Collects what steps showed of their exchanges."""

    def __init__(self) -> None:
        self._sent_bytes = 0.0
        self._codec_s: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._layers: Mapping[str, tuple[float, float]] = {}

    def add(self, exchanged: Exchanged | None) -> None:
        """One step's; None without replicas."""
        if exchanged is not None:
            self._sent_bytes = exchanged.sent_bytes
            self._codec_s.append(exchanged.codec_s)
            self._layers = exchanged.layers or self._layers

    def take(self) -> dict[str, Any]:
        """Fields of a `Report`: bytes of the last step, median seconds of the last ones, layers since the last call."""
        layers, self._layers = self._layers, {}
        return {
            "sent_bytes": self._sent_bytes,
            "codec_s": statistics.median(self._codec_s) if self._codec_s else 0.0,
            "layers": {name: list(squares) for name, squares in layers.items()},
        }


def layers_of(parts: Iterable[nn.Module]) -> list[tuple[str, int, int]]:
    """Name, rows and columns of each parameter that is trained and has any numbers, as replicas exchange it."""
    every = (each for part in parts for each in part.named_parameters())
    layers = (layer_of(name, each.shape, each.element_size()) for name, each in every if each.requires_grad)
    return [(each.name, each.rows, each.columns) for each in layers if each.numbers]
