"""The share of starts that were split over more nodes than need be."""

import numpy as np
import pytest
from jobs import cluster, workload

from synergy_core.scheduling.jobs.cluster import Cluster, NodeType
from synergy_core.scheduling.policies import get_policy
from synergy_runs.outputs.metrics import summarise
from synergy_sim.simulate import simulate

FRAGMENTED = [(0, 5, 1_000), (0, 5, 1_000), (1, 6, 100)]
SEVERAL_SIZES = Cluster((NodeType("a", "a100", 1, 2), NodeType("b", "a100", 2, 4), NodeType("c", "t4", 3, 1)))


@pytest.mark.parametrize(
    ("rows", "machines", "share"),
    [
        pytest.param(FRAGMENTED, cluster(2), 1 / 3, id="on two nodes that one could hold"),
        pytest.param(FRAGMENTED, cluster(2, placement="consolidate"), 0, id="consolidated"),
        pytest.param([(0, 12, 100), (0, 16, 100)], cluster(4), 0, id="wide jobs on whole nodes"),
        pytest.param([(0, 8, 10), (0, 3, 10)], SEVERAL_SIZES, 0, id="nodes needed are the largest of the type"),
        pytest.param([(0, 1, 10)], cluster(1), np.nan, id="single GPUs cannot be split"),
    ],
)
def test_starts_on_more_nodes_than_needed_are_split(rows, machines, share):
    summary = summarise(simulate(workload(rows), machines, get_policy("backfill")))
    assert summary["split_starts_fraction"] == pytest.approx(share, nan_ok=True)


def test_relaxed_job_waits_for_one_node_and_then_takes_what_is_there():
    done = simulate(workload(FRAGMENTED), cluster(2, placement="relax", patience_s=250.0), get_policy("backfill"))
    events = done.events
    assert events.time_s[(events.job_id == 2) & (events.kind == 1)].tolist() == [251.0, 251.0]
    assert summarise(done)["split_starts_fraction"] == pytest.approx(1 / 3)
