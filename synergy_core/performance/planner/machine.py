"""Machines, training software, and the constants fitted to each pair of GPU type and software."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from synergy_core.errors import InputError, same_product, unknown
from synergy_core.performance.catalog import (
    CATALOG,
    NVIDIA,
    GpuSheet,
    file_in,
    filled,
    gpu_sheet,
    gpu_sheets,
    names_in,
    node_sheets,
    read_yaml,
)
from synergy_core.performance.planner.plan import RISING, SPLITS, ZEROS, Recompute


@dataclass(frozen=True, slots=True)
class Machine:
    """Identical nodes. Rates are in bytes/s, one way, per GPU, from data sheets.

    link: `nvswitch` (every pair at full rate), `nvlink` (pairs or a mesh), or `pcie`. link_group: number of GPUs that
    the link joins; larger groups use PCIe. network_bytes_per_s: each GPU's share of the node's network cards.
    host_bytes: memory of the node's host; 0 if it is unknown.
    """

    gpu: GpuSheet
    gpus_per_node: int
    link: str
    link_bytes_per_s: float
    link_group: int
    network_bytes_per_s: float
    memory_bytes: float
    host_bytes: float = 0.0


def machine_named(
    name: str, gpus_per_node: int | None = None, network_bytes_per_s: float | None = None, *, link: str | None = None
) -> Machine:
    """The nodes of a node type (`dgx-2`), or the usual nodes of a GPU type (`a100-80gb`, or an alias).

    gpus_per_node, network_bytes_per_s (per GPU), link: replace the usual values. A node type with exactly gpus_per_node
    GPUs is preferred to the usual one. Raises InputError for an unknown name, with the nearest match; for less than 1
    GPU; for a link that the GPU lacks; for a GPU type without a node type, unless GPUs per node and network are given.
    """
    if gpus_per_node is not None and gpus_per_node < 1:
        raise InputError(f"{gpus_per_node} GPUs per node; expected at least 1.")
    if network_bytes_per_s is not None and network_bytes_per_s < 1e6:
        raise InputError(f"network={network_bytes_per_s:g}: expected bytes/s per GPU; 25 GB/s are 25e9.")
    nodes = node_sheets()
    wanted = nodes[name].gpu if name in nodes else name
    gpu = gpu_sheet(wanted)
    if gpu is None:
        known = {*nodes, *gpu_sheets()}
        hint = f"A file synergy_core/performance/catalog/gpus/{wanted}.yaml adds it; plan also takes gpu={wanted}.yaml."
        raise unknown("GPU or node type", wanted, known, hint=hint, alike=same_product)
    own = [each for each in nodes.values() if each.gpu == gpu.name]
    usual = min(own, key=lambda each: (each.gpus_per_node != gpus_per_node, not each.usual), default=None)
    node = nodes.get(name) or usual
    if node is None and (gpus_per_node is None or network_bytes_per_s is None):
        raise InputError(
            f"no node type of GPU '{gpu.name}' is known; give gpus_per_node= and network=, bytes/s per GPU, or add "
            f"synergy_core/performance/catalog/nodes/<type>.yaml."
        )
    count = gpus_per_node or (node.gpus_per_node if node else 1)
    link_name = link or (node.link if node else "pcie")
    rates = {"nvswitch": gpu.link_bytes_per_s, "nvlink": gpu.link_bytes_per_s, "pcie": gpu.pcie_bytes_per_s}
    if link_name not in rates:
        raise unknown("link", link_name, rates)
    if rates[link_name] == 0:
        raise InputError(f"{gpu.title} has no NVLink; its link can only be pcie.")
    group = 1 if link_name == "pcie" else count
    if node is not None and link is None and node.link_group < node.gpus_per_node:
        group = min(node.link_group, count)
    share = network_bytes_per_s
    if share is None:
        share = node.network_bytes_per_s / node.gpus_per_node if node else 0.0
    host = node.memory_bytes if node and node.gpus_per_node == count else 0.0
    return Machine(gpu, count, link_name, rates[link_name], group, share, gpu.memory_bytes, host)


@dataclass(frozen=True, slots=True)
class MemoryHabits:
    """How a training stack uses GPU memory beyond its bytes per parameter: buffers, workspaces and temporary arrays."""

    prefetch: int = 2
    """Number of blocks whose gathered weights are in memory at once under ZeRO-3."""
    logit_bytes: float = 6.0
    """Largest number of bytes alive at once per logit: 6 if the softmax is in place (Megatron: 16-bit logits, fp32
    softmax), 8 if it is a second fp32 array (nanotron), 14 for PyTorch's own cross entropy (16-bit logits, fp32
    log-softmax and the gradients of both)."""
    gathers_from_master: bool = False
    """Whether ZeRO-3 keeps the weights only as the optimizer's fp32 copy (PyTorch's FSDP)."""
    workspace_bytes: float = 96.0 * 2**20
    """Workspaces of matrix-product libraries: 32 MiB for cuBLAS (PyTorch's choice since Hopper; 8 MiB before), and 64
    MiB for Transformer Engine."""
    grouped_bytes: float = 0.0
    """Further workspaces on GPUs with several experts, whose products run in four streams."""
    bucket_elements: float = 0.0
    """Gradients in one of DeepSpeed's buckets: two under ZeRO 1 and 2, of which one is filled while the other is
    reduced, and one under ZeRO 3. 0: no such buckets."""
    live_elements: float = 0.0
    """Weights that stay gathered at once under DeepSpeed's ZeRO 3; 0: those of `prefetch` blocks."""
    state_bytes: float = 8.0
    """The part of optimizer_bytes that is not a master copy of the weights."""
    foreach: bool = True
    """Whether torch's foreach kernels update, which make an fp32 array of a state (only where `eager`)."""
    update_bytes: float = 0.0
    """Bytes of temporary arrays per updated parameter, beside those of an eager Adam."""
    update_elements: float = 0.0
    """Parameters that are updated at once under ZeRO 3; 0: all of a rank's part."""


@dataclass(frozen=True, slots=True)
class PlanSupport:
    """Which plans and settings a training stack supports."""

    gradients: tuple[str, ...] = ()
    """Precisions in which gradients can be summed and sent, the default first."""
    weighs_logits: bool = False
    """Whether stages get equal compute, including the logits, instead of equal numbers of layers."""
    splits: tuple[str, ...] = SPLITS
    """Those of `SPLITS` that are supported."""
    zeros: tuple[int, ...] = ZEROS
    """ZeRO stages that are supported for several replicas; 0 is plain data parallelism."""
    staged_zeros: tuple[int, ...] = (0, 1)
    """Those of `zeros` that are also supported with pipeline stages."""
    recomputes: tuple[str, ...] = ("none", "selective", "full")
    """Names of the supported recomputation modes."""
    tunings: tuple[str, ...] = ()
    """Settings of `planner.tuning.tuned` that a user of this software can turn on: optimizer, lora, loss, offload, and
    single values that few stacks have, such as `offload=parameters`."""
    short_chunks: int = 0
    """Number of interleaved chunks that may have one layer fewer than the others, such as those with the embedding and
    the logits."""
    plain_tensor: bool = True
    """Whether tensor parallelism without sequence parallelism is supported."""


@dataclass(frozen=True, slots=True)
class CommunicationHabits:
    """How a training stack exchanges data between ranks."""

    cp_comm_type: str = "p2p"
    """How context-parallel ranks communicate: one of `planner.tuning.CP_TYPES`."""
    shard_ranks: int = 0
    """Ranks that share states out among them, the others holding the same (PyTorch's HSDP); 0: all ranks do."""
    sums_whole: bool = False
    """Whether the gradients of several micro-batches are summed whole on every rank before they are exchanged
    (no_sync)."""
    async_tensor: bool = False
    """Whether the backward pass reduces input gradients while it computes weight gradients."""
    whole_experts: bool = False
    """Whether tensor-parallel ranks hold different whole experts instead of parts of the same experts."""
    sends_once: bool = False
    """Whether a token is sent to each other node once, however many of its experts are there (DeepEP)."""


@dataclass(frozen=True, slots=True)
class RunTuning:
    """What a run trains, recomputes and offloads; set by `planner.tuning.tuned`, absent in files."""

    adapter_rank: int = 0
    """Rank of the trained adapters on all matrices of the layers, whose own weights are frozen; 0: all weights are
    trained."""
    frozen_bytes: float = 2.0
    """Bytes per frozen weight of a matrix."""
    recomputed_fraction: float = 1.0
    """Fraction of the layers to which a plan's recomputation applies; the others keep everything."""
    trained_fraction: float = 1.0
    """Fraction of the layers that are trained, the last ones, or that have adapters."""
    trains_tables: bool = True
    """Whether embedding and logits are trained, and not only layers or adapters."""
    mean_len: int = 0
    """Tokens of each document that is packed into a sequence. Fused attention stays within one; 0: sequences are whole.
    """
    offload: tuple[str, ...] = ()
    """What leaves the GPU: words of `planner.tuning.OFFLOADS`."""
    offloaded_fraction: float = 1.0
    """Fraction of the layers whose activations are offloaded, if any are."""


@dataclass(frozen=True, slots=True)
class Software:
    """A training stack. Its file in `catalog/software/` has the fields of all parts side by side."""

    name: str
    precision: str = "bf16"
    """Precision of matrix products: bf16, fp16, fp8, tf32 or fp32."""
    flash: bool = True
    """Whether attention writes no scores to memory."""
    fused: bool = True
    """Whether softmax, bias and dropout run within the kernels next to them."""
    softmax_heads: int = 1
    """The fused softmax runs if sequences × heads on a GPU are a multiple of this; otherwise scale, mask and softmax
    are separate kernels."""
    dropout: bool = False
    """Whether dropout is used and its masks are kept."""
    weight_bytes: float = 2.0
    """Bytes per parameter of weights as they are computed with."""
    gradient_bytes: float = 4.0
    """Bytes per parameter of gradients."""
    optimizer_bytes: float = 12.0
    """Bytes per parameter of the optimizer; an fp32 master copy and two moments are 12."""
    eager: bool = False
    """Whether plain autograd decides what is kept: inputs gathered along the sequence, queries and keys before and
    after rotation, the activated half of a gated MLP. Otherwise hand-written backward passes keep only what they need.
    """
    compiled: bool = False
    """Whether a compiler keeps only what products and attention need: norms, rotations and activations are computed
    again (PyTorch, torch/_functorch/partitioners.py, min-cut rematerialization)."""
    channels_last: bool = True
    """Whether images are stored with channels last, as tensor cores read them."""
    memory: MemoryHabits = MemoryHabits()
    """Use of GPU memory."""
    communication: CommunicationHabits = CommunicationHabits()
    """Exchanges between ranks."""
    supports: PlanSupport = PlanSupport()
    """Supported plans and settings."""
    run: RunTuning = RunTuning()
    """Settings of a run."""
    like: tuple[str, ...] = ()
    """Software whose constants are used on GPU types without measurements, best first; empty: any software."""
    words: str = ""
    """A regular expression that matches this software's name in measurement files."""
    title: str = ""
    source: str = ""

    @property
    def element_bytes(self) -> float:
        """Bytes per element of activations, in memory and when sent: 4 in fp32 and TF32, else 2."""
        return 4.0 if self.precision in ("fp32", "tf32") else 2.0

    @property
    def sent_gradient_bytes(self) -> float:
        """Bytes per gradient that is sent. DeepSpeed sends the weights' format, in whatever format it sums.

        deepspeed/runtime/engine.py: communication_data_type.
        """
        return self.weight_bytes if self.memory.bucket_elements else self.gradient_bytes

    @property
    def keeps_all(self) -> bool:
        """Whether every array that plain autograd keeps is kept."""
        return self.eager and not self.compiled

    @property
    def input_bytes(self) -> float:
        """Bytes per element of the input that a product keeps for the weight gradient.

        Transformer Engine's FP8 keeps the input cast to 1 byte; plain autograd keeps the input as it is.
        """
        return 1.0 if self.precision == "fp8" and not self.eager else self.element_bytes

    @property
    def recompute_modes(self) -> tuple[Recompute, ...]:
        """The supported recomputation modes, fastest first."""
        return tuple(each for each in RISING if each.label in self.supports.recomputes)

    def sharing(self, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many of `ranks` replicas share states out among them under ZeRO; they divide both."""
        return np.gcd(ranks, self.communication.shard_ranks)

    @property
    def fitted_as(self) -> str:
        """Name of the software's constants file. FP8 has its own, because its products run other kernels."""
        return f"{self.name}-fp8" if self.precision == "fp8" and not self.name.endswith("-fp8") else self.name


@cache
def software_names() -> tuple[str, ...]:
    """Every training stack of the catalog."""
    return tuple(names_in("software"))


_PARTS = {"memory": MemoryHabits, "communication": CommunicationHabits, "supports": PlanSupport, "run": RunTuning}
_PART_OF = {each.name: part for part, fields_of in _PARTS.items() for each in fields(fields_of)}
"""The part of `Software` that has a field."""


def _by_part(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Settings by the part of `Software` that has them; "" for its own fields."""
    found: dict[str, dict[str, Any]] = {part: {} for part in ("", *_PARTS)}
    for name, value in settings.items():
        found[_PART_OF.get(name, "")][name] = value
    return found


def with_settings(software: Software, **settings: Any) -> Software:
    """The stack with other values of its own fields or of the fields of its parts."""
    own, *of_parts = _by_part(settings).values()
    parts = {
        part: replace(getattr(software, part), **each) for part, each in zip(_PARTS, of_parts, strict=True) if each
    }
    return replace(software, **own, **parts)


def software_from_yaml(path: Path) -> Software:
    """Reads a file in the format of `catalog/software/`. Raises InputError for unknown, missing or mistyped values."""
    values, own = read_yaml(path), {each.name for each in fields(Software)} - {"name", *_PARTS}
    for key in values:
        if key not in own | {*_PART_OF}:
            raise unknown(f"key in {path.name}", key, [*own, *_PART_OF])
    of_software, *of_parts = _by_part(values).values()
    parts: dict[str, Any] = {
        part: filled(_PARTS[part], each, path) for part, each in zip(_PARTS, of_parts, strict=True)
    }
    return filled(Software, of_software, path, name=path.stem, **parts)


@cache
def software_named(name: str) -> Software:
    """A training stack of the catalog. Raises InputError with the nearest match for an unknown name, also in `like`."""
    found = software_from_yaml(file_in("software", "training software", name))
    for each in found.like:
        if each not in software_names():
            raise unknown(f"training software in `like` of {name}:", each, software_names())
    return found


DEFAULT_SOFTWARE = "megatron-core"
"""The training stack for which plans are found if the user names none."""
GRADIENT_BYTES = {"fp32": 4.0, "bf16": 2.0}
"""Bytes per gradient by precision."""


def with_gradients(software: Software, precision: str) -> Software:
    """The stack with gradients in that precision. Raises InputError if the stack does not support it."""
    if precision not in software.supports.gradients:
        known = " and ".join(software.supports.gradients) or "no other precision than its own"
        raise InputError(f"gradients={precision}: {software.name} supports {known}; fix or leave it out.")
    return replace(software, gradient_bytes=GRADIENT_BYTES[precision])


def running_on(software: Software, gpu: GpuSheet) -> Software:
    """The stack as it runs on the GPU: bf16 becomes fp16 if tensor cores support only fp16, TF32 becomes fp32 without
    support, and attention is not fused if FlashAttention does not run. Raises InputError for fp8 without FP8.
    """
    if software.precision == "fp8" and "fp8" not in gpu.tensor_flops_per_s:
        other = software.name.removesuffix("-fp8")
        raise InputError(f"software={software.name}: {gpu.title} has no FP8 tensor cores; type software={other}.")
    if not gpu.has_fused_attention:
        software = replace(software, flash=False)
    if software.precision == "tf32" and "tf32" not in gpu.tensor_flops_per_s:
        software = replace(software, precision="fp32")
    only_fp16 = "fp16" in gpu.tensor_flops_per_s and "bf16" not in gpu.tensor_flops_per_s
    return replace(software, precision="fp16") if only_fp16 and software.precision == "bf16" else software


@dataclass(frozen=True, slots=True)
class Constants:
    """Constants fitted per GPU type and software (`catalog/constants/`, by bench/fits.py). Those in _s: seconds."""

    gemm_efficiency: float = 0.85
    """Fraction of the peak that very large products reach."""
    gemm_depth: float = 64.0
    """Elements of the summed dimension that each tile loses to filling and draining."""
    wave_loss: float = 0.7
    """Fraction of an unfilled last wave of tiles that is lost."""
    memory_efficiency: float = 0.85
    """Fraction of the memory bandwidth that kernels reach."""
    attention_efficiency: float = 0.4
    """Fraction of the peak that long fused attention reaches."""
    attention_fill: float = 256.0
    """Queries at which attention reaches half of `attention_efficiency`."""
    attention_backward: float = 3.0
    """Attention's backward ÷ forward time."""
    score_passes: float = 1.5
    """Factor on the bytes that unfused softmax and dropout read and write."""
    backward_traffic: float = 1.7
    """Memory-bound operators' traffic in the backward pass ÷ in the forward pass."""
    backward_kernels: float = 2.0
    """Memory-bound operators' kernels in the backward pass ÷ in the forward pass."""
    kernel_s: float = 3e-6
    """Gap between kernels on the GPU."""
    host_s: float = 2e-5
    """Time to launch a kernel."""
    host_jitter: float = 0.05
    """Growth of host_s with each doubling of the tensor-parallel group, which waits for its slowest member."""
    tensor_efficiency: float = 0.9
    """Rate of tensor-parallel collectives in training ÷ rate when nothing else runs."""
    network_efficiency: float = 0.85
    """Rate of data-parallel collectives in training ÷ rate when nothing else runs."""
    card_collisions: float = 0.1
    """Each further data-parallel group on a node adds this fraction to the time that a group's bytes take over the
    network."""
    data_overlap: float = 0.7
    """Fraction of the backward pass that data-parallel collectives may overlap with."""
    data_exposed: float = 0.1
    """Fraction of the time of data-parallel collectives that never overlaps."""
    optimizer_bytes_factor: float = 1.2
    """Factor on the bytes that the update reads and writes."""
    step_s: float = 0.005
    """Fixed cost of a step."""


PHYSICAL = (
    *("gemm_efficiency", "gemm_depth", "wave_loss", "memory_efficiency", "kernel_s"),
    *("attention_efficiency", "attention_fill", "attention_backward"),
)
"""Constants that describe how a GPU runs kernels. The others describe how software launches and overlaps kernels."""
CORE = tuple(name for name in PHYSICAL if name.startswith("attention_"))
"""Constants in PHYSICAL that can only be fitted to runs with fused attention."""


Fits = Mapping[str, Mapping[str, Constants]]
"""Fitted constants by software and GPU type."""


def constants_for(machine: Machine, software: Software, fits: Fits | None = None) -> Constants:
    """Constants fitted to the software on the GPU type, or derived from other fits if that pair was not measured.

    If the GPU type was measured under similar software, physical constants come from that fit, and the others from this
    software's fit on another GPU type, with efficiencies no higher than in the first fit. Otherwise all constants come
    from the most similar GPU type, scaled by `transferred`. Over PCIe, tensor_efficiency is at most 1: values above it
    come from overlap with computation, which was only measured on NVLink. fits: fits to derive from; None for the
    catalog's.
    """
    found = _constants_of_pair(machine, software, shipped_fits() if fits is None else fits)
    if machine.link == "pcie":
        return replace(found, tensor_efficiency=min(found.tensor_efficiency, 1.0))
    return found


def _constants_of_pair(machine: Machine, software: Software, fits: Fits) -> Constants:
    """As `constants_for`, without the limit of tensor_efficiency over PCIe."""
    gpu_type = measured_like(machine.gpu, software, fits)
    name, source = nearest_fit(machine.gpu, software, fits)
    own = fits[name][source]
    if (name, source) == (software.fitted_as, gpu_type):
        return own
    similar = _alike(software) or tuple(fits)
    known_here = next((fits[each] for each in similar if gpu_type in fits.get(each, {})), {})
    here = known_here.get(gpu_type)
    if here is not None:
        fused = [each for each in similar if each in software_names() and software_named(each).flash == software.flash]
        core = next((asdict(fits[each][gpu_type]) for each in fused if gpu_type in fits.get(each, {})), {})
        launch = {name: value for name, value in asdict(own).items() if name not in PHYSICAL}
        seen = {name: min(value, getattr(here, name)) for name, value in launch.items() if name.endswith("_efficiency")}
        kernels = {**asdict(here), **{name: core[name] for name in CORE if name in core}}
        if source in known_here:
            # Both were measured on `source`. If this software's kernels are less efficient there, assume so here.
            mine, other = asdict(own), asdict(known_here[source])
            efficiencies = [name for name in PHYSICAL if name.endswith("_efficiency")]
            kernels |= {name: kernels[name] * min(mine[name] / other[name], 1.0) for name in efficiencies}
        return Constants(**{**kernels, **launch, **seen})
    if software.precision == "fp32":  # fp32 products do not use tensor cores.
        return own
    return transferred(own, gpu_sheets()[source], machine.gpu)


def nearest_fit(gpu: GpuSheet, software: Software, fits: Fits) -> tuple[str, str]:
    """The names of the software and the GPU type whose fit is nearest. Without a fit, a software has that of the first
    software in `like` that has one, else of any; and a GPU type has that of the nearest in `work_per_clock`."""
    name = next(each for each in (software.fitted_as, *_alike(software), *fits) if fits.get(each))
    sheets, work, own = gpu_sheets(), work_per_clock(gpu), measured_like(gpu, software, fits)
    return name, min(fits[name], key=lambda each: (each != own, abs(work_per_clock(sheets[each]) / work - 1.0), each))


def _alike(software: Software) -> tuple[str, ...]:
    if software.fitted_as == software.name:
        return software.like
    return software_named(software.fitted_as).like if software.fitted_as in software_names() else ()


@cache
def shipped_fits() -> Fits:
    """Every fit of the catalog."""
    return {
        name: {gpu_type: constants_of(each["constants"]) for gpu_type, each in content_of(name).items()}
        for name in measured_software()
    }


def transferred(constants: Constants, source: GpuSheet, target: GpuSheet) -> Constants:
    """Constants of an unmeasured GPU type, derived from a measured GPU type's.

    Tensor cores that do more per clock and multiprocessor are harder to feed and reach the power limit sooner. So if
    the ratio of `work_per_clock` exceeds 1, efficiencies are multiplied by ratio^−x, with x fitted to two measured
    generations (transfer.yaml).
    """
    more = max(work_per_clock(target) / work_per_clock(source), 1.0)
    powers = read_yaml(CATALOG / "constants" / "transfer.yaml")["powers"].items()
    return replace(constants, **{name: getattr(constants, name) * more ** -float(power) for name, power in powers})


def work_per_clock(gpu: GpuSheet) -> float:
    """Peak 16-bit FLOPs per clock and multiprocessor."""
    peak = gpu.tensor_flops_per_s.get("bf16", gpu.tensor_flops_per_s.get("fp16", gpu.fp32_flops_per_s))
    return peak / (gpu.multiprocessors * gpu.clock_hz)


@cache
def content_of(software: str) -> Mapping[str, Mapping[str, Any]]:
    """A constants file's content by GPU type; empty for software that was not measured."""
    path = CATALOG / "constants" / f"{software}.yaml"
    return read_yaml(path)["gpu_types"] if path.exists() else {}


@dataclass(frozen=True, slots=True)
class OwnConstants:
    """A user's constants, as `python -m synergy_core calibrate --out` writes them. None: not stated in the file.

    bands: by GPU type, the interval low to high of log(measured ÷ predicted) of held-out rows, and the number of rows.
    """

    path: Path
    software: str | None
    gpu_types: Mapping[str, Constants]
    bands: Mapping[str, Mapping[str, Any] | None]

    def of(self, gpu: GpuSheet) -> Constants | None:
        """The constants of a GPU type; None if the file has none."""
        return self.gpu_types.get(constants_like(gpu))


def own_constants(path: Path) -> OwnConstants:
    """Reads a file in the format of `catalog/constants/`. Raises InputError for anything else."""
    content = read_yaml(path)
    found = content.get("gpu_types")
    if not isinstance(found, dict) or not found:
        raise InputError(
            f"{path}: has no gpu_types; expected a file written by `python -m synergy_core calibrate FILE.csv --out "
            f"{path.name}` from training times of plans."
        )
    gpu_types: dict[str, Constants] = {}
    bands: dict[str, Mapping[str, Any] | None] = {}
    for gpu_type, each in found.items():
        if not isinstance(each, dict) or not isinstance(each.get("constants"), dict):
            raise InputError(
                f"{path}: gpu_types: {gpu_type} has no constants; python -m synergy_core calibrate writes them."
            )
        try:
            gpu_types[gpu_type] = constants_of(each["constants"])
            bands[gpu_type] = _band_of(each.get("band"), path)
        except InputError as error:
            raise InputError(f"{path}, {gpu_type}: {error}") from None
    return OwnConstants(path, content.get("software"), gpu_types, bands)


def _band_of(band: Any, path: Path) -> Mapping[str, Any] | None:
    """The band in a user's file, if it states one. Raises InputError for a malformed band."""
    if band is None:
        return None
    try:
        low, high, rows = float(band["low"]), float(band["high"]), int(band["rows"])
    except (KeyError, TypeError, ValueError):
        low, high, rows = 1.0, 0.0, 0
    if low > high or rows < 1:
        raise InputError(
            f"band: {band}; expected low, high (at least low) and rows, as python -m synergy_core calibrate writes "
            "them, or no band."
        )
    return {"low": low, "high": high, "rows": rows, "of": str(path)}


@cache
def measured_software() -> tuple[str, ...]:
    """Names of the software that has fitted constants."""
    return tuple(name for name in names_in("constants") if name != "transfer")


def constants_of(values: dict[str, Any]) -> Constants:
    """Builds constants. Raises InputError for missing or unknown names and for values that are not numbers ≥ 0."""
    names = {each.name for each in fields(Constants)}
    if odd := sorted(set(values) ^ names):
        raise InputError(f"constants: missing or unknown {', '.join(odd)}; expected {', '.join(sorted(names))}.")
    for name, value in values.items():
        if type(value) not in (int, float) or not 0.0 <= value < float("inf"):
            raise InputError(f"{name}: {value}; expected a number of at least 0.")
    return Constants(**{name: float(value) for name, value in values.items()})


def constants_like(gpu: GpuSheet) -> str:
    """Name of the chip under which a GPU's constants are stored. GPUs that differ only in memory size share them."""
    return gpu.name.split("-")[0]


def measured_like(gpu: GpuSheet, software: Software, fits: Fits) -> str:
    """As `constants_like`, but of a measured GPU type with the same chip if the GPU itself was not measured.

    An H200 is an H100 with other memory, so it runs the same kernels; memory bandwidth is on its own data sheet. GPU
    types that were measured under the software, or under those it is `like`, are preferred.
    """
    own, sheets = constants_like(gpu), gpu_sheets()
    for names in ((software.fitted_as, *_alike(software)), tuple(fits)):
        measured = {gpu_type for name in names for gpu_type in fits.get(name, {})}
        same = (each for each in sorted(measured) if has_same_chip(sheets[each], gpu))
        if found := own if own in measured else next(same, None):
            return found
    return own


def has_same_chip(one: GpuSheet, other: GpuSheet) -> bool:
    """Whether two GPU types have as many multiprocessors of the same generation, which do as much at the same clock."""
    alike = (one.compute_capability, one.multiprocessors) == (other.compute_capability, other.multiprocessors)
    per_s = (work_per_clock(each) * each.clock_hz for each in (one, other))
    return alike and math.isclose(*per_s, rel_tol=0.01)


ETHERNET_NODE_BYTES_PER_S = 50e9 / 8.0
"""Nodes with at most this network bandwidth are assumed to use TCP over Ethernet."""

CUBE_MESH_RINGS = (6, 6, 1, 2, 4, 2, 2, 4, 6)
"""Index n: number of rings among the first n GPUs of a DGX-1V, each as fast as one of a GPU's six links.

Links of 25 GB/s form a hybrid cube mesh (NVIDIA DGX-1 with Tesla V100 system architecture, WP-08437-002, 2017). Rings
are edge-disjoint cycles through all n GPUs, in both directions. Five GPUs have none, so their ring passes GPU 0 twice.
"""


@dataclass(frozen=True, slots=True)
class Link:
    """Constants of one type of link under NCCL. Two protocols are modelled; the faster one counts.

    Both take a fixed time, a time for each step of a ring or tree, and the wire time: bytes ÷ (rate · efficiency).
    """

    efficiency: float
    """Fraction of the data sheet's rate that very large messages reach."""
    fixed_s: float
    """Fixed seconds of the first protocol."""
    hop_s: float
    """Seconds of the first protocol for each step."""
    ramp_s: float
    """Time constant: the first protocol takes 2 √(ramp_s · wire time) in addition, to fill its pipeline of chunks."""
    low_fixed_s: float
    """Fixed seconds of the second protocol."""
    low_hop_s: float
    """Seconds of the second protocol for each step."""
    low_share: float
    """Rate of the second protocol ÷ rate of the first; its wire time is divided by this fraction."""
    exchange: float
    """Rate of all-to-alls ÷ rate of other collectives."""
    switch_efficiency: float = 0.0
    """Fraction of the data sheet's rate that replaces efficiency when the switch does the reduction; 0 if it cannot."""


RDMA = Link(
    efficiency=0.92,
    fixed_s=8.4e-6,
    hop_s=14.0e-6,
    ramp_s=14.0e-6,
    low_fixed_s=6.6e-6,
    low_hop_s=2.7e-6,
    low_share=0.25,
    exchange=1.0,
)
"""Network cards that access GPU memory directly. These constants are assumed, not fitted.

Latencies and low_share are NCCL's own (NVIDIA/nccl, src/graph/tuning.cc: network, ring, LL and Simple); ramp_s is
assumed to equal hop_s. Headers and flow control of 4 KiB packets leave 92 % of the rate.
"""


@dataclass(frozen=True, slots=True)
class Links:
    """The links of a machine. Rates in bytes/s, one way, per GPU, from data sheets."""

    inside: Link
    """Link of groups of up to link_group GPUs in a node."""
    inside_bytes_per_s: float
    """Rate of that link."""
    link_group: int
    """Largest number of GPUs in a node that `inside` joins."""
    rings: tuple[float, ...]
    """Fractions of inside_bytes_per_s that a ring of n GPUs can use, at index n; the last also for larger rings. Empty:
    all of it."""
    host: Link
    """Link of larger groups in a node, over PCIe."""
    host_bytes_per_s: float
    """Rate of that link."""
    network: Link
    """Link between nodes."""
    network_bytes_per_s: float
    """Rate of that link."""
    dispatch_s: float = 0.0
    """Software overhead of each collective or send."""
    dispatch_rank_s: float = 0.0
    """Software overhead in addition for each of its ranks on a node."""


def links_for(machine: Machine) -> Links:
    """The links of a machine under NCCL: fitted constants (catalog/links/), and rates from its data sheet.

    Nodes with up to 50 Gb/s are assumed to use Ethernet, faster ones InfiniBand: staged through the host if GPUs are on
    PCIe, otherwise with direct access to GPU memory.
    """
    inside = link_named(machine.link)
    if not machine.gpu.since_hopper or machine.link != "nvswitch":
        inside = replace(inside, switch_efficiency=0.0)
    on_pcie = machine.link == "pcie"
    network = link_named("infiniband") if on_pcie else RDMA
    if machine.network_bytes_per_s * machine.gpus_per_node <= ETHERNET_NODE_BYTES_PER_S:
        network = link_named("ethernet")
    return Links(
        inside=inside,
        inside_bytes_per_s=machine.link_bytes_per_s,
        link_group=machine.gpus_per_node if on_pcie else machine.link_group,
        rings=rings(machine.link, machine.link_group, is_mesh=machine.gpu.maker != NVIDIA),
        host=link_named("pcie"),
        host_bytes_per_s=machine.link_bytes_per_s if on_pcie else machine.gpu.pcie_bytes_per_s,
        network=network,
        network_bytes_per_s=machine.network_bytes_per_s,
    )


def rings(link: str, group: int, *, is_mesh: bool = False) -> tuple[float, ...]:
    """Index n: the share of a GPU's links that a ring of n GPUs can use; empty for switches and PCIe, whose share is 1.

    NVLink between 8 GPUs is a cube mesh; in other groups, or with is_mesh (other makers), it joins all pairs equally.
    """
    if link != "nvlink":
        return ()
    if group == 8 and not is_mesh:
        return tuple(each / CUBE_MESH_RINGS[-1] for each in CUBE_MESH_RINGS)
    return (1.0, 1.0, *((n - 1) / (group - 1) for n in range(2, group + 1)))


@cache
def link_named(name: str) -> Link:
    """Fitted constants of a type of link: nvswitch, nvlink, pcie, infiniband or ethernet; InputError for others."""
    return Link(**read_yaml(CATALOG / "links" / f"{name}.yaml")["constants"])
