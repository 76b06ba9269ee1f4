"""Signs of life of a worker and of its agent: numbers in memory that both share, so that a step costs no message."""

from __future__ import annotations

import mmap
import os
import struct
import time
from typing import NamedTuple

_FORM = struct.Struct("ddd")
"""The worker's."""
_ANSWER = struct.Struct("d")
"""The agent's, behind it: on the clock that all processes of a machine share."""
_BYTES = _FORM.size + _ANSWER.size


class Beat(NamedTuple):
    """The last sign of life. number: how many there were, 0 before the first. allowed_s: until the next.

    patient: the rank builds, loads, saves or waits for data, of which nobody knows how long it takes: it may go on as
    long as it is seen to do something.
    """

    number: float
    allowed_s: float
    patient: bool


class Pulse:
    """The worker writes its beats, the agent when it last looked."""

    def __init__(self, descriptor: int) -> None:
        """descriptor: of the shared memory; it may be closed afterwards."""
        self._memory = mmap.mmap(descriptor, _BYTES)

    @staticmethod
    def create() -> int:
        """The descriptor of new shared memory, all zeros."""
        descriptor = os.memfd_create("pulse")
        os.ftruncate(descriptor, _BYTES)
        return descriptor

    def beat(self, allowed_s: float, *, patient: bool = False) -> None:
        """Says: alive; and the next beat comes within `allowed_s`."""
        _FORM.pack_into(self._memory, 0, self.read().number + 1, allowed_s, patient)

    def read(self) -> Beat:
        """The last beat."""
        number, allowed_s, patient = _FORM.unpack_from(self._memory)
        return Beat(number, allowed_s, bool(patient))

    def answer(self) -> None:
        """The agent says: alive."""
        _ANSWER.pack_into(self._memory, _FORM.size, time.monotonic())

    def unanswered_s(self) -> float:
        """Seconds since the agent last said so; it has before the worker begins."""
        return time.monotonic() - float(_ANSWER.unpack_from(self._memory, _FORM.size)[0])
