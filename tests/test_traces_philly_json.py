"""The Philly job log as released: attempts, what never ran, truncation, and equality with the CSV."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synergy_core.errors import InputError
from synergy_runs import workload
from synergy_runs.traces import read_trace
from synergy_runs.traces.philly_json import machine_list
from synergy_runs.traces.rows import END_STATES, TraceRows, epoch_s

START = "2017-10-07 01:00:00"
HOUR_LATER = "2017-10-07 02:00:00"


def attempt(start: str | None = START, end: str | None = HOUR_LATER, *gpus: int) -> dict[str, object]:
    detail = [{"ip": f"m{i}", "gpus": [f"gpu{k}" for k in range(count)]} for i, count in enumerate(gpus or (1,))]
    return {"start_time": start, "end_time": end, "detail": detail}


NUMBERS = count(1)


def job(*attempts: dict[str, object], **changes: object) -> dict[str, object]:
    return {
        "status": "Pass",
        "vc": "6214e9",
        "jobid": f"application_1_{next(NUMBERS)}",
        "attempts": list(attempts),
        "submitted_time": "2017-10-07 00:59:00",
        "user": "ce2f4c",
    } | changes


def read(
    folder: Path, *jobs: object, bad_rows: str = "stop", indent: int | None = 4, attempts: str = "apart"
) -> TraceRows:
    path = folder / "cluster_job_log"
    path.write_text(json.dumps(list(jobs), indent=indent))
    return read_trace(path, bad_rows=bad_rows, attempts=attempts)


def retried() -> dict[str, object]:
    first = attempt("2017-10-07 01:00:00", "2017-10-07 01:00:30", 8)
    last = attempt("2017-10-07 03:00:00", "2017-10-07 03:01:00", 8, 4)
    return job(first, last, status="Killed", jobid="application_9")


def test_attempts_are_runs_of_their_own_with_the_gap_between_them(tmp_path: Path) -> None:
    rows = read(tmp_path, retried())
    assert rows.format_name == "philly_json"
    assert rows.job_name == ["application_9#1", "application_9#2"]
    assert list(rows.submit_s) == [epoch_s("2017-10-07 00:59:00"), epoch_s("2017-10-07 03:00:00")]
    assert (list(rows.duration_s), list(rows.gpus), list(rows.attempt)) == ([30.0, 60.0], [8, 12], [1, 2])
    assert list(rows.retry_gap_s) == [7_170.0]
    assert [END_STATES[code] for code in rows.end_state] == ["failed", "killed"]
    assert rows.users.values() == ("ce2f4c",)
    assert list(rows.line) == [2, 2]
    assert rows.notes[0].startswith("1 further attempts of 1 jobs are submissions of their own")


def test_what_ran_before_an_attempt_that_still_runs_is_kept_apart_and_dropped_merged(tmp_path: Path) -> None:
    running = job(attempt(), attempt(HOUR_LATER, None))
    rows = read(tmp_path, running, job(attempt()))
    assert (len(rows), list(rows.left_out.values())) == (2, [1])
    assert END_STATES[rows.end_state[0]] == "failed"
    assert len(read(tmp_path, running, job(attempt()), attempts="merged")) == 1


@pytest.mark.parametrize("indent", [4, None])
def test_two_jobs_under_one_id_are_refused_with_both_lines(tmp_path: Path, indent: int | None) -> None:
    twice = [job(attempt(), jobid="application_9") for _ in range(2)]
    second = 1 if indent is None else 2 + len(json.dumps(twice[:1], indent=4).splitlines()) - 2
    with pytest.raises(InputError, match=rf"line {second}, jobid: got 'application_9', which line \d has too"):
        read(tmp_path, *twice, indent=indent)


@pytest.mark.parametrize(
    ("unusual", "reason"),
    [
        (job(), "never ran: no attempts"),
        (job(attempts=None), "never ran: no attempts"),
        (job(attempt(None, None)), "never ran: no attempt has both times"),
        (job(attempt("None", "None")), "never ran: no attempt has both times"),
        (job(attempt(None, HOUR_LATER)), "never ran: no attempt has both times"),
        (job(attempt(HOUR_LATER, None)), "still running at the snapshot"),
        (job(attempt(), submitted_time=None), "no submission time recorded"),
        (job({"start_time": START, "end_time": HOUR_LATER, "detail": []}), "held no GPU"),
    ],
)
def test_what_the_release_documents_is_left_out_and_counted(
    tmp_path: Path, unusual: dict[str, object], reason: str
) -> None:
    rows = read(tmp_path, unusual, job(attempt()))
    assert len(rows) == 1
    assert rows.bad_count == 0
    assert list(rows.left_out.values()) == [1]
    assert next(iter(rows.left_out)).startswith(reason)


def test_an_attempt_without_an_end_is_noted_when_a_later_one_ran_and_its_stamp_need_not_be_readable(
    tmp_path: Path,
) -> None:
    rows = read(tmp_path, job(attempt("garbled", None, 8), attempt(START, HOUR_LATER, 2)))
    assert (rows.duration_s[0], rows.gpus[0]) == (3_600, 2)
    assert rows.notes == ["1 attempts with only one of their two times: not counted in the run time"]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (job(attempt(HOUR_LATER, START)), "attempts\\[0\\].end_time: got .*3600 s before its start"),
        (job(attempt("soon", HOUR_LATER)), "attempts\\[0\\].start_time: got 'soon', expected a date"),
        (job(attempt(), submitted_time="never"), "submitted_time: got 'never'"),
        (job(attempt(), status="Vanished"), "status: got 'Vanished'"),
        (job(attempt(), jobid=None), "jobid: got None"),
        (job(attempts="many"), "attempts: got 'many', expected a list"),
        (job({"start_time": START, "end_time": HOUR_LATER, "detail": [{"gpus": 8}]}), "detail.gpus: got 8"),
        ({"jobid": "a", "attempts": [attempt()]}, "submitted_time: got nothing"),
        (17, "whole job: got 17"),
    ],
)
def test_an_impossible_job_is_named_with_the_line_its_object_starts_on(
    tmp_path: Path, bad: object, message: str
) -> None:
    good = job(attempt())
    line = 1 + len(json.dumps([good], indent=4).splitlines()) - 1
    with pytest.raises(InputError, match=f"line {line}, {message}"):
        read(tmp_path, good, bad)
    rows = read(tmp_path, good, bad, job(attempt()), bad_rows="skip")
    assert (len(rows), rows.bad_count) == (2, 1)


def test_a_log_cut_off_anywhere_is_an_error_that_names_a_line(tmp_path: Path) -> None:
    whole = json.dumps([job(attempt()), job(attempt())], indent=1)
    path = tmp_path / "cluster_job_log"
    for end in range(2, len(whole) - 1, 11):
        path.write_text(whole[:end])
        with pytest.raises(InputError, match=r"ends inside the list; the last object starts on line \d+"):
            read_trace(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"jobid": 1,,}]' + " " * 99, "line 1: Expecting property name"),
        ('[\n{"jobid": "a"}\n{"jobid": "b"}]', "line 3: got '{\"jobid\": \"b\"}]', expected ',' or ']'"),
        ('[{"jobid": "a"}]\nmore', "line 2: got 'more', expected nothing after the end"),
        ("[" * 200_000, "nested too deeply"),
        ("[]", "no job to replay"),
        ("jobid,vc\n", "expected a JSON list"),
    ],
)
def test_what_is_no_json_list_of_jobs_is_an_error(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "cluster_job_log"
    path.write_text(text)
    with pytest.raises(InputError) as error:
        read_trace(path, bad_rows="skip")
    assert message in str(error.value)


def test_the_machines_beside_the_log_are_grouped_and_noted(tmp_path: Path) -> None:
    beside = tmp_path / "cluster_machine_list"
    beside.write_text("machineId,number of GPUs,single GPU mem\nm1,8, 24GB\nm2,2, 12GB\nm3,8, 24GB\n")
    assert machine_list(beside) == {(8, "24GB"): 2, (2, "12GB"): 1}
    rows = read(tmp_path, job(attempt()))
    assert rows.notes == ["machines of cluster_machine_list: 2 × 8 GPUs of 24GB, 1 × 2 GPUs of 12GB"]
    beside.write_text("machineId,number of GPUs,single GPU mem\nm1,many,24GB\n")
    with pytest.raises(InputError, match="line 2, number of GPUs: got 'many'"):
        machine_list(beside)


minutes = st.integers(0, 300)
microseconds = st.integers(0, 10**10)
csv_rows = st.lists(st.tuples(minutes, microseconds, st.integers(1, 16), st.sampled_from(["6214e9", "103959"])))


@settings(max_examples=50)
@given(jobs=csv_rows.filter(bool))
def test_the_same_log_as_csv_and_as_json_is_the_same_workload(
    tmp_path_factory: pytest.TempPathFactory, jobs: list[tuple[int, int, int, str]]
) -> None:
    folder = tmp_path_factory.mktemp("both")
    lines, objects = ["timestamp,duration,num_gpus,gpu_time,cluster"], []
    for minute, micro, gpus, vc in jobs:
        start = datetime(2017, 11, 5) + timedelta(minutes=minute)
        seconds = micro / 1e6
        lines.append(f"{start},{seconds!r},{gpus},{seconds * gpus!r},{vc}")
        ran = attempt(str(start), str(start + timedelta(microseconds=micro)), gpus)
        objects.append(job(ran, vc=vc, submitted_time=str(start)))
    (folder / "philly.csv").write_text("\n".join(lines) + "\n")
    a = workload.from_rows(read_trace(folder / "philly.csv"), name="philly")
    b = workload.from_rows(read(folder, *objects), name="philly")
    for column in ("submit_time_s", "duration_s", "gpus", "virtual_cluster_code"):
        assert np.array_equal(getattr(a, column), getattr(b, column)), column
    assert a.virtual_clusters == b.virtual_clusters
    # Ties stay in file order.
    in_csv, in_json = np.argsort(np.argsort(a.line)), np.argsort(np.argsort(b.line))
    assert np.array_equal(in_csv, in_json)
