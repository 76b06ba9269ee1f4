"""Measures how fast compressors encode and decode on this device."""

from __future__ import annotations

from typing import NamedTuple

import torch

from synergy_core.goodput.compression import compressors
from synergy_core.goodput.compression._compressor import Compressor, LayerSizes
from synergy_exec.training.compression.layers import GradientLayer, Piece
from synergy_exec.training.compression.schemes import send
from synergy_exec.training.compression.wire import LoneWire

LARGE, SMALL = (1, 1024), (32, 48)
"""Number of square layers, and their side. Large layers take time for their bytes, small ones for their calls."""
REPETITIONS = 7
"""The fastest repetition counts. A compressor measured too slow would never be tried, and so never be corrected."""
LEAST_PART = 0.1
"""Minimum fraction of a measured time that remains when the time of launches is subtracted from it."""


class _Case(NamedTuple):
    """One measurement: seconds to code all layers; bytes, operations and launches follow from the core's formulas."""

    touched_bytes: float
    flops: float
    launches: float
    seconds: float


def measured_codecs(device: torch.device) -> dict[str, list[float]]:
    """Measures the fields of `CodecSpeed` for every scheme that the core offers by default.

    If a scheme has several compressors, the first gives the cost of bytes and calls, and the last, which sends or
    computes more, the cost of arithmetic.
    """
    by_scheme: dict[str, list[Compressor]] = {}
    for each in compressors():
        if each.name != "none":
            by_scheme.setdefault(each.scheme, []).append(each)
    return {scheme: _speed(alike[0], alike[-1], device) for scheme, alike in by_scheme.items()}


def _speed(first: Compressor, last: Compressor, device: torch.device) -> list[float]:
    calls, bytes_, flops = _case(first, *SMALL, device), _case(first, *LARGE, device), _case(last, *LARGE, device)
    # Solve seconds = bytes · s/byte + launches · s/launch for the two unknowns, with one equation for each case.
    apart = calls.launches * bytes_.touched_bytes - bytes_.launches * calls.touched_bytes
    by_call = calls.seconds * bytes_.touched_bytes - bytes_.seconds * calls.touched_bytes
    launch_s = max(by_call / apart, 0.0) if apart > 0 else 0.0  # otherwise all time counts by the byte
    streaming_s = _without(bytes_, launch_s)
    computing_s = _without(flops, launch_s)
    # The rate of a scheme without arithmetic does not matter.
    return [bytes_.touched_bytes / streaming_s, (flops.flops or 1e9) / computing_s, launch_s]


def _without(case: _Case, launch_s: float) -> float:
    """The seconds of a case without its launches."""
    return max(case.seconds - case.launches * launch_s, LEAST_PART * case.seconds)


def _case(compressor: Compressor, count: int, side: int, device: torch.device) -> _Case:
    wire = LoneWire(device)
    layers = [GradientLayer(str(each), side, side) for each in range(count)]
    given = torch.randn(count, side * side, generator=torch.Generator().manual_seed(0)).to(device)
    pieces = [Piece(layer, compressor, torch.empty_like(given[0])) for layer in layers]
    times = []
    for _ in range(REPETITIONS):
        for piece, gradient in zip(pieces, given, strict=True):
            piece.gradient.copy_(gradient)
        with wire.exchanging():
            send(pieces, wire, None)
        times.append(wire.times_s()[1])
    work = compressor.codec_work(LayerSizes.of_shapes([(side, side)] * count), wire.replicas)
    touched_bytes, flops, launches = (float(each.sum()) for each in (work.touched_bytes, work.flops, work.launches))
    return _Case(touched_bytes, flops, launches, min(times))
