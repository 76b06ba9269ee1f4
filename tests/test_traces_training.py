"""Lists of training jobs: models and work instead of run times."""

import pytest

from synergy_core.errors import InputError
from synergy_runs.traces import read_trace
from synergy_runs.workload import from_rows


def written(folder, text):
    path = folder / "jobs.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_what_is_not_given_is_one_gpu_and_the_models_own_batch(tmp_path):
    rows = read_trace(written(tmp_path, "submit_s,model,iterations\n5,gpt,100\n0,mlp,20\n"))
    assert rows.format_name == "training_csv"
    made = from_rows(rows, name="demo")
    assert made.submit_time_s.tolist() == [0.0, 5.0]
    assert [made.models[code] for code in made.model_code] == ["mlp", "gpt"]
    assert made.iterations.tolist() == [20.0, 100.0]
    assert made.gpus.tolist() == [1, 1]
    assert made.global_batch.tolist() == [0, 0]


def test_every_column_is_read_in_any_order(tmp_path):
    text = "job,gpu_type,global_batch,gpus,iterations,model,submit_s,user\na,CPU,32,2,7,cnn,1.5,me\n"
    made = from_rows(read_trace(written(tmp_path, text)), name="demo")
    assert (made.job_name, made.gpus.tolist(), made.global_batch.tolist()) == (["a"], [2], [32])
    assert (made.gpu_types, made.users) == (("cpu",), ("me",))


@pytest.mark.parametrize(("row", "says"), [("0,gpt,many", "iterations"), ("x,gpt,4", "submit_s")])
def test_a_row_that_cannot_be_is_named(tmp_path, row, says):
    with pytest.raises(InputError, match=f"line 2, {says}"):
        read_trace(written(tmp_path, f"submit_s,model,iterations\n{row}\n"))
