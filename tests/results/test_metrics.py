import dataclasses

import numpy as np
import pytest
from small_runs import cluster, simulate, workload

from synergy_runs.outputs.facts import EventLog, Kind, binned_mean, gpus_in_use, integral, waiting_jobs
from synergy_runs.outputs.invariants import InvariantError, check
from synergy_runs.outputs.metrics import job_table, mean_contention, size_class, summarise


@pytest.fixture(scope="module")
def two_jobs():
    """One GPU; job 0 runs 0–10, job 1 comes at 4, waits 6, runs 10–30."""
    jobs = workload([0, 4], [10, 20], [1, 1], tenants=[0, 1], end_state=[0, 1])
    return simulate(jobs, cluster(1, 1), predicted_s=np.array([11.0, 10.0]))


def test_two_jobs_on_one_gpu_by_hand(two_jobs):
    jobs = job_table(two_jobs)
    assert jobs.jct_s.tolist() == [10, 26]
    assert jobs.queueing_delay_s.tolist() == [0, 6]
    assert jobs.service_gpu_s.tolist() == [10, 20]
    # Job 0 shares the cluster for 6 of its 10 s; job 1 for 6 of its 26 s.
    assert jobs.mean_contention == pytest.approx([1.6, 32 / 26])
    assert jobs.finish_time_fairness == pytest.approx([10 / (10 * 1.6), 26 / (20 * 32 / 26)])


def test_summary_of_two_jobs_by_hand(two_jobs):
    expected = {
        "mean_jct_s": 18, "p50_jct_s": 18, "p90_jct_s": 24.4, "makespan_s": 30, "mean_queueing_delay_s": 3,
        "gpu_utilisation_fraction": 1.0,  # from 0 to 4 s
        "max_waiting_s": 6, "max_restarts": 0,
        "service_gpu_s": 30, "work_gpu_s": 30, "max_queue_jobs": 1, "mean_queue_jobs": 6 / 30,
        "prediction_median_absolute_percentage_error": 30, "prediction_spearman": -1, "unfair_fraction": 0.5,
    }  # fmt: skip
    summary = summarise(two_jobs)
    assert {name: summary[name] for name in expected} == pytest.approx(expected)
    assert summary["mean_jct_s_by_virtual_cluster"] == {"vc1": 10, "vc2": 26}
    assert summary["mean_jct_s_by_end_state"]["killed"] == 26
    assert summary["jobs_by_end_state"] == {"completed": 1, "killed": 1, "failed": 0}


def test_demand_counts_jobs_as_if_none_waited():
    """One of two GPUs is asked for all seven days, and both on the third and fourth; the last job ends the window."""
    day_s = 86_400.0
    jobs = workload([0, 2 * day_s, 6.5 * day_s], [9 * day_s, 2 * day_s, 1], [1, 1, 1])
    summary = summarise(simulate(jobs, cluster(1, 2)))
    assert summary["demand_part_s"] == day_s
    assert summary["demand_fractions"] == pytest.approx([0.5, 0.5, 1.0, 1.0, 0.5, 0.5, 0.5])


def test_preempted_job_counts_its_stops_and_restarts_and_their_cost():
    jobs = workload([0, 0], [100, 100], [1, 1])
    run = simulate(jobs, cluster(1, 1), quantum_s=60, restart_s=5)
    check(run)
    summary = summarise(run)
    assert summary["preemptions"] == 2
    assert summary["restarts_per_job"] == summary["max_restarts"] == 1
    assert summary["service_gpu_s"] == summary["work_gpu_s"] + 10


def test_job_of_no_length_has_no_fairness_and_a_single_one_no_arrival_window():
    run = simulate(workload([0, 1], [0, 5], [1, 1]), cluster(1, 1))
    check(run)
    jobs, summary = job_table(run), summarise(run)
    assert np.isnan(jobs.finish_time_fairness[0])
    assert (summary["mean_finish_time_fairness"], summary["mean_jct_s"]) == (1.0, 2.5)
    summary = summarise(simulate(workload([0], [5], [1]), cluster(1, 1)))
    assert np.isnan(summary["gpu_utilisation_fraction"])
    assert summary["mean_jct_s"] == 5


