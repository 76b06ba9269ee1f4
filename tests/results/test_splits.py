"""The share of starts that were split over more nodes than need be."""

import math

import pytest
from jobs import cluster, workload

from synergy_core.cluster import Cluster, NodeType
from synergy_core.policies import get_policy
from synergy_runs.metrics import summarise
from synergy_sim.simulate import simulate

FRAGMENTED = [(0, 5, 1_000), (0, 5, 1_000), (1, 6, 100)]


def split(rows, machines):
    return summarise(simulate(workload(rows), machines, get_policy("backfill")))["split_starts_fraction"]


def test_job_on_two_nodes_that_one_could_hold_was_split():
    assert split(FRAGMENTED, cluster(2)) == pytest.approx(1 / 3)
    assert split(FRAGMENTED, cluster(2, placement="consolidate")) == 0


def test_wide_job_on_whole_nodes_is_not_split():
    assert split([(0, 12, 100), (0, 16, 100)], cluster(4)) == 0


def test_nodes_needed_are_those_of_the_type_and_the_largest():
    machines = Cluster((NodeType("a", "a100", 1, 2), NodeType("b", "a100", 2, 4), NodeType("c", "t4", 3, 1)))
    assert split([(0, 8, 10), (0, 3, 10)], machines) == 0


def test_single_gpus_are_no_starts_that_could_be_split():
    assert math.isnan(split([(0, 1, 10)], cluster(1)))


def test_relaxed_job_waits_for_one_node_and_then_takes_what_is_there():
    done = simulate(workload(FRAGMENTED), cluster(2, placement="relax", patience_s=250.0), get_policy("backfill"))
    events = done.events
    assert events.time_s[(events.job_id == 2) & (events.kind == 1)].tolist() == [251.0, 251.0]
    assert summarise(done)["split_starts_fraction"] == pytest.approx(1 / 3)
