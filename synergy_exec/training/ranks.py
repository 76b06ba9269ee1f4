"""What ranks do together beside training: the same answer, or the same error, on each of them.

They exchange JSON: whoever could send something in another rank's place could have a pickle run any code.
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

# A rank that has written its part waits here for the slowest, far longer than a training step's time limit. A dead
# rank is noticed at once by its closed connection.
_TIMEOUT = timedelta(minutes=30)

_groups: WeakKeyDictionary[Any, dict[str, dist.ProcessGroup]] = WeakKeyDictionary()


class Ranks:
    """All ranks of the default process group, or this process alone where there is none.

    They talk in a gloo group of their own, so that they may do so while training communicates, and on any device.
    All ranks construct it and call its methods together, in the same order. purpose: threads that talk at the same time
    need a group each.
    """

    def __init__(self, purpose: str = "") -> None:
        self.group: dist.ProcessGroup | None = None
        self.rank, self.world = 0, 1
        if dist.is_available() and dist.is_initialized():
            groups = _groups.setdefault(dist.group.WORLD, {})
            if purpose not in groups:
                groups[purpose] = dist.new_group(backend="gloo", timeout=_TIMEOUT)
            self.group = groups[purpose]
            self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def together(self, function: Callable[[], Any]) -> list[Any]:
        """What the function returns on each rank, by rank, as JSON has it: a tuple comes as a list.

        If it raises on one, all raise the first rank's error; one that is neither Python's nor Synergy's is a
        RuntimeError on the other ranks.
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
                # This rank's own as it was, with the lines that it passed.
                raise error if error is not None and rank == self.rank else _as_told(*failed)
        return [each for each, _ in outcomes]

    def _gathered(self, text: str) -> list[str]:
        """Every rank's text."""
        own = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        dist.all_gather(lengths, torch.tensor([len(own)]), group=self.group)
        longest = max(int(each) for each in lengths)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(own)] = own
        every = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.world)]
        dist.all_gather(every, padded, group=self.group)
        return [bytes(each[: int(length)].numpy()).decode() for each, length in zip(every, lengths, strict=True)]

    def first(self, function: Callable[[], Any]) -> Any:
        """What the function returns on rank 0, where alone it runs; its error is raised on all."""
        return self.together(lambda: function() if self.rank == 0 else None)[0]


def _name(kind: type) -> str:
    return kind.__name__ if kind.__module__ == builtins.__name__ else f"{kind.__module__}.{kind.__qualname__}"


def _as_told(name: str, text: str) -> Exception:
    """Another rank's error: of a class of Python itself or of Synergy that is loaded here, or a RuntimeError."""
    module, _, own = name.rpartition(".")
    if not module or module.startswith(("synergy_exec.", "synergy_core.")):
        kind = getattr(sys.modules.get(module or builtins.__name__), own, None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            return kind(text)
    return RuntimeError(f"{own}: {text}")
