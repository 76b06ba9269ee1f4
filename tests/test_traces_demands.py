"""CPUs and memory that jobs ask for beside GPUs, in every format that names them."""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_traces_clusters import HELIOS, KALOS, SEREN, helios_row, kalos_row, written
from test_traces_slurm import read

from synergy_core.errors import InputError
from synergy_runs.traces import read_trace
from synergy_runs.traces._slurm_demands import COLUMNS as SLURM_COLUMNS
from synergy_runs.traces._slurm_demands import demands
from synergy_runs.traces._summary import lines
from synergy_runs.traces._values import BadValueError
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
            "CPUs: got 20000 CPUs, expected above 0, to 10,000, or 512 for each",
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
    second = {
        "Submit": "2024-01-01T02:00:00",
        "Start": "2024-01-01T02:00:00",
        "End": "2024-01-01T03:00:00",
        "ReqTRES": "cpu=16,gres/gpu=4",
        "AllocTRES": "cpu=16,gres/gpu=4",
    }
    rows = read(tmp_path, {"State": "PREEMPTED"}, second)
    assert (list(rows.cpus), rows.memory_bytes[0]) == ([8, 16], 64 * 2**30)
    merged = read(tmp_path, {"State": "PREEMPTED"}, second, attempts="merged")
    assert list(merged.cpus) == [16]
    assert math.isnan(merged.memory_bytes[0])


@given(st.integers(0, 2**20), st.sampled_from("KMGTP"), st.sampled_from(("", "c", "n")))
def test_amounts_of_memory_survive_slurms_way_of_writing_them(amount: int, suffix: str, of_each: str) -> None:
    values = dict.fromkeys(SLURM_COLUMNS, "") | {"ReqMem": f"{amount}{suffix}{of_each}", "NCPUS": "3", "NNodes": "5"}
    cpus, memory_bytes = demands(values)
    expected = amount * 1024 ** (1 + "KMGTP".index(suffix)) * {"": 1, "c": 3, "n": 5}[of_each]
    assert cpus == 3
    assert memory_bytes == expected or (amount == 0 and math.isnan(memory_bytes))


@given(st.text(max_size=12))
def test_any_other_amount_is_a_bad_value_and_nothing_worse(text: str) -> None:
    with suppress(BadValueError):
        assert not demands(dict.fromkeys(SLURM_COLUMNS, "") | {"ReqMem": text, "NCPUS": text})[1] <= 0


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
        "2 of 4 rows name no CPUs; 2 do",
        "3 of 4 rows name no memory; 1 do",
    )
    said = "\n".join(lines(rows))
    assert "CPUs        named by 2 of 4 jobs; a GPU: median 3.25, most 4" in said
    assert "memory      named by 1 of 4 jobs; a GPU: median 2 GB, most 2 GB" in said


def test_logs_that_name_neither_say_nothing_of_it(tmp_path: Path) -> None:
    rows = read_trace(written(tmp_path, "jobs.csv", "submit_time,duration_s,gpus", "0,60,2"))
    assert from_rows(rows, name="log").notes == ()
    assert not [line for line in lines(rows) if "CPUs" in line or "memory" in line]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("0,60,1,0,", "cpus: got 0 CPUs, expected above 0, to 10,000, or 512 for each of its 1 GPUs"),
        ("0,60,1,-4,", "cpus: got -4 CPUs"),
        ("0,60,1,10001,", "cpus: got 10001 CPUs"),
        ("0,60,1,inf,", "cpus: got inf CPUs"),
        ("0,60,100,51201,", "cpus: got 51201 CPUs, expected above 0, to 10,000, or 512 for each of its 100 GPUs"),
        ("0,60,1,many,", "cpus: got 'many', expected a number of CPUs"),
        ("0,60,1,4,64GB", "memory_bytes: got '64GB', expected an amount of memory"),
        ("0,60,1,4,-1", "memory_bytes: got -1 bytes, expected above 0, to 3.52e\\+13 bytes a GPU"),
        ("0,60,2,4,7.1e13", "memory_bytes: got 7.1e\\+13 bytes"),
    ],
)
def test_demands_that_make_no_sense_are_named(tmp_path: Path, line: str, message: str) -> None:
    path = written(tmp_path, "jobs.csv", PLAIN, "0,60,100,51200,3e15", line)
    with pytest.raises(InputError, match=f"line 3, {message}"):
        read_trace(path)
    assert len(read_trace(path, bad_rows="skip")) == 1


@pytest.mark.parametrize(
    ("name", "header", "line", "message"),
    [
        ("cluster_log.csv", HELIOS, helios_row().replace(",8,64,", ",8,0,"), "cpu_num: got 0 CPUs"),
        ("cluster_log.csv", HELIOS, helios_row().replace(",8,64,", ",8,lots,"), "cpu_num: got 'lots'"),
        ("trace_kalos.csv", KALOS, kalos_row().replace(",960,1000,", ",-1,1000,"), "cpu_num: got -1 CPUs"),
        ("trace_kalos.csv", KALOS, kalos_row().replace(",960,1000,", ",960,1T,"), "mem_per_pod_GB: got '1T'"),
        ("trace_kalos.csv", KALOS, kalos_row().replace(",960,1000,", ",960,-2,"), "mem_per_pod_GB: got -1.6e"),
    ],
)
def test_impossible_demands_are_named_by_the_files_own_columns(
    tmp_path: Path, name: str, header: str, line: str, message: str
) -> None:
    with pytest.raises(InputError, match=f"line 2, {message}"):
        read_trace(written(tmp_path, name, header, line))
