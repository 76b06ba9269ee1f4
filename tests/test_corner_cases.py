"""Attacks, most of which are the smallest case of a defect; when jobs end otherwise: test_by_hand.py."""

from dataclasses import replace

import pytest
from jobs import WALKING, cluster, facts, finish_s, random_workload, workload

from synergy_core.errors import InputError
from synergy_core.scheduling.decisions.scheduler import scheduler_for
from synergy_core.scheduling.jobs.cluster import Cluster, NodeType
from synergy_core.scheduling.jobs.record import Job
from synergy_core.scheduling.policies import get_policy
from synergy_runs.inputs.from_settings import _scaled_quotas
from synergy_runs.outputs.invariants import check
from synergy_sim.execution import Costs, ExecutionModel
from synergy_sim.simulate import simulate


def run(work, machines, policy, costs=None, *, make_scheduler=scheduler_for, **execution):
    model = ExecutionModel(costs or Costs(restart_s=0.0), **execution)
    done = simulate(work, machines, get_policy(policy), model, make_scheduler=make_scheduler)
    check(done)
    return done


def two_types(**more):
    return Cluster((NodeType("a", "a100", 1, 8), NodeType("t", "t4", 1, 8)), **more)


def test_one_decision_at_an_instant_when_a_leaving_job_is_displaced():
    work = workload([(4170, 8, 330), (4320, 8, 4020)])
    done = run(work, cluster(1), "mlfq", Costs(exit_s=300.0))
    assert (done.decisions.time_s == 4_620).sum() == 1


def test_displacing_leaving_jobs_never_exceeds_capacity():
    gpus = [2, 3, 2, 8, 1, 8, 8, 3, 2, 3, 3, 8, 2, 1]
    submit = [5100, 1620, 5490, 1320, 1230, 2220, 780, 2340, 4770, 1830, 2700, 1140, 870, 1650]
    duration = [8970, 4950, 1230, 8460, 1020, 60, 7350, 4860, 4590, 3510, 6060, 2520, 3120, 1140]
    kinds = ["a100", "", "a100", "t4", "", "t4", "t4", "", "a100", "", "t4", "t4", "", "a100"]
    work = workload(list(zip(submit, gpus, duration, strict=True)), tenants="aabaaabbbabbab", kinds=kinds)
    machines = Cluster((NodeType("a", "a100", 1, 8), NodeType("t", "t4", 2, 4)), virtual_clusters={"a": 8, "b": 8})
    run(work, machines, "tiresias", Costs(15.0, 0.0, 300.0))


@pytest.mark.parametrize(("round_s", "fraction"), [(7.3, 1.0), (120.0, 0.33), (0.1, 1.0), (100 / 3, 0.5)])
def test_rounds_keep_to_the_grid_of_times(round_s, fraction):
    run(
        random_workload(1, 15, mean_gap_s=6.0, mean_duration_s=300.0),
        cluster(1),
        "srtf",
        round_s=round_s,
        decide_fraction=fraction,
    )


@pytest.mark.parametrize(("fraction", "early"), [(0.5, True), (0.5, False), (1.0, True)])
@pytest.mark.parametrize("exit_s", [70.0, 500.0])
@pytest.mark.parametrize("policy", ["tiresias", "themis"])
def test_leases_that_take_long_to_leave_hold_their_gpus_until_then(policy, exit_s, fraction, early):
    costs = Costs(15.0, 15.0, exit_s)
    run(
        random_workload(6, 120),
        cluster(3, 16),
        policy,
        costs,
        round_s=120.0,
        decide_fraction=fraction,
        early_launch=early,
    )


@pytest.mark.parametrize("policy", ["srtf", "las", "tiresias", "themis"])
def test_a_leaving_job_counts_towards_its_tenants_quota(policy):
    made = random_workload(3, 200, sizes=(1, 2, 4, 8))
    rows = list(zip(*(made.jobs[name].tolist() for name in ("submit_time_s", "gpus", "duration_s")), strict=True))
    machines = cluster(2, virtual_clusters={"a": 8, "b": 8})
    execution = {"round_s": 120.0, "decide_fraction": 0.5, "stretch": "log", "stretch_s": 6.3}
    run(workload(rows, tenants="ab" * 100), machines, policy, Costs(15.0, 15.0, 7.0), **execution)


def test_quotas_of_many_small_tenants_scale_to_the_cluster():
    many = {f"t{i}": 1 for i in range(20)} | {"big": 1_000, "bigger": 2_000}
    quotas = _scaled_quotas(replace(workload([(0, 1, 1)]), quotas=many), 32)
    assert sum(quotas.values()) == 32
    assert min(quotas.values()) == 1


