"""A worker's sign of life: two numbers in memory that it shares with its agent, so that a step costs no message."""

from __future__ import annotations

import mmap
import os
import struct

_FORM = struct.Struct("dd")


class Pulse:
    """Beats so far, and how many seconds the next may take. The worker writes, the agent reads."""

    def __init__(self, descriptor: int) -> None:
        """descriptor: of the shared memory; it may be closed afterwards."""
        self._memory = mmap.mmap(descriptor, _FORM.size)

    @staticmethod
    def create() -> int:
        """The descriptor of new shared memory, all zeros."""
        descriptor = os.memfd_create("pulse")
        os.ftruncate(descriptor, _FORM.size)
        return descriptor

    def beat(self, allowed_s: float) -> None:
        """Says: alive; and the next beat comes within `allowed_s`."""
        beats, _ = self.read()
        _FORM.pack_into(self._memory, 0, beats + 1, allowed_s)

    def read(self) -> tuple[float, float]:
        """Beats so far and seconds allowed; both 0 before the first."""
        beats, allowed_s = _FORM.unpack_from(self._memory)
        return beats, allowed_s
