"""The truth about one application: its step times, its gradient noise and its amount of work."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from synergy_core.errors import InputError
from synergy_core.performance.goodput.efficiency import GradientErrors, gain
from synergy_core.performance.goodput.pipeline import InputPipeline
from synergy_core.performance.planner.plan import NO_COMPRESSOR, Plan
from synergy_core.scheduling.jobs.cluster import NodeType, Share
from synergy_core.scheduling.jobs.exchange import GradientExchange, PlanExchange
from synergy_core.scheduling.jobs.spec import data_parallel

NodeGpus = tuple[int, ...]
"""Number of GPUs on each node of a placement, in the placement's order, such as (4, 4, 2)."""


class Step(NamedTuple):
    """Seconds of a step with one micro-batch, and the seconds of it that are gradient synchronisation."""

    step_s: float
    sync_s: float


class GradientStatistics(NamedTuple):
    """Squared norm and variance of the gradient at the initial batch; only their ratio matters."""

    grad_sqr: float
    grad_var: float


class Application(ABC):
    """The model and data set that a job trains. Work is counted in iterations at the initial batch.

    initial_batch, max_batch: samples. work_at_epoch_end: cumulative work, one entry per epoch. Gradient statistics are
    constant within an epoch, as in the artifacts of Pollux (OSDI 2021) and Sia (SOSP 2023). pipeline: how fast input is
    prepared; None: unknown, and training never waits for it. data_bytes: size of the data set, NaN if unknown.
    exchange: the possible exchanges of gradients; None: gradients are never compressed.
    """

    exchange: GradientExchange | PlanExchange | None = None
    name: str
    initial_batch: int
    max_batch: int
    work_at_epoch_end: tuple[float, ...]
    pipeline: InputPipeline | None = None
    data_bytes: float = float("nan")

    def __init__(self) -> None:
        self._gains: dict[int, list[float]] = {}
        self._statistics_of: dict[int, list[GradientStatistics]] = {}
        self._compressed_gains: dict[Plan, list[float]] = {}
        self._sample_s: dict[tuple[Share, float, int], float] = {}

    @abstractmethod
    def iteration_s(self, gpu_type: str, node_gpus: NodeGpus, plan: Plan) -> float:
        """Seconds of one iteration under that plan on that placement."""

    @abstractmethod
    def as_requested(self, gpu_type: str, node_gpus: NodeGpus, global_batch: int) -> Plan:
        """The plan on that placement at that global batch or the nearest that fits. Raises InputError if none fits."""

    def fixed(self, gpu_type: str, node_gpus: NodeGpus, global_batch: int) -> Plan:
        """Like `as_requested`, but with the compressor of jobs that do not choose theirs (`exchange.only`), if any."""
        return self.as_requested(gpu_type, node_gpus, global_batch)

    @abstractmethod
    def statistics(self, global_batch: int, epoch: int) -> GradientStatistics:
        """Gradient statistics of a job with that batch in that epoch (0-based)."""

    def fed_s(self, share: Share, node: NodeType, node_gpus: int, samples: float) -> float:
        """Seconds until input for this many samples per GPU is ready; 0 if training never waits for it.

        share: of each GPU, on nodes of type `node`; node_gpus: fewest GPUs that the job has on one of its nodes.
        """
        if self.pipeline is None:
            return 0.0
        key = share, node.storage_bytes_per_s / node.gpus_per_node, node_gpus
        known = self._sample_s.get(key)
        if known is None:
            known = self._sample_s[key] = float(
                self.pipeline.sample_s(*share, storage_bytes_per_s=key[1], node_gpus=node_gpus)
            )
        return samples * known

    def requested_rate(self, gpu_type: str, node_gpus: NodeGpus, batch: int) -> float:
        """Iterations per second at the requested batch on that placement."""
        return 1.0 / self.iteration_s(gpu_type, node_gpus, self.as_requested(gpu_type, node_gpus, batch))

    def iterations(self, global_batch: int) -> Sequence[float]:
        """Iterations at that batch until the end of each epoch, cumulative."""
        epochs = np.diff((0.0, *self.work_at_epoch_end))
        return [float(each) for each in np.cumsum(epochs / np.array(self.gains(global_batch)))]

    def statistics_by_epoch(self, global_batch: int) -> list[GradientStatistics]:
        """The gradient statistics of all epochs at that batch; computed once."""
        known = self._statistics_of.get(global_batch)
        if known is None:
            known = [self.statistics(global_batch, epoch) for epoch in range(len(self.work_at_epoch_end))]
            self._statistics_of[global_batch] = known
        return known

    def gains(self, global_batch: int) -> list[float]:
        """For each epoch, how many iterations at the initial batch one iteration at that batch is worth."""
        known = self._gains.get(global_batch)
        if known is None:
            scale, seen = global_batch / self.initial_batch, self.statistics_by_epoch(global_batch)
            known = self._gains[global_batch] = [gain(scale, each.grad_sqr, each.grad_var) for each in seen]
        return known

    def compression(self, plan: Plan) -> tuple[GradientErrors, float] | None:
        """The errors of the plan's compressor and the number of replicas that compress; None: no compressor."""
        if self.exchange is None or plan.compressor == NO_COMPRESSOR:
            return None
        return self._errors(plan)

    def _errors(self, plan: Plan) -> tuple[GradientErrors, float] | None:
        """The result of `compression` for a plan with a compressor."""
        return None

    def gains_under(self, plan: Plan) -> list[float]:
        """The gains of an iteration under a plan, per epoch (see `gains`)."""
        plain, known = self.gains(plan.global_batch), self._compressed_gains.get(plan)
        if known is None and (compression := self.compression(plan)) is not None:
            (errors, replicas), first = compression, self.initial_batch
            seen = self.statistics_by_epoch(plan.global_batch)
            known = self._compressed_gains[plan] = [
                each * float(errors.gain_ratio(plan.global_batch / first, *statistics, first, replicas))
                for each, statistics in zip(plain, seen, strict=True)
            ]
        return plain if known is None else known

    def seen_statistics(self, plan: Plan, epoch: int) -> tuple[float, float]:
        """The gradient statistics that a job reports under that plan: true ones, or naive estimates if so set."""
        statistics: tuple[float, float] = self.statistics_by_epoch(plan.global_batch)[epoch]
        if self.exchange is None or not self.exchange.naive or (compression := self.compression(plan)) is None:
            return statistics
        errors, replicas = compression
        return errors.naive_statistics(*statistics, self.initial_batch, plan.global_batch / replicas, replicas)

    def holds_back(self, plan: Plan) -> bool:
        """Whether the plan's compressor has error feedback: it adds what it did not send to the next gradient."""
        compression = self.compression(plan)
        return compression is not None and not compression[0].unbiased

    def held_back(self, plan: Plan, epoch: int) -> float:
        """Progress lost, for work_scale 1, if the gradients that error feedback has held back are dropped."""
        compression = self.compression(plan)
        if compression is None:
            return 0.0
        (errors, replicas), statistics = compression, self.statistics(plan.global_batch, epoch)
        local_batch = plan.global_batch / replicas
        steps = errors.held_back_steps(*statistics, self.initial_batch, local_batch, replicas)
        return steps * self.gains_under(plan)[epoch]

    def is_even(self, plan: Plan) -> bool:
        """Whether an iteration under that plan makes the same progress in every epoch."""
        gains = self.gains_under(plan)
        return min(gains) == max(gains)

    @property
    def work(self) -> float:
        """All work of a job with work_scale 1, in iterations at the initial batch."""
        return self.work_at_epoch_end[-1]