def test_quota_is_not_kept_for_a_job_that_finds_no_gpus():
    rows = [(0, 8, 500), (10, 8, 5_000), (20, 8, 1_000)]
    work = workload(rows, tenants=["b", "a", "a"], kinds=["a100", "", "a100"])
    done = run(work, two_types(virtual_clusters={"a": 8, "b": 8}), "srtf")
    assert (20, "stop", 1) not in facts(done)


@pytest.mark.parametrize("policy", ["fifo", "easy"])
def test_borrowers_do_not_starve_the_head_of_a_tenant_within_its_quota(policy):
    rows = [(0, 4, 1_000 + 100 * i) for i in range(8)] + [(10, 16, 100)] + [(20, 4, 800)] * 60
    work = workload(rows, tenants=["b"] * 8 + ["a"] + ["b"] * 60)
    done = run(work, cluster(4, virtual_clusters={"a": 16, "b": 16}, borrowing=True), policy)
    assert finish_s(done)[8] <= 1_500


def test_delayed_start_counts_in_the_remaining_time():
    rows = [(2640, 4, 1320), (960, 4, 7590), (1890, 8, 6060)]
    costs = Costs(launch_s=15.0, restart_s=30.0, exit_s=7.0)
    what = (workload(rows), cluster(1), "srtf", costs)
    assert facts(run(*what)) == facts(run(*what, make_scheduler=WALKING))


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_walk_and_queue_decide_alike_under_rounds(fraction):
    what = (random_workload(3, 200, sizes=(1, 2, 4, 8)), cluster(4), "srtf", Costs(15.0, 30.0, 7.0))
    execution = {"round_s": 120.0, "decide_fraction": fraction}
    assert facts(run(*what, **execution)) == facts(run(*what, make_scheduler=WALKING, **execution))


@pytest.mark.parametrize("machines", [cluster(1), two_types()], ids=["queue", "walk"])
def test_job_that_is_not_demoted_yet_keeps_its_place(machines):
    scheduler, job = scheduler_for(get_policy("tiresias"), machines), Job(0, 0.0, 1)
    scheduler.arrive(job)
    for other in (1, 2):  # while nobody waits, nothing hangs on a jump
        scheduler.arrive(Job(other, 0.0, 8))
    scheduler.decide(0.0)
    job.service.settled_s = 1_000.0  # as a round does whose lease begins later
    scheduler.decide(3_250.0)
    assert job.queue_entered_s == 0.0
    scheduler.decide(4_250.0)
    assert job.queue_entered_s == 4_250.0


@pytest.mark.parametrize(("fraction", "refill_s"), [(0.5, 0.0), (1.0, 0.0), (1.0, 7.0)])
@pytest.mark.parametrize("arrives_s", [14_040.0, 14_039.5, 14_040.5, 14_070.0])
def test_when_a_job_starts_after_an_idle_time_does_not_depend_on_unrelated_jobs(arrives_s, fraction, refill_s):
    execution = {"round_s": 60.0, "decide_fraction": fraction, "refill_s": refill_s}
    alone = run(workload([(0, 1, 10), (arrives_s, 1, 10)]), cluster(1, 2), "fifo", **execution)
    beside = run(workload([(0, 1, 90_000), (arrives_s, 1, 10)]), cluster(1, 2), "fifo", **execution)
    assert finish_s(alone)[1] == finish_s(beside)[1]
    if arrives_s == 14_040.0 and fraction == 1.0:
        assert finish_s(alone)[1] == 14_050.0


@pytest.mark.parametrize("policy", ["fifo", "las", "srtf"])
def test_refilled_rounds_obey_all_laws_and_keep_their_grid(policy):
    work = random_workload(seed=3, jobs=15)
    costs = Costs(launch_s=3.0, restart_s=5.0, exit_s=2.0)
    done = run(work, cluster(2, 4), policy, costs, round_s=60.0, refill_s=0.5)
    at = done.decisions.time_s
    assert all(now_s % 0.5 == 0 for now_s in at)
    assert any(now_s % 60 for now_s in at)
    # Refills lie between the rounds and do not move them: a decision at each, from the first job on to the last.
    assert set(range(60 * int(min(at) // 60 + 1), int(max(at)), 60)) <= set(at.tolist())


@pytest.mark.parametrize("odd", [{"decide_fraction": 0.5}, {"stretch": "log"}, {"start_delay_s": 5.0}])
def test_refill_asks_for_plain_ticks(odd):
    with pytest.raises(InputError, match="refill_s: decisions between rounds are carried out immediately"):
        ExecutionModel(round_s=60.0, refill_s=1.0, **odd)
