"""Mixtures of experts: transformers in which a router sends each token to a few of many MLPs.

Attention, embedding and logits are those of the transformer. Experts are spread over `Plans.expert` of the data ×
context ranks and split by tensor parallelism, as in Megatron Core. Tokens are sent to experts as rows, or by matrix
products with masks as in GShard (arXiv 2006.16668, algorithm 1). Latent attention: DeepSeek-V2 (arXiv 2405.04434, 2.1).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from synergy_core.errors import InputError
from synergy_core.performance.planner.families import transformer
from synergy_core.performance.planner.families.transformer import (
    Number,
    Part,
    attention_core,
    attention_part,
    boundary,
    cast_bytes,
    combined,
    embedding,
    logits,
    mlp_part,
    near_sighted,
    residual_traffic,
    sequence_shards,
    tokens_per_gpu,
)
from synergy_core.performance.planner.machine import Software
from synergy_core.performance.planner.plan import Plans
from synergy_core.performance.planner.work import (
    AllToAll,
    Amount,
    Block,
    Gemm,
    Layers,
    Limits,
    Work,
    at_least,
    block_of,
)


@dataclass(frozen=True, slots=True)
class Architecture(transformer.Architecture):
    """A transformer with layers of experts; `ffn` is the width of MLPs in layers without experts.

    With latent attention (key_value_rank > 0), each head's queries and keys have head_width elements without and
    rotary_width elements with rotary positions, and its values have value_width elements.
    """

    experts: Number = 1
    """Number of experts in each layer that has experts."""
    topk: Number = 1
    """Number of experts to which each token is sent."""
    expert_ffn: Number = 0
    """Width of an expert."""
    shared_experts: Number = 0
    """Number of experts of width expert_ffn that process every token."""
    dense_layers: Number = 0
    """Number of layers without experts at the start."""
    moe_every: int = 1
    """Every n-th further layer has experts, beginning with the first."""
    capacity: float = 0.0
    """Largest number of rows (copies of tokens) that an expert processes ÷ its even share. Rows beyond it are dropped,
    and missing ones are padded. 0: unlimited."""
    gshard_group: int = 0
    """Number of tokens that one matrix product dispatches; 0: tokens are sent as rows."""
    expert_groups: int = 1
    """Number of equal groups of experts."""
    groups_per_token: int = 1
    """Largest number of groups to which one token is sent (node-limited routing: DeepSeek-V3, arXiv 2412.19437, section
    2.1.2)."""
    query_rank: int = 0
    """Width of the queries' latent. 0: queries are projected from the layer's input, as in DeepSeek-V2-Lite."""
    key_value_rank: int = 0
    """Width of the latent of keys and values; 0 without latent attention."""
    rotary_width: int = 0
    """Elements of a head's queries and keys with rotary positions, in addition to head_width; 0 without latent
    attention."""
    value_width: int = 0
    """Elements of a head's values under latent attention; 0 without it."""

    def attention_parameters(self) -> Amount:
        if not self.key_value_rank:
            return transformer.Architecture.attention_parameters(self)
        down, up = self._latent_parameters()
        return down + up

    def _latent_parameters(self) -> tuple[Amount, Amount]:
        """Parameters of latent attention: of projections to latents with their norms, and of projections per head."""
        hidden, heads = np.asarray(self.hidden, float), np.asarray(self.heads, float)
        ranks = self.query_rank + self.key_value_rank
        up = heads * (
            (self.query_rank or hidden) * (self.width + self.rotary_width)
            + self.key_value_rank * (self.width + self.value_width)
            + self.value_width * hidden
        )
        return hidden * (ranks + self.rotary_width) + ranks, up

    def expert_parameters(self) -> Amount:
        result: Amount = np.where(self.gated, 3.0, 2.0) * self.hidden * np.asarray(self.expert_ffn, float)
        return result

    def has_experts(self, layer: int) -> NDArray[np.bool_]:
        """Whether a layer, counted from 0, has experts."""
        past = layer - np.asarray(self.dense_layers)
        result: NDArray[np.bool_] = (past >= 0) & (past % self.moe_every == 0)
        return result

    @property
    def expert_layers(self) -> Amount:
        past = np.asarray(self.layers) - np.asarray(self.dense_layers)
        result: Amount = np.ceil(past / self.moe_every)
        return result

    def parameters(self) -> Amount:
        dense = transformer.Architecture.parameters(self)
        experts = self.expert_parameters() * (np.asarray(self.experts, float) + self.shared_experts)
        router = np.asarray(self.experts, float) * self.hidden
        return dense + self.expert_layers * (experts + router - self.mlp_parameters())

    def limits(self) -> Limits:
        """The limits of a transformer, and the number of experts."""
        return replace(transformer.Architecture.limits(self), experts=int(self.experts))

    def check(self) -> None:
        transformer.Architecture.check(self)
        at_least(1, experts=self.experts, topk=self.topk, moe_every=self.moe_every)
        if self.topk > self.experts:
            raise InputError(f"topk: {self.topk} of experts: {self.experts}; a token can go to each expert only once.")
        if self.experts > 1:
            at_least(1, expert_ffn=self.expert_ffn)
        if self.dense_layers > self.layers:
            raise InputError(f"dense_layers: {self.dense_layers} of layers: {self.layers}; expected at most that many.")
        if not 1 <= self.groups_per_token <= self.expert_groups:
            raise InputError(
                f"groups_per_token: {self.groups_per_token} of expert_groups: {self.expert_groups}; expected 1 to all."
            )
        if self.key_value_rank:
            at_least(1, rotary_width=self.rotary_width, value_width=self.value_width)


