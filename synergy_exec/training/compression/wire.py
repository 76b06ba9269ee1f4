"""The collectives of an exchange. They count sent bytes and measure time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from synergy_exec.training import trees

# torch 2.13 renames all_gather_into_tensor to all_gather_single and warns of the old name.
_all_gather: Any = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor


PIECE_BYTES = 2**20
"""Bytes that `Wire` sends at once by gloo. Gloo's own collectives send a large tensor first one way and then the other:
for 4 MB each way between two ranks they take twice as long."""


class Wire:
    """The group of replicas that exchange gradients. sent_bytes: sent by this rank since the caller set it to 0.

    Among N replicas an all-reduce counts as a ring, which it is for large tensors: 2 (N − 1)/N of the tensor's bytes.
    An all-to-all counts (N − 1)/N of its bytes, and a gather N − 1 times the rank's own bytes. generator: random
    numbers for rounding. Calls wait for the collective on the device's current stream, as torch's do.
    """

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.replicas = group.size()
        self.generator = torch.Generator(device)
        self.sent_bytes = 0.0
        self._clocks = _clocks(device)

    def sum(self, tensor: Tensor) -> None:
        """Makes a tensor the sum over the replicas."""
        self.sent_bytes += 2 * (self.replicas - 1) / self.replicas * tensor.nbytes
        with self._clocks["sending"].running():
            distributed.all_reduce(tensor, group=self.group)

    def swap(self, tensor: Tensor) -> Tensor:
        """(replicas, …) → (replicas, …): row j of rank i becomes row i of rank j.

        If the receiver sums the rows, this is a reduce-scatter that can add in fp32 whatever type was sent; gloo's own
        reduce-scatter sends twice as much as necessary.
        """
        self.sent_bytes += (self.replicas - 1) / self.replicas * tensor.nbytes
        swapped = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        with self._clocks["sending"].running():
            if self.device.type == "cuda":
                distributed.all_to_all_single(swapped, tensor, group=self.group)
            else:
                self._trade(tensor, swapped)
        return swapped

    def gather(self, tensor: Tensor) -> Tensor:
        """(numbers,) → (replicas, numbers): collects the tensors of all ranks."""
        self.sent_bytes += (self.replicas - 1) * tensor.nbytes
        gathered = tensor.new_empty(self.replicas, tensor.numel())
        with self._clocks["sending"].running():
            if self.device.type == "cuda":
                _all_gather(gathered.view(-1), tensor, group=self.group)
            else:
                self._trade(tensor.expand_as(gathered), gathered)
        return gathered

    def _trade(self, given: Tensor, taken: Tensor) -> None:
        """Sends row j of `given` to rank j and receives row j of `taken` from rank j, in pieces both ways at once."""
        own = self.group.rank()
        taken[own] = given[own]
        given, taken = given.flatten(1), taken.view(self.replicas, -1)
        numbers, piece = given.shape[1], PIECE_BYTES // given.element_size()
        works: list[Any] = []
        for at in range(0, numbers, piece):
            for far in range(1, self.replicas):
                # In every round each rank sends to one rank and receives from one, so no rank waits for a third.
                after, before = (own + far) % self.replicas, (own - far) % self.replicas
                works.append(distributed.irecv(taken[before, at : at + piece], group=self.group, group_src=before))
                works.append(distributed.isend(given[after, at : at + piece], group=self.group, group_dst=after))
        for work in works:
            work.wait()

    def exchanging(self) -> AbstractContextManager[None]:
        """Measures a whole exchange; the part of it that is not sending is encoding and decoding."""
        return self._clocks["whole"].running()

    def times_s(self) -> tuple[float, float]:
        """Seconds of exchanging since the last call, and the part of encoding and decoding; waits for the device."""
        whole_s = self._clocks["whole"].take()
        return whole_s, whole_s - self._clocks["sending"].take()


class LoneWire(Wire):
    """A wire that pretends that a second replica has the same gradients, to measure encoding and decoding alone."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.replicas = device, 2
        self.generator = torch.Generator(device)
        self._clocks = _clocks(device)

    def sum(self, tensor: Tensor) -> None:
        with self._clocks["sending"].running():
            tensor.mul_(self.replicas)

    def swap(self, tensor: Tensor) -> Tensor:
        with self._clocks["sending"].running():
            return tensor[:1].expand_as(tensor).contiguous()

    def gather(self, tensor: Tensor) -> Tensor:
        with self._clocks["sending"].running():
            return tensor.expand(self.replicas, -1).contiguous()


class Clock:
    """Seconds that a device's current stream spends in spans of code."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._began_s, self._seconds = 0.0, 0.0
        self._begin: torch.cuda.Event | None = None
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def begin(self) -> None:
        """Begins a span; one that was begun and has not ended begins anew."""
        if self._cuda:
            self._begin = self._begin or torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._begin.record()
        else:
            self._began_s = time.perf_counter()

    def end(self) -> None:
        """Ends the span; on a GPU, one that has not begun counts nothing."""
        if self._begin is not None:
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end.record()
            self._events.append((self._begin, end))
            self._begin = None
        elif not self._cuda:
            self._seconds += time.perf_counter() - self._began_s

    @contextmanager
    def running(self) -> Iterator[None]:
        """A span, for a block of code."""
        self.begin()
        yield
        self.end()

    def take(self) -> float:
        """Seconds of all spans since the last call; waits for the device."""
        seconds, self._seconds = self._seconds, 0.0
        for begin, end in self._events:
            end.synchronize()
            seconds += begin.elapsed_time(end) / 1000
        self._events.clear()
        return seconds


def _clocks(device: torch.device) -> dict[str, Clock]:
    return {"whole": Clock(device), "sending": Clock(device)}


# Measurements of compression: squared norms of gradients and of errors, layer by layer.


SKETCH_NUMBERS = 4096
"""Length of a sketch. Its squared norm estimates the gradient's with a relative standard error of √(2/4096), 2.2 %."""


@dataclass(slots=True)
class Watch:
    """Squared norms of one step on this rank, scalars on the device. They are of this replica's share of the mean.

    layers: by name, squared norms of the compressor's input and of the part that it left out. second: the same for sums
    that are rounded again. sketch: sketch of this share before compression, None if it is not needed.
    """

    sketch: Sketch | None = None
    layers: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    second: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def note(self, name: str, given: Tensor, error: Tensor) -> None:
        """Notes the squared norms of a layer's gradient and of the part that its compressor left out."""
        self.layers[name] = (trees.norm(given).square(), trees.norm(error).square())


class Sketch:
    """A short linear summary of a gradient whose expected squared norm is the gradient's (Alon, Matias, Szegedy 1996).

    Every number of the gradient is added with a random sign to one number of the sketch. The sum of all replicas'
    sketches gives the norm of the mean gradient, which no replica sees under compression. generator: in the same state
    on all replicas.
    """

    def __init__(self, generator: torch.Generator, device: torch.device) -> None:
        self._generator = generator
        self.numbers = torch.zeros(SKETCH_NUMBERS, dtype=torch.float32, device=device)

    def add(self, gradient: Tensor) -> None:
        """Adds a flat part of the gradient; every replica adds the same parts in the same order."""
        signs = torch.empty(len(gradient), dtype=torch.int8, device=gradient.device)
        signs.random_(0, 2, generator=self._generator)
        signed = gradient.float() * (2 * signs - 1)
        padding = -len(signed) % SKETCH_NUMBERS
        self.numbers += torch.nn.functional.pad(signed, (0, padding)).view(-1, SKETCH_NUMBERS).sum(0)
