"""Estimates the gradient's squared norm and variance from squared norms over few and over many samples.

McCandlish et al. 2018 (arXiv 1812.06162, appendix A.1): the gradient g_b over b samples has E|g_b|² = |G|² + tr(Σ)/b,
where G is its expectation and Σ the covariance of a single sample's gradient. So for two batches of b < B samples

    |G|² ≈ (B·|g_B|² − b·|g_b|²) / (B − b)        tr(Σ) ≈ (|g_b|² − |g_B|²) / (1/b − 1/B)

are unbiased, where |g_b|² is the mean over the parts of b samples that make up the B. If N replicas compress their
gradients without bias, each with a squared error of w times its squared norm, and compress the sum of these again with
an error of w₂, then the mean ĝ that they exchange has

    E|ĝ|² / (1 + w₂) = (1 + w/N) |G|² + (1 + w) tr(Σ)/B        so with |ĝ|² for |g_B|², divided by 1 + w₂,

    |G|² ≈ (|ĝ|² − (1 + w) b/B |g_b|²) / (1 + w/N − (1 + w) b/B)        tr(Σ) ≈ b (|g_b|² − |G|²)

For w = w₂ = 0 these are the estimates above (docs/compression.md). Single steps are very noisy, and |G|² is often
negative. The noise scale is a quotient, so both values are averaged over steps before they are divided.
With one replica and one micro-batch b = B, and there is nothing to compare: such a job must cut its micro-batch in two
on the steps to measure. Differences between the gradients of successive steps would be an alternative, but need memory
for a second gradient and mistake the movement of the parameters for noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from synergy_core.errors import InputError, unknown
from synergy_core.performance.goodput import efficiency
from synergy_core.performance.goodput.efficiency import UNDISTORTED, Distortion, gradient_moments
from synergy_exec.training import trees
from synergy_exec.training.integrity import FEWEST_NOISE_STEPS, Progress
from synergy_exec.training.job import LearningRateRule, TrainingJob

# The noise scale is estimated from squared norms of gradients of small and of large batches.


@dataclass(frozen=True, slots=True)
class GradientSquares:
    """Squared gradient norms of one step (McCandlish et al. 2018, appendix A.1).

    big: squared norm of the gradient of the mean loss over the global batch of `big_batch` samples.
    small: squared norm of the gradient of the mean loss over one micro-batch of `small_batch` samples, averaged over
    the step's micro-batches on all replicas; None if the micro-batch is the global batch or the step was not measured.
    distorted: error of an unbiased compressor of the gradients of `replicas`; big is then of the compressed mean.
    """

    small: float | None
    small_batch: int
    big: float
    big_batch: int
    distorted: Distortion = UNDISTORTED
    replicas: int = 1


HELD_BYTES = 4 << 20
"""Gradients are kept until so many bytes are there, and their norms are then computed in a few operators. Small enough
not to count beside a model, and as much as many small gradients, whose operators cost most beside the model's."""


class SquaredNorm:
    """Adds up this rank's share of the squared norm of many tensors; the sum over `copies` ranks is the squared norm.

    copies: number of ranks that hold each tensor together, data × tensor. A tensor that all of them hold whole counts
    1/copies on each.
    """

    def __init__(self, copies: int, device: torch.device) -> None:
        self._copies = copies
        self._total = torch.zeros((), dtype=torch.float32, device=device)
        self._held: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        # Autograd changes no gradient to which there is another reference, but the local part of a DTensor has its own.
        self._kept: list[Tensor] = []
        self._bytes = 0

    def add(self, tensor: Tensor) -> None:
        """Counts a tensor. It must stay unchanged until `take`."""
        shards = 1
        local = tensor
        if isinstance(local, DTensor):
            if any(each.is_partial() for each in local.placements):
                local = local.redistribute(placements=[Replicate() if p.is_partial() else p for p in local.placements])
            for dimension, placement in enumerate(local.placements):
                # Not `is_shard`, which is false for a _StridedShard, split by both tensor and data parallelism.
                shards *= 1 if placement.is_replicate() else local.device_mesh.size(dimension)
            local = local.to_local()
        if local.is_sparse:
            local = trees.values_of(local)
        self._held.setdefault((shards, local.dtype), []).append(local)
        self._kept.append(tensor)
        self._bytes += local.nbytes
        if self._bytes > HELD_BYTES:
            self.flush()

    @torch.no_grad()
    def flush(self) -> None:
        """Computes the norms of the tensors added so far."""
        for (shards, dtype), tensors in self._held.items():
            exact = torch.promote_types(dtype, torch.float32)
            norms = torch.stack(torch._foreach_norm(tensors, dtype=exact))
            self._total.add_(torch.dot(norms, norms).float(), alpha=shards / self._copies)
        self._held.clear()
        self._kept.clear()
        self._bytes = 0

    def take(self) -> Tensor:
        """The sum since the last call; a scalar on the device."""
        self.flush()
        total, self._total = self._total, torch.zeros_like(self._total)
        return total


