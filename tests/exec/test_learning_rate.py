from __future__ import annotations

import math

import pytest
import torch

from synergy_core.errors import InputError
from synergy_core.goodput.efficiency import gain
from synergy_exec.examples.mlp import Mlp
from synergy_exec.training.learning_rate import factor, rate
from synergy_exec.training.schedules import cosine, warmed_up

STATISTICS = (0.5, 2.0)


@pytest.mark.parametrize("rule", ["adascale", "square_root", "none"])
def test_initial_batch_keeps_its_rate(rule: str) -> None:
    assert factor(rule, 32, 32, STATISTICS) == 1.0


def test_adascale_multiplies_by_the_gain() -> None:
    assert factor("adascale", 128, 32, STATISTICS) == pytest.approx(gain(4.0, *STATISTICS))
    assert factor("adascale", 128, 32, STATISTICS) == pytest.approx(4 * 2.5 / (2.0 + 4 * 0.5))


@pytest.mark.parametrize(("statistics", "expected"), [((0.0, 1.0), 4.0), ((1.0, 0.0), 1.0), (None, 1.0)])
def test_adascale_at_its_limits(statistics: tuple[float, float] | None, expected: float) -> None:
    """Noise alone: as many iterations as batches. No noise, or none known: one."""
    assert factor("adascale", 128, 32, statistics) == expected


def test_square_root_and_none_need_no_statistics() -> None:
    assert factor("square_root", 96, 32, None) == pytest.approx(math.sqrt(3))
    assert factor("none", 96, 32, STATISTICS) == 1.0


def test_unknown_rule_and_too_small_batch_are_refused() -> None:
    with pytest.raises(InputError, match="Did you mean 'adascale'"):
        factor("adascal", 64, 32, None)
    with pytest.raises(ValueError, match="16 is below the initial batch 32"):
        factor("none", 16, 32, None)


class Scheduled(Mlp):
    """Its schedule gives what it was made with."""

    learning_rate_rule = "square_root"

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def learning_rate_schedule(self, work: float, total: float) -> float:
        return self.factor * work / total


def test_schedule_multiplies_what_follows_from_the_batch() -> None:
    assert rate(Scheduled(0.5), 64, 16, None, 30.0, 60.0) == pytest.approx(2.0 * 0.25)
    assert rate(Mlp(), 64, 16, (1.0, 4.0), 30.0, 60.0) == factor("adascale", 64, 16, (1.0, 4.0))


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -1.0])
def test_schedule_that_gives_no_rate_is_refused(odd: float) -> None:
    with pytest.raises(InputError, match=r"Scheduled.learning_rate_schedule\(30, 60\) is .*; give a number, 0 or more"):
        rate(Scheduled(odd), 16, 16, None, 30.0, 60.0)


def test_cosine_is_torchs_after_its_warm_up() -> None:
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
