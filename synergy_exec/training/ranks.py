"""Runs a function on all ranks and gives every rank all results, or the same error.

Ranks exchange JSON and not pickles, because a pickle from a foreign process could run any code.
"""

from __future__ import annotations

import builtins
import json
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

LONGEST_WAIT = timedelta(minutes=30)
"""A rank that waits longer for another gives up. A dead rank is noticed at once by its closed connection."""

_LENGTH_BYTES, _SHORT_BYTES = 8, 1024

_aside: WeakKeyDictionary[Any, dist.ProcessGroup] = WeakKeyDictionary()


class Ranks:
    """All ranks of the default process group, or this process alone without one.

    All ranks construct it and call its methods together, in the same order. They communicate in the default group,
    which needs a backend for tensors in the host's memory. With aside=True they communicate in a gloo group of their
    own, for a thread that communicates while training does.
    """

    def __init__(self, *, aside: bool = False) -> None:
        self.group: dist.ProcessGroup | None = None
        self.rank, self.world = 0, 1
        if dist.is_available() and dist.is_initialized():
            self.group = dist.group.WORLD
            if aside:
                if self.group not in _aside:
                    _aside[self.group] = dist.new_group(backend="gloo", timeout=LONGEST_WAIT)
                self.group = _aside[self.group]
            self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def together(self, function: Callable[[], Any]) -> list[Any]:
        """Returns the function's results on all ranks, by rank, after a round trip through JSON: tuples become lists.

        If it raises on some ranks, all ranks raise the error of the first of them. Other ranks get a RuntimeError in
        place of an error class that is neither Python's nor Synergy's.
        """
        value: Any = None
        error: Exception | None = None
        try:
            value = function()
        except Exception as raised:
            error = raised
        texts = [json.dumps([value, error and [_name(type(error)), str(error)]])]
        if self.group is not None:
            texts = self._gathered(texts[0])
        outcomes = [json.loads(text) for text in texts]
        for rank, (_, failed) in enumerate(outcomes):
            if failed is not None:
                # This rank's own error keeps its traceback.
                raise error if error is not None and rank == self.rank else _as_told(*failed)
        return [each for each, _ in outcomes]

    def _gathered(self, text: str) -> list[str]:
        """Every rank's text. Its length goes with it, so that short texts take one exchange."""
        text_bytes, size = text.encode(), _SHORT_BYTES
        own = len(text_bytes).to_bytes(_LENGTH_BYTES) + text_bytes
        while True:
            padded = torch.frombuffer(bytearray(own[:size].ljust(size, b"\0")), dtype=torch.uint8)
            found = [torch.empty(size, dtype=torch.uint8) for _ in range(self.world)]
            dist.all_gather(found, padded, group=self.group)
            every = [each.numpy().tobytes() for each in found]
            ends = [_LENGTH_BYTES + int.from_bytes(each[:_LENGTH_BYTES]) for each in every]
            if max(ends) <= size:
                return [each[_LENGTH_BYTES:end].decode() for each, end in zip(every, ends, strict=True)]
            size = max(ends)

    def first(self, function: Callable[[], Any]) -> Any:
        """Runs the function on rank 0 only; all ranks return its result or raise its error."""
        return self.together(lambda: function() if self.rank == 0 else None)[0]


def _name(error: type) -> str:
    return error.__name__ if error.__module__ == builtins.__name__ else f"{error.__module__}.{error.__qualname__}"


def _as_told(name: str, text: str) -> Exception:
    """Another rank's error as an exception: of the same class if that is Python's or Synergy's, or a RuntimeError."""
    module, _, own = name.rpartition(".")
    if not module or module.startswith(("synergy_exec.", "synergy_core.")):
        error_class = getattr(sys.modules.get(module or builtins.__name__), own, None)
        if isinstance(error_class, type) and issubclass(error_class, Exception):
            return error_class(text)
    return RuntimeError(f"{own}: {text}")
