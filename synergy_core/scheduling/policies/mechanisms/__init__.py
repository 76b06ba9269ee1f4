"""Mechanisms: how many CPUs and how much memory each job gets, for jobs that a policy has put in order.

A file in this folder registers a mechanism. `fifo+tune` is the order fifo with the mechanism tune.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from synergy_core import modules_of
from synergy_core.errors import InputError, unknown
from synergy_core.scheduling.policies._parameters import Parametrised, described
from synergy_core.scheduling.policies.mechanisms._round import Answer

__all__ = ["Answer", "Mechanism", "get_mechanism", "mechanism", "mechanism_names"]

_found: dict[str, Mechanism] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mechanism(Parametrised):
    """Shares out GPUs, CPUs and memory among jobs in a given order.

    pooled: whether shares fit only into the sum over all nodes of a GPU type, not on each node. Such an answer cannot
    be carried out; its speed is an upper bound.
    """

    share_out: Callable[..., Answer]
    pooled: bool = False

    noun: ClassVar[str] = "mechanism"
    takers: ClassVar[tuple[str, ...]] = ("share_out",)


def mechanism(*, pooled: bool = False) -> Callable[[Callable[..., Answer]], Callable[..., Answer]]:
    """Registers a function `share_out(round: SharingRound, *, parameters…) -> Answer` under its own name.

    The function must be pure: the same round has the same answer. See `Mechanism`.
    """

    def register(share_out: Callable[..., Answer]) -> Callable[..., Answer]:
        name = share_out.__name__
        if name in _found:
            raise InputError(f"two mechanisms have the name {name}; rename one.")
        _found[name] = Mechanism(**described(share_out), share_out=share_out, pooled=pooled)
        return share_out

    return register


def mechanism_names() -> dict[str, str]:
    """Name and one-line summary of every mechanism, sorted by name."""
    _discover()
    return {name: _found[name].summary for name in sorted(_found)}


def get_mechanism(name: str) -> Mechanism:
    """The mechanism called `name`. Raises InputError with the nearest match for an unknown name."""
    _discover()
    if name not in _found:
        hint = "A file in synergy_core/scheduling/policies/mechanisms/ adds one."
        raise unknown("mechanism", name, _found, hint=hint)
    return _found[name]


@functools.cache
def _discover() -> None:
    """Imports every mechanism of this folder, once."""
    modules_of(__name__)
