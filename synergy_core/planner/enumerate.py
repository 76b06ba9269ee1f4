"""All plans a model could run with on given GPU counts: degrees that multiply to the count and divide what they split.

Rules: tensor divides the heads, and the key-value heads or is a multiple of them; tensor, inside a node, divides the
node; stages are at most the layers and may be uneven; data divides the global batch and the micro-batch what is left;
interleaving needs even stages and micro-batches that are a multiple of the stages (Megatron's schedule); sequence
parallelism needs a sequence that tensor × context divides; experts spread over a divisor of data × context; ZeRO 2 and
3 go without pipeline stages, since every micro-batch would gather again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from synergy_core.arrays import Ints
from synergy_core.errors import InputError, unknown
from synergy_core.planner.architecture import Limits, divisors
from synergy_core.planner.plan import RISING, Plans, Recompute

MOST_STAGES_PER_GPU = 8
"""Largest interleave tried."""
FIXABLE = (
    *("tensor", "pipeline", "context", "data", "expert", "interleave", "micro_batch"),
    *("zero", "recompute", "sequence"),
)
FROM_ZERO = ("zero", "recompute", "sequence")
"""Those that may be 0; the others are degrees."""


def candidates(
    limits: Limits,
    counts: Sequence[int],
    global_batch: int,
    *,
    micro_batches: Sequence[int],
    max_tensor: int,
    fixed: Mapping[str, int] | None = None,
) -> Plans:
    """Every plan without ZeRO and without recomputation, for all counts; (plans,), in an order that repeats.

    fixed: degrees that are given. Raises InputError for one that the model cannot have.
    """
    held = _checked(limits, fixed or {}, global_batch)

    def choices(name: str, values: Sequence[int]) -> NDArray[np.int64]:
        return np.array([held[name]] if name in held else values, dtype=np.int64)

    grid = np.meshgrid(
        choices("tensor", limits.tensors(max_tensor)),
        choices("pipeline", range(1, limits.layers + 1)),
        choices("context", limits.contexts()),
        choices("data", divisors(global_batch)),
        indexing="ij",
    )
    tensor, pipeline, context, data = (each.ravel() for each in grid)
    wanted = np.isin(tensor * pipeline * context * data, np.asarray(counts))
    rows = {
        "tensor": tensor[wanted],
        "pipeline": pipeline[wanted],
        "context": context[wanted],
        "data": data[wanted],
    }
    rows = _crossed(rows, "micro_batch", choices("micro_batch", micro_batches))
    rows = _where(rows, (global_batch // rows["data"]) % rows["micro_batch"] == 0)
    rows["accumulation"] = global_batch // (rows["data"] * rows["micro_batch"])
    rows = _crossed(rows, "interleave", choices("interleave", range(1, MOST_STAGES_PER_GPU + 1)))
    rows = _where(rows, (rows["interleave"] == 1) | _interleaves(limits, rows))
    rows = _crossed(rows, "expert", choices("expert", divisors(limits.experts)))
    rows = _where(rows, (rows["data"] * rows["context"]) % rows["expert"] == 0)
    rows = _crossed(rows, "sequence", choices("sequence", [0, 1]))
    pieces = rows["tensor"] * rows["context"]
    splits = (rows["tensor"] > 1) & (limits.seq_len % pieces == 0) & (limits.seq_len > 0)
    rows = _where(rows, ~rows["sequence"].astype(bool) | splits)
    zero = np.full(len(rows["tensor"]), held.get("zero", 0))
    rows = _where(rows, _may_shard(rows["data"] * rows["context"], rows["pipeline"], zero))
    nothing = np.zeros(len(rows["tensor"]), dtype=np.int64)
    return Plans(
        **{name: column for name, column in rows.items() if name != "sequence"},
        sequence=rows["sequence"].astype(bool),
        zero=nothing,
        recompute=nothing,
    )


def with_options(plans: Plans, fixed: Mapping[str, int] | None = None) -> tuple[Plans, Ints]:
    """Each plan with every ZeRO stage and kind of recomputation that it can have; the second array: whose each is."""
    held = fixed or {}
    zeros = np.array([held["zero"]] if "zero" in held else [0, 1, 2, 3])
    kinds = np.array([held["recompute"]] if "recompute" in held else RISING)
    of, zero, recompute = (each.ravel() for each in np.meshgrid(np.arange(len(plans)), zeros, kinds, indexing="ij"))
    possible = _may_shard((plans.data * plans.context)[of], plans.pipeline[of], zero)
    of, zero, recompute = of[possible], zero[possible], recompute[possible]
    return replace(plans.take(of), zero=zero, recompute=recompute), of


def leanest(plans: Plans, fixed: Mapping[str, int] | None = None) -> Plans:
    """Each plan with the ZeRO stage and recomputation that need least memory."""
    held = fixed or {}
    replicas = plans.data * plans.context
    zero = np.where(replicas == 1, 0, np.where(plans.pipeline == 1, 3, 1))
    return replace(
        plans,
        zero=np.full_like(zero, held["zero"]) if "zero" in held else zero,
        recompute=np.full_like(zero, held.get("recompute", RISING[-1])),
    )


def undominated(zero: Ints, recompute: Ints, of: Ints) -> NDArray[np.bool_]:
    """Among variants that fit: those that recompute no more than another of their plan `of` that shards no more.

    ZeRO's stages by themselves rule nothing out: with few micro-batches, gathering weights layer by layer hides behind
    the forward pass, which gathering them after the step does not.
    """
    least = np.full((of.max(initial=-1) + 1, 4), len(Recompute), dtype=np.int64)
    # Stages 0 and 1 hold the same weights and gradients, and send as much.
    np.minimum.at(least, (of, np.maximum(zero, 1)), recompute)
    result: NDArray[np.bool_] = recompute <= np.minimum.accumulate(least, axis=1)[of, zero.clip(1)]
    return result


def _checked(limits: Limits, fixed: Mapping[str, int], global_batch: int) -> Mapping[str, int]:
    """The fixed degrees, if the model can have each."""
    for name, value in fixed.items():
        if name not in FIXABLE:
            raise unknown("degree", name, FIXABLE)
        if value < (0 if name in FROM_ZERO else 1):
            raise InputError(f"{name}={value}: expected a positive whole number.")
    tensor, groups = fixed.get("tensor", 1), limits.groups
    if limits.heads % tensor:
        raise InputError(
            f"tensor={tensor} does not divide the model's {limits.heads} heads; "
            f"choose one of {', '.join(map(str, limits.tensors(limits.heads)))}."
        )
    if groups % tensor and tensor % groups:
        raise InputError(
            f"tensor={tensor} and the model's {groups} key-value heads do not divide each other; "
            f"choose one of {', '.join(map(str, limits.tensors(limits.heads)))}."
        )
    if fixed.get("pipeline", 1) > limits.layers:
        raise InputError(f"pipeline={fixed['pipeline']}: the model has {limits.layers} layers; choose at most that.")
    if limits.experts % fixed.get("expert", 1):
        raise InputError(
            f"expert={fixed['expert']} does not divide the model's {limits.experts} experts; "
            f"choose one of {', '.join(map(str, divisors(limits.experts)))}."
        )
    if limits.seq_len % fixed.get("context", 1):
        raise InputError(
            f"context={fixed['context']} does not divide the sequence of {limits.seq_len} tokens; choose a divisor."
        )
    replica = fixed.get("data", 1) * fixed.get("micro_batch", 1)
    if global_batch % replica:
        raise InputError(
            f"data × micro_batch = {replica} does not divide the batch of {global_batch}; "
            f"choose batch={-(-global_batch // replica) * replica} or a divisor of it."
        )
    if not 0 <= fixed.get("zero", 0) <= 3:
        raise InputError(f"zero={fixed['zero']}: expected 0, 1, 2 or 3.")
    if fixed.get("sequence", 0) > 1:
        raise InputError(f"sequence={fixed['sequence']}: expected 0 or 1.")
    if fixed.get("recompute", 0) >= len(Recompute):
        named = ", ".join(each.label for each in Recompute)
        raise InputError(f"recompute={fixed['recompute']}: expected 0 to {len(Recompute) - 1} ({named}).")
    return fixed


def _may_shard(replicas: NDArray[Any], stages: NDArray[Any], zero: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether ZeRO's stage makes sense: replicas to shard over, 2 and 3 without pipeline stages."""
    result: NDArray[np.bool_] = (zero == 0) | ((replicas > 1) & ((zero == 1) | (stages == 1)))
    return result


def _interleaves(limits: Limits, rows: Mapping[str, NDArray[Any]]) -> NDArray[np.bool_]:
    stages, chunks = rows["pipeline"], rows["pipeline"] * rows["interleave"]
    result: NDArray[np.bool_] = (stages > 1) & (limits.layers % chunks == 0) & (rows["accumulation"] % stages == 0)
    return result


def _crossed(rows: Mapping[str, NDArray[Any]], name: str, values: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """Every row with every value."""
    count = len(next(iter(rows.values())))
    crossed = {key: np.repeat(column, len(values)) for key, column in rows.items()}
    return {**crossed, name: np.tile(values, count)}


def _where(rows: Mapping[str, NDArray[Any]], wanted: NDArray[np.bool_]) -> dict[str, NDArray[Any]]:
    return {key: column[wanted] for key, column in rows.items()}
