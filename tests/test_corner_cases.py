"""Quotas, borrowing, GPU types and rounds by hand; most tests are the smallest case of a defect."""

from dataclasses import replace

import pytest
from jobs import WALKING, cluster, facts, finish_s, random_workload, workload

from synergy_core.cluster import Cluster, NodeType
from synergy_core.errors import InputError
from synergy_core.jobs.record import Job
from synergy_core.policies import get_policy
from synergy_core.scheduling.scheduler import scheduler_for
from synergy_runs.facts import Kind
from synergy_runs.inputs import _scaled_quotas
from synergy_runs.invariants import check
from synergy_sim import engine
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
@pytest.mark.parametrize("exit_s", [70.0, 130.0, 500.0])
@pytest.mark.parametrize("policy", ["srtf", "tiresias", "themis"])
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
    rows = list(zip(made.submit_time_s.tolist(), made.gpus.tolist(), made.duration_s.tolist(), strict=True))
    machines = cluster(2, virtual_clusters={"a": 8, "b": 8})
    execution = {"round_s": 120.0, "decide_fraction": 0.5, "stretch": "log", "stretch_s": 6.3}
    run(workload(rows, tenants="ab" * 100), machines, policy, Costs(15.0, 15.0, 7.0), **execution)


def test_running_job_moves_to_the_type_that_the_policy_gives_it():
    work = workload([(0, 8, 5_000), (400, 8, 100)], kinds=["", "a100"])
    assert finish_s(run(work, two_types(), "themis"))[1] == 820


def test_quotas_of_many_small_tenants_scale_to_the_cluster():
    many = {f"t{i}": 1 for i in range(20)} | {"big": 1_000, "bigger": 2_000}
    quotas = _scaled_quotas(replace(workload([(0, 1, 1)]), quotas=many), 32)
    assert sum(quotas.values()) == 32
    assert min(quotas.values()) == 1


@pytest.mark.parametrize("policy", ["fifo", "backfill", "easy", "srtf", "las", "themis"])
def test_tenant_without_a_quota_only_borrows(policy):
    work = workload([(0, 8, 100), (0, 8, 100)], tenants=["z", "a"])
    machines = cluster(1, virtual_clusters={"a": 8}, borrowing=True)
    assert finish_s(run(work, machines, policy))[1] == 100


def test_easy_fills_behind_a_head_that_only_fits_by_borrowing():
    work = workload([(0, 4, 1_000), (1, 8, 100), (2, 2, 50)], tenants=["b", "a", "a"])
    machines = cluster(1, virtual_clusters={"a": 4, "b": 4}, borrowing=True)
    assert finish_s(run(work, machines, "easy")).tolist() == [1_000, 1_100, 52]


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
    job.settled_s = 1_000.0  # as a round does whose lease begins later
    scheduler.decide(3_250.0)
    assert job.queue_entered_s == 0.0
    scheduler.decide(4_250.0)
    assert job.queue_entered_s == 4_250.0


@pytest.mark.parametrize(("restart_s", "interval_s"), [(60.0, 0.0), (0.0, 60.0)])
def test_jobs_that_swap_before_they_get_anything_done_end_with_a_sentence(monkeypatch, restart_s, interval_s):
    """A quantum shorter than a start, or than a checkpoint takes to come."""
    monkeypatch.setattr(engine, "MAX_RUNS_WITHOUT_PROGRESS", 50)
    policy = get_policy("las").with_parameters(quantum_s=30.0)
    costs = Costs(launch_s=restart_s, restart_s=restart_s, checkpoint_interval_s=interval_s)
    with pytest.raises(InputError, match=r"the last 5[0-9] runs were each stopped before they made progress: 1-GPU"):
        simulate(workload([(0, 1, 1000), (0, 1, 1000)]), cluster(1, 1), policy, ExecutionModel(costs))


def test_job_runs_on_the_type_it_asks_for():
    work = workload([(0, 4, 100), (0, 4, 100)], kinds=["t4", "a100"])
    events = run(work, two_types(), "fifo").events
    nodes = dict(zip(events.job_id[events.kind == Kind.START], events.node[events.kind == Kind.START], strict=True))
    assert nodes[0] == 1
    assert nodes[1] == 0


def test_tenant_borrows_idle_gpus_and_gives_them_back_to_a_preempting_owner():
    machines = cluster(2, virtual_clusters={"a": 8, "b": 8}, borrowing=True)
    work = workload([(0, 16, 1_000), (100, 8, 100)], tenants=["a", "b"])
    assert finish_s(run(work, machines, "backfill")).tolist() == [1_000, 1_100]
    assert finish_s(run(work, machines, "mlfq")).tolist() == [1_100, 200]


def test_tenant_without_borrowing_stays_within_its_quota():
    work = workload([(0, 8, 1_000), (0, 8, 1_000)], tenants=["a", "a"])
    machines = cluster(2, virtual_clusters={"a": 8, "b": 8})
    assert finish_s(run(work, machines, "backfill")).tolist() == [1_000, 2_000]


def test_several_heads_of_one_tenant_borrow_at_once():
    work = workload([(0, 8, 100), (0, 8, 100), (0, 8, 100)], tenants=["a"] * 3)
    machines = cluster(3, virtual_clusters={"a": 8, "b": 16}, borrowing=True)
    assert finish_s(run(work, machines, "fifo")).tolist() == [100, 100, 100]


def test_wide_job_waits_for_whole_nodes_only_where_it_must():
    rows = [(0, 4, 1_000), (0, 4, 1_000), (0, 4, 1_000), (1, 16, 100), (2, 8, 500)]
    loose = finish_s(run(workload(rows), cluster(4), "backfill"))
    strict = finish_s(run(workload(rows), cluster(4, placement="consolidate"), "backfill"))
    assert loose[3] == strict[3] == 101
    fragmented = [(0, 5, 1_000), (0, 5, 1_000), (0, 5, 1_000), (1, 9, 100)]
    assert finish_s(run(workload(fragmented), cluster(3), "backfill"))[3] == 101
    assert finish_s(run(workload(fragmented), cluster(3, placement="consolidate"), "backfill"))[3] == 1_100
