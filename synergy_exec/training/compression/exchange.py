"""How the replicas of a run exchange gradients, over all parts of the model that a rank has."""

from __future__ import annotations

import dataclasses
import logging
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.distributed import GradBucket, ProcessGroup, ReduceOp  # type: ignore[attr-defined]
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from synergy_core.goodput.compression._compressor import Compressor, Gradients, LayerSizes
from synergy_core.goodput.compression.powersgd import PowerSgd
from synergy_core.goodput.efficiency import GradientErrors, Offer
from synergy_core.planner.plan import Plan
from synergy_exec.training.compression.layers import PLAIN, CompressorByLayer, GradientLayer, HeldBack, Piece
from synergy_exec.training.compression.schemes import send, share_out
from synergy_exec.training.compression.wire import Sketch, Watch, Wire

_log = logging.getLogger(__name__)


class LayerExchange:
    """Of one model part. layers: by name, those that have a gradient, as this rank exchanges them. compressors: what
    each gets. watch: set on steps that are measured.
    """

    def __init__(self, wire: Wire) -> None:
        self.layers: dict[str, GradientLayer] = {}
        self.compressors: dict[str, Compressor] = {}
        self.watch: Watch | None = None
        self._wire = wire

    def choose(self, choices: CompressorByLayer) -> None:
        """From the next step on."""
        self.compressors = {name: choices.of(layer, self._wire.replicas) for name, layer in self.layers.items()}


class ReplicaExchange(LayerExchange):
    """Of a part under DDP, which calls a hook once a bucket and step, in an order that changes after the first step;
    what is kept goes by layer. memories: of the layers that keep any.
    """

    def __init__(self, module: DistributedDataParallel, wire: Wire) -> None:
        super().__init__(wire)
        named = [(name, each) for name, each in module.module.named_parameters() if each.requires_grad]
        self.layers = {name: GradientLayer.of_shape(name, each.shape, each.element_size()) for name, each in named}
        self.memories: dict[str, HeldBack] = {}
        self._names = {id(each): name for name, each in named}
        self._module = module
        self._hooked = False
        cuda = wire.device.type == "cuda"
        self._side = torch.cuda.Stream(wire.device) if cuda else None  # type: ignore[no-untyped-call]

    def choose(self, choices: CompressorByLayer) -> None:
        """From the next step on; what was held back goes on where another compressor holds back too."""
        before = self.compressors
        super().choose(choices)
        if not (choices.nothing or self._hooked):  # DDP's own exchange, in C++, is left alone as long as it will do
            self._module.register_comm_hook(None, _hook(self._exchange))
            self._hooked = True
        for name, memory in list(self.memories.items()):
            if self.compressors[name].unbiased:
                del self.memories[name]
            elif before[name] != self.compressors[name]:
                memory.start = None

    @property
    def feedback(self) -> list[str]:
        """The names of layers whose compressor holds back."""
        return [name for name, compressor in self.compressors.items() if not compressor.unbiased]

    def _exchange(self, bucket: GradBucket) -> Future[Tensor]:
        buffer = bucket.buffer()
        if self._side is not None:
            # Beside the backward pass, which computes the next bucket meanwhile; the future has DDP wait for it.
            self._side.wait_stream(torch.cuda.current_stream(self._wire.device))
        with torch.cuda.stream(self._side):  # None changes nothing
            with self._wire.exchanging():
                buffer.div_(self._wire.replicas)
                if self.watch is not None and self.watch.sketch is not None:
                    self.watch.sketch.add(buffer)
                send(list(self._pieces(bucket)), self._wire, self.watch)
            future: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
            future.set_result(buffer)
        return future

    def _pieces(self, bucket: GradBucket) -> Iterable[Piece]:
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            name = self._names[id(parameter)]
            compressor = self.compressors[name]
            memory = HeldBack() if compressor.unbiased else self.memories.setdefault(name, HeldBack())
            yield Piece(self.layers[name], compressor, gradient.view(-1), memory)


def _hook(exchange: Callable[[GradBucket], Future[Tensor]]) -> Callable[[object, GradBucket], Future[Tensor]]:
    # DDP reads annotations, and takes those that are strings for wrong ones.
    return lambda _state, bucket: exchange(bucket)


