"""Measured rows as what the planner computes: groups of one family, machine and software, in columns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

from synergy_core.arrays import Floats, Ints
from synergy_core.catalog.sheets import gpu_sheet
from synergy_core.measurements._architecture import family_of, kind_of, stacked
from synergy_core.measurements._hardware import Gpus
from synergy_core.planner.machine import Machine, machine_named
from synergy_core.planner.plan import Plan, Plans, plans_of
from synergy_core.planner.software import Software


@dataclass(frozen=True, slots=True)
class Setting:
    """One way a row may have run; a row that leaves fields unstated has several, the most usual first."""

    architecture: Any
    plan: Plan
    gpus: Gpus
    software: Software


@dataclass(frozen=True, slots=True)
class Case:
    """Settings of one family, machine and software, in columns of (settings,).

    rows: which row of the file each belongs to. iter_time_s, peak_mem_bytes: measured, NaN where not. weight: of a row
    in a fit, by its trust.
    """

    family: ModuleType
    architecture: Any
    plans: Plans
    machine: Machine
    software: Software
    rows: Ints
    iter_time_s: Floats
    peak_mem_bytes: Floats
    weight: Floats

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class Measured:
    """What `cases` needs of a row."""

    settings: tuple[Setting, ...]
    iter_time_s: float
    peak_mem_bytes: float
    weight: float


def cases(rows: Iterable[Measured], *, every_setting: bool = False) -> list[Case]:
    """Groups, in order of first appearance. every_setting: all that a row may have been, not only the most usual."""
    groups: dict[tuple[Any, ...], list[tuple[int, Measured, Setting]]] = {}
    for at, row in enumerate(rows):
        for setting in row.settings if every_setting else row.settings[:1]:
            key = (kind_of(setting.architecture), setting.gpus, setting.software)
            groups.setdefault(key, []).append((at, row, setting))
    return [
        Case(
            family=family_of(members[0][2].architecture),
            architecture=stacked(setting.architecture for _, _, setting in members),
            plans=plans_of([setting.plan for _, _, setting in members]),
            machine=machine_of(gpus),
            software=software,
            rows=np.array([at for at, _, _ in members]),
            iter_time_s=np.array([row.iter_time_s for _, row, _ in members]),
            peak_mem_bytes=np.array([row.peak_mem_bytes for _, row, _ in members]),
            weight=np.array([row.weight for _, row, _ in members]),
        )
        for (_, gpus, software), members in groups.items()
    ]


@cache
def machine_of(gpus: Gpus) -> Machine:
    """The catalog's node type, with what the file states of it."""
    result = machine_named(gpus.name, gpus.gpus_per_node, gpus.network_bytes_per_s)
    if gpus.memory_bytes:
        result = replace(result, memory_bytes=gpus.memory_bytes)
    like = gpu_sheet(gpus.memory_like) if gpus.memory_like else None
    if like is None:
        return result
    rate = like.memory_bandwidth_bytes_per_s * (result.memory_bytes / like.memory_bytes)
    return replace(result, gpu=replace(result.gpu, memory_bandwidth_bytes_per_s=rate))
