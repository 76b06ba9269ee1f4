"""What is allocated is placed: on any nodes, for any jobs, with a bound that no placement exceeds."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from node_problems import best_placed, check, random_round

from synergy_core.allocator.nodes import allocate

DRAWN = {
    "seed": st.integers(0, 10**6),
    "groups": st.integers(1, 3),
    "sizes": st.sampled_from([(1, 2, 4, 8), (1,), (1, 2, 3, 5, 7), (2, 8, 16), (1, 2, 4, 8, 16, 20)]),
    "tenants": st.sampled_from([0, 0, 2]),
    "pinned": st.booleans(),
    "movable": st.booleans(),
}


@settings(max_examples=120, deadline=None)
@given(**DRAWN, jobs=st.integers(0, 40), most_nodes=st.integers(1, 6), levels=st.integers(1, 4))
def test_everything_allocated_is_placed(seed, groups, sizes, tenants, pinned, movable, jobs, most_nodes, levels):
    problem = random_round(
        seed,
        jobs,
        groups=groups,
        most_nodes=most_nodes,
        sizes=sizes,
        levels=levels,
        tenants=tenants,
        pinned=pinned,
        movable=movable,
    )
    check(problem, allocate(problem))


@settings(max_examples=40, deadline=None)
@given(**DRAWN, jobs=st.integers(1, 7))
def test_no_placement_is_worth_more_than_the_bound(seed, groups, sizes, tenants, pinned, movable, jobs):
    problem = random_round(
        seed, jobs, groups=groups, most_nodes=2, sizes=sizes, tenants=tenants, pinned=pinned, movable=movable
    )
    found = allocate(problem)
    check(problem, found)
    best = best_placed(problem)
    assert found.bound >= best - 1e-6
    assert found.objective <= best + 1e-6