def test_cut_run_leaves_unfinished_jobs_unknown():
    log = EventLog()
    log.append(0.0, Kind.SUBMIT, 0, 1)
    log.start(0.0, 0, 1, [(0, 1)])
    log.append(4.0, Kind.SUBMIT, 1, 1)
    whole = simulate(workload([0, 4, 9], [10, 20, 5], [1, 1, 1]), cluster(1, 1))
    run = dataclasses.replace(whole, events=log.events())
    check(run, whole=False)
    with pytest.raises(InvariantError, match="1 jobs are not in the log"):
        check(run)
    jobs, summary = job_table(run), summarise(run)
    assert np.isnan(jobs.jct_s).all()
    assert jobs.service_gpu_s.tolist() == [4, 0, 0]
    assert jobs.queueing_delay_s[0] == 0
    assert np.isnan(jobs.queueing_delay_s[1:]).all()
    assert summary["jobs_unfinished"] == 3


def test_contention_agrees_with_counting_by_hand():
    random = np.random.default_rng(1)
    submit_s = np.sort(random.integers(0, 50, 30)).astype(float)
    finish_s = submit_s + random.integers(1, 40, 30)
    grid = np.arange(0, 100, 1.0)
    active = ((submit_s[:, None] <= grid) & (grid < finish_s[:, None])).sum(axis=0)
    expected = [active[(grid >= a) & (grid < b)].mean() for a, b in zip(submit_s, finish_s, strict=True)]
    assert mean_contention(submit_s, finish_s, 100.0) == pytest.approx(expected)


def test_small_size_classes_are_where_the_page_says():
    assert size_class(np.array([1, 2, 4, 5, 8, 9, 256])).tolist() == [0, 1, 1, 2, 2, 3, 3]


def test_time_series_of_two_jobs(two_jobs):
    time_s, used = gpus_in_use(two_jobs.events)
    assert time_s.tolist() == [0, 4, 10, 30]
    assert used.tolist() == [1, 1, 1, 0]
    queue_s, queue = waiting_jobs(two_jobs.events)
    assert queue.tolist() == [0, 1, 0, 0]
    assert binned_mean(queue_s, queue, np.array([0.0, 8.0, 16.0])).tolist() == [0.5, 0.25]
    assert integral(queue_s, queue, np.array([40.0])).tolist() == [6]


def _with(run, **columns):
    return dataclasses.replace(run, events=dataclasses.replace(run.events, **columns))


def _changed(column, row, value):
    changed = column.copy()
    changed[row] = value
    return changed


@pytest.mark.parametrize(
    ("column", "row", "value", "words"),
    [
        ("time_s", 2, 99.0, "follows an event"),
        ("kind", 1, Kind.FINISH, "finish at 0.0 s follows submit"),
        ("job_id", 0, 7, "names job 7"),
        ("gpu_mask", 1, 2, "does not have"),
        ("node", 1, 3, "outside"),
        ("gpu_mask", 1, 0, "masks of 0"),
        ("time_s", 0, -1.0, "submitted at 0.0 s, begins"),
    ],
)
def test_check_says_what_is_wrong(two_jobs, column, row, value, words):
    broken = _with(two_jobs, **{column: _changed(getattr(two_jobs.events, column), row, value)})
    with pytest.raises(InvariantError, match=words):
        check(broken)


def test_check_finds_two_jobs_on_one_gpu_and_a_full_cluster():
    jobs = workload([0, 0], [10, 10], [1, 1])
    run = simulate(jobs, cluster(1, 2))
    second = np.flatnonzero(run.events.kind == Kind.START)[1]
    with pytest.raises(InvariantError, match=r"node 0, GPU 0: job 1 starts at 0.0 s while job 0 holds it"):
        check(_with(run, gpu_mask=_changed(run.events.gpu_mask, second, 1)))
    with pytest.raises(InvariantError, match=r"2 GPUs in use at 0.0 s; the cluster has 1"):
        check(dataclasses.replace(run, cluster=cluster(1, 1)))


def test_check_finds_a_tenant_above_its_quota():
    jobs = workload([0, 0], [10, 10], [2, 2], tenants=[0, 1])
    run = simulate(jobs, cluster(1, 8))
    check(dataclasses.replace(run, cluster=cluster(1, 8, virtual_clusters={"vc1": 2, "vc2": 2})))
    with pytest.raises(InvariantError, match="vc2 holds 2 GPUs at once; its quota is 1"):
        check(dataclasses.replace(run, cluster=cluster(1, 8, virtual_clusters={"vc1": 2, "vc2": 1})))
