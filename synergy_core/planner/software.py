"""What a training stack does by itself, whatever the plan: precision, kernels, what is kept in which type."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from synergy_core.catalog import from_yaml
from synergy_core.catalog.sheets import GpuSheet
from synergy_core.errors import unknown


@dataclass(frozen=True, slots=True)
class Software:
    """A family of training software, with its settings.

    precision: of matrix products: bf16, fp16, fp8, tf32 or fp32. flash: whether attention scores never reach memory.
    dropout: whether masks are kept. gradient_bytes: per parameter, 2 or 4, of gradients and of what is reduced.
    optimizer_bytes: per parameter, of what the optimizer keeps: master copy and two moments in fp32 are 12.
    weight_bytes: per parameter, as used by matrix products. prefetch: gathered units alive at once under ZeRO-3.
    logit_bytes: per logit, the most alive at once: 6 with a softmax in place (Megatron: 16-bit logits, fp32 softmax),
    8 where the softmax is a second fp32 array (nanotron), 14 through PyTorch's own cross entropy (16-bit logits, fp32
    log-softmax and the gradients of both). eager: whether plain autograd decides what is kept: inputs gathered along
    the sequence, queries and keys before and after rotation, the activated half of a gated MLP; otherwise backward
    passes written by hand keep only what they need. weighs_logits: whether stages are cut by compute, the logits
    counted, instead of by layers. gathers_from_master: whether ZeRO-3 keeps no weights beside the optimizer's fp32
    copy (PyTorch's FSDP). workspace_bytes: what libraries of matrix products hold of the allocator's memory: 32 MiB by
    cuBLAS (PyTorch's choice from Hopper on; 8 MiB before), and as much twice by Transformer Engine.
    sends_once: whether a token goes to each other node once, however many of its experts are there (DeepEP).
    like: whose constants stand in on a GPU type on which it was not measured, in this order; none: any software's.
    words: a regular expression that finds it in what measurement files say.
    """

    name: str
    precision: str = "bf16"
    flash: bool = True
    dropout: bool = False
    weight_bytes: float = 2.0
    gradient_bytes: float = 4.0
    optimizer_bytes: float = 12.0
    prefetch: int = 2
    logit_bytes: float = 6.0
    eager: bool = False
    weighs_logits: bool = False
    gathers_from_master: bool = False
    workspace_bytes: float = 96.0 * 2**20
    sends_once: bool = False
    like: tuple[str, ...] = ()
    words: str = ""
    title: str = ""
    source: str = ""

    @property
    def fitted_as(self) -> str:
        """Under which name its constants stand: products in FP8 run other kernels."""
        return f"{self.name}-fp8" if self.precision == "fp8" and not self.name.endswith("-fp8") else self.name


_FOLDER = Path(__file__).parents[1] / "catalog" / "software"


@cache
def software_names() -> tuple[str, ...]:
    """Every training stack of the catalog."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.yaml")))


@cache
def software_named(name: str) -> Software:
    """A training stack of the catalog. Raises InputError with the nearest match for an unknown one, its like too."""
    if name not in software_names():
        hint = "A file synergy_core/catalog/software/<name>.yaml adds one."
        raise unknown("training software", name, software_names(), hint=hint)
    found = from_yaml(Software, _FOLDER / f"{name}.yaml")
    for each in found.like:
        if each not in software_names():
            raise unknown(f"training software that {name} is like,", each, software_names())
    return found


def running_on(software: Software, gpu: GpuSheet) -> Software:
    """The stack as it runs on that GPU: bf16 and fp8 become fp16 where its tensor cores know fp16 only."""
    only_fp16 = "fp16" in gpu.tensor_flops_per_s and "bf16" not in gpu.tensor_flops_per_s
    return replace(software, precision="fp16") if only_fp16 and software.precision in ("bf16", "fp8") else software
