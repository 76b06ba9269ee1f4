"""The truth about jobs with parallel plans: the planner's best step time, off by an error that nobody knows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from zlib import crc32

import numpy as np

from synergy_core.errors import InputError
from synergy_core.jobs.plan_exchange import PlanExchange
from synergy_core.planner import tables
from synergy_core.planner.plan import NO_COMPRESSOR, Plan
from synergy_sim.ground_truth.application import ApplicationWithPlans, GradientStatistics, NodeGpus, packed

WORK = 1_000.0
"""Iterations of an unscaled job; every job of a trace scales them."""
MOST_ERROR = 1.0
STREAM = 5


@dataclass(frozen=True, slots=True)
class PlannedTruth:
    """How reality differs from the planner, and how noisy gradients are.

    error: standard deviation of the logarithm of true ÷ planned step times, drawn once per architecture and GPU type.
    noise_tokens: the gradient's noise scale, in tokens: about 2·10⁸ ÷ L^4.8 at a loss of L, so 10⁶ at L = 3 (Kaplan
    et al., arXiv 2001.08361, eq. 1.4). batch_growth: up to how many times the requested batch a job may train at.
    """

    error: float = 0.1
    noise_tokens: float = 1e6
    batch_growth: float = 2.0

    def __post_init__(self) -> None:
        if not 0 <= self.error <= MOST_ERROR:
            raise InputError(f"truth.planned.error={self.error:g}: expected a number from 0 to {MOST_ERROR:g}.")
        if not 0 < self.noise_tokens < np.inf:
            raise InputError(f"truth.planned.noise_tokens={self.noise_tokens:g}: expected a number of tokens > 0.")
        if not 1 <= self.batch_growth < np.inf:
            raise InputError(f"truth.planned.batch_growth={self.batch_growth:g}: expected a factor ≥ 1.")

    def factor(self, seed: int, architecture: str, gpu_type: str) -> float:
        """True ÷ planned step times of that architecture on that GPU type."""
        names = (crc32(architecture.encode()), crc32(gpu_type.encode()))
        return float(np.exp(self.error * np.random.default_rng((seed, STREAM, *names)).standard_normal()))


class PlannedApplication(ApplicationWithPlans):
    """An architecture of the catalog, trained from one requested global batch, always under the best plan for it. Its
    noise scale is the same throughout.

    gpus_per_node: by GPU type. seed: of the errors. exchange: what the exchange of its gradients may be; None: as the
    planner has it.
    """

    def __init__(
        self,
        name: str,
        batch: int,
        gpus_per_node: Mapping[str, int],
        truth: PlannedTruth,
        seed: int,
        exchange: PlanExchange | None = None,
    ) -> None:
        super().__init__()
        self.name = name
        self.initial_batch = batch
        self.max_batch = int(batch * truth.batch_growth)
        self.work_at_epoch_end = (WORK,)
        self._noise_scale = truth.noise_tokens / tables.model_named(name).seq_len
        self._factors = {gpu_type: truth.factor(seed, name, gpu_type) for gpu_type in gpus_per_node}
        self._gpus_per_node = gpus_per_node
        self.exchange = exchange
        self._compressed_gains: dict[Plan, list[float]] = {}

    def step_s(self, gpu_type: str, node_gpus: NodeGpus, global_batch: int) -> float:
        """Seconds under the best plan for that batch, gradients exchanged as they are; inf where none fits."""
        return self._planned(gpu_type, node_gpus, global_batch)[0]

    def _planned(
        self, gpu_type: str, node_gpus: NodeGpus, global_batch: int, compressor: str = NO_COMPRESSOR
    ) -> tuple[float, Plan]:
        """Seconds of a step and the plan, the best for that batch and compressor, which may be none where replicas
        exchange nothing; inf where none fits. On more nodes than need be, nodes count as small as the least of them:
        what is spread cannot use the fast links within a node.
        """
        gpus, per_node = sum(node_gpus), self._gpus_per_node[gpu_type]
        if len(node_gpus) > len(packed(gpus, per_node)):
            per_node = 1 << (min(node_gpus).bit_length() - 1)
        nodes = gpu_type, per_node
        if self.exchange is None:
            table = tables.planned_tables(self.name, (nodes,), (gpus,), global_batch)
            step_s, plan = float(table.step_time_s[0]), table.plans.plan(0)
        else:
            found = self.exchange.plans(self.name, nodes, gpus, global_batch)
            if found is None:
                return inf, Plan(data=gpus)
            at = next((at for at, each in enumerate(found.plans) if each.compressor == compressor), 0)
            step_s, plan = float(found.step_s[at]), found.plans[at]
        return step_s * self._factors[gpu_type], plan

    def statistics(self, global_batch: int, epoch: int) -> GradientStatistics:
        return GradientStatistics(1.0, self._noise_scale / self.initial_batch)

    def as_requested(self, gpu_type: str, node_gpus: NodeGpus, global_batch: int) -> Plan:
        """The best plan for that batch. Raises InputError where none fits."""
        return self._fitting(gpu_type, node_gpus, global_batch, NO_COMPRESSOR)

    def fixed(self, gpu_type: str, node_gpus: NodeGpus, global_batch: int) -> Plan:
        every = NO_COMPRESSOR if self.exchange is None else self.exchange.only
        return self._fitting(gpu_type, node_gpus, global_batch, every)

    def _fitting(self, gpu_type: str, node_gpus: NodeGpus, global_batch: int, compressor: str) -> Plan:
        step_s, plan = self._planned(gpu_type, node_gpus, global_batch, compressor)
        if step_s == inf:
            raise self._nothing_fits(gpu_type, node_gpus)
        return plan

    def gains_under(self, plan: Plan) -> list[float]:
        if self.exchange is None or plan.compressor == NO_COMPRESSOR:
            return self.gains(plan.global_batch)
        known = self._compressed_gains.get(plan)
        if known is None:
            first, epochs = self.initial_batch, range(len(self.work_at_epoch_end))
            seen = [self.statistics(plan.global_batch, epoch) for epoch in epochs]
            worth = [self.exchange.worth(self.name, plan, *each, first) for each in seen]
            gains = self.gains(plan.global_batch)
            known = self._compressed_gains[plan] = [gain * each for gain, each in zip(gains, worth, strict=True)]
        return known

    def seen_statistics(self, plan: Plan, epoch: int) -> tuple[float, float]:
        statistics = super().seen_statistics(plan, epoch)
        if self.exchange is None:
            return statistics
        return self.exchange.seen_statistics(self.name, plan, *statistics, self.initial_batch)

    def holds_back(self, plan: Plan) -> bool:
        if self.exchange is None or plan.compressor == NO_COMPRESSOR:
            return False
        return self.exchange.holds_back(self.name, plan)

    def held_back(self, plan: Plan, epoch: int) -> float:
        assert self.exchange is not None
        statistics = self.statistics(plan.global_batch, epoch)
        steps = self.exchange.held_back_steps(self.name, plan, *statistics, self.initial_batch)
        return steps * self.gains_under(plan)[epoch]

    def iteration_s(self, gpu_type: str, node_gpus: NodeGpus, plan: Plan) -> float:
        """Seconds under the best plan for that plan's batch and compressor. Raises InputError where none fits."""
        step_s, _ = self._planned(gpu_type, node_gpus, plan.global_batch, plan.compressor)
        if step_s == inf:
            raise self._nothing_fits(gpu_type, node_gpus)
        return step_s

    def _nothing_fits(self, gpu_type: str, node_gpus: NodeGpus) -> InputError:
        gpus, nodes = sum(node_gpus), len(node_gpus)
        return InputError(f"{self.name} was given {gpus} GPUs of type {gpu_type} on {nodes} nodes, where no plan fits.")
