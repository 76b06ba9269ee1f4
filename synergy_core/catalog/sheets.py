"""GPU data sheets: `gpus/<type>.yaml`; being in the folder registers one, as `add_gpu_sheet` does for this process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from synergy_core.catalog import filled, from_yaml, read_yaml
from synergy_core.errors import InputError

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

    def __post_init__(self) -> None:
        rates = {f"tensor_flops_per_s.{kind}": rate for kind, rate in self.tensor_flops_per_s.items()}
        rates["fp32_flops_per_s"] = self.fp32_flops_per_s
        figures = {
            **{name: (rate, 1e12, "in FLOP/s; 312 TFLOP/s are 312.0e+12") for name, rate in rates.items()},
            "memory_bandwidth_bytes_per_s": (self.memory_bandwidth_bytes_per_s, 1e10, "in bytes/s; 2 TB/s are 2.0e+12"),
            "memory_bytes": (self.memory_bytes, 1e9, "in bytes; 80 GB are 80.0e+9"),
            "clock_hz": (self.clock_hz, 1e8, "in Hz; 1,410 MHz are 1410.0e+6"),
            "pcie_bytes_per_s": (self.pcie_bytes_per_s, 1e8, "in bytes/s; 31.5 GB/s are 31.5e+9"),
            "multiprocessors": (self.multiprocessors, 1, "how many there are"),
            "compute_capability": (self.compute_capability, 1, "such as 8.0"),
        }
        for name, (value, least, unit) in figures.items():
            if value < least:
                raise InputError(f"data sheet {self.name}: {name}: {value:g} is below {least:g}; expected it {unit}.")
        if self.link_bytes_per_s < 0 or 0 < self.link_bytes_per_s < 1e9:
            raise InputError(
                f"data sheet {self.name}: link_bytes_per_s: {self.link_bytes_per_s:g}; expected NVLink's bytes/s, one "
                "way, all links of a GPU (300 GB/s are 300.0e+9), or 0.0 without."
            )

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


_added: dict[str, GpuSheet] = {}
"""Sheets of files that a user named, for as long as this process lives."""


def gpu_sheets() -> Mapping[str, GpuSheet]:
    """Every data sheet, by its GPU type."""
    return {**_shipped(), **_added} if _added else _shipped()


@cache
def _shipped() -> Mapping[str, GpuSheet]:
    return {path.stem: from_yaml(GpuSheet, path) for path in sorted((_HERE / "gpus").glob("*.yaml"))}


def add_gpu_sheet(path: Path) -> GpuSheet:
    """A user's own data sheet, in the form of those in `gpus/`, known to this process by its file's name from now on.

    Raises InputError for a file that is no sheet, and for a name that the catalog's sheets have.
    """
    content = read_yaml(path)
    name = path.stem.lower().replace(" ", "_")
    sheet = filled(GpuSheet, content, path, name=name)
    for each in (name, *sheet.aliases):
        taken = next((own for own in _shipped().values() if each == own.name or each in own.aliases), None)
        if taken is not None:
            raise InputError(
                f"{path}: the catalog has a data sheet of {each}; name the file otherwise, {name}-mine.yaml."
            )
    _added[name] = sheet
    return sheet


def gpu_sheet(name: str) -> GpuSheet | None:
    """The data sheet of a GPU type by its name or an alias, whatever its case; None if there is none.

    `a100@short`, the A100s of a partition, have that of their type.
    """
    plain = name.partition("@")[0].lower().replace(" ", "_")
    for each in gpu_sheets().values():
        if plain == each.name or plain in each.aliases:
            return each
    return None


def gpu_type_named(name: str) -> str:
    """The catalog's name of a GPU type: `aws` is t4; a type it does not know keeps its own."""
    found = gpu_sheet(name)
    _, at, partition = name.partition("@")
    return f"{found.name}{at}{partition}" if found else name


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
