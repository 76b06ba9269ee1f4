"""Where a plan runs: GPUs of one type, in nodes, with the links between them."""

from __future__ import annotations

from dataclasses import dataclass

from synergy_core.catalog.sheets import GpuSheet


@dataclass(frozen=True, slots=True)
class Machine:
    """Nodes that are alike. Rates in bytes/s, one way, per GPU, from data sheets.

    link: `nvswitch` (every pair at full rate), `nvlink` (pairs or a mesh), or `pcie`. link_bytes_per_s: between GPUs of
    a node. link_group: how many GPUs are joined by that link; beyond them it is PCIe. network_bytes_per_s: each GPU's
    share of the node's network cards. memory_bytes: of a GPU.
    """

    gpu: GpuSheet
    gpus_per_node: int
    link: str
    link_bytes_per_s: float
    link_group: int
    network_bytes_per_s: float
    memory_bytes: float
