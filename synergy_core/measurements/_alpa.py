"""The plans that Alpa's search had to choose from for measured best plans, and how long the best of them takes.

What Alpa does whatever the plan (alpa-projects/alpa, benchmark/alpa and alpa/model; Zheng et al., arXiv 2201.12023):
16 micro-batches where the batch allows, every layer computed again in the backward pass, 1F1B without interleaving, no
sequence parallelism, meshes whose sides are powers of two, gradients reduced or scattered over the replicas
(`prefer_reduce_scatter`). XLA holds 90 % of the GPU's memory as its pool, and plans must fit into that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from synergy_core.arrays import Floats, Ints
from synergy_core.catalog import read_yaml
from synergy_core.catalog.sheets import gpu_sheets, node_sheets
from synergy_core.errors import InputError
from synergy_core.measurements._architecture import kind_of, stacked
from synergy_core.measurements.best_plans import BestPlan
from synergy_core.planner import constants
from synergy_core.planner.constants import Constants
from synergy_core.planner.machine import Machine, machine_named
from synergy_core.planner.memory import memory
from synergy_core.planner.plan import Plan, Plans, Recompute, plans_of
from synergy_core.planner.software import Software, software_named
from synergy_core.planner.step_time import step_time
from synergy_core.planner.work import Work

MICRO_BATCHES = 16
POOL = 0.9
"""The part of the GPU's memory that XLA takes for itself (XLA_PYTHON_CLIENT_MEM_FRACTION in Alpa's launcher)."""
GIGA_IS_GIBI = 1.024**3
"""Data sheets' gigabytes of memory are binary ones."""
REDUCE, SCATTER = 0, 2
"""The ZeRO stages that Alpa's two ways amount to: gradients all-reduced, or scattered with each replica's part of the
optimizer."""
CATALOG = Path(constants.__file__).parents[1] / "catalog"


@dataclass(frozen=True, slots=True)
class Candidates:
    """Plans of rows that share a family, machine and software, in columns (plans,); a row's plans follow each other.

    rows, starts, gpus: (rows,): which row of the file, where its plans begin, its GPUs.
    """

    work: Work
    plans: Plans
    machine: Machine
    software: Software
    rows: Ints
    starts: Ints
    gpus: Ints

    def best(self, c: Constants, loss: float) -> tuple[Floats, Ints]:
        """(rows,) twice: seconds of the fastest plan, and which of the plans it is.

        loss: measured times grow beyond the best plan of ours as (GPUs)^loss. An empirical exponent: the table does
        not tell which plans ran, so whether Alpa chose worse ones or ran them slower is not known.
        """
        total = step_time(self.work, self.plans, self.machine, self.software, c).total_s
        seconds = np.minimum.reduceat(total, self.starts)
        stops = np.append(self.starts[1:], len(total))
        which = [start + np.argmin(total[start:stop]) for start, stop in zip(self.starts, stops, strict=True)]
        return seconds * self.gpus.astype(float) ** loss, np.array(which)


def candidates(rows: Sequence[BestPlan]) -> tuple[list[Candidates], dict[int, str]]:
    """Groups of candidates, and by row that has none the reason."""
    reasons: dict[int, str] = {}
    groups: dict[tuple[Any, ...], list[tuple[int, BestPlan, list[Plan]]]] = {}
    for at, row in enumerate(rows):
        if row.architecture is None:
            reasons[at] = f"no architecture of {row.model} in the catalog"
            continue
        try:
            machine_of(row)
            plans = list(plans_for(row))
        except InputError as error:
            reasons[at] = str(error)
            continue
        if not plans:
            reasons[at] = f"no split into powers of two of {row.gpus} GPUs divides the batch of {row.global_batch}"
            continue
        key = (kind_of(row.architecture), row.gpu_type, row.gpus_per_node)
        groups.setdefault(key, []).append((at, row, plans))
    return [_candidates(members, reasons) for members in groups.values()], reasons


