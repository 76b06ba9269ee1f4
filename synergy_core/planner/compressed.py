"""The fastest plan of a model for every compressor of the gradients that its replicas exchange."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from synergy_core.arrays import Bools, Floats, Ints
from synergy_core.errors import unknown
from synergy_core.goodput.compressed import GradientErrors
from synergy_core.goodput.compression import CONVOLUTIONAL, Gradients
from synergy_core.goodput.exchange import ExchangeTerms
from synergy_core.planner.constants import Constants
from synergy_core.planner.enumerate import undominated, with_options
from synergy_core.planner.machine import Machine
from synergy_core.planner.memory import memory, usable_bytes
from synergy_core.planner.plan import NO_COMPRESSOR, Plan, Plans, plans_of
from synergy_core.planner.replicas import ReplicaTerms
from synergy_core.planner.search import Model, sized_plans
from synergy_core.planner.shards import Offering, ShardOffer, stages_of
from synergy_core.planner.step_time import computation
from synergy_core.planner.work import Work

NOTHING = ExchangeTerms()
TERMS = ("collectives", "sent", "codec_s")
_Split = tuple[int, int, int]
"""Tensor, pipeline and expert parallelism: what a GPU's gradients follow from."""


@dataclass(frozen=True, eq=False)
class CompressedPlans:
    """On one number of GPUs, at one global batch: for each compressor its fastest plan, `none` first, (offers,).

    plans: each names its compressor. step_s: seconds. replicas: gradients that are compressed apart from each other in
    a step: the ranks that exchange, under ZeRO-3 times the micro-batches. errors: what compression makes of them.
    """

    plans: tuple[Plan, ...]
    step_s: Floats
    replicas: Floats
    errors: GradientErrors

    def __len__(self) -> int:
        return len(self.plans)

    def goodput(self, noise_scale: float, initial_batch: float) -> Floats:
        """(offers,): samples per second, each counted by what one at the initial batch is worth; φ in samples."""
        batch = np.array([each.global_batch for each in self.plans], dtype=np.float64)
        scale, variance = batch / initial_batch, noise_scale / initial_batch
        worth = self.errors.worth(scale, 1.0, variance, initial_batch, self.replicas)
        gain = (variance + 1.0) / (variance / scale + 1.0)
        result: Floats = initial_batch * gain * worth / self.step_s
        return result


