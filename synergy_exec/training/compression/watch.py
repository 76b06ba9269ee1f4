"""What a measured step shows of compression: squares of gradients and of errors, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

SKETCH_NUMBERS = 4096
"""Of a sketch: its squared norm is the gradient's within a relative standard error of √(2/4096), 2.2 %."""


@dataclass(slots=True)
class Watch:
    """Squares of one step on this rank, scalars on the device; of replicas' shares, so only their quotients count.

    layers: by name, (squared norm of what the scheme was given, of what it left out). second: the same of sums that
    are rounded again. sketch: None unless the mean's norm before compression is asked for.
    """

    sketch: Sketch | None = None
    layers: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    second: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def note(self, name: str, given: Tensor, error: Tensor | None = None) -> None:
        """A layer's gradient and what its scheme left out of it; None: nothing."""
        self.put(name, _square(given), _square(error) if error is not None else torch.zeros((), device=given.device))

    def put(self, name: str, given: Tensor, error: Tensor) -> None:
        """The same of squares."""
        self.layers[name] = (given, error)


class Sketch:
    """A few numbers, linear in the gradient, whose squared norm is expected to be the gradient's (Alon, Matias,
    Szegedy 1996): every number of the gradient, with a random sign, is added to one of them.

    So the sum of all replicas' sketches tells the mean gradient's norm, which no replica sees under compression.
    generator: in the same state on all replicas.
    """

    def __init__(self, generator: torch.Generator, device: torch.device) -> None:
        self._generator = generator
        self.numbers = torch.zeros(SKETCH_NUMBERS, device=device)

    def add(self, gradient: Tensor) -> None:
        """Adds a flat part of the gradient; every replica adds the same parts in the same order."""
        signs = torch.empty(len(gradient), dtype=torch.int8, device=gradient.device)
        signs.random_(0, 2, generator=self._generator)
        signed = gradient.float() * (2 * signs - 1)
        padding = -len(signed) % SKETCH_NUMBERS
        self.numbers += torch.nn.functional.pad(signed, (0, padding)).view(-1, SKETCH_NUMBERS).sum(0)


def _square(tensor: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.float32)
    return norm.square()
