"""What `sacct --parsable2` prints."""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synergy_core.errors import InputError
from synergy_runs.traces import read_trace
from synergy_runs.traces._slurm_values import elapsed_s, gpus, limit_s
from synergy_runs.traces._values import BadValueError
from synergy_runs.traces.rows import END_STATES, TraceRows
from synergy_runs.traces.times import epoch_s

USUAL = {
    "JobID": "123",
    "JobName": "train",
    "User": "ann",
    "Account": "vision",
    "Partition": "gpu",
    "State": "COMPLETED",
    "Submit": "2024-01-01T00:00:00",
    "Start": "2024-01-01T00:01:00",
    "End": "2024-01-01T01:01:00",
    "Elapsed": "01:00:00",
    "Timelimit": "2-00:00:00",
    "AllocTRES": "billing=8,cpu=8,gres/gpu:a100=4,gres/gpu=4,mem=64G,node=1",
    "ReqTRES": "billing=8,cpu=8,gres/gpu=4,mem=64G,node=1",
}
COLUMNS = tuple(USUAL)


def read(folder: Path, *rows: dict[str, str], without: tuple[str, ...] = (), bad_rows: str = "stop") -> TraceRows:
    columns = [name for name in dict.fromkeys((*COLUMNS, *(key for row in rows for key in row))) if name not in without]
    lines = ["|".join(columns)] + ["|".join((USUAL | row).get(name, "") for name in columns) for row in rows]
    path = folder / "jobs.txt"
    path.write_text("\n".join(lines) + "\n")
    return read_trace(path, bad_rows=bad_rows)


def test_a_usual_row_gives_every_column(tmp_path: Path) -> None:
    rows = read(tmp_path, {})
    assert rows.format_name == "slurm"
    assert (rows.submit_s[0], rows.duration_s[0], rows.gpus[0]) == (epoch_s("2024-01-01"), 3_600, 4)
    assert (rows.job_name, rows.users.values(), rows.virtual_clusters.values()) == (["123"], ("ann",), ("vision",))
    assert (rows.estimate_s[0], rows.gpu_types.values()) == (172_800, ("a100",))


@pytest.mark.parametrize(
    ("state", "end_state"),
    [
        ("COMPLETED", "completed"),
        ("CANCELLED by 1000", "killed"),
        ("CANCELLED+", "killed"),
        ("PREEMPTED", "killed"),
        ("FAILED", "failed"),
        ("TIMEOUT", "failed"),
        ("OUT_OF_MEMORY", "failed"),
        ("NODE_FAIL", "failed"),
        ("DEADLINE", "failed"),
        ("BOOT_FAIL", "failed"),
    ],
)
def test_states_of_jobs_that_ran(tmp_path: Path, state: str, end_state: str) -> None:
    assert END_STATES[read(tmp_path, {"State": state}).end_state[0]] == end_state


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"JobID": "123.batch"}, "job steps (.batch, .extern, .0)"),
        ({"JobID": "123_4.0"}, "job steps (.batch, .extern, .0)"),
        ({"JobID": "124", "State": "RUNNING", "End": "Unknown"}, "still running when the log was written"),
        (
            {"JobID": "123_[5-9]", "State": "PENDING", "Start": "Unknown", "End": "Unknown", "Elapsed": "00:00:00"},
            "still waiting when the log was written",
        ),
        ({"JobID": "124", "State": "CANCELLED by 0", "Start": "None", "Elapsed": "00:00:00"}, "never started"),
        ({"JobID": "124", "State": "CANCELLED", "Start": "Unknown", "AllocTRES": ""}, "never started"),
        ({"JobID": "124", "AllocTRES": "cpu=8,gres/gpumem=0", "ReqTRES": "cpu=8"}, "no GPU in AllocTRES or ReqTRES"),
    ],
)
def test_what_is_left_out_is_counted_with_its_reason(tmp_path: Path, row: dict[str, str], reason: str) -> None:
    rows = read(tmp_path, {}, row)
    assert len(rows) == 1
    assert dict(rows.left_out) == {reason: 1}


def test_array_tasks_are_jobs_of_their_own(tmp_path: Path) -> None:
    assert read(tmp_path, {"JobID": "123_4"}, {"JobID": "123_5"}).job_name == ["123_4", "123_5"]


def test_requeued_attempts_are_one_job_at_its_first_place(tmp_path: Path) -> None:
    first = {"State": "PREEMPTED", "Elapsed": "00:30:00", "AllocTRES": "gres/gpu=8"}
    other = {"JobID": "124"}
    last = {"Submit": "2024-01-01T01:00:00", "State": "TIMEOUT", "Elapsed": "1-00:00:00", "AllocTRES": "gres/gpu=2"}
    rows = read(tmp_path, first, other, last)
    assert rows.job_name == ["123", "124"]
    assert (rows.submit_s[0], rows.duration_s[0], rows.gpus[0]) == (epoch_s("2024-01-01"), 88_200, 2)
    assert END_STATES[rows.end_state[0]] == "failed"
    assert rows.notes == ["1 further attempts of requeued jobs, added to their first"]


def test_a_requeued_job_that_waits_again_is_left_out(tmp_path: Path) -> None:
    waiting = {"State": "PENDING", "Start": "Unknown", "End": "Unknown", "Elapsed": "00:00:00", "AllocTRES": ""}
    rows = read(tmp_path, {"State": "NODE_FAIL"}, waiting, {"JobID": "124"})
    assert rows.job_name == ["124"]
    assert dict(rows.left_out) == {"still waiting when the log was written": 1}


