"""How long replicas take to exchange gradients and weights, and what of it is not hidden behind computation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from synergy_core.arrays import Floats
from synergy_core.goodput.exchange import ExchangeTerms, compressed_sync
from synergy_core.planner.communication import Links, all_gather_s, all_reduce_s, reduce_scatter_s
from synergy_core.planner.constants import Constants
from synergy_core.planner.groups import RankGroups
from synergy_core.planner.plan import Plans
from synergy_core.planner.software import Software
from synergy_core.planner.work import Amount, Work

Collective = Callable[[Amount, NDArray[np.int64], NDArray[np.int64], Links], Floats]


@dataclass(frozen=True, eq=False)
class ReplicaTerms:
    """What a compressor makes of the exchanges of gradients; numbers, or arrays (plans,). As they stand: nothing.

    dense, expert: of the slowest stage's gradients; latencies are not read, they follow from the links.
    """

    dense: ExchangeTerms = field(default_factory=ExchangeTerms)
    expert: ExchangeTerms = field(default_factory=ExchangeTerms)


@dataclass(frozen=True, slots=True)
class Hiding:
    """Seconds (plans,) of a micro-batch on the slowest stage that communication may hide behind."""

    forward: Floats
    backward: Floats


def held(work: Work, plans: Plans) -> tuple[Floats, Floats]:
    """(plans,) twice: parameters of the largest stage on one GPU before ZeRO, dense and expert."""
    dense: Floats = np.zeros(len(plans))
    expert: Floats = np.zeros(len(plans))
    count = np.asarray(work.layer_count, float)
    most = np.minimum(np.ceil(count / plans.pipeline), count)
    for each in work.layers:
        share = most * each.count / count
        dense = dense + share * each.block.parameters
        expert = expert + share * each.block.expert_parameters
    first, last = np.asarray(work.before.parameters, float), np.asarray(work.after.parameters, float)
    edge = np.where(plans.pipeline == 1, first + last, np.maximum(first, last))
    return dense + edge, expert


def replica_exchange_s(
    work: Work,
    plans: Plans,
    software: Software,
    c: Constants,
    links: Links,
    groups: RankGroups,
    hiding: Hiding,
    terms: ReplicaTerms | None = None,
) -> Floats:
    """Exposed seconds of reducing gradients and gathering weights over data- and context-parallel ranks.

    Up to ZeRO-2 both happen once a step, behind the last micro-batch's backward pass as far as the software overlaps
    them. Under ZeRO-3 each layer's weights are gathered for the forward and again for the backward pass, and its
    gradients scattered, in every micro-batch, behind the computation of the layer before. Encoding and decoding
    (`terms`) hide behind nothing: the GPU that does it computes nothing else.
    """
    dense, expert = held(work, plans)
    ranks, within = groups.data_ranks, groups.data_within
    # Groups that have several GPUs on a node, but not all, pick network cards without knowing of each other.
    sets = np.maximum(groups.per_node // np.maximum(within, 1), 1)
    sharing = 1.0 + c.card_collisions * np.where(within > 1, sets - 1.0, 0.0)

    def gather(nbytes: Amount) -> Floats:
        return all_gather_s(nbytes, ranks, within, links, sharing=sharing) / c.network_efficiency

    def scatter(nbytes: Amount) -> Floats:
        return reduce_scatter_s(nbytes, ranks, within, links, sharing=sharing) / c.network_efficiency

    def reduce(nbytes: Amount) -> Floats:
        return all_reduce_s(nbytes, ranks, within, links, sharing=sharing) / c.network_efficiency

    def expert_scatter(nbytes: Amount) -> Floats:
        return _of_experts(reduce_scatter_s, nbytes, links, groups, c)

    def expert_reduce(nbytes: Amount) -> Floats:
        return _of_experts(all_reduce_s, nbytes, links, groups, c)

    of_dense, of_expert = (None, None) if terms is None else (terms.dense, terms.expert)
    gradients = dense * software.gradient_bytes
    whole = _compressed(reduce, gradients, of_dense)
    split = _compressed(scatter, gradients, of_dense) + gather(dense * software.weight_bytes)
    own = _compressed(expert_reduce, expert * software.gradient_bytes, of_expert)
    seconds = np.where(plans.zero >= 1, split, whole) + own
    once = _exposed(seconds, hiding.backward, c)
    count = np.asarray(work.layer_count, float)
    layers = np.maximum(np.ceil(count / plans.pipeline), 1.0)
    unit = sum(run.count * np.asarray(run.block.parameters, float) for run in work.layers) / count
    own_unit = sum(run.count * np.asarray(run.block.expert_parameters, float) for run in work.layers) / count
    gathered = gather(unit * software.weight_bytes)
    gathered = gathered + _of_experts(all_gather_s, own_unit * software.weight_bytes, links, groups, c)
    scattered = _compressed(scatter, unit * software.gradient_bytes, of_dense)
    scattered = scattered + _compressed(expert_scatter, own_unit * software.gradient_bytes, of_expert)
    forward = _exposed(gathered, hiding.forward / layers, c)
    backward = _exposed(gathered + scattered, hiding.backward / layers, c)
    every = layers * (forward + backward) + 2.0 * gathered
    result = np.where(ranks > 1, np.where(plans.zero == 3, plans.accumulation * every, once), 0.0)
    if terms is None:
        return result
    codec = np.add(terms.dense.codec_s, terms.expert.codec_s) * np.where(plans.zero == 3, plans.accumulation, 1)
    return result + np.where(ranks > 1, codec, 0.0)


def _compressed(collective: Callable[[Amount], Floats], nbytes: Amount, terms: ExchangeTerms | None) -> Floats:
    """Seconds on the wire of a collective that carries so much uncompressed."""
    seconds = collective(nbytes)
    if terms is None:
        return seconds
    return compressed_sync(seconds, replace(terms, latency_s=collective(0.0 * np.asarray(nbytes)), codec_s=0.0))


def _of_experts(collective: Collective, nbytes: Amount, links: Links, groups: RankGroups, c: Constants) -> Floats:
    """Seconds among the ranks that hold the same experts; none where there are no experts."""
    seconds = collective(nbytes, groups.copies, groups.copies_within, links) / c.network_efficiency
    return np.where(np.asarray(nbytes) > 0, seconds, 0.0)


def _exposed(seconds: Floats, hidden: Floats, c: Constants) -> Floats:
    """Seconds of communication that are not hidden where `hidden` could be: a share never is, the rest if it can."""
    return c.data_exposed * seconds + (1.0 - c.data_exposed) * np.maximum(seconds - hidden, 0.0)
