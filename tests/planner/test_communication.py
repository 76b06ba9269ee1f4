import os
import re
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from fits import links, scored
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from synergy_core.performance.catalog import CATALOG, read_yaml
from synergy_core.performance.planner.communication import (
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    reduce_scatter_s,
    send_s,
)
from synergy_core.performance.planner.machine import CUBE_MESH_RINGS, RDMA, link_named, links_for, machine_named

NODES = ("dgx-a100", "dgx-h200", "dgx-1-v100", "dgx-2", "a40-2", "rtx2080ti-8", "g4dn.12xlarge")
COLLECTIVES = (all_reduce_s, all_gather_s, reduce_scatter_s, all_to_all_s)
KINDS = ("nvswitch", "nvlink", "pcie", "infiniband", "ethernet")
GIB = 2.0**30

# NVLinks between the GPUs of a DGX-1V (WP-08437-002, figure 4).
CUBE_MESH = {
    frozenset(pair): count
    for count, pairs in {
        1: [(0, 1), (0, 2), (1, 3), (2, 6), (3, 7), (4, 5), (4, 6), (5, 7)],
        2: [(0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7)],
    }.items()
    for pair in pairs
}

groups = st.tuples(
    st.sampled_from(NODES), st.sampled_from([1, 2, 3, 4, 5, 8, 16, 64, 512]), st.sampled_from([1, 2, 4, 8])
)


def rings_through(n: int) -> int:
    """The most edge-disjoint cycles through the first n GPUs, each run both ways (one ring where n is 2)."""
    if n == 2:
        return CUBE_MESH[frozenset((0, 1))]
    cycles = []
    for rest in permutations(range(1, n)):
        if rest[0] < rest[-1]:
            edges = [frozenset(pair) for pair in zip((0, *rest), (*rest, 0), strict=True)]
            if all(edge in CUBE_MESH for edge in edges):
                cycles.append(edges)

    def most(left: dict[frozenset[int], int], first: int) -> int:
        best = 0
        for at in range(first, len(cycles)):
            if all(left[edge] for edge in cycles[at]):
                taken = {**left, **{edge: left[edge] - 1 for edge in cycles[at]}}
                best = max(best, 1 + most(taken, at))
        return best

    return 2 * most(dict(CUBE_MESH), 0)


@pytest.mark.parametrize("n", [2, 3, 4, 6, 7, 8])
def test_rings_of_a_cube_mesh_are_those_of_its_topology(n: int) -> None:
    assert CUBE_MESH_RINGS[n] == rings_through(n)


def test_large_messages_run_at_the_rate_of_the_link() -> None:
    links = links_for(machine_named("dgx-a100"))
    for n in (2, 4, 8):
        rate = links.inside_bytes_per_s * links.inside.efficiency
        expected = 64 * GIB * 2 * (n - 1) / n / rate
        assert all_reduce_s(64 * GIB, n, n, links) == pytest.approx(expected, rel=0.05)
        assert all_gather_s(64 * GIB, n, n, links) == pytest.approx(expected / 2, rel=0.05)


def test_large_messages_between_nodes_run_at_the_rate_of_the_network() -> None:
    links = links_for(machine_named("dgx-a100"))
    rate = links.network_bytes_per_s * links.network.efficiency
    # One GPU of each of 4 nodes; then all 8 GPUs of each, with 8 times the network.
    assert all_reduce_s(64 * GIB, 4, 1, links) == pytest.approx(64 * GIB * 2 * 3 / 4 / rate, rel=0.05)
    assert all_reduce_s(64 * GIB, 32, 8, links) == pytest.approx(64 * GIB * 2 * 31 / 32 / (8 * rate), rel=0.05)
    assert send_s(64 * GIB, False, links) == pytest.approx(64 * GIB / rate, rel=0.05)


def test_groups_that_share_the_network_share_its_rate() -> None:
    links = links_for(machine_named("a40-2"))
    one, two = (float(all_reduce_s(64 * GIB, 4, 1, links, sharing=each)) for each in (1.0, 2.0))
    assert two == pytest.approx(2 * one, rel=0.05)


def test_a_switch_that_adds_up_lifts_only_all_reduce_and_only_of_many() -> None:
    links = links_for(machine_named("dgx-h200"))
    plain = replace(links, inside=replace(links.inside, switch_efficiency=0.0))
    assert links.inside.switch_efficiency > 0
    n = np.array([2, 3, 4, 5, 6, 7, 8])
    gain = all_reduce_s(8 * GIB, n, n, plain) / all_reduce_s(8 * GIB, n, n, links)
    assert (gain[:2] == 1.0).all()
    assert (gain[3:] > 1.02).all()
    assert np.array_equal(all_gather_s(8 * GIB, n, n, plain), all_gather_s(8 * GIB, n, n, links))
    assert links_for(machine_named("dgx-a100")).inside.switch_efficiency == 0


