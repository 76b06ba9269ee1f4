"""Exchanges of whole gradients among replicas, as a communication hook of DDP."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from synergy_exec.training.compression.choices import SchemeByLayer
from synergy_exec.training.compression.scheme import GradientLayer, HeldBack, Piece, Scheme
from synergy_exec.training.compression.schemes import kinds
from synergy_exec.training.compression.watch import Watch
from synergy_exec.training.compression.wire import Wire


class ReplicaExchange:
    """Of one model part under DDP. layers: by name, those that have a gradient. schemes: what each gets. memories: of
    those that keep any.

    watch: set on steps that are measured. DDP calls the hook once a bucket and step, in an order that changes after
    the first step; what is kept goes by layer.
    """

    def __init__(self, module: DistributedDataParallel, wire: Wire) -> None:
        named = [(name, each) for name, each in module.module.named_parameters() if each.requires_grad]
        self.layers = {name: layer_of(name, each.shape, each.element_size()) for name, each in named}
        self.memories: dict[str, HeldBack] = {}
        self.watch: Watch | None = None
        self._wire = wire
        self._names = {id(each): name for name, each in named}
        self.schemes: dict[str, Scheme] = {}
        self._module = module
        self._hooked = False
        cuda = wire.device.type == "cuda"
        self._side = torch.cuda.Stream(wire.device) if cuda else None  # type: ignore[no-untyped-call]

    def choose(self, choices: SchemeByLayer) -> None:
        """From the next step on; what was held back goes on with layers whose scheme, though another, holds back."""
        before, replicas = self.schemes, self._wire.replicas
        self.schemes = {name: choices.of(layer, replicas) for name, layer in self.layers.items()}
        if not (choices.nothing or self._hooked):  # DDP's own exchange, in C++, is left alone as long as it will do
            self._module.register_comm_hook(None, _hook(self._exchange))
            self._hooked = True
        for name, memory in list(self.memories.items()):
            if not self.schemes[name].FEEDBACK:
                del self.memories[name]
            elif before[name] != self.schemes[name]:
                memory.start = None

    @property
    def feedback(self) -> list[str]:
        """The names of layers whose scheme holds back."""
        return [name for name, scheme in self.schemes.items() if scheme.FEEDBACK]

    @property
    def predicted_bytes(self) -> float:
        """Of a step, by the schemes' formulas."""
        return sum(self.schemes[name].sent_bytes(layer, self._wire.replicas) for name, layer in self.layers.items())

    def _exchange(self, bucket: GradBucket) -> Future[Tensor]:
        buffer = bucket.buffer()
        if self._side is None:
            with self._wire.exchanging():
                self._send(bucket)
            return _done(buffer)
        # Beside the backward pass, which computes the next bucket meanwhile; the future has DDP wait for this stream.
        self._side.wait_stream(torch.cuda.current_stream(self._wire.device))
        with torch.cuda.stream(self._side):
            with self._wire.exchanging():
                self._send(bucket)
            return _done(buffer)

    def _send(self, bucket: GradBucket) -> None:
        bucket.buffer().div_(self._wire.replicas)
        if self.watch is not None and self.watch.sketch is not None:
            self.watch.sketch.add(bucket.buffer())
        send(self._pieces(bucket), self._wire, self.watch)

    def _pieces(self, bucket: GradBucket) -> Iterable[Piece]:
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            layer = self.layers[self._names[id(parameter)]]
            scheme = self.schemes[layer.name]
            memory = self.memories.setdefault(layer.name, HeldBack()) if scheme.FEEDBACK else HeldBack()
            yield Piece(layer, scheme, gradient.view(-1), memory)


def send(pieces: Iterable[Piece], wire: Wire, watch: Watch | None) -> None:
    """Exchanges each piece as its scheme does, those of one scheme together."""
    every = list(pieces)
    for kind in kinds():
        if chosen := [piece for piece in every if isinstance(piece.scheme, kind)]:
            kind.exchange(chosen, wire, watch)


def layer_of(name: str, shape: torch.Size, number_bytes: int, weight: float = 1.0) -> GradientLayer:
    """A parameter as a matrix: its first dimension, and all others."""
    rows = shape[0] if shape else 1
    return GradientLayer(name, rows, shape.numel() // rows if rows else 0, number_bytes, weight)


def _hook(exchange: Callable[[GradBucket], Future[Tensor]]) -> Callable[[object, GradBucket], Future[Tensor]]:
    # DDP reads annotations, and takes those that are strings for wrong ones.
    return lambda _state, bucket: exchange(bucket)


def _done(buffer: Tensor) -> Future[Tensor]:
    future: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
    future.set_result(buffer)
    return future