class DataParallelApplication(Application):
    """An application that is trained only in data-parallel replicas, with the whole model on every GPU."""

    exchange: GradientExchange | None = None

    def __init__(self) -> None:
        super().__init__()
        self._steps: dict[tuple[str, NodeGpus, int, str], Step] = {}

    @abstractmethod
    def measure(self, gpu_type: str, node_gpus: NodeGpus, local_batch: int) -> Step:
        """A step of `local_batch` samples per GPU on that placement."""

    def measure_compressed(self, gpu_type: str, node_gpus: NodeGpus, local_batch: int, compressor: str) -> Step:
        """Like `measure`, with compressed gradients. Raises InputError if their speed is unknown."""
        raise InputError(f"{self.name}: its speed with compressed gradients is not known; type compression=none.")

    @abstractmethod
    def local_batches(self, gpu_type: str, node_gpus: NodeGpus = (1,)) -> tuple[int, int]:
        """The minimum and maximum samples per GPU on that placement."""

    def step(self, gpu_type: str, node_gpus: NodeGpus, local_batch: int, compressor: str = NO_COMPRESSOR) -> Step:
        """The cached result of `measure` or, with a compressor, of `measure_compressed`."""
        key = gpu_type, node_gpus, local_batch, compressor
        known = self._steps.get(key)
        if known is None:
            plain = compressor == NO_COMPRESSOR
            known = self._steps[key] = self.measure(*key[:3]) if plain else self.measure_compressed(*key)
        return known

    def _errors(self, plan: Plan) -> tuple[GradientErrors, float]:
        assert self.exchange is not None
        return self.exchange.offer(plan.compressor).errors, plan.data

    def as_requested(self, gpu_type: str, node_gpus: NodeGpus, global_batch: int) -> Plan:
        """The plan at that global batch, or at the nearest that fits (`goodput.batch.fixed_batch`)."""
        limits = {"initial_batch": self.initial_batch, "max_batch": self.max_batch}
        return data_parallel(
            global_batch, sum(node_gpus), max_local=self.local_batches(gpu_type, node_gpus)[1], **limits
        )

    def fixed(self, gpu_type: str, node_gpus: NodeGpus, global_batch: int) -> Plan:
        plan = super().fixed(gpu_type, node_gpus, global_batch)
        only = None if self.exchange is None or plan.data == 1 else self.exchange.only
        return plan if only is None else replace(plan, compressor=only)

    def iteration_s(self, gpu_type: str, node_gpus: NodeGpus, plan: Plan) -> float:
        """Seconds of one iteration; only the last micro-batch synchronises gradients."""
        step_s, sync_s = self.step(gpu_type, node_gpus, plan.micro_batch, plan.compressor)
        return step_s + (plan.accumulation - 1) * (step_s - sync_s)


