"""A matrix of low rank in place of each layer's, with error feedback (PowerSGD, Vogels et al., NeurIPS 2019).

M ≈ P Qᵀ with P = M Q made orthogonal and Q = Mᵀ P: one step of the power method from the last step's Q. P and Q are
all-reduced, apart and after what is not compressed: three collectives, as in PyTorch's powerSGD_hook.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike

from synergy_core.errors import InputError
from synergy_core.goodput.compression._compressor import NUMBER_BYTES, Compressor, LayerSizes, Spread
from synergy_core.units import Bools, Floats, Ints

PREFIX = "powersgd-"
MIN_RATE = 2
"""Layers that would not shrink by more than this factor are sent as they are (PyTorch: min_compression_rate)."""
MATRIX_BYTES = 36.0
"""Touched per number: what was held back added 12, read for P and Q 8, the product written 4, held back now 12."""
LAUNCHES = 10.0
RANK_LAUNCHES = 4.0
"""To make one column of P orthogonal to those before: norm, division, product, subtraction."""


@dataclass(frozen=True, slots=True)
class PowerSgd(Compressor):
    """`rank` of P and Q, at least 1; cut to a layer's own rank."""

    rank: int
    unbiased: ClassVar[bool] = False
    collectives: ClassVar[int] = 3

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise InputError(f"compressor {self.name}: got rank {self.rank}; expected a whole number from 1 on.")

    @property
    def name(self) -> str:
        return f"{PREFIX}{self.rank}"

    def alike(self) -> tuple[Compressor, ...]:
        """The ranks that L-GreCo offers a layer: every rank from ⌊r/2⌋ to 2 r."""
        return tuple(PowerSgd(rank) for rank in range(max(self.rank // 2, 1), 2 * self.rank + 1))

    def ranks(self, layers: LayerSizes) -> Ints:
        """The rank of P and Q for each row of `layers`, (L,)."""
        return np.minimum(self.rank, layers.least_side)

    def factors(self, layers: LayerSizes) -> Ints:
        """Numbers in P and Q together, of one parameter of each row, (L,)."""
        return self.ranks(layers) * (layers.rows + layers.columns)

    def compresses(self, layers: LayerSizes) -> Bools:
        large = Compressor.compresses(self, layers)
        return large & (MIN_RATE * self.factors(layers) < layers.numbers)

    def coded_bytes(self, layers: LayerSizes) -> Ints:
        return NUMBER_BYTES * self.factors(layers)

    def _codec_work(self, layers: LayerSizes, n: Floats) -> tuple[ArrayLike, ArrayLike, ArrayLike]:
        rank = self.ranks(layers)
        touched = MATRIX_BYTES * layers.numbers + NUMBER_BYTES * layers.rows * rank * (2.0 * rank + 4.0)
        # Three products of the whole matrix, and Gram–Schmidt.
        flops = 6.0 * layers.numbers * rank + 2.0 * layers.rows * rank**2
        return touched, flops, LAUNCHES + RANK_LAUNCHES * rank

    def _error(self, layers: LayerSizes, spread: Spread) -> Floats:
        """What is left of Σ i^−p behind the rank: as by the best matrix of that rank, which the power method nears."""
        sides, ranks = layers.least_side, self.ranks(layers)
        decay = np.broadcast_to(np.asarray(spread.decay, dtype=np.float64), sides.shape)
        lost = np.empty(sides.shape)
        for p in np.unique(decay):
            which = decay == p
            sums = np.cumsum(np.arange(1, int(sides[which].max()) + 1, dtype=np.float64) ** -p)
            lost[which] = 1.0 - sums[ranks[which] - 1] / sums[sides[which] - 1]
        return lost

    def _state_bytes(self, layers: LayerSizes) -> Ints:
        # What is held back, and Q.
        return NUMBER_BYTES * (layers.numbers + layers.columns * self.ranks(layers))


OFFERED = tuple(PowerSgd(each) for each in (1, 2, 4, 8, 16, 32))


def named(name: str) -> Compressor | None:
    """`powersgd-RANK`; None where it is another scheme's. Raises InputError for no rank."""
    if not name.startswith(PREFIX):
        return None
    try:
        rank = int(name.removeprefix(PREFIX))
    except ValueError:
        raise InputError(f"compressor '{name}': expected {PREFIX}RANK; type {OFFERED[0].name}.") from None
    return PowerSgd(rank)
