"""A job's state as one flat dictionary in which every tensor has its original parameter's name, under any plan."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)

Shapes = dict[str, tuple[tuple[int, ...], int]]
"""By a tensor's name: its global shape, and its bytes over all ranks."""


class State:
    """The tensors of these parts, live: what is loaded into `tree` has reached the parameters, `apply` does the rest.

    parts, optimizers: one per stage that this rank owns. with_optimizer: False before the first step, when optimizers
    have no state: torch would make it by a step of zero gradients, which Adam counts.
    """

    def __init__(self, parts: Sequence[nn.Module], optimizers: Sequence[Optimizer], *, with_optimizer: bool) -> None:
        self._parts, self._optimizers = list(parts), list(optimizers)
        self._models = [get_model_state_dict(part) for part in self._parts]
        self._optimizer_states: list[dict[str, Any]] = []
        self.tree: dict[str, Any] = {"model": _merged(self._models)}
        if with_optimizer:
            for part, optimizer in zip(self._parts, self._optimizers, strict=True):
                self._optimizer_states.append(get_optimizer_state_dict(part, optimizer, options=_OPTIONS))
            self.tree["optimizer"] = _merged(self._optimizer_states)

    def apply(self) -> None:
        """Make what was loaded into `tree` the state of parts and optimizers; learning rates stay as they are."""
        for part, values in zip(self._parts, self._models, strict=True):
            set_model_state_dict(part, {name: self.tree["model"][name] for name in values})
        for part, optimizer, values in zip(self._parts, self._optimizers, self._optimizer_states, strict=False):
            # Saved rates have the batch's factor in them; the worker multiplies those of `build_optimizer` anew.
            rates = [copy.copy(group["lr"]) for group in optimizer.param_groups]
            loaded = {name: self.tree["optimizer"][name] for name in values}
            set_optimizer_state_dict(part, optimizer, loaded, options=_OPTIONS)
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate


def shapes(tree: dict[str, Any]) -> Shapes:
    """The shapes of all tensors in a `State.tree`, by the names that torch.distributed.checkpoint gives them."""
    return {
        f"{kind}.{name}": (tuple(value.shape), value.numel() * value.element_size())
        for kind, values in tree.items()
        if isinstance(values, dict)
        for name, value in values.items()
        if isinstance(value, Tensor)
    }


def seed_generators(saved: Tensor, step: int, replica: int) -> None:
    """Set torch's generators from rank 0's saved CPU state; see `checkpoint.load` for what that promises."""
    text = f"{hashlib.sha256(saved.numpy().tobytes()).hexdigest()} {step} {replica}"
    torch.manual_seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True))
    if replica == 0:
        torch.set_rng_state(saved)


def _merged(dictionaries: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: value for each in dictionaries for name, value in each.items()}
