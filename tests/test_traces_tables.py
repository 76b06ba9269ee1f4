"""The Philly CSV, our own CSV, and what every table shares: columns by name, lines, errors."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest

from synergy_core.errors import InputError
from synergy_runs.traces import formats, read_trace, summaries
from synergy_runs.traces.rows import TraceRows
from synergy_runs.traces.times import elapsed_s, epoch_s
from synergy_runs.workload import from_rows

PHILLY_HEADER = "timestamp,duration,num_gpus,gpu_time,cluster\n"
PHILLY = (
    PHILLY_HEADER
    + "2017-10-09 07:01:55,66.0,1,66.0,11cb48\n"
    + "2017-10-09 06:13:03,2951.0,8,23608.0,6214e9\n"
    + "2017-10-09 06:13:03,5.5,2,11.0,103959\n\n"
)


def written(folder: Path, text: str, name: str = "jobs.csv") -> Path:
    path = folder / name
    path.write_bytes(text.encode())
    return path


def philly(folder: Path, *lines: str, bad_rows: str = "stop") -> TraceRows:
    return read_trace(written(folder, PHILLY_HEADER + "".join(line + "\n" for line in lines)), bad_rows=bad_rows)


def tenants(rows: TraceRows) -> list[str]:
    names = rows.virtual_clusters.values()
    return [names[code] for code in rows.virtual_cluster]


def test_philly_csv_keeps_file_order_and_reads_identifiers_as_text(tmp_path: Path) -> None:
    rows = read_trace(written(tmp_path, PHILLY))
    assert rows.format_name == "philly_csv"
    assert list(rows.submit_s) == [epoch_s("2017-10-09 07:01:55")] + [epoch_s("2017-10-09 06:13:03")] * 2
    assert list(rows.duration_s) == [66.0, 2951.0, 5.5]
    assert list(rows.gpus) == [1, 8, 2]
    assert tenants(rows) == ["11cb48", "6214e9", "103959"]
    assert rows.job_name == ["line-2", "line-3", "line-4"]
    assert not rows.notes


def test_windows_line_breaks_and_a_byte_order_mark_change_nothing(tmp_path: Path) -> None:
    rows = read_trace(written(tmp_path, "\ufeff" + PHILLY.replace("\n", "\r\n")))
    assert list(rows.gpus) == [1, 8, 2]
    assert list(rows.line) == [2, 3, 4]


@pytest.mark.parametrize(
    ("line", "column", "got"),
    [
        ("2017-10-09 07:01:55,-1,1,-1,vc", "duration", "-1"),
        ("2017-10-09 07:01:55,nan,1,1,vc", "duration", "nan"),
        ("2017-10-09 07:01:55,1e999,1,1,vc", "duration", "inf"),
        ("2017-10-09 07:01:55,long,1,1,vc", "duration", "'long'"),
        ("2017-10-09 07:01:55,60,0,0,vc", "num_gpus", "0"),
        ("2017-10-09 07:01:55,60,-2,0,vc", "num_gpus", "-2"),
        ("2017-10-09 07:01:55,60,1.5,90,vc", "num_gpus", "'1.5'"),
        ("2017-10-09 07:01:55,60,99999999999999,1,vc", "num_gpus", "99999999999999"),
        ("2017-10-09 07:01:55,60,,1,vc", "num_gpus", "''"),
        ("2017-13-09 07:01:55,60,1,60,vc", "timestamp", "'2017-13-09 07:01:55'"),
        (",60,1,60,vc", "timestamp", "''"),
        ("2017-10-09 07:01:55,60,1,much,vc", "gpu_time", "'much'"),
        ("2017-10-09 07:01:55,60", "whole row", "2 fields ending in '60'"),
        ("2017-10-09 07:01:55,60,1,60,vc,more", "whole row", "6 fields ending in 'more'"),
    ],
)
def test_an_impossible_row_is_named_with_line_column_and_value(
    tmp_path: Path, line: str, column: str, got: str
) -> None:
    good = "2017-10-09 07:01:55,60,1,60,vc"
    with pytest.raises(InputError) as error:
        philly(tmp_path, good, line)
    assert f"{tmp_path / 'jobs.csv'}" in str(error.value)
    assert f"line 3, {column}: got {got}, expected " in str(error.value)
    assert "trace.bad_rows=skip" in str(error.value)
    rows = philly(tmp_path, good, line, good, bad_rows="skip")
    assert (len(rows), rows.bad_count) == (2, 1)
    assert list(rows.line) == [2, 4]


def test_only_ten_bad_rows_are_listed_and_all_are_counted(tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        philly(tmp_path, *["2017-10-09 07:01:55,60,0,0,vc"] * 25)
    text = str(error.value)
    assert "25 impossible rows" in text
    assert "line 11," in text
    assert "line 12," not in text
    assert "and 15 more" in text


def test_an_odd_gpu_time_is_counted_and_not_used(tmp_path: Path) -> None:
    rows = philly(tmp_path, "2017-10-09 07:01:55,60,2,60,vc", "2017-10-09 07:01:55,60,2,120,vc")
    assert len(rows) == 2
    assert rows.notes == ["1 rows whose gpu_time is not duration × num_gpus (gpu_time is not used)"]


def test_a_last_line_without_a_break_is_noted(tmp_path: Path) -> None:
    rows = read_trace(written(tmp_path, PHILLY_HEADER + "2017-10-09 07:01:55,60,1,60,6214"))
    assert "cut off" in rows.notes[0]


def test_a_quoted_value_may_span_lines_and_later_lines_are_still_right(tmp_path: Path) -> None:
    text = 'submit_time,duration_s,gpus,job\n1,2,3,"a\nb"\n\n4,-5,6,c\n'
    with pytest.raises(InputError, match="line 5, duration_s: got -5"):
        read_trace(written(tmp_path, text))


def test_a_quote_left_open_is_an_error_with_its_line(tmp_path: Path) -> None:
    text = PHILLY_HEADER + '2017-10-09 07:01:55,60,1,60,"vc\n' + "2017-10-09 07:01:55,60,1,60,vc\n" * 6000
    with pytest.raises(InputError, match=r"line \d+: field larger.*quote"):
        read_trace(written(tmp_path, text))


def test_bytes_that_are_no_text_are_an_error_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "jobs.csv"
    path.write_bytes(PHILLY.encode() + b"2017-10-09 07:01:55,60,1,60,v\xff\xfe\n")
    with pytest.raises(InputError, match="line 6: bytes that are not UTF-8"):
        read_trace(path)


def test_a_zip_file_is_recognised_as_no_text(tmp_path: Path) -> None:
    path = tmp_path / "jobs.csv.zip"
    path.write_bytes(b"PK\x03\x04" + bytes(range(256)))
    with pytest.raises(InputError, match="unpack it"):
        read_trace(path)


def test_a_log_packed_by_gzip_reads_as_it_does_unpacked_whatever_its_name(tmp_path: Path) -> None:
    text = "\ufeff" + PHILLY.replace("\n", "\r\n") + "2017-10-09 07:01:55,60,1,60,6214"
    plain = read_trace(written(tmp_path, text))
    for name in ("jobs.csv.gz", "packed.csv"):
        path = tmp_path / name
        path.write_bytes(gzip.compress(text.encode()))
        rows = read_trace(path)
        assert (rows.format_name, list(rows.submit_s), list(rows.line)) == (
            "philly_csv",
            list(plain.submit_s),
            list(plain.line),
        )
        assert rows.notes == plain.notes != []


def test_bytes_in_a_packed_log_that_are_no_text_are_an_error_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "jobs.csv.gz"
    path.write_bytes(gzip.compress(PHILLY.encode() + b"2017-10-09 07:01:55,60,1,60,v\xff\xfe\n"))
    with pytest.raises(InputError, match="line 6: bytes that are not UTF-8"):
        read_trace(path)


def test_a_damaged_or_cut_gzip_file_is_an_error(tmp_path: Path) -> None:
    packed = gzip.compress(PHILLY.encode() * 500, mtime=0)
    for damaged in (packed[:-20], packed[: len(packed) // 2], packed[:20] + b"\xff" * 9 + packed[29:], packed[:5]):
        path = tmp_path / "jobs.csv.gz"
        path.write_bytes(damaged)
        with pytest.raises(InputError, match="gzip cannot unpack it"):
            read_trace(path)


@pytest.mark.parametrize("text", ["", "\n\n", "  "])
def test_an_empty_file_is_an_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputError, match="empty"):
        read_trace(written(tmp_path, text))


def test_a_header_alone_is_no_trace(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no job to replay .*no rows"):
        read_trace(written(tmp_path, PHILLY_HEADER))


def test_a_missing_file_a_folder_and_an_unknown_format_are_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        read_trace(tmp_path / "none.csv")
    with pytest.raises(InputError, match="is a folder"):
        read_trace(tmp_path)
    with pytest.raises(InputError, match="Did you mean 'helios'"):
        read_trace(written(tmp_path, PHILLY), format_name="helio")
    with pytest.raises(InputError, match="no known format starts with 'a,b'"):
        read_trace(written(tmp_path, "a,b\n1,2\n"))


def test_a_missing_column_is_named_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"column 'duration_s' is missing. Is it the one called 'duration'"):
        read_trace(written(tmp_path, "submit_time,duration,gpus\n1,2,3\n"))
    with pytest.raises(InputError, match="column 'gpus' appears twice"):
        read_trace(written(tmp_path, "submit_time,duration_s,gpus,gpus\n1,2,3,4\n"))


def test_our_own_csv_reads_every_column_in_any_order(tmp_path: Path) -> None:
    text = (
        "gpus,job,submit_time,duration_s,virtual_cluster,user,end_state,estimate_s,gpu_type,model\n"
        "2,a,2024-01-01T00:00:10+01:00,60,0012,u1,killed,120,A100,bert\n"
        "1,,1704063600.5,0.25,,,,,,\n"
    )
    rows = read_trace(written(tmp_path, text))
    assert rows.format_name == "plain"
    assert list(rows.submit_s) == [epoch_s("2023-12-31 23:00:10"), 1704063600.5]
    assert rows.job_name == ["a", "line-3"]
    assert tenants(rows) == ["0012", ""]
    assert list(rows.end_state) == [1, 0]
    assert rows.estimate_s[0] == 120
    assert rows.estimate_s[1] != rows.estimate_s[1]
    assert rows.gpu_types.values() == ("a100", "")
    assert rows.models.values() == ("bert", "")


@pytest.mark.parametrize(
    "text",
    [
        "submit_time;duration_s;gpus;user\n0;60;2;ann\n",
        "sep=;\nsubmit_time;duration_s;gpus;user\n0;60;2;ann\n",
        "sep=,\nsubmit_time,duration_s,gpus,user\n0,60,2,ann\n",
        "\ufeffsep=;\r\nSubmit_Time;DURATION_S;Gpus;User\r\n0;60;2;ann\r\n",
        '"Submit_Time";"duration_s";"gpus";"user"\n0;60;2;"ann"\n',
    ],
)
def test_a_csv_as_spreadsheets_save_it_is_read(text: str, tmp_path: Path) -> None:
    rows = read_trace(written(tmp_path, text))
    assert (list(rows.submit_s), list(rows.duration_s), list(rows.gpus)) == ([0.0], [60.0], [2])
    assert rows.users.values() == ("ann",)
    assert rows.notes == []


def test_the_line_of_a_bad_row_counts_the_separator_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="line 4, gpus: got 0"):
        read_trace(written(tmp_path, "sep=;\nsubmit_time;duration_s;gpus\n0;60;2\n0;60;0\n"))


def test_declared_run_times_far_below_the_true_ones_are_counted(tmp_path: Path) -> None:
    text = "submit_time,duration_s,gpus,estimate_s\n0,100,1,49\n0,100,1,50\n0,100,1,\n0,7200,1,120\n"
    (note,) = from_rows(read_trace(written(tmp_path, text)), name="log").notes
    assert note.startswith("2 of 3 declared run times")


def test_our_own_csv_names_columns_it_does_not_read(tmp_path: Path) -> None:
    rows = read_trace(written(tmp_path, "submit_time,duration_s,gpus,usr,colour\n1,2,3,u,red\n"))
    assert rows.notes == ["column 'colour' is not read", "column 'usr' is not read; did you mean 'user'?"]
    rows = read_trace(written(tmp_path, "submit_time,duration_s,gpus,tenant,state\n1,2,3,t,failed\n"))
    meant = {"tenant": "virtual_cluster", "state": "end_state"}
    assert all(any(name in note and column in note for note in rows.notes) for name, column in meant.items())
    rows = read_trace(written(tmp_path, "submit_time,duration_s,gpus,estimate_hours\n1,2,3,4\n"))
    assert "'estimate_s', 3,600 times as large" in rows.notes[0]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("yesterday,1,1,,", "submit_time: got 'yesterday', expected seconds or a date"),
        ("1_000,1,1,,", "submit_time: got '1_000'"),
        ("1e12,1,1,,", "submit_time: got 1000000000000, expected seconds since 1970; these look like milliseconds"),
        ("1e14,1,1,,", "submit_time: got 100000000000000, expected a time within"),
        ("0,1e11,1,,", "duration_s: got 1e\\+11, expected a duration from 0 to"),
        ("0,1,1,-5,", "user's estimate: got -5"),
        ("0,1,1,,exploded", "end_state: got 'exploded', expected one of"),
    ],
)
def test_our_own_csv_rejects_values_out_of_range(tmp_path: Path, line: str, message: str) -> None:
    header = "submit_time,duration_s,gpus,estimate_s,end_state\n"
    with pytest.raises(InputError, match=f"line 2, {message}"):
        read_trace(written(tmp_path, header + line + "\n"))


def test_two_jobs_under_one_id_are_refused_with_both_lines(tmp_path: Path) -> None:
    path = written(tmp_path, "submit_time,duration_s,gpus,job\n0,1,1,a\n1,1,1,\n2,1,1,\n3,1,1,a\n")
    with pytest.raises(InputError, match="line 5, job: got 'a', which line 2 has too"):
        read_trace(path)
    rows = read_trace(path, bad_rows="skip")
    assert (rows.job_name, rows.bad_count) == (["a", "line-3", "line-4"], 1)


def test_stamps_across_the_change_of_clocks_are_right() -> None:
    assert elapsed_s("2017-11-05 01:30:00 PDT", "2017-11-05 01:10:00 PST") == 2_400
    assert epoch_s("2020-01-01 08:00:00+08:00") == epoch_s("2020-01-01T00:00:00Z") == epoch_s("2020-01-01")
    assert elapsed_s("2017-10-09 07:01:55", "2017-10-09 07:01:55.300000") == 0.3
    for text in ("0001-01-01 00:00:00+01:00", "0001-01-01 00:00:00 PDT", "today", ""):
        with pytest.raises(ValueError, match=r"range|isoformat"):
            epoch_s(text)


def test_every_format_has_a_name_of_its_own_and_a_line_for_people() -> None:
    listed = dict(summaries())
    assert (
        set(listed)
        == {
            "acme",
            "arena",
            "helios",
            "openb",
            "osdi22_csv",
            "philly_csv",
            "philly_json",
            "plain",
            "pollux_csv",
            "slurm",
            "spot2026",
            "swf",
            "training_csv",
        }
        == set(formats())
    )
    assert all(text and "\n" not in text for text in listed.values())


def test_the_real_philly_csv_is_read_whole() -> None:
    folder = os.environ.get("SYNERGY_DATA", "")
    path = Path(folder) / "traces" / "philly.csv"
    if not folder or not path.is_file():
        pytest.skip("SYNERGY_DATA names no folder with traces/philly.csv")
    rows = read_trace(path)
    assert len(rows) == 82_247
    assert rows.bad_count == 0
    assert not rows.notes
    assert {"6214e9", "103959"} <= set(rows.virtual_clusters.values())
    assert len(rows.virtual_clusters.values()) == 15
    assert sum(gpus == 1 for gpus in rows.gpus) == 76_627
    assert max(rows.duration_s) == 4_628_226
