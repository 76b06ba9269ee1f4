from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from synergy_core.goodput.efficiency import noise_scale, statistical_efficiency
from synergy_exec.training.noise import TIME_CONSTANT_STEPS, estimate, observe, statistics
from synergy_exec.training.progress import FEWEST_NOISE_STEPS, Progress

SAMPLES, BATCH = 768, 32


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 2))


def data(count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 6, generator=generator)
    targets = inputs[:, :2] * 0.5 + 0.3 * torch.randn(count, 2, generator=generator)
    return inputs, targets


def gradient(net: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    loss = nn.functional.mse_loss(net(inputs), targets)
    return torch.cat([each.flatten() for each in torch.autograd.grad(loss, list(net.parameters()))]).double()


def squares(net: nn.Module, inputs: Tensor, targets: Tensor, parts: int) -> tuple[float, float, float, float]:
    """What a step measures whose batch is cut into equal parts."""
    each = [gradient(net, x, y) for x, y in zip(inputs.chunk(parts), targets.chunk(parts), strict=True)]
    big = torch.stack(each).mean(0)
    small = sum(float(one @ one) for one in each) / parts
    return small, len(inputs) / parts, float(big @ big), len(inputs)


def population(net: nn.Module, seed: int, count: int = SAMPLES) -> tuple[float, float]:
    """(|G|², tr Σ) from single-sample gradients, unbiased."""
    inputs, targets = data(count, seed)
    rows = torch.stack([gradient(net, x[None], y[None]) for x, y in zip(inputs, targets, strict=True)])
    trace = float(rows.var(0).sum())
    mean = rows.mean(0)
    return float(mean @ mean) - trace / count, trace


def batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    inputs, targets = data(SAMPLES, seed)
    return zip(inputs.split(BATCH), targets.split(BATCH), strict=True)


@pytest.mark.parametrize("parts", [2, 4, 8, 32])
def test_mean_estimates_are_within_their_error_of_single_sample_gradients(parts: int) -> None:
    net = model()
    sqr, trace = population(net, seed=1)
    found = np.array([estimate(*squares(net, x, y, parts)) for x, y in batches(seed=1)])
    error = found.std(0, ddof=1) / math.sqrt(len(found))
    assert np.all(np.abs(found.mean(0) - [sqr, trace]) < 3 * error)
    # The test can tell: a third more or less would be seen.
    assert 3 * error[1] < trace / 3


def test_the_finest_cut_is_the_sample_variance() -> None:
    """With parts of one sample, the second estimate is the unbiased variance of the batch's own gradients."""
    net = model()
    inputs, targets = data(BATCH, seed=2)
    rows = torch.stack([gradient(net, x[None], y[None]) for x, y in zip(inputs, targets, strict=True)])
    sqr, trace = estimate(*squares(net, inputs, targets, BATCH))
    assert trace == pytest.approx(float(rows.var(0).sum()), rel=1e-6)
    assert sqr + trace / BATCH == pytest.approx(float(rows.mean(0) @ rows.mean(0)), rel=1e-6)


def test_moving_parameters_agree_with_fresh_samples() -> None:
    """Averages over 150 steps of SGD, against single-sample gradients that no step saw, at every tenth of them."""
    net, progress, reference = model(), Progress(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    decay = math.exp(-1 / TIME_CONSTANT_STEPS)
    for step in range(150):
        inputs, targets = data(BATCH, seed=1000 + step)
        observe(progress, *squares(net, inputs, targets, 4), initial_batch=BATCH)
        if step % 10 == 5:
            reference.append((decay ** (150 - step), *population(net, seed=5000 + step, count=256)))
        nn.functional.mse_loss(net(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, sqrs, traces = np.array(reference).T
    sqr, var = statistics(progress)
    assert var * BATCH == pytest.approx(np.average(traces, weights=weights), rel=0.1)
    assert sqr == pytest.approx(np.average(sqrs, weights=weights), rel=0.25)


def steps_of_noise(phi: float, batch: int, parts: int, steps: int, seed: int, dimensions: int = 20) -> np.ndarray:
    """Squares of made-up gradients with |G|² = 1 and tr Σ = phi, one row a step."""
    generator = np.random.default_rng(seed)
    spread = math.sqrt(phi / dimensions / (batch / parts))
    rows = generator.normal(0.0, spread, (steps, parts, dimensions))
    rows[:, :, 0] += 1.0
    big = (rows.mean(1) ** 2).sum(-1)
    small = (rows**2).sum(-1).mean(1)
    return np.column_stack([small, np.full(steps, batch / parts), big, np.full(steps, batch)])


@pytest.mark.parametrize("phi", [3.0, 32.0, 320.0, 3200.0])
def test_smoothed_efficiency_is_within_a_few_per_cent(phi: float) -> None:
    """What the time constant is for: two parts a step, the least there can be, and 20 effective dimensions."""
    errors = []
    for seed in range(40):
        progress = Progress()
        for row in steps_of_noise(phi, 32, 2, 3 * TIME_CONSTANT_STEPS, seed):
            observe(progress, *row, initial_batch=32)
        found = statistical_efficiency(256, noise_scale(*statistics(progress), 32), 32)
        errors.append(float(found / statistical_efficiency(256, phi, 32) - 1))
    assert math.sqrt(np.mean(np.square(errors))) < 0.1


def test_a_change_is_seen_within_two_time_constants() -> None:
    progress = Progress()
    for phi in (32.0, 320.0):
        for row in steps_of_noise(phi, 32, 4, 2 * TIME_CONSTANT_STEPS, seed=1):
            observe(progress, *row, initial_batch=32)
    sqr, var = statistics(progress)
    assert float(noise_scale(sqr, var, 32)) > 0.7 * 320


def test_statistics_do_not_depend_on_how_the_batch_was_cut_or_how_large_it_was() -> None:
    found = []
    for batch, parts in ((32, 2), (32, 8), (128, 4), (256, 16)):
        progress = Progress()
        for row in steps_of_noise(64.0, batch, parts, 3000, seed=3):
            observe(progress, *row, initial_batch=32)
        found.append(statistics(progress))
    for sqr, var in found:
        assert sqr == pytest.approx(1.0, rel=0.25)
        assert var == pytest.approx(64.0 / 32, rel=0.1)


def test_unknown_before_a_few_steps_then_the_plain_mean() -> None:
    progress = Progress()
    for _ in range(FEWEST_NOISE_STEPS - 1):
        observe(progress, 3.0, 16, 2.0, 32, initial_batch=32)
    assert statistics(progress) is None
    observe(progress, 3.0, 16, 2.0, 32, initial_batch=32)
    assert statistics(progress) == pytest.approx((1.0, 1.0))


def test_negative_and_infinite_estimates_do_no_harm() -> None:
    progress = Progress()
    for _ in range(FEWEST_NOISE_STEPS):
        observe(progress, 3.0, 16, 1.0, 32, initial_batch=32)
        observe(progress, math.inf, 16, 1.0, 32, initial_batch=32)
        observe(progress, math.nan, 16, 1.0, 32, initial_batch=32)
    assert statistics(progress) == pytest.approx((0.0, 2.0))
    nothing = Progress()
    for _ in range(FEWEST_NOISE_STEPS):
        observe(nothing, 0.0, 16, 0.0, 32, initial_batch=32)
    assert statistics(nothing) is None


def test_differences_of_successive_gradients_take_movement_for_noise() -> None:
    """Why one replica with one micro-batch cuts it in two: here the other way is a fifth or more too high."""
    net, cut, differenced = model(), [], []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    previous = None
    for step in range(30):
        inputs, targets = data(512, seed=100 + step)
        cut.append(estimate(*squares(net, inputs, targets, 2))[1])
        now = gradient(net, inputs, targets)
        if previous is not None:
            differenced.append(512 * float((now - previous) @ (now - previous)) / 2)
        previous = now
        nn.functional.mse_loss(net(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert np.mean(differenced) > 1.2 * np.mean(cut)


def test_equal_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="the first must be fewer"):
        estimate(1.0, 32, 1.0, 32)
