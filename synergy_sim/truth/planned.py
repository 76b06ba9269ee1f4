"""The truth about jobs with parallel plans: the planner's best step time times an error hidden from schedulers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import inf
from zlib import crc32

import numpy as np

from synergy_core.errors import InputError
from synergy_core.performance.goodput.efficiency import GradientErrors
from synergy_core.performance.planner import tables
from synergy_core.performance.planner.plan import NO_COMPRESSOR, Plan
from synergy_core.scheduling.jobs.exchange import PlanExchange
from synergy_core.scheduling.jobs.testbed_profiles import ProfiledModel, degrees_of
from synergy_sim.truth.application import ApplicationWithPlans, GradientStatistics, NodeGpus, packed

WORK = 1_000.0
"""Iterations of a job with work_scale 1; other jobs do `work_scale` × as many."""
STREAM = 5
NORMAL_95 = 1.645
"""95 % quantile of a standard normal distribution."""


@dataclass(frozen=True, slots=True)
class PlannedTruth:
    """How true step times and memory differ from the planner's predictions, and how noisy gradients are.

    error, plan_error: standard deviations of two parts of log(true ÷ planned step time). The first is drawn once per
    architecture and GPU type. The second depends on the plan: a third of its variance is drawn for each tensor,
    pipeline and data-parallel degree above 1, so that plans with a common degree have similar errors.
    noise_tokens: the gradient's noise scale, in tokens: about 2·10⁸ ÷ L^4.8 at a loss of L, so 10⁶ at L = 3 (Kaplan
    et al., arXiv 2001.08361, eq. 1.4). batch_growth: maximum batch ÷ requested batch.
    memory_error: whether true peak memory differs from the planner's by a random error per plan, with the spread of
    held-out measurements (`bands.memory_band`).
    known: whether policies know true step times and jobs run under the truly fastest plan; else policies and jobs use
    the planner's predictions.
    """

    error: float = 0.1
    plan_error: float = 0.0
    noise_tokens: float = 1e6
    batch_growth: float = 2.0
    memory_error: bool = False
    known: bool = False

    def factor(self, seed: int, architecture: str, gpu_type: str) -> float:
        """True ÷ planned step time of that architecture on that GPU type, the same for all plans."""
        return float(np.exp(self.error * _drawn(seed, architecture, gpu_type)))

    def plan_factor(self, seed: int, architecture: str, gpu_type: str, plan: Plan) -> float:
        """True ÷ planned step time of one plan ÷ the `factor` that all plans have in common.

        It is 1 for a plan on a single GPU, which has no communication.
        """
        degrees = {"tensor": plan.tensor, "pipeline": plan.pipeline, "data": plan.data}
        parts = [
            _drawn(seed, architecture, gpu_type, f"{name}{degree}") for name, degree in degrees.items() if degree > 1
        ]
        return float(np.exp(self.plan_error / np.sqrt(len(degrees)) * sum(parts)))

    def runs_out(self, seed: int, architecture: str, gpu_type: str, plan: Plan) -> bool:
        """Whether a plan on several GPUs truly needs more memory than a GPU has.

        True ÷ predicted memory is log-normal; the ends of the planner's band are its 5 % and 95 % quantiles.
        """
        if not self.memory_error or plan.gpus == 1:
            return False
        share, low, high = tables.memory_factors(architecture, gpu_type, plan)
        middle, spread = np.log(low * high) / 2.0, np.log(high / low) / (2.0 * NORMAL_95)
        return bool(np.log(share) + middle + spread * _drawn(seed, architecture, gpu_type, plan.describe()) > 0.0)


@dataclass(frozen=True, slots=True)
class PlanErrors:
    """True ÷ planned step times of architectures on GPU types under plans (`planner.tables.PlanError`);
    inf for plans that run out of memory.
    """

    truth: PlannedTruth
    seed: int

    def __call__(self, architecture: str, gpu_type: str, plan: Plan) -> float:
        return inf if self.runs_out(architecture, gpu_type, plan) else self.of_time(architecture, gpu_type, plan)

    def of_time(self, architecture: str, gpu_type: str, plan: Plan) -> float:
        """True ÷ planned step time, also for plans that run out of memory."""
        where = self.seed, architecture, gpu_type
        return self.truth.factor(*where) * self.truth.plan_factor(*where, plan)

    def runs_out(self, architecture: str, gpu_type: str, plan: Plan) -> bool:
        return self.truth.runs_out(self.seed, architecture, gpu_type, plan)


@cache
def _drawn(seed: int, *names: str) -> float:
    """A standard normal draw that depends only on the seed and these names."""
    stream = np.random.default_rng((seed, STREAM, *(crc32(name.encode()) for name in names)))
    return float(stream.standard_normal())


class PlannedApplication(ApplicationWithPlans):
    """An architecture of the catalog with one requested global batch, always trained under the best plan.

    The gradient noise scale is constant. gpus_per_node: by GPU type. seed: draws the planner's errors. exchange: the
    possible exchanges of gradients; None: uncompressed, over the network that the planner assumes.
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
        self._plan_errors = PlanErrors(truth, seed)
        self._known_errors = self._plan_errors if truth.known else None
        self._gpus_per_node = gpus_per_node
        self.exchange = exchange

    def step_s(self, gpu_type: str, node_gpus: NodeGpus, global_batch: int) -> float:
        """Seconds of a step under the best plan for that batch without compression; inf if none fits."""
        return self._planned(gpu_type, node_gpus, global_batch)[0]

    def _planned(
        self, gpu_type: str, node_gpus: NodeGpus, global_batch: int, compressor: str = NO_COMPRESSOR
    ) -> tuple[float, Plan]:
        """(seconds of a step, plan) of the best plan for that batch and compressor; inf seconds if no plan fits.

        A plan without data parallelism has no compressor. A job on more nodes than necessary cannot fully use the links
        within nodes: each node counts as having its fewest GPUs on any node, rounded down to a power of two.
        """
        gpus, per_node = sum(node_gpus), self._gpus_per_node[gpu_type]
        if len(node_gpus) > len(packed(gpus, per_node)):
            per_node = 1 << (min(node_gpus).bit_length() - 1)
        nodes = gpu_type, per_node
        if self.exchange is None:
            table = tables.planned_tables(self.name, (nodes,), (gpus,), global_batch, errors=self._known_errors)
            step_s, plan = float(table.step_time_s[0]), table.plans.plan(0)
        else:
            found = self.exchange.plans(self.name, nodes, gpus, global_batch)
            if found is None:
                return inf, Plan(data=gpus)
            index = next((i for i, each in enumerate(found.plans) if each.compressor == compressor), 0)
            step_s, plan = float(found.step_s[index]), found.plans[index]
        if self._known_errors is None:  # otherwise the table has true times already
            step_s *= self._plan_errors.of_time(self.name, gpu_type, plan)
        return step_s, plan

    def runs_out(self, gpu_type: str, plan: Plan) -> bool:
        return self._plan_errors.runs_out(self.name, gpu_type, plan)

    def statistics(self, global_batch: int, epoch: int) -> GradientStatistics:
        return GradientStatistics(1.0, self._noise_scale / self.initial_batch)

    def as_requested(self, gpu_type: str, node_gpus: NodeGpus, global_batch: int) -> Plan:
        """The best plan for that batch. Raises InputError if none fits."""
        return self._fitting(gpu_type, node_gpus, global_batch, NO_COMPRESSOR)[1]

    def fixed(self, gpu_type: str, node_gpus: NodeGpus, global_batch: int) -> Plan:
        every = NO_COMPRESSOR if self.exchange is None else self.exchange.only
        return self._fitting(gpu_type, node_gpus, global_batch, every)[1]

    def _fitting(self, gpu_type: str, node_gpus: NodeGpus, global_batch: int, compressor: str) -> tuple[float, Plan]:
        step_s, plan = self._planned(gpu_type, node_gpus, global_batch, compressor)
        if step_s == inf:
            on = f"{sum(node_gpus)} GPUs of type {gpu_type} on {len(node_gpus)} nodes"
            raise InputError(f"{self.name} was given {on}, where no plan fits.")
        return step_s, plan

    def _errors(self, plan: Plan) -> tuple[GradientErrors, float]:
        assert self.exchange is not None
        return self.exchange.errors(self.name, plan)

    def iteration_s(self, gpu_type: str, node_gpus: NodeGpus, plan: Plan) -> float:
        """Seconds under the best plan for the batch and compressor of `plan`. Raises InputError if none fits."""
        return self._fitting(gpu_type, node_gpus, plan.global_batch, plan.compressor)[0]


