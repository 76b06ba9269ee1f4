"""Shares a node's CPU cores out among ranks. If there are too few, ranks get the missing part when others leave.

CPUs are counted in thousandths of a core, so that they add up exactly. A rank first gets whole cores of its own, and
the rest on a core that it shares with other ranks; there the kernel decides who runs.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path

Owner = tuple[int, int]
"""Run and rank."""
WHOLE = 1000
"""Thousandths of a core."""


@dataclass(frozen=True, slots=True)
class CoreGrant:
    """CPUs of a rank. cores: where it may run. cpus: its share of these cores, which may be less than it requested."""

    cores: tuple[int, ...]
    cpus: float


class Cores:
    """The cores of one node and their owners. Either all runs of a node have shares of them or none has."""

    def __init__(self, cores: Sequence[int]) -> None:
        self._cores = tuple(cores)
        self._asked: dict[Owner, int] = {}
        self._parts: dict[Owner, dict[int, int]] = {}

    def take(self, owner: Owner, cpus: float) -> set[Owner]:
        """Gives an owner `cpus` CPUs, if free. Returns the owners whose grants have changed, including this one."""
        self._asked[owner] = max(1, round(cpus * WHOLE))
        before = self._parts.pop(owner, {})
        self._parts[owner] = self._found(self._asked[owner], before)
        return {owner} | self._make_up()

    def leave(self, owner: Owner) -> set[Owner]:
        """Takes everything from an owner. Returns the owners whose grants have grown."""
        self._asked.pop(owner, None)
        self._parts.pop(owner, None)
        return self._make_up()

    def grant(self, owner: Owner) -> CoreGrant:
        """Returns an owner's grant. An owner without any CPUs shares the least loaded core with other owners."""
        parts = self._parts[owner]
        cores = tuple(sorted(parts)) or (min(self._cores, key=self._load),)
        return CoreGrant(cores, sum(parts.values()) / WHOLE)

    def _make_up(self) -> set[Owner]:
        """Gives free CPUs to owners that lack some, in the order of their requests; returns those that got any."""
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
        """Chooses `wanted` free thousandths of cores, or fewer if fewer are free; prefers `liked` cores."""
        liked = frozenset(liked)
        free = {core: WHOLE - load for core in self._cores if (load := self._load(core)) < WHOLE}
        found: dict[int, int] = {}
        for core in sorted(free, key=lambda core: (core not in liked, core)):
            if wanted >= WHOLE and free[core] == WHOLE:
                found[core] = WHOLE
                wanted -= WHOLE
        left = {core: room for core, room in free.items() if core not in found}
        while wanted and left:
            # Best fit keeps whole cores free. If no core has enough room, take the one with the most room.
            fits = [core for core, room in left.items() if room >= wanted]
            core = (
                min(fits, key=lambda core: (left[core], core not in liked, core)) if fits else max(left, key=left.get)  # type: ignore[arg-type]
            )
            found[core] = min(wanted, left.pop(core))
            wanted -= found[core]
        return found

    def _load(self, core: int) -> int:
        return sum(parts.get(core, 0) for parts in self._parts.values())


# The slots of a node.


@dataclass(frozen=True, slots=True)
class Slot(CoreGrant):
    """A place for one rank.

    cores: CPU cores that its worker may use. cpus: its share of them, less than 1 if slots share a core. gpu: index of
    its CUDA device; None for a slot of CPU cores.
    """

    gpu: int | None


def divide(cores: Sequence[int], slots: int, *, gpus: bool) -> list[Slot]:
    """Divides the cores equally into slots; if there are more slots than cores, slots share cores."""
    share = len(cores) // slots
    parts = [
        tuple(cores[slot * share : (slot + 1) * share]) if share else (cores[slot % len(cores)],)
        for slot in range(slots)
    ]
    others = Counter(parts)
    return [Slot(part, float(share or 1 / others[part]), slot if gpus else None) for slot, part in enumerate(parts)]


def near_gpus(cores: Sequence[int], numas: Sequence[int], sysfs: Path = Path("/sys")) -> list[int]:
    """The cores in such an order that `divide` gives each GPU cores of its own NUMA node, while these last.

    numas: NUMA node of each GPU, -1 if it is unknown. GPUs of a NUMA node share its cores equally. Both hyperthreads of
    a physical core go to the same GPU, unless equal shares split one.
    """

    def first_sibling(core: int) -> int:
        return min(_listed(sysfs / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list"), default=core)

    left = [list(each) for _, each in groupby(sorted(cores, key=first_sibling), first_sibling)]
    own = {numa: set(cores).intersection(_listed(sysfs / f"devices/system/node/node{numa}/cpulist")) for numa in numas}
    share = len(cores) // len(numas)
    parts: list[list[int]] = [[] for _ in numas]
    for fills in (False, True):
        for part, numa in zip(parts, numas, strict=True):
            most = share if fills else min(share, len(own[numa]) // numas.count(numa))
            for physical in sorted(left, key=own[numa].isdisjoint):
                room = most - len(part)
                if fills or len(physical) <= room:
                    part += physical[:room]
                    del physical[:room]
    return list(chain(*parts, *left))


def _listed(file: Path) -> list[int]:
    """The numbers in a file such as 0-3,8-11; none if there is no such file."""
    ranges = [part.partition("-") for part in file.read_text().strip().split(",") if part] if file.exists() else []
    return [number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)]


def own_cores() -> list[int]:
    """The CPU cores that this process may use."""
    return sorted(os.sched_getaffinity(0))
