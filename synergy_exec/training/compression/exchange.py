"""Exchange of gradients between the replicas of a run, compressed or not."""

from __future__ import annotations

import logging
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.distributed import GradBucket, ProcessGroup  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from synergy_core.performance.goodput.compression import compressors
from synergy_core.performance.goodput.compression._compressor import Compressor, Gradients, LayerSizes
from synergy_core.performance.goodput.compression.powersgd import PowerSgd
from synergy_core.performance.goodput.efficiency import GradientErrors, Offer
from synergy_core.performance.planner.plan import Plan
from synergy_exec.messages import ExchangeCost
from synergy_exec.training.compression.layers import PLAIN, CompressorByLayer, GradientLayer, GradientPiece, HeldBack
from synergy_exec.training.compression.schemes import send
from synergy_exec.training.compression.wire import Clock, LoneWire, Sketch, Watch, Wire

_log = logging.getLogger(__name__)

FIRST_MEASURED, MEASURED_EVERY = 20, 10
"""The first `FIRST_MEASURED` steps of a run are measured, and then every step whose number `MEASURED_EVERY` divides."""


@dataclass(frozen=True, slots=True)
class Exchanged:
    """Measurements of one step's exchange on this rank.

    sent_bytes: bytes that this rank sent. codec_s: seconds of encoding and decoding. sync_s: seconds in which gradients
    were exchanged and nothing was computed. layers: on a measured step, by layer, the squared norms of the compressor's
    input (with error feedback: gradient plus held-back error) and of its error. They are means over the replicas, in
    units of the gradient of the mean loss; empty on other steps. totals: on a measured step, five squared norms to be
    summed over all ranks: of the compressors' inputs, of the errors of these, of sums that are compressed again, of the
    errors of these, and of the mean gradient before compression; else None.
    """

    sent_bytes: float
    codec_s: float
    sync_s: float
    layers: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    totals: Tensor | None = None


