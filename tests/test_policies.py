"""What every policy that ships keeps to in simulations, and what some do; the rules of all: test_conformance.py."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import RIGID, cluster, facts, finish_s, random_workload, work_ticks, workload

from synergy_core.cluster import Cluster, NodeType
from synergy_core.errors import InputError
from synergy_core.jobs.record import Job
from synergy_core.ordering.prediction import DurationPredictor
from synergy_core.policies import AllocationPolicy, OrderingPolicy, get_policy, ordering_policy
from synergy_core.scheduler import scheduler_for
from synergy_core.state import Allocations, ClusterState
from synergy_runs.invariants import check
from synergy_sim.execution import Costs, ExecutionModel
from synergy_sim.simulate import simulate

ALL = RIGID
ORDERING = [name for name in ALL if isinstance(get_policy(name), OrderingPolicy)]
ALLOCATION = [name for name in ALL if isinstance(get_policy(name), AllocationPolicy)]
MACHINES = {
    "plain": cluster(2),
    "quotas": cluster(2, virtual_clusters={"a": 8, "b": 8}),
    "borrowing": cluster(2, virtual_clusters={"a": 4, "b": 8}, borrowing=True),
    "whole-nodes": cluster(2, placement="consolidate"),
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
    assert delivered == work_ticks(work)


@pytest.mark.parametrize("name", ALL)
def test_the_same_jobs_give_the_same_schedule(name):
    once, again = (simulate(random_workload(9, 200), cluster(5), get_policy(name)) for _ in range(2))
    assert once.events.digest() == again.events.digest()


@pytest.mark.parametrize("name", ORDERING)
def test_lone_job_runs_at_once_and_without_a_break(name):
    done = simulate(workload([(5, 3, 100)]), cluster(1), get_policy(name))
    assert facts(done) == [(5, "start", 0), (105, "finish", 0)]


def state_of(rows, machines, view=ClusterState):
    """rows: (submit_s, gpus, attained_gpu_s, running). What the view shows beside a `ClusterState` is 5,000."""
    count = len(rows)
    submit_s, gpus, attained, running = (np.array(column) for column in zip(*rows, strict=True))
    more = {each.name for each in dataclasses.fields(view)} - {each.name for each in dataclasses.fields(ClusterState)}
    return view(
        now_s=10_000.0,
        round_s=60.0,
        cluster=machines,
        job_id=np.arange(count),
        submit_time_s=submit_s.astype(float),
        gpus=gpus,
        held_gpus=np.where(running, gpus, 0),
        attained_service_gpu_s=attained.astype(float),
        first_start_s=submit_s.astype(float),
        restarts=np.zeros(count, dtype=int),
        gpu_type=np.full(count, -1),
        held_type=np.where(running, 0, -1),
        virtual_cluster=np.zeros(count, dtype=int),
        virtual_clusters=("",),
        must_stay=np.zeros(count, dtype=bool),
        **{each: np.full(count, 5_000.0) for each in more},
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
    state = state_of(rows, cluster(2), policy.view)
    answer = policy.allocate(state)
    assert isinstance(answer, Allocations)
    assert answer.gpus.sum() <= 16
    assert set(np.unique(answer.gpus / state.gpus)) <= {0.0, 1.0}
    np.testing.assert_array_equal(policy.allocate(state).gpus, answer.gpus)
    order = data.draw(st.permutations(range(len(rows))))
    shuffled = policy.allocate(state_of([rows[i] for i in order], cluster(2), policy.view))
    assert sorted(zip([rows[i] for i in order], shuffled.gpus.tolist(), strict=True)) == sorted(
        zip(rows, answer.gpus.tolist(), strict=True)
    )


def test_state_cannot_be_written_to():
    state = state_of([(0, 1, 0, False)], cluster(1))
    with pytest.raises(ValueError, match="read-only"):
        state.gpus[0] = 2


FREE = ExecutionModel(Costs(restart_s=0.0))


def test_demoted_job_waits_for_young_one():
    work = workload([(0, 8, 2_000), (1_000, 8, 100)])
    done = simulate(work, cluster(1), get_policy("mlfq"), FREE)
    assert finish_s(done).tolist() == [2_100, 1_100]


def test_las_runs_whoever_has_held_least_in_gpu_seconds():
    # At 8,000 s the first has held 8 × 8,000 GPU-s, the second 4 × 3,600: two queues would go by arrival.
    work = workload([(0, 8, 8_000), (7_200, 4, 3_700), (7_200, 4, 3_700)])
    assert finish_s(simulate(work, cluster(1), get_policy("las"), FREE)).tolist() == [11_700, 10_900, 10_900]
    assert finish_s(simulate(work, cluster(1), get_policy("mlfq"), FREE)).tolist() == [8_900, 11_700, 11_700]


def test_of_two_jobs_that_have_held_the_same_each_runs_for_a_quantum_at_a_time():
    work = workload([(0, 8, 300), (0, 8, 300)])
    policy = get_policy("las").with_parameters(quantum_s=100.0)
    starts = [(at_s, job) for at_s, kind, job in facts(simulate(work, cluster(1), policy, FREE)) if kind == "start"]
    assert starts == [(0, 0), (100, 1), (200, 0), (300, 1), (400, 0), (500, 1)]


def test_las_refuses_a_quantum_of_nothing():
    with pytest.raises(InputError, match="quantum_s of policy las: got 0, expected seconds > 0"):
        simulate(workload([(0, 1, 1)]), cluster(1), get_policy("las").with_parameters(quantum_s=0.0))


def test_tiresias_has_the_queues_of_its_authors_simulator_and_promotes_nobody():
    assert get_policy("tiresias").parameters == {"queue_limits_gpu_s": (3_250.0, 7_200.0), "promote_knob": 0.0}


def test_starving_job_goes_back_to_the_first_queue_and_its_counts_begin_at_zero():
    """It runs 1,000 s into the second queue; young jobs keep it out until it has waited half as long as it ran."""
    work = workload([(0, 8, 1_500), *[(1_000 + 400 * i, 8, 400) for i in range(6)]])
    waits = simulate(work, cluster(1), get_policy("tiresias"), FREE)
    assert finish_s(waits)[0] == 3_900
    knob = get_policy("tiresias").with_parameters(promote_knob=0.5)
    events = [event for event in facts(simulate(work, cluster(1), knob, FREE)) if event[2] == 0]
    # Promoted at 1,500 s behind the job that came at 1,400; it holds the first queue for 3,250 ÷ 8 s, waits its turn
    # in the second again, and half of that time later it is back.
    assert events[:3] == [(0, "start", 0), (1_000, "stop", 0), (1_800, "start", 0)]
    assert events[3] == (1_800 + 3_250 / 8, "stop", 0)
    assert events[4][1] == "start"


def test_easy_does_not_wait_for_ever_for_a_job_that_has_outrun_its_estimate():
    """Half the node is due at 10 s and ends at 100,000 s; by what it promised, every other GPU was there to fill."""
    fillers = [(500 * i, 2, 5_000) for i in range(1, 40)]
    rows = [(0, 4, 100_000), (0, 2, 1_000), (100, 4, 100), *fillers]
    work = workload(rows, estimates=[10, *[row[2] for row in rows[1:]]])
    assert finish_s(simulate(work, cluster(1), get_policy("easy"), FREE))[2] < 10_000


def test_easy_fills_the_gap_only_with_jobs_that_end_before_the_reservation():
    work = workload([(0, 4, 100), (1, 8, 100), (2, 4, 200), (3, 4, 97)], estimates=[100, 100, 200, 97])
    assert finish_s(simulate(work, cluster(1), get_policy("easy"))).tolist() == [100, 200, 400, 100]


@pytest.mark.parametrize("finish_first", [True, False])
def test_an_arrival_does_not_see_what_ends_at_its_instant_whichever_is_reported_first(finish_first):
    scheduler = scheduler_for(get_policy("qssf"), cluster(1))
    long, short, late = (Job(number, submit_s, 1, user="u") for number, submit_s in enumerate((0.0, 0.0, 900.0)))
    scheduler.arrive(long)
    scheduler.arrive(short)
    scheduler.decide(0.0)
    scheduler.finish(short, 100.0)
    for event in ("finish", "arrive") if finish_first else ("arrive", "finish"):
        if event == "finish":
            scheduler.finish(long, 900.0)
        else:
            scheduler.arrive(late)
    predictor = DurationPredictor()
    predictor.ended(short, 100.0, 100.0)
    assert late.predicted_duration_s == predictor.predict_s(late) > 1.0


def test_two_jobs_that_end_at_once_are_learnt_in_one_order():
    jobs = [Job(number, 0.0, 1, user="u") for number in range(2)]
    arriving = Job(2, 10.0, 1, user="u")
    predictions = []
    for order in (jobs, jobs[::-1]):
        predictor = DurationPredictor()
        for job in order:
            predictor.ended(job, 10.0 + 1_000.0 * job.job_id, 9.0)
        predictions.append(predictor.predict_s(arriving))
    assert predictions[0] == predictions[1]


def test_themis_lets_the_worst_off_go_first():
    rows = [(0, 8, 0, False), (9_000, 8, 0, False)]
    policy = get_policy("themis")
    assert policy.allocate(state_of(rows, cluster(1), policy.view)).gpus.tolist() == [8, 0]


def test_unknown_policy_names_the_nearest():
    with pytest.raises(InputError, match="Did you mean 'srtf'"):
        get_policy("srft")


def test_unknown_parameter_names_the_nearest():
    with pytest.raises(InputError, match="Did you mean 'demote_after_gpu_s'"):
        get_policy("mlfq").with_parameters(demote_after_s=1.0)


def test_parameter_reaches_key_and_change():
    policy = get_policy("mlfq").with_parameters(demote_after_gpu_s=10.0)
    job = SimpleNamespace(attained_service_gpu_s=10.0, submit_time_s=1.0, gpus=1, running=True)
    assert policy.key(job) == (True, 1.0)
    assert policy.next_change(job, 5.0) is None


def test_policy_must_say_what_it_reads():
    with pytest.raises(InputError, match="annotate its first parameter"):

        @ordering_policy()
        def blind(job):
            return (0,)
