"""A wait is all time without GPUs; the time to the first start is another figure."""

import numpy as np
import pytest
from jobs import RIGID, cluster, random_workload, workload

from synergy_core.errors import InputError
from synergy_core.scheduling.policies import get_policy
from synergy_runs.outputs.facts import integral, waiting_jobs
from synergy_runs.outputs.invariants import check
from synergy_runs.outputs.metrics import job_table, summarise
from synergy_runs.outputs.results import write_run
from synergy_runs.outputs.stored import find_runs
from synergy_sim.execution import Costs, ExecutionModel
from synergy_sim.simulate import simulate

FREE = ExecutionModel(Costs(restart_s=0.0))
EXECUTION = {
    "at-once": FREE,
    "restarts": ExecutionModel(Costs(launch_s=15.0, restart_s=30.0, exit_s=7.0)),
    "rounds": ExecutionModel(Costs(15.0, 15.0, 7.0), round_s=119.7, decide_fraction=0.4, stretch="log", stretch_s=6.3),
}


@pytest.fixture(params=["srtf", "las", "tiresias"])
def displaced(request):
    """One GPU: job 0 starts at once, is stopped at 5,000 s for job 1, which takes 100 s, and goes on after it."""
    work = workload([(0, 1, 10_000), (5_000, 1, 100)], tenants=["a", "b"])
    return simulate(work, cluster(1, 1), get_policy(request.param), FREE)


def test_job_that_starts_at_once_and_is_stopped_later_has_waited(displaced):
    jobs = job_table(displaced)
    assert jobs.queueing_delay_s.tolist() == [0, 0]
    assert jobs.waiting_s.tolist() == [100, 0]
    summary = summarise(displaced)
    assert summary["mean_waiting_s"] == 50
    assert summary["p99_waiting_s"] == 99
    assert summary["mean_waiting_s_by_size"]["1"] == 50
    assert summary["mean_waiting_s_by_virtual_cluster"] == {"a": 100, "b": 0}
    assert summary["mean_queueing_delay_s"] == 0


def test_result_of_an_older_version_says_which_column_it_lacks(displaced, tmp_path):
    import pyarrow.parquet as pq

    write_run(displaced, tmp_path / "run", "")
    path = tmp_path / "run" / "jobs.parquet"
    pq.write_table(pq.read_table(path).drop_columns(["waiting_s"]), path)
    with pytest.raises(InputError, match=r"has no waiting_s: another version wrote it\. Run that policy again"):
        find_runs(tmp_path)[0].jobs("waiting_s")


@pytest.mark.parametrize("execution", EXECUTION)
@pytest.mark.parametrize("policy", RIGID)
def test_waits_add_up_to_the_queue_over_time(policy, execution):
    run = simulate(random_workload(5, 120), cluster(4), get_policy(policy), EXECUTION[execution])
    check(run)
    jobs = job_table(run)
    queue_s, queue = waiting_jobs(run.events)
    assert jobs.waiting_s.sum() == integral(queue_s, queue, queue_s[-1:])[0] > 0
    assert np.all(jobs.waiting_s >= jobs.queueing_delay_s)
