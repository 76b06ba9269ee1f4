"""Which compressor each layer gets: against trying everything, and against the bound."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from synergy_core.performance.goodput.layerwise import BUCKETS, frontier, least_bytes


def tried(sizes, errors, budget):
    """Fewest bytes within a budget, by trying everything; inf where nothing is."""
    size, error = np.zeros(1), np.zeros(1)
    for size_row, error_row in zip(sizes, errors, strict=True):
        size, error = ((a[:, None] + b).ravel() for a, b in ((size, size_row), (error, error_row)))
    return size[error <= budget * (1.0 + 1e-12)].min(initial=np.inf)


@st.composite
def cases(draw):
    """Bytes and squared errors of a few layers, with ties, zeros and layers that are alike; and a budget."""
    layers, choices = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    size = st.one_of(st.integers(0, 6), st.integers(0, 10**6))
    error = st.one_of(st.integers(0, 6), st.floats(1e-9, 10.0))  # a slope in bytes ÷ 1e-308 is no number
    row = st.tuples(
        st.lists(size, min_size=choices, max_size=choices), st.lists(error, min_size=choices, max_size=choices)
    )
    rows = draw(st.lists(row, min_size=layers, max_size=layers))
    if draw(st.booleans()):
        rows = [rows[0]] * layers
    sizes, errors = (np.array(each, dtype=np.float64) for each in zip(*rows, strict=True))
    low, high = errors.min(axis=1).sum(), errors.max(axis=1).sum()
    return sizes, errors, float(low + draw(st.floats(-0.2, 1.1)) * (high - low)) if high > low else float(low)


@given(cases())
def test_fewest_bytes_are_those_of_trying_everything_up_to_the_grid(case):
    sizes, errors, budget = case
    if budget < 0.0:
        return
    answer = least_bytes(sizes, errors, budget)
    best = tried(sizes, errors, budget)
    assert answer.met is bool(np.isfinite(best))
    if not answer.met:
        assert answer.error == pytest.approx(errors.min(axis=1).sum())
        return
    assert answer.error <= budget * (1.0 + 1e-9)
    assert answer.bound <= best * (1.0 + 1e-9) + 1e-9
    assert best <= answer.sent_bytes
    # A bucket is at most this, and each layer is rounded up by less than one.
    assert answer.sent_bytes <= tried(sizes, errors, budget - len(sizes) * budget / BUCKETS) * (1.0 + 1e-9)


@given(cases())
def test_points_of_the_frontier_are_as_good_as_trying_everything(case):
    sizes, errors, _ = case
    curve = frontier(sizes, errors)
    at = np.arange(len(sizes))
    for point in range(curve.errors.size):
        choice = curve.choices(point)
        assert errors[at, choice].sum() == pytest.approx(curve.errors[point])
        assert sizes[at, choice].sum() == pytest.approx(curve.sent_bytes[point])
        # Of points whose errors differ by less than a sum can show, the last has the fewest bytes.
        last = curve.within(curve.errors[point])
        assert tried(sizes, errors, curve.errors[point]) == pytest.approx(curve.sent_bytes[last])
    assert all(a <= b for a, b in pairwise(curve.errors))
    assert all(a > b for a, b in pairwise(curve.sent_bytes))


def many(kind, seed=0):
    """1,000 layers with 8 choices: ranks of layers that differ in size and decay, or are alike; or no pattern."""
    random = np.random.default_rng(seed)
    rank = 2.0 ** np.arange(8)
    if kind == "alike":
        return np.tile(4_000.0 * rank, (1_000, 1)), np.tile(rank**-0.5, (1_000, 1))
    if kind == "no pattern":
        return random.integers(1, 10**6, (1_000, 8)).astype(float), random.random((1_000, 8))
    numbers, decay = 10.0 ** random.uniform(4, 7, (1_000, 1)), random.uniform(0.3, 1.0, (1_000, 1))
    return np.rint(numbers * rank / 256), numbers * random.uniform(0.5, 2.0, (1_000, 1)) * rank**-decay


@pytest.mark.parametrize("kind", ["differ", "alike", "no pattern"])
@pytest.mark.parametrize("part", [0.02, 0.3, 0.8])
def test_a_thousand_layers_come_close_to_the_bound(kind, part):
    sizes, errors = many(kind)
    curve = frontier(sizes, errors)
    budget = float(curve.errors[0] + part * (curve.errors[-1] - curve.errors[0]))
    answer = least_bytes(sizes, errors, budget)
    assert answer.met
    assert answer.error <= budget * (1.0 + 1e-9)
    assert answer.bound <= answer.sent_bytes <= curve.sent_bytes[curve.within(budget)]
    assert answer.sent_bytes <= answer.bound * 1.001
    assert curve.sent_bytes[curve.within(budget)] <= answer.bound * 1.005


def test_a_layer_of_zeros_costs_nothing_and_leaves_the_budget_to_others():
    sizes, errors = np.array([[8.0, 1.0], [8.0, 1.0]]), np.array([[0.0, 0.0], [0.0, 1.0]])
    assert least_bytes(sizes, errors, 0.0).choice.tolist() == [1, 0]
    assert least_bytes(sizes, errors, 1.0).choice.tolist() == [1, 1]


def test_a_budget_that_nothing_meets_gets_the_nearest_and_says_so():
    answer = least_bytes(np.array([[1.0, 4.0], [1.0, 4.0]]), np.array([[9.0, 2.0], [9.0, 3.0]]), 4.0)
    assert (answer.choice.tolist(), answer.error, answer.met) == ([1, 1], 5.0, False)


def test_a_choice_that_a_layer_lacks_is_infinite():
    sizes = np.array([[1.0, np.inf, 8.0], [np.inf, 4.0, 8.0]])
    errors = np.array([[9.0, np.inf, 0.0], [np.inf, 1.0, 0.0]])
    assert least_bytes(sizes, errors, 1.5).choice.tolist() == [2, 1]
    assert least_bytes(sizes, errors, 100.0).choice.tolist() == [0, 1]
