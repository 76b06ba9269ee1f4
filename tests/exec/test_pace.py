"""A rank on a part of a core takes no more than that part, and no less than it may."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synergy_exec.worker.pace import LEEWAY_S, Pace


class Core:
    """A made-up one: `compute` takes so long, of which the rank has the core for a part."""

    def __init__(self) -> None:
        self.now_s = self.used_s = 0.0

    def compute(self, cpu_s: float, beside: float) -> None:
        """beside: of the time, what others take."""
        self.used_s += cpu_s
        self.now_s += cpu_s / (1 - beside)

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds * 1.01 + 1e-4  # later than it was to

    def pace(self, part: float) -> Pace:
        return Pace(part, lambda: self.used_s, lambda: self.now_s, self.sleep)


def steps_take(part: float, beside: list[float], cpu_s: float = 0.01) -> float:
    core = Core()
    pace = core.pace(part)
    for others in beside:
        pace.begin()
        core.compute(cpu_s, others)
        pace.rest()
    return core.now_s


def test_steps_take_as_long_beside_idle_slots_as_beside_busy_ones() -> None:
    """Failed before: twice as fast beside an idle slot, so that no profile foretold a queue's end."""
    assert steps_take(0.5, [0.0] * 100) == pytest.approx(steps_take(0.5, [0.5] * 100), rel=0.02)
    assert steps_take(0.5, [0.5] * 100) == pytest.approx(2.0)  # nothing is slept where the kernel shares the core out
    assert steps_take(0.25, [0.5] * 100) == pytest.approx(4.0, rel=0.02)


@given(st.lists(st.floats(0, 0.9), min_size=20, max_size=100), st.sampled_from([0.25, 1 / 3, 0.5]))
def test_no_more_is_taken_than_the_part_and_what_was_missed_is_made_up_for(beside: list[float], part: float) -> None:
    took_s = steps_take(part, beside)
    used_s = 0.01 * len(beside)
    assert used_s / part <= took_s + LEEWAY_S + 1e-9
    starved_s = sum(0.01 / (1 - each) for each in beside)  # had it never slept
    assert took_s <= max(used_s / part, starved_s) * 1.02 + LEEWAY_S + 0.02


def test_what_lies_between_steps_is_not_counted() -> None:
    core = Core()
    pace = core.pace(0.5)
    pace.rest()
    core.compute(5.0, 0.0)
    assert core.now_s == 5.0
    pace.begin()
    core.compute(0.1, 0.0)
    pace.rest()
    assert core.now_s == pytest.approx(5.2, rel=0.01)
