"""What the exchange of gradients may be for jobs with parallel plans: by architecture, GPUs and batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import get_args

import numpy as np

from synergy_core.arrays import Floats
from synergy_core.errors import unknown
from synergy_core.goodput.compressed import GradientErrors, naive_noise_scale, steps_held_back
from synergy_core.goodput.compression import Compressor, compressor_named
from synergy_core.goodput.efficiency import noise_scale
from synergy_core.goodput.offers import within_error_name
from synergy_core.jobs.exchange import MARGIN, Compression
from synergy_core.planner import tables
from synergy_core.planner.compressed import CompressedPlans
from synergy_core.planner.plan import NO_COMPRESSOR, Plan
from synergy_core.planner.shards import Offering, every_offer, only_offer, within_error_offer


@dataclass(frozen=True, eq=False)
class PlanExchange:
    """How jobs with plans come by a compressor: `jobs.exchange.exchange_of` says what each mode means.

    share_bytes_per_s: by GPU type, each GPU's of the network between nodes; empty: as of the usual nodes. Raises
    InputError for an unknown mode.
    """

    mode: Compression
    compressor: Compressor
    share_bytes_per_s: Mapping[str, float]

    def __post_init__(self) -> None:
        if self.mode not in get_args(Compression):
            raise unknown("compression", self.mode, get_args(Compression))

    @property
    def keeps_batch(self) -> bool:
        """Whether jobs train at their requested batch."""
        return self.mode in ("uniform", "lgreco")

    @property
    def only(self) -> str:
        """The compressor of jobs that choose nothing, where replicas exchange; `none` where there is a choice."""
        if self.mode in ("none", "coadaptive"):
            return NO_COMPRESSOR
        return self.compressor.name if self.mode == "uniform" else within_error_name(self.compressor)

    @cached_property
    def _offering(self) -> Offering:
        if self.mode == "none":
            return only_offer(compressor_named(NO_COMPRESSOR))
        if self.mode == "coadaptive":
            return every_offer(self.compressor)
        return only_offer(self.compressor) if self.mode == "uniform" else within_error_offer(self.compressor)

    def plans(
        self, architecture: str, nodes: tables.Nodes, gpus: int, batch: int, *, data_parallel_only: bool = False
    ) -> CompressedPlans | None:
        """The fastest plan for every compressor that is offered; None where nothing fits."""
        share = self.share_bytes_per_s.get(nodes[0])
        return tables.compressed_plans(
            architecture,
            nodes,
            gpus,
            batch,
            self._offering,
            share_bytes_per_s=share,
            data_parallel_only=data_parallel_only,
        )

    def best(self, found: CompressedPlans, noise_scale: float, initial_batch: float) -> tuple[int, float]:
        """Which of the plans to train under, and its goodput, samples per second: as the task takes it to be.

        coadaptive: the best, but none unless that gains `MARGIN`. Else the one compressor, where replicas exchange.
        """
        goodput = self._believed(found).goodput(noise_scale, initial_batch)
        if self.mode == "coadaptive":
            first = int(goodput.argmax())
            at = first if goodput[first] >= MARGIN * goodput[0] else 0
        else:
            at = len(found) - 1
        return at, float(goodput[at])

    def _believed(self, found: CompressedPlans) -> CompressedPlans:
        if self.mode != "naive":
            return found
        nothing: Floats = np.zeros(len(found))
        return replace(found, errors=GradientErrors(nothing, nothing, nothing == 0.0, nothing > 0.0))

    def worth(self, architecture: str, plan: Plan, grad_sqr: float, grad_var: float, initial_batch: float) -> float:
        """Gain under the plan's compressor ÷ gain without."""
        errors, replicas = tables.compressed_search(architecture, self._offering).errors(plan)
        scale = plan.global_batch / initial_batch
        return float(errors.worth(scale, grad_sqr, grad_var, initial_batch, replicas))

    def seen_statistics(
        self, architecture: str, plan: Plan, grad_sqr: float, grad_var: float, initial_batch: float
    ) -> tuple[float, float]:
        """What a job reports of its gradient: the truth, but from norms after compression where it is naive."""
        if self.mode != "naive" or plan.compressor == NO_COMPRESSOR or grad_sqr == 0.0:
            return grad_sqr, grad_var
        errors, replicas = tables.compressed_search(architecture, self._offering).errors(plan)
        if not errors.unbiased:
            return grad_sqr, grad_var
        phi, local = noise_scale(grad_sqr, grad_var, initial_batch), plan.global_batch / replicas
        variance = errors.distortion(phi, local, replicas).variance
        return grad_sqr, float(naive_noise_scale(phi, local, variance)) * grad_sqr / initial_batch

    def holds_back(self, architecture: str, plan: Plan) -> bool:
        """Whether error feedback keeps what the plan's compressor does not send, for the next gradient."""
        return not tables.compressed_search(architecture, self._offering).errors(plan)[0].unbiased

    def held_back_steps(
        self, architecture: str, plan: Plan, grad_sqr: float, grad_var: float, initial_batch: float
    ) -> float:
        """Steps whose progress is lost with the compressor's state: `steps_held_back`."""
        errors, replicas = tables.compressed_search(architecture, self._offering).errors(plan)
        phi = float(noise_scale(grad_sqr, grad_var, initial_batch))
        return steps_held_back(errors, phi, plan.global_batch / replicas, replicas)
