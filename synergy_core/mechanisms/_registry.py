"""How a function becomes a mechanism: a decorator, and a table of what was found."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from synergy_core.errors import InputError, unknown
from synergy_core.mechanisms._round import Grant, SharingRound
from synergy_core.modules import modules_of

Answer = list[Grant | None]
"""What each job of the round gets, in the round's order; None: nothing."""

_found: dict[str, Mechanism] = {}


@dataclass(frozen=True, slots=True)
class Mechanism:
    """Shares out GPUs, CPUs and memory among jobs that stand in an order.

    pooled: its answer keeps to what all nodes of a GPU type have together, not to what each has: an upper bound, which
    no cluster of nodes could carry out.
    """

    name: str
    summary: str
    share_out: Callable[..., Answer]
    pooled: bool = False
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def with_parameters(self, **parameters: Any) -> Mechanism:
        """The mechanism with some of its parameters set. Raises InputError for one that it does not have."""
        for name, value in parameters.items():
            if name not in self.parameters:
                raise unknown(f"parameter of mechanism {self.name}", name, self.parameters)
            if type(value) is not type(self.parameters[name]):
                wanted = type(self.parameters[name]).__name__
                raise InputError(f"parameter {name} of mechanism {self.name}: got {value!r}, expected a {wanted}.")
        if not parameters:
            return self
        share_out = functools.partial(self.share_out, **parameters)
        return replace(self, share_out=share_out, parameters={**self.parameters, **parameters})


def mechanism(*, pooled: bool = False) -> Callable[[Callable[..., Answer]], Callable[..., Answer]]:
    """Registers a function `share_out(round: SharingRound, *, parameters…) -> Answer` under its own name.

    It is pure: the same round has the same answer. See `Mechanism`.
    """

    def register(share_out: Callable[..., Answer]) -> Callable[..., Answer]:
        name = share_out.__name__
        if name in _found:
            raise InputError(f"two mechanisms are called {name}; rename one.")
        summary = (inspect.getdoc(share_out) or "").partition("\n")[0]
        given = inspect.signature(share_out).parameters.values()
        defaults = {each.name: each.default for each in given if each.kind is each.KEYWORD_ONLY}
        _found[name] = Mechanism(name, summary, share_out, pooled, defaults)
        return share_out

    return register


def mechanism_names() -> dict[str, str]:
    """Name and one-line summary of every mechanism, sorted by name."""
    _discover()
    return {name: _found[name].summary for name in sorted(_found)}


def get_mechanism(name: str) -> Mechanism:
    """The mechanism of that name. Raises InputError with the nearest match."""
    _discover()
    if name not in _found:
        raise unknown("mechanism", name, _found, hint="A file in synergy_core/mechanisms/ adds one.")
    return _found[name]


@functools.cache
def _discover() -> None:
    """Imports every mechanism of this folder, once."""
    modules_of(__name__.rpartition(".")[0])


__all__ = ["Answer", "Grant", "Mechanism", "SharingRound", "get_mechanism", "mechanism", "mechanism_names"]
