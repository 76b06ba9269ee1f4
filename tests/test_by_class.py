"""Models drawn by class for rows of a log, their work, and the experiment that compares mechanisms on them."""

import csv
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from composed import composed
from jobs import finish_s, workload
from training_jobs import CATALOG

from synergy_core.errors import InputError
from synergy_core.scheduling.jobs.cluster import Cluster, NodeType
from synergy_core.scheduling.policies import get_policy
from synergy_core.units import GB, MB
from synergy_runs.generators.by_class import CLASSES, in_turn
from synergy_runs.inputs.from_settings import cluster_of, workload_of
from synergy_sim.assignment import PROFILED_ON, by_class
from synergy_sim.execution import Costs, ExecutionModel
from synergy_sim.prepare import prepared_runs, trained, truth_of
from synergy_sim.simulate import simulate

FOLDER = Path(os.environ.get("SYNERGY_DATA") or "/nowhere") / "resource_sensitivity"
MODELS = [model for _, models in CLASSES for model in models]
MIX = (20.0, 70.0, 10.0)
FREE = ExecutionModel(costs=Costs(launch_s=0.0, restart_s=0.0))


def nodes(cpus, memory_gb=500.0, count=1):
    return Cluster(
        (NodeType("n", "v100", count, 8, cpus=cpus, memory_bytes=memory_gb * GB, storage_bytes_per_s=500 * MB),)
    )


ONE_NODE, OWN, BARE = nodes(24.0), nodes(24.0, count=2), Cluster((NodeType("n", "v100", 2, 8),))


def names_of(made):
    return list(made.jobs["model"])


def ran_s(made, machines, truth=CATALOG):
    """How long each job runs where nobody waits."""
    done = simulate(made, machines, get_policy("fifo"), FREE, truth=truth)
    return finish_s(done) - made.jobs["submit_time_s"]


