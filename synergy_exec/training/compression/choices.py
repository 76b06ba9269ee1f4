"""Which compressor each layer gets, and how fast compressors encode and decode on this device."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch

from synergy_core.errors import InputError
from synergy_core.goodput.compression import compressors
from synergy_core.goodput.compression._compressor import Compressor, LayerSizes
from synergy_exec.training.compression.scheme import GradientLayer, Piece, Scheme
from synergy_exec.training.compression.schemes import kinds
from synergy_exec.training.compression.schemes.plain import Plain
from synergy_exec.training.compression.wire import LoneWire


def scheme_named(name: str) -> Scheme:
    """The scheme of a compressor's name. Raises InputError."""
    for kind in kinds():
        if (scheme := kind.named(name)) is not None:
            return scheme
    known = ", ".join(example for kind in kinds() for example in kind.EXAMPLES)
    raise InputError(f"there is no compressor '{name}'; write one like {known}.")


@dataclass(frozen=True, slots=True)
class SchemeByLayer:
    """Schemes by parameter. layers: (pattern of names, scheme), of which the first that fits counts; else `rest`."""

    rest: Scheme
    layers: tuple[tuple[str, Scheme], ...] = ()

    @classmethod
    def named(cls, text: str) -> SchemeByLayer:
        """As in `Plan.compressor`: `q4`, by layer `q4,token.weight=none,layers.*=q2`. Raises InputError."""
        rest, *layers = text.split(",")
        chosen = []
        for each in layers:
            pattern, equals, name = each.partition("=")
            if not (pattern and equals):
                raise InputError(f"compressor '{text}': '{each}' is no choice for a layer; write NAME=COMPRESSOR.")
            chosen.append((pattern, scheme_named(name)))
        return cls(scheme_named(rest), tuple(chosen))

    @property
    def schemes(self) -> list[Scheme]:
        """Every scheme that a layer may get."""
        return [self.rest, *(scheme for _, scheme in self.layers)]

    @property
    def nothing(self) -> bool:
        """Whether every layer is sent as it is."""
        return all(isinstance(scheme, Plain) for scheme in self.schemes)

    def of(self, layer: GradientLayer, replicas: int) -> Scheme:
        """What a layer gets: what was chosen, unless its scheme does not take it or it would send no fewer bytes."""
        found = (scheme for pattern, scheme in self.layers if fnmatchcase(layer.name, pattern))
        chosen = next(found, self.rest).of(layer)
        plain = Plain()
        saves = chosen.sent_bytes(layer, replicas) < plain.sent_bytes(layer, replicas)
        return chosen if saves and chosen.takes(layer) else plain


LARGE, SMALL = (1, 1024), (32, 48)
"""How many square layers, and of which side. Of the former, time goes by the byte, of the latter by the call."""
REPETITIONS = 7
"""Of which the fastest counts: what is taken for slower than it is is never tried, and so never found out."""
LEAST_PART = 0.1
"""Of a time, at least what is left of it when what another case explains is taken off."""


class _Case(NamedTuple):
    """What encoding and decoding of all its layers take by the core's formulas, and took."""

    touched_bytes: float
    flops: float
    launches: float
    seconds: float


def measured_codecs(device: torch.device) -> dict[str, list[float]]:
    """Fields of `CodecSpeed` by the core's schemes, those of all compressors that are offered where nobody names one.

    Of several of a scheme the first shows bytes and calls, the last, of which more is sent or computed, arithmetic.
    """
    by_scheme: dict[str, list[Compressor]] = {}
    for each in compressors():
        if each.name != "none":
            by_scheme.setdefault(each.scheme, []).append(each)
    return {scheme: _speed(alike[0], alike[-1], device) for scheme, alike in by_scheme.items()}


def _speed(first: Compressor, last: Compressor, device: torch.device) -> list[float]:
    calls, bytes_, flops = _case(first, *SMALL, device), _case(first, *LARGE, device), _case(last, *LARGE, device)
    # Two equations, seconds = bytes · s/byte + launches · s/launch, of two cases.
    apart = calls.launches * bytes_.touched_bytes - bytes_.launches * calls.touched_bytes
    by_call = calls.seconds * bytes_.touched_bytes - bytes_.seconds * calls.touched_bytes
    launch_s = max(by_call / apart, 0.0) if apart > 0 else 0.0  # else they go by the byte, too
    streaming_s = _without(bytes_, launch_s)
    computing_s = _without(flops, launch_s)
    # What computes nothing waits for no arithmetic, at whatever rate.
    return [bytes_.touched_bytes / streaming_s, (flops.flops or 1e9) / computing_s, launch_s]


def _without(case: _Case, launch_s: float) -> float:
    """Seconds less those of launches."""
    return max(case.seconds - case.launches * launch_s, LEAST_PART * case.seconds)


def _case(compressor: Compressor, count: int, side: int, device: torch.device) -> _Case:
    scheme, wire = scheme_named(compressor.name), LoneWire(device)
    layers = [GradientLayer(str(each), side, side) for each in range(count)]
    given = torch.randn(count, side * side, generator=torch.Generator().manual_seed(0)).to(device)
    pieces = [Piece(layer, scheme.of(layer), torch.empty_like(given[0])) for layer in layers]
    times = []
    for _ in range(REPETITIONS):
        for piece, gradient in zip(pieces, given, strict=True):
            piece.gradient.copy_(gradient)
        with wire.exchanging():
            type(scheme).exchange(pieces, wire, None)
        times.append(wire.codec_s())
    work = compressor.codec_work(LayerSizes.of_shapes([(side, side)] * count), wire.replicas)
    return _Case(
        float(work.touched_bytes.sum()),
        float(work.flops.sum()),
        float(work.launches.sum()),
        min(times),
    )
