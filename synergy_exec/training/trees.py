"""Batches as people write them: a tensor, or dicts, tuples and lists of tensors, nested as they like.

Each tensor has a row for every sample, the first dimension. What is no tensor (None, a flag) is passed on as it is.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from synergy_core.errors import InputError


def rows(tree: Any, first: int, end: int) -> Any:
    """The samples from `first` to before `end`."""
    return tree_map_only(Tensor, lambda each: each[first:end], tree)


def split(tree: Any, size: int, count: int) -> list[Any]:
    """The first count × size samples, in `count` pieces."""
    return [rows(tree, at * size, (at + 1) * size) for at in range(count)]


def stacked(trees: Sequence[Any]) -> Any:
    """A batch of single samples, which have no dimension for them yet."""
    return tree_map(lambda *each: torch.stack(each) if isinstance(each[0], Tensor) else each[0], *trees)


def moved(tree: Any, device: torch.device) -> Any:
    """On the device; to a GPU by way of pinned memory, so that copying does not hold up what asks for it."""
    if device.type != "cuda":
        return tree_map_only(Tensor, lambda each: each.to(device), tree)
    return tree_map_only(Tensor, lambda each: _pinned(each).to(device, non_blocking=True), tree)


def _pinned(tensor: Tensor) -> Tensor:
    return tensor.pin_memory() if tensor.device.type == "cpu" else tensor


def called(module: nn.Module, inputs: Any) -> Any:
    """What the module makes of inputs: a dict gives its arguments by name, a tuple or a list in order."""
    if isinstance(inputs, Mapping):
        return module(**inputs)
    if isinstance(inputs, tuple | list):
        return module(*inputs)
    return module(inputs)


def floats(tree: Any) -> Any:
    """The same with numbers in single precision."""
    return tree_map_only(Tensor, lambda each: each.float() if each.is_floating_point() else each, tree)


def lengths(tree: Any) -> set[int]:
    """How many rows its tensors have; 0 stands for a tensor without any dimension."""
    return {len(each) if each.dim() else 0 for each in tensors(tree)}


def tensors(tree: Any) -> list[Tensor]:
    """Its tensors."""
    return [each for each in tree_leaves(tree) if isinstance(each, Tensor)]


def checksum(tree: Any) -> int:
    """The CRC-32 of its tensors' numbers."""
    found = 0
    for each in tensors(tree):
        found = zlib.crc32(each.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes(), found)
    return found


def shapes(tree: Any) -> list[tuple[int, ...]]:
    """The shapes of its tensors."""
    return [tuple(each.shape) for each in tensors(tree)]


def in_words(counts: Iterable[int]) -> str:
    """As in `8`, or `7 or 8`; `no` where there are none."""
    return " or ".join(map(str, sorted(counts))) or "no"


def pair(source: str, given: Any) -> tuple[Any, Any]:
    """What should be inputs and targets, as many of both. source: what gave it. Raises InputError."""
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise InputError(f"{source} gave a {type(given).__name__}; expected inputs and targets, a pair.")
    found = lengths(tuple(given))
    if len(found) != 1 or found == {0}:
        raise InputError(
            f"{source} gave tensors of {in_words(found)} rows; give inputs and targets as many, at least one, samples "
            "in the first dimension."
        )
    return given[0], given[1]
