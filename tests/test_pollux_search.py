"""Pollux's search: its operators against a scalar reading of the rules, its best against all there are."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from training_jobs import run, t4s, training

from synergy_core.scheduling.jobs.cluster import Cluster, NodeType
from synergy_core.scheduling.policies import get_policy
from synergy_core.scheduling.policies.pollux import settled
from synergy_core.scheduling.policies.pollux.search import (
    Worth,
    bounds_of,
    breed,
    padded,
    ranks,
    repair,
    row_counts,
    row_sums,
    search,
)


def random_of(seed):
    return np.random.Generator(np.random.SFC64(seed))


def inside(matrices):
    """(count, jobs, nodes) → (jobs, count, nodes), padded."""
    return np.ascontiguousarray(padded(np.asarray(matrices), np.uint8).swapaxes(0, 1))


@st.composite
def drawn_matrices(draw):
    """(count, jobs, nodes) GPUs, GPUs of nodes, and the most of each job."""
    jobs, nodes, count = (draw(st.integers(1, most)) for most in (4, 5, 4))
    entries = draw(st.lists(st.integers(0, 4), min_size=count * jobs * nodes, max_size=count * jobs * nodes))
    capacity = draw(st.lists(st.integers(1, 4), min_size=nodes, max_size=nodes))
    most_gpus = draw(st.lists(st.integers(1, 9), min_size=jobs, max_size=jobs))
    return np.reshape(entries, (count, jobs, nodes)).tolist(), capacity, most_gpus


def repaired_by_hand(matrix, capacity, most):
    """One matrix, one entry at a time; None where a job must shrink, which is left to chance."""
    jobs, nodes = len(matrix), len(capacity)
    result = [list(row) for row in matrix]
    spans = [sum(gpus > 0 for gpus in row) > 1 for row in matrix]
    for node in range(nodes):
        seen = 0
        for job in range(jobs):
            seen += spans[job] and matrix[job][node] > 0
            if seen > 1:
                result[job][node] = 0
    if any(sum(row) > limit for row, limit in zip(result, most, strict=True)):
        return None
    for node in range(nodes):
        left = capacity[node]
        for job in range(jobs):
            result[job][node] = min(result[job][node], left)
            left -= result[job][node]
    return result


@given(drawn_matrices())
def test_repair_is_the_rule_read_one_entry_at_a_time_and_its_bounds_hold(given_):
    matrices, capacity, most = given_
    jobs, nodes = len(most), len(capacity)
    bounds = bounds_of(np.zeros((jobs, nodes), int), np.array(capacity), np.array(most), 16, random_of(0))
    array = inside(matrices)
    left = repair(array, bounds, random_of(1))
    after = array.swapaxes(0, 1)[..., :nodes].astype(int)
    assert (after >= 0).all()
    assert (after <= np.array(matrices)).all()
    assert (after.sum(axis=2) <= np.array(most)).all()
    np.testing.assert_array_equal(left[:, :nodes], np.array(capacity) - after.sum(axis=1))
    spans = (after > 0).sum(axis=2) > 1
    assert (((after > 0) & spans[:, :, None]).sum(axis=1) <= 1).all()
    for matrix, result in zip(matrices, after, strict=True):
        expected = repaired_by_hand(matrix, capacity, most)
        if expected is not None:
            assert result.tolist() == expected


def test_a_job_keeps_at_most_so_many_nodes():
    bounds = bounds_of(np.zeros((1, 10), int), np.full(10, 4), np.array([30]), 3, random_of(0))
    array = inside(np.full((5, 1, 10), 2))
    repair(array, bounds, random_of(1))
    assert row_counts(array).tolist() == [[3] * 5]
    assert len({tuple(row) for row in array[0].tolist()}) > 1  # which ones is left to chance


@pytest.mark.parametrize(("gpus", "kind"), [(4, np.uint8), (64, np.uint16)])
def test_sums_of_rows_are_exact_up_to_the_whole_cluster(gpus, kind):
    full = np.full((2, 3, 13), gpus)
    array = padded(full, kind)
    assert row_sums(array).tolist() == full.sum(axis=2).tolist()
    assert row_counts(array).tolist() == [[13] * 3] * 2


def test_children_of_empty_parents_are_raised_as_often_as_the_rule_says():
    jobs, nodes, pairs = 4, 8, 2_000
    bounds = bounds_of(np.zeros((jobs, nodes), int), np.full(nodes, 4), np.full(jobs, 32), 16, random_of(0))
    pool = np.zeros((jobs, 2, nodes), np.uint8)
    children = breed(pool, np.ones(2 * pairs, int), bounds, random_of(3))
    share, value = (children > 0).mean(), children[children > 0]
    assert share == pytest.approx(1 / jobs * 4 / 5, abs=0.005)  # raised to 0 … 4, of which 0 is no change
    assert np.bincount(value)[1:] / len(value) == pytest.approx(np.full(4, 0.25), abs=0.01)


def test_a_job_that_is_there_is_raised_more_often_and_full_nodes_never():
    base = np.array([[1, 4], [0, 0]])
    bounds = bounds_of(base, np.array([4, 4]), np.array([8, 8]), 16, random_of(0))
    pool = np.repeat(padded(base, np.uint8)[:, None], 2, axis=1)
    children = breed(pool, np.ones(40_000, int), bounds, random_of(4))
    zeroed = 0.1 * 0.1
    # where it was not zeroed, it is raised for sure (1 − (1 − 1/2)(1 − 1/1) = 1), to 1 … 4
    assert (children[0, :, 0] > 1).mean() == pytest.approx(0.75, abs=0.02)
    assert (children[1, :, 0] > 0).mean() == pytest.approx(0.5 * 0.8, abs=0.02)
    assert (children[0, :, 1] == 4).mean() > 1 - zeroed - 0.01


def test_children_are_rows_of_their_parents_or_of_what_jobs_hold():
    jobs, nodes = 5, 8
    rows = np.stack([np.full((jobs, nodes), mark) for mark in (1, 2, 3)], axis=1).astype(np.uint8)
    capacity = np.full(nodes, 1)  # all are full, so nothing is raised
    bounds = bounds_of(np.ones((jobs, nodes), int), capacity, np.full(jobs, 9), 16, random_of(0))
    children = breed(rows, np.array([1] * 4_000 + [2] * 4_000), bounds, random_of(5))
    marks = children.max(axis=2)
    assert (marks == 1).mean() == pytest.approx(0.1, abs=0.01)  # taken back
    assert ((children == 0) | (children == marks[:, :, None])).all()
    assert (children == 0).mean() == pytest.approx(0.01, abs=0.003)
    crossed = (marks[0] == 3) & np.isin(marks[-1], [2])  # the last job is never crossed, the first in 0.9 · 4/5
    assert crossed[:4_000].mean() == pytest.approx(0.9 * 0.8 * 0.81, abs=0.03)


POINTS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=25)


@given(POINTS)
def test_ranks_are_by_peeling_off_what_nothing_dominates(points):
    first, second = (np.array(column, dtype=float) for column in zip(*points, strict=True))
    rank, crowding = ranks(first, second)
    left, expected, level = set(range(len(points))), {}, 0
    while left:
        front = {
            i
            for i in left
            if not any(
                points[k][0] <= points[i][0] and points[k][1] <= points[i][1] and points[k] != points[i] for k in left
            )
        }
        expected.update(dict.fromkeys(front, level))
        left, level = left - front, level + 1
    assert rank.tolist() == [expected[i] for i in range(len(points))]
    for level in set(rank.tolist()):
        front = sorted({points[i] for i in np.flatnonzero(rank == level)})
        spread = [max(column) - min(column) for column in zip(*front, strict=True)]
        for at, point in enumerate(front):
            same = [i for i in np.flatnonzero(rank == level) if points[i] == point]
            if 0 < at < len(front) - 1:
                far = sum(abs(front[at + 1][k] - front[at - 1][k]) / spread[k] for k in (0, 1))
                assert crowding[same[0]] == pytest.approx(far)
            else:
                assert crowding[same[0]] == np.inf
            assert not crowding[same[1:]].any()


def tables(jobs, most, seed=0, p=-1.0):
    random = np.random.default_rng(seed)
    gpus = np.arange(most + 1)
    speedup = np.stack([gpus**0.9, gpus**0.7], axis=0) * random.uniform(0.5, 2.0, (jobs, 1, 1))
    moved = np.stack([speedup, speedup * random.uniform(0.3, 0.95, (jobs, 1, 1))], axis=1)
    return Worth((moved / 4 + 1e-3) ** p, np.stack([speedup, speedup], axis=1), p)


def test_objectives_are_the_power_mean_and_the_speedup_per_gpu_of_nodes_in_use():
    base = np.array([[2, 0, 0], [0, 1, 1]])
    bounds = bounds_of(base, np.array([2, 2, 4]), np.array([8, 8]), 16, random_of(0))
    worth = tables(2, 8)
    matrix = np.array([[2, 0, 0], [0, 2, 0]])
    array = inside(matrix[None])
    left = repair(array, bounds, random_of(0))
    value, utility = worth.objectives(array, left, bounds)
    terms = [worth.term[0, 0, 0, 2], worth.term[1, 1, 0, 2]]  # the first stays, the second moves onto one node
    assert -value[0] == pytest.approx(2 / sum(terms))
    assert -utility[0] == pytest.approx((worth.speedup[0, 0, 0, 2] + worth.speedup[1, 0, 0, 2]) / 4)


def all_matrices(bounds, jobs, nodes, most):
    rows = list(product(range(most + 1), repeat=nodes))
    found = np.array(list(product(rows, repeat=jobs)))
    array = inside(found)
    repair(array, bounds, random_of(0))
    return array


@pytest.mark.parametrize("p", [-1.0, 0.5])
@settings(max_examples=40)
@given(seed=st.integers(0, 10_000), base=st.lists(st.integers(0, 2), min_size=4, max_size=4))
def test_search_finds_the_best_of_all_and_settled_never_overlooks_a_better_one(p, seed, base):
    base = np.array(base).reshape(2, 2)
    plain = bounds_of(np.zeros((2, 2), int), np.array([2, 2]), np.array([4, 3]), 16, random_of(seed))
    base = inside(base[None])
    repair(base, plain, random_of(seed))
    base = base[:, 0, :2].astype(int)
    bounds = bounds_of(base, np.array([2, 2]), np.array([4, 3]), 16, random_of(seed))
    worth = tables(2, 4, seed, p)
    every = all_matrices(bounds, 2, 2, 2)
    left = bounds.capacity - every.sum(axis=0, dtype=np.uint8)
    best = worth.objectives(every, left, bounds)[0].min()
    held = inside(base[None])
    now = worth.objectives(held, bounds.capacity - held.sum(axis=0, dtype=np.uint8), bounds)[0][0]
    found, values = search(bounds, worth, base[None], 20, 40, random_of(seed))
    assert values.min() == pytest.approx(best)
    assert (found.sum(axis=1) <= 2).all()
    if settled(bounds, worth.term if p < 0 else -worth.term):
        assert now == pytest.approx(best)


def test_a_job_that_holds_all_it_can_use_is_settled():
    bounds = bounds_of(np.array([[4, 0]]), np.array([4, 4]), np.array([4]), 16, random_of(0))
    cost = np.broadcast_to(1.0 / (np.arange(9) + 0.1), (1, 2, 2, 9))
    assert settled(bounds, cost)
    assert not settled(replace(bounds, most_gpus=np.array([8], np.uint8)), cost)


@pytest.mark.parametrize("skips", [True, False])
def test_in_simulations_no_node_is_shared_by_jobs_on_several_and_a_lone_job_grows(skips):
    policy = get_policy("pollux").with_parameters(generations=15, population=20, skip_settled=skips)
    spanned, most = 0, 0

    def allocate(state):
        nonlocal spanned, most
        answer = policy.allocate(state)
        on_nodes = answer.node_gpus > 0
        spans = on_nodes.sum(axis=1) > 1
        assert (on_nodes[spans].sum(axis=0) <= 1).all()
        spanned, most = spanned + spans.sum(), max(most, answer.gpus.max(initial=0))
        return answer

    rows = [(60 * at, 1 + at % 4, 1_500, name) for at, name in enumerate(("bert", "cifar10", "ncf", "yolov3", "bert"))]
    run(training([*rows, (90_000, 1, 20_000, "cifar10")], t4s()), t4s(), replace(policy, allocate=allocate))
    assert (spanned > 0, most) == (True, 16)


def test_with_several_types_a_job_gets_no_more_gpus_than_every_type_has_and_types_are_not_told_apart():
    """As in Sia's port of Pollux."""
    machines = Cluster((NodeType("a", "a100", 1, 8), NodeType("t", "t4", 4, 4)))
    policy = get_policy("pollux").with_parameters(generations=15, population=20)
    most, distinct = 0, set()

    def allocate(state):
        nonlocal most
        answer = policy.allocate(state)
        most = max(most, answer.gpus.max(initial=0))
        distinct.update(len({model.tobytes() for model in task.pool.models.values()}) for task in state.tasks)
        return answer

    rows = [(60 * at, 2, 3_000, name) for at, name in enumerate(("cifar10", "bert", "cifar10", "imagenet"))]
    run(training(rows, machines), machines, replace(policy, allocate=allocate))
    assert (most, distinct) == (8, {0, 1})