@pytest.mark.parametrize("machines", [OWN, BARE], ids=["as profiled", "without CPUs"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("gpus", [1, 4, 16])
def test_a_job_runs_for_its_traced_time_to_within_an_iteration(machines, model, gpus):
    rows = [(0.0, gpus, 5_000.3), (1e6, gpus, 40_000.7)]
    made = by_class(workload(rows, models=[model] * 2), machines, CATALOG, MIX)
    short_s = made.jobs["duration_s"] - ran_s(made, machines)
    assert (short_s >= -1e-3).all()
    assert (short_s <= made.jobs["duration_s"] / made.jobs["iterations"]).all()
    assert (made.jobs["iterations"] % 1 == 0).all()


def test_nodes_with_more_cpus_than_profiled_finish_jobs_that_gain_from_them_earlier():
    rows = [(1e6 * at, 1, 36_000.0) for at in range(len(MODELS))]
    own, more = (by_class(workload(rows, models=MODELS), each, CATALOG, MIX) for each in (OWN, nodes(48.0)))
    assert (own.jobs["iterations"] == more.jobs["iterations"]).all()
    faster = dict(zip(MODELS, ran_s(own, OWN) / ran_s(more, nodes(48.0)), strict=True))
    assert faster["alexnet"] == pytest.approx(1.75, rel=0.2)
    assert min(faster.values()) > 1 - 1e-9
    assert [faster[name] for name in CLASSES[1][1]] == pytest.approx([1.0] * 3, abs=1e-3)


def test_a_job_that_waits_for_its_input_may_be_stopped_in_a_later_epoch():
    """Between its last decision and its stop it has gone through epochs, at the speed of where it was."""
    made = by_class(workload([(0.0, 8, 50_000.0), (30_000.0, 8, 60.0)], models=["alexnet"] * 2), ONE_NODE, CATALOG, MIX)
    done = simulate(made, ONE_NODE, get_policy("srtf"), FREE, truth=CATALOG)
    run_s = (finish_s(done) - made.jobs["submit_time_s"]) - np.array([finish_s(done)[1] - 30_000.0, 0.0])
    assert run_s == pytest.approx(made.jobs["duration_s"], abs=1.0)


def test_a_job_too_short_for_an_iteration_does_one():
    made = by_class(workload([(0.0, 1, 0.1)], models=["res50"]), OWN, CATALOG, MIX)
    assert made.jobs["iterations"].tolist() == [1.0]


def test_named_models_stay_and_silent_rows_take_turns():
    rows = [(float(at), 1, 3_600.0) for at in range(40)]
    named = ["m5" if at % 4 == 0 else "" for at in range(40)]
    made = by_class(workload(rows, models=named), OWN, CATALOG, MIX)
    found = names_of(made)
    assert found[::4] == ["m5"] * 10
    assert [name for at, name in enumerate(found) if at % 4] == in_turn(MIX, 30)


def test_carrying_jobs_in_changes_no_other_job_s_model():
    rows = [(float(at), 1, 3_600.0) for at in range(30)]
    all_own = workload(rows)
    carried = all_own.with_columns(carried=np.arange(30) < 10)
    found = names_of(by_class(carried, OWN, CATALOG, MIX))
    assert found[10:] == in_turn(MIX, 20)
    assert found[10:] + found[:10] == in_turn(MIX, 30)


def test_a_batch_grows_with_the_gpus():
    made = by_class(workload([(0.0, gpus, 3_600.0) for gpus in (1, 4, 16)], models=["res18"] * 3), OWN, CATALOG, MIX)
    assert made.jobs["global_batch"].tolist() == [512, 2_048, 8_192]


def test_a_model_that_nobody_knows_is_refused_by_its_line():
    made = workload([(0.0, 1, 60.0)], models=["alexnett"]).with_columns(line=np.array([7], dtype=np.int32))
    with pytest.raises(InputError, match=r"line 7: unknown application alexnett; known: alexnet"):
        by_class(made, OWN, CATALOG, MIX)


def test_philly_keeps_arrivals_gpus_and_run_times():
    settings = composed("+trace=philly", "trace.find=[]", "trace.window=1d", "trace.models=by_class")
    plain = workload_of(settings.trace, settings.cluster, 3)
    machines = cluster_of(settings.cluster, settings.trace, plain)
    made = trained(settings, plain, machines, truth_of(settings, 3), [], 3)
    for column in ("submit_time_s", "gpus", "duration_s"):
        assert (made.jobs[column] == plain.jobs[column]).all()
    of_class = Counter(next(name for name, models in CLASSES if model in models) for model in names_of(made))
    assert {name: count / len(made) for name, count in of_class.items()} == pytest.approx(
        {"image": 0.2, "language": 0.7, "speech": 0.1}, abs=2 / len(made)
    )


@pytest.mark.skipif(not FOLDER.is_dir(), reason="SYNERGY_DATA has no resource_sensitivity/")
def test_published_jobs_have_the_published_iterations():
    """Those of the published simulator: run time ÷ iteration at the proportional share, rounded down."""
    (prepared,) = prepared_runs(composed("experiment=synergy_osdi22", "policy=fifo"))
    with (FOLDER / "models.csv").open(newline="") as stream:
        iteration_s = {row["model"]: float(row["iter_time_s_at_proportional"]) for row in csv.DictReader(stream)}
    with (FOLDER / "workload_9_per_hour_seed42.csv").open(newline="") as stream:
        published = [float(row["duration_s"]) // iteration_s[row["model"]] for row in csv.DictReader(stream)]
    assert prepared.workload.jobs["iterations"].tolist() == published


def test_the_experiment_is_the_published_cluster_and_measures_its_thousand_jobs():
    (prepared,) = prepared_runs(composed("experiment=synergy_osdi22", "policy=fifo"))
    (node,) = prepared.cluster.node_types
    assert (node.gpu_type, node.nodes, node.gpus_per_node) == ("v100", 16, 8)
    assert (node.proportional, node.storage_bytes_per_s) == (PROFILED_ON.proportional, 500e6)
    assert (prepared.seed, len(prepared.workload)) == (42, 9_000)
    assert np.flatnonzero(prepared.workload.jobs["measured"]).tolist() == list(range(4_000, 5_000))
    execution = prepared.execution
    assert (execution.round_s, execution.whole_rounds, execution.free_moves) == (300.0, True, True)
    assert execution.costs.restart_s == execution.costs.launch_s == 0.0
