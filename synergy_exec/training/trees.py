"""Batches as users write them: a tensor, or nested dicts, tuples and lists of tensors.

The first dimension of each tensor is the sample. Other values (None, a flag) are passed on unchanged.
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
    """Samples first … end − 1 of a batch."""
    return tree_map_only(Tensor, lambda each: each[first:end], tree)


def split(tree: Any, size: int, count: int) -> list[Any]:
    """The first count × size samples in `count` pieces."""
    return [rows(tree, at * size, (at + 1) * size) for at in range(count)]


def stacked(trees: Sequence[Any]) -> Any:
    """Stacks single samples into a batch."""
    return tree_map(lambda *each: torch.stack(each) if isinstance(each[0], Tensor) else each[0], *trees)


def moved(tree: Any, device: torch.device) -> Any:
    """Moves all tensors to the device; to a GPU through pinned memory, so that the caller does not wait."""
    if device.type != "cuda":
        return tree_map_only(Tensor, lambda each: each.to(device), tree)
    return tree_map_only(Tensor, lambda each: _pinned(each).to(device, non_blocking=True), tree)


def _pinned(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_cuda or tensor.is_pinned() else tensor.pin_memory()


def called(module: nn.Module, inputs: Any) -> Any:
    """Calls the module: a dict gives its arguments by name, a tuple or list in order, anything else as one argument."""
    if isinstance(inputs, Mapping):
        return module(**inputs)
    if isinstance(inputs, tuple | list):
        return module(*inputs)
    return module(inputs)


def floats(tree: Any) -> Any:
    """Converts floating-point tensors to float32."""
    return tree_map_only(Tensor, lambda each: each.float() if each.is_floating_point() else each, tree)


def norm(tensor: Tensor) -> Tensor:
    """The 2-norm as a float32 scalar, computed in float32 or, for a float64 tensor, in float64."""
    tensor = values_of(tensor) if tensor.is_sparse else tensor
    exact: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))
    return exact.float()


def values_of(tensor: Tensor) -> Tensor:
    """The values of a sparse tensor; entries for the same place are added up."""
    return tensor.coalesce().values()


def lengths(tree: Any) -> set[int]:
    """Numbers of rows of a tree's tensors; 0 stands for a tensor without dimensions."""
    return {len(each) if each.dim() else 0 for each in tensors(tree)}


def tensors(tree: Any) -> list[Tensor]:
    """All tensors of a tree."""
    return [each for each in tree_leaves(tree) if isinstance(each, Tensor)]


def checksum(tree: Any) -> int:
    """The CRC-32 of the numbers in a tree's tensors."""
    found = 0
    for each in tensors(tree):
        found = zlib.crc32(each.detach().cpu().flatten().contiguous().view(torch.uint8).numpy().tobytes(), found)
    return found


def shapes(tree: Any) -> list[tuple[int, ...]]:
    """The shapes of a tree's tensors."""
    return [tuple(each.shape) for each in tensors(tree)]


def in_words(counts: Iterable[int]) -> str:
    """The counts as text, such as `8` or `7 or 8`; `no` for an empty collection."""
    return " or ".join(map(str, sorted(counts))) or "no"


def pair(source: str, given: Any) -> tuple[Any, Any]:
    """Checks that `given` is a pair of inputs and targets with equally many samples. source: for the InputError."""
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise InputError(f"{source} gave a {type(given).__name__}; expected inputs and targets, a pair.")
    found = lengths(tuple(given))
    if len(found) != 1 or found == {0}:
        raise InputError(
            f"{source} gave tensors of {in_words(found)} rows; give inputs and targets as many, at least one, samples "
            "in the first dimension."
        )
    return given[0], given[1]
