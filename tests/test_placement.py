"""Placement: together where possible, the fullest node that fits, and never a GPU twice."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import cluster

from synergy_core.cluster import Cluster, NodeType
from synergy_core.placement.one_job import Placement
from synergy_core.placement.whole_round import packing


def nodes(placed):
    return [node for node, _ in placed]


def test_best_fit_takes_the_fullest_node_that_has_room():
    placement = Placement(cluster(3))
    placement.place(5)
    placement.place(7)
    assert nodes(placement.place(1)) == [1]
    assert nodes(placement.place(3)) == [0]
    assert nodes(placement.place(8)) == [2]


def test_wide_job_takes_idle_nodes_and_its_remainder_best_fit():
    placement = Placement(cluster(4))
    placement.place(6)
    assert nodes(placement.place(18)) == [1, 2, 0]


def test_spread_job_uses_few_nodes():
    placement = Placement(cluster(3))
    for gpus in (5, 6, 7):
        placement.place(gpus)
    assert nodes(placement.place(6)) == [0, 1, 2]
    assert placement.free_gpus == 0


def test_whole_nodes_refuse_fragments():
    placement = Placement(cluster(2))
    placement.place(1)
    assert not placement.fits(16, scattered=False)
    assert nodes(placement.place(15, scattered=False)) == [1, 0]


def test_job_that_a_node_could_hold_is_not_cut_unless_it_may_lie_apart():
    placement = Placement(cluster(2))
    placement.place(5)
    placement.place(5)
    assert placement.place(4, scattered=False) is None
    assert nodes(placement.place(4)) == [0, 1]


def test_job_does_not_mix_types():
    machines = Cluster((NodeType("a", "a100", 1, 8), NodeType("t", "t4", 2, 4)))
    placement = Placement(machines)
    placement.place(6)
    assert nodes(placement.place(6)) == [1, 2]
    assert not placement.fits(3)
    assert placement.place(2, "a100") == ((0, 0b11000000),)


@pytest.mark.parametrize("scattered", [True, False])
@settings(max_examples=60)
@given(steps=st.lists(st.one_of(st.integers(1, 40), st.integers(-20, -1)), max_size=60))
def test_no_gpu_is_given_twice_and_all_come_back(scattered, steps):
    machines = Cluster((NodeType("a", "a100", 3, 8), NodeType("b", "a100", 2, 4)))
    placement = Placement(machines)
    held = []
    used: set[tuple[int, int]] = set()
    for step in steps:
        if step > 0:
            fits = placement.fits(step, scattered=scattered)
            assert fits or not scattered or step > placement.free_gpus
            placed = placement.place(step, scattered=scattered)
            assert (placed is not None) == fits
            if placed is not None:
                gpus = {(node, bit) for node, mask in placed for bit in range(8) if mask >> bit & 1}
                assert len(gpus) == step
                assert not gpus & used
                used |= gpus
                held.append(placed)
        elif held:
            placed = held.pop(step % len(held))
            placement.release(placed)
            used -= {(node, bit) for node, mask in placed for bit in range(8) if mask >> bit & 1}
        assert placement.free_gpus == 32 - len(used)
        assert all(node < 3 or bit < 4 for node, bit in used)
    for placed in held:
        placement.release(placed)
        assert placement.claim(placed)
        placement.release(placed)
    assert placement.place(32) is not None


@settings(max_examples=60)
@given(st.lists(st.sampled_from([1, 2, 4, 8, 16, 24]), max_size=40))
def test_powers_of_two_and_whole_nodes_fit_without_spreading_if_the_total_fits(sizes):
    placement = Placement(cluster(8))
    total = 0
    for gpus in sorted(sizes, reverse=True):
        if total + gpus <= 64:
            total += gpus
            assert placement.place(gpus, scattered=False) is not None


@given(free=st.lists(st.integers(0, 4), min_size=1, max_size=4), gpus=st.integers(1, 12))
def test_even_placement_has_the_smallest_crowd_on_the_fewest_nodes(free, gpus):
    """By whoever places: one job after another, or a whole round."""
    machines = Cluster((NodeType("n", "v100", len(free), 4),), placement="even")
    taken = [((node, (1 << (4 - left)) - 1),) for node, left in enumerate(free) if left < 4]
    placement = Placement(machines)
    assert all(placement.claim(each) for each in taken)
    if gpus > sum(free):
        assert placement.place(gpus) is None
        return
    ways = [way for way in product(*(range(left + 1) for left in free)) if sum(way) == gpus]
    fewest = min(len(way) - way.count(0) for way in ways)
    crowd = min(max(way) for way in ways if len(way) - way.count(0) == fewest)
    found = placement.place(gpus)
    assert (len(found), max(mask.bit_count() for _, mask in found)) == (fewest, crowd)
    masks = [(1 << left) - 1 << (4 - left) for left in free]
    packed = packing(machines, np.array([gpus]), np.array([0]), [()], masks)
    if packed.spread:
        last = packed.placed[-1]
        assert (len(last), max(mask.bit_count() for _, mask in last)) == (fewest, crowd)
