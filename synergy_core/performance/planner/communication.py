"""Seconds of collectives, from the links of a machine.

In a ring of n GPUs, each GPU sends n − 1 pieces of bytes/n in an all-gather or reduce-scatter, and 2 (n − 1) pieces in
an all-reduce (Patarasuk and Yuan, 2009). A message uses the faster of NCCL's two protocols (`Link`). With wire = bytes
÷ (rate · efficiency), the first takes fixed + hops · hop + wire + 2 √(ramp · wire), with chunks of the best size; the
second, for small messages, low_fixed + hops · low_hop + wire ÷ low_share. A switch that does the reduction receives
(n + 1)/n of the bytes from each GPU, in n parts of one hop each. Across nodes, one ring passes through all GPUs:
(n − 1)/n of the bytes leave each node over the network shares of all its GPUs, and bytes also move between the GPUs of
each node. The slower of these two stages counts, plus the shorter of their start-up times.

Sizes are in bytes. ranks: GPUs of a group. per_node: GPUs of the group on one node. sharing: mean number of groups that
use one group's share of the node's network; 1: no sharing. Arguments may be arrays. A group of one GPU takes no time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import ArrayLike

from synergy_core.performance.goodput.efficiency import ExchangeTerms, compressed_sync
from synergy_core.performance.planner.machine import Constants, Link, Links, Machine, Software, links_for
from synergy_core.performance.planner.plan import Plans
from synergy_core.performance.planner.work import Amount, Work
from synergy_core.units import Floats, Ints


def all_to_all_s(
    nbytes: ArrayLike, ranks: ArrayLike, per_node: ArrayLike, links: Links, *, sharing: ArrayLike = 1.0
) -> Floats:
    """Seconds of an all-to-all: every rank sends an equal part of its nbytes to every other rank."""
    size, n, g, nodes = _shape(nbytes, ranks, per_node)
    share, nothing = size / n, np.zeros_like(size)
    network, rate = links.network, np.asarray(links.network_bytes_per_s)
    shared = rate * network.exchange / np.asarray(sharing, dtype=np.float64)
    return _both(
        inside=_inside(g, g - 1.0, share * (g - 1.0), links, exchange=True),
        inside_start=_inside(g, g - 1.0, nothing, links),
        between=_protocols(network, shared, nodes - 1.0, share * (n - g)),
        between_start=_protocols(network, rate, nodes - 1.0, nothing),
        group=(n, g, nodes),
        links=links,
    )


def send_s(nbytes: ArrayLike, within_node: ArrayLike, links: Links) -> Floats:
    """Seconds for one GPU to send nbytes to another GPU, within its node or not."""
    size = np.asarray(nbytes, dtype=np.float64)
    near = _inside(np.asarray(2.0), np.asarray(1.0), size, links) + links.dispatch_rank_s
    far = _protocols(links.network, np.asarray(links.network_bytes_per_s), np.asarray(1.0), size)
    return np.asarray(np.where(within_node, near, far) + links.dispatch_s + links.dispatch_rank_s)


def _ring(
    passes: float, nbytes: ArrayLike, ranks: ArrayLike, per_node: ArrayLike, links: Links, *, sharing: ArrayLike = 1.0
) -> Floats:
    """Seconds of `passes` rounds of a ring. Two rounds are an all-reduce, which may use a switch or a tree instead."""
    size, n, g, nodes = _shape(nbytes, ranks, per_node)
    hops, nothing = passes * (g - 1.0), np.zeros_like(size)
    link, inside = links.inside, _inside(g, hops, hops / g * size, links)
    if link.switch_efficiency > 0.0 and passes == 2.0:
        # Each GPU sends all of its bytes to the switch, and then its part of the sum.
        wire = (g + 1.0) / g * size / (links.inside_bytes_per_s * link.switch_efficiency)
        in_switch = link.fixed_s + g * link.hop_s + wire + 2.0 * np.sqrt(link.ramp_s * wire)
        inside = np.minimum(inside, np.where(g > 1.0, in_switch, 0.0))
    # Steps around a ring of nodes, or up and down a binary tree of nodes, whichever are fewer.
    steps = passes * np.minimum(nodes - 1.0, 2.0 * np.ceil(np.log2(nodes)))
    rate = links.network_bytes_per_s * g / np.asarray(sharing, dtype=np.float64)
    return _both(
        inside=inside,
        inside_start=_inside(g, hops, nothing, links),
        between=_protocols(links.network, rate, steps, passes * (n - 1.0) / n * size),
        between_start=_protocols(links.network, np.asarray(links.network_bytes_per_s), steps, nothing),
        group=(n, g, nodes),
        links=links,
    )


all_reduce_s = partial(_ring, 2.0)
"""Seconds of an all-reduce: every rank ends with the sum of all ranks' nbytes."""
all_gather_s = reduce_scatter_s = partial(_ring, 1.0)
"""Seconds of an all-gather, after which every rank has all nbytes; a reduce-scatter, its reverse, takes as long."""


