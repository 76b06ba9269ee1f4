"""Which training software a measured row ran on, from its words; and what that software does by itself."""

from __future__ import annotations

import re
from dataclasses import replace

from synergy_core.catalog.sheets import gpu_sheet
from synergy_core.planner.software import Software, running_on, software_named, software_names

_PRECISIONS = (
    ("fp8", r"fp8|e4m3|hybrid"),
    ("bf16", r"bf16|bfloat16"),
    ("fp16", r"fp16|float16|half|^amp$|mixed"),
    ("tf32", r"tf32"),
    ("fp32", r"fp32|float32"),
)
_FLASH = re.compile(r"flash|sdpa|fused|cudnn|triton|\bte\b|xformers|memory.?efficient")
_NOT_FLASH = re.compile(r"unfused|math|eager|naive|^torch$|^core|\bno(t|n|)\b|local")


def software_name(*, source: str, notes: str, model: str, gpu: str, tensor: int, pipeline: int, zero: int) -> str:
    """A name of catalog/software/. Megatron on GPUs that are younger than FlashAttention is Megatron Core.

    Where the words name several, the first that no other of them is like: torchtitan's FSDP is torchtitan.
    """
    words = f"{source} {notes} {model}".lower()
    every = [software_named(name) for name in software_names()]
    found = [each for each in every if each.words and re.search(each.words, words)]
    for one in found:
        if not any(one.name in each.like for each in found):
            return one.name
    if zero == 3 and tensor == 1 and pipeline == 1:
        return "fsdp"
    return "megatron-core" if _newer_than_flash(gpu) else "megatron"


def precision(text: str) -> str | None:
    """`bf16` of `amp_bf16`; bf16 where nothing is said; None for one that is not modelled."""
    plain = text.strip().lower()
    if not plain:
        return "bf16"
    return next((name for name, pattern in _PRECISIONS if re.search(pattern, plain)), None)


def software(name: str, *, dtype: str, attention: str, gated: bool, gpu: str, notes: str = "") -> Software | None:
    """The stack of that name as this row ran it; None where its precision is not modelled."""
    kind = precision(dtype)
    if kind is None:
        return None
    sheet = gpu_sheet(gpu)
    if not dtype.strip() and sheet is not None:
        kind = running_on(Software("", precision=kind), sheet).precision
    base = software_named(f"{name}-fp8" if kind == "fp8" and f"{name}-fp8" in software_names() else name)
    plain = attention.strip().lower()
    if plain:
        flash = not _NOT_FLASH.search(plain) and bool(_FLASH.search(plain))
    else:
        flash = base.flash or gated or _newer_than_flash(gpu)
    gradient = base.gradient_bytes
    if "mode default" in notes.lower() or "fp32 grad" in dtype.lower():
        gradient = 4.0  # Composer's FSDP reduces in fp32 unless mixed_precision is PURE
    weight = 4.0 if kind in ("tf32", "fp32") else base.weight_bytes
    return replace(
        base,
        precision=kind,
        flash=flash,
        dropout=base.dropout and not gated,
        weight_bytes=weight,
        gradient_bytes=4.0 if weight > base.weight_bytes else gradient,
        optimizer_bytes=8.0 if weight > base.weight_bytes else base.optimizer_bytes,
    )


def _newer_than_flash(gpu: str) -> bool:
    """Whether the software of that GPU type has flash attention by default."""
    sheet = gpu_sheet(gpu)
    return sheet is not None and sheet.since_hopper
