"""Seconds of collectives, from the links of a machine.

A ring of n passes n − 1 pieces on (all-gather, reduce-scatter) or 2 (n − 1) (all-reduce), each bytes/n (Patarasuk and
Yuan, 2009). A message takes the faster of two protocols of NCCL (`Link`): time = fixed + hops · hop + wire +
2 √(ramp · wire), which is sending in chunks of the best size, and low + wire ÷ share for small ones. A switch that
adds up takes (n + 1)/n of the bytes from each GPU, one part after another: n hops. Across nodes one ring goes through
all GPUs: (n − 1)/n of the bytes leave each node over all of its GPUs' network, at once with what moves inside; the time
is the slower one's and the start of the other.

Sizes in bytes; ranks: GPUs of a group; per_node: how many of them share a node. sharing: groups at once on one node ÷
(GPUs of the node ÷ per_node): 1 where every GPU of the node is in one of the groups, each with its own share of the
network. All may be arrays that broadcast; a group of one takes no time.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from synergy_core.arrays import Floats
from synergy_core.planner.links import Link, Links, links_for

__all__ = ["Links", "all_gather_s", "all_reduce_s", "all_to_all_s", "links_for", "reduce_scatter_s", "send_s"]


def all_reduce_s(
    nbytes: ArrayLike, ranks: ArrayLike, per_node: ArrayLike, links: Links, *, sharing: ArrayLike = 1.0
) -> Floats:
    """Every rank ends with the sum of all ranks' nbytes."""
    return _ring(2.0, nbytes, ranks, per_node, links, sharing)


def reduce_scatter_s(
    nbytes: ArrayLike, ranks: ArrayLike, per_node: ArrayLike, links: Links, *, sharing: ArrayLike = 1.0
) -> Floats:
    """Every rank ends with its part of the sum of all ranks' nbytes."""
    return _ring(1.0, nbytes, ranks, per_node, links, sharing)


def all_gather_s(
    nbytes: ArrayLike, ranks: ArrayLike, per_node: ArrayLike, links: Links, *, sharing: ArrayLike = 1.0
) -> Floats:
    """Every rank ends with nbytes, of which each had its part."""
    return _ring(1.0, nbytes, ranks, per_node, links, sharing)


def all_to_all_s(
    nbytes: ArrayLike, ranks: ArrayLike, per_node: ArrayLike, links: Links, *, sharing: ArrayLike = 1.0
) -> Floats:
    """Every rank sends equal parts of its nbytes to all ranks; its own part stays."""
    size, n, g, nodes = _shape(nbytes, ranks, per_node)
    share = size / n
    inside = _inside(g, g - 1.0, share * (g - 1.0), links, exchange=True)
    rate = links.network_bytes_per_s * links.network.exchange / np.asarray(sharing, dtype=np.float64)
    between = np.where(nodes > 1, _protocols(links.network, rate, nodes - 1.0, share * (n - g)), 0.0)
    return _finish(inside, _inside(g, g - 1.0, np.zeros_like(size), links), between, _start(links, nodes), n, g, links)


def send_s(nbytes: ArrayLike, within_node: ArrayLike, links: Links) -> Floats:
    """One GPU sends nbytes to another, in its node or not."""
    size = np.asarray(nbytes, dtype=np.float64)
    near = _inside(np.asarray(2.0), np.asarray(1.0), size, links)
    far = _protocols(links.network, np.asarray(links.network_bytes_per_s), np.asarray(1.0), size)
    return np.asarray(
        np.where(within_node, near + links.dispatch_rank_s, far) + links.dispatch_s + links.dispatch_rank_s
    )