def _shape(nbytes: ArrayLike, ranks: ArrayLike, per_node: ArrayLike) -> tuple[Floats, Floats, Floats, Floats]:
    """Arrays of each group's bytes, ranks, ranks per node (the mean if nodes differ) and nodes."""
    size, n, g = np.broadcast_arrays(*(np.asarray(each, dtype=np.float64) for each in (nbytes, ranks, per_node)))
    n = np.maximum(n, 1.0)
    nodes = np.ceil(n / np.clip(g, 1.0, n))
    return size, n, n / nodes, nodes


def _protocols(link: Link, rate: Floats, hops: Floats, wire_bytes: Floats) -> Floats:
    """Seconds for a GPU to send wire_bytes in `hops` steps under the faster protocol. rate: bytes/s by data sheet."""
    wire = wire_bytes / (rate * link.efficiency)
    bulk = link.fixed_s + hops * link.hop_s + wire + 2.0 * np.sqrt(link.ramp_s * wire)
    low = link.low_fixed_s + hops * link.low_hop_s + wire / link.low_share
    return np.asarray(np.minimum(bulk, low))


def _inside(g: Floats, hops: Floats, wire_bytes: Floats, links: Links, *, exchange: bool = False) -> Floats:
    """Seconds to send wire_bytes among g GPUs of a node: over the GPU link if g ≤ `link_group`, else via the host."""
    share: Floats | float = 1.0
    if links.rings:
        share = np.asarray(links.rings)[np.minimum(np.ceil(g).astype(np.int64), len(links.rings) - 1)]
    joined, staged = (
        _protocols(link, np.asarray(rate * (link.exchange if exchange else 1.0)), hops, wire_bytes)
        for link, rate in ((links.inside, links.inside_bytes_per_s * share), (links.host, links.host_bytes_per_s))
    )
    return np.where(g > 1.0, np.where(g <= links.link_group, joined, staged), 0.0)


def _both(
    *,
    inside: Floats,
    inside_start: Floats,
    between: Floats,
    between_start: Floats,
    group: tuple[Floats, Floats, Floats],
    links: Links,
) -> Floats:
    """Seconds of the slower stage, plus the smaller of the stages' times for an empty message, plus software overhead.

    group: numbers of ranks, of ranks on a node, and of nodes.
    """
    n, g, nodes = group
    between, between_start = (np.where(nodes > 1.0, each, 0.0) for each in (between, between_start))
    total = np.maximum(inside, between) + np.minimum(inside_start, between_start)
    return np.where(n > 1.0, total + links.dispatch_s + g * links.dispatch_rank_s, 0.0)


