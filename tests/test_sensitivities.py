"""How input pipelines depend on CPUs and memory: the formula, tables of measurements, and the published profiles."""

import csv
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jobs import workload

from synergy_core.errors import InputError
from synergy_core.performance.catalog import load_model
from synergy_core.performance.goodput.pipeline import Pipeline, PipelineTable
from synergy_core.scheduling.jobs.cluster import Cluster, NodeType
from synergy_core.units import GB
from synergy_sim.assignment import as_given
from synergy_sim.execution import Costs
from synergy_sim.truth import Truth
from synergy_sim.truth.measured import published_pipelines

FOLDER = Path(os.environ.get("SYNERGY_DATA") or "/nowhere") / "resource_sensitivity"
needs_profiles = pytest.mark.skipif(not FOLDER.is_dir(), reason="SYNERGY_DATA has no resource_sensitivity/")
MODELS = "model,gpu,batch_size,iter_time_s_at_proportional,best_cpus_per_gpu,best_memory_gb_per_gpu,best_speedup\n"
SPEEDS = "model,cpus_per_gpu,memory_gb_per_gpu,relative_throughput\n"
ONE_MODEL = "lenet,V100,100,2.0,4,50,1.5\n"
ONE_GRID = "lenet,1,20,0.1\nlenet,1,50,0.5\nlenet,4,20,0.1\nlenet,4,50,1.5\n"


def sample_s(pipeline, cpus, memory_gb, **more):
    return pipeline.sample_s(cpus, np.asarray(memory_gb) * GB, storage_bytes_per_s=1e9, **more)


def written(folder, models=ONE_MODEL, speeds=ONE_GRID):
    (folder / "models.csv").write_text(MODELS + models)
    (folder / "cpu_memory_throughput.csv").write_text(SPEEDS + speeds)
    return folder


def rows_of(name):
    with open(FOLDER / name, newline="") as file:
        return list(csv.DictReader(file))


@needs_profiles
def test_published_speeds_are_exact_wherever_they_were_published():
    """Of input alone, and of a step wherever input or GPU is slower."""
    published, truth = published_pipelines(FOLDER), Truth(None, sensitivities=FOLDER)
    models = {row["model"]: row for row in rows_of("models.csv")}
    compared = [0, 0]
    for row in rows_of("cpu_memory_throughput.csv"):
        name, model = row["model"], models[row["model"]]
        batch, base_s = int(model["batch_size"]), float(model["iter_time_s_at_proportional"])
        asked = float(row["cpus_per_gpu"]), float(row["memory_gb_per_gpu"])
        told_s = pytest.approx(base_s / float(row["relative_throughput"]), rel=1e-12)
        if name in published:
            assert batch * float(sample_s(published[name], *asked)) == told_s
            compared[0] += 1
        if name in truth.names and name != "bert":
            app = truth.application(name)
            assert app.initial_batch == batch
            assert max(app.step("v100", (1,), batch).step_s, batch * float(sample_s(app.pipeline, *asked))) == told_s
            compared[1] += 1
    assert compared == [11 * 45, 10 * 45]
    assert 512 * float(sample_s(published["alexnet"], 12, 125)) == pytest.approx(0.6 / 2.94, rel=1e-12)


@needs_profiles
def test_what_a_published_model_gains_from_at_most_is_as_published():
    published = published_pipelines(FOLDER)
    assert "bert" not in published
    for row in rows_of("models.csv"):
        if row["model"] in published:
            best = published[row["model"]].enough(1e-9, storage_bytes_per_s=1e9)
            assert best == (float(row["best_cpus_per_gpu"]), float(row["best_memory_gb_per_gpu"]) * GB)
            fastest_s = float(sample_s(published[row["model"]], 24, 250))
            told = float(sample_s(published[row["model"]], best[0], best[1] / GB))
            assert told == pytest.approx(fastest_s, rel=1e-12)


