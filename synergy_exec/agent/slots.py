"""What a node's slots are made of."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for one rank.

    cores: of the CPU, that its worker may use. cpus: how many of them are its own; a part of one that slots share. gpu:
    the index of its CUDA device; None where cores are the slot.
    """

    cores: tuple[int, ...]
    cpus: float
    gpu: int | None


def divide(cores: Sequence[int], slots: int, *, gpus: bool) -> list[Slot]:
    """Slots with equal parts of the cores, each core in one slot; with more slots than cores, slots share them."""
    share = len(cores) // slots
    parts = [
        tuple(cores[slot * share : (slot + 1) * share]) if share else (cores[slot % len(cores)],)
        for slot in range(slots)
    ]
    others = Counter(parts)
    return [Slot(part, float(share or 1 / others[part]), slot if gpus else None) for slot, part in enumerate(parts)]


def own_cores() -> list[int]:
    """The CPU cores that this process may use."""
    return sorted(os.sched_getaffinity(0))
