"""Rounds by hand: leases that extend, rounds that wait for those that end, launches on idle GPUs."""

import pytest
from jobs import cluster, facts, finish_s, random_workload, workload

from synergy_core.errors import InputError
from synergy_core.policies import get_policy
from synergy_runs.invariants import check
from synergy_sim.execution import Costs, ExecutionModel
from synergy_sim.simulate import simulate


def run(work, machines, policy, costs=None, **execution):
    return simulate(work, machines, get_policy(policy), ExecutionModel(costs or Costs(restart_s=0.0), **execution))


def test_plain_tick_decides_at_round_ends_and_completes_exactly():
    work = workload([(10, 1, 100), (20, 1, 100)])
    assert facts(run(work, cluster(1, 1), "fifo", round_s=60.0)) == [
        (60, "start", 0),
        (160, "finish", 0),
        (180, "start", 1),
        (280, "finish", 1),
    ]


def test_lease_that_extends_costs_nothing():
    done = run(workload([(0, 1, 1_000)]), cluster(1, 1), "las", Costs(restart_s=50.0), round_s=60.0)
    assert finish_s(done).tolist() == [1_000]


def test_idle_rounds_keep_the_grid():
    done = run(workload([(0, 1, 10), (1_234, 1, 10)]), cluster(1, 1), "fifo", round_s=60.0)
    assert finish_s(done).tolist() == [10, 1_270]


@pytest.mark.parametrize("fraction", [0.5, 1.0])
@pytest.mark.parametrize("arrives_s", [14_040.0, 14_039.5, 14_040.5, 14_070.0])
@pytest.mark.parametrize("refill_s", [0.0, 7.0])
def test_when_a_job_starts_after_an_idle_time_does_not_depend_on_unrelated_jobs(arrives_s, fraction, refill_s):
    if refill_s and fraction < 1:
        pytest.skip("refills are decided and carried out at once")
    execution = {"round_s": 60.0, "decide_fraction": fraction, "refill_s": refill_s}
    alone = run(workload([(0, 1, 10), (arrives_s, 1, 10)]), cluster(1, 2), "fifo", **execution)
    beside = run(workload([(0, 1, 90_000), (arrives_s, 1, 10)]), cluster(1, 2), "fifo", **execution)
    assert finish_s(alone)[1] == finish_s(beside)[1]
    if arrives_s == 14_040.0 and fraction == 1.0:
        assert finish_s(alone)[1] == 14_050.0


def test_job_decided_within_a_round_starts_early_on_idle_gpus():
    work = workload([(0, 1, 500), (30, 1, 100)])
    early = run(work, cluster(1, 2), "fifo", round_s=120.0, decide_fraction=0.5)
    late = run(work, cluster(1, 2), "fifo", round_s=120.0, decide_fraction=0.5, early_launch=False)
    assert finish_s(early)[1] == 160
    assert finish_s(late)[1] == 220


def test_ended_lease_saves_and_leaves_before_the_next_job_launches():
    costs = Costs(launch_s=15.0, restart_s=15.0, exit_s=7.0)
    work = workload([(0, 1, 1_000), (10, 1, 50)])
    done = run(work, cluster(1, 1), "srtf", costs, round_s=120.0, decide_fraction=0.5)
    # decided at 60; the lease ends at 120, its GPU is free at 127; 15 s launch, 50 s of work, 7 s exit
    assert finish_s(done)[1] == 127 + 15 + 50 + 7
    # 120 − 15 s of work are done; at 180 the GPU is held until 199, so the next decision, at 300, resumes it
    assert finish_s(done)[0] == 300 + 15 + (1_000 - 105) + 7


@pytest.mark.parametrize(("stretch", "late_s"), [("none", 0.0), ("log", 10.0 * 0.6931471805599453), ("linear", 10.0)])
def test_round_waits_for_ended_leases(stretch, late_s):
    work = workload([(0, 1, 300), (10, 1, 50)])
    execution = {"round_s": 120.0, "decide_fraction": 0.5, "stretch": stretch, "stretch_s": 10.0}
    done = run(work, cluster(1, 1), "srtf", **execution, early_launch=False)
    assert finish_s(done)[1] == pytest.approx(120 + late_s + 50, abs=1e-5)


def test_job_that_ends_before_its_lease_does_is_not_stopped():
    work = workload([(0, 1, 100), (10, 1, 5)])
    done = run(work, cluster(1, 1), "srtf", round_s=120.0, decide_fraction=0.5)
    assert facts(done) == [(0, "start", 0), (100, "finish", 0), (100, "start", 1), (105, "finish", 1)]


def test_slots_that_an_end_frees_are_given_away_between_rounds():
    work = workload([(0, 1, 130.5), (10, 1, 50), (70, 1, 20)])
    kept = run(work, cluster(1, 1), "fifo", round_s=60.0)
    assert finish_s(kept).tolist() == [130.5, 230, 260]
    refilled = run(work, cluster(1, 1), "fifo", round_s=60.0, refill_s=1.0)
    assert facts(refilled) == [
        (0, "start", 0),
        (130.5, "finish", 0),
        (131, "start", 1),
        (181, "finish", 1),
        (181, "start", 2),
        (201, "finish", 2),
    ]


@pytest.mark.parametrize("policy", ["fifo", "las", "srtf"])
def test_refilled_rounds_obey_all_laws_and_keep_their_grid(policy):
    work = random_workload(seed=3, jobs=30)
    costs = Costs(launch_s=3.0, restart_s=5.0, exit_s=2.0)
    done = run(work, cluster(2, 4), policy, costs, round_s=60.0, refill_s=0.5)
    check(done)
    at = done.decisions.time_s
    assert all(now_s % 0.5 == 0 for now_s in at)
    assert any(now_s % 60 for now_s in at)
    # Refills lie between the rounds and do not move them: a decision at each, from the first job on to the last.
    assert set(range(60 * int(min(at) // 60 + 1), int(max(at)), 60)) <= set(at.tolist())


@pytest.mark.parametrize("odd", [{"decide_fraction": 0.5}, {"stretch": "log"}, {"start_delay_s": 5.0}])
def test_refill_asks_for_plain_ticks(odd):
    with pytest.raises(InputError, match="refill_s: decisions between rounds are carried out immediately"):
        ExecutionModel(round_s=60.0, refill_s=1.0, **odd)
