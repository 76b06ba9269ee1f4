"""Lists of training jobs, ours and Arena's: models and work instead of run times."""

from pathlib import Path

import pytest
from test_traces_clusters import written

from synergy_runs.traces import read_trace
from synergy_runs.workload import Workload, from_rows

ARENA = "job_id,submission_time,num_iteration,model_name,deadline,batch_size,num_gpu,gpu_type"


def read(folder: Path, *lines: str) -> Workload:
    return from_rows(read_trace(written(folder, "jobs.csv", *lines)), name="jobs")


def columns(made: Workload) -> dict[str, list[object]]:
    return {
        "job": made.job_name,
        "submit": made.submit_time_s.tolist(),
        "model": [made.models[code] for code in made.model_code],
        "iterations": made.iterations.tolist(),
        "gpus": made.gpus.tolist(),
        "batch": made.global_batch.tolist(),
        "type": [made.gpu_types[code] for code in made.gpu_type_code],
        "user": [made.users[code] for code in made.user_code],
    }


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (
            ("submit_s,model,iterations", "5,gpt,100", "0,mlp,20"),
            {"submit": [0, 5], "model": ["mlp", "gpt"], "iterations": [20, 100], "gpus": [1, 1], "batch": [0, 0]},
        ),
        (
            ("job,gpu_type,global_batch,gpus,iterations,model,submit_s,user", "a,CPU,32,2,7,cnn,1.5,me"),
            {"job": ["a"], "submit": [1.5], "gpus": [2], "batch": [32], "type": ["cpu"], "user": ["me"]},
        ),
        (
            (ARENA, "a-1,120,1500,moe__2.4B,900.5,256,8,a40", "b-2,60,30,wide_resnet__2B,100,512,2,v100"),
            {
                "job": ["b-2", "a-1"],
                "submit": [60, 120],
                "model": ["arena-wresnet-2b", "arena-moe-2.4b"],
                "iterations": [6, 300],  # a fifth of what is logged
                "batch": [512, 256],
                "type": ["v100", "a40"],
            },
        ),
    ],
)
def test_jobs_have_their_model_work_and_what_they_ask_for(
    tmp_path: Path, lines: tuple[str, ...], expected: dict[str, list[object]]
) -> None:
    found = columns(read(tmp_path, *lines))
    assert {name: found[name] for name in expected} == expected


def test_arenas_unprocessed_files_have_a_run_time_instead_of_a_type(tmp_path: Path) -> None:
    made = read(tmp_path, ARENA.replace("gpu_type", "duration"), "a,3,40,gpt2,99,256,1,1183")
    assert (made.duration_s.tolist(), made.gpu_types, made.models) == ([1183.0], ("",), ("gpt2",))