def software_of(row: BestPlan) -> Software:
    """What reads sequences runs in fp16, convolutions in fp32."""
    return software_named("alpa" if row.architecture.limits().seq_len else "alpa-fp32")


def machine_of(row: BestPlan) -> Machine:
    """Where it ran: one node, or several, of which it used some GPUs each, with all of their network."""
    return _node(row.gpu_type, row.gpus_per_node)


@cache
def _node(gpu_type: str, gpus: int) -> Machine:
    """A node type with just so many GPUs, or some GPUs of the usual one; of memory sizes the largest."""
    sheets = gpu_sheets()
    chip = re.sub(r"-[0-9]+gb$", "", gpu_type)
    own = [each for each in node_sheets().values() if re.sub(r"-[0-9]+gb$", "", each.gpu) == chip]
    own.sort(key=lambda each: (each.gpus_per_node != gpus, not each.usual, -sheets[each.gpu].memory_bytes))
    if not own or own[0].gpus_per_node < gpus:
        return machine_named(gpu_type, gpus)
    return machine_named(own[0].name, gpus, own[0].network_bytes_per_s / gpus)


def plans_for(row: BestPlan) -> Iterator[Plan]:
    """What Alpa may choose for the row, whether or not it fits."""
    limits = row.architecture.limits()
    accumulation = next(each for each in _powers(MICRO_BATCHES)[::-1] if row.global_batch % each == 0)
    for tensor in _powers(row.gpus):
        for pipeline in _powers(row.gpus // tensor):
            data = row.gpus // tensor // pipeline
            divides = tensor * pipeline * data == row.gpus and limits.heads % tensor == 0
            if not divides or pipeline > limits.layers or row.global_batch % (accumulation * data):
                continue
            for expert in _powers(data):
                if limits.experts % expert or data % expert:
                    continue
                for zero in (REDUCE, SCATTER) if data > 1 else (REDUCE,):
                    yield Plan(
                        tensor=tensor,
                        pipeline=pipeline,
                        data=data,
                        expert=expert,
                        micro_batch=row.global_batch // accumulation // data,
                        accumulation=accumulation,
                        zero=zero,
                        recompute=Recompute.FULL,
                    )


def _powers(most: int) -> list[int]:
    """Powers of two up to `most`."""
    return [1 << each for each in range(most.bit_length())]


def _candidates(members: list[tuple[int, BestPlan, list[Plan]]], reasons: dict[int, str]) -> Candidates:
    """Plans that fit; of a row that ran although none should fit, the one that needs least, with a remark."""
    first = members[0][1]
    machine, software = machine_of(first), software_of(first)
    owner = np.repeat([at for at, _, _ in members], [len(plans) for _, _, plans in members])
    every = [row.architecture for _, row, plans in members for _ in plans]
    plans = plans_of([plan for _, _, some in members for plan in some])
    needed = memory(first.family.work(stacked(every), plans, software), plans, software).reserved
    fits = needed <= POOL * machine.memory_bytes * GIGA_IS_GIBI
    for at, row, _ in members:
        own = np.flatnonzero(owner == at)
        if not fits[own].any():
            least = own[np.argmin(needed[own])]
            fits[least] = True
            reasons[at] = f"no plan of {row.model} on {row.gpus} fits; the leanest is timed"
    kept = np.flatnonzero(fits)
    plans, owner = plans.take(kept), owner[kept]
    starts = np.flatnonzero(np.append(True, owner[1:] != owner[:-1]))
    return Candidates(
        work=first.family.work(stacked([every[at] for at in kept]), plans, software),
        plans=plans,
        machine=machine,
        software=software,
        rows=owner[starts],
        starts=starts,
        gpus=plans.gpus[starts],
    )


@cache
def search_loss(software: str) -> float:
    """Fitted exponent of `Candidates.best`, of a software; 0 where it was not fitted."""
    path = CATALOG / "constants" / f"{software}.yaml"
    return float(read_yaml(path).get("search_loss", 0.0)) if path.exists() else 0.0
