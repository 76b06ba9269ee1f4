"""Which cores of a node ranks are given."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from synergy_exec.agent.cores import CoreGrant, Cores

A, B, C = (1, 0), (2, 0), (3, 0)


def test_ranks_have_whole_cores_of_their_own_and_share_one_for_the_rest() -> None:
    cores = Cores([4, 5, 6])
    assert cores.take(A, 1.5) == {A}
    assert cores.take(B, 1.5) == {B}
    assert cores.grant(A) == CoreGrant((4, 5), 1.5, 1.5)
    assert cores.grant(B) == CoreGrant((5, 6), 1.5, 1.5)


def test_who_gets_less_than_it_asked_for_gets_the_rest_once_others_leave() -> None:
    cores = Cores([0, 1])
    cores.take(A, 1.0)
    cores.take(B, 1.75)
    assert cores.grant(B) == CoreGrant((1,), 1.0, 1.75)
    assert cores.take(A, 0.25) == {A, B}
    assert cores.grant(A) == CoreGrant((0,), 0.25, 0.25)
    assert cores.grant(B) == CoreGrant((0, 1), 1.75, 1.75)
    assert cores.leave(A) == set()


def test_who_comes_first_is_made_up_for_first() -> None:
    cores = Cores([0])
    cores.take(A, 1.0)
    cores.take(B, 1.0)
    cores.take(C, 1.0)
    assert cores.leave(A) == {B}
    assert cores.grant(B) == CoreGrant((0,), 1.0, 1.0)


def test_one_for_whom_nothing_is_left_runs_beside_others_and_has_none_of_its_own() -> None:
    cores = Cores([0, 1])
    cores.take(A, 2.0)
    cores.take(B, 1.0)
    grant = cores.grant(B)
    assert grant.cpus == 0.0
    assert len(grant.cores) == 1


def test_a_rank_keeps_its_cores_where_it_can() -> None:
    cores = Cores([0, 1, 2])
    cores.take(A, 1.0)
    cores.take(B, 1.0)
    cores.leave(A)
    cores.take(B, 2.0)
    assert 1 in cores.grant(B).cores


def test_cores_of_runs_without_a_share_are_given_last() -> None:
    cores = Cores([0, 1])
    cores.occupy(A, (0,))
    cores.take(B, 1.0)
    assert cores.grant(B).cores == (1,)
    cores.leave(A)
    assert cores.take(B, 2.0) == {B}
    assert cores.grant(B).cores == (0, 1)


@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5000)), max_size=30),
)
def test_no_core_is_given_twice_and_nothing_stays_free_while_somebody_lacks_it(
    count: int, changes: list[tuple[int, int]]
) -> None:
    """0 thousandths: the owner leaves. Those that a change does not name have what they had."""
    cores, asked = Cores(range(count)), dict[tuple[int, int], float]()
    for number, thousandths in changes:
        owner = (number, 0)
        before = {each: cores.grant(each) for each in asked}
        if thousandths:
            changed = cores.take(owner, thousandths / 1000)
            asked[owner] = thousandths / 1000
        else:
            changed = cores.leave(owner)
            asked.pop(owner, None)
        grants = {each: cores.grant(each) for each in asked}
        assert all(each.cpus <= len(each.cores) <= count for each in grants.values())
        assert all(grants[each].asked == wanted for each, wanted in asked.items())
        given_out = sum(round(each.cpus * 1000) for each in grants.values())
        wanted = sum(round(each * 1000) for each in asked.values())
        assert given_out == min(wanted, count * 1000)
        for each in grants.keys() - changed:
            if grants[each].cpus:
                assert grants[each] == before[each]


@given(st.integers(1, 6), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), max_size=30))
def test_whole_cores_are_never_shared(count: int, changes: list[tuple[int, int]]) -> None:
    cores, owners = Cores(range(count)), set[tuple[int, int]]()
    for number, cpus in changes:
        owner = (number, 0)
        if cpus:
            cores.take(owner, cpus)
            owners.add(owner)
        else:
            cores.leave(owner)
            owners.discard(owner)
        own = [core for each in owners if cores.grant(each).cpus for core in cores.grant(each).cores]
        assert len(own) == len(set(own))
