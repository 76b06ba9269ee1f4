"""Placement: together where possible, the fullest node that fits, and never a GPU twice."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import cluster

from synergy_core.scheduling.jobs.cluster import Cluster, NodeType
from synergy_core.scheduling.placement.one_job import Placement
from synergy_core.scheduling.placement.whole_round import packing


@pytest.mark.parametrize(
    ("of_nodes", "before", "gpus", "scattered", "expected"),
    [
        (3, (5, 7), 1, True, [1]),  # the fullest node that has room
        (3, (5, 7), 3, True, [0]),
        (3, (5, 7), 8, True, [2]),
        (4, (6,), 18, True, [1, 2, 0]),  # idle nodes, and the remainder on the fullest
        (3, (5, 6, 7), 6, True, [0, 1, 2]),  # as few nodes as can be
        (2, (1,), 16, False, None),  # whole nodes refuse fragments
        (2, (1,), 15, False, [1, 0]),
        (2, (5, 5), 4, False, None),  # what a node could hold is not cut unless it may lie apart
        (2, (5, 5), 4, True, [0, 1]),
    ],
)
def test_a_job_lies_where_a_hand_would_put_it(of_nodes, before, gpus, scattered, expected):
    placement = Placement(cluster(of_nodes))
    for each in before:
        placement.place(each)
    assert placement.fits(gpus, scattered=scattered) == (expected is not None)
    placed = placement.place(gpus, scattered=scattered)
    assert (placed and [node for node, _ in placed]) == expected


def test_job_does_not_mix_types():
    machines = Cluster((NodeType("a", "a100", 1, 8), NodeType("t", "t4", 2, 4)))
    placement = Placement(machines)
    placement.place(6)
    assert [node for node, _ in placement.place(6)] == [1, 2]
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
    packed = packing(machines, np.array([gpus]), np.array([0]), [()], placement)
    found = placement.place(gpus)
    assert (len(found), max(mask.bit_count() for _, mask in found)) == (fewest, crowd)
    if packed.spread:
        last = packed.placed[-1]
        assert (len(last), max(mask.bit_count() for _, mask in last)) == (fewest, crowd)
