"""Where `srtf*` is a bound on mean JCT, and where it is none: the cases of docs/metrics.md, simulated."""

import itertools

import numpy as np
import pytest
from jobs import cluster, workload

from synergy_core.scheduling.policies import get_policy
from synergy_runs.outputs.metrics import job_table
from synergy_sim.execution import Costs, ExecutionModel
from synergy_sim.simulate import simulate

ORDERS = ("fifo", "backfill", "sjf", "las", "tiresias", "mlfq", "qssf", "themis")


def jcts_s(policy, jobs, gpus):
    """The sum of JCTs where restarts cost nothing; jobs as (submission, GPUs, duration)."""
    free = ExecutionModel(costs=Costs(restart_s=0.0))
    return job_table(simulate(workload(jobs), cluster(1, gpus), get_policy(policy), free)).jct_s.sum()


@pytest.mark.parametrize("seed", range(4))
def test_where_jobs_run_one_at_a_time_no_order_is_below_it(seed):
    random = np.random.default_rng(seed)
    jobs = [(float(at), 2, float(random.integers(1, 90))) for at in np.sort(random.integers(0, 200, 12))]
    bound = jcts_s("srtf", jobs, gpus=2)
    assert all(bound <= jcts_s(policy, jobs, gpus=2) for policy in ORDERS)


@pytest.mark.parametrize("seed", range(4))
def test_of_jobs_alike_in_gpus_and_submitted_at_once_no_list_is_below_it(seed):
    durations = np.random.default_rng(seed).integers(1, 30, 6).astype(float)
    bound = jcts_s("srtf", [(0.0, 2, duration) for duration in durations], gpus=4)

    def total(order):
        free = [0.0, 0.0]
        ends = []
        for duration in order:
            free.sort()
            free[0] += duration
            ends.append(free[0])
        return sum(ends)

    assert bound == min(total(order) for order in itertools.permutations(durations))


def test_with_arrivals_on_two_gpus_order_of_submission_is_below_it():
    jobs = [(0.0, 1, 2.0), (0.0, 1, 1.0), (0.0, 1, 1.0), (2.0, 1, 1.0), (2.0, 1, 1.0)]
    assert (jcts_s("srtf", jobs, gpus=2), jcts_s("fifo", jobs, gpus=2)) == (8.0, 7.0)


def test_with_gangs_narrow_jobs_first_is_below_it():
    jobs = [(0.0, 1, 1.5), (0.0, 1, 1.5), (0.0, 2, 1.0)]
    assert (jcts_s("srtf", jobs, gpus=2), jcts_s("fifo", jobs, gpus=2)) == (6.0, 5.5)