class Exchange:
    """Exchanges the gradients of a DDP module between the replicas in `group`.

    layers: the layers with a gradient, by name. compressors: the compressor of each. DDP calls a hook once per bucket
    and step, in an order that changes after the first step, so error feedback is kept by layer. Random numbers depend
    on (seed, step, this rank's place in the group).
    """

    def __init__(
        self, module: DistributedDataParallel, plan: Plan, group: ProcessGroup, device: torch.device, seed: int
    ) -> None:
        named = [(name, each) for name, each in module.module.named_parameters() if each.requires_grad]
        self.layers = {name: GradientLayer.of_shape(name, each.shape, each.element_size()) for name, each in named}
        self.compressors: dict[str, Compressor] = {}
        self._names = {id(each): name for name, each in named}
        self._module, self._seed = module, seed
        self._wire = Wire(group, device)
        # Runs from the last computed gradient until all are exchanged, while nothing is computed. Earlier exchanges
        # overlap with computing, except hooks on CPUs, which run within the backward pass.
        self._exposed = exposed = Clock(device)
        for _, each in named:
            each.register_hook(lambda _: exposed.begin())
        self._memories: dict[str, HeldBack] = {}
        self._hooked, self._steps = False, 0
        self._watch: Watch | None = None
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._plain_bytes = sum(each.sent_bytes(PLAIN, self._wire.replicas) for each in self.layers.values())
        self.retune(plan)

    @property
    def compresses(self) -> bool:
        """Whether any layer may be compressed."""
        return not self._choices.is_plain

    @property
    def feedback(self) -> list[str]:
        """Names of the layers whose compressor uses error feedback."""
        return [name for name, compressor in self.compressors.items() if not compressor.unbiased]

    @property
    def in_words(self) -> str:
        """The compressor, and the layers that it does not compress because that would not make them smaller."""
        plain = [name for name, compressor in self.compressors.items() if compressor == PLAIN]
        left = f"; as they are: {', '.join(plain)}" if plain else ""
        return f"compressor {self._name}: {len(self.layers) - len(plain)} of {len(self.layers)} layers{left}"

    def errors(self) -> GradientErrors:
        """Compression errors of the gradient by the core's formulas."""
        layers = [each for each in self.layers.values() if each.numbers]
        used = list(dict.fromkeys(self.compressors.values()))
        sizes = LayerSizes.of_shapes([(each.rows, each.columns) for each in layers])
        choice = np.array([used.index(self.compressors[each.name]) for each in layers])
        return Offer("exchanged", sizes, Gradients(), tuple(used), choice).errors

    def retune(self, plan: Plan) -> None:
        """Uses the plan's compressor from the next step on. Error feedback is kept if the new compressor uses it."""
        self._name, self._choices = plan.compressor, CompressorByLayer.named(plan.compressor)
        before, replicas = self.compressors, self._wire.replicas
        self.compressors = {name: self._choices.of(layer, replicas) for name, layer in self.layers.items()}
        if self.compresses and not self._hooked:  # without compression DDP's own exchange, in C++, is used
            # DDP checks a hook's annotations and refuses those that are strings.
            self._module.register_comm_hook(None, lambda _state, bucket: self._exchange(bucket))
            self._hooked = True
        for name, memory in list(self._memories.items()):
            if self.compressors[name].unbiased:
                del self._memories[name]
            elif before[name] != self.compressors[name]:
                memory.start = None
        self._steps = 0

    def begin(self, number: int) -> None:
        """Call before the backward passes of a step."""
        self._wire.sent_bytes = 0.0
        self._wire.generator.manual_seed(hash((self._seed, number, self._wire.group.rank(), 1)))
        measured = self.compresses and (self._steps < FIRST_MEASURED or number % MEASURED_EVERY == 0)
        self._steps += 1
        self._watch = None
        if measured:
            signs = torch.Generator(self._wire.device).manual_seed(hash((self._seed, number, 2)))
            self._watch = Watch(Sketch(signs, self._wire.device) if self.feedback else None)

    def _exchange(self, bucket: GradBucket) -> Future[Tensor]:
        buffer = bucket.buffer()
        if self._side is not None:
            # The exchange runs while the backward pass computes the next bucket; DDP waits for the future.
            self._side.wait_stream(torch.cuda.current_stream(self._wire.device))
        with torch.cuda.stream(self._side):  # None changes nothing
            with self._wire.exchanging():
                buffer.div_(self._wire.replicas)
                if self._watch is not None and self._watch.sketch is not None:
                    self._watch.sketch.add(buffer)
                send(list(self._pieces(bucket)), self._wire, self._watch)
            future: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
            future.set_result(buffer)
        return future

    def _pieces(self, bucket: GradBucket) -> Iterable[GradientPiece]:
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            name = self._names[id(parameter)]
            compressor = self.compressors[name]
            memory = HeldBack() if compressor.unbiased else self._memories.setdefault(name, HeldBack())
            yield GradientPiece(self.layers[name], compressor, gradient.view(-1), memory)

    def end(self) -> Exchanged:
        """Call after the backward passes. On measured steps replicas communicate once more, which is not counted."""
        self._exposed.end()
        sync_s = self._exposed.take()
        # DDP's own exchange, used while nothing is compressed, is not counted by the wire.
        sent_bytes = self._wire.sent_bytes or self._plain_bytes
        whole_s, codec_s = self._wire.times_s()
        if self._wire.device.type == "cpu":
            sync_s = max(sync_s, whole_s)  # hooks run within the backward pass there
        if self._watch is None:
            return Exchanged(sent_bytes, codec_s, sync_s)
        return Exchanged(sent_bytes, codec_s, sync_s, *self._seen(self._watch))

    def _seen(self, watch: Watch) -> tuple[dict[str, tuple[float, float]], Tensor]:
        names, device, replicas = list(watch.layers), self._wire.device, self._wire.replicas
        layers = torch.cat([torch.stack(pair) for pair in watch.layers.values()])
        second = torch.zeros(2, dtype=torch.float32, device=device)
        for given, error in watch.second:
            second += torch.stack([given, error])
        sketch = torch.zeros(0, dtype=torch.float32, device=device) if watch.sketch is None else watch.sketch.numbers
        values = torch.cat([layers, second, sketch])
        distributed.all_reduce(values, group=self._wire.group)
        # Each replica measured its share of the mean.
        squares = replicas * values[: len(layers)].view(-1, 2)
        second, sketch = values[len(layers) : len(layers) + 2], values[len(layers) + 2 :]
        totals = torch.cat([squares.sum(0), second, sketch.square().sum()[None]])
        by_name = {name: (given, error) for name, (given, error) in zip(names, squares.tolist(), strict=True)}
        return by_name, totals / replicas

    def held(self) -> dict[str, Tensor]:
        """The state that a checkpoint keeps; all replicas call it together.

        Names begin with a kind: `error.` for the sum of the errors that the replicas hold back of a layer, `start.` for
        PowerSGD's factors.
        """
        found: dict[str, Tensor] = {}
        for name in sorted(self._memories):
            memory, layer = self._memories[name], self.layers[name]
            if memory.error is not None:
                whole = memory.error.clone()
                distributed.all_reduce(whole, group=self._wire.group)
                found[f"error.{name}"] = whole.view(layer.rows, layer.columns)
            if memory.start is not None:
                found[f"start.{name}"] = memory.start.clone()
        return found

    def hold(self, held: Mapping[str, Tensor]) -> None:
        """Restores the state of `held`. Each replica takes an equal part of it, whatever the number of replicas was."""
        for name in self.feedback:
            memory = self._memories.setdefault(name, HeldBack())
            if (error := held.get(f"error.{name}")) is not None:
                memory.error = error.flatten().to(self._wire.device) / self._wire.replicas
            start = held.get(f"start.{name}")
            if start is not None and isinstance(self.compressors[name], PowerSgd):
                memory.start = start.to(self._wire.device)


