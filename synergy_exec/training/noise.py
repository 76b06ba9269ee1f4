"""The gradient's squared norm and variance, from squared norms of gradients over few and over many samples.

McCandlish et al. 2018 (arXiv 1812.06162, appendix A.1): over b samples E|g_b|² = |G|² + tr(Σ)/b, so of b < B

    |G|² ≈ (B·|g_B|² − b·|g_b|²) / (B − b)        tr(Σ) ≈ (|g_b|² − |g_B|²) / (1/b − 1/B)

are unbiased, where |g_b|² is the mean over the parts of b samples that make up the B. Where N replicas compress their
gradients without bias, each with a squared error of w times its squared norm, and their sum again with w₂, the mean ĝ
that they exchange has

    E|ĝ|² / (1 + w₂) = (1 + w/N) |G|² + (1 + w) tr(Σ)/B        so with |ĝ|² for |g_B|², divided by 1 + w₂,

    |G|² ≈ (|ĝ|² − (1 + w) b/B |g_b|²) / (1 + w/N − (1 + w) b/B)        tr(Σ) ≈ b (|g_b|² − |G|²)

which for w = w₂ = 0 are those above (docs/compression.md). Single steps are very noisy, and
|G|² is often negative; the quotient of means is what counts, so both are averaged first.

With one replica and one micro-batch b = B, and there is nothing to compare: such a job must cut its micro-batch in two
on the steps that are to be measured. The alternative, differences between successive steps' gradients, keeps a second
gradient in memory and takes the movement of the parameters for noise.
"""

from __future__ import annotations

import math

from synergy_core.goodput.compressed import UNDISTORTED, Distortion, gradient_moments
from synergy_exec.training.progress import FEWEST_NOISE_STEPS, Progress
from synergy_exec.training.squares import GradientSquares

TIME_CONSTANT_STEPS = 200
"""Time constant of the exponential averages. In steps, for what one step tells of tr(Σ) depends on the number of its
parts, not on size. tests/exec/test_noise.py shows what error of the efficiency it leaves, and how fast it follows."""


def estimate(
    small: float,
    small_batch: float,
    big: float,
    big_batch: float,
    *,
    distorted: Distortion = UNDISTORTED,
    replicas: int = 1,
) -> tuple[float, float]:
    """(|G|², tr(Σ)) of one step, either of them possibly negative.

    small: mean of the squared norms of gradients over `small_batch` samples each, before compression; big: squared norm
    of the gradient over all `big_batch`, as exchanged. distorted: by the compression of what `replicas` exchange.
    Raises ValueError unless 0 < small_batch < big_batch.
    """
    if not 0 < small_batch < big_batch:
        raise ValueError(f"gradients over {small_batch:g} and {big_batch:g} samples: the first must be fewer, above 0")
    sqr, trace = gradient_moments(small, big, small_batch, big_batch, replicas, distorted)
    return float(sqr), float(trace)


def observe(
    progress: Progress,
    small: float,
    small_batch: float,
    big: float,
    big_batch: float,
    *,
    initial_batch: int,
    distorted: Distortion = UNDISTORTED,
    replicas: int = 1,
) -> None:
    """Add one step, measured as for `estimate`, to the averages in `progress`; a step that is not finite is left out.

    The sums are of Σ dᵏ·value, noise_weight of Σ dᵏ (d = e^(−1/TIME_CONSTANT_STEPS), k steps ago): their quotient is an
    average without the bias of a start from zero, and is carried by the checkpoint from plan to plan.
    """
    sqr, trace = estimate(small, small_batch, big, big_batch, distorted=distorted, replicas=replicas)
    if not (math.isfinite(sqr) and math.isfinite(trace)):
        return
    decay = math.exp(-1 / TIME_CONSTANT_STEPS)
    progress.grad_sqr = decay * progress.grad_sqr + sqr
    progress.grad_var = decay * progress.grad_var + trace / initial_batch
    progress.noise_weight = decay * progress.noise_weight + 1


def observe_step(progress: Progress, squares: GradientSquares | None, initial_batch: int) -> None:
    """The same of what a step of the trainer measured, if it did (`StepResult.squares`)."""
    if squares is not None and squares.small is not None:
        observe(
            progress,
            squares.small,
            squares.small_batch,
            squares.big,
            squares.big_batch,
            initial_batch=initial_batch,
            distorted=squares.distorted,
            replicas=squares.replicas,
        )


def statistics(progress: Progress) -> tuple[float, float] | None:
    """(grad_sqr, grad_var) of a gradient over the initial batch, as synergy_core.goodput.efficiency takes them.

    Both ≥ 0 and not both 0: a negative average, which only noise can cause, counts as 0. None while unknown.
    """
    fewest = -math.expm1(-FEWEST_NOISE_STEPS / TIME_CONSTANT_STEPS) / -math.expm1(-1 / TIME_CONSTANT_STEPS)
    if progress.noise_weight < fewest * (1 - 1e-9):
        return None
    sqr = max(progress.grad_sqr / progress.noise_weight, 0.0)
    var = max(progress.grad_var / progress.noise_weight, 0.0)
    return (sqr, var) if sqr > 0 or var > 0 else None
