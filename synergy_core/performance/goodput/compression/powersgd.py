"""Sends a low-rank approximation of each layer's gradient, with error feedback (PowerSGD, Vogels et al., NeurIPS 2019).

A gradient matrix M is approximated by P Qᵀ. P is M Q with the previous step's Q, orthogonalised; then Q = Mᵀ P. This is
one step of the power method. As in PyTorch's powerSGD_hook, three all-reduces sum the uncompressed layers, P and Q.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike

from synergy_core.errors import InputError
from synergy_core.performance.goodput.compression._compressor import NUMBER_BYTES, Compressor, LayerSizes, Spread
from synergy_core.units import Bools, Floats, Ints

PREFIX = "powersgd-"
MIN_RATE = 2
"""Layers that would not shrink by more than this factor are sent uncompressed (PyTorch: min_compression_rate)."""
MATRIX_BYTES = 36.0
"""Bytes touched per number: 12 to add the residual, 8 to read M for P and Q, 4 to write P Qᵀ, 12 for the residual."""
LAUNCHES = 10.0
RANK_LAUNCHES = 4.0
"""Kernel launches to orthogonalise one column of P: norm, division, product, subtraction."""


@dataclass(frozen=True, slots=True)
class PowerSgd(Compressor):
    """rank: rank of P and Q, at least 1. A layer whose largest possible rank is smaller uses that."""

    rank: int
    unbiased: ClassVar[bool] = False
    collectives: ClassVar[int] = 3

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise InputError(f"compressor {self.name}: got rank {self.rank}; expected a whole number ≥ 1.")

    @property
    def name(self) -> str:
        return f"{PREFIX}{self.rank}"

    def nearby(self) -> tuple[Compressor, ...]:
        """The ranks that L-GreCo offers a layer: every rank from ⌊r/2⌋ to 2 r."""
        return tuple(PowerSgd(rank) for rank in range(max(self.rank // 2, 1), 2 * self.rank + 1))

    def ranks(self, layers: LayerSizes) -> Ints:
        """The rank of P and Q for each row of `layers`, (L,)."""
        return np.minimum(self.rank, layers.least_side)

    def factors(self, layers: LayerSizes) -> Ints:
        """Count of numbers in P and Q together for one parameter of each row, (L,)."""
        return self.ranks(layers) * (layers.rows + layers.columns)

    def compresses(self, layers: LayerSizes) -> Bools:
        large = Compressor.compresses(self, layers)
        return large & (MIN_RATE * self.factors(layers) < layers.numbers)

    def coded_bytes(self, layers: LayerSizes) -> Ints:
        return NUMBER_BYTES * self.factors(layers)

    def _codec_work(self, layers: LayerSizes, n: Floats) -> tuple[ArrayLike, ArrayLike, ArrayLike]:
        rank = self.ranks(layers)
        touched = MATRIX_BYTES * layers.numbers + NUMBER_BYTES * layers.rows * rank * (2.0 * rank + 4.0)
        # Three products of M's size (M Q, Mᵀ P, P Qᵀ), and Gram–Schmidt.
        flops = 6.0 * layers.numbers * rank + 2.0 * layers.rows * rank**2
        return touched, flops, LAUNCHES + RANK_LAUNCHES * rank

    def _error(self, layers: LayerSizes, spread: Spread) -> Floats:
        """The part of Σ i^−p beyond the rank: the error of the best approximation. The power method converges to it."""
        sides, ranks = layers.least_side, self.ranks(layers)
        decay = np.broadcast_to(np.asarray(spread.decay, dtype=np.float64), sides.shape)
        lost = np.empty(sides.shape)
        for p in np.unique(decay):
            which = decay == p
            sums = np.cumsum(np.arange(1, int(sides[which].max()) + 1, dtype=np.float64) ** -p)
            lost[which] = 1.0 - sums[ranks[which] - 1] / sums[sides[which] - 1]
        return lost

    def _state_bytes(self, layers: LayerSizes) -> Ints:
        # The residual and Q.
        return NUMBER_BYTES * (layers.numbers + layers.columns * self.ranks(layers))


OFFERED = tuple(PowerSgd(each) for each in (1, 2, 4, 8, 16, 32))


def named(name: str) -> Compressor | None:
    """Makes `powersgd-RANK`; None for names of other schemes. Raises InputError if RANK is not a whole number ≥ 1."""
    if not name.startswith(PREFIX):
        return None
    try:
        rank = int(name.removeprefix(PREFIX))
    except ValueError:
        raise InputError(f"compressor '{name}': expected {PREFIX}RANK; type {OFFERED[0].name}.") from None
    return PowerSgd(rank)
