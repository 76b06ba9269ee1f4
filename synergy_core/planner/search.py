"""The fastest plan of a model for every GPU count and type: enumerate, drop what cannot fit, then time the rest.

Order of pruning: what does not divide is never made (`enumerate`); of each plan the variant that needs least memory is
sized, and if that does not fit the plan is gone; of the variants that fit, those that recompute more than another one
needs to are gone; only then are step times computed. Tensor parallelism beyond a node, and beyond 8, is tried for
counts on which nothing fits without.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from synergy_core.arrays import Floats, Ints
from synergy_core.errors import InputError
from synergy_core.planner.architecture import Architecture, Family, Limits
from synergy_core.planner.constants import Constants
from synergy_core.planner.enumerate import FROM_ZERO, candidates, leanest, undominated, with_options
from synergy_core.planner.machine import Machine
from synergy_core.planner.memory import memory, usable_bytes
from synergy_core.planner.plan import Plan, Plans
from synergy_core.planner.plan_table import Infeasible, PlanTable, taken
from synergy_core.planner.reshard import holdings, moved_bytes
from synergy_core.planner.software import Software
from synergy_core.planner.step_time import StepTime, step_time
from synergy_core.planner.work import Work

MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
MOST_NODES_PER_TENSOR_GROUP = 4
LEAST_TENSOR = 8
"""Tensor parallelism tried on any node: within nodes of two GPUs alone, large models fit only at absurd prices."""
TIE = 0.01
"""Plans whose times differ by less than this part count as equally fast: finer than any prediction."""
MOST_TIED = 8
"""Equally fast plans of a count whose way from the current plan is worked out, the fastest ones."""


def search(
    family: Family,
    architecture: Architecture,
    machine: Machine,
    software: Software,
    constants: Constants,
    *,
    counts: Sequence[int],
    global_batch: int,
    micro_batches: Sequence[int] = MICRO_BATCHES,
    max_tensor: int | None = None,
    keep: int = 0,
    current: Plan | None = None,
    fixed: Mapping[str, int] | None = None,
) -> PlanTable:
    """The best plan for each count of GPUs of a machine, the next `keep`, and why counts without a plan have none.

    global_batch, micro_batches: sequences (or images). max_tensor: by default a node or 8, more if nothing else fits.
    current: what runs now; among plans within 1 % the one is taken that least has to be moved for. fixed: degrees that
    must be as given. Raises InputError for counts, batches or fixed degrees that make no sense. Tables are remembered.
    """
    (table,) = search_all(
        family,
        architecture,
        [(machine, software, constants)],
        counts=counts,
        global_batch=global_batch,
        micro_batches=micro_batches,
        max_tensor=max_tensor,
        keep=keep,
        current=current,
        fixed=fixed,
    )
    return table


def search_all(
    family: Family,
    architecture: Architecture,
    machines: Sequence[tuple[Machine, Software, Constants]],
    *,
    counts: Sequence[int],
    global_batch: int,
    micro_batches: Sequence[int] = MICRO_BATCHES,
    max_tensor: int | None = None,
    keep: int = 0,
    current: Plan | None = None,
    fixed: Mapping[str, int] | None = None,
) -> tuple[PlanTable, ...]:
    """`search` for several GPU types, a table each in the order given."""
    wanted = tuple(counts)
    if not wanted or min(wanted) < 1:
        raise InputError("GPU counts must be positive whole numbers, at least one of them.")
    if global_batch < 1:
        raise InputError(f"batch={global_batch}: expected a positive whole number.")
    common = (wanted, int(global_batch), tuple(micro_batches), max_tensor, keep, current, _pairs(fixed))
    return tuple(
        _remembered(_Keyed(family, id(family)), architecture, _of_machine(machine), software, constants, *common)
        for machine, software, constants in machines
    )


def forget() -> None:
    """Drops every table remembered."""
    _remembered.cache_clear()


class _Keyed:
    """Wraps what a table is remembered by where it has no hash of its own; holding it keeps its parts' ids taken."""

    __slots__ = ("it", "key")

    def __init__(self, it: Any, key: Any) -> None:
        self.it = it
        self.key = key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Keyed) and other.key == self.key

    def __hash__(self) -> int:
        return hash(self.key)


def _of_machine(machine: Machine) -> _Keyed:
    """A machine by its figures and its GPU's sheet, of which the catalog has one each."""
    figures = [getattr(machine, each.name) for each in fields(Machine) if each.name != "gpu"]
    return _Keyed(machine, (id(machine.gpu), *figures))


def _pairs(fixed: Mapping[str, int] | None) -> tuple[tuple[str, int], ...]:
    return tuple(sorted((fixed or {}).items()))


@dataclass(frozen=True, slots=True)
class Sized:
    """Candidate plans without options; bytes of the leanest variant of each, and whether that fits."""

    plans: Plans
    least_bytes: Floats
    fits: NDArray[np.bool_]


