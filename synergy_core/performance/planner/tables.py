"""Planner results for schedulers: the best plan and its step time by GPU type and number of GPUs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from synergy_core.performance.planner.bands import memory_band
from synergy_core.performance.planner.compressed import CompressedPlans, CompressedSearch, Offering, gradients_of
from synergy_core.performance.planner.families import Card, architecture_names, card_named
from synergy_core.performance.planner.machine import constants_for, machine_named, software_named
from synergy_core.performance.planner.memory import memory, visible_bytes
from synergy_core.performance.planner.plan import Plan, Plans, plans_of
from synergy_core.performance.planner.search import Model, PlanTable, search
from synergy_core.units import Floats, Ints

Nodes = tuple[str, int]
"""A GPU type, and GPUs per node."""

SOFTWARE = "megatron"
"""Training software of planned jobs. It trains in fp16, because the oldest GPU types of mixed clusters have no bf16."""
IMAGE_TOKENS = 128
"""One image counts as this many tokens. A noise scale of 10⁶ tokens then equals 8,000 images, the noise scale of
ImageNet (McCandlish et al., arXiv 1812.06162, section 3)."""
MAX_SHARDS = 512
RUNNERS_UP = 15
"""A planner that knows true step times chooses among the predicted best plan and this many plans after it."""
PlanError = Callable[[str, str, Plan], float]
"""Returns true ÷ planned step time for (architecture, GPU type, plan). Hashable, because tables are cached by it."""


@dataclass(frozen=True, slots=True)
class PlannedTable:
    """One row for each number of GPUs on each of the requested `Nodes`, ordered by `Nodes` first.

    nodes: an index into the requested `Nodes`. step_time_s: inf if no plan fits; the row's plan is then meaningless.
    """

    nodes: Ints
    gpus: Ints
    step_time_s: Floats
    plans: Plans


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """An architecture of the catalog. seq_len: tokens per sample. checkpoint_bytes: weights and optimizer states."""

    name: str
    parameters: float
    seq_len: int
    checkpoint_bytes: float


def model_names() -> tuple[str, ...]:
    """Every architecture of the catalog."""
    return tuple(architecture_names())


@cache
def language_models() -> tuple[str, ...]:
    """Architectures of the catalog that read tokens: dense transformers and mixtures of experts."""
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
    errors: PlanError | None = None,
) -> PlannedTable:
    """The best plan of an architecture, and its step time, on each of the nodes and number of GPUs.

    errors: if given, the planner knows true step times: it multiplies predictions by the errors and chooses among the
    predicted best plan and its `RUNNERS_UP`. data_parallel_only: take tensor, pipeline and context from the fastest
    plan on the fewest GPUs that hold the model, and only vary replicas, ZeRO and recomputation. Raises InputError for a
    GPU type that is not in the catalog.
    """
    card = card_named(architecture_name)
    rows: list[tuple[int, int, float, Plan]] = []
    for at, each in enumerate(nodes):
        fixed = _smallest(architecture_name, each, global_batch) if data_parallel_only else {}
        shards = 0 if fixed is None else math.prod(fixed.values())
        wanted = tuple(count for count in counts if shards and count % shards == 0)
        best = {count: (np.inf, Plan(data=count)) for count in counts}
        if wanted:
            found = _search(card, each, wanted, global_batch, fixed or {}, keep=RUNNERS_UP if errors else 0)
            for gpus, planned_s, plan in zip(found.gpus.tolist(), found.step_time_s.tolist(), found.plans, strict=True):
                step_s = planned_s * (errors(architecture_name, each[0], plan) if errors else 1.0)
                if step_s < best[gpus][0]:
                    best[gpus] = step_s, plan
        rows += [(at, count, *best[count]) for count in counts]
    nodes_at, gpus, seconds, plans = zip(*rows, strict=True)
    return PlannedTable(np.array(nodes_at), np.array(gpus), np.array(seconds), plans_of(plans))


@cache
def memory_factors(architecture_name: str, gpu_type: str, plan: Plan) -> tuple[float, float, float]:
    """Predicted peak memory of a plan ÷ the memory that a process can use, and ends of `memory_band` where measured."""
    card, software, machine = card_named(architecture_name), software_named(SOFTWARE), machine_named(gpu_type)
    plans = plans_of([plan])
    needed = memory(card.family.work(card.architecture, plans, software), plans, software).needed
    band = memory_band(software, card.architecture)
    return float(np.max(needed)) / visible_bytes(machine), *band.near


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
    """The fastest plan for every offered compressor; None if no plan fits.

    share_bytes_per_s: each GPU's share of the network between nodes; None for that of the usual nodes.
    data_parallel_only: as in `planned_tables`.
    """
    fixed: Mapping[str, int] | None = _smallest(architecture_name, nodes, global_batch) if data_parallel_only else {}
    if fixed is None or gpus % math.prod(fixed.values()):
        return None
    machine = machine_named(*nodes)
    if share_bytes_per_s is not None:
        machine = replace(machine, network_bytes_per_s=share_bytes_per_s)
    constants = constants_for(machine, software_named(SOFTWARE))
    return compressed_search(architecture_name, offering).plans(machine, constants, gpus, global_batch, fixed)


@cache
def compressed_search(architecture_name: str, offering: Offering) -> CompressedSearch:
    """The search of an architecture's compressed plans, with the software of `planned_tables`."""
    card = card_named(architecture_name)
    model = Model(card.family, card.architecture, software_named(SOFTWARE))
    return CompressedSearch(model, gradients_of(model), offering)


@cache
def _smallest(architecture_name: str, nodes: Nodes, global_batch: int) -> Mapping[str, int] | None:
    """Degrees of the plan without replicas on the fewest GPUs (a power of two) that hold the model, if any do."""
    card = card_named(architecture_name)
    shards = 1
    while shards <= MAX_SHARDS:
        found = _search(card, nodes, (shards,), global_batch, {"data": 1}).best()
        if len(found):
            plan = found.plans.plan(0)
            return {"tensor": plan.tensor, "pipeline": plan.pipeline, "context": plan.context}
        shards *= 2
    return None


def _search(
    card: Card, nodes: Nodes, counts: tuple[int, ...], global_batch: int, fixed: Mapping[str, int], keep: int = 0
) -> PlanTable:
    software, machine = software_named(SOFTWARE), machine_named(*nodes)
    model = card.family, card.architecture, machine, software, constants_for(machine, software)
    return search(*model, counts=counts, global_batch=global_batch, keep=keep, fixed=fixed)
