"""How a run differs from its stack's default: its optimizer, adapters on frozen weights, its loss, offloading.

Each changes fields of `Software`, so memory, time and search treat it like any other stack.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from synergy_core.errors import InputError, unknown
from synergy_core.performance.planner.machine import Software, with_settings


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

CP_TYPES = ("p2p", "a2a")
"""How context-parallel ranks get what attention needs, in Megatron Core's words. p2p: keys and values pass round a
ring. a2a: all-to-alls give each rank all tokens of its part of the heads (DeepSpeed-Ulysses, arXiv 2309.14509)."""
OFFLOADS = ("optimizer", "parameters", "activations", "nvme")
"""Words of `offload`. optimizer: the host keeps states, under ZeRO 2 and 3 also gradients, and updates the weights
(ZeRO-Offload, ATC 2021). parameters: the host keeps weights, which every pass reads (ZeRO 3 only). nvme: drives keep
these two in place of the host (ZeRO 3 only; ZeRO-Infinity, arXiv 2104.07857; deepspeedai/DeepSpeed,
docs/_pages/config-json.md: offload_param and offload_optimizer). activations: the host keeps what layers keep for the
backward pass (Megatron Core's cpu_offloading, which has neither pipeline stages nor recomputation; huggingface/trl,
SFTConfig.activation_offloading; Composer's activation_cpu_offload)."""


def tuned(
    software: Software,
    *,
    optimizer: str | None = None,
    lora: int | None = None,
    quantize: int | None = None,
    loss: str | None = None,
    offload: str | None = None,
    offload_layers: int | None = None,
    recompute_layers: int | None = None,
    trainable_layers: int | None = None,
    cp_comm_type: str | None = None,
    mean_len: int | None = None,
    shards: int | None = None,
    layers: int = 1,
) -> Software:
    """Returns the training stack with the settings that a run changes. None: the stack's own setting.

    lora: rank of adapters on all linear layers of the blocks.

    quantize: bits of the frozen weights under adapters. offload: some of `OFFLOADS`, separated by commas.
    offload_layers: how many of the model's `layers` offload their activations. recompute_layers: how many recompute,
    evenly over the stages, as Megatron's --recompute-method block has it for each. trainable_layers: how many are
    trained, the last ones; all else is frozen. mean_len: tokens of each document that is packed into a sequence; all
    are taken to be equally long. shards: ranks that share states out among them under ZeRO, such as those of a node
    (PyTorch's HSDP). Raises InputError for unknown names, for values that the stack lacks, and for those that need
    another setting or exclude one.
    """
    words = tuple(offload.split(",")) if offload else ()
    words += ("activations",) * (offload_layers is not None and "activations" not in words)
    named = [("optimizer", optimizer, OPTIMIZERS), ("loss", loss, LOSSES), ("cp_comm_type", cp_comm_type, CP_TYPES)]
    for key, name, names in [*named, *(("offload", each, OFFLOADS) for each in words)]:
        if name is not None and name not in names:
            raise unknown(key, name, names)
    if "parameters" in words and "offload" not in software.supports.tunings:  # PyTorch's FSDP moves both together
        words = tuple(dict.fromkeys(("optimizer", *words)))
    is_alone = "optimizer" in words and "parameters" not in words
    needed = [f"offload={each}" for each in words if each != "optimizer"] + ["offload"] * is_alone
    needed += ["cp_comm_type=a2a"] * (cp_comm_type == "a2a") + ["trainable_layers"] * (trainable_layers is not None)
    for setting in needed:
        if setting not in software.supports.tunings:
            typed = "offload=optimizer" if setting == "offload" else setting
            raise InputError(
                f"{typed}: {software.name} lacks it; it has {', '.join(software.supports.tunings) or 'no such'}."
            )
    if "nvme" in words and not {"optimizer", "parameters"} & {*words}:
        raise InputError("offload=nvme says where, not what; type offload=nvme,optimizer or nvme,parameters.")
    if quantize is not None and lora is None:
        raise InputError(f"quantize={quantize} is for frozen weights under adapters; give their rank, such as lora=16.")
    if quantize is not None and quantize not in FROZEN_BYTES:
        raise InputError(f"quantize={quantize}: expected {', '.join(map(str, FROZEN_BYTES))} bits.")
    if trainable_layers is not None and lora is not None:
        raise InputError("trainable_layers= trains whole layers, and lora= adapters alone; leave one out.")
    changed: dict[str, Any] = {"offload": words, "logit_bytes": loss and LOSSES[loss], "shard_ranks": shards}
    changed |= {"cp_comm_type": cp_comm_type, "mean_len": mean_len, "adapter_rank": lora}
    changed["trains_tables"] = lora is None and trainable_layers is None
    if optimizer not in (None, "adamw"):  # adamw is every stack's own
        found = OPTIMIZERS[optimizer]
        changed["optimizer_bytes"] = software.optimizer_bytes + (found.state_bytes - software.memory.state_bytes)
        changed |= {"state_bytes": found.state_bytes, "foreach": software.memory.foreach and found.foreach}
    if lora is not None:
        changed["frozen_bytes"] = software.weight_bytes if quantize is None else FROZEN_BYTES[quantize]
    if {"parameters", "nvme"} & {*words}:
        changed["zeros"] = (3,)
    if "activations" in words and "pipeline" in software.supports.splits:  # Megatron Core
        changed["splits"] = tuple(each for each in software.supports.splits if each not in ("pipeline", "interleave"))
        changed["recomputes"] = ("none",)
    of_layers = {"recomputed": recompute_layers, "offloaded": offload_layers, "trained": trainable_layers}
    for name, count in of_layers.items():
        if count is not None and count > layers:
            raise InputError(f"{count} {name} layers: the model has {layers} layers.")
        changed[f"{name}_fraction"] = count and count / layers
    return with_settings(software, **{name: value for name, value in changed.items() if value is not None})


def in_words(**chosen: object) -> str:
    """The choices of `tuned` as typed, for the line that says what was asked; empty without any."""
    return "".join(f", {name}={value}" for name, value in chosen.items() if value is not None)
