"""What a job went through, from stored facts: by hand, and conserved against the job table."""

from dataclasses import replace

import numpy as np
import pytest
from small_runs import cluster, drawn_workload, simulate, workload

from synergy_core.errors import InputError
from synergy_core.scheduling.decisions.reasons import Stopped
from synergy_runs.outputs.facts import Holdings, Kind, Training, as_logged, batches_in
from synergy_runs.outputs.history import compared, history_of, parting_s
from synergy_runs.outputs.results import write_run
from synergy_runs.outputs.stored import read_run


def stored(folder, run, name="run"):
    write_run(run, folder / name, "")
    return folder / name


def test_stretches_of_all_jobs_add_up_to_what_the_job_table_says(tmp_path):
    folder = stored(tmp_path, simulate(drawn_workload(60), cluster(2), quantum_s=900.0))
    jobs = read_run(folder).jobs("service_gpu_s", "waiting_s", "jct_s", "preemptions")
    for job in range(60):
        history = history_of(folder, str(job))
        assert sum(each.lasted_s * each.gpus for each in history.runs) == jobs["service_gpu_s"][job]
        assert sum(each.lasted_s for each in history.waits) == pytest.approx(jobs["waiting_s"][job])
        assert len(history.runs) == jobs["preemptions"][job] + 1
        ends = [history.submit_s, *(each.end_s for each in history.stretches)]
        assert [each.start_s for each in history.stretches] == ends[:-1]
        assert ends[-1] == history.finish_s == history.submit_s + jobs["jct_s"][job]


def test_batches_are_the_first_and_the_last_of_each_interval():
    columns = ([0, 1, 0], [2, 4, 3], [0.0, 5.0, 20.0], [10.0, 15.0, 40.0], [0, 1, 2], [3, 4, 5])
    held = Holdings(*map(np.array, columns))
    # Job 0 changes its batch twice in its first interval; a change at an interval's end belongs to none. Job 1 was
    # stopped before its first step.
    time_s, batch = np.array([1.0, 4.0, 8.0, 10.0, 25.0, 15.0]), np.array([32, 64, 128, 8, 16, 256])
    training = Training(time_s, np.array([0, 0, 0, 0, 0, 1]), batch, np.zeros(6, dtype=int), ("",))
    assert [each.tolist() for each in batches_in(held, training)] == [[32, 0, 16], [128, 0, 16]]
    assert [each.tolist() for each in batches_in(held, None)] == [[0, 0, 0], [0, 0, 0]]


def test_batch_and_reason_are_read_back_from_the_files(tmp_path):
    run = simulate(workload([0, 5], [100, 10], [8, 8]), cluster(1), quantum_s=90.0)
    facts = run.events
    reason = np.where(facts.kind == Kind.STOP, Stopped.OUTRANKED, 0).astype(np.uint8)
    code = np.zeros(3, dtype=np.int32)
    training = Training(np.array([0.0, 10.0, 101.0]), code, np.array([64, 96, 128], dtype=np.int32), code, ("",))
    history = history_of(stored(tmp_path, replace(run, events=replace(facts, reason=reason), training=training)), "0")
    first, wait, last = history.stretches
    assert (first.first_batch, first.last_batch, first.reason) == (64, 96, Stopped.OUTRANKED)
    assert (wait.gpus, wait.words) == (0, "")
    assert (last.first_batch, last.last_batch, last.reason) == (128, 128, None)
    assert [at_s for at_s, _ in history.worth_asking()] == [95.0, 90.0]  # within the wait, and when it was stopped


def test_schedule_of_the_log_has_a_history_without_nodes_and_nothing_to_ask(tmp_path):
    jobs = workload([0, 5], [100, 10], [1, 2]).with_columns(log_wait_s=np.array([0.0, 7.0]))
    history = history_of(stored(tmp_path, as_logged(jobs, cluster(1), 0)), "1")
    assert [(each.start_s, each.end_s, each.gpus) for each in history.stretches] == [(5.0, 12.0, 0), (12.0, 22.0, 2)]
    assert history.runs[0].words == "2 GPUs"
    assert "--at" not in history.text()


def test_two_runs_part_at_the_first_instant_of_another_treatment(tmp_path):
    jobs = workload([0, 5], [100, 10], [8, 8])
    stays, turns = (
        stored(tmp_path, simulate(jobs, cluster(1), policy=name, quantum_s=quantum_s), name)
        for name, quantum_s in (("stays", float("inf")), ("turns", 20.0))
    )
    long = [history_of(each, "0") for each in (stays, turns)]
    assert parting_s(*long) == 20.0
    assert parting_s(long[0], long[0]) is None
    assert [each.at(20.0) is not None and each.at(20.0).gpus for each in long] == [8, 0]
    wider = stored(tmp_path, simulate(jobs, cluster(1, 16)), "wider")
    assert parting_s(history_of(stays, "1"), history_of(wider, "1")) == 5.0


def test_runs_of_other_jobs_are_not_compared(tmp_path):
    one, other = (
        history_of(stored(tmp_path, simulate(workload([at], [9], [1]), cluster(1)), f"{at}"), "0") for at in (0, 3)
    )
    with pytest.raises(InputError, match="expected two runs of the same jobs"):
        compared(one, other)


def test_long_history_is_cut_in_the_middle_and_says_so(tmp_path):
    run = simulate(workload([0, 0], [3_000, 3_000], [8, 8]), cluster(1), quantum_s=20.0)
    history = history_of(stored(tmp_path, run), "0")
    assert len(history.stretches) > 200
    lines = history.text().splitlines()
    assert len(lines) < 80
    assert any("--json" in line for line in lines)
