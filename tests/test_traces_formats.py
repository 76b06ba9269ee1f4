"""What every format of job logs in the folder must do, found by being there."""

from __future__ import annotations

import gzip
import math
from array import array
from pathlib import Path

import pytest
from test_traces_alibaba import OPENB, SPOT, pod
from test_traces_clusters import HELIOS, KALOS, helios_row, kalos_row, swf
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


def columns(rows: TraceRows) -> dict[str, array]:  # type: ignore[type-arg]
    found = {name: getattr(rows, name) for name in TraceRows.__slots__}
    return {name: each for name, each in found.items() if isinstance(each, array) and name != "retry_gap_s"}


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
    for length in range(len(SAMPLES[name].encode())):
        path = sample(tmp_path, name, cut=length)
        refused = ""
        try:
            rows = read_trace(path, format_name=name, bad_rows="skip")
        except InputError as error:
            refused = str(error)
        assert str(path) in refused if refused else len(rows)
