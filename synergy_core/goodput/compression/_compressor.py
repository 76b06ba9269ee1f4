"""What every scheme of compression answers, and what all of them share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import ArrayLike

from synergy_core.arrays import Bools, Floats
from synergy_core.goodput.compression._gradients import NUMBER_BYTES, LayerSizes, Spread

SMALL = 1_024
"""Layers of fewer numbers are sent as they are: kernels would take longer than their bytes."""
LAUNCH_S = 6e-6
"""From one kernel of eager PyTorch to the next; 4 to 10 µs by host. Assumed until codec times are measured."""
STREAMED = 0.8
"""Of the data sheet's memory bandwidth, what streaming kernels reach; assumed until codec times are measured."""


def all_reduced(carried_bytes: ArrayLike, replicas: ArrayLike) -> Floats:
    """Bytes that leave each rank when a ring adds up `carried_bytes` over `replicas`: 2 (N − 1)/N of them.

    Half of it is the scatter, half the gather; also where both are called apart.
    """
    n = np.asarray(replicas, dtype=np.float64)
    result: Floats = 2.0 * (n - 1.0) / n * np.asarray(carried_bytes, dtype=np.float64)
    return result


def all_gathered(own_bytes: ArrayLike, replicas: ArrayLike) -> Floats:
    """Bytes that leave each rank when everyone gets everyone's `own_bytes`: N − 1 times."""
    n = np.asarray(replicas, dtype=np.float64)
    result: Floats = (n - 1.0) * np.asarray(own_bytes, dtype=np.float64)
    return result


@dataclass(frozen=True, eq=False)
class CodecWork:
    """What encoding and decoding take on one GPU in a step; arrays of one shape, by layer.

    touched_bytes: read and written in its memory. flops: of matrix products in fp32. launches: kernels started.
    """

    touched_bytes: Floats
    flops: Floats
    launches: Floats


class Gpu(Protocol):
    """What is read of a GPU's data sheet."""

    @property
    def memory_bandwidth_bytes_per_s(self) -> float: ...
    @property
    def fp32_flops_per_s(self) -> float: ...


@dataclass(frozen=True, slots=True)
class CodecSpeed:
    """How fast one GPU encodes and decodes: bytes of its memory and flops in a second, and seconds from one kernel to
    the next; all above 0.
    """

    touched_bytes_per_s: float
    flops_per_s: float
    launch_s: float


def speed_by_sheet(gpu: Gpu) -> CodecSpeed:
    """As the data sheet promises, less what streaming kernels do not reach of it."""
    return CodecSpeed(STREAMED * gpu.memory_bandwidth_bytes_per_s, gpu.fp32_flops_per_s, LAUNCH_S)


def codec_s(work: CodecWork, speed: CodecSpeed) -> Floats:
    """Seconds by layer: the slower of memory and arithmetic (a roofline), and the kernels' launches."""
    memory = work.touched_bytes / speed.touched_bytes_per_s
    result: Floats = np.maximum(memory, work.flops / speed.flops_per_s) + speed.launch_s * work.launches
    return result


class Compressor(ABC):
    """A way to exchange gradients. Equal names, equal compressors.

    unbiased: whether what comes out is right on average; else it keeps back what it did not send and adds it to the
    next gradient (error feedback). rounds_sum: whether the sum is compressed again. collectives: one after another, in
    place of an all-reduce; the one that carries what is not compressed is among them.

    Arguments `replicas` are numbers or arrays; answers have their shape, and (L,) behind it.
    """

    unbiased: ClassVar[bool]
    rounds_sum: ClassVar[bool] = False
    collectives: ClassVar[int]

    @property
    @abstractmethod
    def name(self) -> str:
        """What `compressor_named` finds it by."""

    @property
    def scheme(self) -> str:
        """What compressors of one scheme have in common: the name of the file that it stands in."""
        return type(self).__module__.rpartition(".")[2]

    def alike(self) -> tuple[Compressor, ...]:
        """What a layer may have in its place where layers choose: of its scheme, from half to twice as much."""
        return (self,)

    def compresses(self, layers: LayerSizes) -> Bools:
        """Which layers it compresses, (L,); the others, small ones and vectors, are sent as they are."""
        result: Bools = (layers.columns > 1) & (layers.numbers >= SMALL)
        return result

    def sent_bytes(self, layers: LayerSizes, replicas: ArrayLike) -> Floats:
        """Bytes that leave each rank in a step, as a mean over ranks."""
        n = np.asarray(replicas, dtype=np.float64)[..., None]
        as_they_are = all_reduced(NUMBER_BYTES * layers.numbers, n)
        each = np.where(self.compresses(layers), self._sent_bytes(layers, n), as_they_are)
        return _times(each, layers)

    def codec_work(self, layers: LayerSizes, replicas: ArrayLike) -> CodecWork:
        """On each GPU in a step; nothing where there is one replica."""
        n = np.asarray(replicas, dtype=np.float64)[..., None]
        work = self._codec_work(layers, n)
        times = np.where(self.compresses(layers) & (n > 1.0), layers.count, 0.0)
        return CodecWork(work.touched_bytes * times, work.flops * times, work.launches * times)

    def error(self, layers: LayerSizes, spread: Spread) -> Floats:
        """E|C(x) − x|² ÷ |x|² of each layer x, (L,): a variance where unbiased, else the part of |x|² that is lost."""
        result: Floats = np.where(self.compresses(layers), self._error(layers, spread), 0.0)
        return result

    def whole_error(self, layers: LayerSizes, spread: Spread) -> float:
        """The same of the whole gradient: squared errors add up."""
        return float(spread.shares(layers) @ self.error(layers, spread))

    def state_bytes(self, layers: LayerSizes) -> Floats:
        """What it keeps on each GPU from step to step, (L,)."""
        return _times(np.where(self.compresses(layers), self._state_bytes(layers), 0.0), layers)

    @abstractmethod
    def _sent_bytes(self, layers: LayerSizes, n: Floats) -> Floats:
        """`sent_bytes` of one compressed parameter of each row; n: replicas, (…, 1)."""

    @abstractmethod
    def _codec_work(self, layers: LayerSizes, n: Floats) -> CodecWork:
        """`codec_work` of one compressed parameter of each row."""

    @abstractmethod
    def _error(self, layers: LayerSizes, spread: Spread) -> Floats:
        """`error` of layers that are compressed."""

    def _state_bytes(self, layers: LayerSizes) -> Floats:
        """`state_bytes` of one compressed parameter of each row."""
        return np.zeros(layers.rows.shape)


def _times(each: Floats, layers: LayerSizes) -> Floats:
    """What holds of one parameter of each row, (…, L), for all of them."""
    result: Floats = each * layers.count.astype(np.float64)
    return result
