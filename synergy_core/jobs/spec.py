"""What a user submits: a training job, without a word on how it should be run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from synergy_core.goodput.pipeline import InputPipeline
from synergy_core.jobs.exchange import GradientExchange
from synergy_core.jobs.plan_exchange import PlanExchange


@dataclass(frozen=True)
class JobSpec:
    """A training job whose speed depends on what it is given.

    application: the label under which observations may be shared. initial_batch: the global batch at which its
    learning rate was tuned; max_batch: the largest it may use; requested_batch, requested_gpus: what its user asked
    for, which policies without adaptation use; samples. local_batches: the (smallest, largest) number of samples that
    fit on a GPU, by GPU type. single_gpu_rate: samples/s of a short run on one GPU at the largest batch that fits, by
    GPU type (Sia, SOSP 2023, section 3.2: under 20 GPU-seconds a type). requested_rate: iterations/s as requested, by
    GPU type, for policies that take profiles made offline. declared_work: iterations at the initial batch until it is
    done (epochs × samples ÷ initial batch). restart_s: from a stop to the next step, as measured on this cluster;
    declared_restart_s: as its user says; resize_s: the standstill where it only changes its GPUs' number, on one GPU
    type and without a stop (elastic jobs; else as a restart). preemptible: whether it may be stopped or resized.
    fixed_batch: it always trains at the requested batch. min_gpus, most_gpus: within which it may be resized.
    architecture: the planner's name of the model whose parallel plans say how fast it trains; empty: models fitted to
    observations do. The requested batch is then the initial one. pipeline: how fast its input is prepared, as profiled
    offline; None where nobody knows, and input is taken to be always there. Where input is learned, no policy reads it.
    exchange: what the exchange of its replicas' gradients may be; None where nobody is to compress them.
    plan_exchange: the same of a job with parallel plans.
    """

    application: str
    initial_batch: int
    max_batch: int
    requested_batch: int
    requested_gpus: int
    local_batches: Mapping[str, tuple[int, int]]
    single_gpu_rate: Mapping[str, float]
    requested_rate: Mapping[str, float] = field(default_factory=dict)
    declared_work: float = float("inf")
    restart_s: float = 30.0
    declared_restart_s: float = 30.0
    resize_s: float = 30.0
    fixed_batch: bool = False
    preemptible: bool = True
    min_gpus: int = 1
    most_gpus: int = 64
    architecture: str = ""
    pipeline: InputPipeline | None = None
    exchange: GradientExchange | None = None
    plan_exchange: PlanExchange | None = None

    @cached_property
    def smallest_local_batch(self) -> int:
        """Samples per GPU, on whichever type takes the fewest."""
        return min(smallest for smallest, _ in self.local_batches.values())

    @cached_property
    def most_fed_gpus(self) -> int:
        """The most GPUs that it may have and that its largest batch can feed."""
        return min(self.most_gpus, self.max_batch // self.smallest_local_batch)