class ShardExchange(LayerExchange):
    """Of a part under FSDP2, of which every replica gets its shard of the gradients, module by module. It stands in
    for FSDP2's reduce-scatter.
    """

    def __init__(self, part: nn.Module, wire: Wire, tensor: int) -> None:
        super().__init__(wire)
        names = {id(each): name for name, each in part.named_parameters()}
        for module in part.modules():
            if isinstance(module, FSDPModule):
                self._take(module, names, tensor)

    def _take(self, module: FSDPModule, names: dict[int, str], tensor: int) -> None:
        state: Any = module._get_fsdp_state()
        for group in state._fsdp_param_groups:
            sizes = {}
            for each in group.fsdp_params:
                if each.sharded_param.requires_grad:
                    name, number_bytes = names[id(each.sharded_param)], each.sharded_param.element_size()
                    weight = 1.0 if each.is_dtensor else 1 / tensor
                    self.layers[name] = GradientLayer.of_shape(name, each._orig_size, number_bytes, weight)
                    sizes[name] = each.padded_sharded_param_size.numel()
            if sizes:
                module.set_custom_reduce_scatter(_Scatter(self, sizes))

    def scatter(self, whole: Tensor, sizes: dict[str, int]) -> Tensor:
        """(numbers of a shard,): the sum over the replicas. whole: every shard, one after another.

        sizes: by name, the numbers of a shard of each layer, in order.
        """
        wire = self._wire
        with wire.exchanging():
            rows = whole.view(wire.replicas, -1)
            if rows.shape[1] != sum(sizes.values()):
                # A layer had no gradient in this step, and torch does not say which.
                _log.warning("of %s some have no gradient: sent without compression", ", ".join(sizes))
                return wire.swap(rows).sum(0)
            parts = torch.split(rows, list(sizes.values()), dim=1)
            named = zip(sizes, parts, strict=True)
            pieces = [Piece(self.layers[name], self.compressors[name], gradient) for name, gradient in named]
            return torch.cat(share_out(pieces, wire, self.watch))


class _Scatter(ReduceScatter):
    """What FSDP2 calls for one of its modules."""

    def __init__(self, exchange: ShardExchange, sizes: dict[str, int]) -> None:
        self._exchange, self._sizes = exchange, sizes

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        assert op in (ReduceOp.AVG, ReduceOp.SUM)
        assert not async_op
        if op == ReduceOp.AVG:
            input_tensor.div_(group.size())
        output_tensor.copy_(self._exchange.scatter(input_tensor, self._sizes))


# How long replicas exchanged gradients while nothing was computed: from the last gradient until all were exchanged.


