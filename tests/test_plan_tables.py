"""Published tables of measured plans as the truth of a simulation, and policies on them; tables of our own making."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from synergy_core.errors import InputError
from synergy_core.scheduling.jobs.testbed_profiles import degrees_of
from synergy_runs.inputs.command_line import composed
from synergy_runs.inputs.from_settings import read_profile
from synergy_runs.inputs.keys import build
from synergy_sim.run import simulate_all
from synergy_sim.settings import SIMULATOR, SimulatorSettings

RUBICK = ["model", "plan", "pp", "tp", "dp", "gpus_per_node_used", "gpus", "nodes", "iter_time_s"]


def rubick_rows():
    """bert: data parallelism on one node, and two ways to split 8 GPUs over two. llama7: offloading, and 3D plans."""
    alone = [("bert", plan, "", "", "", str(gpus), gpus, 1, s * 8 / gpus)
             for plan, s in (("ga", 0.2), ("gc", 0.25), ("zero-offload", 0.3)) for gpus in (1, 2, 4, 8)]  # fmt: skip
    apart = [("bert", "ga", "", "", "", split, 8, 2, s) for split, s in (("44", 0.3), ("26", 0.5))]
    big = [("llama7", "zero-offload", "", "", "", "8", 8, 1, 9.0), ("llama7", "3d", 1, 8, 2, "88", 16, 2, 1.0)]
    big += [("llama7", "3d", 2, 4, 2, "88", 16, 2, 1.5), ("llama7", "3d", 4, 1, 5, "5555", 20, 4, 1.5)]
    return [*alone, *apart, *big]


@pytest.fixture
def rubick(tmp_path) -> Path:
    path = tmp_path / "iteration_times.csv"
    pd.DataFrame(rubick_rows(), columns=RUBICK).to_csv(path, index=False)
    return path


@pytest.fixture
def arena(tmp_path) -> Path:
    """bert 760M at 256 and, without a time that fits, at 128; data parallelism fits on 2 GPUs of 40 GB, not on 1."""
    columns = ["source", "model", "size", "batch_size", "gpu_type", "num_nodes", "gpus_per_node", "num_gpus",
               "best_of_config", "iter_time_s"]  # fmt: skip
    rows = [("measured_best", "bert", "760M", 256, "a100", 1, gpus, gpus, 1, 8.0 / gpus) for gpus in (1, 2, 4)]
    rows += [("measured_best", "bert", "760M", 128, "a100", 1, 1, 1, 1, -1.0),
             ("arena_estimated_plan", "bert", "760M", 256, "a100", 1, 4, 4, 0, 0.1)]  # fmt: skip
    path = tmp_path / "throughput_by_plan.csv"
    pd.DataFrame(rows, columns=columns).to_csv(path, index=False)
    needs = [("bert", "760M", 256, gpus, gb) for gpus, gb in ((1, 30.0), (2, 20.0), (4, 12.0))]
    memory = pd.DataFrame(needs, columns=["model", "size", "batch_size", "num_gpus", "dp_mem_gb"])
    memory.to_csv(tmp_path / "dp_mem.csv", index=False)
    return path


def test_a_split_over_nodes_has_its_own_time_and_one_not_measured_the_mean_of_the_nearest(rubick):
    model = read_profile(rubick)["rubick-bert"]
    assert model.step_s("a800", (8,), 32) == 0.2
    assert model.step_s("a800", (6, 2), 32) == model.step_s("a800", (2, 6), 32) == 0.5
    assert model.step_s("a800", (3, 5), 32) == model.step_s("a800", (2, 2, 4), 32) == pytest.approx(0.4)
    assert model.step_s("a800", (3,), 32) == np.inf  # nothing was measured on 3 GPUs


def test_plans_keep_their_degrees_where_these_were_measured_and_else_are_the_fastest_there(rubick):
    model = read_profile(rubick)["rubick-llama7"]
    held = next(row.plan for row in model.rows if row.plan.pipeline == 2)
    assert model.step_s("a800", (8, 8), 8, degrees_of(held)) == 1.5
    assert model.step_s("a800", (8,), 8, degrees_of(held)) == 9.0
    assert model.best("a800", 1, 8, 8).plan.offload
    assert model.best("a800", 4, 20, 8) is None  # five replicas do not divide a batch of 8


def test_policies_without_plans_know_replicas_of_the_smallest_plan(rubick, arena):
    model = read_profile(rubick)["rubick-llama7"]
    assert model.best("a800", 2, 16, 8, replicas_only=True) is None
    assert model.best("a800", 1, 8, 8, replicas_only=True).step_s == 9.0
    model = read_profile(arena)["arena-bert-760m"]
    known = [model.best("a100", 1, gpus, 256, replicas_only=True) for gpus in (1, 2, 4)]
    assert [row.step_s for row in known] == [8.0, 4.0, 2.0]
    assert [row.plan.global_batch for row in known] == [256] * 3


def test_a_batch_that_was_not_measured_takes_the_nearest_in_proportion(arena):
    model = read_profile(arena)["arena-bert-760m"]
    assert [model.step_s("a100", (gpus,), 128) for gpus in (1, 2, 4)] == [4.0, 2.0, 1.0]


def test_an_unknown_table_is_refused_with_the_known_ones(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("a,b\n1,2\n", encoding="utf-8")
    with pytest.raises(InputError, match="Rubick"):
        read_profile(path)


def test_a_table_with_an_unknown_model_or_without_its_memory_is_refused(rubick, arena):
    rubick.write_text(rubick.read_text(encoding="utf-8").replace("llama7", "llama8"), encoding="utf-8")
    arena.with_name("dp_mem.csv").unlink()
    for path, named in ((rubick, "llama8"), (arena, "dp_mem.csv")):
        with pytest.raises(InputError, match=named):
            read_profile(path)


def simulated(table, folder, jobs, policy, *settings) -> pd.DataFrame:
    """The jobs (name, submission s, model, GPUs, steps, 1 if guaranteed) after a simulation, by name."""
    trace = folder / "jobs.csv"
    columns = ["name", "submission_time", "application", "num_gpus", "steps", "is_sla"]
    pd.DataFrame(jobs, columns=columns).assign(exec_plan="ga").to_csv(trace, index=False)
    overrides = ["experiment=rubick_mlsys25", f"trace.path={trace}", f"truth.profile={table}", f"policy=[{policy}]",
                 "same_information=false", "figures=false", "progress=false", *settings]  # fmt: skip
    values = composed(SIMULATOR, overrides)
    (into,) = simulate_all(build(SimulatorSettings, values), values, folder / "results", say=False)
    return pd.read_parquet(into / "jobs.parquet").set_index("job_name")


TWO_NODES = "cluster.node_types=[{gpu_type: a800, nodes: 2, gpus_per_node: 8}]"


@pytest.mark.parametrize("policy", ["fifo", "sia", "sia+plans", "rubick", "crius", "synergy"])
def test_every_job_does_its_steps_at_measured_speed(rubick, tmp_path, policy):
    """Three jobs alone on 16 GPUs: with a restart cost of 260 s, nobody is faster than the table allows."""
    jobs = [("a", 0, "bert", 2, 1000, 0), ("b", 30, "llama7", 16, 100, 1), ("c", 4_000, "bert", 8, 500, 0)]
    done = simulated(rubick, tmp_path, jobs, policy, TWO_NODES)
    assert set(done.virtual_cluster) == {"guaranteed", "best-effort"}
    fastest_s = {"a": 1000 * 0.2, "b": 100 * 1.0, "c": 500 * 0.2}
    for name, least_s in fastest_s.items():
        assert done.jct_s[name] >= 260 + least_s - 1e-6
    if policy == "fifo":  # on two GPUs, then on 16 once the first has ended, then on 8
        assert done.jct_s["a"] == pytest.approx(260 + 1000 * 0.8)
        assert done.finish_s["b"] == pytest.approx(np.ceil(done.finish_s["a"] / 60) * 60 + 260 + 100 * 1.0)
        assert done.jct_s["c"] == pytest.approx(done.first_start_s["c"] - 4_000 + 260 + 500 * 0.2)


@pytest.mark.parametrize("guaranteed", [0, 1])
def test_rubick_takes_gpus_from_the_flattest_curve_down_to_what_was_guaranteed(tmp_path, guaranteed):
    """On one node a job that gains little beyond one GPU holds all eight; two others, which scale, arrive."""
    flat = [("bert", "ga", "", "", "", str(gpus), gpus, 1, s) for gpus, s in ((1, 1.6), (2, 1.55), (4, 1.2), (8, 1.0))]
    steep = [("vit", "ga", "", "", "", str(gpus), gpus, 1, 4.0 / gpus) for gpus in (1, 2, 4, 8)]
    table = tmp_path / "iteration_times.csv"
    pd.DataFrame([*flat, *steep], columns=RUBICK).to_csv(table, index=False)
    jobs = [("flat", 0, "bert", 8, 2_000, guaranteed), ("one", 600, "vit", 8, 1_000, 0), ("two", 1_500, "vit", 8, 9, 0)]
    done = simulated(table, tmp_path, jobs, "rubick", TWO_NODES.replace("nodes: 2", "nodes: 1"))
    assert done.jct_s["one"] == pytest.approx(260 + 1_000 * 1.0, abs=60)  # on the four GPUs that one step down frees
    # The fewest GPUs with the speed of the request ÷ 1.5 are four; else one would do.
    waits_until_s = done.finish_s["one"] - 1_500 if guaranteed else 0.0
    assert done.waiting_s["two"] == pytest.approx(waits_until_s, abs=60)
