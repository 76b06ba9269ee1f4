"""Which of a node's cores each rank has: none of them twice while there are enough, and what is lacking made up for.

CPUs are counted in thousandths of a core, so that they add up exactly. A rank gets whole cores of its own first, and
the rest on a core that others may have parts of; on such a core the kernel decides between those that want to run.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Owner = tuple[int, int]
"""Run and rank."""
WHOLE = 1000
"""Thousandths of a core."""


@dataclass(frozen=True, slots=True)
class CoreGrant:
    """cores: on which it may run. cpus: of them, that are its own. asked: how many were asked for."""

    cores: tuple[int, ...]
    cpus: float
    asked: float


class Cores:
    """The cores of one node, and who has what of them."""

    def __init__(self, cores: Sequence[int]) -> None:
        self._cores = tuple(cores)
        self._asked: dict[Owner, int] = {}
        self._parts: dict[Owner, dict[int, int]] = {}
        self._others: dict[Owner, frozenset[int]] = {}

    def take(self, owner: Owner, cpus: float) -> set[Owner]:
        """That many CPUs for an owner from now on; whose grants are others than before, its own among them."""
        self._asked[owner] = max(1, round(cpus * WHOLE))
        before = self._parts.pop(owner, {})
        self._parts[owner] = self._found(self._asked[owner], before)
        return {owner} | self._make_up()

    def occupy(self, owner: Owner, cores: Iterable[int]) -> None:
        """An owner runs on these whole cores, whoever else does; others are given them last."""
        self._others[owner] = frozenset(cores)

    def leave(self, owner: Owner) -> set[Owner]:
        """An owner has nothing any more; whose grants have grown by it."""
        for held in (self._asked, self._parts, self._others):
            held.pop(owner, None)
        return self._make_up()

    def grant(self, owner: Owner) -> CoreGrant:
        """What an owner has. One for whom nothing was left runs beside others, on the core with the least on it."""
        parts = self._parts[owner]
        cores = tuple(sorted(parts)) or (min(self._cores, key=self._load),)
        return CoreGrant(cores, sum(parts.values()) / WHOLE, self._asked[owner] / WHOLE)

    def _make_up(self) -> set[Owner]:
        """Those that lack something, first come first served, get what is free."""
        grown: set[Owner] = set()
        for owner, asked in self._asked.items():
            parts = self._parts[owner]
            lacking = asked - sum(parts.values())
            more = self._found(lacking, parts) if lacking else {}
            for core, part in more.items():
                parts[core] = parts.get(core, 0) + part
                grown.add(owner)
        return grown

    def _found(self, wanted: int, liked: Iterable[int]) -> dict[int, int]:
        """Thousandths of free cores that add up to `wanted`, or to all that is free; of like ones, those liked."""
        liked = frozenset(liked)
        free = {core: WHOLE - load for core in self._cores if (load := self._load(core)) < WHOLE}
        found: dict[int, int] = {}
        for core in sorted(free, key=lambda core: (core not in liked, core)):
            if wanted >= WHOLE and free[core] == WHOLE:
                found[core] = WHOLE
                wanted -= WHOLE
        left = {core: room for core, room in free.items() if core not in found}
        while wanted and left:
            # The fullest that has room for it, so that whole cores stay whole; else as few cores as possible.
            fits = [core for core, room in left.items() if room >= wanted]
            core = (
                min(fits, key=lambda core: (left[core], core not in liked, core)) if fits else max(left, key=left.get)  # type: ignore[arg-type]
            )
            found[core] = min(wanted, left.pop(core))
            wanted -= found[core]
        return found

    def _load(self, core: int) -> int:
        shared = sum(parts.get(core, 0) for parts in self._parts.values())
        return shared + WHOLE * sum(core in cores for cores in self._others.values())


# What a node's slots are made of.


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
