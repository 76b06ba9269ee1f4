"""The incremental queue against a naive scan of the whole queue, event for event."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import cluster, facts, random_workload, workload
from naive import Naive, NaiveJob

from synergy_core.policies import get_policy
from synergy_core.units import on_grid
from synergy_sim.engine import simulate
from synergy_sim.execution import Costs, ExecutionModel

POLICIES = ["fifo", "backfill", "easy", "sjf", "srtf", "las", "tiresias"]


def naive_facts(work, gpus, policy, restart_s):
    columns = (work.submit_time_s, work.gpus, work.duration_s, work.estimate_s)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return Naive([NaiveJob(i, *row) for i, row in enumerate(rows)], gpus, policy, restart_s).run()


def assert_same(work, nodes, policy, restart_s):
    run = simulate(work, cluster(nodes), get_policy(policy), ExecutionModel(Costs(restart_s=restart_s)))
    assert facts(run) == naive_facts(work, 8 * nodes, policy, restart_s)


@pytest.mark.parametrize("restart_s", [0.0, 30.0])
@pytest.mark.parametrize("policy", POLICIES)
def test_queue_decides_as_a_scan_of_the_whole_queue_does(policy, restart_s):
    assert_same(random_workload(1, 700), 5, policy, restart_s)


@pytest.mark.parametrize("policy", POLICIES)
def test_times_off_the_second_make_no_difference(policy):
    assert_same(random_workload(2, 300, whole=False, sizes=(1, 3, 5, 8, 32)), 4, policy, on_grid(7.3))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 60), st.sampled_from([1, 1, 2, 3, 4, 8, 16]), st.integers(0, 6_000)),
        min_size=1,
        max_size=25,
    ),
    policy=st.sampled_from(POLICIES),
    restart_s=st.sampled_from([0.0, 30.0]),
)
def test_no_small_case_differs(rows, policy, restart_s):
    assert_same(workload(rows), 2, policy, restart_s)
