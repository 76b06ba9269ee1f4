"""Ordering policies on clusters with tenants, quotas and every placement, against tests/naive.py, event for event."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import WALKING, cluster, random_workload, workload
from naive_traces import Trace, by_definition, differing, random_trace, simulated

from synergy_core.scheduling.jobs.cluster import Cluster, NodeType
from synergy_core.scheduling.placement.one_job import Placement
from synergy_core.scheduling.policies import get_policy
from synergy_runs.outputs.facts import Kind
from synergy_sim.execution import Costs, ExecutionModel
from synergy_sim.simulate import simulate


def nodes(*sizes, **more):
    return Cluster(tuple(NodeType(f"n{at}", "v100", 1, gpus) for at, gpus in enumerate(sizes)), **more)


def first_starts_s(work, machines, **more):
    events = simulate(work, machines, get_policy("easy"), ExecutionModel(Costs(restart_s=0.0)), **more).events
    return [float(events.time_s[(events.kind == Kind.START) & (events.job_id == job)][0]) for job in range(len(work))]


@pytest.mark.parametrize("traces", [80, pytest.param(400, marks=pytest.mark.thorough)])
def test_no_random_trace_differs_from_the_definitions(traces):
    for number in range(traces):
        trace = random_trace(Random(f"1/{number}"))
        assert not differing(trace), trace


@pytest.mark.parametrize("rule", ["consolidate", "relax"])
@pytest.mark.parametrize("policy", ["easy", "srtf", "las", "tiresias"])
def test_walk_over_many_jobs_decides_as_the_queue_does(policy, rule):
    machines = cluster(5, placement=rule, patience_s=3_600.0)
    trace = Trace(random_workload(4, 150, mean_gap_s=90.0), machines, 30.0)
    assert simulated(trace, policy, make_scheduler=WALKING) == simulated(trace, policy)


@settings(max_examples=40)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 60), st.sampled_from([1, 1, 2, 3, 4, 8, 16]), st.integers(0, 9_000)),
        min_size=1,
        max_size=25,
    ),
    restart_s=st.sampled_from([0.0, 30.0]),
    promote_knob=st.sampled_from([0.1, 0.2, 1.0, 8.0]),
)
def test_promotion_is_decided_as_defined(rows, restart_s, promote_knob):
    policy = get_policy("tiresias").with_parameters(promote_knob=promote_knob)
    trace = Trace(workload(rows), cluster(2), restart_s)
    wanted = by_definition(trace, "tiresias", promote_knob=promote_knob)
    for how in ({}, {"make_scheduler": WALKING}):
        assert simulated(trace, policy, **how) == wanted


@pytest.mark.parametrize("more", [{}, {"make_scheduler": WALKING}], ids=["lanes", "walk"])
@pytest.mark.parametrize("placement", ["consolidate", "spread"])
def test_easy_promises_gpus_that_other_tenants_will_free(placement, more):
    work = workload([(0, 4, 100), (0, 2, 1_000), (1, 6, 50), (2, 2, 500)], tenants=["b", "a", "a", "c"])
    machines = cluster(1, placement=placement)
    assert first_starts_s(work, machines, **more)[2] == 100


@pytest.mark.parametrize("more", [{}, {"make_scheduler": WALKING}], ids=["lanes", "walk"])
def test_easy_promises_a_head_with_a_quota_what_another_tenant_holds(more):
    rows, tenants = [(0, 5, 1_000), (10, 5, 100), (20, 4, 10_000)], ["t0", "t1", "t1"]
    machines = nodes(8, 4, virtual_clusters={"t0": 5, "t1": 6})
    starts_s = first_starts_s(workload(rows, tenants=tenants), machines, **more)
    assert starts_s == [0, 1_000, 1_100]


def test_easy_lets_no_other_tenant_delay_a_head():
    # The first of b's jobs leaves 3 of 8 GPUs beside it free; c's jobs would take turns there for ever.
    rows = [(0, 5, 1_000), (10, 8, 100), *[(20 + at, 3, 900) for at in range(5)]]
    work = workload(rows, tenants=["b", "a", *"ccccc"])
    assert first_starts_s(work, nodes(8, 4, 4, virtual_clusters={"a": 8, "b": 5, "c": 3}))[1] == 1_000


def test_relaxed_job_is_split_over_two_nodes_where_two_are_enough():
    # Free are 6 of 8 GPUs, and 2, 2 and 4 on nodes that are idle.
    placement = Placement(nodes(8, 2, 2, 4, placement="relax"))
    assert placement.claim(((0, 0b11),))
    assert len(placement.place(8)) == 2


def test_rest_beside_whole_nodes_lies_on_one_node_where_it_can():
    placement = Placement(nodes(8, 8, 5))
    assert placement.claim(((0, 0b11),))
    assert {node: mask.bit_count() for node, mask in placement.place(14, scattered=False)} == {1: 8, 0: 6}


def test_job_that_would_only_get_other_gpus_of_its_node_keeps_its_own():
    # The second gives way to the third and is let in again on the same node at once.
    rows = [(0, 12, 3_240), (0, 2, 3_960), (360, 12, 120), (360, 1, 540)]
    trace = Trace(workload(rows), cluster(3, placement="relax", patience_s=5_000.0), 0.0)
    assert (360.0, "stop", 1) not in simulated(trace, "srtf")
