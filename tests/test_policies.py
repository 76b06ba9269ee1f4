"""What every policy that ships keeps to in simulations, and what some do; the rules of all: test_conformance.py."""

from types import SimpleNamespace

import pytest
from jobs import RIGID, cluster, facts, finish_s, random_workload, work_ticks, workload

from synergy_core.errors import InputError
from synergy_core.scheduling.decisions.predictor import DurationPredictor
from synergy_core.scheduling.decisions.scheduler import scheduler_for
from synergy_core.scheduling.jobs.record import Job, Request
from synergy_core.scheduling.policies import AllocationPolicy, OrderingPolicy, get_policy, ordering_policy
from synergy_sim.execution import Costs, ExecutionModel
from synergy_sim.simulate import simulate

ALL = RIGID
ORDERING = [name for name in ALL if isinstance(get_policy(name), OrderingPolicy)]
ALLOCATION = [name for name in ALL if isinstance(get_policy(name), AllocationPolicy)]


@pytest.mark.parametrize("name", ALL)
def test_gpu_seconds_delivered_equal_the_traces_exactly(name):
    work = random_workload(8, 300)
    done = simulate(work, cluster(5), get_policy(name), ExecutionModel(Costs(restart_s=0.0)))
    events = facts(done)
    gpus = dict(enumerate(work.jobs["gpus"].tolist()))
    sign = {"start": -1, "stop": 1, "finish": 1}
    delivered = sum(sign[kind] * int(time_s * 2**20) * gpus[job_id] for time_s, kind, job_id in events)
    assert delivered == work_ticks(work)


@pytest.mark.parametrize("name", ORDERING)
def test_lone_job_runs_at_once_and_without_a_break(name):
    done = simulate(workload([(5, 3, 100)]), cluster(1), get_policy(name))
    assert facts(done) == [(5, "start", 0), (105, "finish", 0)]


FREE = ExecutionModel(Costs(restart_s=0.0))


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


@pytest.mark.parametrize("finish_first", [True, False])
def test_an_arrival_does_not_see_what_ends_at_its_instant_whichever_is_reported_first(finish_first):
    scheduler = scheduler_for(get_policy("qssf"), cluster(1))
    long, short, late = (
        Job(number, submit_s, 1, request=Request(user="u")) for number, submit_s in enumerate((0.0, 0.0, 900.0))
    )
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
    jobs = [Job(number, 0.0, 1, request=Request(user="u")) for number in range(2)]
    arriving = Job(2, 10.0, 1, request=Request(user="u"))
    predictions = []
    for order in (jobs, jobs[::-1]):
        predictor = DurationPredictor()
        for job in order:
            predictor.ended(job, 10.0 + 1_000.0 * job.job_id, 9.0)
        predictions.append(predictor.predict_s(arriving))
    assert predictions[0] == predictions[1]


@pytest.mark.parametrize(
    ("name", "parameters", "said"),
    [
        ("srft", {}, "Did you mean 'srtf'"),
        ("mlfq", {"demote_after_s": 1.0}, "Did you mean 'demote_after_gpu_s'"),
        ("las", {"quantum_s": 0.0}, "quantum_s of policy las.*got 0"),
    ],
)
def test_what_a_policy_does_not_have_is_refused(name, parameters, said):
    with pytest.raises(InputError, match=said):
        simulate(workload([(0, 1, 1)]), cluster(1), get_policy(name).with_parameters(**parameters))


def test_parameter_reaches_key_and_change():
    policy = get_policy("mlfq").with_parameters(demote_after_gpu_s=10.0)
    job = SimpleNamespace(attained_service_gpu_s=10.0, submit_time_s=1.0, gpus=1, running=True)
    assert policy.key(job) == (True, 1.0)
    assert policy.next_change(job, 5.0) is None


def test_policy_must_say_what_it_reads():
    with pytest.raises(InputError, match=r"policy .*JobView"):

        @ordering_policy()
        def blind(job):
            return (0,)
