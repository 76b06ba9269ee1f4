"""The gradient noise scale as it is measured, and what it does to the learning rate."""

import math

import numpy as np
import pytest
import torch
from exec.pretended import refuses

from synergy_core.performance.goodput.efficiency import gain, noise_scale, statistical_efficiency
from synergy_exec.examples.mlp import Mlp
from synergy_exec.training import noise
from synergy_exec.training.integrity import FEWEST_NOISE_STEPS, Progress
from synergy_exec.training.job import cosine, warmed_up
from synergy_exec.training.noise import (
    TIME_CONSTANT_STEPS,
    GradientSquares,
    learning_rate_factor,
    learning_rate_scale,
    observe,
    statistics,
)


def steps_of_noise(phi, batch, parts, steps, seed, dimensions=20):
    """Squares of made-up gradients with |G|² = 1 and tr Σ = phi, one row a step."""
    generator = np.random.default_rng(seed)
    spread = math.sqrt(phi / dimensions / (batch / parts))
    rows = generator.normal(0.0, spread, (steps, parts, dimensions))
    rows[:, :, 0] += 1.0
    big = (rows.mean(1) ** 2).sum(-1)
    small = (rows**2).sum(-1).mean(1)
    return np.column_stack([small, np.full(steps, batch / parts), big, np.full(steps, batch)])


@pytest.mark.parametrize("phi", [3.0, 32.0, 320.0, 3200.0])
def test_smoothed_efficiency_is_within_a_few_per_cent(phi):
    """What the time constant is for: two parts a step, the least there can be, and 20 effective dimensions."""
    errors = []
    for seed in range(40):
        progress = Progress()
        for row in steps_of_noise(phi, 32, 2, 3 * TIME_CONSTANT_STEPS, seed):
            observe(progress, GradientSquares(*row), 32)
        found = statistical_efficiency(256, noise_scale(*statistics(progress), 32), 32)
        errors.append(float(found / statistical_efficiency(256, phi, 32) - 1))
    assert math.sqrt(np.mean(np.square(errors))) < 0.1


def test_unknown_before_a_few_steps_then_the_plain_mean():
    progress = Progress()
    for _ in range(FEWEST_NOISE_STEPS - 1):
        observe(progress, GradientSquares(3.0, 16, 2.0, 32), 32)
    assert statistics(progress) is None
    observe(progress, GradientSquares(3.0, 16, 2.0, 32), 32)
    assert statistics(progress) == pytest.approx((1.0, 1.0))


def test_negative_and_infinite_estimates_do_no_harm():
    progress = Progress()
    for _ in range(FEWEST_NOISE_STEPS):
        observe(progress, GradientSquares(3.0, 16, 1.0, 32), 32)
        observe(progress, GradientSquares(math.inf, 16, 1.0, 32), 32)
        observe(progress, GradientSquares(math.nan, 16, 1.0, 32), 32)
    assert statistics(progress) == pytest.approx((0.0, 2.0))
    nothing = Progress()
    for _ in range(FEWEST_NOISE_STEPS):
        observe(nothing, GradientSquares(0.0, 16, 0.0, 32), 32)
    assert statistics(nothing) is None


STATISTICS = (0.5, 2.0)


@pytest.mark.parametrize(
    ("rule", "batch", "statistics", "expected"),
    [
        *((rule, 32, STATISTICS, 1.0) for rule in ("adascale", "square_root", "none")),
        ("adascale", 128, STATISTICS, gain(4.0, *STATISTICS)),
        ("adascale", 128, STATISTICS, 4 * 2.5 / (2.0 + 4 * 0.5)),
        # Noise alone: as many iterations as batches. No noise, or none known: one.
        ("adascale", 128, (0.0, 1.0), 4.0),
        ("adascale", 128, (1.0, 0.0), 1.0),
        ("adascale", 128, None, 1.0),
        ("square_root", 96, None, math.sqrt(3)),
        ("none", 96, STATISTICS, 1.0),
    ],
)
def test_factor_of_the_learning_rate(rule, batch, statistics, expected):
    assert learning_rate_factor(rule, batch, 32, statistics) == pytest.approx(expected)


def test_unknown_rule_and_too_small_batch_are_refused():
    refuses("Did you mean 'adascale'", learning_rate_factor, "adascal", 64, 32, None)
    with pytest.raises(ValueError, match="16 is below the initial batch 32"):
        learning_rate_factor("none", 16, 32, None)


class Scheduled(Mlp):
    learning_rate_rule = "square_root"

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def learning_rate_schedule(self, work, total):
        return self.factor * work / total


def test_schedule_multiplies_what_follows_from_the_batch_and_gives_a_rate():
    assert learning_rate_scale(Scheduled(0.5), 64, 16, None, 30.0, 60.0) == pytest.approx(2.0 * 0.25)
    assert learning_rate_scale(Mlp(), 64, 16, (1.0, 4.0), 30.0, 60.0) == learning_rate_factor(
        "adascale", 64, 16, (1.0, 4.0)
    )
    for odd in (float("nan"), float("inf"), -1.0):
        refuses(
            r"Scheduled.learning_rate_schedule\(30, 60\)", learning_rate_scale, Scheduled(odd), 16, 16, None, 30.0, 60.0
        )


def test_cosine_is_torchs_after_its_warm_up():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    torchs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=90, eta_min=0.1)
    for work in range(10, 100):
        assert cosine(work, 100, warm_up=10, least=0.1) == pytest.approx(torchs.get_last_lr()[0], abs=1e-6)
        optimizer.step()
        torchs.step()
    assert cosine(1e6, 100, warm_up=10, least=0.1) == pytest.approx(0.1)
    assert [cosine(work, 100, warm_up=4) for work in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert [warmed_up(work, 4) for work in (0, 3, 4, 1e6)] == [0.25, 1.0, 1.0, 1.0]
    assert warmed_up(0, 0) == 1.0


@pytest.mark.parametrize("held", [0, 100, 1 << 30])
def test_squared_norm_is_the_same_however_many_gradients_are_kept(monkeypatch, held):
    monkeypatch.setattr(noise, "HELD_BYTES", held)
    drawn = torch.Generator().manual_seed(3)
    kinds = (torch.float32, torch.float64, torch.bfloat16)
    tensors = [torch.randn(size, generator=drawn).to(kinds[size % 3]) for size in (0, 1, 7, 30, 64, 5)]
    tensors.append(torch.tensor([[0.0, 3.0], [4.0, 0.0]]).to_sparse())
    total = noise.SquaredNorm(copies=2, device=torch.device("cpu"))
    for each in tensors:
        total.add(each)
    expected = sum(float(each.to_dense().double().square().sum()) for each in tensors) / 2
    assert float(total.take()) == pytest.approx(expected, rel=1e-6)
    assert float(total.take()) == 0.0
