"""GPU data sheets: `gpus/<type>.yaml`; being in the folder registers one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from synergy_core.catalog import from_yaml

_HERE = Path(__file__).parent

HOPPER = 9.0
"""Compute capability from which on NVSwitch adds up (NVLink SHARP, third generation), cuBLAS takes 32 MiB, and software
has FlashAttention."""


@dataclass(frozen=True, slots=True)
class GpuSheet:
    """A GPU type's data sheet.

    architecture: by NVIDIA's name, of types that are alike. compute_capability: NVIDIA's number for what its generation
    can do (developer.nvidia.com/cuda-gpus). shared_lanes: whether half of its fp32 lanes also compute with integers.
    tensor_flops_per_s: dense peak of matrix products that accumulate in fp32, by precision: fp16, bf16, tf32, fp8, fp4,
    those that it has. multiprocessors: how many. clock_hz: at boost. link_bytes_per_s: NVLink, all links of one GPU,
    one way; 0 without. pcie_bytes_per_s: one way. inline_ecc: whether check bits take part
    of the memory itself (GDDR6 of data-centre cards).
    """

    name: str
    title: str
    aliases: tuple[str, ...]
    architecture: str
    compute_capability: float
    fp32_flops_per_s: float
    memory_bandwidth_bytes_per_s: float
    memory_bytes: float
    tensor_flops_per_s: Mapping[str, float]
    multiprocessors: int
    clock_hz: float
    link_bytes_per_s: float
    pcie_bytes_per_s: float
    source: str
    shared_lanes: bool = False
    inline_ecc: bool = False

    @property
    def since_hopper(self) -> bool:
        """Whether its generation is H100's or a later one."""
        return self.compute_capability >= HOPPER

    def matrix_flops_per_s(self, precision: str) -> float:
        """Peak of matrix products; a precision that the GPU lacks runs in the next wider one that it has.

        In fp32: half of the data sheet's rate where lanes are shared, as addresses are integers (NVIDIA, Ampere GA102
        whitepaper, 2020, and Ada, 2022: 64 lanes of 128 do either).
        """
        for each in _WIDER.get(precision, ()):
            if each in self.tensor_flops_per_s:
                return self.tensor_flops_per_s[each]
        return self.fp32_flops_per_s * (0.5 if self.shared_lanes else 1.0)


_WIDER = {
    "fp4": ("fp4", "fp8", "bf16", "fp16"),
    "fp8": ("fp8", "bf16", "fp16"),
    "bf16": ("bf16",),
    "fp16": ("fp16",),
    "tf32": ("tf32",),
}


@cache
def gpu_sheets() -> Mapping[str, GpuSheet]:
    """Every data sheet, by its GPU type."""
    return {path.stem: from_yaml(GpuSheet, path) for path in sorted((_HERE / "gpus").glob("*.yaml"))}


def gpu_sheet(name: str) -> GpuSheet | None:
    """The data sheet of a GPU type by its name or an alias, whatever its case; None if there is none."""
    plain = name.lower().replace(" ", "_")
    for each in gpu_sheets().values():
        if plain == each.name or plain in each.aliases:
            return each
    return None


def gpu_type_named(name: str) -> str:
    """The catalog's name of a GPU type: `aws` is t4; a type it does not know keeps its own."""
    found = gpu_sheet(name)
    return found.name if found else name


@dataclass(frozen=True, slots=True)
class NodeSheet:
    """A type of node, `nodes/<type>.yaml`.

    usual: the one meant when only its GPU type is named. link: `nvswitch`, `nvlink` or `pcie`; link_group: how many
    GPUs it joins. network_bytes_per_s: of the node's cards together, one way. cpus: cores; memory_bytes: of the host.
    """

    name: str
    title: str
    gpu: str
    gpus_per_node: int
    usual: bool
    link: str
    link_group: int
    network_bytes_per_s: float
    cpus: int
    memory_bytes: float
    source: str


@cache
def node_sheets() -> Mapping[str, NodeSheet]:
    """Every type of node, by its name."""
    return {path.stem: from_yaml(NodeSheet, path) for path in sorted((_HERE / "nodes").glob("*.yaml"))}


def node_sheet_of(gpu_type: str, gpus_per_node: int) -> NodeSheet | None:
    """The usual node of a GPU type with so many GPUs, else one that is not usual; None where none is known."""
    own = [each for each in node_sheets().values() if (each.gpu, each.gpus_per_node) == (gpu_type, gpus_per_node)]
    return next(iter(sorted(own, key=lambda each: not each.usual)), None)
