"""The incremental queue against a naive scan of the whole queue, event for event."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import cluster, facts, random_workload, workload
from naive import Naive, NaiveJob

from synergy_core.policies import get_policy
from synergy_core.units import on_grid
from synergy_sim.execution import Costs, ExecutionModel
from synergy_sim.simulate import simulate

POLICIES = ["fifo", "backfill", "easy", "sjf", "srtf", "las", "mlfq", "tiresias"]


def naive_facts(work, gpus, policy, restart_s, promote_knob):
    columns = (work.submit_time_s, work.gpus, work.duration_s, work.estimate_s)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return Naive([NaiveJob(i, *row) for i, row in enumerate(rows)], [gpus], policy, restart_s, promote_knob).run()


def assert_same(work, nodes, name, restart_s, promote_knob=0.0):
    policy = get_policy(name)
    if promote_knob:
        policy = policy.with_parameters(promote_knob=promote_knob)
    run = simulate(work, cluster(nodes), policy, ExecutionModel(Costs(restart_s=restart_s)))
    assert facts(run) == naive_facts(work, 8 * nodes, name, restart_s, promote_knob)
    return run


@pytest.mark.parametrize("restart_s", [0.0, 30.0])
@pytest.mark.parametrize("policy", POLICIES)
def test_queue_decides_as_a_scan_of_the_whole_queue_does(policy, restart_s):
    assert_same(random_workload(1, 300), 5, policy, restart_s)


@pytest.mark.parametrize("policy", POLICIES)
def test_times_off_the_second_make_no_difference(policy):
    assert_same(random_workload(2, 300, whole=False, sizes=(1, 3, 5, 8, 32)), 4, policy, on_grid(7.3))


@pytest.mark.parametrize("promote_knob", [0.1, 0.5, 1.0, 8.0])
def test_promotion_is_decided_as_by_a_scan_too(promote_knob):
    done = assert_same(random_workload(1, 250), 4, "tiresias", 30.0, promote_knob)
    plain = simulate(done.workload, done.cluster, get_policy("tiresias"), ExecutionModel(Costs(restart_s=30.0)))
    assert facts(done) != facts(plain)


@pytest.mark.parametrize("seed", [4, 5])
def test_jobs_that_overrun_their_estimates_make_no_difference(seed):
    work = random_workload(seed, 500)
    wrong = np.random.default_rng(seed).choice([0.0, 0.01, 0.3, 1.0, 4.0], len(work))
    assert_same(replace(work, estimate_s=on_grid(work.duration_s * wrong)), 4, "easy", 0.0)


@settings(max_examples=80, deadline=None)
@given(
    rows=st.lists(
        st.tuples(
            st.integers(0, 60), st.sampled_from([1, 1, 2, 3, 4, 8, 16]), st.integers(0, 9_000), st.integers(0, 9_000)
        ),
        min_size=1,
        max_size=25,
    ),
    policy=st.sampled_from(POLICIES),
    restart_s=st.sampled_from([0.0, 30.0]),
    promote_knob=st.sampled_from([0.0, 0.2, 1.0]),
)
def test_no_small_case_differs(rows, policy, restart_s, promote_knob):
    work = workload([row[:3] for row in rows], estimates=[row[3] for row in rows])
    assert_same(work, 2, policy, restart_s, promote_knob if policy == "tiresias" else 0.0)