class ApplicationWithPlans(Application):
    """An application that is trained under parallel plans."""

    exchange: PlanExchange | None = None

    @abstractmethod
    def step_s(self, gpu_type: str, node_gpus: NodeGpus, global_batch: int) -> float:
        """Seconds of a step under the best plan for that batch; inf if none fits."""

    def runs_out(self, gpu_type: str, plan: Plan) -> bool:
        """Whether the plan in truth needs more memory than a GPU has, although the planner predicts that it fits."""
        return False


def packed(gpus: int, gpus_per_node: int) -> NodeGpus:
    """GPUs on each node of a packed job: full nodes, then one more node with the rest."""
    whole, rest = divmod(gpus, gpus_per_node)
    return (gpus_per_node,) * whole + ((rest,) if rest else ())


def between(points: Sequence[int], at: float) -> tuple[int, int, float]:
    """(i, j, fraction) such that `at` = points[i] + fraction · (points[j] − points[i]), cut to the range of points."""
    if at <= points[0]:
        return 0, 0, 0.0
    if at >= points[-1]:
        return len(points) - 1, len(points) - 1, 0.0
    upper = bisect_right(points, at)
    return upper - 1, upper, (at - points[upper - 1]) / (points[upper] - points[upper - 1])


@dataclass(frozen=True, slots=True)
class Disturbance:
    """Random noise of observed step times, and random runs that are slow (stragglers).

    noise_fraction: standard deviation of an observed step time's logarithm. straggler_fraction: the probability
    that a run (from a start to the next stop) is `straggler_slowdown` times slower. Each draw depends only on the seed
    and its arguments, never on the order of events, so that all policies see the same draws.
    """

    noise_fraction: float = 0.0
    straggler_fraction: float = 0.0
    straggler_slowdown: float = 1.0
    seed: int = 0

    def observed(self, job_id: int, node_gpus: tuple[int, ...], local_batch: int) -> float:
        """Observed ÷ true step time of a job on those GPUs."""
        if not self.noise_fraction:
            return 1.0
        draw = np.random.default_rng((self.seed, 1, job_id, local_batch, *node_gpus)).standard_normal()
        return float(np.exp(self.noise_fraction * draw))

    def straggling(self, job_id: int, run: int) -> float:
        """The factor by which that run of the job is slower: 1 unless the run straggles."""
        if not self.straggler_fraction:
            return 1.0
        draw = np.random.default_rng((self.seed, 2, job_id, run)).random()
        return self.straggler_slowdown if draw < self.straggler_fraction else 1.0
