"""What every policy keeps to, ours or a plug-in's: found by the registry, checked by the same properties."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import RIGID, cluster, facts, finish_s, random_workload, workload

from synergy_core.cluster import Cluster, NodeType
from synergy_core.errors import InputError
from synergy_core.policies import AllocationPolicy, OrderingPolicy, get_policy, ordering_policy
from synergy_core.state import Allocations, ClusterState, JobView, OracleJobView, PredictedJobView
from synergy_runs.invariants import check
from synergy_sim.engine import simulate
from synergy_sim.execution import Costs, ExecutionModel

ALL = RIGID
ORDERING = [name for name in ALL if isinstance(get_policy(name), OrderingPolicy)]
ALLOCATION = [name for name in ALL if isinstance(get_policy(name), AllocationPolicy)]
MACHINES = {
    "plain": cluster(2),
    "quotas": cluster(2, virtual_clusters={"a": 8, "b": 8}),
    "borrowing": cluster(2, virtual_clusters={"a": 4, "b": 8}, borrowing=True),
    "whole-nodes": cluster(2, whole_nodes=True),
    "types": Cluster((NodeType("a", "a100", 1, 8), NodeType("t", "t4", 2, 4))),
    "types-quotas": Cluster((NodeType("a", "a100", 1, 8), NodeType("t", "t4", 2, 4)), {"a": 8, "b": 8}),
}
EXECUTION = {
    "restarts": ExecutionModel(Costs(restart_s=30.0)),
    "all-costs": ExecutionModel(Costs(launch_s=15.0, restart_s=30.0, exit_s=7.0, checkpoint_interval_s=600.0)),
    "rounds": ExecutionModel(Costs(15.0, 15.0, 7.0), round_s=119.7, decide_fraction=0.4, stretch="log", stretch_s=6.3),
}

JOBS = st.lists(
    st.tuples(
        st.integers(0, 2_000),
        st.sampled_from([1, 1, 2, 3, 4, 8, 12, 16]),
        st.integers(0, 9_000),
        st.sampled_from("ab"),
        st.sampled_from(["", "", "a100", "t4"]),
    ),
    min_size=1,
    max_size=20,
)


@pytest.mark.parametrize("execution", EXECUTION)
@pytest.mark.parametrize("machines", MACHINES)
@pytest.mark.parametrize("name", ALL)
@settings(max_examples=8, deadline=None)
@given(jobs=JOBS)
def test_every_job_ends_once_and_capacity_is_never_exceeded(name, machines, execution, jobs):
    machine = MACHINES[machines]
    kinds = [job[4] if "types" in machines else "" for job in jobs]
    most = [machine.most_gpus_for(kind, job[3]) for kind, job in zip(kinds, jobs, strict=True)]
    rows = [(job[0], min(job[1], most), job[2]) for job, most in zip(jobs, most, strict=True)]
    work = workload(rows, tenants=[job[3] for job in jobs], kinds=kinds)
    done = simulate(work, machine, get_policy(name), EXECUTION[execution])
    check(done)
    assert not np.isnan(finish_s(done)).any()


@pytest.mark.parametrize("name", ALL)
def test_gpu_seconds_delivered_equal_the_traces_exactly(name):
    work = random_workload(8, 300)
    done = simulate(work, cluster(5), get_policy(name), ExecutionModel(Costs(restart_s=0.0)))
    events = facts(done)
    gpus = dict(enumerate(work.gpus.tolist()))
    sign = {"start": -1, "stop": 1, "finish": 1}
    delivered = sum(sign[kind] * int(time_s * 2**20) * gpus[job_id] for time_s, kind, job_id in events)
    assert delivered == work.work_ticks()


@pytest.mark.parametrize("name", ALL)
def test_the_same_jobs_give_the_same_schedule(name):
    once, again = (simulate(random_workload(9, 200), cluster(5), get_policy(name)) for _ in range(2))
    assert once.events.digest() == again.events.digest()


@pytest.mark.parametrize("name", ORDERING)
def test_lone_job_runs_at_once_and_without_a_break(name):
    done = simulate(workload([(5, 3, 100)]), cluster(1), get_policy(name))
    assert facts(done) == [(5, "start", 0), (105, "finish", 0)]


VIEWS = {
    JobView: (),
    PredictedJobView: ("predicted_duration_s",),
    OracleJobView: ("duration_s", "remaining_s"),
}
PUBLIC = [name for name, value in vars(JobView).items() if isinstance(value, property)]


@pytest.mark.parametrize("name", ORDERING)
def test_key_reads_only_what_its_view_shows_and_changes_nothing(name):
    policy = get_policy(name)
    extra = VIEWS[OracleJobView] if policy.oracle else VIEWS[PredictedJobView] if policy.predicted else ()
    values = dict.fromkeys((*PUBLIC, *extra), 1.5) | {"gpus": 2, "job_id": 7, "running": True}
    view = dataclasses.make_dataclass("View", values, frozen=True)(**values)
    first = policy.key(view)
    assert isinstance(first, tuple)
    assert policy.key(view) == first
    if policy.next_change is not None:
        policy.next_change(view, 10.0)


def state_of(rows, machines):
    """rows: (submit_s, gpus, attained_gpu_s, running)."""
    count = len(rows)
    submit_s, gpus, attained, running = (np.array(column) for column in zip(*rows, strict=True))
    return ClusterState(
        now_s=10_000.0,
        cluster=machines,
        job_id=np.arange(count),
        submit_time_s=submit_s.astype(float),
        gpus=gpus,
        held_gpus=np.where(running, gpus, 0),
        attained_service_gpu_s=attained.astype(float),
        first_start_s=submit_s.astype(float),
        estimate_s=np.full(count, 5_000.0),
        restarts=np.zeros(count, dtype=int),
        gpu_type=np.full(count, -1),
        held_type=np.where(running, 0, -1),
        virtual_cluster=np.zeros(count, dtype=int),
        virtual_clusters=("",),
    )


ROWS = st.lists(
    st.tuples(st.integers(0, 9_000), st.sampled_from([1, 2, 4, 8]), st.integers(0, 90_000), st.just(False)),
    min_size=1,
    max_size=12,
    unique_by=lambda row: (row[0], row[2]),
)


@pytest.mark.parametrize("name", ALLOCATION)
@settings(max_examples=40, deadline=None)
@given(rows=ROWS, data=st.data())
def test_allocation_is_pure_within_capacity_and_blind_to_the_order_of_jobs(name, rows, data):
    policy = get_policy(name)
    state = state_of(rows, cluster(2))
    answer = policy.allocate(state)
    assert isinstance(answer, Allocations)
    assert answer.gpus.sum() <= 16
    assert set(np.unique(answer.gpus / state.gpus)) <= {0.0, 1.0}
    np.testing.assert_array_equal(policy.allocate(state).gpus, answer.gpus)
    order = data.draw(st.permutations(range(len(rows))))
    shuffled = policy.allocate(state_of([rows[i] for i in order], cluster(2)))
    assert sorted(zip([rows[i] for i in order], shuffled.gpus.tolist(), strict=True)) == sorted(
        zip(rows, answer.gpus.tolist(), strict=True)
    )


def test_state_cannot_be_written_to():
    state = state_of([(0, 1, 0, False)], cluster(1))
    with pytest.raises(ValueError, match="read-only"):
        state.gpus[0] = 2


def test_demoted_job_waits_for_young_one():
    work = workload([(0, 8, 2_000), (1_000, 8, 100)])
    done = simulate(work, cluster(1), get_policy("las"), ExecutionModel(Costs(restart_s=0.0)))
    assert finish_s(done).tolist() == [2_100, 1_100]


def test_easy_fills_the_gap_only_with_jobs_that_end_before_the_reservation():
    work = workload([(0, 4, 100), (1, 8, 100), (2, 4, 200), (3, 4, 97)], estimates=[100, 100, 200, 97])
    assert finish_s(simulate(work, cluster(1), get_policy("easy"))).tolist() == [100, 200, 400, 100]


def test_themis_lets_the_worst_off_go_first():
    rows = [(0, 8, 0, False), (9_000, 8, 0, False)]
    assert get_policy("themis").allocate(state_of(rows, cluster(1))).gpus.tolist() == [8, 0]


def test_unknown_policy_names_the_nearest():
    with pytest.raises(InputError, match="Did you mean 'srtf'"):
        get_policy("srft")


def test_unknown_parameter_names_the_nearest():
    with pytest.raises(InputError, match="Did you mean 'demote_after_gpu_s'"):
        get_policy("las").with_parameters(demote_after_s=1.0)


def test_parameter_reaches_key_and_change():
    policy = get_policy("las").with_parameters(demote_after_gpu_s=10.0)
    job = SimpleNamespace(attained_service_gpu_s=10.0, submit_time_s=1.0, gpus=1, running=True)
    assert policy.key(job) == (True, 1.0)
    assert policy.next_change(job, 5.0) is None


def test_policy_must_say_what_it_reads():
    with pytest.raises(InputError, match="annotate its first parameter"):

        @ordering_policy()
        def blind(job):
            return (0,)