class PlannedRuns:
    """Plans on a machine, with its links, the fitted constants, and the number of ranks of each group on one node.

    Ranks are laid out with tensor parallelism innermost, then context, data, and pipeline outermost.
    """

    def __init__(self, plans: Plans, machine: Machine, software: Software, constants: Constants) -> None:
        self.plans, self.machine, self.software, self.constants = plans, machine, software, constants
        self.links = links_for(machine)
        per_node = machine.gpus_per_node

        def within(degree: Ints, stride: Ints) -> Ints:
            return np.minimum(degree, np.maximum(per_node // stride, 1))

        self.gpus_on_node = np.minimum(per_node, plans.gpus)
        # If the GPUs of a node are not a multiple of the tensor-parallel degree, groups span nodes.
        self.tensor_within = np.gcd(plans.tensor, per_node)
        self.context_within = within(plans.context, plans.tensor)

        def shared(ranks: Ints, stride: Ints) -> tuple[Ints, Ints, Ints, Ints]:
            """Ranks that share states out, and groups of these, which hold the same; each with those on a node."""
            shards = np.where(plans.zero >= 1, software.sharing(ranks), ranks)
            groups = ranks // shards
            return shards, within(shards, stride), groups, within(groups, stride * shards)

        self.data_ranks = plans.data * plans.context
        self.shards, self.shards_within, self.groups, self.groups_within = shared(self.data_ranks, plans.tensor)
        split = plans.expert_tensor(whole=software.communication.whole_experts)
        self.expert_within = within(plans.expert, split)
        copies = np.maximum(self.data_ranks * (plans.tensor // split) // plans.expert, 1)
        experts = shared(copies, split * plans.expert)
        self.copies, self.copies_within, self.copy_groups, self.copy_groups_within = experts
        replica = plans.tensor * plans.context * plans.data
        self.pipeline_within = (replica * plans.pipeline <= per_node) & (per_node % replica == 0)


def held(work: Work, plans: Plans, software: Software) -> tuple[Floats, Floats]:
    """Numbers of dense and of expert parameters, (plans,), that a GPU of the largest stage trains, before ZeRO shards
    them.
    """
    dense: Floats = np.zeros(len(plans))
    expert: Floats = np.zeros(len(plans))
    count = np.asarray(work.layer_count, float)
    most = np.minimum(np.ceil(count / plans.pipeline), count)
    for each in work.layers:
        share = most * each.count / count
        dense = dense + share * each.block.trained_parameters(software, expert=False)
        expert = expert + share * each.block.trained_parameters(software, expert=True)
    first, last = np.asarray(work.before.parameters, float), np.asarray(work.after.parameters, float)
    edge = np.where(plans.pipeline == 1, first + last, np.maximum(first, last))
    return dense + edge * software.run.trains_tables, expert


ReplicaTerms = tuple[ExchangeTerms, ExchangeTerms]
"""How a compressor changes the exchange of dense and of expert gradients on the slowest stage: numbers, or arrays
(plans,). `latency_s` is ignored, because the links determine it."""
Collective = Callable[..., Floats]


def replica_exchange_s(
    work: Work, runs: PlannedRuns, forward_s: Floats, backward_s: Floats, terms: ReplicaTerms | None = None
) -> Floats:
    """Seconds that reducing gradients and gathering weights over data- and context-parallel ranks add to a step.

    Up to ZeRO-2 both happen once a step and overlap with the last micro-batch's backward pass as far as the software
    allows. Under ZeRO-3, every micro-batch gathers each layer's weights for the forward and again for the backward
    pass, and scatters its gradients (only the last one, if the software sums them whole); this overlaps with the
    computation of the previous layer. Encoding and decoding
    (`terms`) never overlap, because they keep the GPU busy.

    forward_s, backward_s: (plans,), seconds of a micro-batch on the slowest stage that communication may overlap with.
    """
    plans, software, c, links = runs.plans, runs.software, runs.constants, runs.links
    # Groups that share a node choose network cards independently, so some choose the same card.
    groups_on_node = np.maximum(runs.gpus_on_node // np.maximum(runs.shards_within, 1), 1)
    sharing = 1.0 + c.card_collisions * np.where(runs.shards_within > 1, groups_on_node - 1.0, 0.0)

    def of_all(collective: Collective, nbytes: Amount) -> Floats:
        return collective(nbytes, runs.shards, runs.shards_within, links, sharing=sharing) / c.network_efficiency

    def of_experts(collective: Collective, nbytes: Amount) -> Floats:
        """Seconds of a collective among the ranks that hold the same experts; 0 without experts."""
        found = collective(nbytes, runs.copies, runs.copies_within, links) / c.network_efficiency
        return np.where(np.asarray(nbytes) > 0, found, 0.0)

    def among_groups_s(nbytes: Amount, expert_bytes: Amount) -> Floats:
        """Seconds to sum the gradients of each rank's share over groups that hold the same.

        PyTorch's HSDP does so in a stream of its own, beside the next reduce-scatter within a group.
        """
        dense = all_reduce_s(nbytes / runs.shards, runs.groups, runs.groups_within, links)
        experts = all_reduce_s(expert_bytes / runs.copies, runs.copy_groups, runs.copy_groups_within, links)
        return (dense + np.where(np.asarray(expert_bytes) > 0, experts, 0.0)) / c.network_efficiency

    def gradients_s(group: Callable[[Collective, Amount], Floats], collective: Collective, nbytes: Amount) -> Floats:
        """Seconds to exchange gradients that have nbytes before compression."""
        seconds = group(collective, nbytes)
        if terms is None:
            return seconds
        latency_s = group(collective, 0.0 * np.asarray(nbytes))
        return compressed_sync(seconds, replace(terms[group is of_experts], latency_s=latency_s, codec_s=0.0))

    def exposed(seconds: Floats, hidden_s: Floats, never: Amount) -> Floats:
        """Seconds that do not overlap with hidden_s of computation. never: the fraction that never overlaps."""
        return never * seconds + (1.0 - never) * np.maximum(seconds - hidden_s, 0.0)

    dense, expert = held(work, plans, software)
    gradients = dense * software.sent_gradient_bytes
    whole = gradients_s(of_all, all_reduce_s, gradients)
    summed = among_groups_s(gradients, expert * software.sent_gradient_bytes)
    split = np.maximum(gradients_s(of_all, all_gather_s, gradients), summed)
    split = split + of_all(all_gather_s, dense * software.weight_bytes)
    own = gradients_s(of_experts, all_reduce_s, expert * software.sent_gradient_bytes)
    once = exposed(np.where(plans.zero >= 1, split, whole) + own, backward_s, c.data_exposed)
    count = np.asarray(work.layer_count, float)
    layers = np.maximum(np.ceil(count / plans.pipeline), 1.0)
    unit, own_unit = (
        sum(run.count * np.asarray(getattr(run.block, name), float) for run in work.layers) / count
        for name in ("parameters", "expert_parameters")
    )
    weight_bytes = software.run.frozen_bytes if software.run.adapter_rank else software.weight_bytes
    gathered = of_all(all_gather_s, unit * weight_bytes) + of_experts(all_gather_s, own_unit * weight_bytes)
    # What never overlaps are copies, and slower computation beside them. Per byte they cost as much as between whole
    # nodes, however few network cards the ranks have.
    between_nodes = sum(
        all_gather_s(number * weight_bytes, ranks, np.minimum(ranks, runs.gpus_on_node), links)
        for number, ranks in ((unit, runs.shards), (own_unit, runs.copies))
    )
    never = c.data_exposed * np.minimum(between_nodes / (c.network_efficiency * np.maximum(gathered, 1e-12)), 1.0)
    if not software.run.trains_tables:
        unit, own_unit = dense / layers, expert / layers
    scattered = gradients_s(of_all, reduce_scatter_s, unit * software.sent_gradient_bytes)
    scattered = scattered + gradients_s(of_experts, reduce_scatter_s, own_unit * software.sent_gradient_bytes)
    summed = among_groups_s(unit * software.sent_gradient_bytes, own_unit * software.sent_gradient_bytes)
    scattered = np.maximum(scattered, summed)

    def micro_batch_s(scattered: Floats) -> Floats:
        again = software.run.trained_fraction * gathered  # no backward pass runs through the first layers if frozen
        every = exposed(gathered, forward_s / layers, never) + exposed(again + scattered, backward_s / layers, never)
        return layers * every + 2.0 * gathered

    gathers = np.where(plans.zero == 3, plans.accumulation, 1)
    scatters = np.ones_like(gathers) if software.communication.sums_whole else gathers
    sharded = scatters * micro_batch_s(scattered) + (gathers - scatters) * micro_batch_s(0.0 * scattered)
    seconds = np.where(plans.zero == 3, sharded, once)
    if terms is not None:
        seconds = seconds + np.add(terms[0].codec_s, terms[1].codec_s) * scatters
    return np.where(runs.data_ranks > 1, seconds, 0.0)
