"""GPU data sheets: `gpus/<type>.yaml`; being in the folder registers one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from synergy_core.catalog import read_yaml

_HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class GpuSheet:
    """A GPU type's data sheet."""

    name: str
    title: str
    aliases: tuple[str, ...]
    architecture: str
    fp32_flops_per_s: float
    memory_bandwidth_bytes_per_s: float
    memory_bytes: float
    source: str


@cache
def gpu_sheets() -> Mapping[str, GpuSheet]:
    """Every data sheet, by its GPU type."""
    return {
        path.stem: GpuSheet(name=path.stem, **{**content, "aliases": tuple(content["aliases"])})
        for path in sorted((_HERE / "gpus").glob("*.yaml"))
        for content in [read_yaml(path)]
    }


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