class Exposed:
    """Watches the parameters of parts whose whole gradients replicas exchange.

    What is exchanged before the last gradient is computed hides behind computing, but where it runs within the backward
    pass, as hooks on CPUs do: that time is to be added.
    """

    def __init__(self, parts: Iterable[nn.Module], device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._last_s = 0.0
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if self._cuda else []  # type: ignore[no-untyped-call]
        for part in parts:
            for parameter in part.parameters():
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


# What compressed gradients are worth, as the core's formulas say of the layers that replicas exchange.


def errors_over_ranks(layers: Sequence[tuple[GradientLayer, Compressor]], device: torch.device) -> GradientErrors:
    """Errors of the gradient of all ranks' layers together, the same on every rank; all of them call it.

    Stages of a pipeline have layers of their own, and what a step is worth must not differ between them.
    """
    own = _errors(layers)
    numbers = float(sum(layer.numbers for layer, _ in layers))
    found = (own.signal, own.noise, not own.unbiased, own.rounds_sum)
    sums = torch.tensor([numbers, *(numbers * float(np.asarray(each)) for each in found)], device=device)
    distributed.all_reduce(sums)
    whole, signal, noise, biased, rounds = sums.tolist()
    return GradientErrors(signal / whole, noise / whole, biased == 0.0, rounds > 0.0)


def _errors(layers: Sequence[tuple[GradientLayer, Compressor]]) -> GradientErrors:
    if not layers:
        return GradientErrors(0.0, 0.0, True)
    used = list(dict.fromkeys(compressor for _, compressor in layers))
    sizes = LayerSizes.of_shapes([(layer.rows, layer.columns) for layer, _ in layers])
    choice = np.array([used.index(compressor) for _, compressor in layers])
    return Offer("exchanged", sizes, Gradients(), tuple(used), choice).errors


FIRST_MEASURED, MEASURED_EVERY = 20, 10
"""So many steps of a run are measured from the first on, and then each whose number this divides."""


@dataclass(frozen=True, slots=True)
class Exchanged:
    """What one step's exchange showed on this rank.

    sent_bytes: that left it. codec_s: seconds of encoding and decoding. sync_s: seconds in which gradients were
    exchanged and nothing was computed; 0 where FSDP2 exchanges, which does not tell. layers: of a measured step, by
    name, the squared norms of what a compressor was given and of what it left out, means over the replicas, in units of
    the gradient of the mean loss; empty of others. With error feedback what is given has what was held back in it.
    totals: five scalars, of which the sum over all ranks counts: squared norms given, left out, of sums, left out of
    sums, and of the mean gradient before compression; None of a step that was not measured.
    """

    sent_bytes: float
    codec_s: float
    sync_s: float
    layers: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    totals: Tensor | None = None


class Exchange:
    """Of the replicas in `group`, for the modules that train the parts of a model under a plan.

    replica: this rank's place in the group. What is drawn follows from (seed, step, replica), so ranks that split the
    layers of one replica draw alike, and what they all hold stays equal.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        modules: Sequence[nn.Module],
        plan: Plan,
        group: ProcessGroup,
        device: torch.device,
        seed: int,
    ) -> None:
        self._parts, self._plan, self._seed = parts, plan, seed
        self._wire = Wire(group, device)
        whole = [each for each in modules if isinstance(each, DistributedDataParallel)]
        self._replicas = [ReplicaExchange(each, self._wire) for each in whole]
        self._exposed = Exposed(parts, device) if whole else None
        self._shards: list[ShardExchange] = []
        self._choices = CompressorByLayer.named("none")
        self._steps = 0
        self._scale = _scale(plan)
        self._watch: Watch | None = None
        layers = [layer for each in self._replicas for layer in each.layers.values()]
        self._plain_bytes = sum(layer.sent_bytes(PLAIN, self._wire.replicas) for layer in layers)
        self.retune(plan)

    @property
    def compresses(self) -> bool:
        """Whether any layer may be sent otherwise than as it is."""
        return not self._choices.nothing

    @property
    def feedback(self) -> bool:
        """Whether any layer's compressor holds back."""
        return any(each.feedback for each in self._replicas)

    @property
    def in_words(self) -> str:
        """The compressor, and which layers it does not compress: vectors, small ones, those that would send no less."""
        plain = [layer.name for layer, compressor in self._chosen() if compressor == PLAIN]
        left = f"; as they are: {', '.join(plain)}" if plain else ""
        layers = len(self._chosen())
        return f"compressor {self._plan.compressor}: {layers - len(plain)} of {layers} layers{left}"

    def errors(self) -> GradientErrors:
        """What compression makes of the gradient of all ranks' layers, by the core's formulas; all ranks call it."""
        found = errors_over_ranks(self._chosen(), self._wire.device)
        return dataclasses.replace(found, rounds_sum=bool(found.rounds_sum) and not self._shards)

    def retune(self, plan: Plan) -> None:
        """As the plan says from the next step on; layers whose scheme holds nothing back forget what was."""
        self._choices = CompressorByLayer.named(plan.compressor)
        if self.compresses and not self._replicas and not self._shards:
            self._shards = [ShardExchange(part, self._wire, plan.tensor) for part in self._parts]
        for each in self._all():
            each.choose(self._choices)
        scale, self._scale = self._scale, _scale(plan)
        for memory in self._memories():
            if memory.error is not None:
                memory.error *= self._scale / scale
        self._plan, self._steps = plan, 0

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
        for each in self._all():
            each.watch = self._watch

    def end(self) -> Exchanged:
        """After them; on measured steps all replicas talk once more, which is not counted."""
        sync_s = 0.0 if self._exposed is None else self._exposed.take()
        # What DDP exchanges by itself, as long as nothing was compressed, is not seen.
        sent_bytes = self._wire.sent_bytes or self._plain_bytes
        whole_s, codec_s = self._wire.times_s()
        if self._exposed is not None and self._wire.device.type == "cpu":
            sync_s = max(sync_s, whole_s)  # hooks run within the backward pass there
        if self._watch is None:
            return Exchanged(sent_bytes, codec_s, sync_s)
        return Exchanged(sent_bytes, codec_s, sync_s, *self._seen(self._watch))

    def _seen(self, watch: Watch) -> tuple[dict[str, tuple[float, float]], Tensor]:
        names, device = list(watch.layers), self._wire.device
        squares = torch.stack([torch.stack(watch.layers[name]) for name in names]) if names else torch.zeros(0, 2)
        second = torch.zeros(2, device=device)
        for given, error in watch.second:
            second += torch.stack([given, error])
        sketch = torch.zeros(0, device=device) if watch.sketch is None else watch.sketch.numbers
        values = torch.cat([squares.flatten().to(device), second, sketch])
        distributed.all_reduce(values, group=self._wire.group)
        replicas = self._wire.replicas
        # What was measured are shares of a mean, one of so many replicas each, of a sum of so many micro-batches.
        values[: 2 * len(names)] *= replicas / self._scale**2
        squares = values[: 2 * len(names)].view(-1, 2)
        weight = {layer.name: layer.weight for layer, _ in self._chosen()}
        weights = torch.tensor([weight[name] for name in names], device=device)
        total = torch.zeros(5, device=device)
        total[:2] = (weights[:, None] * squares).sum(0)
        total[2:4] = values[2 * len(names) : 2 * len(names) + 2]
        total[4] = values[2 * len(names) + 2 :].square().sum() / self._scale**2
        layers = {name: (given, error) for name, (given, error) in zip(names, squares.tolist(), strict=True)}
        return layers, total / replicas

    def held(self) -> dict[str, Tensor]:
        """What a checkpoint keeps, by names that begin with a kind: `error.`, what the update still lacks of each
        layer, which is what all replicas hold back together; `start.`, PowerSGD's factors. All replicas call it.
        """
        found: dict[str, Tensor] = {}
        for each in self._replicas:
            for name in sorted(each.memories):
                memory, layer = each.memories[name], each.layers[name]
                if memory.error is not None:
                    whole = memory.error / self._scale
                    distributed.all_reduce(whole, group=self._wire.group)
                    found[f"error.{name}"] = whole.view(layer.rows, layer.columns)
                if memory.start is not None:
                    found[f"start.{name}"] = memory.start.clone()
        return found

    def hold(self, held: Mapping[str, Tensor]) -> None:
        """Goes on from what was held, by however many replicas: each takes an equal part of it."""
        for each in self._replicas:
            for name in each.feedback:
                memory = each.memories.setdefault(name, HeldBack())
                if (error := held.get(f"error.{name}")) is not None:
                    memory.error = error.flatten().to(self._wire.device) * (self._scale / self._wire.replicas)
                start = held.get(f"start.{name}")
                if start is not None and isinstance(each.compressors[name], PowerSgd):
                    memory.start = start.to(self._wire.device)

    def _all(self) -> list[ReplicaExchange | ShardExchange]:
        return [*self._replicas, *self._shards]

    def _chosen(self) -> list[tuple[GradientLayer, Compressor]]:
        return [(layer, each.compressors[name]) for each in self._all() for name, layer in each.layers.items()]

    def _memories(self) -> list[HeldBack]:
        return [memory for each in self._replicas for memory in each.memories.values()]


def _scale(plan: Plan) -> float:
    """Gradients as they are exchanged ÷ those of the mean loss: a pipeline divides by its micro-batches afterwards."""
    return float(plan.accumulation) if plan.pipeline > 1 else 1.0


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
