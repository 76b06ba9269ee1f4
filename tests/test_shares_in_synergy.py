"""CPUs and memory inside synergy's configurations: what they are worth, and what is so without them."""

from functools import cache

import numpy as np
from composed import composed
from training_jobs import random_training, run, t4s

from synergy_core.performance.goodput.pipeline import Pipeline
from synergy_core.performance.goodput.shares import SharedNode, worth_trying
from synergy_core.scheduling.jobs.cluster import Cluster, NodeType
from synergy_core.scheduling.policies import get_policy
from synergy_core.units import GB, MB
from synergy_runs.outputs.metrics import job_table
from synergy_sim.prepare import prepared_runs
from synergy_sim.simulate import simulate

CROWDED = (
    "experiment=synergy_osdi22", "trace.jobs=20", "trace.measured_jobs=null", "trace.jobs_per_hour=30",
    "cluster.nodes=2", "truth.measured=false", "seed=1",
)  # fmt: skip
MODELS = ("alexnet", "res18", "res50", "mobilenet", "shufflenet", "gnmt", "transformer", "lstm", "m5", "deepspeech")
ONE_GPU = "++truth.fixed_gpus={" + ", ".join(f"{name}: 1" for name in MODELS) + "}"
NODE = NodeType("v", "v100", 1, 8, 24.0, 500 * GB, 500 * MB)


@cache
def ran(policy, *more):
    (prepared,) = prepared_runs(composed(*CROWDED, f"policy={policy}", *more))
    return simulate(
        prepared.workload, prepared.cluster, prepared.policy, prepared.execution, truth=prepared.truth, seed=1
    )


def mean_jct_s(done):
    return float(job_table(done).jct_s.mean())


def test_columns_of_cpus_and_memory_are_worth_having():
    shared, alike = ran("synergy"), ran("synergy", "++parameters.synergy.shares=false")
    assert mean_jct_s(shared) < 0.9 * mean_jct_s(alike)
    assert alike.shares is None


def test_where_batch_and_gpus_may_adapt_it_is_below_tune():
    assert mean_jct_s(ran("synergy")) < 0.9 * mean_jct_s(ran("fifo+tune"))


def test_where_they_may_not_it_is_no_worse_than_tune():
    assert mean_jct_s(ran("synergy", ONE_GPU)) <= mean_jct_s(ran("fifo+tune", ONE_GPU))


def test_with_the_columns_off_nodes_that_name_plenty_of_cpus_change_no_decision():
    policy, made = get_policy("synergy").with_parameters(shares=False), random_training(3, 20, t4s())
    hosts = t4s(), Cluster((NodeType("t4", "t4", 4, 4, 1e6, 1e9 * GB),))
    plain, plenty = (run(made, each, policy).events.digest() for each in hosts)
    assert plain == plenty


def test_of_shares_as_fast_the_cheapest_is_tried():
    node = SharedNode(NODE.gpus_per_node, NODE.cpus, NODE.memory_bytes, NODE.storage_bytes_per_s, *NODE.proportional)
    tried = worth_trying(Pipeline(cpu_s=0.004, sample_bytes=1e5, data_bytes=140 * GB), node, 1)
    assert (np.diff(tried.sample_s) < 0).all()
    cost = np.maximum(tried.cpus / 3.0, tried.memory_bytes / (62.5 * GB))
    assert (np.diff(cost + 0.1 * (tried.cpus / 3.0 + tried.memory_bytes / (62.5 * GB))) > 0).all()
