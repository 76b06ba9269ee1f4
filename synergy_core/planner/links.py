"""What joins the GPUs of a machine, as the constants that the times of collectives follow from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median

from synergy_core.catalog import read_yaml
from synergy_core.planner.machine import Machine

_CATALOG = Path(__file__).parent.parent / "catalog" / "links"

ETHERNET_NODE_BYTES_PER_S = 50e9 / 8.0
"""A node with no more network than this is taken to talk TCP over Ethernet."""

CUBE_MESH_RINGS = (6, 6, 1, 2, 4, 2, 2, 4, 6)
"""Rings, each as fast as one of a GPU's six links, that fit into the first n GPUs of a DGX-1V, at n (0 and 1: all).

Hybrid cube mesh, 25 GB/s a link (NVIDIA DGX-1 with Tesla V100 system architecture, WP-08437-002, 2017): edge-disjoint
cycles through all n GPUs, run both ways round; five GPUs have no such cycle and pass GPU 0 twice.
"""


@dataclass(frozen=True, slots=True)
class Link:
    """Constants of one kind of link, under NCCL. Times in s.

    efficiency: of the data sheet's rate, for very large messages. Two protocols: one starts in fixed_s and hop_s for
    each step of the ring, and its chunks take 2 √(ramp_s · wire time) to fill the pipeline; the other starts in
    low_fixed_s and low_hop_s, but its flags leave low_share of the rate. exchange: all-to-all's share of the rate.
    switch_efficiency: of the data sheet's rate, where the switch adds up; 0 where it cannot.
    """

    efficiency: float
    fixed_s: float
    hop_s: float
    ramp_s: float
    low_fixed_s: float
    low_hop_s: float
    low_share: float
    exchange: float
    switch_efficiency: float = 0.0


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
"""GPUs whose network cards reach their memory directly: a rule, not a fit.

Latencies and the quarter of the rate for small messages are those that NCCL itself chooses its algorithms by
(NVIDIA/nccl, src/graph/tuning.cc: network, ring, LL and Simple); a chunk fills in one step. 92 %: headers and flow
control of 4 KiB packets.
"""


@dataclass(frozen=True, slots=True)
class Links:
    """The links of a machine. Rates in bytes/s, one way, per GPU, from data sheets.

    inside: between GPUs of a node, for groups of up to link_group; rings: the share of inside_bytes_per_s that a ring
    of n GPUs can use, at n, the last one for all larger; empty: all of it. host: beyond link_group. network: between
    nodes. dispatch_s, dispatch_rank_s: what the software adds to each collective, and for each of its ranks on a node.
    """

    inside: Link
    inside_bytes_per_s: float
    link_group: int
    rings: tuple[float, ...]
    host: Link
    host_bytes_per_s: float
    network: Link
    network_bytes_per_s: float
    dispatch_s: float = 0.0
    dispatch_rank_s: float = 0.0


def links_for(machine: Machine) -> Links:
    """The links of a machine under NCCL: fitted constants of their kinds (catalog/links/), rates from its data sheet.

    Between nodes: Ethernet up to 50 Gb/s a node; above, InfiniBand, staged through the host on machines whose GPUs
    are on PCIe, and by direct memory access on others.
    """
    inside = link_named(machine.link)
    if not machine.gpu.since_hopper or machine.link != "nvswitch":
        inside = without_switch(inside)
    if machine.network_bytes_per_s * machine.gpus_per_node <= ETHERNET_NODE_BYTES_PER_S:
        network = link_named("ethernet")
    else:
        network = link_named("infiniband") if machine.link == "pcie" else RDMA
    return Links(
        inside=inside,
        inside_bytes_per_s=machine.link_bytes_per_s,
        link_group=machine.gpus_per_node if machine.link == "pcie" else machine.link_group,
        rings=rings(machine.link, machine.link_group),
        host=link_named("pcie"),
        host_bytes_per_s=machine.link_bytes_per_s if machine.link == "pcie" else machine.gpu.pcie_bytes_per_s,
        network=network,
        network_bytes_per_s=machine.network_bytes_per_s,
    )


def rings(link: str, group: int) -> tuple[float, ...]:
    """The share of a GPU's links that a ring of n of a group's GPUs can use, at n.

    A cube mesh where NVLink joins 8 GPUs; else every pair alike. Switches and PCIe: empty, all of it.
    """
    if link != "nvlink":
        return ()
    if group == 8:
        return tuple(each / CUBE_MESH_RINGS[-1] for each in CUBE_MESH_RINGS)
    return (1.0, 1.0, *((n - 1) / (group - 1) for n in range(2, group + 1)))


def without_switch(link: Link) -> Link:
    """The link as it is where the switch cannot add up."""
    return replace(link, switch_efficiency=0.0)


def under_jax(links: Links, gpu: str) -> Links:
    """The links under JAX, which starts collectives rank by rank: as slowly as measured on hosts of that GPU type.

    For GPU types whose hosts were not measured, the median of those that were.
    """
    hosts = read_yaml(_CATALOG / "jax.yaml")["hosts"]
    found = [hosts[gpu]] if gpu in hosts else list(hosts.values())
    idle, rank = (median(each[name] for each in found) for name in ("dispatch_s", "dispatch_rank_s"))
    return replace(links, dispatch_s=idle, dispatch_rank_s=rank)


@cache
def link_named(kind: str) -> Link:
    """The fitted constants of a kind: nvswitch, nvlink, pcie, infiniband or ethernet. Raises InputError for others."""
    return Link(**read_yaml(_CATALOG / f"{kind}.yaml")["constants"])