def _ring(
    passes: float, nbytes: ArrayLike, ranks: ArrayLike, per_node: ArrayLike, links: Links, sharing: ArrayLike
) -> Floats:
    """Seconds of a ring that goes round `passes` times; 2 is an all-reduce, which a switch or a tree can do as well."""
    size, n, g, nodes = _shape(nbytes, ranks, per_node)
    hops, wire = passes * (g - 1.0), passes * (g - 1.0) / g * size
    inside, start = _inside(g, hops, wire, links), _inside(g, hops, np.zeros_like(size), links)
    if links.inside.switch_efficiency > 0.0 and passes == 2.0:
        inside = np.minimum(inside, _in_switch(g, size, links))
    rate = links.network_bytes_per_s * g / np.asarray(sharing, dtype=np.float64)
    steps = passes * _node_steps(nodes)
    between = np.where(nodes > 1, _protocols(links.network, rate, steps, passes * (n - 1.0) / n * size), 0.0)
    return _finish(inside, start, between, _start(links, nodes, steps), n, g, links)


def _shape(nbytes: ArrayLike, ranks: ArrayLike, per_node: ArrayLike) -> tuple[Floats, Floats, Floats, Floats]:
    """Bytes, ranks, ranks on a node (at least 1, at most all; the mean where nodes differ) and nodes of each group."""
    size, n, g = np.broadcast_arrays(*(np.asarray(each, dtype=np.float64) for each in (nbytes, ranks, per_node)))
    n = np.maximum(n, 1.0)
    nodes = np.ceil(n / np.clip(g, 1.0, n))
    return size, n, n / nodes, nodes


def _node_steps(nodes: Floats) -> Floats:
    """Hops in a row over a group's nodes: round the ring, or up a tree whose nodes pass on to two each."""
    return np.minimum(nodes - 1.0, 2.0 * np.ceil(np.log2(nodes)))


def _protocols(link: Link, rate: Floats, hops: Floats, wire_bytes: Floats) -> Floats:
    """Seconds of `hops` steps in which wire_bytes leave a GPU, rate by the data sheet: by the faster protocol."""
    wire = wire_bytes / (rate * link.efficiency)
    bulk = link.fixed_s + hops * link.hop_s + wire + 2.0 * np.sqrt(link.ramp_s * wire)
    low = link.low_fixed_s + hops * link.low_hop_s + wire / link.low_share
    return np.asarray(np.minimum(bulk, low))


def _inside(g: Floats, hops: Floats, wire_bytes: Floats, links: Links, *, exchange: bool = False) -> Floats:
    """Seconds within nodes, g GPUs each: over their link as far as it reaches, else through the host; 0 for one GPU."""
    share: Floats | float = 1.0
    if links.rings:
        share = np.asarray(links.rings)[np.minimum(np.ceil(g).astype(np.int64), len(links.rings) - 1)]
    near, host = links.inside, links.host
    joined = _protocols(
        near, links.inside_bytes_per_s * share * np.asarray(near.exchange if exchange else 1.0), hops, wire_bytes
    )
    staged = _protocols(
        host, np.asarray(links.host_bytes_per_s * (host.exchange if exchange else 1.0)), hops, wire_bytes
    )
    return np.where(g > 1.0, np.where(g <= links.link_group, joined, staged), 0.0)


def _in_switch(g: Floats, size: Floats, links: Links) -> Floats:
    """Seconds of an all-reduce in the switch: each GPU's bytes go there once, and its part of the sum once more."""
    link = links.inside
    wire = (g + 1.0) / g * size / (links.inside_bytes_per_s * link.switch_efficiency)
    return np.where(g > 1.0, link.fixed_s + g * link.hop_s + wire + 2.0 * np.sqrt(link.ramp_s * wire), 0.0)


def _start(links: Links, nodes: Floats, steps: Floats | None = None) -> Floats:
    """Seconds until an empty message has passed between all of the group's nodes; 0 on one node."""
    hops = nodes - 1.0 if steps is None else steps
    rate = np.asarray(links.network_bytes_per_s)
    return np.where(nodes > 1.0, _protocols(links.network, rate, hops, np.zeros_like(nodes)), 0.0)


def _finish(
    inside: Floats, start: Floats, between: Floats, between_start: Floats, n: Floats, g: Floats, links: Links
) -> Floats:
    """Seconds of the slower of the two stages and the start of the other; then the software's own time."""
    total = np.maximum(inside, between) + np.minimum(start, between_start)
    return np.where(n > 1.0, total + links.dispatch_s + g * links.dispatch_rank_s, 0.0)
