"""Finds the fastest plans of a model for every GPU count.

`enumerate` lists plans whose degrees divide the dimensions that they split. A variant of a plan has a ZeRO stage and a
recomputation mode. A plan is dropped if its leanest variant does not fit; variants that recompute needlessly are
dropped; the rest are timed. Tensor parallelism beyond a node and beyond 8 is only tried where nothing else fits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import prod

import numpy as np

from synergy_core.errors import InputError
from synergy_core.performance.planner.enumerate import candidates, leanest, undominated, with_options
from synergy_core.performance.planner.machine import Constants, Machine, Software
from synergy_core.performance.planner.memory import memory, usable_bytes
from synergy_core.performance.planner.plan import SPLITS, ZEROS, Plan, Plans, Recompute
from synergy_core.performance.planner.step_time import StepTime, step_time
from synergy_core.performance.planner.work import Architecture, Family, Limits, Work
from synergy_core.units import Bools, Floats, Ints, rows_at


@dataclass(frozen=True, slots=True)
class Infeasible:
    """Why a GPU count has no plan. factor: `batch`, `memory` or `degrees`. missing_bytes: memory that the leanest plan
    lacks per GPU. leanest: None unless memory is the factor.
    """

    gpus: int
    factor: str
    message: str
    missing_bytes: float = 0.0
    leanest: Plan | None = None


@dataclass(frozen=True, slots=True)
class PlanTable:
    """Plans as columns (rows,), sorted by GPU count and rank; rank 0 is the fastest.

    memory_bytes: `Memory.needed` of the fullest GPU. parts: parts of step_time_s. timed: number of plans timed.
    """

    machine: Machine
    gpus: Ints
    nodes: Ints
    rank: Ints
    step_time_s: Floats
    memory_bytes: Floats
    plans: Plans
    parts: StepTime
    infeasible: tuple[Infeasible, ...]
    timed: int

    def __len__(self) -> int:
        return len(self.gpus)

    def take(self, rows: Ints | Bools) -> PlanTable:
        names = ("gpus", "nodes", "rank", "step_time_s", "memory_bytes")
        columns = {name: getattr(self, name)[rows] for name in names}
        return replace(self, plans=self.plans.take(rows), parts=rows_at(self.parts, rows), **columns)

    def best(self) -> PlanTable:
        """The fastest plan for each number of GPUs; numbers for which no plan was found have no row."""
        return self.take(self.rank == 0)

    def efficient(self) -> PlanTable:
        """The best rows that are faster than every row with fewer GPUs."""
        best = self.best()
        fastest_before = np.minimum.accumulate(np.append(np.inf, best.step_time_s))[:-1]
        return best.take(best.step_time_s < fastest_before)


@dataclass(frozen=True, slots=True)
class Model:
    """A model with its training software."""

    family: Family
    architecture: Architecture
    software: Software

    @property
    def limits(self) -> Limits:
        return self.architecture.limits()

    def work(self, plans: Plans) -> Work:
        return self.family.work(self.architecture, plans, self.software)


MICRO_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
MAX_NODES_PER_TENSOR_GROUP = 4
MIN_TENSOR_TRIED = 8
"""Tensor parallelism up to this degree is tried even on smaller nodes: without it large models need far more GPUs."""


def search(
    family: Family,
    architecture: Architecture,
    machine: Machine,
    software: Software,
    constants: Constants,
    *,
    counts: Sequence[int],
    global_batch: int,
    keep: int = 0,
    fixed: Mapping[str, int] | None = None,
) -> PlanTable:
    """The best plan for each GPU count, the next best `keep` plans, and the reasons why counts have no plan. Cached.

    global_batch: sequences (or images). fixed: values that degrees must have. Raises InputError for impossible counts,
    batches or fixed degrees.
    """
    wanted = tuple(counts)
    if not wanted or min(wanted) < 1:
        raise InputError("GPU counts must be positive whole numbers, at least one of them.")
    if global_batch < 1:
        raise InputError(f"batch={global_batch}: expected a positive whole number.")
    held = fixed or {}
    for name in SPLITS:
        if held.get(name, 1) > 1 and name not in software.supports.splits:
            others = ", ".join(software.supports.splits) or "replicas only"
            raise InputError(
                f"{name}={held[name]}: {software.name} supports {others}; leave {name}= out, or type another software=."
            )
    if held.get("zero", 0) in set(ZEROS) - {0, *software.supports.zeros}:
        stages = ", ".join(map(str, software.supports.zeros))
        raise InputError(f"zero={held['zero']}: {software.name} supports {stages}; type one of these.")
    if held.get("recompute", 0) in {*Recompute} - {*software.recompute_modes}:
        recomputes = ", ".join(f"{each.value} ({each.label})" for each in software.recompute_modes)
        raise InputError(f"recompute={held['recompute']}: {software.name} supports {recomputes}; type one of these.")
    model = Model(family, architecture, software)
    return _remembered(model, machine, constants, wanted, int(global_batch), keep, tuple(sorted(held.items())))


@lru_cache(maxsize=512)
def _remembered(
    model: Model,
    machine: Machine,
    constants: Constants,
    counts: tuple[int, ...],
    global_batch: int,
    keep: int,
    fixed: tuple[tuple[str, int], ...],
) -> PlanTable:
    wanted = np.unique(np.asarray(counts))
    sized = sized_plans(model, machine, wanted, global_batch, dict(fixed))
    plans, bytes_, parts = timed(model, machine, constants, sized.plans.take(sized.fits), dict(fixed))
    order = np.lexsort((parts.total_s, plans.gpus))
    gpus = plans.gpus[order]
    rank = np.arange(len(order)) - np.searchsorted(gpus, gpus)
    order, rank = order[rank <= keep], rank[rank <= keep]
    chosen = plans.take(order)
    counts_of = sized.plans.gpus
    feasible = np.isin(wanted, counts_of[sized.fits])
    return PlanTable(
        machine=machine,
        gpus=chosen.gpus,
        nodes=-(-chosen.gpus // machine.gpus_per_node),
        rank=rank,
        step_time_s=parts.total_s[order],
        memory_bytes=bytes_[order],
        plans=chosen,
        parts=rows_at(parts, order),
        infeasible=tuple(
            _reason(model, machine, each, np.flatnonzero(counts_of == each), sized, global_batch, dict(fixed))
            for each in wanted[~feasible].tolist()
        ),
        timed=len(plans),
    )


def timed(
    model: Model, machine: Machine, constants: Constants, plans: Plans, fixed: Mapping[str, int] | None = None
) -> tuple[Plans, Floats, StepTime]:
    """The plans of `fitting`, their bytes per GPU, and their step times."""
    chosen, needed = fitting(model, machine, plans, fixed)
    return chosen, needed, step_time(model.work(chosen), chosen, machine, model.software, constants)


def fitting(
    model: Model,
    machine: Machine,
    plans: Plans,
    fixed: Mapping[str, int] | None = None,
    *,
    sharding_apart: bool = False,
) -> tuple[Plans, Floats]:
    """The variants of the plans that fit and are `undominated`, and their bytes on the fullest GPU.

    sharding_apart: also keep variants at ZeRO stage 0 that are undominated by other variants at stage 0.
    """
    software = model.software
    # Fused attention keeps no scores, so recomputing it alone saves nothing.
    recomputes = [each for each in software.recompute_modes if each != Recompute.SELECTIVE or not software.flash]
    variants, of = with_options(plans, fixed, software, recomputes)
    needed = memory(model.work(variants), variants, software)
    fits = np.broadcast_to(needed.fits(machine), len(variants))
    kept = np.zeros(len(variants), dtype=np.bool_)
    for group in (fits, fits & (variants.zero == 0)) if sharding_apart else (fits,):
        at = np.flatnonzero(group)
        best = undominated(variants.zero[at], variants.recompute[at], of[at])
        kept[at[best | ("activations" in software.run.offload)]] = True  # less recomputation means more to copy
    return variants.take(kept), np.broadcast_to(needed.needed, len(variants))[kept]


@dataclass(frozen=True, slots=True)
class Sized:
    """Candidate plans, bytes per GPU of the leanest variant of each, and whether that variant fits.

    max_tensor: the largest tensor-parallel degree tried.
    """

    plans: Plans
    least_bytes: Floats
    fits: Bools
    max_tensor: int


def sized_plans(model: Model, machine: Machine, counts: Ints, global_batch: int, fixed: Mapping[str, int]) -> Sized:
    """Candidates for the GPU counts. Tensor parallelism across nodes is only tried if nothing else fits on a count."""

    def sized(counts: Ints, max_tensor: int) -> Sized:
        plans = _candidates(model, machine, counts, global_batch, max_tensor, fixed)
        lean = leanest(plans, fixed, model.software)
        needed = memory(model.work(lean), lean, model.software)
        return Sized(plans, needed.needed, needed.fits(machine), beyond)

    within = max(machine.gpus_per_node, MIN_TENSOR_TRIED)
    beyond = max(machine.gpus_per_node * MAX_NODES_PER_TENSOR_GROUP, within)
    first = sized(counts, within)
    left = counts[~np.isin(counts, first.plans.gpus[first.fits])]
    if not left.size or beyond <= within:
        return first
    second = sized(left, beyond)
    plans = Plans(*(np.append(getattr(first.plans, f.name), getattr(second.plans, f.name)) for f in fields(Plans)))
    least_bytes = np.append(first.least_bytes, second.least_bytes)
    return Sized(plans, least_bytes, np.append(first.fits, second.fits), beyond)


def _candidates(
    model: Model, machine: Machine, counts: Ints, global_batch: int, max_tensor: int, fixed: Mapping[str, int]
) -> Plans:
    """The plans for these counts that the software supports and that are `laid_out`."""
    plans = candidates(
        model.limits,
        counts.tolist(),
        global_batch,
        model.software,
        micro_batches=MICRO_BATCHES,
        max_tensor=max(max_tensor, fixed.get("tensor", 1)),
        fixed={**dict.fromkeys(set(SPLITS) - set(model.software.supports.splits), 1), **fixed},
    )
    return plans.take(laid_out(plans, machine))


def laid_out(plans: Plans, machine: Machine) -> Bools:
    """Whether tensor-parallel groups fill nodes evenly; plans on a single node always count as even."""
    node = machine.gpus_per_node
    result: Bools = (node % plans.tensor == 0) | (plans.tensor % node == 0) | (plans.gpus <= node)
    return result


def _reason(
    model: Model, machine: Machine, gpus: int, rows: Ints, sized: Sized, global_batch: int, fixed: Mapping[str, int]
) -> Infeasible:
    """Why a GPU count has no plan: too little memory, fixed degrees, or an indivisible batch. rows: its candidates."""
    limits = model.limits
    if rows.size:
        row = rows[[sized.least_bytes[rows].argmin()]]
        lean = leanest(sized.plans.take(row), fixed, model.software)
        needed, usable = float(sized.least_bytes[row[0]]), usable_bytes(machine)
        message = (
            f"the leanest plan ({lean.plan(0).describe()}) needs {needed / 2**30:.1f} GiB on the fullest GPU, "
            f"where {usable / 2**30:.1f} GiB are usable"
            if needed > usable
            else f"the leanest plan ({lean.plan(0).describe()}) offloads more than a node's host memory"
        )
        return Infeasible(gpus, "memory", message, missing_bytes=needed - usable, leanest=lean.plan(0))
    if fixed:
        named = " and ".join(f"{name}={value}" for name, value in fixed.items())
        product = prod(fixed.get(name, 1) for name in ("tensor", "pipeline", "context", "data"))

        def is_possible(count: int, held: Mapping[str, int]) -> bool:
            return len(_candidates(model, machine, np.array([count]), global_batch, sized.max_tensor, held)) > 0

        if gpus % product:
            multiples = (-(-gpus // product) * product, gpus // product * product)
            use = "".join(f"use gpus={each}, or " for each in multiples if each and is_possible(each, fixed))
            message = f"{named} needs a multiple of {product} GPUs; {use}free a degree"
            return Infeasible(gpus, "degrees", message)
        at_fault = [name for name in fixed if is_possible(gpus, {key: fixed[key] for key in fixed if key != name})]
        free = f"free {' or '.join(at_fault)}, or use" if at_fault else "use"
        message = f"no plan has {named}; {free} another batch or GPU count"
        return Infeasible(gpus, "degrees", message)
    # A batch of one sample a GPU allows every number of replicas that this number of GPUs allows.
    replicas = np.unique(_candidates(model, machine, np.array([gpus]), gpus, sized.max_tensor, {}).data)
    nearest = int((-(-global_batch // replicas) * replicas).min())
    message = (
        f"at least {replicas[0]} replicas for a batch of {global_batch}, because {model.software.name} cannot split "
        f"{limits.layers} layers and {limits.heads} heads further"
        if replicas[0] > global_batch
        else f"no plan has a number of replicas that divides the batch of {global_batch}"
    )
    return Infeasible(gpus, "batch", f"{message}; use batch={nearest} or another GPU count")