# The truth about jobs whose model was profiled on a testbed: their step times are the measured ones.


class ProfiledApplication(ApplicationWithPlans):
    """A model that was profiled on a testbed. iterations: the job's work, in iterations at the initial batch.

    The intervals in which the gradient noise is constant count as its epochs.
    """

    def __init__(self, model: ProfiledModel, iterations: float) -> None:
        super().__init__()
        self.name = model.name
        self.model = model
        self.initial_batch = model.initial_batch
        self.max_batch = model.max_batch
        stretches = [each for each in model.noise if each.work < iterations]
        self.work_at_epoch_end = (*(each.work / iterations * WORK for each in stretches[1:]), WORK)
        self._ratios = [each.ratio for each in stretches]
        self._steps_s: dict[tuple[str, NodeGpus, Plan], float] = {}

    def step_s(self, gpu_type: str, node_gpus: NodeGpus, global_batch: int) -> float:
        return self.model.step_s(gpu_type, node_gpus, global_batch)

    def as_requested(self, gpu_type: str, node_gpus: NodeGpus, global_batch: int) -> Plan:
        """The best measured plan for that batch. Raises InputError if none was measured."""
        gpus = sum(node_gpus)
        row = self.model.best(gpu_type, self.model.nodes_like(gpu_type, len(node_gpus), gpus), gpus, global_batch)
        if row is None:
            raise InputError(
                f"{self.name}: no plan was profiled on {gpus} × {gpu_type} at a batch of {global_batch}; "
                f"measured batches: {', '.join(map(str, self.model.batches))}."
            )
        return row.plan

    def iteration_s(self, gpu_type: str, node_gpus: NodeGpus, plan: Plan) -> float:
        """Seconds of an iteration under the plan's batch and degrees, from measurements (`ProfiledModel.step_s`)."""
        key = gpu_type, node_gpus, plan
        if key not in self._steps_s:
            self._steps_s[key] = self.model.step_s(gpu_type, node_gpus, plan.global_batch, degrees_of(plan))
        return self._steps_s[key]

    def statistics(self, global_batch: int, epoch: int) -> GradientStatistics:
        return GradientStatistics(1.0, self._ratios[epoch])
