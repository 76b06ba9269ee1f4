"""Jobs that may not be stopped once they run, and jobs of a fixed number of GPUs, in whole runs."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from jobs import cluster, facts, workload
from training_jobs import policy_named, random_training, run, t4s, three_types

from synergy_core.errors import InputError
from synergy_core.scheduling.jobs.cluster import Cluster, NodeType
from synergy_core.scheduling.policies import OrderingPolicy, get_policy, policy_names
from synergy_core.scheduling.policies.mechanisms import mechanism_names
from synergy_core.units import GB
from synergy_runs.outputs.facts import Kind
from synergy_sim.simulate import simulate
from synergy_sim.truth import Truth

POLICIES = sorted(policy_names())
PREEMPTIVE = [name for name in POLICIES if isinstance(get_policy(name), OrderingPolicy) and get_policy(name).preemptive]
STAYING, FIXED = ("bert", "cifar10"), {"deepspeech2": 2, "yolov3": 3}
LIMITED = Truth(None, not_preemptible=STAYING, fixed_gpus=FIXED)
HOSTS = Cluster((NodeType("t4", "t4", 4, 4, 12.0, 250 * GB),))


def of(made, jobs, models):
    names = np.asarray(made.jobs["model"])
    return np.isin(names[jobs], list(models))


def checked(name, machines):
    """Under this policy nobody who may not be stopped is, and who can only run on so many GPUs does."""
    made = random_training(3, 24, machines, truth=LIMITED, mean_gap_s=60.0, mean_s=3_000.0)
    done = run(made, machines, name, truth=LIMITED, round_s=120.0)
    events = done.events
    started, stopped = events.kind == Kind.START, events.kind == Kind.STOP
    jobs = events.job_id
    assert not (stopped & of(made, jobs, STAYING)).any()
    assert of(made, np.arange(len(made)), STAYING).sum() > 5
    for model, gpus in FIXED.items():
        mine = started & of(made, jobs, [model])
        assert set(events.gpus[mine].tolist()) == {gpus}
    return stopped.any()


@pytest.mark.parametrize("name", ["crius", "sia", "synergy", "themis"])
def test_limits_are_kept_on_several_gpu_types(name):
    assert checked(name, three_types()), "nobody was stopped, so nothing was tried"


@pytest.mark.parametrize(
    ("order", "mechanism"), list(zip(("fifo", "las", "srtf", "themis"), mechanism_names(), strict=True))
)
def test_mechanisms_keep_the_limits_of_jobs(order, mechanism):
    checked(f"{order}+{mechanism}", HOSTS)


def test_synergy_keeps_the_limits_of_jobs_where_it_shares_out_cpus():
    checked("synergy", HOSTS)


@pytest.mark.parametrize("name", PREEMPTIVE)
def test_order_that_stops_jobs_is_refused_where_some_may_not_be_stopped(name):
    with pytest.raises(InputError, match=rf"{name}.*truth\.not_preemptible=\[\]"):
        checked(name, t4s())


def test_requests_beyond_the_limits_are_refused_by_whoever_does_not_change_them():
    made = random_training(3, 10, t4s(), sizes=(4,))
    with pytest.raises(InputError, match=r"truth\.min_gpus\.\w+=8: .* requests 4 GPUs, expected 8"):
        run(made, t4s(), policy_named("sia"), truth=Truth(None, min_gpus=dict.fromkeys(made.jobs["model"], 8)))


def latest_first(state, *, stays_s):
    """The job submitted last comes first, but one that started less than stays_s ago stays."""
    young = (state.held_gpus > 0) & (state.now_s - state.last_start_s < stays_s)
    return state.in_order(np.argsort(-state.submit_time_s), stays=young)


def runs_of(rows, machines, stays_s):
    """(job, seconds) of every run that was stopped, and the number of stops, under `latest_first`."""
    policy = replace(get_policy("themis"), allocate=partial(latest_first, stays_s=stays_s), rank=None, round_s=60.0)
    started_s, stopped = {}, []
    for time_s, what, job in facts(simulate(workload(rows), machines, policy)):
        if what == "start":
            started_s[job] = time_s
        elif what == "stop":
            stopped.append((job, time_s - started_s[job]))
    return stopped


def test_a_policy_may_let_jobs_stay_for_a_while_after_they_have_started():
    rows = [(300.0 * at, 2, 4_000.0) for at in range(6)]
    machines = cluster(1, 2)
    assert min(seconds for _, seconds in runs_of(rows, machines, 0.0)) < 600
    assert all(seconds >= 1_000 for _, seconds in runs_of(rows, machines, 1_000.0))


def test_a_job_that_is_to_stay_keeps_its_node_though_others_need_the_room():
    # The jobs of 100 s end and leave one free GPU on each node; the wide job needs both GPUs of one node.
    rows = [(0, 1, 100), (1, 1, 5_000), (2, 1, 5_000), (3, 1, 100), (200, 2, 50)]
    machines = cluster(2, 2, placement="consolidate")
    assert runs_of(rows, machines, 0.0)
    assert not runs_of(rows, machines, 100_000.0)
