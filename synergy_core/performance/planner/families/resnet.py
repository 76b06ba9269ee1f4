"""Residual networks of bottlenecks: ResNet-50 and deeper, Wide-ResNets.

He et al. (arXiv 1512.03385, table 1), with the stride on the 3 × 3 convolution as in current implementations. A
convolution is timed as the matrix product pixels × output channels × (input channels · kernel area), without a copy of
the input. Tensor cores read channels last: if images are stored with channels first, cuDNN transposes the input and the
output of each convolution (NVIDIA, cuDNN Developer Guide: NCHW-to-NHWC transformations).

Tensor parallelism splits channels, as Alpa does (arXiv 2201.12023, section 8.1): the first and second convolution of a
bottleneck by output channels, gathering the output of the first; the third by input channels, reducing its output.
Batch normalisation computes its statistics per GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from synergy_core.errors import InputError
from synergy_core.performance.planner.machine import Software
from synergy_core.performance.planner.plan import Plans
from synergy_core.performance.planner.work import Amount, Block, Gemm, Layers, Limits, SavedActivations, Work, at_least

Number = NDArray[np.int64] | int

STAGES = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
"""Bottlenecks of each stage, by depth."""
_EXPANSION = 4
_NORM_PASSES = 3.0
"""Passes over memory of batch normalisation with ReLU: a read for the statistics, a second read, and a write."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """Sizes of a residual network.

    depth: 50, 101 or 152. channels: in the first stage; each further stage has twice as many channels and a quarter of
    the pixels. width_factor: widens the 3 × 3 convolutions; widen_first: whether it also widens the preceding 1 × 1
    convolutions. image_size: pixels per side.
    """

    depth: Number
    channels: Number = 64
    width_factor: Number = 1
    widen_first: NDArray[np.bool_] | bool = False
    classes: Number = 1000
    image_size: Number = 224

    def bottlenecks(self, stage: int) -> NDArray[np.int64]:
        """Number of bottlenecks in a stage, counted from 0. Raises InputError for an unknown depth."""
        depths = np.asarray(self.depth)
        if unknown := set(np.unique(depths).tolist()) - set(STAGES):
            raise InputError(f"a ResNet of depth {min(unknown)}; expected one of {', '.join(map(str, STAGES))}.")
        result: NDArray[np.int64] = np.vectorize(lambda each: STAGES[int(each)][stage], otypes=[np.int64])(depths)
        return result

    def limits(self) -> Limits:
        """Limits by the number of bottlenecks and the channels of the narrowest layer."""
        return Limits(layers=sum(int(self.bottlenecks(stage)) for stage in range(4)), heads=int(self.channels))

    def check(self) -> None:
        self.bottlenecks(0)
        at_least(1, channels=self.channels, width_factor=self.width_factor, classes=self.classes)
        at_least(32, image_size=self.image_size)

    def parameters(self) -> Amount:
        one = np.asarray(1.0)
        total: Amount = _stem_parameters(self) + _head_parameters(self)
        for stage in range(4):
            for first in (True, False):
                count = 1.0 if first else self.bottlenecks(stage) - 1.0
                total = total + count * _Bottleneck(self, stage, first).parameters(one)
        return total


class _Bottleneck:
    """Channels and pixels (of one image) of one bottleneck."""

    def __init__(self, a: Architecture, stage: int, first: bool) -> None:
        base = np.asarray(a.channels, float) * 2**stage
        self.output = base * _EXPANSION
        self.input = (np.asarray(a.channels, float) if stage == 0 else self.output / 2) if first else self.output
        self.middle = base * a.width_factor
        self.first = np.where(a.widen_first, self.middle, base)
        side = np.ceil(np.asarray(a.image_size) / 4 / 2**stage)
        entered = np.ceil(np.asarray(a.image_size) / 4 / 2 ** (stage - 1)) if first and stage else side
        self.pixels, self.pixels_in = side**2, entered**2
        self.projected = first

    def parameters(self, t: Amount) -> Amount:
        """Parameters on one of t tensor-parallel ranks: convolutions, and scale and shift of each normalisation."""
        convolutions = self.input * self.first + 9.0 * self.first * self.middle + self.middle * self.output
        norms = 2.0 * (self.first + self.middle) / t + 2.0 * self.output
        if self.projected:
            convolutions = convolutions + self.input * self.output
            norms = norms + 2.0 * self.output
        result: Amount = convolutions / t + norms
        return result


def work(architecture: Architecture, plans: Plans, software: Software) -> Work:
    """Operators of one micro-batch of images on one GPU. Raises InputError for context or expert parallelism."""
    a = architecture
    if np.any(plans.context > 1) or np.any(plans.expert > 1):
        raise InputError("a ResNet has neither a sequence nor experts; expected context = expert = 1.")
    size = software.element_bytes
    transposes = 0.0 if software.channels_last or software.precision == "fp32" else 2.0
    runs = []
    for stage in range(4):
        for first in (True, False):
            count = np.asarray(1.0) if first else np.asarray(a.bottlenecks(stage) - 1.0)
            runs.append(Layers(_bottleneck(_Bottleneck(a, stage, first), plans, size, stage, transposes), count))
    return Work(_stem(a, plans, size, transposes), tuple(runs), _head(a, plans, size))


def _bottleneck(d: _Bottleneck, plans: Plans, size: float, stage: int, transposes: float) -> Block:
    """The block of three convolutions with norms, the projection of the input if shapes differ, and the sum.

    transposes: number of memory passes that change the layout of each convolution's input and output. The block's input
    and the outputs of all convolutions and ReLUs are kept for the backward pass.
    """
    t, images = plans.tensor.astype(float), plans.micro_batch.astype(float)
    entered, left = images * d.pixels_in, images * d.pixels
    inside = entered * d.first + left * d.middle
    normalised = left * d.output * (2.0 if d.projected else 1.0)
    gemms = [
        Gemm(entered, d.first / t, d.input),
        Gemm(left, d.middle / t, 9.0 * d.first),
        Gemm(left, d.output, d.middle / t),
    ]
    if d.projected:
        gemms.append(Gemm(left, d.output, d.input / t))
    boundary = size * left * d.output
    whole = entered * d.input * (2.0 if d.projected else 1.0) + normalised
    saved = size * (entered * d.input + 2.0 * inside / t + normalised)
    return Block(
        name=f"stage {stage + 1}, {'first' if d.projected else 'other'} bottleneck",
        gemms=tuple(gemms),
        replicated_bytes=size * (_NORM_PASSES * normalised + left * d.output + transposes * whole),
        split_bytes=size * (_NORM_PASSES + 2.0 * transposes) * inside / t,
        kernels=9.0 if d.projected else 7.0,
        tensor_bytes=boundary,
        tensor_count=1.0 + 0.5 * entered * d.first / (left * d.output),
        parameters=d.parameters(t),
        boundary_bytes=boundary,
        saved=SavedActivations(saved, full_bytes=size * entered * d.input),
        live_bytes=saved + 2.0 * boundary + size * inside / t,
    )


def _stem_parameters(a: Architecture) -> Amount:
    return np.asarray(a.channels, float) * (3 * 49 + 2)


def _stem(a: Architecture, plans: Plans, size: float, transposes: float) -> Block:
    """A 7 × 7 convolution to half resolution, norm, pooling to a quarter; each tensor-parallel rank repeats them."""
    channels, images = np.asarray(a.channels, float), plans.micro_batch.astype(float)
    half, quarter = (images * np.ceil(np.asarray(a.image_size) / each) ** 2 for each in (2, 4))
    saved = size * (images * np.asarray(a.image_size, float) ** 2 * 3 + 2.0 * half * channels)
    return Block(
        name="stem",
        gemms=(Gemm(half, channels, 3 * 49.0),),
        replicated_bytes=size * ((_NORM_PASSES + 1.0 + transposes) * half + quarter) * channels,
        kernels=3.0,
        parameters=_stem_parameters(a),
        boundary_bytes=size * quarter * channels,
        saved=SavedActivations(saved),
        live_bytes=saved + size * half * channels,
    )


def _head_parameters(a: Architecture) -> Amount:
    result: Amount = (np.asarray(a.channels, float) * 8 * _EXPANSION + 1.0) * np.asarray(a.classes)
    return result


def _head(a: Architecture, plans: Plans, size: float) -> Block:
    """The mean over pixels, the product with the classes, and the loss; every tensor-parallel rank repeats them."""
    channels, images = np.asarray(a.channels, float) * 8 * _EXPANSION, plans.micro_batch.astype(float)
    entered = images * channels * np.ceil(np.asarray(a.image_size) / 32) ** 2
    saved = size * (entered + images * channels) + 4.0 * images * np.asarray(a.classes)
    return Block(
        name="head",
        gemms=(Gemm(images, np.asarray(a.classes, float), channels),),
        replicated_bytes=size * entered,
        kernels=4.0,
        parameters=_head_parameters(a),
        saved=SavedActivations(saved),
        live_bytes=saved + size * entered,
    )