class MicroBatchSquares:
    """Adds up the squared norms of the gradients of every micro-batch by hooks on the parameters.

    Under every plan the hooks see a micro-batch's gradient before it is accumulated and before replicas exchange
    gradients. They read each gradient once. wanted: whether to count in the present step.
    """

    def __init__(self, parts: Sequence[nn.Module], copies: int, device: torch.device) -> None:
        self._sum = SquaredNorm(copies, device)
        self.wanted = True
        self._seen: dict[int, nn.Parameter] = {}
        for part in parts:
            if isinstance(part, FSDPModule):
                self._watch_gathered(part)
            else:
                self._watch(part.parameters())

    def take(self) -> Tensor:
        """The sum of this rank's share since the last call; a scalar."""
        return self._sum.take()

    def _watch(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.requires_grad and id(parameter) not in self._seen:
                self._seen[id(parameter)] = parameter
                parameter.register_hook(self._count)  # type: ignore[no-untyped-call]

    def _watch_gathered(self, part: nn.Module) -> None:
        # Gradients arrive at the gathered parameters, which replace the sharded ones during a forward pass.
        self._seen.update((id(each), each) for each in part.parameters())
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.register_forward_pre_hook(lambda module, _inputs: self._watch(module.parameters()))

    def _count(self, gradient: Tensor) -> None:
        if self.wanted:
            self._sum.add(gradient)


TIME_CONSTANT_STEPS = 200
"""Time constant of the exponential averages. It counts steps, because the error of one step's tr(Σ) depends on the
number of its parts and not on their size. tests/exec/test_noise.py shows the error that it leaves."""


def estimate(squares: GradientSquares) -> tuple[float, float]:
    """(|G|², tr(Σ)) from one measured step; either may be negative."""
    assert squares.small is not None
    batches = squares.small_batch, squares.big_batch
    moments = gradient_moments(squares.small, squares.big, *batches, squares.replicas, squares.distorted)
    return float(moments[0]), float(moments[1])


def observe(progress: Progress, squares: GradientSquares | None, initial_batch: int) -> None:
    """Adds one step to the averages in `progress`, unless it was not measured or is not finite.

    grad_sqr and grad_var are sums Σ dᵏ·value and noise_weight is Σ dᵏ, with d = e^(−1/TIME_CONSTANT_STEPS) for a value
    of k measured steps ago. Their quotients are averages without the bias of a start from 0; checkpoints keep them.
    """
    if squares is None or squares.small is None:
        return
    sqr, trace = estimate(squares)
    if not (math.isfinite(sqr) and math.isfinite(trace)):
        return
    decay = math.exp(-1 / TIME_CONSTANT_STEPS)
    progress.grad_sqr = decay * progress.grad_sqr + sqr
    progress.grad_var = decay * progress.grad_var + trace / initial_batch
    progress.noise_weight = decay * progress.noise_weight + 1


def statistics(progress: Progress) -> tuple[float, float] | None:
    """(grad_sqr, grad_var) of a gradient over the initial batch, as `goodput.efficiency` takes them.

    Both ≥ 0 and not both 0: a negative average, which only noise can cause, counts as 0. None while unknown.
    """
    fewest = -math.expm1(-FEWEST_NOISE_STEPS / TIME_CONSTANT_STEPS) / -math.expm1(-1 / TIME_CONSTANT_STEPS)
    if progress.noise_weight < fewest * (1 - 1e-9):
        return None
    sqr = max(progress.grad_sqr / progress.noise_weight, 0.0)
    var = max(progress.grad_var / progress.noise_weight, 0.0)
    return (sqr, var) if sqr > 0 or var > 0 else None


def learning_rate_scale(
    job: TrainingJob,
    batch: int,
    initial_batch: int,
    statistics: tuple[float, float] | None,
    work: float,
    total: float,
) -> float:
    """Factor of the learning rate in a step: `learning_rate_factor` times the job's own schedule.

    Raises InputError if the schedule returns no finite number of at least 0.
    """
    scheduled = job.learning_rate_schedule(work, total)
    if not (math.isfinite(scheduled) and scheduled >= 0):
        raise InputError(
            f"{type(job).__name__}.learning_rate_schedule({work:g}, {total:g}) is {scheduled}; "
            "give a number, 0 or more."
        )
    return learning_rate_factor(job.learning_rate_rule, batch, initial_batch, statistics) * scheduled


def learning_rate_factor(
    rule: LearningRateRule, batch: int, initial_batch: int, statistics: tuple[float, float] | None
) -> float:
    """Factor of `build_optimizer`'s learning rate at this global batch; between 1 and batch/initial_batch.

    statistics: from `statistics()`. While they are None, AdaScale's factor is 1, the smallest possible, so that a
    missing estimate never makes the rate too high; work then counts with the same gain of 1.
    Raises InputError for an unknown rule, ValueError for a batch below the initial one.
    """
    if batch < initial_batch:
        raise ValueError(f"batch {batch} is below the initial batch {initial_batch}")
    match rule:
        case "none":
            return 1.0
        case "square_root":
            return float(efficiency.square_root_factor(batch, initial_batch))
        case "adascale":
            if statistics is None:
                return 1.0
            return float(
                efficiency.adascale_factor(batch, efficiency.noise_scale(*statistics, initial_batch), initial_batch)
            )
    raise unknown("learning_rate_rule", rule, ("adascale", "square_root", "none"))
