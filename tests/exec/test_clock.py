from __future__ import annotations

import pytest

from synergy_exec.training.clock import WARM_UP_STEPS, WINDOW_STEPS, StepClock, StepMedians


def test_first_steps_are_left_out() -> None:
    clock = StepClock()
    for _ in range(WARM_UP_STEPS):
        clock.add(8, 1, 30.0)
    assert clock.take() == StepMedians(0.0, 0.0, 0)
    clock.add(8, 1, 1.0, 0.25)
    assert clock.take() == StepMedians(1.0, 0.25, 1)


def test_a_retune_starts_with_warm_up_and_reports_its_own_batch() -> None:
    clock = StepClock()
    for _ in range(WARM_UP_STEPS + 4):
        clock.add(8, 1, 1.0)
    for _ in range(WARM_UP_STEPS):
        clock.add(8, 2, 50.0)
    assert clock.take().steps == 0
    for _ in range(3):
        clock.add(8, 2, 2.0)
    assert clock.take() == StepMedians(2.0, 0.0, 3)


def test_steps_of_a_batch_that_comes_back_still_count() -> None:
    clock = StepClock()
    for micro_batch, seconds in ((8, 1.0), (16, 2.0), (8, 1.0)):
        for _ in range(WARM_UP_STEPS + 5):
            clock.add(micro_batch, 1, seconds)
    assert clock.take() == StepMedians(1.0, 0.0, 10)


def test_stragglers_do_not_move_the_median() -> None:
    clock = StepClock()
    for step in range(WARM_UP_STEPS + 40):
        clock.add(8, 1, 20.0 if step % 4 == 0 else 1.0 + step / 1e4)
    assert clock.take().step_s == pytest.approx(1.0, rel=0.01)


def test_old_steps_leave_the_window() -> None:
    clock = StepClock()
    for _ in range(WARM_UP_STEPS + 300):
        clock.add(8, 1, 1.0)
    for _ in range(WINDOW_STEPS):
        clock.add(8, 1, 3.0)
    assert clock.take() == StepMedians(3.0, 0.0, WINDOW_STEPS)


def test_before_any_step_there_is_nothing() -> None:
    assert StepClock().take() == StepMedians()
