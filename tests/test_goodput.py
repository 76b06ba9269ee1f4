"""Throughput, statistical efficiency and the choice of a batch: closed forms, bounds, the rule read naively."""

from __future__ import annotations

from math import ceil, inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synergy_core.performance.goodput.batch import JobOnShape, best_batch, fixed_batch
from synergy_core.performance.goodput.efficiency import (
    adascale_factor,
    gain,
    noise_scale,
    square_root_factor,
    statistical_efficiency,
)
from synergy_core.performance.goodput.throughput import gradient_time, overlapped, step_terms, step_time, sync_time

THETA = np.array([0.1, 0.01, 0.3, 0.02, 0.05, 0.004, 2.0])
constants = st.tuples(*(st.floats(1e-8, 2.0) for _ in range(6)), st.floats(1.0, 10.0)).map(np.array)
shapes = st.tuples(st.integers(1, 16), st.integers(1, 8)).map(lambda each: (each[0], each[0] * each[1]))


def test_no_overlap_adds_and_full_overlap_takes_the_larger():
    assert overlapped(3.0, 4.0, 1.0) == pytest.approx(7.0)
    assert overlapped(3.0, 4.0, 2.0) == pytest.approx(5.0)
    assert overlapped(0.3, 0.01, 10.0) == pytest.approx(0.3)


def iteration_time(theta, nodes, gpus, local_batch, accumulation):
    """T_iter: only the last micro-batch synchronises."""
    return (accumulation - 1) * gradient_time(theta, local_batch) + step_time(theta, nodes, gpus, local_batch)


def test_one_gpu_one_node_and_several_nodes_have_their_own_constants():
    assert step_time(THETA, 1, 1, 20) == pytest.approx(0.3)
    assert sync_time(THETA, 1, 1) == pytest.approx(1e-8)
    assert sync_time(THETA, 1, 4) == pytest.approx(0.05 + 2 * 0.004)
    assert sync_time(THETA, 2, 4) == pytest.approx(0.3 + 2 * 0.02)
    assert sync_time(THETA, 1, 2) == pytest.approx(0.05)


@given(st.floats(1e-300, 1e200), st.floats(1e-300, 1e200), st.floats(1.0, 10.0))
def test_overlap_is_between_the_larger_and_the_sum_even_at_extremes(first, second, gamma):
    together = overlapped(first, second, gamma)
    assert max(first, second) <= together * (1 + 1e-12)
    assert together <= (first + second) * (1 + 1e-12)


@given(constants, shapes, st.integers(1, 1000), st.integers(1, 6))
def test_more_samples_or_more_gpus_never_shorten_an_iteration(theta, shape, batch, accumulation):
    nodes, gpus = shape
    now = iteration_time(theta, nodes, gpus, batch, accumulation)
    rounding = 1 + 1e-12
    assert now <= iteration_time(theta, nodes, gpus, batch + 1, accumulation) * rounding
    assert now <= iteration_time(theta, nodes, gpus, batch, accumulation + 1) * rounding
    if gpus > 1:
        assert now <= iteration_time(theta, nodes, gpus + nodes, batch, accumulation) * rounding


statistics = st.floats(1e-9, 1e9)


@given(statistics, statistics, st.integers(1, 4096), st.floats(1.0, 1000.0))
def test_gain_lies_between_one_and_the_scale(sqr, var, first, scale):
    batch = first * scale
    worth = gain(batch / first, sqr, var)
    assert 1 - 1e-9 <= worth <= batch / first * (1 + 1e-9)
    efficiency = statistical_efficiency(batch, noise_scale(sqr, var, first), first)
    assert 0 < efficiency <= 1
    assert efficiency == pytest.approx(worth * first / batch, rel=1e-6)
    assert adascale_factor(batch, noise_scale(sqr, var, first), first) == pytest.approx(worth, rel=1e-6)


def test_pure_noise_makes_every_sample_count_and_no_noise_makes_extra_ones_worthless():
    assert noise_scale(0.0, 1.0, 32) == inf
    assert statistical_efficiency(320, inf, 32) == 1.0
    assert gain(10.0, 0.0, 1.0) == pytest.approx(10.0)
    assert gain(10.0, 1.0, 0.0) == pytest.approx(1.0)
    assert square_root_factor(400, 100) == pytest.approx(2.0)
    assert adascale_factor(320, inf, 32, exponent=0.5) == pytest.approx(10**0.5)


