"""Figures over some of the jobs: which, what they are of, and that tables and stored columns say so."""

import dataclasses

import numpy as np
import pytest
from small_runs import cluster, drawn_workload, policies, simulate

from synergy_core.errors import InputError
from synergy_runs.inputs.workload import with_measured
from synergy_runs.outputs.comparison import compare
from synergy_runs.outputs.metrics import SIZE_CLASSES, size_class, summarise
from synergy_runs.outputs.results import write_run
from synergy_runs.outputs.stored import find_runs
from synergy_runs.outputs.tables import caption

IDS = slice(100, 151)


@pytest.fixture(scope="module")
def runs():
    """(all measured, 51 measured) of one schedule."""
    jobs = drawn_workload(400)
    return [simulate(with_measured(jobs, ids), cluster(2)) for ids in (None, "100-150")]


@pytest.fixture(scope="module")
def stored(runs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stored")
    for name, run in zip(("all", "some"), runs, strict=True):
        write_run(dataclasses.replace(run, policy=name), folder / name, "")
    return {run.policy: run for run in find_runs(folder)}


def test_figures_of_jobs_are_over_the_measured_ones(runs, stored):
    whole, some = (summarise(run) for run in runs)
    jobs = stored["all"].jobs("jct_s", "waiting_s", "queueing_delay_s", "finish_time_fairness", "gpus")
    jct_s = jobs["jct_s"][IDS]
    assert some["mean_jct_s"] == pytest.approx(jct_s.mean())
    for percent, key in ((50, "p50_jct_s"), (99, "p99_jct_s"), (99.9, "p999_jct_s")):
        assert some[key] == pytest.approx(np.percentile(jct_s, percent))
        assert whole[key] == pytest.approx(np.percentile(jobs["jct_s"], percent))
    assert some["mean_waiting_s"] == pytest.approx(jobs["waiting_s"][IDS].mean())
    assert some["p99_queueing_delay_s"] == pytest.approx(np.percentile(jobs["queueing_delay_s"][IDS], 99))
    assert some["unfair_fraction"] == pytest.approx((jobs["finish_time_fairness"][IDS] > 1).mean())
    size = size_class(jobs["gpus"][IDS])
    for at, name in enumerate(SIZE_CLASSES):
        assert some["mean_jct_s_by_size"][name] == pytest.approx(jct_s[size == at].mean())
    assert whole["mean_jct_s"] != pytest.approx(some["mean_jct_s"])


OF_WHOLE_RUNS = (
    *("jobs", "jobs_by_size", "jobs_by_virtual_cluster", "jobs_by_end_state", "jobs_unfinished", "jobs_failed"),
    *("offered_load_fraction", "demand_fractions", "carried_work_gpu_s", "running_work_gpu_s", "work_gpu_s"),
    *("makespan_s", "run_time_ratio", "log_room_fraction", "service_gpu_s", "lost_gpu_s", "fragmented_gpu_s"),
    *("gpu_utilisation_fraction", "cpu_utilisation_fraction", "memory_utilisation_fraction", "max_gpus_used"),
    *("preemptions", "restarts_per_job", "max_restarts", "split_starts_fraction"),
    *("max_queue_jobs", "mean_queue_jobs", "overloaded", "queue_growth_fraction", "late_queue_fraction"),
    *("decisions", "event_log_sha256", "quotas", "node_types", "gpus"),
)
"""Figures that do not depend on which jobs are measured."""


def test_what_is_of_the_whole_run_stays(runs):
    whole, some = (summarise(run) for run in runs)
    assert [key for key in OF_WHOLE_RUNS if not _same(whole[key], some[key])] == []
    assert (whole["jobs_measured"], whole["measured_job_ids"]) == (400, None)
    assert (some["jobs_measured"], some["measured_job_ids"], some["jobs"]) == (51, "100-150", 400)


def _same(one, other):
    return one == other or (one != one and other != other)


def test_all_jobs_are_stored_with_which_are_measured(stored):
    whole, some = (stored[name].jobs("jct_s", "measured") for name in ("all", "some"))
    assert whole["measured"].all()
    assert np.flatnonzero(some["measured"]).tolist() == list(range(100, 151))
    assert (whole["jct_s"] == some["jct_s"]).all()
    assert np.isfinite(stored["some"].measured("jct_s")).tolist() == some["measured"].tolist()


def test_ratios_and_the_line_above_the_table_are_of_measured_jobs(tmp_path, stored):
    jobs = with_measured(drawn_workload(400), "100-150")
    for run in policies(jobs, cluster(2)):
        write_run(run, tmp_path / run.policy, f"policy: {run.policy}\ncompared_with: [fifo, sjf]\n")
    comparison = compare(find_runs(tmp_path))
    assert caption(comparison).endswith("· figures over jobs 100–150 of 400")
    assert "figures over" not in caption(compare([stored["all"]]))
    for row in comparison.rows:
        first_s = comparison.rows[0].mean("mean_jct_s")
        assert row.ratio.value == pytest.approx(row.mean("mean_jct_s") / first_s)
        assert row.mean("mean_jct_s") == pytest.approx(row.runs[0].jobs("jct_s")["jct_s"][IDS].mean())


def test_a_carried_job_is_not_measured():
    jobs = drawn_workload(20)
    carried = jobs.with_columns(carried=np.arange(20) < 3)
    summary = summarise(simulate(with_measured(carried, "0-9"), cluster(2)))
    assert (summary["jobs_measured"], summary["measured_job_ids"]) == (7, "0-9")


def test_ids_are_a_range_or_one():
    rows = {"0-19": 20, "17": 1, "3 – 5": 3, None: 20}
    assert {ids: with_measured(drawn_workload(20), ids).jobs["measured"].sum() for ids in rows} == rows


@pytest.mark.parametrize("ids", ["0-20", "20", "7-5", "-3", "all", "", "1-2-3"])
def test_ids_that_no_job_has_are_refused(ids):
    with pytest.raises(InputError, match=r"trace\.measured_jobs=.*expected ids from 0 to 19, such as 0-19; null"):
        with_measured(drawn_workload(20), ids)