@dataclass(frozen=True, eq=False)
class CompressedSearch:
    """Of one model with its software. gradients: how they are spread. offering: what each plan is offered."""

    model: Model
    gradients: Gradients
    offering: Offering
    _offers: dict[_Split, dict[str, ShardOffer]] = field(default_factory=dict, repr=False)

    def plans(
        self,
        machine: Machine,
        constants: Constants,
        gpus: int,
        global_batch: int,
        fixed: Mapping[str, int] | None = None,
    ) -> CompressedPlans | None:
        """The fastest plan for every compressor; None where nothing fits. fixed: degrees that must be as given.

        What fits without a compressor need not with one, which may keep what it did not send. Error feedback needs
        whole gradients on every rank: such compressors go with ZeRO's stage 0 alone. Compressors under which no plan
        has replicas are left out.
        """
        found = self._fitting(machine, gpus, global_batch, fixed or {})
        if found is None:
            return None
        plans, free_bytes = found
        timed = computation(self.model.work(plans), plans, machine, self.model.software, constants)
        ranks = plans.data * plans.context
        splits = list(zip(plans.tensor.tolist(), plans.pipeline.tolist(), plans.expert.tolist(), strict=True))
        offers = {each: self._offers_of(each, timed.work, splits.index(each)) for each in dict.fromkeys(splits)}
        best: list[tuple[ShardOffer, int, float]] = []
        for name in dict.fromkeys(name for each in offers.values() for name in each):
            own = [offers[split].get(name) for split in splits]
            allowed = np.array([_allowed(each, *of) for each, *of in zip(own, plans.zero, free_bytes, strict=True)])
            if name != NO_COMPRESSOR:
                allowed &= (ranks > 1) & np.array([each is not None and each.compresses for each in own])
            if not allowed.any():
                continue
            terms = None if name == NO_COMPRESSOR else self._terms(plans, own, machine)
            step_s = np.where(allowed, timed.step_time(terms).total_s, np.inf)
            at = int(step_s.argmin())
            offer = own[at]
            assert offer is not None
            best.append((offer, at, float(step_s[at])))
        return _chosen(plans, best)

    def _fitting(
        self, machine: Machine, gpus: int, global_batch: int, fixed: Mapping[str, int]
    ) -> tuple[Plans, Floats] | None:
        """Plans with options that fit uncompressed, and bytes of a GPU that are left."""
        sized, _ = sized_plans(self.model, machine, np.array([gpus]), global_batch, fixed=fixed)
        variants, of = with_options(sized.plans.take(sized.fits), fixed)
        if not len(variants):
            return None
        needed = memory(self.model.work(variants), variants, self.model.software)
        fits = np.broadcast_to(needed.fits(machine), len(variants))
        kept = np.zeros(len(variants), dtype=np.bool_)
        # Of those that shard nothing the best ones are kept even where sharding saves recomputation.
        for group in (fits, fits & (variants.zero == 0)):
            at = np.flatnonzero(group)
            kept[at[undominated(variants.zero[at], variants.recompute[at], of[at])]] = True
        left = usable_bytes(machine) - np.asarray(needed.needed, dtype=np.float64)
        return variants.take(kept), np.broadcast_to(left, len(variants))[kept]

    def errors(self, plan: Plan) -> tuple[GradientErrors, float]:
        """What the plan's compressor makes of gradients, and how many are compressed apart from each other.

        Raises InputError for a compressor that is not offered.
        """
        split = plan.tensor, plan.pipeline, plan.expert
        known = self._offers_of(split, self.model.work(plans_of([plan])), 0)
        if plan.compressor not in known:
            raise unknown("offered compressor", plan.compressor, known)
        errors = known[plan.compressor].errors
        replicas = plan.data * plan.context * (plan.accumulation if plan.zero == 3 else 1)
        return replace(errors, rounds_sum=bool(errors.rounds_sum) and plan.zero == 0), float(replicas)

    def _offers_of(self, split: _Split, work: Work, at: int) -> dict[str, ShardOffer]:
        if split not in self._offers:
            stages = stages_of(work, split[1], at)
            self._offers[split] = {each.name: each for each in self.offering(stages, self.gradients)}
        return self._offers[split]

    def _terms(
        self,
        plans: Plans,
        own: list[ShardOffer | None],
        machine: Machine,
    ) -> ReplicaTerms:
        """Of every plan under its offer; nothing where there is none."""
        ranks = np.maximum(plans.data * plans.context, 2)
        made = []
        for replicas, expert in ((ranks, False), (np.maximum(ranks // plans.expert, 2), True)):
            each = [
                NOTHING
                if offer is None
                else offer.terms(count, self.model.software.gradient_bytes, machine.gpu, expert=expert)
                for offer, count in zip(own, replicas.tolist(), strict=True)
            ]
            columns = {name: np.array([getattr(one, name) for one in each]) for name in TERMS}
            made.append(ExchangeTerms(**columns))
        return ReplicaTerms(*made)


def gradients_of(model: Model) -> Gradients:
    """How its gradients are taken to be spread: what reads no tokens is convolutional."""
    return Gradients() if model.limits.seq_len else CONVOLUTIONAL


def _allowed(offer: ShardOffer | None, zero: int, free_bytes: float) -> bool:
    return offer is not None and (zero == 0 or offer.errors.unbiased is True) and offer.state_bytes <= free_bytes


def _chosen(plans: Plans, best: list[tuple[ShardOffer, int, float]]) -> CompressedPlans:
    rows = np.array([at for _, at, _ in best])
    zero: Ints = plans.zero[rows]
    ranks = (plans.data * plans.context)[rows]
    each = [offer.errors for offer, _, _ in best]
    columns: dict[str, Floats | Bools] = {
        name: np.array([getattr(one, name) for one in each]) for name in ("signal", "noise", "unbiased", "rounds_sum")
    }
    columns["rounds_sum"] = columns["rounds_sum"].astype(bool) & (zero == 0)  # shards are summed as they were decoded
    return CompressedPlans(
        tuple(replace(plans.plan(at), compressor=offer.name) for offer, at, _ in best),
        np.array([step_s for _, _, step_s in best]),
        np.where(zero == 3, ranks * plans.accumulation[rows], ranks).astype(np.float64),
        GradientErrors(**columns),
    )