@needs_profiles
def test_giving_up_memory_where_the_published_value_is_a_stand_in_never_pays():
    low, high = 20.83, 62.5
    between = np.linspace(low, high, 50)
    for name, table in published_pipelines(FOLDER).items():
        for cpus in (1, 3, 12, 24):
            rate = 1 / sample_s(table, cpus, between)
            if rate[0] < rate[-1]:
                # Equal at the least speed, 0.3 at 62.5 GB, but for the rounding of 62.5 ÷ 3 to 20.83.
                assert (rate <= rate[-1] * between / high * (1 + 2e-4)).all(), name
                assert np.diff(rate) == pytest.approx(np.full(49, (rate[-1] - rate[0]) / 49))
            assert float(sample_s(table, cpus, 0.0)) == pytest.approx(1 / rate[0])


@needs_profiles
def test_more_of_anything_never_slows_a_published_model():
    cpus, memory_gb = np.linspace(0.0, 30.0, 61), np.linspace(0.0, 300.0, 61)
    for table in published_pipelines(FOLDER).values():
        seconds = sample_s(table, cpus[:, None], memory_gb[None, :])
        assert (np.diff(seconds, axis=0) <= 1e-15).all()
        assert (np.diff(seconds, axis=1) <= 1e-15).all()
        assert np.isfinite(seconds).all()


def test_schedulers_are_told_of_the_input_and_users_where_it_is_known_from(tmp_path):
    machine = Cluster((NodeType("v", "v100", 2, 8, 24, 500 * GB, 5e8),))
    silent = Cluster((NodeType("v", "v100", 2, 8),))
    truth = Truth(
        None, sensitivities=written(tmp_path, ONE_MODEL.replace("lenet", "gnmt"), ONE_GRID.replace("lenet", "gnmt"))
    )
    work = workload([(0, 1, 100), (0, 1, 100)], models=["gnmt", "bert"])
    work = work.with_columns(global_batch=np.array([128, 12], dtype=np.int32))
    made = as_given(work, machine, truth)
    specs = [truth.spec(made, job, machine, Costs()) for job in (0, 1)]
    assert isinstance(specs[0].pipeline, PipelineTable)
    assert specs[1].pipeline == load_model("bert").pipeline == truth.application("bert").pipeline
    for each in ("V100 not measured", "input of bert from the catalog", f"input of gnmt as published ({tmp_path})"):
        assert each in made.notes[-1]
    assert "input" not in as_given(work, silent, truth).notes[-1]


@pytest.mark.parametrize(
    ("seconds", "cpus", "memory_gb", "expected"),
    [
        ([[1.0, 0.5], [0.8, 0.4]], [2, 1, 0.5], 1.0, [1, 2, 4]),  # with fewer CPUs than measured: in proportion
        ([[1.0, 0.5], [0.8, 0.4]], [3, 9], 2.0, [1 / 2.25, 0.4]),
        ([[1.0, 2.0], [4.0, 0.5]], [2, 2, 4, 4], [1, 2, 1, 2], [1, 1, 1, 0.5]),  # a table that falls counts as level
    ],
)
def test_speeds_between_and_outside_what_was_measured(seconds, cpus, memory_gb, expected):
    table = PipelineTable([2, 4], [GB, 2 * GB], np.array(seconds), (4, 2 * GB))
    assert sample_s(table, cpus, memory_gb) == pytest.approx(expected)


@given(
    cpu_s=st.floats(1e-5, 1.0),
    sample_bytes=st.floats(0.0, 1e7),
    data_gb=st.floats(0.1, 1000),
    gpu_sample_s=st.floats(1e-5, 1.0),
    node_gpus=st.integers(1, 8),
)
def test_with_what_is_enough_input_just_keeps_up(cpu_s, sample_bytes, data_gb, gpu_sample_s, node_gpus):
    pipeline = Pipeline(cpu_s, sample_bytes, data_gb * GB)
    node = {"storage_bytes_per_s": 1e8, "node_gpus": node_gpus}
    cpus, memory = pipeline.enough(gpu_sample_s, **node)
    assert float(pipeline.sample_s(cpus, memory, **node)) <= gpu_sample_s * max(1.0, cpus / 1e-3) * (1 + 1e-6)
    if cpus >= 2e-3:
        assert float(pipeline.sample_s(cpus / 2, memory, **node)) == pytest.approx(2 * gpu_sample_s, rel=1e-6)


