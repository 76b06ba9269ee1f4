"""The largest numbers of each layer, by magnitude, with their places; what is not sent is added to the next gradient.

Aji and Heafield (EMNLP 2017); error feedback: Stich et al. (NeurIPS 2018). Ranks choose different places, so each gets
everyone's choice (all-gather of values in fp32 and indices in int32), and bytes grow with replicas.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike

from synergy_core.errors import InputError
from synergy_core.goodput.compression._compressor import NUMBER_BYTES, Compressor, LayerSizes, Spread, all_gathered
from synergy_core.units import Floats, Ints

PREFIX = "topk-"
INDEX_BYTES = 4
ENCODE_BYTES = 60.0
"""Touched per number: what was held back added 12, magnitudes 8, a radix selection of four passes and one that gathers
20, held back now 8, zeros for the sum 4, its division by replicas 8."""
SCATTERED_BYTES = 72.0
"""Touched per number that is added into the sum: itself 8, and a sector of 32 bytes read and written."""
LAUNCHES = 14.0


@dataclass(frozen=True, slots=True)
class TopK(Compressor):
    """`fraction` of each layer's numbers, at least one, in (0, 1)."""

    fraction: float
    unbiased: ClassVar[bool] = False
    collectives: ClassVar[int] = 2

    def __post_init__(self) -> None:
        if not 0.0 < self.fraction < 1.0:
            raise InputError(f"compressor {self.name}: got fraction {self.fraction:g}; expected one between 0 and 1.")

    @property
    def name(self) -> str:
        return f"{PREFIX}{self.fraction:g}"

    def alike(self) -> tuple[Compressor, ...]:
        fractions = (factor * self.fraction for factor in (0.5, 0.75, 1.0, 1.5, 2.0))
        return tuple(TopK(each) for each in fractions if each < 1.0)

    def kept(self, layers: LayerSizes) -> Ints:
        """Numbers that are sent of one parameter of each row, (L,)."""
        result: Ints = np.maximum(np.rint(self.fraction * layers.numbers), 1.0).astype(np.int64)
        return result

    def coded_bytes(self, layers: LayerSizes) -> Ints:
        return (NUMBER_BYTES + INDEX_BYTES) * self.kept(layers)

    def _sent_bytes(self, layers: LayerSizes, n: Floats) -> Floats:
        return all_gathered(self.coded_bytes(layers), n)

    def _codec_work(self, layers: LayerSizes, n: Floats) -> tuple[ArrayLike, ArrayLike, ArrayLike]:
        return ENCODE_BYTES * layers.numbers + SCATTERED_BYTES * n * self.kept(layers), 0.0, LAUNCHES

    def _error(self, layers: LayerSizes, spread: Spread) -> Floats:
        """Squares below the quantile that the kept ones begin at.

        X of a Weibull law of shape k: P(X > t) = exp(−t^k), E[X²; X ≤ t] = Γ(1 + 2/k) · P(1 + 2/k, t^k), P the
        regularised lower gamma function.
        """
        from scipy.special import gammainc

        part = self.kept(layers) / layers.numbers
        result: Floats = gammainc(1.0 + 2.0 / np.asarray(spread.tail, dtype=np.float64), -np.log(part))
        return result

    def _state_bytes(self, layers: LayerSizes) -> Ints:
        return NUMBER_BYTES * layers.numbers


OFFERED = (TopK(0.01), TopK(0.1))


def named(name: str) -> Compressor | None:
    """`topk-FRACTION`; None where it is another scheme's. Raises InputError for no fraction."""
    if not name.startswith(PREFIX):
        return None
    try:
        return TopK(float(name.removeprefix(PREFIX)))
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"compressor '{name}': expected {PREFIX}FRACTION; type {OFFERED[0].name}.") from None
