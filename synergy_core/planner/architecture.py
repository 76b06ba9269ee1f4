"""What the planner asks of a model and of its family: declared here, answered by each file of `families/`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from synergy_core.errors import InputError
from synergy_core.planner.plan import Plans
from synergy_core.planner.software import Software
from synergy_core.planner.work import Amount, Work

SHORTEST_PIECE = 4096
"""Tokens of a sequence that a context-parallel rank has at least; shorter ones leave too little work per ring step."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Into how many parts a model splits.

    layers: what pipeline stages are cut between. heads: what a tensor-parallel degree divides; channels, where there
    are no heads. groups: key-value heads, which divide that degree or are divided by it. seq_len: tokens of a sample;
    0: no sequence. experts: per layer; 1: none.
    """

    layers: int
    heads: int
    groups: int = 1
    seq_len: int = 0
    experts: int = 1

    def tensors(self, most: int) -> list[int]:
        """Tensor-parallel degrees up to `most`."""
        return [
            each
            for each in divisors(self.heads)
            if each <= most and (self.groups % each == 0 or each % self.groups == 0)
        ]

    def contexts(self) -> list[int]:
        """Context-parallel degrees: powers of two that leave pieces long enough, in two halves each."""
        result = [1]
        while self.seq_len % (4 * result[-1]) == 0 and self.seq_len // (2 * result[-1]) >= SHORTEST_PIECE:
            result.append(2 * result[-1])
        return result


class Architecture(Protocol):
    """A model's sizes: a frozen dataclass, whose numbers may also be arrays (plans,), one model per plan."""

    def __hash__(self) -> int:
        """Tables are remembered by it."""

    def parameters(self) -> Amount:
        """Parameters of the whole model, each counted once."""

    def limits(self) -> Limits:
        """Into how many parts the model can be split; of one model, not of arrays."""

    def check(self) -> None:
        """Raises InputError for sizes of one model that no model can have together, such as 41 heads of 4,096."""


class Family(Protocol):
    """A file of `families/`. Architecture: its own class, whose fields `catalog/architectures/*.yaml` fill."""

    Architecture: Any

    def work(self, architecture: Any, plans: Plans, software: Software) -> Work:
        """Operators of one micro-batch on one GPU."""


def at_least(least: int, **sizes: Any) -> None:
    """Raises InputError for the first size that is below `least`."""
    for name, value in sizes.items():
        if value < least:
            raise InputError(f"{name}: {value}; expected a whole number of at least {least}.")


def divisors(number: int) -> list[int]:
    """All divisors of the number, rising."""
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})