def naive(theta, sqr, var, first, largest, low, high, nodes, gpus):
    """The rule, one candidate at a time."""
    best = (0.0, 0, 0, 0)
    smallest = max(first, low * gpus)
    if smallest > largest:
        return best
    for total in np.geomspace(smallest, largest, 50):
        per_gpu = total / gpus
        count = max(ceil(per_gpu / high - 1e-8), 1)
        if gpus == 1 and per_gpu > first * (1 + 1e-12):
            count = max(count, 2)
        local = min(ceil(per_gpu / count - 1e-8), largest // (gpus * count))
        if not low <= local <= high:
            continue
        batch = gpus * local * count
        seconds = iteration_time(theta, nodes, gpus, local, count)
        rate = gain(batch / first, sqr, var) / seconds
        if rate > best[0] * (1 + 1e-12):
            best = (float(rate), batch, local, count)
    return best


def on_shapes(theta, sqr, var, first, largest, low, high, nodes, gpus):
    """Jobs, (jobs, 1) or numbers, on shapes, (shapes,) or numbers."""
    step = step_terms(np.asarray(theta)[..., None, :], nodes, gpus)
    columns = (np.asarray(each, dtype=float)[..., None] for each in (sqr, var, first, largest, low, high))
    return JobOnShape(*step, *columns, gpus)


limits = st.tuples(st.integers(1, 256), st.integers(1, 64), st.integers(1, 64), st.integers(1, 64))


@settings(max_examples=60)
@given(
    st.lists(st.tuples(constants, st.floats(0.0, 10.0), st.floats(1e-3, 1e4), limits), min_size=1, max_size=4),
    st.lists(shapes, min_size=1, max_size=4),
)
def test_best_batch_is_the_rule_over_all_jobs_and_shapes(jobs, places):
    theta = np.stack([each[0] for each in jobs])
    sqr, var = (np.array([each[at] for each in jobs]) for at in (1, 2))
    first = np.array([each[3][0] for each in jobs])
    largest = first * np.array([each[3][1] for each in jobs])
    low = np.minimum(np.array([each[3][2] for each in jobs]), first)
    high = low * np.array([each[3][3] for each in jobs])
    nodes, gpus = (np.array([each[at] for each in places]) for at in (0, 1))
    chosen = best_batch(on_shapes(theta, sqr, var, first, largest, low, high, nodes, gpus))
    for j in range(len(jobs)):
        for s in range(len(places)):
            one = (theta[j], sqr[j], var[j], first[j], largest[j], low[j], high[j], nodes[s], gpus[s])
            rate, _, _, _ = naive(*one)
            assert chosen.goodput[j, s] == pytest.approx(rate, rel=1e-9)
            alone = best_batch(on_shapes(*one))
            assert [each.item() for each in alone] == [each[j, s] for each in chosen]
            if rate == 0.0:
                assert chosen.local_batch[j, s] == chosen.throughput[j, s] == 0
                continue
            local, count = chosen.local_batch[j, s], chosen.accumulation[j, s]
            assert low[j] <= local <= high[j]
            assert gpus[s] * local * count <= largest[j]
            batch, seconds = gpus[s] * local * count, iteration_time(theta[j], nodes[s], gpus[s], local, count)
            assert chosen.throughput[j, s] == pytest.approx(batch / seconds)
            assert gain(batch / first[j], sqr[j], var[j]) / seconds == pytest.approx(rate, rel=1e-9)


def test_one_gpu_beyond_the_initial_batch_needs_two_micro_batches():
    # 200 samples fit in memory at once, but would leave nothing to estimate the noise from.
    theta = np.array([1.0, 1e-6, 1e-8, 1e-8, 1e-8, 1e-8, 1.0])
    one = best_batch(on_shapes(theta, 1e-9, 1.0, 100.0, 200.0, 1.0, 400.0, 1, 1))
    assert (one.local_batch, one.accumulation) == (100, 2)
    two = best_batch(on_shapes(theta, 1e-9, 1.0, 100.0, 800.0, 1.0, 400.0, 1, 2))
    assert (two.local_batch, two.accumulation) == (400, 1)


@pytest.mark.parametrize(
    ("first", "largest", "gpus", "batch"), [(128, 512, 3, 510), (100, 100, 48, 96), (64, 1000, 7, 994)]
)
def test_the_largest_batch_is_never_exceeded_by_rounding(first, largest, gpus, batch):
    theta = np.array([1.0, 1e-6, 1e-8, 1e-8, 1e-8, 1e-8, 1.0])  # noise is large, so the largest batch is best
    one = best_batch(on_shapes(theta, 1e-9, 1.0, float(first), float(largest), 1.0, 400.0, 1, gpus))
    assert gpus * one.local_batch * one.accumulation == batch


@pytest.mark.parametrize("var", [0.0, 1.0])
def test_more_gpus_than_samples_have_no_batch(var):
    theta = np.array([[1.0, 1e-6, 1e-8, 1e-8, 1e-8, 1e-8, 1.0]])
    chosen = best_batch(on_shapes(theta[0], 1.0, var, 4.0, 4.0, 1.0, 4.0, np.ones(3), np.array([2, 4, 8])))
    assert (chosen.goodput[:2] > 0).all()
    assert chosen.goodput[2] == 0.0


def test_a_fixed_batch_is_accumulated_where_it_must_be_and_never_exceeds_the_largest():
    assert fixed_batch(4096, 4, 128, 4096, 1024) == (1024, 1)  # whole multiples need no further micro-batch
    assert fixed_batch(4100, 4, 128, 4100, 1024) == (512, 2)
    assert fixed_batch(128, 1, 128, 4096, 1024) == (128, 1)
    assert fixed_batch(256, 1, 128, 4096, 1024) == (128, 2)  # one GPU above the initial batch
    assert fixed_batch(100, 3, 10, 100, 50) == (33, 1)  # ⌈100/3⌉ = 34 on 3 GPUs would be 102 samples
