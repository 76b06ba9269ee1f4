"""What every format of job logs in the folder must do, found by being there."""

from __future__ import annotations

import gzip
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from test_traces_alibaba import OPENB, SPOT, pod
from test_traces_clusters import HELIOS, KALOS, T0, T1, T2, helios_row, kalos_row, swf, written
from test_traces_slurm import USUAL
from test_traces_tables import PHILLY

from synergy_core.errors import InputError
from synergy_runs.traces import formats, read_trace
from synergy_runs.traces.rows import TraceRows
from synergy_runs.workload import from_rows

ATTEMPT = '{"start_time": "2017-10-09 07:02:00", "end_time": "2017-10-09 08:02:00", "detail": [{"gpus": ["gpu0"]}]}'
SAMPLES = {
    "acme": f"{KALOS}\n{kalos_row(job='a')}\n{kalos_row(job='b')}\n",
    "arena": "job_id,submission_time,num_iteration,model_name,batch_size,num_gpu\na,0,9,bert__1.3B,8,2\n",
    "helios": f"{HELIOS}\n{helios_row('1')}\n{helios_row('2')}\n",
    "openb": f"{OPENB}\n{pod('a')}\n{pod('b', milli='500', memory='0')}\n",
    "osdi22_csv": "job,arrival_s,duration_s,model,gpus\n0,409,2068.5,alexnet,1\n1,951,4101.7,gnmt,1\n",
    "philly_csv": PHILLY,
    "philly_json": '[{"status": "Pass", "vc": "a", "jobid": "j", "submitted_time": "2017-10-09 07:01:55", "user": "u", '
    f'"attempts": [{ATTEMPT}]}}]\n',
    "plain": "submit_time,duration_s,gpus,cpus\n0,60,1,4\n1,60,2,\n",
    "pollux_csv": "name,time,application,num_replicas,batch_size\na,0,cifar10,2,128\n",
    "rubick": "name,submission_time,application,num_gpus,exec_plan,steps,is_sla\na,0,bert,2,ga,9,1\n",
    "slurm": "|".join(USUAL) + "\n" + "|".join(USUAL.values()) + "\n",
    "spot2026": f"{SPOT}\n1,13,A10,20,1,2,0,60,HP\n",
    "swf": swf() + "\n",
    "training_csv": "submit_s,model,iterations\n0,bert,100\n",
}


def sample(folder: Path, name: str, *, packed: bool = False, cut: int | None = None) -> Path:
    path = folder / f"log{'.gz' if packed else ''}"
    content = SAMPLES[name].encode()[:cut]
    path.write_bytes(gzip.compress(content) if packed else content)
    return path


def columns(rows: TraceRows) -> dict[str, NDArray[Any]]:
    found = {name: getattr(rows, name) for name in TraceRows.__slots__}
    return {name: each for name, each in found.items() if isinstance(each, np.ndarray) and name != "retry_gap_s"}


def test_every_format_has_a_sample() -> None:
    assert set(SAMPLES) == set(formats())


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_a_log_is_recognised_by_its_own_format_alone(tmp_path: Path, name: str) -> None:
    path, head = sample(tmp_path, name), SAMPLES[name]
    assert [each.NAME for each in formats().values() if each.recognises(path, head)] == [name]


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_every_job_has_every_column_and_its_demands_are_above_zero_or_unknown(tmp_path: Path, name: str) -> None:
    rows = read_trace(sample(tmp_path, name))
    assert {len(each) for each in columns(rows).values()} == {len(rows)} == {len(rows.job_name)}
    assert all(each > 0 or math.isnan(each) for each in (*rows.cpus, *rows.memory_bytes))
    work = from_rows(rows, name="log")
    assert (work.cpus.dtype, work.memory_bytes.dtype) == (float, float)
    assert len(work.cpus) == len(work.memory_bytes) == len(work)


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_a_log_reads_the_same_packed_by_gzip(tmp_path: Path, name: str) -> None:
    plain, packed = read_trace(sample(tmp_path, name)), read_trace(sample(tmp_path, name, packed=True))
    assert packed.format_name == name
    assert (packed.job_name, packed.notes, packed.left_out) == (plain.job_name, plain.notes, plain.left_out)
    assert {key: each.tobytes() for key, each in columns(packed).items()} == {
        key: each.tobytes() for key, each in columns(plain).items()
    }


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_a_log_that_is_cut_off_anywhere_is_read_or_refused_with_its_name(tmp_path: Path, name: str) -> None:
    for length in range(0, len(SAMPLES[name].encode()), 3):
        path = sample(tmp_path, name, cut=length)
        refused = ""
        try:
            rows = read_trace(path, format_name=name, bad_rows="skip")
        except InputError as error:
            refused = str(error)
        assert str(path) in refused if refused else len(rows)


