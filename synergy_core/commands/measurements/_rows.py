"""Converts a row of measurements into the planner's objects: architecture, machine and software."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

from synergy_core.commands.measurements._table import TableRow
from synergy_core.performance.catalog import gpu_sheet
from synergy_core.performance.catalog.columns import named_in
from synergy_core.performance.planner.families import architecture_named, architecture_names, family_named, transformer
from synergy_core.performance.planner.machine import (
    Machine,
    Software,
    machine_named,
    running_on,
    software_named,
    software_names,
    with_gradients,
    with_settings,
)
from synergy_core.performance.planner.plan import Plan


class UnpredictableError(Exception):
    """A row cannot be predicted; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One possible configuration of a measured run. A row with unstated fields has several, the most usual first."""

    architecture: Any
    plan: Plan
    machine: Machine
    software: Software


# Finds the model of a row in the catalog by its name, if the columns agree with the catalog, or else builds it from the
# columns. Columns cannot express head widths other than hidden ÷ heads, latent attention and shared experts.


SIZE_TOLERANCE = 0.01
"""Largest relative difference between computed and stated parameter counts that still counts as equal."""
_SCALARS = ("bool", "str", "float", "int", "Architecture | None")
"""Architecture fields of these types have one value for all plans; the others are arrays (plans,)."""


def architecture_of(row: TableRow, untied: bool | None) -> Any:
    """The `Architecture` of a row's model. untied: whether logits have their own weight matrix; None if unstated.

    A model that is not in the catalog is taken as Llama-like (own matrix for logits, no learned positions) if its MLP
    is gated, otherwise as GPT-like (tied embeddings, learned positions). The opposite tying is used if only it gives
    the stated `params`. Raises UnpredictableError for missing sizes."""
    gated = row.flag("gated_mlp") or False
    sizes = {name: row.whole(name) for name in ("layers", "hidden", "heads", "ffn", "seq_len", "vocab")}
    kv_heads, experts, topk = (row.whole(name) for name in ("kv_heads", "n_experts", "topk"))
    params = row.number("params")
    known = _catalog_architecture(row.text("model"))
    # The width of the MLP is not compared, because files state it in different ways.
    compared = [name for name in ("layers", "hidden", "heads", "vocab") if sizes[name] is not None]
    if known is not None and all(getattr(known, name, None) == sizes[name] for name in compared):
        reads_sequences = "seq_len" in {field.name for field in fields(known)}
        return replace(known, seq_len=sizes["seq_len"]) if sizes["seq_len"] and reads_sequences else known
    missing = [name for name, value in sizes.items() if value is None]
    if missing or (experts and topk is None):
        absent = ", ".join(missing) or "topk"
        raise UnpredictableError(f"{absent} not stated, and the catalog has no architecture '{row.text('model')}'")
    values: dict[str, Any] = {
        **sizes,
        "kv_heads": kv_heads or sizes["heads"],
        "gated": gated,
        "tied": not gated if untied is None else not untied,
        "learned_positions": not gated,
    }
    if experts:
        mixture = family_named("mixture").Architecture
        return mixture(**values, experts=experts, topk=topk, expert_ffn=sizes["ffn"])
    result = transformer.Architecture(**values)
    if params and untied is None:
        other = replace(result, tied=not result.tied)
        error, other_error = (abs(float(model.parameters()) / params - 1.0) for model in (result, other))
        if other_error < SIZE_TOLERANCE < error:
            return other
    return result


@cache
def _catalog_architecture(model: str) -> Any:
    """The catalog's architecture for a model name; None if it has none.

    Case, punctuation and text in brackets are ignored, and so is a point release (Llama 3.1 has Llama 3's dimensions).
    """

    def bare(name: str) -> str:
        return re.sub(r"[^a-z0-9.]", "", name.lower())

    plain = re.sub(r"\(.*?\)", "", model).lower()
    known = {bare(name): name for name in architecture_names()}
    for name in (plain, re.sub(r"(?<=\d)\.\d(?![0-9.]*b)", "", plain)):
        if bare(name) in known:
            return architecture_named(known[bare(name)])[1]
    return None


def family_of(architecture: Any) -> ModuleType:
    """The module of an architecture's family."""
    return importlib.import_module(type(architecture).__module__)


def scalars_of(architecture: Any) -> tuple[Any, ...]:
    """Grouping key: architectures with equal keys have the same family and scalar fields, and can be `stacked`."""
    scalars = [(each.name, getattr(architecture, each.name)) for each in fields(architecture) if each.type in _SCALARS]
    return (type(architecture), *scalars)


def stacked(architectures: Iterable[Any]) -> Any:
    """Combines architectures with equal `scalars_of` into one architecture whose numeric fields are arrays (plans,)."""
    every = list(architectures)
    names = [field.name for field in fields(every[0]) if field.type not in _SCALARS]
    return replace(every[0], **{name: np.array([getattr(each, name) for each in every]) for name in names})


# Finds the catalog's GPUs and network rates in free-text descriptions of hardware.


BITS_PER_BYTE = 8.0
MEMORIES_GB = {"a100": (80.0, 40.0), "v100": (32.0, 16.0)}
"""Memory sizes of GPU types that are sold with two (NVIDIA data sheets), the more common size first."""
CARDS_GBIT = {"fdr": 56.0, "edr": 100.0, "hdr": 200.0, "ndr": 400.0, "xdr": 800.0}
"""Gb/s of one four-lane port of each InfiniBand generation (InfiniBand Trade Association's roadmap)."""
EFA_GBIT_PER_NODE = {"v100": 100.0, "a100": 400.0, "h100": 3200.0, "h200": 3200.0, "b200": 3200.0}
"""Network Gb/s of Amazon's node type with each GPU: p3dn, p4d, p5, p5en, p6 (AWS, EC2 accelerated computing)."""
NVL_DOMAIN = 72
"""GPUs in the NVLink domain of a GB200 NVL72 or GB300 NVL72 (data sheet)."""

_GPU_TYPE = re.compile(
    r"(?<![a-z0-9])(g[bh][23]00|[abhlpv][0-9]+[a-z]?|t4|rtx[ _-]?[a-z]*[0-9]+(?:[ _-]?ti)?|mi[0-9]+[a-z]?)(?![a-z0-9])"
)
_MEMORY = re.compile(r"(?<![0-9.])([0-9]+) ?g(?:i?b)?(?![a-z0-9/])")
_CARDS = re.compile(r"(?:([0-9]+) ?[x× ] ?)?(fdr|edr|hdr|ndr|xdr)(?: ?([0-9]+))?")
_CARDS_X_RATE = re.compile(r"([0-9]+) ?[x×] ?([0-9]+(?:\.[0-9]+)?) ?g(?:b|bit)?")
_RATE_X_CARDS = re.compile(r"(?<![0-9.])([0-9]+(?:\.[0-9]+)?) ?g(?:b|bit)?(?:ps|/s)? ?[x×] ?([0-9]+)")
_RATE = re.compile(r"(?<![0-9.])([0-9]+(?:\.[0-9]+)?) ?([gt])(b|bit|be|)(ps|/s|)(?![a-z])", re.IGNORECASE)
_IN_NODE = re.compile(r"nvlink|nvswitch|nvl[0-9]+|pcie?\b")
_NETWORK = re.compile(r"infiniband|\bib\b|[fehnx]dr|ethernet|gbe|roce|efa|\bnics?\b|rdma|omni")


def gpu_type(text: str) -> str:
    """The GPU type in a text, such as `h100` for `H100-SXM-80GB`; the text in lower case if it names no known type."""
    plain = text.strip().lower().replace("tesla", "").replace("nvidia", "").strip(" -_")
    found = _GPU_TYPE.search(plain)
    return re.sub(r"[ _-]", "", found[1]) if found else plain


@cache
def machine_choices(text: str, memory_gb: float | None, gpus_per_node: int, interconnect: str) -> tuple[Machine, ...]:
    """The machines that a row may have run on: the catalog's machine with the row's changes. There are two if the GPU
    type is sold with two memory sizes and the row states neither. Raises UnpredictableError for an unknown GPU.
    """
    name = gpu_type(text)
    if memory_gb is None and (found := _MEMORY.search(text.lower())):
        memory_gb = float(found[1])
    domain = NVL_DOMAIN if name.startswith("gb") and "nvl72" in interconnect.lower() else gpus_per_node
    network = network_bytes_per_s(interconnect, gpus_per_node, name)
    result = []
    for memory in (memory_gb,) if memory_gb is not None else MEMORIES_GB.get(name, (None,)):
        sheet = gpu_sheet(sheet_name(text, memory))
        if sheet is None:
            raise UnpredictableError(f"the catalog has no data sheet of GPU '{text}'")
        machine = machine_named(sheet.name, domain, network)
        if memory is not None:
            machine = replace(machine, memory_bytes=memory * 1e9)
        like = gpu_sheet("h100-pcie") if name == "h100" and "hbm2e" in text.lower() else None
        if like is not None:  # an H100 with HBM2e memory has the PCIe card's bandwidth per byte
            rate = like.memory_bandwidth_bytes_per_s * (machine.memory_bytes / like.memory_bytes)
            machine = replace(machine, gpu=replace(machine.gpu, memory_bandwidth_bytes_per_s=rate))
        result.append(machine)
    return tuple(result)


def sheet_name(text: str, memory_gb: float | None) -> str:
    """The name of a GPU's data sheet in the catalog: of exactly this memory size if there is one, else of the type."""
    name, plain = gpu_type(text), re.sub(r"[ _]+", "-", text.strip().lower())
    form = "pcie" if "pci" in plain else "nvl" if re.search(r"h[12]00-?nvl", plain) else ""
    sizes = [f"{memory_gb:g}gb", f"{memory_gb:g}"] if memory_gb is not None else []
    tried = [plain, plain.replace("-", "_")]
    for parts in (*((name, form, size) for size in sizes), (name, form), *((name, size) for size in sizes), (name,)):
        tried += [joint.join(filter(None, parts)) for joint in "_-"]
    return next((sheet.name for attempt in tried if (sheet := gpu_sheet(attempt))), name)


def network_bytes_per_s(text: str, gpus_per_node: int, gpu_type: str) -> float | None:
    """Each GPU's share of a node's network bandwidth, bytes/s one way; None if the text states no rate.

    A rate, or a number of cards times a rate, is per node unless the text says `per GPU`.
    """
    parts = re.split(r"[,;+]", text)
    text = ",".join(part for part in parts if not _IN_NODE.search(part.lower()) or _NETWORK.search(part.lower()))
    gbit = _gbit(text, gpu_type)
    share = 1 if re.search(r"(per|/) ?gpu", text.lower()) else gpus_per_node
    return gbit * 1e9 / BITS_PER_BYTE / share if gbit else None


def _gbit(text: str, gpu_type: str) -> float | None:
    """Network Gb/s stated in a text: number of cards × their rate, else a rate, else the rate of one card."""
    plain = text.lower()
    cards = _CARDS.search(plain)
    card_gbit = (float(cards[3]) if cards[3] else CARDS_GBIT[cards[2]]) if cards else 0.0
    if cards and cards[1]:
        return float(cards[1]) * card_gbit
    if found := _CARDS_X_RATE.search(plain) or _RATE_X_CARDS.search(plain):
        return float(found[1]) * float(found[2])
    for found in _RATE.finditer(text):
        per_second, bytes_ = bool(found[4]), found[3] == "B"
        if per_second or not bytes_:
            return float(found[1]) * (1e3 if found[2] in "tT" else 1.0) * (BITS_PER_BYTE if bytes_ else 1.0)
    if cards:
        return None if "dgx" in plain else card_gbit
    return EFA_GBIT_PER_NODE.get(gpu_type) if "efa" in plain else None


# Finds the training software of a measured row in its text, and that software's default settings.


_FLASH = re.compile(r"flash|sdpa|fused|cudnn|triton|\bte\b|xformers|memory.?efficient")
_NOT_FLASH = re.compile(r"unfused|math|eager|naive|^torch$|^core|\bno(t|n|)\b|local")


def software_name(words: str, gpu: str, plan: Plan) -> str:
    """The name in catalog/software/ of the training software that a text describes.

    If the text names several, the more specific one is preferred: torchtitan with FSDP is torchtitan, not FSDP.
    If it names none: ZeRO-3 alone means FSDP (in fp16, DeepSpeed); else Megatron Core since Hopper, Megatron before."""
    every = map(software_named, software_names())
    found = [software for software in every if software.words and re.search(software.words, words.lower())]
    for software in found:
        if not any(software.name in other.like for other in found):
            return software.name
    if plan.zero == 3 and plan.tensor == plan.pipeline == 1:
        return "megatron-deepspeed" if "fp16" in words else "fsdp"  # FSDP came when bf16 was usual
    sheet = gpu_sheet(gpu)
    return "megatron-core" if sheet is not None and sheet.since_hopper else "megatron"


def software_of(row: TableRow, plan: Plan) -> Software | None:
    """The training software of a row, with the row's own settings; None if its precision is not modelled.

    An unstated precision is taken as bf16, or as fp16 on GPUs without bf16.
    """
    dtype, notes, attention = (row.text(name).lower() for name in ("dtype", "notes", "attn_impl"))
    gpu = gpu_type(row.text("gpu"))
    sheet = gpu_sheet(gpu)
    precision = named_in("precision", dtype) if dtype else "bf16"
    if precision is None:
        return None
    if not dtype and sheet is not None:
        precision = running_on(Software("", precision=precision), sheet).precision
    name = software_name(f"{row.text('source')} {notes} {row.text('model')} {dtype}", gpu, plan)
    base = software_named(f"{name}-fp8" if precision == "fp8" and f"{name}-fp8" in software_names() else name)
    gated = row.flag("gated_mlp") or False
    if attention:
        flash = not _NOT_FLASH.search(attention) and bool(_FLASH.search(attention))
    else:
        flash = base.flash or gated or (sheet is not None and sheet.since_hopper)
    fused = base.fused and not re.search(r"\beager\b", f"{notes} {attention}")
    result = replace(base, precision=precision, flash=flash, fused=fused, dropout=base.dropout and not gated)
    if precision == "tf32" and "pytorch" in row.text("source").lower():
        # PyTorch's default; NVIDIA's examples set nhwc under AMP (PyTorch/Classification/ConvNets/configs.yml).
        result = replace(result, channels_last=False)
    if precision in ("tf32", "fp32") and base.weight_bytes < 4.0:
        return replace(result, weight_bytes=4.0, gradient_bytes=4.0, optimizer_bytes=8.0)
    if "megatron-bridge" in row.text("source").lower() and "performance" in row.text("source").lower():
        # scripts/performance: grad_reduce_in_fp32 = False; "Using token drop, disabling DeepEP".
        return with_settings(result, gradient_bytes=2.0, sends_once="tokendrop" not in row.text("model"))
    if base.name == "megatron-deepspeed" and precision == "bf16":
        return with_gradients(result, "fp32")  # deepspeed/runtime/bf16_optimizer.py sums and reduces them so
    if "mode default" in notes or "fp32 grad" in dtype:
        return replace(result, gradient_bytes=4.0)  # Composer's FSDP reduces in fp32 unless mixed_precision is PURE
    return result


def with_attention(row: TableRow, software: Software) -> tuple[Software, ...]:
    """The software with each kind of attention that the row may have run, the most usual first.

    A stack that fuses attention only on request has both if the row states neither: in microsoft/Megatron-DeepSpeed,
    --use-flash-attn-v1 and -v2 (megatron/arguments.py) are off unless given, also on Hopper.
    """
    on_request = not row.text("attn_impl") and not row.flag("gated_mlp") and not software_named(software.name).flash
    return (software, replace(software, flash=False)) if software.flash and on_request else (software,)