def work(architecture: Architecture, plans: Plans, software: Software) -> Work:
    """Operators of one micro-batch on one GPU."""
    a = architecture
    attention, ends = attention_of(a, plans, software), boundary(a, plans, software)
    dense = block_of("dense layer", combined(attention, mlp_part(a, plans, software)) | ends)
    sparse = block_of("expert layer", combined(attention, experts_part(a, plans, software)) | ends)
    return Work(
        before=embedding(a, plans, software),
        layers=_in_order(a, dense, sparse),
        after=logits(a, plans, software),
        tower=transformer.tower(a.tower, plans, software) if a.tower else None,
    )


def _in_order(a: Architecture, dense: Block, sparse: Block) -> tuple[Layers, ...]:
    """Runs of identical layers, in order. If dense and expert layers alternate, each run is a single layer."""
    if a.moe_every == 1:
        first = np.asarray(a.dense_layers, float)
        rest = Layers(sparse, np.asarray(a.layers, float) - first)
        return (Layers(dense, first), rest) if np.any(first > 0) else (rest,)
    runs: tuple[Layers, ...] = ()
    for layer in range(int(np.max(a.layers))):
        there, expert = np.asarray(a.layers) > layer, a.has_experts(layer)
        for block, chosen in ((sparse, there & expert), (dense, there & ~expert)):
            runs += (Layers(block, chosen.astype(float)),) if np.any(chosen) else ()
    return runs


def attention_of(a: Architecture, plans: Plans, software: Software) -> Part:
    """Block fields of plain or latent attention, averaged over all layers if some have a window."""
    part = latent_attention_part if a.key_value_rank else attention_part
    return near_sighted(a, part(a, plans, software))


