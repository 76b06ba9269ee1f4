"""Arena's simulation traces: columns by name, models by the catalog's names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from synergy_core.errors import InputError
from synergy_runs.traces import read_trace
from synergy_runs.workload import from_rows

HEADER = "job_id,submission_time,num_iteration,model_name,deadline,batch_size,num_gpu,gpu_type\n"


def written(folder: Path, text: str) -> Path:
    path = folder / "arena.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_job_has_its_iterations_batch_type_and_the_catalogs_model(tmp_path: Path) -> None:
    lines = "a-1,120,1500,moe__2.4B,900.5,256,8,a40\nb-2,60,30,wide_resnet__2B,100,512,2,v100\n"
    rows = read_trace(written(tmp_path, HEADER + lines))
    assert rows.format_name == "arena"
    assert list(rows.submit_s) == [120.0, 60.0]
    assert rows.models.values() == ("arena-moe-2.4b", "arena-wresnet-2b")
    assert list(rows.global_batch) == [256, 512]
    assert list(rows.iterations) == [1500.0, 30.0]
    assert rows.gpu_types.values() == ("a40", "v100")
    made = from_rows(rows, name="arena")
    assert made.job_name == ["b-2", "a-1"]
    assert made.iterations.tolist() == [30.0, 1500.0]


def test_unprocessed_files_have_a_run_time_instead_of_a_type(tmp_path: Path) -> None:
    text = HEADER.replace("gpu_type", "duration") + "a,3,40,gpt2,99,256,1,1183\n"
    rows = read_trace(written(tmp_path, text))
    assert list(rows.duration_s) == [1183.0]
    assert rows.gpu_types.values() == ("",)
    assert rows.models.values() == ("gpt2",)


def test_other_logs_do_not_say_after_how_many_iterations_jobs_are_done(tmp_path: Path) -> None:
    rows = read_trace(
        written(tmp_path, "timestamp,duration,num_gpus,gpu_time,cluster\n2017-10-09 07:01:55,66.0,1,66.0,x\n")
    )
    assert np.isnan(rows.iterations[0])


@pytest.mark.parametrize(
    ("line", "column"),
    [
        ("a,1,0,moe__2.4B,9,256,8,a40", "iterations"),
        ("a,1,5,moe__2.4B,9,256,0,a40", "num_gpu"),
        ("a,x,5,moe__2.4B,9,256,8,a40", "submission_time"),
        ("a,1,5,moe__2.4B,9,x,8,a40", "batch_size"),
    ],
)
def test_impossible_rows_are_named(line: str, column: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"line 2, {column}"):
        read_trace(written(tmp_path, HEADER + line + "\n"))
