"""How a run differs from its stack's default: its optimizer, adapters on frozen weights, its loss, offloading.

Each changes fields of `Software`, so memory, time and search treat it like any other stack.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from synergy_core.errors import InputError, unknown
from synergy_core.planner.machine import Software


class Optimizer(NamedTuple):
    """state_bytes: bytes of states per parameter, without a master copy. foreach: whether torch's foreach kernels make
    an fp32 array of a state during the update. words: a regular expression of its names in people's files, in lower
    case; empty: none is read."""

    state_bytes: float
    foreach: bool = False
    words: str = ""


OPTIMIZERS: Mapping[str, Optimizer] = {
    "adamw": Optimizer(
        8.0, foreach=True, words=r"(fused|deepspeedcpu|cpu|paged_)?adam(w?|w_(torch|torch_fused|hf|apex_fused|32bit))"
    ),
    "adamw_bf16": Optimizer(4.0),
    "adamw8bit": Optimizer(2.0 * (1.0 + 4.0 / 256), words=r"adamw?_?(bnb_|torch_)?8bit"),
    "paged_adamw8bit": Optimizer(2.0 * (1.0 + 4.0 / 256), words=r"paged_adamw_?8bit"),
    "adafactor": Optimizer(0.0, words="adafactor"),
    "lion": Optimizer(4.0, words=r"(paged_)?lion(_pytorch|_32bit)?"),
    "lion8bit": Optimizer(1.0 + 4.0 / 256, words=r"(paged_)?lion_8bit"),
    "muon": Optimizer(4.0, words="(dist_)?muon"),
    "sgd": Optimizer(0.0),
    "sgd_momentum": Optimizer(4.0, foreach=True),
}
"""adamw: two fp32 moments (Loshchilov and Hutter, arXiv 1711.05101). 8 bits: a byte a moment, and an fp32 constant for
each block of 256 values (bitsandbytes-foundation/bitsandbytes, optim/adamw.py; blocks of 2,048 in Dettmers et al.,
arXiv 2110.02861); states that may be paged to the host count. adafactor: sums of rows and columns only (Shazeer and
Stern, arXiv 1804.04235). lion: one moment (arXiv 2302.06675). muon: one momentum of matrices (Jordan et al. 2024); its
products are not timed."""

FROZEN_BYTES: Mapping[int, float] = {16: 2.0, 8: 1.0, 4: 0.5 + 0.127 / 8}
"""Bytes per frozen weight of a matrix by bits. 4: NF4 with doubly quantized constants, 0.127 bits a weight (QLoRA,
Dettmers et al., arXiv 2305.14314, section 3)."""

LOSSES: Mapping[str, float] = {"compiled": 6.0, "chunked": 14.0 / 8}
"""Bytes alive at once per logit. compiled: 16-bit logits and one fp32 array (pytorch/torchtitan, components/loss.py).
chunked: plain cross entropy on an eighth of the tokens at a time (the same; Liger's fused loss keeps less, arXiv
2410.10989)."""


def tuned(
    software: Software,
    *,
    optimizer: str | None = None,
    lora: int | None = None,
    quantize: int | None = None,
    loss: str | None = None,
    offload: str | None = None,
    recompute_layers: int | None = None,
    shards: int | None = None,
    layers: int = 1,
) -> Software:
    """The stack as a run uses it. None: its default. lora: rank of adapters on all linear layers of the blocks.

    quantize: bits of the frozen weights under adapters. recompute_layers: how many of the model's `layers` recompute,
    evenly over the stages, as Megatron's --recompute-method block has it for each. shards: ranks that share states out
    among them under ZeRO, such as those of a node (PyTorch's HSDP). Raises InputError for unknown names,
    and for quantized weights without adapters.
    """
    if optimizer is not None and optimizer not in OPTIMIZERS:
        raise unknown("optimizer", optimizer, OPTIMIZERS)
    if optimizer not in (None, "adamw"):  # adamw is every stack's own
        found = OPTIMIZERS[optimizer]
        states = found.state_bytes - software.state_bytes
        software = replace(
            software,
            optimizer_bytes=software.optimizer_bytes + states,
            state_bytes=found.state_bytes,
            foreach=software.foreach and found.foreach,
        )
    if quantize is not None and lora is None:
        raise InputError(f"quantize={quantize} is for frozen weights under adapters; give their rank, such as lora=16.")
    if lora is not None:
        if quantize is not None and quantize not in FROZEN_BYTES:
            raise InputError(f"quantize={quantize}: expected {', '.join(map(str, FROZEN_BYTES))} bits.")
        frozen = software.weight_bytes if quantize is None else FROZEN_BYTES[quantize]
        software = replace(software, adapter_rank=lora, frozen_bytes=frozen)
    if loss is not None:
        if loss not in LOSSES:
            raise unknown("loss", loss, LOSSES)
        software = replace(software, logit_bytes=LOSSES[loss])
    if offload is not None:
        if offload != "optimizer":
            raise unknown("offload", offload, ("optimizer",))
        software = replace(software, offload=True)
    if shards is not None:
        software = replace(software, shard_ranks=shards)
    if recompute_layers is not None:
        if recompute_layers > layers:
            raise InputError(f"recompute_layers={recompute_layers}: the model has {layers} layers.")
        software = replace(software, recomputed_fraction=recompute_layers / layers)
    return software


def in_words(**chosen: object) -> str:
    """The choices of `tuned` as typed, for the line that says what was asked; empty without any."""
    return "".join(f", {name}={value}" for name, value in chosen.items() if value is not None)