_RECENT_STEPS = 20


class Exchanges:
    """Collects the measurements of exchanges over steps."""

    def __init__(self) -> None:
        self._sent_bytes = 0.0
        self._codec_s: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._layers: Mapping[str, tuple[float, float]] = {}

    def add(self, exchanged: Exchanged | None) -> None:
        """Adds one step's measurements; None without replicas."""
        if exchanged is not None:
            self._sent_bytes = exchanged.sent_bytes
            self._codec_s.append(exchanged.codec_s)
            self._layers = exchanged.layers or self._layers

    def take(self) -> ExchangeCost:
        """The cost of recent steps for a report, and the errors of layers since the last call."""
        layers, self._layers = self._layers, {}
        return ExchangeCost(
            sent_bytes=self._sent_bytes,
            codec_s=statistics.median(self._codec_s) if self._codec_s else 0.0,
            layers={name: list(squares) for name, squares in layers.items()},
        )


def sparse_layer(model: nn.Module) -> str:
    """Name of the first layer with sparse gradients, which no compressor takes; "" if there is none."""
    for name, each in model.named_modules():
        if isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.sparse:
            return name or type(each).__name__
    return ""


def layers_of(parts: Sequence[nn.Module]) -> list[tuple[str, int, int]]:
    """Name, rows and columns of every trained, non-empty parameter, as replicas exchange it.

    Empty for a model with sparse gradients, so that the controller never chooses a compressor for it.
    """
    if name := next(filter(None, map(sparse_layer, parts)), ""):
        _log.warning("%s has sparse gradients, so nothing is compressed", name)
        return []
    every = (each for part in parts for each in part.named_parameters())
    layers = (GradientLayer.of_shape(name, each.shape, 4) for name, each in every if each.requires_grad)
    return [(each.name, each.rows, each.columns) for each in layers if each.numbers]


# How fast compressors encode and decode on this device.


LARGE, SMALL = (1, 1024), (32, 48)
"""Number of square layers, and their side. Large layers take time for their bytes, small ones for their calls."""
REPETITIONS = 7
"""The fastest repetition counts. A compressor measured too slow would never be tried, and so never be corrected."""
LEAST_PART = 0.1
"""Minimum fraction of a measured time that remains when the time of launches is subtracted from it."""


class _CodecMeasurement(NamedTuple):
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


def _without(case: _CodecMeasurement, launch_s: float) -> float:
    """The seconds of a case without its launches."""
    return max(case.seconds - case.launches * launch_s, LEAST_PART * case.seconds)


def _case(compressor: Compressor, count: int, side: int, device: torch.device) -> _CodecMeasurement:
    wire = LoneWire(device)
    layers = [GradientLayer(str(each), side, side) for each in range(count)]
    given = torch.randn(count, side * side, generator=torch.Generator().manual_seed(0)).to(device)
    pieces = [GradientPiece(layer, compressor, torch.empty_like(given[0])) for layer in layers]
    times = []
    for _ in range(REPETITIONS):
        for piece, gradient in zip(pieces, given, strict=True):
            piece.gradient.copy_(gradient)
        with wire.exchanging():
            send(pieces, wire, None)
        times.append(wire.times_s()[1])
    work = compressor.codec_work(LayerSizes.of_shapes([(side, side)] * count), wire.replicas)
    touched_bytes, flops, launches = (float(each.sum()) for each in (work.touched_bytes, work.flops, work.launches))
    return _CodecMeasurement(touched_bytes, flops, launches, min(times))
