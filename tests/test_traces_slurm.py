"""What `sacct --parsable2` prints."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synergy_core.errors import InputError
from synergy_runs.traces import read_trace
from synergy_runs.traces.rows import END_STATES, TraceRows, epoch_s
from synergy_runs.traces.slurm import elapsed_s, gpus_of

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


def read(
    folder: Path,
    *rows: dict[str, str],
    without: tuple[str, ...] = (),
    bad_rows: str = "stop",
    delimiter: str = "|",
    **how: str,
) -> TraceRows:
    columns = [name for name in dict.fromkeys((*COLUMNS, *(key for row in rows for key in row))) if name not in without]
    lines = ["|".join(columns)] + ["|".join((USUAL | row).get(name, "") for name in columns) for row in rows]
    path = folder / "jobs.txt"
    text = "\n".join(lines) + "\n"
    path.write_text(text.replace("|", delimiter))
    return read_trace(path, bad_rows=bad_rows, **how)


def test_a_usual_row_gives_every_column(tmp_path: Path) -> None:
    rows = read(tmp_path, {}, {"JobID": "124", "Partition": "debug"})
    assert rows.format_name == "slurm"
    assert (rows.submit_s[0], rows.duration_s[0], rows.gpus[0]) == (epoch_s("2024-01-01"), 3_600, 4)
    assert (rows.job_name, rows.users.values(), rows.virtual_clusters.values()) == (
        ["123", "124"],
        ("ann",),
        ("vision",),
    )
    assert (rows.partitions.values(), list(rows.partition), rows.estimate_s[0]) == (("gpu", "debug"), [0, 1], 172_800)


@pytest.mark.parametrize("delimiter", [";", "^", "\t"])
def test_other_delimiters_are_recognised(tmp_path: Path, delimiter: str) -> None:
    rows = read(tmp_path, {}, delimiter=delimiter)
    assert (rows.format_name, list(rows.gpus), rows.users.values()) == ("slurm", [4], ("ann",))


def test_a_type_that_was_only_given_does_not_bind(tmp_path: Path) -> None:
    asked = {"JobID": "124", "ReqTRES": "gres/gpu:v100=4,gres/gpu=4", "AllocTRES": "gres/gpu=4,gres/gpu:v100=4"}
    other = {"JobID": "125", "ReqTRES": "gres/gpu:v100=4,gres/gpu=4"}
    rows = read(tmp_path, {}, asked, other)
    assert [rows.gpu_types.values()[code] for code in rows.gpu_type] == ["", "v100", "v100"]
    assert [rows.given_gpu_types.values()[code] for code in rows.given_gpu_type] == ["a100", "v100", "a100"]
    assert rows.notes == [
        "1 jobs requested no GPU type and received a100: here they may run on any type",
        "1 jobs requested v100 and received a100",
    ]


def test_without_reqtres_no_job_is_bound_and_the_notes_say_so(tmp_path: Path) -> None:
    rows = read(tmp_path, {}, without=("ReqTRES",))
    assert rows.gpu_types.values() == ("",)
    assert "the requested GPU types are unknown" in rows.notes[0]


PARTS = ({"JobID": "105+0"}, {"JobID": "105+1"}, {"JobID": "105+2", "AllocTRES": "cpu=8", "ReqTRES": "cpu=8"})


def test_the_components_of_a_heterogeneous_job_are_one_gang(tmp_path: Path) -> None:
    rows = read(tmp_path, *PARTS, {"JobID": "106"})
    assert (rows.job_name, list(rows.gpus), list(rows.duration_s)) == (["105", "106"], [8, 4], [3_600, 3_600])
    assert "1 jobs are heterogeneous: each is one gang with the GPUs of all its components" in rows.notes


def test_a_gang_holds_its_gpus_until_its_last_component_with_gpus_ends(tmp_path: Path) -> None:
    late = PARTS[1] | {"Elapsed": "02:00:00", "State": "FAILED"}
    longest = PARTS[2] | {"Elapsed": "09:00:00"}
    rows = read(tmp_path, PARTS[0], late, longest)
    assert (list(rows.duration_s), END_STATES[rows.end_state[0]]) == ([7_200], "failed")
    assert any("ended apart" in note for note in rows.notes)


def test_a_heterogeneous_job_that_asks_for_two_types_is_refused_by_name(tmp_path: Path) -> None:
    other = {"JobID": "105+1", "ReqTRES": "gres/gpu:v100=4"}
    first = {"JobID": "105+0", "ReqTRES": "gres/gpu:a100=4"}
    with pytest.raises(InputError, match=r"line 2, ReqTRES: got a100 \(line 2\) and v100 \(line 3\) in job 105"):
        read(tmp_path, first, other)
    rows = read(tmp_path, first, other, {"JobID": "106"}, bad_rows="skip")
    assert (rows.job_name, rows.bad_count) == (["106"], 1)


def test_no_part_of_a_heterogeneous_job_with_an_impossible_component_is_replayed(tmp_path: Path) -> None:
    bad = PARTS[1] | {"AllocTRES": "gres/gpu=1,gres/gpu:a100_1g.5gb=1"}
    rows = read(tmp_path, PARTS[0], bad, {"JobID": "106"}, bad_rows="skip")
    assert (rows.job_name, rows.bad_count) == (["106"], 1)
    assert dict(rows.left_out) == {"components of a heterogeneous job with an impossible one": 1}


@pytest.mark.parametrize(
    "tres",
    [
        "gres/gpu=2,gres/gpu:a100_1g.5gb=2",
        "gres/gpu:1g.10gb=1",
        "gres/gpu:nvidia_h100_80gb_hbm3_1g.10gb+me=1",
        "gres/gpu:a100-mig=1",
        "cpu=4,gres/gpuutil=3,gres/gpumem=9,gres/shard=2",
        "gres/mps=50",
    ],
)
def test_part_of_a_gpu_is_refused_by_name(tmp_path: Path, tres: str) -> None:
    with pytest.raises(InputError, match=r"line 3, AllocTRES: got 'gres/.*expected whole GPUs: .* held by one job"):
        read(tmp_path, {}, {"JobID": "124", "AllocTRES": tres})
    rows = read(tmp_path, {}, {"JobID": "124", "AllocTRES": tres}, bad_rows="skip")
    assert (len(rows), rows.bad_count) == (1, 1)
    assert any(note.startswith("1 jobs on part of a GPU") for note in rows.notes)


@pytest.mark.parametrize("kind", ["a100-80gb", "a100_80gb_pcie", "tesla_v100-sxm2-16gb", "rtx_2080_ti"])
def test_whole_gpus_are_not_taken_for_slices(kind: str) -> None:
    assert gpus_of(f"gres/gpu:{kind}=2", "ReqTRES") == (2, (kind,))


def test_one_record_printed_twice_is_refused_with_both_lines(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="line 4, JobID: got '123', which line 2 has too, expected each attempt once"):
        read(tmp_path, {}, {"JobID": "124"}, {"State": "FAILED"})


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


REQUEUED = (
    {"State": "PREEMPTED", "Elapsed": "00:30:00", "AllocTRES": "gres/gpu=8"},
    {"JobID": "124"},
    {
        "Submit": "2024-01-01T01:00:00",
        "Start": "2024-01-01T02:00:00",
        "State": "TIMEOUT",
        "Elapsed": "1-00:00:00",
        "AllocTRES": "gres/gpu=2",
    },
)


AGAIN = {"Submit": "2024-01-02T00:00:00", "Start": "2024-01-02T00:00:00"}


def test_requeued_attempts_stay_apart_each_submitted_when_it_was_requeued(tmp_path: Path) -> None:
    rows = read(tmp_path, *REQUEUED)
    assert rows.job_name == ["123#1", "124", "123#2"]
    assert list(rows.submit_s) == [epoch_s("2024-01-01"), epoch_s("2024-01-01"), epoch_s("2024-01-01T01:00:00")]
    assert (list(rows.duration_s), list(rows.gpus)) == ([1_800, 3_600, 86_400], [8, 4, 2])
    assert [END_STATES[code] for code in rows.end_state] == ["killed", "completed", "failed"]
    assert (list(rows.attempt), list(rows.line)) == ([1, 1, 2], [2, 3, 4])
    assert list(rows.retry_gap_s) == [1_740]
    never_before_the_end = read(tmp_path, {}, {"Start": "2024-01-01T03:00:00"})
    assert never_before_the_end.submit_s[1] == epoch_s("2024-01-01T01:01:00")
    components = read(tmp_path, *PARTS[:2], *(part | AGAIN for part in PARTS[:2]))
    assert (components.job_name, list(components.gpus)) == (["105#1", "105#2"], [8, 8])


def test_merged_attempts_are_one_job_at_its_first_place(tmp_path: Path) -> None:
    rows = read(tmp_path, *REQUEUED, attempts="merged")
    assert rows.job_name == ["123", "124"]
    assert (rows.submit_s[0], rows.duration_s[0], rows.gpus[0]) == (epoch_s("2024-01-01"), 88_200, 2)
    assert END_STATES[rows.end_state[0]] == "failed"
    assert rows.notes[0] == "1 further attempts of requeued jobs, added to their first"


def test_a_requeued_job_that_waits_again_has_run_before(tmp_path: Path) -> None:
    waiting = {"State": "PENDING", "Start": "Unknown", "End": "Unknown", "Elapsed": "00:00:00", "AllocTRES": ""}
    rows = read(tmp_path, {"State": "NODE_FAIL"}, waiting, {"JobID": "124"})
    assert rows.job_name == ["123", "124"]
    assert dict(rows.left_out) == {"still waiting when the log was written": 1}
    merged = read(tmp_path, {"State": "NODE_FAIL"}, waiting, {"JobID": "124"}, attempts="merged")
    assert merged.job_name == ["124"]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"JobID": "123_4"}, {"JobID": "123_5"}),  # tasks of an array
        ({}, {"User": "bob"}),  # an id that wrapped around
        ({"JobName": 'my "best'}, {"JobID": "124"}),  # quotes in a name are only quotes
    ],
)
def test_these_are_two_jobs(tmp_path: Path, first: dict[str, str], second: dict[str, str]) -> None:
    assert len(read(tmp_path, first, second)) == 2


def test_raw_columns_and_seconds_since_1970_are_read(tmp_path: Path) -> None:
    raw = {"ElapsedRaw": "61", "TimelimitRaw": "10", "Submit": "1704067200", "Start": "1704067201", "End": "1704067262"}
    rows = read(tmp_path, raw, without=("Elapsed", "Timelimit"))
    assert (rows.submit_s[0], rows.duration_s[0], rows.estimate_s[0]) == (1_704_067_200, 61, 600)


def test_without_a_start_column_a_job_cancelled_while_waiting_still_never_started(tmp_path: Path) -> None:
    rows = read(tmp_path, {}, {"JobID": "9", "State": "CANCELLED", "Elapsed": "00:00:00"}, without=("Start", "End"))
    assert dict(rows.left_out) == {"never started": 1}


@pytest.mark.parametrize(
    ("row", "without", "found"),
    [
        ({}, "Elapsed", {"duration_s": 3_600}),
        ({}, "Account", {"virtual_clusters": ("gpu",)}),
        ({"ReqTRES": "gres/gpu=2"}, "AllocTRES", {"gpus": 2}),
    ],
)
def test_what_stands_in_for_a_column_that_is_not_there(
    tmp_path: Path, row: dict[str, str], without: str, found: dict[str, object]
) -> None:
    rows = read(tmp_path, row, without=(without,))
    names = {"virtual_clusters": rows.virtual_clusters.values(), "duration_s": rows.duration_s[0], "gpus": rows.gpus[0]}
    assert {name: names[name] for name in found} == found


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


@pytest.mark.parametrize("text", ["UNLIMITED", "Partition_Limit", "", "INVALID"])
def test_no_time_limit_is_no_estimate(tmp_path: Path, text: str) -> None:
    assert math.isnan(read(tmp_path, {"Timelimit": text, "TimelimitRaw": text}).estimate_s[0])


@pytest.mark.parametrize(
    ("tres", "expected"),
    [
        ("gres/gpu=4", (4, ())),
        ("gres/gpu:A100=4", (4, ("a100",))),
        ("gres/gpu:a100=4,gres/gpu=4", (4, ("a100",))),
        ("gres/gpu=6,gres/gpu:a100=4,gres/gpu:v100=2", (6, ("a100", "v100"))),
        ("cpu=4,gres/gpuutil=3,gres/gpumem=9", (0, ())),
        ("gres/gpu=1,gres/shard=2", (1, ())),
        ("", (0, ())),
    ],
)
def test_gpus_are_counted_once(tres: str, expected: tuple[int, tuple[str, ...]]) -> None:
    assert gpus_of(tres, "AllocTRES") == expected