def test_an_id_that_wrapped_around_is_another_job(tmp_path: Path) -> None:
    assert len(read(tmp_path, {}, {"User": "bob"})) == 2


def test_raw_columns_and_seconds_since_1970_are_read(tmp_path: Path) -> None:
    raw = {"ElapsedRaw": "61", "TimelimitRaw": "10", "Submit": "1704067200", "Start": "1704067201", "End": "1704067262"}
    rows = read(tmp_path, raw, without=("Elapsed", "Timelimit"))
    assert (rows.submit_s[0], rows.duration_s[0], rows.estimate_s[0]) == (1_704_067_200, 61, 600)


def test_without_elapsed_the_run_time_is_end_less_start(tmp_path: Path) -> None:
    assert read(tmp_path, {}, without=("Elapsed",)).duration_s[0] == 3_600


def test_without_a_start_column_a_job_cancelled_while_waiting_still_never_started(tmp_path: Path) -> None:
    rows = read(tmp_path, {}, {"JobID": "9", "State": "CANCELLED", "Elapsed": "00:00:00"}, without=("Start", "End"))
    assert dict(rows.left_out) == {"never started": 1}


def test_the_partition_is_the_tenant_where_there_is_no_account(tmp_path: Path) -> None:
    assert read(tmp_path, {}, without=("Account",)).virtual_clusters.values() == ("gpu",)


def test_requested_gpus_count_where_no_allocation_is_recorded(tmp_path: Path) -> None:
    rows = read(tmp_path, {"ReqTRES": "gres/gpu=2"}, without=("AllocTRES",))
    assert rows.gpus[0] == 2


def test_quotes_in_a_job_name_are_only_quotes(tmp_path: Path) -> None:
    assert len(read(tmp_path, {"JobName": 'my "best'}, {"JobID": "124"})) == 2


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"Submit": "Unknown"}, "Submit: got 'Unknown'"),
        ({"Submit": "first of May"}, "Submit: got 'first of May'"),
        ({"Elapsed": "an hour"}, "Elapsed: got 'an hour', expected a duration such as"),
        ({"Timelimit": "soon"}, "Timelimit: got 'soon'"),
        ({"AllocTRES": "gres/gpu=many"}, "AllocTRES: got 'gres/gpu=many'"),
        ({"State": "EVAPORATED"}, "State: got 'EVAPORATED'"),
        ({"ElapsedRaw": "-5"}, "ElapsedRaw: got '-5'"),
        ({"JobName": "a|b"}, "whole row: got 14 fields .* expected 13 fields; does a value contain the separator"),
        ({"JobID": ""}, "JobID: got ''"),
    ],
)
def test_an_impossible_row_is_named(tmp_path: Path, row: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=f"line 3, {message}"):
        read(tmp_path, {"JobID": "1"}, row)


def test_an_end_before_the_start_is_bad_where_nothing_else_says_how_long(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="line 2, End: got '2023"):
        read(tmp_path, {"End": "2023-12-31T00:00:00"}, without=("Elapsed",))


def test_output_without_the_columns_needed_says_how_to_print_them(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no column AllocTRES or ReqTRES.*sacct --parsable2"):
        read(tmp_path, {}, without=("AllocTRES", "ReqTRES"))
    with pytest.raises(InputError, match="column 'Submit' is missing"):
        read(tmp_path, {}, without=("Submit",))


@given(seconds=st.integers(0, 400 * 86_400))
def test_durations_survive_slurms_way_of_writing_them(seconds: int) -> None:
    hours, rest = divmod(seconds, 3_600)
    clock = f"{rest // 60:02}:{rest % 60:02}"
    days, of_day = divmod(hours, 24)
    assert elapsed_s(f"{days}-{of_day:02}:{clock}", "Elapsed") == seconds
    if not days:
        assert elapsed_s(f"{hours:02}:{clock}", "Elapsed") == seconds
    if not hours:
        assert elapsed_s(clock, "Elapsed") == seconds


@given(text=st.text(max_size=12))
def test_any_other_text_is_a_bad_value_and_nothing_worse(text: str) -> None:
    with suppress(BadValueError):
        assert elapsed_s(text, "Elapsed") >= 0


@pytest.mark.parametrize("text", ["UNLIMITED", "Partition_Limit", "", "INVALID"])
def test_no_time_limit_is_no_estimate(text: str) -> None:
    assert math.isnan(limit_s(text, ""))
    assert math.isnan(limit_s("", text))


@pytest.mark.parametrize(
    ("tres", "expected"),
    [
        ("gres/gpu=4", (4, "")),
        ("gres/gpu:A100=4", (4, "a100")),
        ("gres/gpu:a100=4,gres/gpu=4", (4, "a100")),
        ("gres/gpu=6,gres/gpu:a100=4,gres/gpu:v100=2", (6, "")),
        ("cpu=4,gres/gpuutil=3,gres/gpumem=9,gres/shard=2", (0, "")),
        ("", (0, "")),
    ],
)
def test_gpus_are_counted_once(tres: str, expected: tuple[int, str]) -> None:
    assert gpus(tres, "AllocTRES") == expected
