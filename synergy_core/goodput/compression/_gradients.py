"""What a compressor is asked about: the layers of a model, and how the numbers of their gradients are spread."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

from synergy_core.arrays import Floats, Ints
from synergy_core.errors import InputError

NUMBER_BYTES = 4
"""Gradients are exchanged in fp32 where nothing compresses them."""


@dataclass(frozen=True, eq=False)
class LayerSizes:
    """The parameters of a model; arrays (L,) of whole numbers.

    rows, columns: of a parameter as a matrix, its first dimension × all others; a vector has one column. count: how
    many of these sizes there are. What is said of a row is of all of them together.
    """

    rows: Ints
    columns: Ints
    count: Ints

    def __post_init__(self) -> None:
        arrays = self.rows, self.columns, self.count
        if len({each.shape for each in arrays}) != 1 or self.rows.ndim != 1:
            shapes = ", ".join(str(each.shape) for each in arrays)
            raise InputError(f"layers: got arrays of shapes {shapes}; expected rows, columns, count of one length.")
        if any(np.any(each < 1) for each in arrays):
            raise InputError("layers: got a size or count below 1; leave out what has no parameters.")

    @classmethod
    def of_shapes(cls, shapes: Iterable[Sequence[int]]) -> LayerSizes:
        """One row per tensor, in their order; a number counts as a vector."""
        flat = [tuple(each) or (1,) for each in shapes]
        rows = np.array([each[0] for each in flat], dtype=np.int64)
        columns = np.array([int(np.prod(each[1:], dtype=np.int64)) for each in flat], dtype=np.int64)
        return cls(rows, columns, np.ones(len(flat), dtype=np.int64))

    def apart(self) -> LayerSizes:
        """The same with one row per parameter."""
        once = np.ones(int(self.count.sum()), dtype=np.int64)
        return LayerSizes(np.repeat(self.rows, self.count), np.repeat(self.columns, self.count), once)

    @property
    def numbers(self) -> Ints:
        """In one parameter of each row."""
        result: Ints = self.rows * self.columns
        return result

    @property
    def least_side(self) -> Ints:
        """The largest rank that one parameter can have."""
        result: Ints = np.minimum(self.rows, self.columns)
        return result


@dataclass(frozen=True, eq=False)
class Spread:
    """How the numbers of a gradient are spread: numbers, or arrays (L,) where layers differ.

    tail: shape of the Weibull law of their magnitudes; 1 is exponential, less is heavier. decay: p, where the i-th
    squared singular value is in proportion to i^−p; 0: all alike. bucket_range: mean of (largest − least)² of 512
    numbers ÷ mean square of a number. energy: mean square of a number, relative to other layers.
    """

    tail: ArrayLike
    decay: ArrayLike
    bucket_range: ArrayLike
    energy: ArrayLike = 1.0

    def __post_init__(self) -> None:
        for name in ("tail", "decay", "bucket_range", "energy"):
            values = np.asarray(getattr(self, name), dtype=np.float64)
            if not np.all(np.isfinite(values) & (values >= 0.0)):
                raise InputError(f"spread of gradients: got {name}={getattr(self, name)}; expected finite numbers ≥ 0.")
        if np.any(np.asarray(self.tail) == 0.0):
            raise InputError("spread of gradients: got tail=0; expected the shape of a Weibull law, above 0.")

    def shares(self, layers: LayerSizes) -> Floats:
        """Of the squared norm of the whole gradient, what is in each row of `layers`; (L,), sums to 1."""
        energy = np.broadcast_to(np.asarray(self.energy, dtype=np.float64), layers.rows.shape)
        weights = energy * layers.numbers * layers.count
        total = weights.sum()
        if not total > 0.0:
            raise InputError("spread of gradients: no layer has any energy; a gradient of zeros has no shares.")
        result: Floats = weights / total
        return result


@dataclass(frozen=True, eq=False)
class Gradients:
    """How a model's gradients are spread: of their mean (signal), and of what single samples add to it (noise).

    The defaults are medians over the layers of the shipped GPT after 300 steps, as `python bench/compression.py
    spreads` prints them. That other models are like it is assumed, not known.
    """

    signal: Spread = field(default_factory=lambda: Spread(tail=1.32, decay=1.08, bucket_range=42.3))
    noise: Spread = field(default_factory=lambda: Spread(tail=1.29, decay=1.07, bucket_range=42.3))


CONVOLUTIONAL = Gradients(
    Spread(tail=0.56, decay=4.54, bucket_range=38.4), Spread(tail=0.56, decay=3.18, bucket_range=55.4)
)
"""The same of the shipped CNN: its gradients have heavier tails and far lower ranks."""
