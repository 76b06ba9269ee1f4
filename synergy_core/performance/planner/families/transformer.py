"""Dense transformers such as GPT and Llama: grouped queries, gated MLPs, tied or untied embeddings.

Matrix products are split over ranks as in Megatron-LM (Shoeybi et al., arXiv 1909.08053). Saved activations follow
Korthikanti et al. (arXiv 2205.05198), derived again per tensor to cover gated MLPs, grouped queries, and no dropout.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from synergy_core.errors import InputError
from synergy_core.performance.planner.machine import Software, with_settings
from synergy_core.performance.planner.plan import Plans
from synergy_core.performance.planner.work import (
    Amount,
    Attention,
    Block,
    Gemm,
    Layers,
    Limits,
    SavedActivations,
    Work,
    at_least,
    block_of,
    divisors,
)

Number = NDArray[Any] | int


@dataclass(frozen=True, slots=True)
class Architecture:
    """A decoder, or an encoder with causal=False."""

    layers: Number
    """Number of layers."""
    hidden: Number
    """Width of a layer's input."""
    heads: Number
    """Number of heads of queries."""
    ffn: Number
    """Width of an MLP."""
    vocab: Number
    """Number of tokens in the vocabulary."""
    seq_len: Number
    """Tokens of a sequence; of a `tower`, the patches that it reads of a sample."""
    kv_heads: Number = 0
    """Number of heads of keys and values; 0: as many as heads."""
    head_width: Number = 0
    """Width of a head's queries, keys and values; 0: hidden ÷ heads."""
    gated: NDArray[np.bool_] | bool = False
    """Whether MLPs have three matrices instead of two."""
    tied: NDArray[np.bool_] | bool = True
    """Whether logits use the embedding's matrix."""
    learned_positions: NDArray[np.bool_] | bool = True
    """Whether positions are a learned table instead of rotations of queries and keys."""
    causal: bool = True
    """Whether a token sees only itself and the tokens before it."""
    window: int = 0
    """Number of keys that a query sees in layers with a window."""
    windowed: float = 0.0
    """Fraction of the layers that have a window, in [0, 1]."""
    tower: Architecture | None = None
    """A frozen encoder of images; None if there is none, or if it is left out."""

    @property
    def width(self) -> Number:
        return np.where(np.asarray(self.head_width) > 0, self.head_width, np.asarray(self.hidden) // self.heads)

    @property
    def groups(self) -> Number:
        return np.where(np.asarray(self.kv_heads) > 0, self.kv_heads, self.heads)

    def attention_parameters(self) -> Amount:
        return np.asarray(self.hidden, float) * self.width * (2.0 * np.asarray(self.heads) + 2.0 * self.groups)

    def mlp_parameters(self) -> Amount:
        result: Amount = np.where(self.gated, 3.0, 2.0) * self.hidden * np.asarray(self.ffn, float)
        return result

    def embedding_parameters(self, tensor: Amount = 1.0) -> Amount:
        """Parameters of the token table, padded to a multiple of 128 × the tensor-parallel degree, as in Megatron."""
        unit = 128.0 * np.asarray(tensor)
        return np.ceil(np.asarray(self.vocab) / unit) * unit * self.hidden

    def parameters(self) -> Amount:
        """Parameters of the whole model, each counted once, without padding."""
        layer = self.attention_parameters() + self.mlp_parameters() + 4.0 * np.asarray(self.hidden)
        tables = np.where(self.tied, 1.0, 2.0) * np.asarray(self.vocab, float) * self.hidden
        positions = np.where(self.learned_positions, np.asarray(self.seq_len, float) * self.hidden, 0.0)
        result: Amount = np.asarray(self.layers) * layer + tables + positions
        return result

    def limits(self) -> Limits:
        """Limits by the numbers of layers, heads, key-value heads and tokens."""
        return Limits(int(self.layers), int(self.heads), int(self.groups), int(self.seq_len))

    def check(self) -> None:
        at_least(1, layers=self.layers, hidden=self.hidden, heads=self.heads, ffn=self.ffn, vocab=self.vocab)
        at_least(1, seq_len=self.seq_len)
        if not self.head_width and self.hidden % self.heads:
            raise InputError(
                f"heads: {self.heads} do not divide hidden: {self.hidden}; "
                f"give head_width, or heads such as {_nearest_divisor(int(self.hidden), int(self.heads))}."
            )
        if self.kv_heads and self.heads % self.kv_heads:
            near = _nearest_divisor(int(self.heads), int(self.kv_heads))
            raise InputError(f"kv_heads: {self.kv_heads} do not divide heads: {self.heads}; such as {near}.")
        if not 0.0 <= self.windowed <= 1.0 or (self.windowed and not self.window):
            raise InputError(
                f"windowed: {self.windowed:g} with window: {self.window}; expected the share of layers whose queries "
                "see that many keys, 0 to 1."
            )


def tower(a: Architecture, plans: Plans, software: Software) -> Layers:
    """The layers of a frozen vision tower. Documents are packed and adapters trained in the language model alone."""
    return work(a, plans, with_settings(software, mean_len=0, adapter_rank=0)).layers[0]


def work(architecture: Architecture, plans: Plans, software: Software) -> Work:
    """Operators of one micro-batch on one GPU."""
    a = architecture
    parts = near_sighted(a, attention_part(a, plans, software)), mlp_part(a, plans, software)
    layer = block_of("layer", combined(*parts) | boundary(a, plans, software))
    return Work(
        before=embedding(a, plans, software),
        layers=(Layers(layer, np.asarray(a.layers, float)),),
        after=logits(a, plans, software),
        tower=tower(a.tower, plans, software) if a.tower else None,
    )


def _nearest_divisor(number: int, wanted: int) -> int:
    return min(divisors(number), key=lambda each: abs(each - wanted))


Part = dict[str, Any]
"""Amounts of a part of a block, by the names of `block_of`."""


def combined(*parts: Part) -> Part:
    """Block fields of all parts, run one after another.

    All saved bytes are in memory while a part runs: live bytes are their sum plus the largest temporary of any part.
    """
    result: Part = {}
    for part in parts:
        saved = part.get("saved_bytes", 0.0)
        selective = part.get("selective_bytes", saved)
        kept = {"selective_bytes": saved, "operator_bytes": selective, "module_bytes": selective}
        for name, value in {**kept, **part, "live_bytes": part.get("live_bytes", 0.0) - saved}.items():
            joined = np.maximum if name in ("live_bytes", "tensor_bytes") else operator.add
            result[name] = joined(result[name], value) if name in result else value
    result["live_bytes"] = result["live_bytes"] + result.get("saved_bytes", 0.0)
    return result


def boundary(a: Architecture, plans: Plans, software: Software) -> Part:
    """Bytes of a layer's input or output, which stages send to each other and full recomputation keeps."""
    size = software.element_bytes * tokens_per_gpu(a, plans) * a.hidden / sequence_shards(plans)
    return {"boundary_bytes": size, "input_bytes": size}


def tokens_per_gpu(a: Architecture, plans: Plans) -> Amount:
    """Tokens of one micro-batch on one context-parallel rank."""
    result: Amount = plans.micro_batch * np.asarray(a.seq_len, float) / plans.context
    return result


def sequence_shards(plans: Plans) -> NDArray[np.float64]:
    """Number of ranks that split the norms and residuals: the tensor degree under sequence parallelism, else 1."""
    return np.where(plans.sequence, plans.tensor, 1).astype(float)


def _residual_bytes(plans: Plans, software: Software) -> Amount:
    """Bytes saved per token and hidden unit: a norm's input and output, and the dropout mask after the block.

    Sequence parallelism splits all three, but plain autograd (`eager`) keeps the gathered output. A compiler computes
    the norm again, but gathers nothing again (PyTorch's partitioner recomputes no collective).
    """
    split, mask, e = sequence_shards(plans), 1.0 if software.dropout else 0.0, software.element_bytes
    output: Amount = software.input_bytes / (1.0 if software.eager else split)
    return (e + mask) / split + (np.where(split > 1, output, 0.0) if software.compiled else output)


def cast_bytes(software: Software) -> float:
    """Bytes per element of the FP8 copy of attention's output that the next product keeps for its backward pass.

    0 in other precisions, in which attention and the product keep the same array.
    """
    return software.input_bytes if software.input_bytes < software.element_bytes else 0.0


def residual_traffic(software: Software) -> float:
    """Memory traffic, bytes per token and hidden unit, of a block's norm and of bias, dropout and residual at its end.

    The norm reads one array and writes one. Bias, dropout and residual in one kernel read two arrays and write one and
    a mask. As separate kernels (not `fused`), bias and dropout each read and write one more array.
    """
    arrays = 5.0 if software.fused else 9.0
    return arrays * software.element_bytes + (1.0 if software.dropout else 0.0)


def attention_core(a: Architecture, plans: Plans, software: Software, width: Amount, value_width: Amount) -> Attention:
    """Attention on one rank: its part of the heads (tensor) and of the queries (context parallelism), and all keys.

    With all-to-alls, context-parallel ranks split heads too. Packed documents are so many shorter sequences: varlen
    fused attention skips the scores between them (Dao, arXiv 2307.08691; flash_attn_varlen_func).
    """
    heads, seq_len = plans.micro_batch * np.asarray(a.heads) / plans.tensor, np.asarray(a.seq_len, float)
    length = np.minimum(seq_len, software.run.mean_len) if software.flash and software.run.mean_len else seq_len
    ranks = 1 if software.communication.cp_comm_type == "a2a" else plans.context
    count = heads * (seq_len / length) * ranks / plans.context
    return Attention(count, length / ranks, length, width, value_width, a.causal)


def attention_part(a: Architecture, plans: Plans, software: Software) -> Part:
    """Block fields of norm, query, key and value projections, attention, output projection, dropout and residual."""
    t, split, tokens = plans.tensor, sequence_shards(plans), tokens_per_gpu(a, plans)
    hidden, heads, width = np.asarray(a.hidden, float), np.asarray(a.heads) / t, a.width
    groups = np.maximum(np.asarray(a.groups) / t, 1.0)
    columns = (heads + 2.0 * groups) * width
    scores = plans.micro_batch * heads * np.asarray(a.seq_len, float) ** 2 / plans.context
    e, mask = software.element_bytes, 1.0 if software.dropout else 0.0
    saved = tokens * hidden * _residual_bytes(plans, software)
    saved = saved + tokens * (e * columns + (e + cast_bytes(software)) * heads * width)
    if software.keeps_all:  # Rotated queries and keys, and the output copied for the projection, are extra arrays.
        rotated = np.where(a.learned_positions, 0.0, e * (heads + groups) * width)
        saved = saved + tokens * (rotated + e * heads * width)
    # The output of softmax is kept and, with dropout, also the mask and the output of dropout.
    kept_scores = 0.0 if software.flash else scores * (e + (e + 1.0) * mask)
    statistics = 4.0 * tokens * heads if software.flash else 0.0
    exchanged = columns + heads * width if software.communication.cp_comm_type == "a2a" else 2.0 * groups * width
    gradients = e * tokens * (2.0 * hidden + columns + heads * width)
    gradients = gradients + (0.0 if software.flash else 2.0 * e * scores)
    return {
        "gemms": (Gemm(tokens, columns, hidden, parts=3.0), Gemm(tokens, hidden, heads * width)),
        "attention": (attention_core(a, plans, software, width, width),),
        "replicated_bytes": tokens * hidden * residual_traffic(software) / split,
        "split_bytes": 2.0 * e * tokens * columns,
        "kernels": 5.0 if software.fused else 8.0,
        "tensor_bytes": e * tokens * hidden,
        "tensor_count": 1.0,
        "context_bytes": e * tokens * exchanged,
        "parameters": hidden * width * (2.0 * heads + 2.0 * groups) + 2.0 * hidden,
        "saved_bytes": saved + kept_scores + statistics,
        "selective_bytes": saved + statistics,
        "operator_bytes": statistics
        + 0.5 * e * tokens * (hidden * (2.0 / split + 1.0) + columns + 2.0 * heads * width),
        "live_bytes": saved + kept_scores + statistics + gradients,
    }


def near_sighted(a: Architecture, part: Part) -> Part:
    """The block fields of attention, averaged over all layers, if some layers have a window.

    A window counts as if every query saw all of it, but as no more than causal attention without a window.
    """
    if not a.windowed:
        return part
    (full,) = part["attention"]
    keys = np.minimum(a.window, full.keys * (0.5 if full.causal else 1.0))
    near = replace(full, count=full.count * a.windowed, keys=keys, causal=False)
    rest = replace(full, count=full.count * (1.0 - a.windowed))
    return {**part, "attention": (rest, near)}


def mlp_part(a: Architecture, plans: Plans, software: Software) -> Part:
    """Block fields of norm, up (and gate) projection, activation, down projection, dropout and residual."""
    t, split, tokens = plans.tensor, sequence_shards(plans), tokens_per_gpu(a, plans)
    hidden, ffn = np.asarray(a.hidden, float), np.asarray(a.ffn) / t
    up = np.where(a.gated, 2.0, 1.0) * ffn
    e = software.element_bytes
    activated = 0.0 if software.compiled else software.input_bytes * ffn
    saved = tokens * (hidden * _residual_bytes(plans, software) + e * up + activated)
    if software.keeps_all:  # Autograd also keeps the activated half of a gated MLP.
        saved = saved + np.where(a.gated, e, 0.0) * tokens * ffn
    replicated = tokens * hidden * residual_traffic(software) / split
    # As a separate kernel, the bias reads and writes its array once more.
    inner = e * tokens * (up + ffn + (0.0 if software.fused else 2.0) * up)
    return {
        "gemms": (
            Gemm(tokens, up, hidden, again=True, parts=np.where(a.gated, 2.0, 1.0)),
            Gemm(tokens, hidden, ffn, again=True),
        ),
        "replicated_bytes": replicated,
        "split_bytes": inner,
        "kernels": 5.0 if software.fused else 8.0,
        "tensor_bytes": e * tokens * hidden,
        "tensor_count": 1.0,
        "parameters": hidden * (up + ffn) + 2.0 * hidden,
        "saved_bytes": saved,
        "operator_bytes": 0.5 * e * tokens * (up + hidden),
        "module_bytes": tokens * hidden * (e + (1.0 if software.dropout else 0.0)) / split,
        "again_bytes": replicated + inner,
        "again_count": 1.0,
        "live_bytes": saved + e * tokens * (up + ffn) + 2.0 * e * tokens * hidden,
    }


def embedding(a: Architecture, plans: Plans, software: Software) -> Block:
    """The block of the token table, positions and dropout."""
    tokens, hidden, split = tokens_per_gpu(a, plans), np.asarray(a.hidden, float), sequence_shards(plans)
    e, mask = software.element_bytes, 1.0 if software.dropout else 0.0
    positions = np.where(a.learned_positions, np.asarray(a.seq_len, float) * hidden, 0.0)
    tokens_table = a.embedding_parameters(plans.tensor) / plans.tensor
    return Block(
        name="embedding",
        replicated_bytes=tokens * hidden * (4.0 * e + mask) / split,
        kernels=4.0,
        tensor_bytes=e * tokens * hidden,
        tensor_count=1.0,
        parameters=tokens_table + positions,
        tables=((tokens_table / hidden, hidden), (positions / hidden, hidden)),
        boundary_bytes=e * tokens * hidden / split,
        saved=SavedActivations(tokens * hidden * mask / split),
        live_bytes=2.0 * e * tokens * hidden / split,
    )


def logits(a: Architecture, plans: Plans, software: Software) -> Block:
    """The block of the final norm, the product with the vocabulary, and cross entropy in fp32."""
    t, split, tokens = plans.tensor, sequence_shards(plans), tokens_per_gpu(a, plans)
    hidden = np.asarray(a.hidden, float)
    table = a.embedding_parameters(t) / t
    columns = table / hidden
    shared = np.asarray(a.tied) & (plans.pipeline == 1)
    saved = tokens * hidden * _residual_bytes(plans, replace(software, dropout=False))
    saved = saved + software.memory.logit_bytes * tokens * columns
    return Block(
        name="logits",
        gemms=(Gemm(tokens, columns, hidden, stored=np.where(shared, 0.0, 1.0)),),
        replicated_bytes=2.0 * software.element_bytes * tokens * hidden / split,
        split_bytes=18.0 * tokens * columns,
        kernels=10.0,
        tensor_bytes=software.element_bytes * tokens * hidden,
        tensor_count=0.5,
        parameters=np.where(shared, 0.0, table) + 2.0 * hidden,
        saved=SavedActivations(saved),
        live_bytes=saved,
    )
