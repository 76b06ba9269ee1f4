"""The Philly CSV, our own CSV, and what every table shares: columns by name, lines, errors."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from synergy_core.errors import InputError
from synergy_runs.traces import read_trace
from synergy_runs.traces.rows import TraceRows, epoch_s
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
        ("2017-10-09 07:01:55,60,99999999999999,1,vc", "num_gpus", "99999999999999"),
        ("2017-13-09 07:01:55,60,1,60,vc", "timestamp", "'2017-13-09 07:01:55'"),
        ("2017-10-09 07:01:55,60,1,much,vc", "gpu_time", "'much'"),
        ("2017-10-09 07:01:55,60", "whole row", "2 fields ending in '60'"),
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
    assert "'estimate_s' with 3,600 times its values" in rows.notes[0]


def test_stamps_across_the_change_of_clocks_are_right() -> None:
    assert epoch_s("2017-11-05 01:10:00 PST") - epoch_s("2017-11-05 01:30:00 PDT") == 2_400
    assert epoch_s("2020-01-01 08:00:00+08:00") == epoch_s("2020-01-01T00:00:00Z") == epoch_s("2020-01-01")
    for text in ("0001-01-01 00:00:00+01:00", "0001-01-01 00:00:00 PDT", "today", ""):
        with pytest.raises(ValueError, match=r"range|isoformat"):
            epoch_s(text)


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
