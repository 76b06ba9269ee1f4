"""The interface of compression schemes, and the layers, gradients and codec costs that they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import ArrayLike

from synergy_core.errors import InputError
from synergy_core.units import Bools, Floats, Ints

NUMBER_BYTES = 4
"""Bytes of a number in an uncompressed exchange: fp32."""


@dataclass(frozen=True, eq=False)
class LayerSizes:
    """The parameters of a model, grouped by size; arrays (L,) of whole numbers.

    rows, columns: of a parameter as a matrix, first dimension × product of the others; a vector has one column. count:
    number of parameters of this size. Bytes and work of a layer, (L,), are sums over these parameters.
    """

    rows: Ints
    columns: Ints
    count: Ints

    def __post_init__(self) -> None:
        if any(np.any(each < 1) for each in (self.rows, self.columns, self.count)):
            raise InputError("layers: got a size or count below 1; leave out layers without parameters.")

    @classmethod
    def of_shapes(cls, shapes: Iterable[Sequence[int]]) -> LayerSizes:
        """One row per tensor, in order; a scalar counts as a vector."""
        flat = [tuple(each) or (1,) for each in shapes]
        rows = np.array([each[0] for each in flat], dtype=np.int64)
        columns = np.array([int(np.prod(each[1:], dtype=np.int64)) for each in flat], dtype=np.int64)
        return cls(rows, columns, np.ones(len(flat), dtype=np.int64))

    def apart(self) -> LayerSizes:
        """The same parameters with one entry each, so that every count is 1."""
        once = np.ones(int(self.count.sum()), dtype=np.int64)
        return LayerSizes(np.repeat(self.rows, self.count), np.repeat(self.columns, self.count), once)

    @property
    def numbers(self) -> Ints:
        """(L,) count of numbers in one parameter of each size."""
        return self.rows * self.columns

    @property
    def least_side(self) -> Ints:
        """(L,) the largest rank that one parameter of each size can have as a matrix."""
        return np.minimum(self.rows, self.columns)


@dataclass(frozen=True, eq=False)
class Spread:
    """Distribution of a gradient's entries: numbers, or arrays (L,) if layers differ.

    tail: shape of the Weibull distribution of magnitudes; 1 is exponential, less has a heavier tail. decay: p, where
    the i-th squared singular value is proportional to i^−p; 0: all are equal. bucket_range: mean of (largest − least)²
    over buckets of 512 numbers ÷ mean square of a number. energy: mean square of a number, relative to other layers.
    """

    tail: ArrayLike
    decay: ArrayLike
    bucket_range: ArrayLike
    energy: ArrayLike = 1.0

    def shares(self, layers: LayerSizes) -> Floats:
        """Fraction of the gradient's squared norm in each row of `layers`; (L,), sums to 1."""
        energy = np.broadcast_to(np.asarray(self.energy, dtype=np.float64), layers.rows.shape)
        weights = energy * layers.numbers * layers.count
        result: Floats = weights / weights.sum()
        return result


@dataclass(frozen=True, eq=False)
class Gradients:
    """Distributions of a model's gradients: of their mean (signal), and of single samples' deviations from it (noise).

    The defaults are medians over the layers of the shipped GPT after 300 steps (`python
    bench/pages.py spreads`). They are assumed for other models.
    """

    signal: Spread = field(default_factory=lambda: Spread(tail=1.32, decay=1.08, bucket_range=42.3))
    noise: Spread = field(default_factory=lambda: Spread(tail=1.29, decay=1.07, bucket_range=42.3))


CONVOLUTIONAL = Gradients(
    Spread(tail=0.56, decay=4.54, bucket_range=38.4), Spread(tail=0.56, decay=3.18, bucket_range=55.4)
)
"""`Gradients` of the shipped CNN: their tails are heavier than the GPT's, and their singular values fall far faster."""


SMALL = 1_024
"""Layers of fewer numbers are sent uncompressed: kernels would take longer than sending the bytes."""
LAUNCH_S = 6e-6
"""Seconds between two kernels of eager PyTorch: 4 to 10 µs, depending on the host. Used until codecs are measured."""
STREAMED = 0.8
"""Assumed fraction of the data sheet's memory bandwidth that streaming kernels reach, until codecs are measured."""


def all_reduced(carried_bytes: ArrayLike, replicas: ArrayLike) -> Floats:
    """Bytes that each rank sends when a ring all-reduces `carried_bytes` over N replicas: 2 (N − 1)/N × carried_bytes.

    A reduce-scatter sends half of them, an all-gather the other half, also if the two are separate collectives.
    """
    n = np.asarray(replicas, dtype=np.float64)
    return 2.0 * (n - 1.0) / n * np.asarray(carried_bytes, dtype=np.float64)


def all_gathered(own_bytes: ArrayLike, replicas: ArrayLike) -> Floats:
    """Bytes that each rank sends when N replicas all-gather `own_bytes` from each of them: (N − 1) × own_bytes."""
    n = np.asarray(replicas, dtype=np.float64)
    return (n - 1.0) * np.asarray(own_bytes, dtype=np.float64)