@lru_cache(maxsize=512)
def _remembered(
    family: _Keyed,
    architecture: Architecture,
    of_machine: _Keyed,
    software: Software,
    constants: Constants,
    counts: tuple[int, ...],
    global_batch: int,
    micro_batches: tuple[int, ...],
    max_tensor: int | None,
    keep: int,
    current: Plan | None,
    fixed: tuple[tuple[str, int], ...],
) -> PlanTable:
    """One table."""
    machine: Machine = of_machine.it
    model = Model(family.it, architecture, software, architecture.limits())
    held = dict(fixed)
    wanted = np.unique(np.asarray(counts))
    sized, beyond = sized_plans(model, machine, wanted, global_batch, micro_batches, max_tensor, held)
    plans, bytes_, parts = timed(model, machine, constants, sized.plans.take(sized.fits), held)
    order, rank = _ranked(plans, parts.total_s, keep, model, current)
    chosen = plans.take(order)
    return PlanTable(
        machine=machine,
        gpus=chosen.gpus,
        nodes=-(-chosen.gpus // machine.gpus_per_node),
        rank=rank,
        step_time_s=parts.total_s[order],
        memory_bytes=bytes_[order],
        plans=chosen,
        parts=taken(parts, order),
        infeasible=_reasons(model.limits, machine, wanted, sized, global_batch, beyond, held),
        timed=len(plans),
    )


@dataclass(frozen=True, slots=True)
class Model:
    """A model with its software: what the steps of a search have in common."""

    family: Family
    architecture: Architecture
    software: Software
    limits: Limits

    def work(self, plans: Plans) -> Work:
        """Its operators under each plan."""
        return self.family.work(self.architecture, plans, self.software)


def timed(
    model: Model, machine: Machine, constants: Constants, plans: Plans, fixed: Mapping[str, int] | None = None
) -> tuple[Plans, Floats, StepTime]:
    """Each plan with every ZeRO stage and recomputation that fits and that no other rules out; bytes and seconds."""
    variants, of = with_options(plans, fixed)
    needed = memory(model.work(variants), variants, model.software)
    kept = np.flatnonzero(np.broadcast_to(needed.fits(machine), len(variants)))
    kept = kept[undominated(variants.zero[kept], variants.recompute[kept], of[kept])]
    chosen = variants.take(kept)
    seconds = step_time(model.work(chosen), chosen, machine, model.software, constants)
    return chosen, np.asarray(needed.needed, dtype=np.float64)[kept], seconds


def sized_plans(
    model: Model,
    machine: Machine,
    counts: Ints,
    global_batch: int,
    micro_batches: Sequence[int] = MICRO_BATCHES,
    max_tensor: int | None = None,
    fixed: Mapping[str, int] | None = None,
) -> tuple[Sized, int]:
    """Candidates for the counts, and the most tensor parallelism tried: within nodes, then for counts that are left
    across them."""
    held = fixed or {}
    usual = max(machine.gpus_per_node, LEAST_TENSOR)
    within = min(max_tensor or usual, usual)
    beyond = max_tensor or max(machine.gpus_per_node * MOST_NODES_PER_TENSOR_GROUP, within)
    sized = _sized(model, machine, counts, global_batch, micro_batches, within, held)
    left = counts[~np.isin(counts, sized.plans.gpus[sized.fits])]
    if left.size and beyond > within:
        sized = _joined(sized, _sized(model, machine, left, global_batch, micro_batches, beyond, held))
    return sized, beyond


def _sized(
    model: Model,
    machine: Machine,
    counts: Ints,
    global_batch: int,
    micro_batches: Sequence[int],
    max_tensor: int,
    fixed: Mapping[str, int],
) -> Sized:
    """Candidates for the counts, each with the memory of its leanest variant."""
    plans = candidates(
        model.limits,
        counts.tolist(),
        global_batch,
        micro_batches=micro_batches,
        max_tensor=max(max_tensor, fixed.get("tensor", 1)),
        fixed=fixed,
    )
    plans = plans.take(laid_out(plans, machine))
    lean = leanest(plans, fixed)
    needed = memory(model.work(lean), lean, model.software)
    return Sized(plans, np.asarray(needed.needed), np.asarray(needed.fits(machine)))


def laid_out(plans: Plans, machine: Machine) -> NDArray[np.bool_]:
    """Plans whose tensor-parallel groups fill nodes evenly; on one node anything does."""
    node = machine.gpus_per_node
    result: NDArray[np.bool_] = (node % plans.tensor == 0) | (plans.tensor % node == 0) | (plans.gpus <= node)
    return result


def _joined(first: Sized, second: Sized) -> Sized:
    columns = {
        each.name: np.append(getattr(first.plans, each.name), getattr(second.plans, each.name))
        for each in fields(Plans)
    }
    return Sized(Plans(**columns), np.append(first.least_bytes, second.least_bytes), np.append(first.fits, second.fits))


def _ranked(
    plans: Plans, seconds: Floats, keep: int, model: Model, current: Plan | None
) -> tuple[NDArray[np.int64], Ints]:
    """Rows of the best 1 + keep plans of every count, and their ranks."""
    order = np.lexsort((seconds, plans.gpus))
    if current is not None:
        order = _nearest_first(order, plans, seconds, model, current)
    sorted_gpus = plans.gpus[order]
    starts = np.searchsorted(sorted_gpus, sorted_gpus)
    rank = np.arange(len(order)) - starts
    return order[rank <= keep], rank[rank <= keep]


def _nearest_first(
    order: NDArray[np.int64], plans: Plans, seconds: Floats, model: Model, current: Plan
) -> NDArray[np.int64]:
    """The order with the plan that is cheapest to reach in front of those of its count that are as fast."""
    held = holdings(model.family, model.architecture, model.software)
    result = order.copy()
    gpus = plans.gpus[order]
    for start in np.flatnonzero(np.append(True, gpus[1:] != gpus[:-1])[: len(gpus)]):
        stop = np.searchsorted(gpus, gpus[start], side="right")
        group = order[start:stop]
        tied = group[seconds[group] <= seconds[group[0]] * (1.0 + TIE)][:MOST_TIED]
        moved = [moved_bytes(held, current, plans.plan(each)).sum() for each in tied.tolist()]
        front = int(np.argmin(moved))
        result[start : start + front + 1] = np.append(group[front], group[:front])
    return result


def _reasons(
    limits: Limits,
    machine: Machine,
    counts: Ints,
    sized: Sized,
    global_batch: int,
    max_tensor: int,
    fixed: Mapping[str, int],
) -> tuple[Infeasible, ...]:
    """Why each count without a plan has none."""
    gpus = sized.plans.gpus
    leanest_first = np.lexsort((sized.least_bytes, gpus))
    found, first = np.unique(gpus[leanest_first], return_index=True)
    lean_row = dict(zip(found.tolist(), leanest_first[first].tolist(), strict=True))
    feasible = np.isin(counts, gpus[sized.fits])
    tensors = limits.tensors(max_tensor)
    return tuple(
        _too_large(sized, lean_row[each], machine)
        if each in lean_row
        else _held_apart(each, fixed) or _indivisible(limits, each, global_batch, tensors)
        for each in counts[~feasible].tolist()
    )


def _too_large(sized: Sized, row: int, machine: Machine) -> Infeasible:
    plan, needed = leanest(sized.plans.take(np.array([row]))).plan(0), float(sized.least_bytes[row])
    usable = usable_bytes(machine)
    message = (
        f"the leanest plan ({plan.describe()}) needs {needed / 2**30:.1f} GiB on the fullest GPU, "
        f"where {usable / 2**30:.1f} GiB are usable"
    )
    return Infeasible(plan.gpus, "memory", message, missing_bytes=needed - usable)


def _held_apart(gpus: int, fixed: Mapping[str, int]) -> Infeasible | None:
    """Degrees that were fixed and rule a count out: their product must divide it, and what is left be splittable."""
    named = " · ".join(f"{name}={value}" for name, value in fixed.items() if name not in FROM_ZERO)
    if not named:
        return None
    product = prod(fixed.get(name, 1) for name in ("tensor", "pipeline", "context", "data"))
    if gpus % product:
        message = (
            f"{named} needs a multiple of {product} GPUs; use gpus={-(-gpus // product) * product} or free a degree"
        )
    else:
        message = f"no plan has {named}; free one of them, or use another batch or GPU count"
    return Infeasible(gpus, "degrees", message)


def _indivisible(limits: Limits, gpus: int, global_batch: int, tensors: Sequence[int]) -> Infeasible:
    """A count that is no product of degrees: too many replicas for the batch, or replicas that do not divide it."""
    shares = {gpus // tensor for tensor in tensors if gpus % tensor == 0}
    replicas = min(share // p for share in shares for p in range(1, limits.layers + 1) if share % p == 0)
    if replicas > global_batch:
        message = (
            f"at least {replicas} replicas for a batch of {global_batch}, since {limits.layers} layers and "
            f"{limits.heads} heads split no further; use batch={replicas} or more, or fewer GPUs"
        )
    else:
        message = (
            f"no split by tensor ({', '.join(map(str, tensors))}) and up to {limits.layers} stages leaves replicas "
            f"that divide the batch of {global_batch}; use batch={-(-global_batch // replicas) * replicas} or another "
            "GPU count"
        )
    return Infeasible(gpus, "batch", message)