def latent_attention_part(a: Architecture, plans: Plans, software: Software) -> Part:
    """Block fields of norm, projections to latents and from them to heads, attention, output projection and residual.

    Projections to latents have no heads: tensor-parallel ranks repeat them or, with sequence parallelism, split tokens.
    """
    t, split, tokens = plans.tensor, sequence_shards(plans), tokens_per_gpu(a, plans)
    hidden, heads = np.asarray(a.hidden, float), np.asarray(a.heads) / t
    width = a.width + a.rotary_width
    latents = a.query_rank + a.key_value_rank + a.rotary_width
    columns = heads * (2.0 * width + a.value_width)
    exchanged = (2.0 if software.communication.cp_comm_type == "a2a" else 1.0) * (width + a.value_width)
    e, mask = software.element_bytes, 1.0 if software.dropout else 0.0
    scores = plans.micro_batch * heads * np.asarray(a.seq_len, float) ** 2 / plans.context
    statistics = 4.0 * tokens * heads if software.flash else 0.0
    kept = software.input_bytes
    saved = tokens * ((hidden * (e + kept + mask) + (e + kept) * latents) / split)
    heads_out = tokens * (e + cast_bytes(software)) * heads * a.value_width
    saved = saved + tokens * e * columns + heads_out
    down, up = a._latent_parameters()
    return {
        "gemms": (
            *((Gemm(tokens / split, a.query_rank, hidden),) if a.query_rank else ()),
            Gemm(tokens, heads * width, a.query_rank or hidden, again=True),
            Gemm(tokens / split, a.key_value_rank + a.rotary_width, hidden),
            Gemm(tokens, heads * (a.width + a.value_width), a.key_value_rank, again=True),
            Gemm(tokens, hidden, heads * a.value_width),
        ),
        "attention": (attention_core(a, plans, software, width, a.value_width),),
        "replicated_bytes": tokens * (hidden * residual_traffic(software) + 2.0 * e * latents) / split,
        "split_bytes": 2.0 * e * tokens * columns,
        "kernels": 8.0 if a.query_rank else 7.0,
        "tensor_bytes": e * tokens * hidden,
        "tensor_count": 1.0,
        "context_bytes": e * tokens * heads * exchanged,
        "parameters": down + up / t + 2.0 * hidden,
        "saved_bytes": saved + (0.0 if software.flash else scores * (2.0 * e + mask)) + statistics,
        "selective_bytes": saved + statistics,
        # Half of the products' outputs, and attention's output.
        "operator_bytes": statistics
        + e * tokens * (hidden / split + 0.5 * (latents / split + columns + hidden) + heads * a.value_width),
        "module_bytes": tokens * (hidden * (e + mask) + e * latents) / split + heads_out + statistics,
        "again_bytes": 2.0 * e * tokens * ((hidden + latents) / split + columns),
        "live_bytes": saved + (0.0 if software.flash else scores * (4.0 * e + mask)) + 2.0 * e * tokens * hidden,
    }


