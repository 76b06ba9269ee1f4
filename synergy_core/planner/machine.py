"""Where a plan runs: GPUs of one type, in nodes, with the links between them."""

from __future__ import annotations

from dataclasses import dataclass

from synergy_core.catalog.sheets import GpuSheet, NodeSheet, gpu_sheet, gpu_sheets, node_sheets
from synergy_core.errors import InputError, unknown


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


def machine_named(
    name: str, gpus_per_node: int | None = None, network_bytes_per_s: float | None = None, *, link: str | None = None
) -> Machine:
    """The nodes of a type (`dgx-2`), or those that are usual for a GPU type (`a100-80gb`, an alias too).

    gpus_per_node: another number than usual; a node type of that GPU with that number is preferred to the usual one.
    network_bytes_per_s: another share of the network per GPU. link: another link. Raises InputError for a name that is
    neither, with the nearest match; for a number below 1; for a link that the GPU lacks; for a GPU type whose node
    nobody described, unless both its number and its network are given.
    """
    if gpus_per_node is not None and gpus_per_node < 1:
        raise InputError(f"{gpus_per_node} GPUs per node; expected at least 1.")
    nodes = node_sheets()
    wanted = nodes[name].gpu if name in nodes else name
    gpu = gpu_sheet(wanted)
    if gpu is None:
        known = {*nodes, *gpu_sheets()}
        hint = f"A file synergy_core/catalog/gpus/{wanted}.yaml adds it; `plan` takes gpu={wanted}.yaml, too."
        raise unknown("GPU or node type", wanted, known, hint=hint)
    node = nodes.get(name) or _node_of(gpu, gpus_per_node)
    if node is None and (gpus_per_node is None or network_bytes_per_s is None):
        raise InputError(
            f"no node type of GPU '{gpu.name}' is known; give gpus_per_node and network_bytes_per_s, or add "
            f"synergy_core/catalog/nodes/<type>.yaml."
        )
    count = gpus_per_node or (node.gpus_per_node if node else 1)
    kind = link or (node.link if node else "pcie")
    rates = {"nvswitch": gpu.link_bytes_per_s, "nvlink": gpu.link_bytes_per_s, "pcie": gpu.pcie_bytes_per_s}
    if kind not in rates:
        raise unknown("link", kind, rates)
    if rates[kind] == 0:
        raise InputError(f"{gpu.title} has no NVLink; its link can only be pcie.")
    group = 1 if kind == "pcie" else count
    if node is not None and link is None and node.link_group < node.gpus_per_node:
        group = min(node.link_group, count)
    share = node.network_bytes_per_s / node.gpus_per_node if node else 0.0
    return Machine(
        gpu=gpu,
        gpus_per_node=count,
        link=kind,
        link_bytes_per_s=rates[kind],
        link_group=group,
        network_bytes_per_s=share if network_bytes_per_s is None else network_bytes_per_s,
        memory_bytes=gpu.memory_bytes,
    )


def _node_of(gpu: GpuSheet, gpus_per_node: int | None) -> NodeSheet | None:
    """The usual node type of that GPU, unless another has just that many GPUs."""
    own = sorted((each for each in node_sheets().values() if each.gpu == gpu.name), key=lambda each: not each.usual)
    return next((each for each in own if each.gpus_per_node == gpus_per_node), own[0] if own else None)
