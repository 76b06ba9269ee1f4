"""Measured step times under the best plan that another system found. Files do not state this plan; it is searched here.

Columns: model_family, model_size, global_batch, gpu, n_nodes, gpus_per_node (GPUs used on each node), n_gpus,
iter_time_s. The architecture is the catalog's arena-<family>-<size>.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from synergy_core.commands.measurements._rows import family_of, scalars_of, sheet_name, stacked
from synergy_core.commands.measurements._table import Measurements, Table
from synergy_core.errors import InputError
from synergy_core.performance.catalog import CATALOG, gpu_sheets, gpu_type_named, node_sheets, read_yaml
from synergy_core.performance.planner.families import architecture_named, architecture_names
from synergy_core.performance.planner.machine import Constants, Machine, Software, machine_named, software_named
from synergy_core.performance.planner.memory import memory
from synergy_core.performance.planner.plan import Plan, Plans, Recompute, plans_of
from synergy_core.performance.planner.step_time import step_time
from synergy_core.performance.planner.work import Work
from synergy_core.units import Floats, Ints

DESCRIPTION = "step times of best plans (model_family, model_size, global_batch, gpu, n_gpus, iter_time_s)"

NODE_GPUS = {"v100": 16, "a40": 2}
"""GPUs per node in Arena's measurements (its README). A plan on fewer GPUs uses some GPUs of one node."""
_CATALOG_FAMILY = {"wide_resnet": "wresnet"}


@dataclass(frozen=True, slots=True)
class BestPlan:
    """One measured step under a best plan. architecture: the catalog's; None if it has none.

    gpus_per_node: all GPUs of a node if the plan used one node, else the GPUs used on each node.
    """

    line: int
    model: str
    architecture: Any
    gpu_type: str
    gpus: int
    gpus_per_node: int
    global_batch: int
    iter_time_s: float


class BestPlans(Measurements):
    """Rows of `BestPlan`."""


def recognises(columns: tuple[str, ...]) -> bool:
    """Whether a file with these columns has this format."""
    return "model_family" in columns and "model_size" in columns


def read(table: Table, *, model: str | None = None, gpu_type: str | None = None) -> BestPlans:
    """Parses the rows of `table`. model, gpu_type: keep only these. Raises InputError for impossible cells."""
    table.need("model_family", "model_size", "global_batch", "gpu", "n_gpus", "iter_time_s")
    rows = []
    for row in table.rows:
        gpus, batch, seconds = row.whole("n_gpus"), row.whole("global_batch"), row.number("iter_time_s")
        nodes, used = row.whole("n_nodes"), row.whole("gpus_per_node")
        if gpus is None or batch is None or seconds is None:
            empty = "n_gpus" if gpus is None else "global_batch" if batch is None else "iter_time_s"
            row.refuse(empty, "a positive number")
        if nodes and used and nodes * used != gpus:
            row.fail(f"got n_gpus {gpus}, expected n_nodes {nodes} · gpus_per_node {used} = {nodes * used}.")
        family, size = row.text("model_family"), row.text("model_size")
        known = f"arena-{_CATALOG_FAMILY.get(family, family)}-{size.lower()}"
        architecture = architecture_named(known)[1] if known in architecture_names() else None
        found = gpu_type_named(sheet_name(row.text("gpu"), None))
        node = (used if nodes and nodes > 1 else max(NODE_GPUS.get(found, 0), used or gpus)) or gpus
        rows.append(BestPlan(row.line, f"{family}-{size}", architecture, found, gpus, node, batch, seconds))
    return BestPlans(table.path, tuple(rows)).only(model, gpu_type)


# Enumerates the plans that Alpa's search chose from in these measurements, and predicts the fastest plan's step time.
#
# Alpa always uses (alpa-projects/alpa, benchmark/alpa and alpa/model; Zheng et al., arXiv 2201.12023): 16
# micro-batches if the batch allows, full recomputation of every layer, 1F1B without interleaving, no sequence
# parallelism, and meshes whose sides are powers of two. It all-reduces or reduce-scatters gradients over the replicas
# (`prefer_reduce_scatter`). XLA allocates 90 % of the GPU's memory as its pool, and plans must fit into the pool.


MICRO_BATCHES = 16
POOL_FRACTION = 0.9
"""Fraction of the GPU's memory in XLA's pool (XLA_PYTHON_CLIENT_MEM_FRACTION in Alpa's launcher)."""
GIB_PER_GB = 1.024**3
"""Bytes of a GiB ÷ bytes of a GB: a data sheet's GB of memory are in fact GiB."""
REDUCE, SCATTER = 0, 2
"""ZeRO stages equivalent to Alpa's two choices: all-reduced gradients, or gradients and optimizer states sharded over
the replicas."""