ARENA = "job_id,submission_time,num_iteration,model_name,batch_size,num_gpu"
TRAINING = "submit_s,model,iterations"
IMPOSSIBLE = [
    ("helios", HELIOS, helios_row(state="LOST"), "state: got 'LOST'"),
    ("helios", HELIOS, helios_row(times=f"{T0},{T1},{T2},-60,10"), "duration: got -60"),
    ("helios", HELIOS, helios_row(times=f"{T0},{T1},noon,60,10"), "end_time: got 'noon'"),
    ("helios", HELIOS, helios_row().replace(",8,64,", ",8,0,"), "cpu_num: got 0"),
    ("acme", KALOS, kalos_row(end="2023-05-17 11:01:00+00:00"), "end_time: got '2023-05-17 11:01:00"),
    ("acme", KALOS, kalos_row().replace(",960,1000,", ",-1,1000,"), "cpu_num: got -1"),
    ("acme", KALOS, kalos_row().replace(",960,1000,", ",960,1T,"), "mem_per_pod_GB: got '1T'"),
    ("acme", KALOS, kalos_row().replace(",960,1000,", ",960,-2,"), "mem_per_pod_GB: got -"),
    ("swf", swf(0), "1 2 3", "whole row: got 3 fields ending in '3', expected 18 fields"),
    ("swf", swf(0), swf(run="-60"), "run time (field 4): got -60"),
    ("swf", swf(0), swf(procs="0"), "processors (fields 5 and 8): got 0"),
    ("swf", swf(0), swf(status="9"), "status (field 11): got '9'"),
    ("swf", swf(0), "; UnixStartTime: long ago", "UnixStartTime: got 'long'"),
    ("openb", OPENB, pod(cpu="0"), "cpu_milli: got 0, expected CPUs above 0 to 10000"),
    ("openb", OPENB, pod(memory="-1"), "memory_mib: got -1048576"),
    ("openb", OPENB, pod(milli="0"), "gpu_milli: got '0', expected above 0, to 1000"),
    ("openb", OPENB, pod(milli="1001"), "gpu_milli: got '1001'"),
    ("openb", OPENB, pod(milli=""), "gpu_milli: got ''"),
    ("openb", OPENB, pod(gpus="2", milli="500"), "gpu_milli: got '500', expected 1000, since num_gpu is above 1"),
    ("openb", OPENB, pod(phase="Lost"), "pod_phase: got 'Lost', expected one of Succeeded, Failed"),
    ("openb", OPENB, pod(times="100,120,130"), "deletion_time − scheduled_time: got -10"),
    ("spot2026", SPOT, "2,13,A10,20,1,0,0,60,HP", "worker_num: got '0', expected at least 1 worker"),
    ("spot2026", SPOT, "2,13,A10,0,1,1,0,60,HP", "cpu_request × worker_num: got 0"),
    ("spot2026", SPOT, "2,13,A10,20,1,1,0,60,LP", "job_type: got 'LP', expected one of HP, Spot"),
    ("arena", ARENA, "a,1,0,moe__2.4B,256,8", "num_iteration: got 0"),
    ("arena", ARENA, "a,1,5,moe__2.4B,256,0", "num_gpu: got 0"),
    ("arena", ARENA, "a,1,5,moe__2.4B,x,8", "batch_size: got 'x'"),
    ("training_csv", TRAINING, "x,gpt,4", "submit_s: got 'x'"),
    ("training_csv", TRAINING, "0,gpt,many", "iterations: got 'many'"),
]


