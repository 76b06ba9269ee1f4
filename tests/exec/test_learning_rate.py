from __future__ import annotations

import math

import pytest

from synergy_core.errors import InputError
from synergy_core.goodput.efficiency import gain
from synergy_exec.training.learning_rate import factor

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
