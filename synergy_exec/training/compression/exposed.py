"""How long replicas exchanged gradients while nothing was computed: from the last gradient until all were exchanged."""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch
from torch import Tensor, nn


class Exposed:
    """Watches the parameters of parts whose whole gradients replicas exchange.

    What is exchanged before the last gradient is computed hides behind computing, but where it runs within the backward
    pass, as hooks on CPUs do: that time is to be added.
    """

    def __init__(self, parts: Iterable[nn.Module], device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._last_s = 0.0
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if self._cuda else []  # type: ignore[no-untyped-call]
        for part in parts:
            for parameter in part.parameters():
                if parameter.requires_grad:
                    parameter.register_hook(self._note)  # type: ignore[no-untyped-call]

    def _note(self, _gradient: Tensor) -> None:
        if self._cuda:
            self._events[0].record()
        else:
            self._last_s = time.perf_counter()

    def take(self) -> float:
        """Seconds since the last gradient was computed; called when all are exchanged, and waits for the device."""
        if not self._cuda:
            return time.perf_counter() - self._last_s
        begin, end = self._events
        end.record()
        end.synchronize()
        elapsed_ms: float = begin.elapsed_time(end)
        return elapsed_ms / 1000