@dataclass(frozen=True, slots=True)
class CandidatePlans:
    """Plans of rows with the same family, machine and software, in columns (plans,). A row's plans are contiguous.

    rows, starts: (rows,), each row's index in the file, and the index of its first plan.
    """

    work: Work
    plans: Plans
    machine: Machine
    software: Software
    rows: Ints
    starts: Ints

    def best(self, c: Constants, loss: float) -> tuple[Floats, Ints]:
        """Step time of each row's fastest plan, seconds, and the index of that plan; both (rows,).

        loss: empirical exponent; measured times exceed those of our best plan by a factor (GPUs)^loss. The files do not
        state which plans ran, so it is unknown whether Alpa chose worse plans or ran them slower.
        """
        total = step_time(self.work, self.plans, self.machine, self.software, c).total_s
        parts = np.split(total, self.starts[1:])
        best: Ints = self.starts + np.array([np.argmin(part) for part in parts])
        return total[best] * self.plans.gpus[best].astype(float) ** loss, best


def candidates(rows: Sequence[BestPlan]) -> tuple[list[CandidatePlans], dict[int, str]]:
    """Groups the candidate plans of all rows. Also returns, by row, why the row has no candidate or none that fits."""
    reasons: dict[int, str] = {}
    groups: dict[tuple[Any, ...], list[tuple[int, BestPlan, list[Plan]]]] = {}
    for index, row in enumerate(rows):
        if row.architecture is None:
            reasons[index] = f"no architecture of {row.model} in the catalog"
            continue
        try:
            machine_of(row)
            plans = list(plans_for(row))
        except InputError as error:
            reasons[index] = str(error)
            continue
        if not plans:
            reasons[index] = f"no split of {row.gpus} GPUs into powers of two divides the batch of {row.global_batch}"
            continue
        key = (scalars_of(row.architecture), row.gpu_type, row.gpus_per_node)
        groups.setdefault(key, []).append((index, row, plans))
    return [_fitting(members, reasons) for members in groups.values()], reasons


def _fitting(members: list[tuple[int, BestPlan, list[Plan]]], reasons: dict[int, str]) -> CandidatePlans:
    """Keeps the plans that fit into memory. If none of a row fits, keeps the one that needs least and adds a reason."""
    first = members[0][1]
    family, machine = family_of(first.architecture), machine_of(first)
    # Models of sequences run in fp16, convolutional models in fp32.
    software = software_named("alpa" if first.architecture.limits().seq_len else "alpa-fp32")
    owner = np.repeat([index for index, _, _ in members], [len(plans) for _, _, plans in members])
    every = [row.architecture for _, row, plans in members for _ in plans]
    plans = plans_of([plan for _, _, some in members for plan in some])
    needed = memory(family.work(stacked(every), plans, software), plans, software).reserved
    fits = needed <= POOL_FRACTION * machine.memory_bytes * GIB_PER_GB
    for index, row, _ in members:
        own = np.flatnonzero(owner == index)
        if not fits[own].any():
            fits[own[np.argmin(needed[own])]] = True
            reasons[index] = f"no plan of {row.model} on {row.gpus} GPUs fits; the one that needs least memory is timed"
    kept = np.flatnonzero(fits)
    plans = plans.take(kept)
    found, starts = np.unique(owner[kept], return_index=True)
    return CandidatePlans(
        family.work(stacked([every[at] for at in kept]), plans, software), plans, machine, software, found, starts
    )


@cache
def _node(gpu_type: str, gpus: int) -> Machine:
    """A node with this many GPUs: a node type of that size, else some GPUs of the usual node type with most memory."""
    sheets = gpu_sheets()
    chip = re.sub(r"-[0-9]+gb$", "", gpu_type)
    nodes = [node for node in node_sheets().values() if re.sub(r"-[0-9]+gb$", "", node.gpu) == chip]
    nodes.sort(key=lambda node: (node.gpus_per_node != gpus, not node.usual, -sheets[node.gpu].memory_bytes))
    if not nodes or nodes[0].gpus_per_node < gpus:
        return machine_named(gpu_type, gpus)
    return machine_named(nodes[0].name, gpus, nodes[0].network_bytes_per_s / gpus)


def machine_of(row: BestPlan) -> Machine:
    """The machine a row ran on. A node with only some of its GPUs in use keeps its full network bandwidth."""
    return _node(row.gpu_type, row.gpus_per_node)


def plans_for(row: BestPlan) -> Iterator[Plan]:
    """Yields every plan that Alpa may choose for a row, whether or not it fits into memory."""
    limits = row.architecture.limits()
    accumulation = next(size for size in _powers(MICRO_BATCHES)[::-1] if row.global_batch % size == 0)
    for tensor in _powers(row.gpus):
        for pipeline in _powers(row.gpus // tensor):
            data = row.gpus // tensor // pipeline
            divides = tensor * pipeline * data == row.gpus and limits.heads % tensor == 0
            if not divides or pipeline > limits.layers or row.global_batch % (accumulation * data):
                continue
            for expert in (degree for degree in _powers(data) if limits.experts % degree == data % degree == 0):
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


def _powers(maximum: int) -> list[int]:
    """Powers of two up to `maximum`."""
    return [1 << exponent for exponent in range(maximum.bit_length())]


@cache
def search_loss(software: str) -> float:
    """The exponent `loss` of `CandidatePlans.best` that was fitted for a software; 0 if none was."""
    path = CATALOG / "constants" / f"{software}.yaml"
    return float(read_yaml(path).get("search_loss", 0.0)) if path.exists() else 0.0
