"""CPUs and memory that jobs ask for beside GPUs, in every format that names them."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_traces_clusters import HELIOS, KALOS, SEREN, helios_row, kalos_row, written
from test_traces_slurm import read

from synergy_core.errors import InputError
from synergy_runs.traces import read_trace
from synergy_runs.traces.command import lines
from synergy_runs.workload import from_rows

NO_TRES = {"ReqTRES": "gres/gpu=4", "AllocTRES": ""}


def demanded(folder: Path, **row: str) -> tuple[float, float]:
    rows = read(folder, row)
    return rows.cpus[0], rows.memory_bytes[0]


@pytest.mark.parametrize(
    ("row", "cpus", "gib"),
    [
        ({}, 8, 64),
        ({"ReqTRES": "cpu=2,gres/gpu=4,mem=512M"}, 2, 0.5),
        ({"ReqTRES": "gres/gpu=4", "AllocTRES": "cpu=128,gres/gpu=4,mem=1.50T,node=1"}, 128, 1536),
        ({"ReqTRES": "cpu=3,gres/gpu=4"}, 3, 64),
        ({"ReqTRES": "cpu=3,gres/gpu=4,mem=1048576K"}, 3, 1),
        ({"ReqTRES": "cpu=3,gres/gpu=4,mem=62.50G"}, 3, 62.5),
        ({"ReqTRES": "cpu=3,gres/gpu=4,mem=2048"}, 3, 2),
        ({"ReqTRES": "cpu=3,gres/gpu=4,mem=0"}, 3, math.nan),
        (NO_TRES | {"ReqCPUS": "6", "NCPUS": "8"}, 6, math.nan),
        (NO_TRES | {"ReqCPUS": "", "NCPUS": "8"}, 8, math.nan),
        (NO_TRES | {"ReqCPUS": "6", "ReqMem": "4Gc"}, 6, 24),
        (NO_TRES | {"ReqMem": "4Gc"}, math.nan, math.nan),
        (NO_TRES | {"ReqMem": "4Gn", "NNodes": "3"}, math.nan, 12),
        ({"ReqTRES": "cpu=6,gres/gpu=4,node=2", "AllocTRES": "gres/gpu=4", "ReqMem": "4000Mn"}, 6, 8000 / 1024),
        (NO_TRES | {"ReqMem": "4Gn"}, math.nan, math.nan),
        (NO_TRES | {"ReqMem": "4G", "NNodes": "3"}, math.nan, 4),
        (NO_TRES | {"ReqMem": "0n", "NNodes": "3"}, math.nan, math.nan),
        (NO_TRES, math.nan, math.nan),
    ],
)
def test_cpus_and_memory_are_of_the_whole_job(tmp_path: Path, row: dict[str, str], cpus: float, gib: float) -> None:
    assert demanded(tmp_path, **row) == pytest.approx((cpus, gib * 2**30), nan_ok=True)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"ReqTRES": "cpu=8,gres/gpu=4,mem=64Q"}, "ReqTRES: got 'mem=64Q', expected an amount of memory such as 64G"),
        ({"ReqTRES": "cpu=8,gres/gpu=4,mem=-64G"}, "ReqTRES: got 'mem=-64G'"),
        ({"ReqTRES": "cpu=0,gres/gpu=4"}, "ReqTRES: got 'cpu=0', expected a count of cpus, at least 1"),
        ({"ReqTRES": "cpu=-2,gres/gpu=4"}, "ReqTRES: got 'cpu=-2'"),
        ({"ReqTRES": "gres/gpu=4", "AllocTRES": "gres/gpu=4,mem=1e3G"}, "AllocTRES: got 'mem=1e3G'"),
        (
            {"ReqTRES": "cpu=20000,gres/gpu=4"},
            "CPUs: got 20000, expected CPUs above 0 to 10000, or 512 for each",
        ),
        (NO_TRES | {"ReqMem": "lots"}, "ReqMem: got 'lots'"),
        (NO_TRES | {"ReqMem": "4Gn", "NNodes": "few"}, "NNodes: got 'few', expected a count of nodes"),
        (NO_TRES | {"ReqCPUS": "4.5"}, "ReqCPUS: got '4.5'"),
    ],
)
def test_impossible_cpus_or_memory_are_named(tmp_path: Path, row: dict[str, str], message: str) -> None:
    with pytest.raises(InputError) as error:
        read(tmp_path, row)
    assert f"line 2, {message}" in str(error.value)


def test_what_a_job_without_gpus_asks_for_is_not_looked_at(tmp_path: Path) -> None:
    rows = read(tmp_path, {}, {"JobID": "124", "ReqTRES": "cpu=0,mem=lots", "AllocTRES": "cpu=8"})
    assert (len(rows), rows.bad_count) == (1, 0)


def test_components_with_gpus_add_up_what_they_ask_for_and_a_silent_one_makes_the_job_silent(tmp_path: Path) -> None:
    parts = [
        {"JobID": "9+0"},
        {"JobID": "9+1"},
        {"JobID": "9+2", "ReqTRES": "cpu=500,mem=900G", "AllocTRES": "cpu=500"},
    ]
    rows = read(tmp_path, *parts)
    assert (rows.gpus[0], rows.cpus[0], rows.memory_bytes[0]) == (8, 16, 128 * 2**30)
    rows = read(tmp_path, parts[0], parts[1] | {"ReqTRES": "gres/gpu=4,mem=1G", "AllocTRES": "gres/gpu=4"})
    assert (rows.gpus[0], rows.memory_bytes[0]) == (8, 65 * 2**30)
    assert math.isnan(rows.cpus[0])


def test_attempts_ask_each_for_their_own_and_joined_ones_as_the_last(tmp_path: Path) -> None:
    late = {"Submit": "2024-01-01T02:00:00", "Start": "2024-01-01T02:00:00", "End": "2024-01-01T03:00:00"}
    attempts = {"State": "PREEMPTED"}, late | dict.fromkeys(("ReqTRES", "AllocTRES"), "cpu=16,gres/gpu=4")
    rows = read(tmp_path, *attempts)
    assert (list(rows.cpus), rows.memory_bytes[0]) == ([8, 16], 64 * 2**30)
    merged = read(tmp_path, *attempts, attempts="merged")
    assert list(merged.cpus) == [16]
    assert math.isnan(merged.memory_bytes[0])


ANY_TEXT = st.text(st.characters(exclude_characters='\0\r\n|;"', exclude_categories=("Cs",)), max_size=12)
TRES_TEXT = st.builds(
    "{}={},gres/gpu{}=1".format, st.sampled_from(["cpu", "mem", "node", "gres/gpu"]), ANY_TEXT, ANY_TEXT
)


SLURM_COLUMNS = ("ReqTRES", "AllocTRES", "ReqMem", "ReqCPUS", "NNodes", "Submit", "Elapsed", "Timelimit")


@settings(max_examples=150)
@given(
    text=ANY_TEXT | TRES_TEXT,
    column=st.sampled_from([*SLURM_COLUMNS, "cpus", "memory_bytes"]),
)
def test_any_text_is_read_or_refused_with_file_line_and_column(
    tmp_path_factory: pytest.TempPathFactory, text: str, column: str
) -> None:
    folder, refused = tmp_path_factory.mktemp("any"), ""
    try:
        if column in ("cpus", "memory_bytes"):
            values = f"{text}," if column == "cpus" else f",{text}"
            read_trace(written(folder, "jobs.csv", PLAIN, "0,60,1,8,4e9", f"1,60,1,{values}"))
        else:
            read(folder, {"JobID": "1"}, (NO_TRES if "TRES" not in column else {}) | {column: text})
    except InputError as error:
        refused = str(error)
    where = rf"{folder}/jobs.* line 3, ({column}|CPUs|memory|ElapsedRaw|user's estimate|whole row): got "
    assert not refused or re.search(where, refused, re.DOTALL)


PLAIN = "submit_time,duration_s,gpus,cpus,memory_bytes"


def test_helios_names_cpus_and_no_memory(tmp_path: Path) -> None:
    rows = read_trace(written(tmp_path, "cluster_log.csv", HELIOS, helios_row("1"), helios_row("2")))
    assert list(rows.cpus) == [64, 64]
    assert all(map(math.isnan, rows.memory_bytes))
    assert from_rows(rows, name="log").notes == ()


def test_memory_of_a_kalos_job_is_that_of_its_pods_and_seren_names_none(tmp_path: Path) -> None:
    silent = kalos_row(job="b").replace(",960,1000,", ",,,")
    nodeless = kalos_row(job="c").replace(",8,64,960,", ",,64,960,")
    rows = read_trace(written(tmp_path, "trace_kalos.csv", KALOS, kalos_row(job="a"), silent, nodeless))
    assert list(rows.cpus)[::2] == [960, 960]
    assert math.isnan(rows.cpus[1])
    assert rows.memory_bytes[0] == 8_000 * 10**9
    assert all(map(math.isnan, rows.memory_bytes[1:]))
    times = "2023-03-01 00:18:22+08:00,2023-03-01 00:18:54+08:00,2023-03-01 00:20:51+08:00,117,32,936.0"
    rows = read_trace(written(tmp_path, "trace_seren.csv", SEREN, f"57,u5,1,8,128,Other,FAILED,{times}"))
    assert rows.cpus[0] == 128
    assert math.isnan(rows.memory_bytes[0])


def test_a_column_that_is_partly_empty_is_counted_and_nothing_is_put_in_its_place(tmp_path: Path) -> None:
    rows = read_trace(written(tmp_path, "jobs.csv", PLAIN, "0,60,2,8,4e9", "1,60,1,,", "2,60,1,none,0", "3,60,1,2.5,"))
    assert list(rows.cpus)[::3] == [8, 2.5]
    assert [math.isnan(each) for each in rows.cpus] == [False, True, True, False]
    assert [math.isnan(each) for each in rows.memory_bytes] == [False, True, True, True]
    assert from_rows(rows, name="log").notes == (
        "2 of 4 rows request no CPUs",
        "3 of 4 rows request no memory",
    )
    said = "\n".join(lines(rows))
    assert "CPUs        requested by 2 of 4 jobs; per GPU: median 3.25, most 4" in said
    assert "memory      requested by 1 of 4 jobs; per GPU: median 2 GB, most 2 GB" in said


def test_logs_that_name_neither_say_nothing_of_it(tmp_path: Path) -> None:
    rows = read_trace(written(tmp_path, "jobs.csv", "submit_time,duration_s,gpus", "0,60,2"))
    assert from_rows(rows, name="log").notes == ()
    assert not [line for line in lines(rows) if "CPUs" in line or "memory" in line]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("0,60,1,0,", "cpus: got 0, expected CPUs above 0 to 10000"),
        ("0,60,1,10001,", "cpus: got 10001"),
        ("0,60,1,inf,", "cpus: got inf"),
        ("0,60,100,51201,", "cpus: got 51201, expected CPUs above 0 to 10000"),
        ("0,60,1,4,-1", "memory_bytes: got -1, expected bytes above 0 to 3.52e\\+13 for each GPU"),
        ("0,60,2,4,7.1e13", "memory_bytes: got 71000000000000"),
    ],
)
def test_demands_that_make_no_sense_are_named(tmp_path: Path, line: str, message: str) -> None:
    path = written(tmp_path, "jobs.csv", PLAIN, "0,60,100,51200,3e15", line)
    with pytest.raises(InputError, match=f"line 3, {message}"):
        read_trace(path)
    assert len(read_trace(path, bad_rows="skip")) == 1