@pytest.mark.parametrize(("name", "header", "line", "message"), IMPOSSIBLE)
def test_an_impossible_row_is_named_by_the_files_own_columns(
    tmp_path: Path, name: str, header: str, line: str, message: str
) -> None:
    with pytest.raises(InputError) as error:
        read_trace(written(tmp_path, "log", header, line), format_name=name)
    assert f"line 2, {message}" in str(error.value)


CPU, STARTED, END = "no GPU (CPU jobs)", "never started", "no end recorded"
NOT_RUN = [
    ("helios", HELIOS, helios_row(gpus="0"), CPU),
    ("helios", HELIOS, helios_row(state="CANCELLED", times=f"{T0},,{T2},0,70"), STARTED),
    ("helios", HELIOS, helios_row(state="CANCELLED", times=f"{T0},None,{T2},,"), STARTED),
    ("helios", HELIOS, helios_row(state="SUSPENDED"), "suspended (the publishers ignore them)"),
    ("acme", KALOS, kalos_row(gpus="0"), CPU),
    ("acme", KALOS, kalos_row(start=""), STARTED),
    ("acme", KALOS, kalos_row(end="", duration=""), END),
    ("swf", ";", swf(run="-1"), "never ran, or with unknown run time (field 4 is -1)"),
    ("swf", ";", swf(run="0", procs="0", status="5"), "never ran (run time 0 on no processor)"),
    ("swf", ";", swf(procs="-1", asked="-1"), "unknown size (fields 5 and 8 are -1)"),
    ("openb", OPENB, pod(gpus="0", milli="0"), "no GPU (CPU-only pods)"),
    ("openb", OPENB, pod(phase="Pending", times="100,700,"), "never scheduled"),
    ("openb", OPENB, pod(times="100,,130"), END),
    ("spot2026", SPOT, "2,13,A10,20,0,1,0,60,HP", CPU),
]


@pytest.mark.parametrize(("name", "header", "line", "reason"), NOT_RUN)
def test_what_never_ran_is_left_out_with_its_reason(
    tmp_path: Path, name: str, header: str, line: str, reason: str
) -> None:
    with pytest.raises(InputError) as error:
        read_trace(written(tmp_path, "log", header, line), format_name=name)
    assert f"no job to replay (1 {reason})" in str(error.value)


IDS = [
    ("helios", HELIOS, helios_row("7"), helios_row("8"), "job_id: got '7'"),
    ("acme", KALOS, kalos_row(), kalos_row(job="8"), "job_id: got 'dlc'"),
    ("swf", ";", swf(7), swf(8), "job number (field 1): got '7'"),
    ("openb", OPENB, pod("first"), pod("b"), "name: got 'first'"),
    ("spot2026", SPOT, "1,13,A10,20,1,1,0,60,HP", "2,13,A10,20,1,1,0,60,HP", "job_name: got '1'"),
    ("plain", "submit_time,duration_s,gpus,job", "0,1,1,a", "1,1,1,", "job: got 'a'"),
]


@pytest.mark.parametrize(("name", "header", "line", "other", "message"), IDS)
def test_two_jobs_under_one_id_are_refused_with_both_lines(
    tmp_path: Path, name: str, header: str, line: str, other: str, message: str
) -> None:
    path = written(tmp_path, "log", header, line, other, line)
    with pytest.raises(InputError) as error:
        read_trace(path, format_name=name)
    assert f"line 4, {message}, which line 2 has too" in str(error.value)
    rows = read_trace(path, format_name=name, bad_rows="skip")
    assert (len(rows), rows.bad_count) == (2, 1)
