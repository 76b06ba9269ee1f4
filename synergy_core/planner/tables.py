"""What schedulers read of the planner: per GPU type and number of GPUs, how long a step takes, and under which plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from synergy_core.arrays import Floats, Ints
from synergy_core.planner.compressed import CompressedPlans, CompressedSearch, gradients_of
from synergy_core.planner.constants import constants_for
from synergy_core.planner.families import Card, architecture_names, card_named
from synergy_core.planner.machine import machine_named
from synergy_core.planner.plan import Plan, Plans, plans_of
from synergy_core.planner.plan_table import PlanTable
from synergy_core.planner.search import Model, search
from synergy_core.planner.shards import Offering
from synergy_core.planner.software import software_named

Nodes = tuple[str, int]
"""A GPU type, and how many GPUs a node has."""

SOFTWARE = "megatron"
"""What jobs train with on clusters of mixed GPU types: fp16, since the oldest of them have no bf16."""
IMAGE_TOKENS = 128
"""What an image counts for, so that a noise scale of 10⁶ tokens is one of 8,000 images (ImageNet's, McCandlish et al.,
arXiv 1812.06162, section 3)."""
MOST_SHARDS = 512


@dataclass(frozen=True, slots=True)
class PlannedTable:
    """One row per kind of nodes and number of GPUs, nodes outermost.

    nodes: an index into those asked about. step_time_s: inf where nothing fits; `plans` then mean nothing.
    """

    nodes: Ints
    gpus: Ints
    step_time_s: Floats
    plans: Plans


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """An architecture of the catalog, as schedulers see it.

    seq_len: tokens of a sample. checkpoint_bytes: weights and what the optimizer keeps.
    """

    name: str
    parameters: float
    seq_len: int
    checkpoint_bytes: float


def model_names() -> tuple[str, ...]:
    """Every architecture of the catalog."""
    return tuple(architecture_names())


@cache
def language_models() -> tuple[str, ...]:
    """Those of them that read tokens: dense transformers and mixtures of experts."""
    return tuple(name for name in architecture_names() if card_named(name).architecture.limits().seq_len)


@cache
def model_named(name: str) -> PlannedModel:
    """An architecture of the catalog. Raises InputError with the nearest match for an unknown one."""
    card = card_named(name)
    software = software_named(SOFTWARE)
    parameters = float(card.architecture.parameters())
    checkpoint_bytes = parameters * (software.weight_bytes + software.optimizer_bytes)
    tokens = card.architecture.limits().seq_len or IMAGE_TOKENS
    return PlannedModel(name, parameters, tokens, checkpoint_bytes)


@cache
def planned_tables(
    architecture_name: str,
    nodes: tuple[Nodes, ...],
    counts: tuple[int, ...],
    global_batch: int,
    *,
    data_parallel_only: bool = False,
) -> PlannedTable:
    """Step times of an architecture on each kind of nodes and number of GPUs, under the best plan for each.

    data_parallel_only: under one plan instead, that which fits on the fewest GPUs (tensor × pipeline × context; the
    fastest of those on as many), in as many replicas as there is room for, ZeRO and recomputation still free. Raises
    InputError for a GPU type that the catalog does not have.
    """
    card = card_named(architecture_name)
    nodes_at, gpus, seconds, plans = [], [], [], []
    for at, each in enumerate(nodes):
        fixed = _smallest(architecture_name, each, global_batch) if data_parallel_only else {}
        shards = 0 if fixed is None else int(np.prod(list(fixed.values()), dtype=int))
        wanted = tuple(count for count in counts if shards and count % shards == 0)
        found = _search(card, each, wanted, global_batch, fixed or {}).best() if wanted else None
        rows = {} if found is None else {count: row for row, count in enumerate(found.gpus.tolist())}
        for count in counts:
            row = rows.get(count)
            nodes_at.append(at)
            gpus.append(count)
            seconds.append(np.inf if row is None or found is None else float(found.step_time_s[row]))
            plans.append(Plan(data=count) if row is None or found is None else found.plans.plan(row))
    return PlannedTable(np.array(nodes_at), np.array(gpus), np.array(seconds), plans_of(plans))


@cache
def compressed_plans(
    architecture_name: str,
    nodes: Nodes,
    gpus: int,
    global_batch: int,
    offering: Offering,
    *,
    share_bytes_per_s: float | None = None,
    data_parallel_only: bool = False,
) -> CompressedPlans | None:
    """The fastest plan for every compressor offered, on so many GPUs; None where nothing fits.

    share_bytes_per_s: each GPU's of the network between nodes; None: as of the usual nodes. data_parallel_only: as of
    `planned_tables`.
    """
    fixed: Mapping[str, int] | None = _smallest(architecture_name, nodes, global_batch) if data_parallel_only else {}
    if fixed is None or gpus % int(np.prod(list(fixed.values()), dtype=int)):
        return None
    machine = machine_named(*nodes)
    if share_bytes_per_s is not None:
        machine = replace(machine, network_bytes_per_s=share_bytes_per_s)
    search, software = compressed_search(architecture_name, offering), software_named(SOFTWARE)
    return search.plans(machine, constants_for(machine, software), gpus, global_batch, fixed)


@cache
def compressed_search(architecture_name: str, offering: Offering) -> CompressedSearch:
    """What may be asked of an architecture's compressors, by the software of `planned_tables`."""
    card = card_named(architecture_name)
    model = Model(card.family, card.architecture, software_named(SOFTWARE), card.architecture.limits())
    return CompressedSearch(model, gradients_of(model), offering)


@cache
def _smallest(architecture_name: str, nodes: Nodes, global_batch: int) -> Mapping[str, int] | None:
    """Degrees of the plan without replicas on the fewest GPUs that hold the model; None if there is none."""
    card = card_named(architecture_name)
    shards = 1
    while shards <= MOST_SHARDS:
        found = _search(card, nodes, (shards,), global_batch, {"data": 1}).best()
        if len(found):
            plan = found.plans.plan(0)
            return {"tensor": plan.tensor, "pipeline": plan.pipeline, "context": plan.context}
        shards *= 2
    return None


def _search(
    card: Card, nodes: Nodes, counts: tuple[int, ...], global_batch: int, fixed: Mapping[str, int]
) -> PlanTable:
    software = software_named(SOFTWARE)
    machine = machine_named(*nodes)
    constants = constants_for(machine, software)
    return search(
        card.family,
        card.architecture,
        machine,
        software,
        constants,
        counts=counts,
        global_batch=global_batch,
        fixed=fixed,
    )
