"""The log's own starts as a run beside those of policies."""

import numpy as np
import pytest
from small_runs import cluster, simulate, workload
from test_columns import compared

from synergy_runs.outputs.facts import AS_LOGGED, as_logged
from synergy_runs.outputs.metrics import job_table, summarise
from synergy_runs.outputs.notes import notes
from synergy_runs.outputs.report.write import write_comparison
from synergy_runs.outputs.stored import find_runs
from synergy_runs.outputs.tables import FIGURES, cells, verdict
from synergy_runs.traces.rows import RUNNING

pytestmark = pytest.mark.usefixtures("unpictured")


def logged_jobs(waits_s):
    """Three jobs of 10 s on one GPU, submitted at once, that waited so long in their log."""
    return workload([0, 0, 0], [10, 10, 10], [1, 1, 1]).with_columns(log_wait_s=np.array(waits_s, dtype=np.float64))


def test_waits_are_those_of_the_log():
    run = as_logged(logged_jobs([0, 15, 30]), cluster(1, 1), 0)
    table, summary = job_table(run), summarise(run)
    assert table.waiting_s.tolist() == [0, 15, 30]
    assert table.jct_s.tolist() == [10, 25, 40]
    assert (summary["mean_waiting_s"], summary["makespan_s"], summary["max_gpus_used"]) == (15, 40, 1)
    assert np.isnan(summary["fragmented_gpu_s"])


def test_gpus_that_one_job_frees_are_there_for_the_next_at_that_instant():
    assert summarise(as_logged(logged_jobs([0, 10, 20]), cluster(1, 1), 0))["max_gpus_used"] == 1
    at_once = logged_jobs([0, 0, 0]).with_columns(duration_s=np.array([0.0, 0.0, 10.0]))
    assert job_table(as_logged(at_once, cluster(1, 1), 0)).jct_s.tolist() == [0, 0, 10]


def test_a_log_that_does_not_say_when_each_job_started_has_no_such_run():
    assert as_logged(logged_jobs([0, np.nan, 5]), cluster(1, 1), 0) is None


def test_policies_are_compared_with_the_log_which_is_never_best(tmp_path):
    jobs = logged_jobs([0, 5, 10])  # on more GPUs than here
    comparison = compared(tmp_path, [simulate(jobs, cluster(1, 1)), as_logged(jobs, cluster(1, 1), 0)])
    logged, fifo = comparison.rows
    assert (logged.label, fifo.label) == ("as logged", "fifo")
    assert (logged.ratio.value, fifo.ratio.value) == (1.0, pytest.approx(20 / 15))
    assert cells(FIGURES[0], comparison.rows)[2] == [False, True]
    headline = verdict(comparison)
    assert "20.0 s" in headline  # fifo's mean JCT
    assert "33\N{NO-BREAK SPACE}% above the log" in headline


@pytest.mark.parametrize(("room_s", "is_compared"), [([0, 1, 2], True), ([0, 2, 2], False)])
def test_policies_are_not_compared_with_a_log_whose_waiting_passed_with_room(tmp_path, room_s, is_compared):
    jobs = logged_jobs([0, 5, 10]).with_columns(log_room_s=room_s)
    comparison = compared(tmp_path, [simulate(jobs, cluster(1, 1)), as_logged(jobs, cluster(1, 1), 0)])
    assert ("above the log" in verdict(comparison), "fair share" in verdict(comparison)) == (
        is_compared,
        not is_compared,
    )
    assert any("×" in line for line in notes(comparison)) == is_compared
    assert np.isfinite([row.ratio.value for row in comparison.rows]).tolist() == [True, is_compared]


def test_a_job_still_running_when_the_log_was_written_holds_gpus_and_is_in_no_job_metric():
    jobs = logged_jobs([0, 10, 20]).with_columns(end_state=[RUNNING, "completed", "completed"])
    for run in (simulate(jobs, cluster(1, 1)), as_logged(jobs, cluster(1, 1), 0)):
        summary = summarise(run)
        counts = [summary[key] for key in ("jobs", "jobs_measured", "jobs_running", "running_work_gpu_s")]
        assert (counts, summary["mean_waiting_s"], summary["service_gpu_s"]) == ([2, 2, 1, 10], 15, 30)


@pytest.mark.parametrize(
    ("waits_s", "told", "not_told"),
    [
        # On more GPUs than here: mean waits of 10 and 5 s; the jobs wait 0, 5 and 10 s longer.
        ([0, 5, 10], [("fifo 2.00×", "5 s"), ("2 GPUs were in use", "the 1 here")], "nothing"),
        ([0, 10, 15], [("fifo 1.",)], "half"),  # in the same order, one job 5 s sooner
    ],
)
def test_nearness_of_waits_to_the_log_is_told(tmp_path, waits_s, told, not_told):
    jobs = logged_jobs(waits_s)
    lines = notes(compared(tmp_path, [simulate(jobs, cluster(1, 1)), as_logged(jobs, cluster(1, 1), 0)]))
    for parts in told:
        (line,) = [line for line in lines if all(part in line for part in parts)]
        assert not_told not in line


def test_a_report_shows_the_log_beside_policies(tmp_path):
    jobs = logged_jobs([0, 10, 20])
    compared(tmp_path, [simulate(jobs, cluster(1, 1)), as_logged(jobs, cluster(1, 1), 0)])
    page = write_comparison(find_runs(tmp_path), tmp_path).read_text()
    assert "as logged" in page
    assert not (tmp_path / f"gantt-{AS_LOGGED}.png").exists()
