"""Packing: no GPU twice, sizes kept, divisible sizes always on as few nodes as they need, and who may stay stays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from synergy_core.errors import InputError
from synergy_core.scheduling.jobs.cluster import Cluster, NodeType
from synergy_core.scheduling.jobs.record import Placed
from synergy_core.scheduling.placement.one_job import Placement
from synergy_core.scheduling.placement.whole_round import Packing, packing

DIVISIBLE = (1, 2, 4, 8, 16, 32)
ANY_SIZE = (1, 2, 3, 4, 5, 6, 7, 8, 11, 16, 21)


def cluster_of(*nodes: tuple[str, int, int]) -> Cluster:
    return Cluster(tuple(NodeType(f"{kind}-{at}", kind, count, gpus) for at, (kind, count, gpus) in enumerate(nodes)))


def check(cluster: Cluster, gpus: list[int], kinds: list[int], packed: Packing, current: list[Placed]) -> None:
    """Checks the properties of every packing."""
    of_node = [
        (cluster.gpu_types.index(each.gpu_type), each.gpus_per_node)
        for each in cluster.node_types
        for _ in range(each.nodes)
    ]
    taken: dict[int, int] = {}
    for job, placed in enumerate(packed.placed):
        assert sum(mask.bit_count() for _, mask in placed) == gpus[job]
        assert len({of_node[node][0] for node, _ in placed}) <= 1
        for node, mask in placed:
            assert 0 < mask < 1 << of_node[node][1]
            assert not taken.get(node, 0) & mask
            taken[node] = taken.get(node, 0) | mask
            assert kinds[job] in (-1, of_node[node][0])
    for job in packed.migrated:
        assert sum(mask.bit_count() for _, mask in current[job]) == gpus[job]
        assert packed.placed[job] != current[job]


def occupied(cluster: Cluster, placements: list[Placed]) -> Placement:
    """The GPUs outside all placements, which must not overlap."""
    placement = Placement(cluster)
    assert all(placement.claim(placed) for placed in placements if placed), "two jobs hold one GPU"
    return placement


def fill(rng: np.random.Generator, left: list[int], sizes: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Jobs that use nearly all GPUs left of each type."""
    gpus, kinds = [], []
    for kind, room in enumerate(left):
        while room > 0:
            fitting = [size for size in sizes if size <= room]
            if not fitting or rng.random() < 0.02:
                break
            size = int(rng.choice(fitting))
            gpus.append(size)
            kinds.append(kind)
            room -= size
    return gpus, kinds


def nodes_needed(size: int, node_gpus: int) -> int:
    return -(-size // node_gpus)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    sizes=st.sampled_from([DIVISIBLE, ANY_SIZE]),
    nodes=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    node_gpus=st.sampled_from([4, 8]),
    leaving=st.sampled_from([0.05, 0.3, 0.8]),
)
def test_rounds_of_comings_and_goings(
    seed: int, sizes: tuple[int, ...], nodes: list[int], node_gpus: int, leaving: float
) -> None:
    cluster = cluster_of(*((f"type{at}", count, node_gpus) for at, count in enumerate(nodes)))
    rng = np.random.default_rng(seed)
    total = [count * node_gpus for count in nodes]
    gpus, kinds = fill(rng, total, sizes)
    current: list[Placed] = [()] * len(gpus)
    for _ in range(6):
        packed = packing(cluster, np.array(gpus, dtype=int), np.array(kinds, dtype=int), current)
        check(cluster, gpus, kinds, packed, current)
        again = packing(cluster, np.array(gpus, dtype=int), np.array(kinds, dtype=int), current)
        assert again == packed
        if sizes is DIVISIBLE:
            assert packed.spread == []
            for size, placed in zip(gpus, packed.placed, strict=True):
                assert len(placed) == nodes_needed(size, node_gpus)
        still = packing(cluster, np.array(gpus, dtype=int), np.array(kinds, dtype=int), packed.placed)
        assert still.placed == packed.placed
        stay = [job for job in range(len(gpus)) if rng.random() > leaving]
        gpus, kinds = [gpus[job] for job in stay], [kinds[job] for job in stay]
        current = [packed.placed[job] for job in stay]
        left = [room - sum(g for g, k in zip(gpus, kinds, strict=True) if k == at) for at, room in enumerate(total)]
        more, of_kind = fill(rng, left, sizes)
        gpus, kinds, current = gpus + more, kinds + of_kind, [*current, *([()] * len(more))]


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), sizes=st.sampled_from([DIVISIBLE, ANY_SIZE]))
def test_jobs_are_placed_beside_others_that_keep_their_gpus(seed: int, sizes: tuple[int, ...]) -> None:
    rng = np.random.default_rng(seed)
    cluster = cluster_of(("a", 5, 8), ("b", 4, 4))
    gpus, kinds = fill(rng, [40, 16], sizes)
    current = packing(cluster, np.array(gpus), np.array(kinds), [()] * len(gpus)).placed
    placement = occupied(cluster, current)
    listed = np.flatnonzero(rng.random(len(gpus)) >= 0.3).tolist()
    others = [placed for job, placed in enumerate(current) if job not in listed]
    gpus, kinds, current = ([column[job] for job in listed] for column in (gpus, kinds, current))
    gpus = [int(rng.integers(0, count + 1)) if rng.random() < 0.5 else count for count in gpus]
    packed = packing(cluster, np.array(gpus, dtype=int), np.array(kinds, dtype=int), current, placement)
    check(cluster, gpus, kinds, packed, current)
    occupied(cluster, [*packed.placed, *others])


