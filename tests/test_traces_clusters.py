"""Helios, Acme and the Standard Workload Format."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from synergy_core.errors import InputError
from synergy_runs.traces import read_trace
from synergy_runs.traces.helios import daily_quotas
from synergy_runs.traces.rows import END_STATES, TraceRows, epoch_s


def written(folder: Path, name: str, *lines: str) -> Path:
    path = folder / name
    path.write_text("".join(line + "\n" for line in lines))
    return path


def states(rows: TraceRows) -> list[str]:
    return [END_STATES[code] for code in rows.end_state]


HELIOS = "job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue"
T0, T1, T2 = "2020-06-09 18:41:01", "2020-06-09 18:41:11", "2020-06-09 18:42:11"


def helios_row(job: str = "7", vc: str = "vcA", gpus: str = "8", state: str = "COMPLETED", times: str = "") -> str:
    return f"{job},u1,{vc},{gpus},64,1,{state},{times or f'{T0},{T1},{T2},60,10'}"


def test_helios_jobs_with_their_end_states(tmp_path: Path) -> None:
    logged = ["COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL"]
    rows = read_trace(written(tmp_path, "cluster_log.csv", HELIOS, *[helios_row(each, state=each) for each in logged]))
    assert rows.format_name == "helios"
    assert states(rows) == ["completed", "killed", "failed", "failed", "failed"]
    assert (rows.submit_s[0], rows.duration_s[0], rows.gpus[0], rows.job_name[0]) == (epoch_s(T0), 60, 8, "COMPLETED")
    assert not rows.notes


def test_helios_quotas_are_those_of_the_first_day_on_which_the_cluster_was_largest(tmp_path: Path) -> None:
    written(
        tmp_path,
        "cluster_gpu_number.csv",
        "date,vcA,vcB,vcC,total",
        "2020-06-08,99,99,99,297",
        "2020-06-09,8,0,0,8",
        "2020-06-10,16,8,0,24",
        "2020-06-11,8,16,0,24",
    )
    late = helios_row("9", times="2020-06-11 00:00:00,2020-06-11 00:00:00,2020-06-11 00:01:00,60,0")
    rows = read_trace(written(tmp_path, "cluster_log.csv", HELIOS, helios_row(), helios_row("8", "vcC"), late))
    assert rows.quotas == {"vcA": 16, "vcB": 8}
    assert "2020-06-10" in rows.notes[0]
    assert rows.notes[1].endswith("vcC (1 jobs)")


def test_a_bad_quota_file_is_an_error_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="line 3, vcA: got 'lots'"):
        daily_quotas(
            written(tmp_path, "cluster_gpu_number.csv", "date,vcA,total", "2020-06-09,8,8", "2020-06-10,lots,8")
        )
    with pytest.raises(InputError, match=r"line 2, .*got 2 fields.*expected 3"):
        daily_quotas(written(tmp_path, "cluster_gpu_number.csv", "date,vcA,total", "2020-06-09,8"))
    with pytest.raises(InputError, match="line 1: got 'day,vcA'"):
        daily_quotas(written(tmp_path, "cluster_gpu_number.csv", "day,vcA"))


def test_the_philly_variant_of_helios_artifact_is_read(tmp_path: Path) -> None:
    header = "user,vc,jobname,gpu_num,state,submit_time,start_time,end_time,duration"
    rows = read_trace(written(tmp_path, "philly.csv", header, f"u,6214e9,app_1,4,Pass,{T0},{T1},{T2},60"))
    assert (rows.format_name, rows.job_name, rows.virtual_clusters.values()) == ("helios", ["app_1"], ("6214e9",))


SEREN = "job_id,user,node_num,gpu_num,cpu_num,type,state,submit_time,start_time,end_time,duration,queue,gpu_time"
KALOS = (
    "job_id,user,node_num,gpu_num,cpu_num,mem_per_pod_GB,shared_mem_per_pod,type,state,submit_time,start_time,end_time,"
    "fail_time,stop_time,duration,queue,gpu_time"
)


def test_acme_seren_is_read_in_utc(tmp_path: Path) -> None:
    start, end = "2023-03-01 00:18:54+08:00", "2023-03-01 00:20:51+08:00"
    line = f"57,u5,1,8,128,Other,FAILED,2023-03-01 00:18:22+08:00,{start},{end},117,32,936.0"
    rows = read_trace(written(tmp_path, "trace_seren.csv", SEREN, line))
    assert rows.format_name == "acme"
    assert (rows.submit_s[0], rows.duration_s[0], rows.gpus[0]) == (epoch_s("2023-02-28 16:18:22"), 117, 8)
    assert not rows.notes


def kalos_row(
    end: str = "2023-05-17 11:01:16+00:00", duration: str = "18", gpus: str = "64", start: str = "s", job: str = "dlc"
) -> str:
    start = "2023-05-17 11:01:08+00:00" if start == "s" else start
    times = f"2023-05-17 11:00:58+00:00,{start},{end},{end},"
    return f"{job},u,8,{gpus},960,1000,100.0,Other,FAILED,{times},{duration},10.0,1152.0"


def test_acme_kalos_durations_have_the_queueing_time_taken_off(tmp_path: Path) -> None:
    rows = read_trace(written(tmp_path, "trace_kalos.csv", KALOS, kalos_row(), kalos_row(end="", job="other")))
    assert list(rows.duration_s) == [8, 8]
    assert not rows.notes


def test_acme_counts_rows_that_disagree(tmp_path: Path) -> None:
    rows = read_trace(written(tmp_path, "trace_kalos.csv", KALOS, kalos_row(duration="8")))
    assert list(rows.duration_s) == [8]
    assert rows.notes == ["1 rows whose duration − queue is not end − start (end − start is used)"]


def swf(
    job: int = 1,
    run: str = "60",
    procs: str = "4",
    asked: str = "4",
    status: str = "1",
    limit: str = "90",
    queue: int = 2,
) -> str:
    return f"{job} 100 5 {run} {procs} -1 -1 {asked} {limit} -1 {status} 7 3 -1 {queue} -1 -1 -1"


def test_swf_fields_are_taken_as_the_archive_defines_them(tmp_path: Path) -> None:
    sizeless = swf(2, procs="-1", asked="16", queue=-1, limit="-1")
    lines = ["; Version: 2.2", ";  UnixStartTime: 1000000000", "", swf(), sizeless]
    rows = read_trace(written(tmp_path, "log.txt", *lines))
    assert rows.format_name == "swf"
    assert list(rows.submit_s) == [1_000_000_100] * 2
    assert (list(rows.gpus), rows.estimate_s[0], list(rows.line)) == ([4, 16], 90, [4, 5])
    assert np.isnan(rows.estimate_s[1])
    assert rows.virtual_clusters.values() == ("queue-2", "group-3")
    assert rows.users.values() == ("7",)


def test_swf_end_states_and_parts_of_jobs(tmp_path: Path) -> None:
    lines = [swf(job, status=each) for job, each in enumerate(("1", "0", "5", "-1", "2", "3", "4"))]
    rows = read_trace(written(tmp_path, "log.swf", *lines))
    assert states(rows) == ["completed", "failed", "killed", "completed"]
    assert sum(rows.left_out.values()) == 3
    assert any("UnixStartTime" in note for note in rows.notes)
