"""Which configurations `profile` measures."""

import pytest

from synergy_exec.profiling.grid import batches_of, plans, sizes_of


def test_batches_double_and_sizes_are_powers_of_two_and_all():
    assert batches_of(8, 40) == [8, 16, 32]
    assert batches_of(8, 8) == [8]
    assert sizes_of(1) == [1]
    assert sizes_of(2) == [1, 2]
    assert sizes_of(6) == [1, 2, 4, 6]


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 8])
def test_every_plan_fills_the_slots_at_a_batch_that_was_asked_for(slots):
    found = plans(slots, [16, 32], lambda plan: None)
    assert found
    for same_degrees in found:
        assert len({(each.data, each.tensor, each.pipeline, each.interleave, each.zero) for each in same_degrees}) == 1
        for each in same_degrees:
            assert each.world == slots
            assert each.global_batch in (16, 32)
            assert each.data > 1 or each.accumulation > 1  # else its noise could not be measured


def test_refused_plans_are_left_out():
    found = plans(2, [16], lambda plan: "no" if plan.pipeline > 1 or plan.tensor > 1 else None)
    assert {(each.data, each.zero) for same_degrees in found for each in same_degrees} == {(2, 0), (2, 3)}
