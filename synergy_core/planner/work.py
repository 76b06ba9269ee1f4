"""What one GPU does for one micro-batch: the operators a model family breaks a plan down to.

Every figure is an array (plans,) or a number that holds for all of them. A family (`planner.families`) makes a `Work`;
step time and memory are computed from it and know nothing of families.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from synergy_core.planner.plan import Recompute

Amount = NDArray[Any] | float
"""An array (plans,), or one number for all plans."""


@dataclass(frozen=True, slots=True)
class Gemm:
    """count products (m × k) · (k × n) in the forward pass; two more each in the backward pass.

    stored: how many of their right operands are parameters of the block; None: all. expert: they are of its
    `expert_parameters`.
    """

    m: Amount
    n: Amount
    k: Amount
    count: Amount = 1.0
    stored: Amount | None = None
    expert: bool = False

    @property
    def flops(self) -> Amount:
        """FLOPs of the forward pass."""
        return 2.0 * self.m * self.n * self.k * self.count


@dataclass(frozen=True, slots=True)
class Attention:
    """count heads, each with queries × keys scores of width `width`. causal: half of the scores are never needed.

    width: of queries and keys; value_width: of values.
    """

    count: Amount
    queries: Amount
    keys: Amount
    width: Amount
    value_width: Amount
    causal: bool = True


@dataclass(frozen=True, slots=True)
class Block:
    """One layer, or what stands before or after them.

    gemms, attention: as above. replicated_bytes: memory traffic of operators that tensor parallelism repeats, unless
    split along the sequence (then already divided); split_bytes: of those that it splits; both of the forward pass.
    kernels: launches beside the GEMMs, forward.
    tensor_bytes: of one all-reduce over the tensor-parallel group; tensor_count: how many a forward pass has (the
    backward pass has as many). context_bytes: keys and values that pass round the context-parallel ring, forward.
    expert_bytes: what each GPU sends in one all-to-all; expert_count: all-to-alls a forward pass.
    expert_copies: of each token in them.
    parameters: held by this GPU before ZeRO shards them, beside expert_parameters, which only
    data × context ÷ expert replicas share. tables: (rows, columns) of those that are read by index; what neither they
    nor the GEMMs hold is vectors. boundary_bytes: the output that the next block takes, this GPU's part.
    saved_bytes: kept for the backward pass without recomputation; selective_bytes: with selective; operator_bytes: by
    operator (None: as with selective); input_bytes: with full. live_bytes: the most that is alive at once within the
    block, forward or backward.
    """

    name: str
    gemms: tuple[Gemm, ...] = ()
    attention: tuple[Attention, ...] = ()
    replicated_bytes: Amount = 0.0
    split_bytes: Amount = 0.0
    kernels: Amount = 0.0
    tensor_bytes: Amount = 0.0
    tensor_count: Amount = 0.0
    context_bytes: Amount = 0.0
    expert_bytes: Amount = 0.0
    expert_copies: Amount = 1.0
    expert_count: Amount = 0.0
    parameters: Amount = 0.0
    expert_parameters: Amount = 0.0
    tables: tuple[tuple[Amount, Amount], ...] = ()
    boundary_bytes: Amount = 0.0
    saved_bytes: Amount = 0.0
    selective_bytes: Amount = 0.0
    operator_bytes: Amount | None = None
    input_bytes: Amount = 0.0
    live_bytes: Amount = 0.0

    @property
    def forward_flops(self) -> Amount:
        """FLOPs of products and attention in the forward pass; of causal attention the half that is needed."""
        total: Amount = 0.0
        for gemm in self.gemms:
            total = total + gemm.flops
        for each in self.attention:
            scores = each.count * each.queries * each.keys * (0.5 if each.causal else 1.0)
            total = total + 2.0 * scores * (each.width + each.value_width)
        return total

    def kept_bytes(self, recompute: Recompute) -> Amount:
        """What is kept for the backward pass under a kind of recomputation."""
        by_operator = self.selective_bytes if self.operator_bytes is None else self.operator_bytes
        return {
            Recompute.NONE: self.saved_bytes,
            Recompute.SELECTIVE: self.selective_bytes,
            Recompute.FULL: self.input_bytes,
            Recompute.OPERATORS: by_operator,
        }[recompute]


@dataclass(frozen=True, slots=True)
class Layers:
    """`count` blocks alike, one after another."""

    block: Block
    count: Amount


@dataclass(frozen=True, slots=True)
class Work:
    """A whole model on one micro-batch, as one GPU of each stage sees it.

    before: on the first stage (embedding). layers: runs of blocks in their order; stages are cut anywhere between
    blocks. after: on the last stage (final norm, logits, loss). total_parameters: of the model, counted once.
    """

    before: Block
    layers: tuple[Layers, ...]
    after: Block
    total_parameters: Amount

    @property
    def layer_count(self) -> Amount:
        """Blocks of all runs."""
        total: Amount = 0.0
        for each in self.layers:
            total = total + each.count
        return total