def test_kind_of_network_follows_the_machine() -> None:
    assert links_for(machine_named("dgx-a100")).network == RDMA
    assert links_for(machine_named("a40-2")).network == link_named("infiniband")
    assert links_for(machine_named("g4dn.12xlarge")).network == link_named("ethernet")


def test_beyond_a_bridge_messages_go_through_the_host() -> None:
    links = links_for(machine_named("a40-2-nvlink"))
    pair, four = (float(all_gather_s(GIB, n, n, links)) for n in (2, 4))
    assert four > 2 * pair
    assert four == pytest.approx(GIB * 3 / 4 / (links.host_bytes_per_s * links.host.efficiency), rel=0.05)


@given(groups, st.floats(0, 64 * GIB), st.floats(1, 4))
@settings(max_examples=200)
def test_times_are_finite_rise_with_bytes_and_all_reduce_is_the_longest(
    group: tuple[str, int, int], nbytes: float, factor: float
) -> None:
    node, ranks, per_node = group
    links = links_for(machine_named(node))
    for each in COLLECTIVES:
        small, large = (float(each(size, ranks, per_node, links)) for size in (nbytes, nbytes * factor))
        assert np.isfinite(small)
        assert small <= large
        assert (small > 0) == (ranks > 1)
    assert all_reduce_s(nbytes, ranks, per_node, links) >= reduce_scatter_s(nbytes, ranks, per_node, links)
    assert send_s(nbytes, True, links) <= send_s(nbytes * factor, True, links)


@given(groups, st.floats(0, 64 * GIB))
@settings(max_examples=100)
def test_across_nodes_takes_no_less_than_each_part(group: tuple[str, int, int], nbytes: float) -> None:
    node, ranks, per_node = group
    links = links_for(machine_named(node))
    within = min(per_node, ranks)
    assume(ranks % within == 0)
    whole = all_reduce_s(nbytes, ranks, per_node, links)
    assert whole >= all_reduce_s(nbytes, within, within, links)
    # Between nodes alone: each GPU's part of the bytes, over its own share of the network.
    assert whole >= all_reduce_s(nbytes / within, ranks / within, 1, links) * (1 - 1e-12)


def test_columns_equal_single_plans() -> None:
    links = links_for(machine_named("dgx-1-v100"))
    size, ranks, per_node = (np.array(each) for each in ([0.0, 1e6, 1e9, 3e7], [1, 8, 64, 5], [1, 8, 4, 5]))
    for each in COLLECTIVES:
        columns = each(size, ranks, per_node, links, sharing=np.ones(4))
        assert columns.shape == (4,)
        for at in range(4):
            assert columns[at] == float(each(size[at], ranks[at], per_node[at], links))
    near = np.array([True, False, True, False])
    assert send_s(size, near, links).tolist() == [float(send_s(a, b, links)) for a, b in zip(size, near, strict=True)]


def test_empty_messages_take_only_the_start() -> None:
    links = links_for(machine_named("dgx-a100"))
    assert all_reduce_s(0, 8, 8, links) == pytest.approx(links.inside.low_fixed_s + 14 * links.inside.low_hop_s)
    assert send_s(0, False, links) == pytest.approx(RDMA.low_fixed_s + RDMA.low_hop_s)


@pytest.mark.parametrize("kind", KINDS)
def test_constants_are_physical_and_say_where_they_come_from(kind: str) -> None:
    link, content = link_named(kind), read_yaml(CATALOG / "links" / f"{kind}.yaml")
    assert 0 < link.low_share <= 1
    assert 0 < link.efficiency <= 1
    assert 0 < link.exchange <= 1
    assert 0 < link.low_hop_s <= link.hop_s
    assert all(re.fullmatch("[0-9a-f]{64}", each) for each in content["inputs_sha256"].values())
    assert content["errors_from_1_mib"]["in sample"]["median"] < 0.2
    held = [each for how, each in content["errors_from_1_mib"].items() if how != "in sample"]
    assert held
    assert all(each["median"] < 0.25 for each in held)


def test_the_fit_reaches_its_aims() -> None:
    data = os.environ.get("SYNERGY_DATA")
    if not data or not (Path(data) / "arena" / "collectives.csv").exists():
        pytest.skip("SYNERGY_DATA has no collectives")
    rows, fitted = links.in_sample()
    told = links.large(rows[rows["operation"] == "all-reduce"], "in sample", fitted)
    found = {(each["gpu"], each["link"]): each["median"] for each in scored(told, "gpu", "link")}
    limits = {("A100", "nvswitch"): 0.1, ("H200", "nvswitch"): 0.1, ("V100", "nvlink"): 0.1, ("A40", "infiniband"): 0.2}
    assert all(found[key] < limit for key, limit in limits.items())
