"""Enumerates the plans that a model can run with on given GPU counts. A plan's degrees multiply to the count.

Rules: tensor divides the heads; it also divides the key-value heads or is a multiple of them. There are at most as many
stages as layers; stages may be uneven. data divides the global batch, and the micro-batch divides each replica's part.
Interleaving needs a number of micro-batches that is a multiple of the stages (Megatron's schedule), and chunks with
equally many layers, except for the few that the software allows to be shorter; only the first and the last may have no
layer, because they have the embedding and the logits. Sequence parallelism needs a sequence that tensor × context
divides; software that keeps experts whole needs it for experts under tensor parallelism. expert divides data × context;
under sequence parallelism, if the software keeps experts whole, it may divide tensor × data × context instead. Few
stacks combine ZeRO 2 or 3 with pipeline stages (`Software.staged_zeros`). With all-to-alls (`cp_comm_type=a2a`),
context-parallel ranks split the key-value heads further.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from synergy_core.errors import InputError, unknown
from synergy_core.performance.planner.machine import Software
from synergy_core.performance.planner.plan import RISING, ZEROS, Plans, Recompute
from synergy_core.performance.planner.work import Limits, divisors
from synergy_core.units import Bools, Ints

MAX_STAGES_PER_GPU = 8
"""Largest interleave tried."""
FIXABLE = (
    *("tensor", "pipeline", "context", "data", "expert", "interleave", "micro_batch"),
    *("zero", "recompute", "sequence"),
)
FROM_ZERO = ("zero", "recompute", "sequence")
"""Settings that may be 0; the others are at least 1."""


def candidates(
    limits: Limits,
    counts: Sequence[int],
    global_batch: int,
    software: Software,
    *,
    micro_batches: Sequence[int],
    max_tensor: int,
    fixed: Mapping[str, int] | None = None,
) -> Plans:
    """Lists the plans for all counts, before ZeRO and recomputation are chosen; (plans,), always in the same order.

    fixed: values that degrees must have. Plans that allow none of the software's ZeRO stages are left out. Raises
    InputError for a degree that the model cannot have.
    """
    held = _checked(limits, fixed or {}, global_batch, software)

    def choices(name: str, values: Sequence[int]) -> Ints:
        return np.array([held[name]] if name in held else values, dtype=np.int64)

    names = ("tensor", "pipeline", "context", "data")
    grid = np.meshgrid(
        choices("tensor", limits.tensors(max_tensor)),
        choices("pipeline", range(1, limits.layers + 1)),
        choices("context", limits.contexts()),
        choices("data", divisors(global_batch)),
        indexing="ij",
    )
    columns = dict(zip(names, (each.ravel() for each in grid), strict=True))

    def cross(name: str, values: Sequence[int]) -> None:
        """Combines every row with every value of a new column."""
        chosen = choices(name, values)
        count = len(columns["tensor"])
        columns.update({key: np.repeat(column, len(chosen)) for key, column in columns.items()})
        columns[name] = np.tile(chosen, count)

    def keep(wanted: Bools) -> None:
        columns.update({key: column[wanted] for key, column in columns.items()})

    keep(np.isin(np.prod([columns[name] for name in names], axis=0), np.asarray(counts)))
    if software.communication.cp_comm_type == "a2a":
        keep((columns["context"] == 1) | (limits.groups % (columns["tensor"] * columns["context"]) == 0))
    cross("micro_batch", micro_batches)
    keep((global_batch // columns["data"]) % columns["micro_batch"] == 0)
    columns["accumulation"] = global_batch // (columns["data"] * columns["micro_batch"])
    cross("interleave", range(1, MAX_STAGES_PER_GPU + 1))
    stages, per_gpu = columns["pipeline"], columns["interleave"]
    chunks = stages * per_gpu
    even = (-limits.layers % chunks <= software.supports.short_chunks) & (chunks <= limits.layers + 2)
    keep((per_gpu == 1) | (even & (stages > 1) & (columns["accumulation"] % stages == 0)))
    cross("expert", divisors(limits.experts))
    cross("sequence", [0, 1])
    ranks, experts = columns["data"] * columns["context"], columns["expert"]
    spread = (columns["sequence"] == 1) & (columns["tensor"] * ranks % experts == 0)
    keep((ranks % experts == 0) | (spread & software.communication.whole_experts))
    pieces = columns["tensor"] * columns["context"]
    keep((columns["sequence"] == 0) | ((columns["tensor"] > 1) & (limits.seq_len % pieces == 0) & (limits.seq_len > 0)))
    plain = software.supports.plain_tensor and (limits.experts == 1 or not software.communication.whole_experts)
    keep((columns["sequence"] == 1) | (columns["tensor"] == 1) | plain)
    replicas, wanted = columns["data"] * columns["context"], [held["zero"]] if "zero" in held else ZEROS
    keep(np.any([_may_shard(replicas, columns["pipeline"], each, software) for each in wanted], axis=0))
    sequence = columns.pop("sequence").astype(bool)
    nothing = np.zeros(len(sequence), dtype=np.int64)
    return Plans(**columns, zero=nothing, recompute=nothing, sequence=sequence)


def with_options(
    plans: Plans, fixed: Mapping[str, int] | None, software: Software, recomputes: Sequence[Recompute]
) -> tuple[Plans, Ints]:
    """Each plan with every possible ZeRO stage and recomputation mode, and the index of each variant's plan.

    recomputes: recomputation modes to try.
    """
    held = fixed or {}
    tried = np.array([held["zero"]] if "zero" in held else ZEROS)
    again = np.array([held["recompute"]] if "recompute" in held else recomputes)
    of, zero, recompute = (each.ravel() for each in np.meshgrid(np.arange(len(plans)), tried, again, indexing="ij"))
    possible = _may_shard((plans.data * plans.context)[of], plans.pipeline[of], zero, software)
    of, zero, recompute = of[possible], zero[possible], recompute[possible]
    return replace(plans.take(of), zero=zero, recompute=recompute), of


def leanest(plans: Plans, fixed: Mapping[str, int] | None, software: Software) -> Plans:
    """Each plan with the ZeRO stage and recomputation that need the least memory."""
    held, zero = fixed or {}, np.zeros(len(plans), dtype=np.int64)
    for each in sorted(software.supports.zeros):
        zero[_may_shard(plans.data * plans.context, plans.pipeline, each, software)] = each
    return replace(
        plans,
        zero=np.full_like(zero, held["zero"]) if "zero" in held else zero,
        recompute=np.full_like(zero, held.get("recompute", software.recompute_modes[-1])),
    )


def undominated(zero: Ints, recompute: Ints, of: Ints) -> Bools:
    """Whether to keep a variant: False if another variant of the same plan recomputes less and shards no more.

    of: index of each variant's plan. Less sharding alone does not make a variant better: with few micro-batches,
    gathering weights layer by layer overlaps with the forward pass, while gathering all after the step does not.
    """
    least = np.full((of.max(initial=-1) + 1, 4), len(Recompute), dtype=np.int64)
    # ZeRO stages 0 and 1 hold the same weights and gradients and send the same number of bytes.
    rank = np.argsort(RISING)[recompute]
    np.minimum.at(least, (of, np.maximum(zero, 1)), rank)
    result: Bools = rank <= np.minimum.accumulate(least, axis=1)[of, zero.clip(1)]
    return result


def _checked(limits: Limits, fixed: Mapping[str, int], global_batch: int, software: Software) -> Mapping[str, int]:
    """Returns the fixed degrees. Raises InputError for a degree that the model cannot have."""
    for name, value in fixed.items():
        if name not in FIXABLE:
            raise unknown("degree", name, FIXABLE)
        if value < (0 if name in FROM_ZERO else 1):
            raise InputError(f"{name}={value}: expected a positive whole number.")
    of = {**dict.fromkeys(FIXABLE, 1), **dict.fromkeys(FROM_ZERO, 0), **fixed}
    tensor, replica = of["tensor"], of["data"] * of["micro_batch"]
    tensors, experts = (", ".join(map(str, each)) for each in (limits.tensors(limits.heads), divisors(limits.experts)))
    recomputes = ", ".join(each.label for each in Recompute)
    refusals = (
        (
            limits.heads % tensor,
            f"tensor={tensor} does not divide the model's {limits.heads} heads; choose one of {tensors}.",
        ),
        (
            limits.groups % tensor and tensor % limits.groups,
            f"tensor={tensor} and the model's {limits.groups} key-value heads do not divide each other; "
            f"choose one of {tensors}.",
        ),
        (
            of["pipeline"] > limits.layers,
            f"pipeline={of['pipeline']}: the model has {limits.layers} layers; choose at most that many.",
        ),
        (
            limits.experts % of["expert"],
            f"expert={of['expert']} does not divide the model's {limits.experts} experts; choose one of {experts}.",
        ),
        (
            limits.seq_len % of["context"],
            f"context={of['context']} does not divide the sequence of {limits.seq_len} tokens; choose a divisor.",
        ),
        (
            of["context"] > 1
            and software.communication.cp_comm_type == "a2a"
            and limits.groups % (tensor * of["context"]),
            f"cp_comm_type=a2a: tensor × context = {tensor * of['context']} does not divide the model's "
            f"{limits.groups} key-value heads; choose less.",
        ),
        (
            global_batch % replica,
            f"data × micro_batch = {replica} does not divide the batch of {global_batch}; "
            f"choose batch={-(-global_batch // replica) * replica} or a divisor of it.",
        ),
        (of["zero"] > 3, f"zero={of['zero']}: expected 0, 1, 2 or 3."),
        (of["sequence"] > 1, f"sequence={of['sequence']}: expected 0 or 1."),
        (
            of["recompute"] >= len(Recompute),
            f"recompute={of['recompute']}: expected 0 to {len(Recompute) - 1} ({recomputes}).",
        ),
    )
    for refused, message in refusals:
        if refused:
            raise InputError(message)
    return fixed


def _may_shard(replicas: Ints, stages: Ints, zero: Ints | int, software: Software) -> Bools:
    """Whether the software supports the ZeRO stage, and for plans with pipeline stages, supports it together with them.

    A single replica is never sharded.
    """
    sharded = np.isin(zero, software.supports.zeros) & ((stages == 1) | np.isin(zero, software.supports.staged_zeros))
    result: Bools = np.where(replicas == 1, np.asarray(zero) == 0, sharded)
    return result
