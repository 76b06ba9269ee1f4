"""What is allocated is placed: on any nodes, for any jobs, with a bound that no placement exceeds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from node_problems import best_placed, check, random_round

from synergy_core.errors import InputError
from synergy_core.scheduling.allocator.nodes import NodeGroups, NodeProblem, Pieces, solve
from synergy_core.scheduling.allocator.nodes.priced import best_of
from synergy_core.scheduling.allocator.nodes.prices import by_size, charged
from synergy_core.units import GB

DRAWN = {
    "seed": st.integers(0, 10**6),
    "groups": st.integers(1, 3),
    "sizes": st.sampled_from([(1, 2, 4, 8), (1,), (1, 2, 3, 5, 7), (2, 8, 16), (1, 2, 4, 8, 16, 20)]),
    "tenants": st.sampled_from([0, 0, 2]),
    "pinned": st.booleans(),
    "movable": st.booleans(),
}


LARGE = {"jobs": st.integers(0, 25), "most_nodes": st.integers(1, 4), "levels": st.integers(1, 4)}


@settings(max_examples=30)
@given(st.fixed_dictionaries(DRAWN | LARGE))
def test_everything_allocated_is_placed(drawn: dict[str, Any]) -> None:
    problem = random_round(**drawn)
    found = solve(problem)
    check(problem, found)
    # The next round: who has its GPUs may stay, whatever moves cost.
    held = replace(problem, held=found.placed, move_cost=None)
    check(held, solve(held, prices=found.prices))


@settings(max_examples=20)
@given(st.fixed_dictionaries(DRAWN | {"jobs": st.integers(1, 7)}))
def test_no_placement_is_worth_more_than_the_bound(drawn: dict[str, Any]) -> None:
    problem = random_round(**drawn, most_nodes=2)
    found = solve(problem)
    check(problem, found)
    best = best_placed(problem)
    assert found.bound >= best - 1e-6
    assert found.objective <= best + 1e-6


def test_the_bound_is_close_and_most_of_it_placed() -> None:
    assert solve(random_round(0, 60, most_nodes=8, sizes=(1, 2, 4))).gap < 0.08
    problems = [random_round(seed, 8, most_nodes=2, sizes=(1, 2, 4)) for seed in range(15)]
    assert sum(solve(each).objective for each in problems) >= 0.97 * sum(map(best_placed, problems))


def test_charges_add_up_on_every_node_that_exists() -> None:
    """All the ways to fill a node with three kinds of jobs: what they are charged never exceeds the node."""
    rng = np.random.default_rng(0)
    size = np.array([1, 2, 3, 4])
    for _ in range(40):
        node = (6, 12.0, 64.0)
        demand = np.stack([rng.integers(1, 13, (3, 4)), rng.integers(1, 65, (3, 4))]).astype(float)
        allowed = np.ones((3, 4), dtype=bool)
        sizes = [by_size(size, each, allowed, node[0]) for each in demand]
        gpus, host = charged(size, demand, sizes, node)
        assert (gpus >= size).all()
        assert (host >= demand).all()
        items = [
            (size[at], *demand[:, job, at], gpus[job, at], *host[:, job, at]) for job in range(3) for at in range(4)
        ]
        full = np.array(node) * (1 + 1e-9)

        def add(total: np.ndarray, first: int) -> None:
            assert (total[3:] <= full).all()  # noqa: B023
            for at in range(first, len(items)):  # noqa: B023
                more = total + np.array(items[at])  # noqa: B023
                if (more[:3] <= full).all():  # noqa: B023
                    add(more, at)

        add(np.zeros(6), 0)


def test_a_wide_beam_finds_the_best_of_all_options() -> None:
    rng = np.random.default_rng(1)
    value = rng.random((20, 4, 3))
    value[rng.random(value.shape) < 0.2] = -np.inf
    use, room, price = rng.random((2, 20, 4, 3)), rng.uniform(1, 3, (2, 20)), rng.random((2, 20))
    which, worth = best_of(value, use, room, price, width=81)
    grid = np.stack(np.meshgrid(*[np.arange(3)] * 4, indexing="ij")).reshape(4, -1)
    places = np.arange(4)[:, None]
    for at in range(20):
        fits = (use[:, at, places, grid].sum(axis=1) <= room[:, at][:, None]).all(axis=0)
        totals = np.where(fits, value[at, places, grid].sum(axis=0), -np.inf)
        assert worth[at] == pytest.approx(totals.max())
        if worth[at] > -np.inf:
            assert value[at, np.arange(4), which[at]].sum() == pytest.approx(worth[at])


NODES = NodeGroups(np.array([0]), np.array([2]), np.array([8]), np.array([24.0]), np.array([500 * GB]))


def round_of(utility: list[list[float]], gpus: list[int], cpus: list[list[float]], **more: object) -> NodeProblem:
    share = np.array(cpus, dtype=float)
    kind = np.zeros(len(gpus), dtype=np.int64)
    return NodeProblem(np.array(utility), np.array(gpus), kind, share, np.full(share.shape, 10 * GB), NODES, **more)


def test_hungry_jobs_lie_beside_modest_ones() -> None:
    # Four of 12 CPUs and twelve of 1: only two and six a node let everybody run.
    hungry, modest = [[2.0]] * 4, [[1.0]] * 12
    problem = round_of(hungry + modest, [1], [[9.0]] * 4 + [[1.0]] * 12)
    found = solve(problem)
    check(problem, found)
    assert found.objective == pytest.approx(20.0)
    assert found.gap == 0.0
    assert sorted(np.bincount(found.placed.node[found.placed.job < 4]).tolist()) == [2, 2]


def test_who_runs_stays_and_a_share_alone_moves_nobody() -> None:
    levels = round_of([[1.0, 1.5]] * 16, [1, 1], [[3.0, 6.0]] * 16)
    first = solve(levels)
    node = np.zeros(16, dtype=np.int64)
    node[first.placed.job] = first.placed.node
    # Half of each node's jobs have ended: the others take 6 CPUs where they are.
    ended = np.concatenate([np.nonzero(node == each)[0][:4] for each in range(2)])
    utility = levels.utility.copy()
    utility[ended] = -np.inf
    left = ~np.isin(first.placed.job, ended)
    held = Pieces(first.placed.job[left], first.placed.node[left], first.placed.gpus[left])
    second = solve(replace(levels, utility=utility, held=held))
    check(replace(levels, utility=utility, held=held), second)
    assert not second.moved.any()
    assert second.objective == pytest.approx(8 * 1.5)
    # Where all that are left lie on one node, only want of room moves one, unless a move costs less than it brings.
    utility = np.where((node == 0)[:, None], levels.utility, -np.inf)
    left = node[first.placed.job] == 0
    held = Pieces(first.placed.job[left], first.placed.node[left], first.placed.gpus[left])
    crowded = replace(levels, utility=utility, held=held)
    assert solve(crowded).objective == pytest.approx(8.0)
    cheap = solve(replace(crowded, move_cost=np.full(16, 0.1)))
    assert int(cheap.moved.sum()) == 4
    assert cheap.objective == pytest.approx(8 * 1.5 - 4 * 0.1)


def test_what_nobody_asked_for_goes_to_who_gains_from_it() -> None:
    most = {"most_cpus": np.array([[12.0], [1.0], [5.0]]), "most_memory_bytes": np.full((3, 1), 100 * GB)}
    problem = round_of([[1.0]] * 3, [2], [[1.0]] * 3, **most)
    nodes = replace(NODES, nodes=np.array([1]))
    problem = replace(problem, nodes=nodes)
    found = solve(problem)
    check(problem, found)
    # 24 CPUs: 2 for the second; 5 a GPU for the third; what is left, 6 a GPU, for the first.
    assert found.cpus.tolist() == pytest.approx([6.0, 1.0, 5.0])
    assert found.memory_bytes.tolist() == pytest.approx([500 * GB / 6] * 3)


def test_same_input_gives_same_output() -> None:
    problem = random_round(5, 60, groups=2, most_nodes=6, tenants=2, pinned=True, movable=True)
    first, second = solve(problem), solve(problem)
    assert first.choice.tolist() == second.choice.tolist()
    assert first.placed.node.tolist() == second.placed.node.tolist()
    assert first.cpus.tolist() == second.cpus.tolist()


def test_pinned_jobs_that_cannot_share_their_node_are_named() -> None:
    held = Pieces(np.array([0, 1]), np.array([0, 0]), np.array([1, 1]))
    problem = round_of([[1.0], [1.0]], [1], [[13.0], [12.0]], held=held, pinned=np.array([True, True]))
    with pytest.raises(InputError, match="infeasible: jobs 0, 1 are pinned to node 0"):
        solve(problem)
    with pytest.raises(InputError, match="job 0 is pinned to 1 GPUs of type 0, but no row"):
        solve(replace(problem, utility=np.array([[-np.inf], [1.0]])))
    quota = {"tenant": np.array([0, 0]), "quota": np.array([1])}
    with pytest.raises(InputError, match="pinned jobs of tenant 0 hold 2 GPUs, its quota is 1"):
        solve(replace(problem, **quota))