@given(free=st.lists(st.integers(0, 4), min_size=1, max_size=5), gpus=st.integers(1, 12))
def test_a_lone_job_is_packed_onto_the_gpus_on_which_it_would_be_placed(free: list[int], gpus: int) -> None:
    cluster = cluster_of(("a", len(free), 4))
    placement = occupied(cluster, [((node, (1 << 4 - left) - 1),) for node, left in enumerate(free) if left < 4])
    assume(gpus <= sum(free))
    packed = packing(cluster, np.array([gpus]), np.array([0]), [()], placement)
    assert packed.placed == [placement.place(gpus, scattered=bool(packed.spread))]


ONE, TWO = (("v100", 2, 4),), (("a", 1, 4), ("b", 1, 4))
FULL = (1 << 64) - 1


# Nodes; GPUs and type of each job (−1 for any), its present placement, and the one it gets; who is moved, who is spread
@pytest.mark.parametrize(
    ("nodes", "gpus", "kinds", "current", "placed", "migrated", "spread"),
    [
        pytest.param(
            *(ONE, [2, 1, 2], [0, 0, 0], [((0, 0b0110),), ((1, 0b0001),), ()]),
            *([((0, 0b0110),), ((1, 0b0001),), ((0, 0b1001),)], [], []),
            id="unchanged jobs stay where they are when there is room",
        ),
        pytest.param(
            *(ONE, [1, 2, 4], [0, 0, 0], [((0, 0b0001),), ((1, 0b0011),), ()]),
            *([((1, 0b0100),), ((1, 0b0011),), ((0, 0b1111),)], [0], []),
            id="a small job makes room for a whole node",
        ),
        pytest.param(
            *(ONE, [3, 3, 2], [0, 0, 0], [()] * 3),
            *([((0, 0b0111),), ((1, 0b0111),), ((0, 0b1000), (1, 0b1000))], [], [2]),
            id="spreading is the last resort",
        ),
        pytest.param(
            *(ONE, [2, 2, 4], [0, 0, 0], [((0, 0b0001), (1, 0b0001)), ((0, 0b0010), (1, 0b0010)), ()]),
            *([((1, 0b0011),), ((1, 0b1100),), ((0, 0b1111),)], [0, 1], []),
            id="divisible jobs are gathered again where old spreads are in the way",
        ),
        pytest.param(
            *(TWO, [2, 4, 2], [-1, -1, -1], [((1, 0b0011),), (), ()]),
            *([((1, 0b0011),), ((0, 0b1111),), ((1, 0b1100),)], [], []),
            id="a job that names no type keeps its own or takes the first with room",
        ),
        pytest.param(
            *(TWO, [4, 4], [-1, 0], [((0, 0b1111),), ()], [((1, 0b1111),), ((0, 0b1111),)], [0], []),
            id="a job that names no type gives way to those that do",
        ),
        pytest.param(
            *(TWO, [1, 1, 4], [-1, -1, -1], [((0, 0b0001),), ((1, 0b0001),), ()]),
            *([((1, 0b0010),), ((1, 0b0001),), ((0, 0b1111),)], [0], []),
            id="jobs of any type leave theirs where otherwise not all would fit",
        ),
        pytest.param(
            *(TWO, [2], [1], [((0, 0b0011),)], [((1, 0b0011),)], [], []), id="a change of type is no migration"
        ),
        pytest.param(
            *((("a", 1, 8), ("a", 2, 4)), [12, 4], [0, 0], [(), ()]),
            *([((0, 0xFF), (1, 0xF)), ((2, 0xF),)], [], []),
            id="whole nodes of several sizes are taken first",
        ),
        pytest.param(
            *((("a", 2, 64),), [64, 0, 32, 32], [0] * 4, [()] * 4),
            *([((0, FULL),), (), ((1, FULL >> 32),), ((1, FULL >> 32 << 32),)], [], []),
            id="nodes of 64 GPUs and jobs of no GPUs",
        ),
    ],
)
def test_jobs_are_packed_as_a_hand_would(nodes, gpus, kinds, current, placed, migrated, spread) -> None:
    packed = packing(cluster_of(*nodes), np.array(gpus), np.array(kinds), current)
    assert (packed.placed, packed.migrated, packed.spread) == (placed, migrated, spread)


@pytest.mark.parametrize(
    ("gpus", "kinds", "current", "others", "message"),
    [
        ([5], [0], [()], None, "the jobs on a need 5 GPUs, but there are 4 for them"),
        ([5], [-1], [()], None, r"jobs of any type need 5 GPUs, each on one type; the types have \[4\] left"),
        ([1], [1], [()], None, r"gpu_type\[0\] is 1, expected −1 to 0"),
        ([-1], [0], [()], None, r"gpus\[0\] is -1"),
        ([1, 1], [0], [()], None, "have 2, 1, 1 entries"),
        ([1], [0], [((7, 1),)], None, "node 7, which does not exist"),
        ([1, 1], [0, 0], [((0, 1),), ((0, 1),)], None, "job 1 is listed on GPUs 0b1 of node 0"),
        ([2], [0], [((0, 1),)], [((0, 0b1110),)], "the jobs on a need 2 GPUs, but there are 1 for them"),
    ],
)
def test_bad_packing_is_refused_with_what_was_expected(
    gpus: list[int], kinds: list[int], current: list[Placed], others: list[Placed] | None, message: str
) -> None:
    cluster = cluster_of(("a", 1, 4))
    placement = None if others is None else occupied(cluster, [*current, *others])
    with pytest.raises(InputError, match=message):
        packing(cluster, np.array(gpus), np.array(kinds), current, placement)