@dataclass(frozen=True, eq=False)
class CodecWork:
    """Work of encoding and decoding on one GPU in a step; arrays of one shape, by layer.

    touched_bytes: read and written in GPU memory. flops: of matrix products in fp32. launches: kernels launched.
    """

    touched_bytes: Floats
    flops: Floats
    launches: Floats


class GpuRates(Protocol):
    """The fields of a GPU's data sheet that codec speeds depend on."""

    @property
    def memory_bandwidth_bytes_per_s(self) -> float: ...
    @property
    def fp32_flops_per_s(self) -> float: ...


@dataclass(frozen=True, slots=True)
class CodecSpeed:
    """Speed of encoding and decoding on a GPU: memory bytes and FLOPs per second, seconds between kernels; all > 0."""

    touched_bytes_per_s: float
    flops_per_s: float
    launch_s: float


def speed_by_sheet(gpu: GpuRates) -> CodecSpeed:
    """Codec speed estimated from a GPU's data sheet."""
    return CodecSpeed(STREAMED * gpu.memory_bandwidth_bytes_per_s, gpu.fp32_flops_per_s, LAUNCH_S)


def codec_s(work: CodecWork, speed: CodecSpeed) -> Floats:
    """Seconds by layer: the longer of memory and arithmetic time (a roofline), plus the kernel launches."""
    memory = work.touched_bytes / speed.touched_bytes_per_s
    return np.maximum(memory, work.flops / speed.flops_per_s) + speed.launch_s * work.launches


class Compressor(ABC):
    """A way to compress gradients for their exchange. Compressors with equal names are equal.

    unbiased: whether the exchanged gradient equals the true one on average; if not, the compressor adds what it did not
    send to the next gradient (error feedback). rounds_sum: whether the sum is compressed again. collectives: number of
    consecutive collectives that replace the all-reduce, including that of the uncompressed layers.

    `replicas` is a number or an array; results have its shape followed by (L,).
    """

    unbiased: ClassVar[bool]
    rounds_sum: ClassVar[bool] = False
    collectives: ClassVar[int]

    @property
    @abstractmethod
    def name(self) -> str:
        """The name by which `compressor_named` finds this compressor."""

    @property
    def scheme(self) -> str:
        """The name of the compressor's scheme: the name of its module."""
        return type(self).__module__.rpartition(".")[2]

    def nearby(self) -> tuple[Compressor, ...]:
        """Compressors of the scheme that send about half to twice as many bytes, for a choice by layer."""
        return (self,)

    def compresses(self, layers: LayerSizes) -> Bools:
        """Mask (L,) of the layers that are compressed; small layers and vectors are sent uncompressed."""
        return (layers.columns > 1) & (layers.numbers >= SMALL)

    def sent_bytes(self, layers: LayerSizes, replicas: ArrayLike) -> Floats:
        """Bytes that each rank sends in a step, as a mean over ranks."""
        n = np.asarray(replicas, dtype=np.float64)[..., None]
        as_they_are = all_reduced(NUMBER_BYTES * layers.numbers, n)
        each = np.where(self.compresses(layers), self._sent_bytes(layers, n), as_they_are)
        return _times(each, layers)

    def codec_work(self, layers: LayerSizes, replicas: ArrayLike) -> CodecWork:
        """Work of compressing and decompressing on each GPU in a step; none with one replica."""
        n = np.asarray(replicas, dtype=np.float64)[..., None]
        times = np.where(self.compresses(layers) & (n > 1.0), layers.count, 0.0)
        return CodecWork(*(np.asarray(each) * times for each in self._codec_work(layers, n)))

    def error(self, layers: LayerSizes, spread: Spread) -> Floats:
        """E|C(x) − x|² ÷ |x|² for each layer x compressed to C(x), (L,): a variance if unbiased, else the lost part."""
        return np.where(self.compresses(layers), self._error(layers, spread), 0.0)

    def state_bytes(self, layers: LayerSizes) -> Floats:
        """Bytes of state that the compressor keeps on each GPU between steps, (L,)."""
        return _times(np.where(self.compresses(layers), self._state_bytes(layers), 0.0), layers)

    # The methods below return a value for one compressed parameter of each row: (L,), or a number. n: replicas, (…, 1).

    def _sent_bytes(self, layers: LayerSizes, n: Floats) -> Floats:
        """For `sent_bytes`: by default, an all-reduce of the coded bytes."""
        return all_reduced(self.coded_bytes(layers), n)

    @abstractmethod
    def coded_bytes(self, layers: LayerSizes) -> Ints:
        """Size of one rank's gradient after encoding, in bytes."""

    @abstractmethod
    def _codec_work(self, layers: LayerSizes, n: Floats) -> tuple[ArrayLike, ArrayLike, ArrayLike]:
        """For `codec_work`: its fields, bytes touched, FLOPs and launches."""

    @abstractmethod
    def _error(self, layers: LayerSizes, spread: Spread) -> Floats | float:
        """For `error`."""

    def _state_bytes(self, layers: LayerSizes) -> Ints | float:
        """For `state_bytes`."""
        return 0.0


def _times(each: Floats, layers: LayerSizes) -> Floats:
    """Multiplies values of one parameter of each size, (…, L), by the number of parameters of that size."""
    return each * layers.count.astype(np.float64)
