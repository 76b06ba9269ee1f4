"""Sends each layer's numbers of largest magnitude with their indices, and adds the others to the next gradient.

Aji and Heafield (EMNLP 2017); error feedback: Stich et al. (NeurIPS 2018). Ranks choose different indices, so the
values (fp32) and indices (int32) of all ranks are all-gathered, and the bytes that a rank sends grow with the replicas.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike

from synergy_core.errors import InputError
from synergy_core.performance.goodput.compression._compressor import (
    NUMBER_BYTES,
    Compressor,
    LayerSizes,
    Spread,
    all_gathered,
)
from synergy_core.units import Floats, Ints

PREFIX = "topk-"
INDEX_BYTES = 4
ENCODE_BYTES = 60.0
"""Bytes touched per number: 12 to add the residual, 8 for magnitudes, 20 for radix selection in four passes plus a
gather, 8 for the new residual, 4 to zero the sum, 8 to divide it by the replicas."""
SCATTERED_BYTES = 72.0
"""Bytes touched per number added into the sum: 8 for it and its index, 64 to read and write a sector of 32 bytes."""
LAUNCHES = 14.0


@dataclass(frozen=True, slots=True)
class TopK(Compressor):
    """Sends a fraction, in (0, 1), of each layer's numbers, and at least one."""

    fraction: float
    unbiased: ClassVar[bool] = False
    collectives: ClassVar[int] = 2

    def __post_init__(self) -> None:
        if not 0.0 < self.fraction < 1.0:
            raise InputError(f"compressor {self.name}: got fraction {self.fraction:g}; expected one between 0 and 1.")

    @property
    def name(self) -> str:
        return f"{PREFIX}{self.fraction:g}"

    def nearby(self) -> tuple[Compressor, ...]:
        fractions = (factor * self.fraction for factor in (0.5, 0.75, 1.0, 1.5, 2.0))
        return tuple(TopK(each) for each in fractions if each < 1.0)

    def kept(self, layers: LayerSizes) -> Ints:
        """Count of numbers sent for one parameter of each row, (L,)."""
        result: Ints = np.maximum(np.rint(self.fraction * layers.numbers), 1.0).astype(np.int64)
        return result

    def coded_bytes(self, layers: LayerSizes) -> Ints:
        return (NUMBER_BYTES + INDEX_BYTES) * self.kept(layers)

    def _sent_bytes(self, layers: LayerSizes, n: Floats) -> Floats:
        return all_gathered(self.coded_bytes(layers), n)

    def _codec_work(self, layers: LayerSizes, n: Floats) -> tuple[ArrayLike, ArrayLike, ArrayLike]:
        return ENCODE_BYTES * layers.numbers + SCATTERED_BYTES * n * self.kept(layers), 0.0, LAUNCHES

    def _error(self, layers: LayerSizes, spread: Spread) -> Floats:
        """The part of the squared norm that lies in the numbers that are not sent: those of magnitude up to t.

        Magnitudes X are Weibull distributed with shape k, so the part exp(−t^k) of them exceeds t, and the part of
        E[X²] up to t is P(1 + 2/k, t^k), where P is the regularised lower gamma function.
        """
        from scipy.special import gammainc

        part = self.kept(layers) / layers.numbers
        result: Floats = gammainc(1.0 + 2.0 / np.asarray(spread.tail, dtype=np.float64), -np.log(part))
        return result

    def _state_bytes(self, layers: LayerSizes) -> Ints:
        return NUMBER_BYTES * layers.numbers


OFFERED = (TopK(0.01), TopK(0.1))


def named(name: str) -> Compressor | None:
    """Makes `topk-FRACTION`; None for names of other schemes. Raises InputError for a FRACTION outside (0, 1)."""
    if not name.startswith(PREFIX):
        return None
    try:
        return TopK(float(name.removeprefix(PREFIX)))
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"compressor '{name}': expected {PREFIX}FRACTION; type {OFFERED[0].name}.") from None
