"""What ranks do together beside training: the same answer, or the same error, on each of them.

They exchange JSON: whoever could send something in another rank's place could have a pickle run any code.
"""

from __future__ import annotations

import builtins
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

T = TypeVar("T")

# A rank that has written its part waits here for the slowest, far longer than a training step's time limit. A dead
# rank is noticed at once by its closed connection.
_TIMEOUT = timedelta(minutes=30)
_BEAT_S = 0.005

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

    def together(self, function: Callable[[], T], beat: Callable[[], None] | None = None) -> list[T]:
        """What the function returns on each rank, by rank. If it raises on one, all raise the first rank's error; one
        that is neither Python's nor Synergy's is a RuntimeError on the other ranks.

        What it returns is made of numbers, texts, paths, lists, tuples, dicts, and dataclasses and named tuples of
        Synergy. beat: called every now and then while others take longer.
        """
        value: T | None = None
        error: Exception | None = None
        try:
            value = function()
        except Exception as raised:
            error = raised
        outcomes: list[tuple[Any, Exception | None]] = [(value, error)]
        if self.group is not None:
            if beat is not None:
                self._meet(beat)
            texts = self._gathered(json.dumps([_as_json(value), _error_as_json(error)]))
            outcomes = [(_from_json(its), _error_from_json(failed)) for its, failed in map(json.loads, texts)]
            # This rank's own as it was, with the lines that it passed.
            outcomes[self.rank] = value, error
        for _, failure in outcomes:
            if failure is not None:
                raise failure
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

    def _meet(self, beat: Callable[[], None]) -> None:
        work: Any = dist.barrier(group=self.group, async_op=True)
        while not work.is_completed():
            beat()
            time.sleep(_BEAT_S)
        work.wait()

    def first(self, function: Callable[[], T]) -> T:
        """What the function returns on rank 0, where alone it runs; its error is raised on all."""
        answers = self.together(lambda: function() if self.rank == 0 else None)
        answer: Any = answers[0]
        result: T = answer
        return result


def _as_json(value: Any) -> Any:
    """What JSON has no form for is an object of one key, its kind."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list():
            return [_as_json(each) for each in value]
        case dict():
            return {"dict": [[_as_json(name), _as_json(each)] for name, each in value.items()]}
        case Path():
            return {"path": str(value)}
        case frozenset():
            return {"frozenset": [_as_json(each) for each in value]}
    kind = type(value)
    if dataclasses.is_dataclass(kind):
        return {_name(kind): [_as_json(getattr(value, each.name)) for each in dataclasses.fields(kind)]}
    if isinstance(value, tuple):
        return {"tuple" if kind is tuple else _name(kind): [_as_json(each) for each in value]}
    raise TypeError(f"ranks cannot tell each other a {kind.__name__}; return numbers, texts, lists, tuples or dicts.")


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(each) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, its),) = value.items()
    match kind:
        case "dict":
            return {_from_json(name): _from_json(each) for name, each in its}
        case "path":
            return Path(its)
        case "tuple":
            return tuple(map(_from_json, its))
        case "frozenset":
            return frozenset(map(_from_json, its))
    found = _named(kind)
    if not (isinstance(found, type) and (dataclasses.is_dataclass(found) or issubclass(found, tuple))):
        raise TypeError(f"a rank told of a {kind}, which is neither a dataclass nor a named tuple of Synergy.")
    return found(*map(_from_json, its))


def _error_as_json(error: Exception | None) -> Any:
    """Its class and what it was made of, where that can be told; else what it says."""
    if error is None:
        return None
    try:
        arguments = [_as_json(each) for each in error.args]
    except TypeError:
        arguments = [str(error)]
    return [_name(type(error)), arguments, str(error)]


def _error_from_json(told: Any) -> Exception | None:
    if told is None:
        return None
    name, arguments, says = told
    found = _named(name)
    if isinstance(found, type) and issubclass(found, Exception):
        try:
            error = found(*map(_from_json, arguments))
        except TypeError:  # it is made of something else than it keeps
            pass
        else:
            return error
    return RuntimeError(f"{name.rpartition('.')[2]}: {says}")


def _name(kind: type) -> str:
    return kind.__name__ if kind.__module__ == builtins.__name__ else f"{kind.__module__}.{kind.__qualname__}"


def _named(name: str) -> Any:
    """A class of Python itself or of Synergy that is loaded here; None for any other name."""
    module, _, own = name.rpartition(".")
    if module and not module.startswith(("synergy_exec.", "synergy_core.")):
        return None
    return getattr(sys.modules.get(module or builtins.__name__), own, None)
