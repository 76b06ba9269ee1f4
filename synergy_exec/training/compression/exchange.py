"""How the replicas of a run exchange gradients."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.distributed import GradBucket, ProcessGroup  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from synergy_core.goodput.compression._compressor import Compressor, Gradients, LayerSizes
from synergy_core.goodput.compression.powersgd import PowerSgd
from synergy_core.goodput.efficiency import GradientErrors, Offer
from synergy_core.planner.plan import Plan
from synergy_exec.training.compression.layers import PLAIN, CompressorByLayer, GradientLayer, HeldBack, Piece
from synergy_exec.training.compression.schemes import send
from synergy_exec.training.compression.wire import Sketch, Watch, Wire

FIRST_MEASURED, MEASURED_EVERY = 20, 10
"""So many steps of a run are measured from the first on, and then each whose number this divides."""


@dataclass(frozen=True, slots=True)
class Exchanged:
    """What one step's exchange showed on this rank.

    sent_bytes: that left it. codec_s: seconds of encoding and decoding. sync_s: seconds in which gradients were
    exchanged and nothing was computed. layers: of a measured step, by name, the squared norms of what a compressor was
    given and of what it left out, means over the replicas, in units of the gradient of the mean loss; empty of others.
    With error feedback what is given has what was held back in it.
    totals: five scalars, of which the sum over all ranks counts: squared norms given, left out, of sums, left out of
    sums, and of the mean gradient before compression; None of a step that was not measured.
    """

    sent_bytes: float
    codec_s: float
    sync_s: float
    layers: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    totals: Tensor | None = None


class Exchange:
    """Of the replicas in `group`, for the DDP module that trains the model. layers: by name, those that have a
    gradient. compressors: what each gets.

    DDP calls a hook once a bucket and step, in an order that changes after the first step; what is kept goes by layer.
    What is drawn follows from (seed, step, this rank's place in the group).
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
        self._exposed = Exposed(module, device)
        self._memories: dict[str, HeldBack] = {}
        self._hooked, self._steps = False, 0
        self._watch: Watch | None = None
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._plain_bytes = sum(each.sent_bytes(PLAIN, self._wire.replicas) for each in self.layers.values())
        self.retune(plan)

    @property
    def compresses(self) -> bool:
        """Whether any layer may be sent otherwise than as it is."""
        return not self._choices.is_plain

    @property
    def feedback(self) -> list[str]:
        """The names of layers whose compressor holds back."""
        return [name for name, compressor in self.compressors.items() if not compressor.unbiased]

    @property
    def in_words(self) -> str:
        """The compressor, and which layers it does not compress: vectors, small ones, those that would send no less."""
        plain = [name for name, compressor in self.compressors.items() if compressor == PLAIN]
        left = f"; as they are: {', '.join(plain)}" if plain else ""
        return f"compressor {self._name}: {len(self.layers) - len(plain)} of {len(self.layers)} layers{left}"

    def errors(self) -> GradientErrors:
        """What compression makes of the gradient, by the core's formulas."""
        layers = [each for each in self.layers.values() if each.numbers]
        used = list(dict.fromkeys(self.compressors.values()))
        sizes = LayerSizes.of_shapes([(each.rows, each.columns) for each in layers])
        choice = np.array([used.index(self.compressors[each.name]) for each in layers])
        return Offer("exchanged", sizes, Gradients(), tuple(used), choice).errors

    def retune(self, plan: Plan) -> None:
        """As the plan says from the next step on. What was held back goes on where the new compressor holds back."""
        self._name, self._choices = plan.compressor, CompressorByLayer.named(plan.compressor)
        before, replicas = self.compressors, self._wire.replicas
        self.compressors = {name: self._choices.of(layer, replicas) for name, layer in self.layers.items()}
        if self.compresses and not self._hooked:  # DDP's own exchange, in C++, is left alone as long as it will do
            self._module.register_comm_hook(None, _hook(self._exchange))
            self._hooked = True
        for name, memory in list(self._memories.items()):
            if self.compressors[name].unbiased:
                del self._memories[name]
            elif before[name] != self.compressors[name]:
                memory.start = None
        self._steps = 0

    def begin(self, number: int) -> None:
        """Before the backward passes of a step."""
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
            # Beside the backward pass, which computes the next bucket meanwhile; the future has DDP wait for it.
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

    def _pieces(self, bucket: GradBucket) -> Iterable[Piece]:
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            name = self._names[id(parameter)]
            compressor = self.compressors[name]
            memory = HeldBack() if compressor.unbiased else self._memories.setdefault(name, HeldBack())
            yield Piece(self.layers[name], compressor, gradient.view(-1), memory)

    def end(self) -> Exchanged:
        """After them; on measured steps all replicas talk once more, which is not counted."""
        sync_s = self._exposed.take()
        # What DDP exchanges by itself, as long as nothing was compressed, is not seen.
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
        second = torch.zeros(2, device=device)
        for given, error in watch.second:
            second += torch.stack([given, error])
        sketch = torch.zeros(0, device=device) if watch.sketch is None else watch.sketch.numbers
        values = torch.cat([layers, second, sketch])
        distributed.all_reduce(values, group=self._wire.group)
        # What was measured are replicas' shares of a mean.
        squares = replicas * values[: len(layers)].view(-1, 2)
        second, sketch = values[len(layers) : len(layers) + 2], values[len(layers) + 2 :]
        totals = torch.cat([squares.sum(0), second, sketch.square().sum()[None]])
        by_name = {name: (given, error) for name, (given, error) in zip(names, squares.tolist(), strict=True)}
        return by_name, totals / replicas

    def held(self) -> dict[str, Tensor]:
        """What a checkpoint keeps, by names that begin with a kind: `error.`, what the update still lacks of each
        layer, which is what all replicas hold back together; `start.`, PowerSGD's factors. All replicas call it.
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
        """Goes on from what was held, by however many replicas: each takes an equal part of it."""
        for name in self.feedback:
            memory = self._memories.setdefault(name, HeldBack())
            if (error := held.get(f"error.{name}")) is not None:
                memory.error = error.flatten().to(self._wire.device) / self._wire.replicas
            start = held.get(f"start.{name}")
            if start is not None and isinstance(self.compressors[name], PowerSgd):
                memory.start = start.to(self._wire.device)


def _hook(exchange: Callable[[GradBucket], Future[Tensor]]) -> Callable[[object, GradBucket], Future[Tensor]]:
    # DDP reads annotations, and takes those that are strings for wrong ones.
    return lambda _state, bucket: exchange(bucket)


class Exposed:
    """How long replicas exchange gradients while nothing is computed: from the last gradient until all are exchanged.

    What is exchanged before the last gradient is computed hides behind computing, but where it runs within the backward
    pass, as hooks on CPUs do: that time is to be added.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._last_s = 0.0
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if self._cuda else []  # type: ignore[no-untyped-call]
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_hook(self._note)  # type: ignore[no-untyped-call]

    def _note(self, _gradient: Tensor) -> None:
        if self._cuda:
            self._events[0].record()
        else:
            self._last_s = time.perf_counter()

    def take(self) -> float:
        """Seconds since the last gradient was computed; called when all are exchanged, and waits for the device."""
        if not self._cuda:
            return time.perf_counter() - self._last_s
        begin, end = self._events
        end.record()
        end.synchronize()
        elapsed_ms: float = begin.elapsed_time(end)
        return elapsed_ms / 1000


_RECENT_STEPS = 20


class Exchanges:
    """Collects what steps showed of their exchanges."""

    def __init__(self) -> None:
        self._sent_bytes = 0.0
        self._codec_s: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._layers: Mapping[str, tuple[float, float]] = {}

    def add(self, exchanged: Exchanged | None) -> None:
        """One step's; None without replicas."""
        if exchanged is not None:
            self._sent_bytes = exchanged.sent_bytes
            self._codec_s.append(exchanged.codec_s)
            self._layers = exchanged.layers or self._layers

    def take(self) -> dict[str, Any]:
        """Fields of a `Report`: bytes of the last step, median seconds of the last ones, layers since the last call."""
        layers, self._layers = self._layers, {}
        return {
            "sent_bytes": self._sent_bytes,
            "codec_s": statistics.median(self._codec_s) if self._codec_s else 0.0,
            "layers": {name: list(squares) for name, squares in layers.items()},
        }


def layers_of(parts: Iterable[nn.Module]) -> list[tuple[str, int, int]]:
    """Name, rows and columns of each parameter that is trained and has any numbers, as replicas exchange it."""
    every = (each for part in parts for each in part.named_parameters())
    layers = (GradientLayer.of_shape(name, each.shape, 4) for name, each in every if each.requires_grad)
    return [(each.name, each.rows, each.columns) for each in layers if each.numbers]