def test_a_pipeline_in_closed_form():
    pipeline = Pipeline(cpu_s=0.004, sample_bytes=1e5, data_bytes=100 * GB)
    node = {"storage_bytes_per_s": 1e8}
    assert float(pipeline.sample_s(2, 100 * GB, **node)) == pytest.approx(0.002)
    assert float(pipeline.sample_s(100, 0, **node)) == pytest.approx(1e-3)
    assert float(pipeline.sample_s(100, 25 * GB, **node)) == pytest.approx(0.75e-3)
    assert float(pipeline.sample_s(100, 25 * GB, **node, node_gpus=2)) == pytest.approx(0.5e-3)


@pytest.mark.parametrize(
    "constants",
    [(-1.0, 0.0, 1.0), (1.0, -1.0, 1.0), (1.0, 1.0, 0.0), (float("nan"), 1.0, 1.0), (1.0, 1.0, float("inf"))],
)
def test_constants_that_no_pipeline_has_are_refused(constants):
    with pytest.raises(InputError, match="expected a finite number"):
        Pipeline(*constants)


def test_a_small_table_is_read_as_it_says(tmp_path):
    table = published_pipelines(written(tmp_path))["lenet"]
    assert 100 * sample_s(table, [1, 1, 4, 4], [20, 50, 20, 50]) == pytest.approx([20, 4, 20, 2 / 1.5])


@pytest.mark.parametrize(
    ("models", "speeds", "complaint"),
    [
        (
            ONE_MODEL,
            ONE_GRID.replace("lenet,4,20,0.1\n", ""),
            r"cpu_memory\S+: 1 rows of lenet .* lenet,4,20,THROUGHPUT",
        ),
        (ONE_MODEL, ONE_GRID.replace("1,50,0.5", "0,50,0.5"), r"line 3, column cpus_per_gpu: got '0'"),
        (ONE_MODEL, ONE_GRID.replace("1,50,0.5", "-1,50,0.5"), r"line 3, column cpus_per_gpu: got '-1'"),
        (ONE_MODEL, ONE_GRID.replace("0.5", "nan"), r"line 3, column relative_throughput: got 'nan'"),
        (ONE_MODEL, ONE_GRID.replace("0.5", "0"), r"line 3, column relative_throughput: got '0'"),
        (ONE_MODEL, ONE_GRID.replace("1,50", "1,"), r"line 3, column memory_gb_per_gpu: got ''"),
        (ONE_MODEL, ONE_GRID + "lenet,1,20,0.2\n", r"line 6: lenet with 1 CPUs and 20 GB has two rows"),
        (ONE_MODEL, ONE_GRID + "vgg,1,20,0.2\n", r"models.csv: has no row of vgg"),
        (ONE_MODEL, "lenet,1,20,0.1\nlenet,1,50,0.5\n", r"measured at 1 values of CPUs and 2 of memory"),
        (ONE_MODEL.replace("2.0", "0"), ONE_GRID, r"line 2, column iter_time_s_at_proportional: got '0'"),
        (ONE_MODEL * 2, ONE_GRID, r"models.csv, line 2: lenet has 2 rows here"),
        (ONE_MODEL + ONE_MODEL.replace("lenet", "vgg"), ONE_GRID, r"models.csv, line 3: vgg has 1 rows here and 0 in"),
    ],
)
def test_tables_with_holes_or_nonsense_are_refused_by_file_and_line(tmp_path, models, speeds, complaint):
    with pytest.raises(InputError, match=complaint):
        published_pipelines(written(tmp_path, models, speeds))
