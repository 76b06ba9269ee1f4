"""CPUs and memory inside synergy's configurations: what nodes have is kept to, and what they are worth."""

import numpy as np
import pytest
from composed import composed

from synergy_core.cluster import NodeType
from synergy_core.goodput.pipeline import Pipeline
from synergy_core.state.share_levels import _worth_trying
from synergy_core.units import GB, MB
from synergy_runs.log import Kind
from synergy_runs.metrics import job_table
from synergy_sim.prepare import prepared_runs
from synergy_sim.simulate import simulate

CROWDED = (
    "experiment=synergy_osdi22", "trace.jobs=60", "trace.measured_jobs=null", "trace.jobs_per_hour=30",
    "cluster.nodes=2", "truth.measured=false", "seed=1",
)  # fmt: skip
MODELS = ("alexnet", "res18", "res50", "mobilenet", "shufflenet", "gnmt", "transformer", "lstm", "m5", "deepspeech")
ONE_GPU = "++truth.fixed_gpus={" + ", ".join(f"{name}: 1" for name in MODELS) + "}"
NODE = NodeType("v", "v100", 1, 8, 24.0, 500 * GB, 500 * MB)


def ran(policy, *more):
    (prepared,) = prepared_runs(composed(*CROWDED, f"policy={policy}", *more))
    return simulate(
        prepared.workload, prepared.cluster, prepared.policy, prepared.execution, truth=prepared.truth, seed=1
    )


def mean_jct_s(run):
    return float(job_table(run).jct_s.mean())


@pytest.mark.parametrize("more", [(), (ONE_GPU,), ("cluster.cpus_per_node=13", "cluster.memory_gb_per_node=90")])
@pytest.mark.parametrize("policy", ["synergy", "fifo+tune", "srtf+greedy", "las+proportional"])
def test_no_node_gives_out_more_than_it_has_at_any_time(policy, more):
    run = ran(policy, *more)
    (node,) = run.cluster.node_types
    shares, events = run.shares, run.events
    changes = [(time, 1, "share", row) for row, time in enumerate(shares.time_s.tolist())]
    changes += [(time, 0, "event", row) for row, time in enumerate(events.time_s.tolist())]
    on, given = {}, {}
    for time_s, group in _by_instant(sorted(changes, key=lambda each: each[:2])):
        for what, row in group:
            if what == "share":
                given[int(shares.job_id[row])] = (float(shares.cpus[row]), float(shares.memory_bytes[row]))
                continue
            job = int(events.job_id[row])
            if events.kind[row] == Kind.START:
                on.setdefault(job, {})[int(events.node[row])] = int(events.gpu_mask[row]).bit_count()
            elif events.kind[row] in (Kind.STOP, Kind.FINISH):
                on.pop(job, None)
                given.pop(job, None)
        assert given.keys() == on.keys(), time_s
        for at in range(node.nodes):
            cpus, memory = (
                sum(given[job][which] * parts.get(at, 0) / sum(parts.values()) for job, parts in on.items())
                for which in (0, 1)
            )
            assert cpus <= node.cpus * (1 + 1e-6)
            assert memory <= node.memory_bytes * (1 + 1e-6)


def _by_instant(changes):
    group, at = [], None
    for time_s, _, what, row in changes:
        if at is not None and time_s != at:
            yield at, group
            group = []
        at = time_s
        group.append((what, row))
    yield at, group


def test_columns_of_cpus_and_memory_are_worth_having():
    shared, alike = ran("synergy"), ran("synergy", "++parameters.synergy.shares=false")
    assert mean_jct_s(shared) < 0.9 * mean_jct_s(alike)
    assert alike.shares is None


def test_where_batch_and_gpus_may_adapt_it_is_below_tune():
    assert mean_jct_s(ran("synergy")) < 0.9 * mean_jct_s(ran("fifo+tune"))


def test_where_they_may_not_it_is_no_worse_than_tune():
    assert mean_jct_s(ran("synergy", ONE_GPU)) <= mean_jct_s(ran("fifo+tune", ONE_GPU))


def test_with_the_columns_off_nodes_that_name_plenty_of_cpus_change_no_decision():
    digests = []
    for host in ((), ("cluster.cpus_per_node=1e6", "cluster.memory_gb_per_node=1e9")):
        settings = composed(
            "+trace=philly", "trace.find=[]", "trace.window=6h", "trace.models=mix", "cluster.nodes=4",
            "truth.measured=false", "policy=synergy", "++parameters.synergy.shares=false", *host,
        )  # fmt: skip
        (prepared,) = prepared_runs(settings)
        made = prepared.workload, prepared.cluster, prepared.policy, prepared.execution
        digests.append(simulate(*made, truth=prepared.truth).events.digest())
    assert digests[0] == digests[1]


def test_of_shares_as_fast_the_cheapest_is_tried():
    tried = _worth_trying(Pipeline(cpu_s=0.004, sample_bytes=1e5, data_bytes=140 * GB), NODE, NODE.proportional, 1)
    assert (np.diff(tried.sample_s) < 0).all()
    cost = np.maximum(tried.cpus / 3.0, tried.memory_bytes / (62.5 * GB))
    assert (np.diff(cost + 0.1 * (tried.cpus / 3.0 + tried.memory_bytes / (62.5 * GB))) > 0).all()
