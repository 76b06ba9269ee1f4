"""The best compressor, batch and plan of a model for every rate of the network between nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from synergy_core.arrays import Floats
from synergy_core.goodput.compression import Compressor
from synergy_core.jobs.exchange import MARGIN
from synergy_core.planner.architecture import Architecture, Family
from synergy_core.planner.compressed import CompressedPlans, CompressedSearch, gradients_of
from synergy_core.planner.constants import constants_for
from synergy_core.planner.machine import Machine
from synergy_core.planner.plan import NO_COMPRESSOR, Plan
from synergy_core.planner.search import Model
from synergy_core.planner.shards import every_offer
from synergy_core.planner.software import Software

PER_DECADE = 4
"""Rates that are tried between those asked for: crossovers lie between two of them."""


@dataclass(frozen=True, slots=True)
class Best:
    """What is best at one rate. goodput: samples per second, each worth one at the initial batch; gain: over the best
    without a compressor, 0 where that is it.
    """

    plan: Plan
    step_s: float
    goodput: float
    gain: float


@dataclass(frozen=True, eq=False)
class Sweep:
    """Of one model on one number of GPUs.

    batches: rising, the first is the initial one. rates: of a node, bytes/s, rising. noise_scale: in samples.
    """

    software: Software
    batches: tuple[int, ...]
    rates: tuple[float, ...]
    noise_scale: float
    _found: dict[float, tuple[CompressedPlans, ...]]

    @property
    def names(self) -> list[str]:
        """Compressors that some plan trains under, `none` first."""
        every = (each.compressor for found in self._found.values() for plans in found for each in plans.plans)
        return list(dict.fromkeys(every))

    def best(self, rate: float, noise_scale: float | None = None) -> Best:
        """At a rate that was tried; noise_scale: another one."""
        found = self._by_name(rate, noise_scale or self.noise_scale)
        plain = found[NO_COMPRESSOR]
        first = max(found.values(), key=lambda each: each.goodput)
        if first.goodput < MARGIN * plain.goodput:
            return plain
        return Best(first.plan, first.step_s, first.goodput, first.goodput / plain.goodput - 1.0)

    def gains(self, name: str) -> Floats:
        """(rates,): goodput with that compressor ÷ without, each at its own best batch and plan, less 1; −1 where no
        plan trains under it.
        """
        return np.array([self.gain(name, rate) for rate in self.rates])

    def gain(self, name: str, rate: float) -> float:
        """The same at one rate."""
        found = self._by_name(rate, self.noise_scale)
        return found[name].goodput / found[NO_COMPRESSOR].goodput - 1.0 if name in found else -1.0

    def crossover(self, name: str) -> float:
        """The rate, bytes/s, below which it pays: 0 where it never does, inf where it does at all that were tried.

        Between the two rates where its gain changes sign last, on a line through both on a scale of logarithms.
        """
        gains, rates = self.gains(name), np.log(self.rates)
        paying = np.flatnonzero(gains > 0.0)
        if not paying.size:
            return 0.0
        last = int(paying[-1])
        if last == len(rates) - 1:
            return float("inf")
        share = gains[last] / (gains[last] - gains[last + 1])
        return float(np.exp(rates[last] + share * (rates[last + 1] - rates[last])))

    def _by_name(self, rate: float, noise_scale: float) -> dict[str, Best]:
        """Each compressor with its best batch and plan."""
        best: dict[str, Best] = {}
        for plans in self._found[rate]:
            goodput = plans.goodput(noise_scale, self.batches[0]).tolist()
            for plan, step_s, each in zip(plans.plans, plans.step_s.tolist(), goodput, strict=True):
                if plan.compressor not in best or each > best[plan.compressor].goodput:
                    best[plan.compressor] = Best(plan, step_s, each, 0.0)
        return best


def sweep(
    family: Family,
    architecture: Architecture,
    machine: Machine,
    software: Software,
    *,
    gpus: int,
    batches: Sequence[int],
    node_bytes_per_s: Sequence[float],
    noise_scale: float,
    layerwise: Compressor,
) -> Sweep | None:
    """Tries every compressor at every batch, at the rates given and others between them; None where nothing fits.

    layerwise: of its scheme layers choose by themselves.
    """
    model = Model(family, architecture, software, architecture.limits())
    search = CompressedSearch(model, gradients_of(model), every_offer(layerwise))
    found = {}
    for rate in _with_others(node_bytes_per_s):
        joined = replace(machine, network_bytes_per_s=rate / machine.gpus_per_node)
        constants = constants_for(joined, software)
        fitting = [search.plans(joined, constants, gpus, batch) for batch in batches]
        found[rate] = tuple(each for each in fitting if each is not None)
    if not any(found.values()):
        return None
    return Sweep(software, tuple(batches), tuple(found), noise_scale, found)


def _with_others(rates: Sequence[float]) -> list[float]:
    """Rising, with so many between each two that they lie no further apart than `PER_DECADE` says."""
    asked = sorted(set(rates))
    result = asked[:1]
    for low, high in pairwise(asked):
        steps = int(np.ceil(PER_DECADE * np.log10(high / low)))
        result += [*np.geomspace(low, high, steps + 1)[1:-1].tolist(), high]
    return result