def experts_part(a: Architecture, plans: Plans, software: Software) -> Part:
    """Block fields of norm, router, dispatch, experts, combination, residual, and shared experts.

    A row is the copy of a token for one expert. Each GPU sends tokens × topk rows (× capacity, if limited) to the ranks
    of the chosen experts, and receives as many, evenly for its `experts` ÷ `expert` experts. All ranks wait for the
    busiest. Without sequence parallelism every tensor-parallel rank sends all rows. Tensor-parallel ranks reduce rows
    before combination, in GShard after it; if they hold whole experts, each sends its part of the sequence.
    """
    t = plans.expert_tensor(whole=software.communication.whole_experts)
    split, tokens = sequence_shards(plans), tokens_per_gpu(a, plans)
    apart = (plans.tensor // t).astype(float)
    hidden, experts = np.asarray(a.hidden, float), np.asarray(a.experts, float)
    width = np.asarray(a.expert_ffn) / t
    up = np.where(a.gated, 2.0, 1.0) * width
    copies = np.asarray(a.topk) * (a.capacity or 1.0)
    rows, local = tokens * copies / apart, experts / plans.expert
    # Rows of the busiest rank ÷ the mean, for a balanced but random router: the largest of n normal deviates is about
    # √(2 ln n), and the standard deviation of a rank's rows is the root of their mean.
    each, busiest = rows / local, 1.0 if a.capacity else 1.0 + np.sqrt(2.0 * np.log(plans.expert) / rows)
    e, mask = software.element_bytes, 1.0 if software.dropout else 0.0
    moved = 0.0 if a.gshard_group else rows * hidden
    # Megatron Core multiplies a row by the router's weight between the two products: in one kernel with a gated
    # activation; otherwise the activation is kept as well. GShard and plain autograd weight and keep the output.
    late = a.gshard_group or software.eager
    weighted = hidden * apart / split if late else np.where(a.gated, 0.0, width)
    # Recomputation by module repeats the norm's output and the activation between the two products.
    repeated = tokens * hidden * e / split + rows * (software.input_bytes * width + e * weighted)
    fixed = tokens * (hidden * (e + mask) + 4.0 * experts) / split + rows * (software.input_bytes * hidden + e * up)
    saved = fixed + repeated
    part: Part = {
        "gemms": (
            Gemm(tokens / split, experts, hidden),
            Gemm(each * busiest, up, hidden, local, expert=True, parts=np.where(a.gated, 2.0, 1.0)),
            Gemm(each * busiest, hidden, width, local, expert=True),
        ),
        "replicated_bytes": tokens * (hidden * residual_traffic(software) + 12.0 * experts) / split
        + 4.0 * e * moved * apart / split,
        "split_bytes": e * rows * (up + width),
        "kernels": 13.0,
        "tensor_bytes": e * tokens * hidden,
        "tensor_count": 1.0 if a.gshard_group else np.where(t > 1, copies, 0.0),
        "all_to_all": AllToAll(
            sent_bytes=e * rows * hidden * apart / split,
            copies=copies + 0.0 * rows,
            reach=a.groups_per_token / a.expert_groups,
            count=2.0,
        ),
        "parameters": hidden * experts + 2.0 * hidden,
        "expert_parameters": local * a.expert_parameters() / t,
        "saved_bytes": saved,
        "operator_bytes": 0.0,  # grouped products are computed again
        "module_bytes": fixed,
        "again_bytes": 2.0 * e * tokens * hidden / split + e * rows * (up + width),
        "live_bytes": saved + e * rows * (up + width) + 2.0 * e * rows * hidden,
    }
    parts = [part]
    parts += [_gshard_part(a, plans, copies)] if a.gshard_group else []
    parts += [_shared_part(a, plans, software)] if np.any(np.asarray(a.shared_experts) > 0) else []
    return {**combined(*parts), "live_bytes": sum(each["live_bytes"] for each in parts)}


def _gshard_part(a: Architecture, plans: Plans, copies: Amount) -> Part:
    """Block fields of GShard's dispatch and combination of tokens by products with masks (group, experts × capacity).

    Each mask element is a 2-byte weight and a 1-byte flag, written once and kept.
    """
    tokens, hidden = tokens_per_gpu(a, plans), np.asarray(a.hidden, float)
    group = np.minimum(a.gshard_group, tokens)
    slots = copies * group / plans.tensor
    masks = tokens * slots
    return {
        "gemms": (
            Gemm(slots, hidden, group, tokens / group, stored=0.0),
            Gemm(group, hidden, slots, tokens / group, stored=0.0),
        ),
        "split_bytes": 6.0 * masks,
        "kernels": 10.0,
        "saved_bytes": 3.0 * masks,
        "live_bytes": 3.0 * masks,
    }


def _shared_part(a: Architecture, plans: Plans, software: Software) -> Part:
    """Block fields of shared experts as one MLP of their total width. `experts_part` counts norm and residual."""
    tokens, hidden = tokens_per_gpu(a, plans), np.asarray(a.hidden, float)
    width = np.asarray(a.shared_experts) * np.asarray(a.expert_ffn) / plans.tensor
    up, e = np.where(a.gated, 2.0, 1.0) * width, software.element_bytes
    return {
        "gemms": (
            Gemm(tokens, up, hidden, again=True, parts=np.where(a.gated, 2.0, 1.0)),
            Gemm(tokens, hidden, width, again=True),
        ),
        "split_bytes": e * tokens * (up + width),
        "kernels": 2.0,
        "tensor_bytes": e * tokens * hidden,
        "tensor_count": 1.0,
        "parameters": hidden * (up + width),
        "saved_bytes": tokens * (e * up + software.input_bytes * width),
        "operator_bytes": 0.5 * e * tokens * (up + hidden),
        "module_bytes": 0.0,
        "again_bytes": e * tokens * (up + width),
        "again_count": 1.0,
        "live_bytes": e * tokens * (up + width),
    }
