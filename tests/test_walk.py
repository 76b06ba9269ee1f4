"""The walk makes the queue's decisions, and those that counts alone cannot make."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import WALKING, cluster, finish_s, random_workload, workload

from synergy_core.cluster import Cluster, NodeType
from synergy_core.policies import get_policy
from synergy_runs.facts import Kind
from synergy_sim.execution import Costs, ExecutionModel
from synergy_sim.simulate import simulate

POLICIES = ["fifo", "backfill", "easy", "sjf", "srtf", "las", "mlfq", "tiresias", "tiresias-promoting", "qssf"]


def run(work, machines, name, restart_s=30.0, **more):
    policy = get_policy(name.removesuffix("-promoting"))
    if name.endswith("-promoting"):
        policy = policy.with_parameters(promote_knob=0.3)
    return simulate(work, machines, policy, ExecutionModel(Costs(restart_s=restart_s)), **more)


@settings(max_examples=200)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 60), st.sampled_from([1, 1, 2, 3, 4, 5, 8, 12, 16]), st.integers(0, 6_000)),
        min_size=1,
        max_size=25,
    ),
    policy=st.sampled_from(POLICIES),
    together=st.sampled_from([{"placement": "consolidate"}, {"placement": "relax", "patience_s": 700.0}]),
    sizes=st.sampled_from([(8, 8), (8, 8, 8), (4, 8, 8), (2, 3, 16)]),
    quotas=st.sampled_from([{}, {"a": 5, "b": 11}, {"a": 8, "b": 8}]),
)
def test_jobs_that_must_lie_together_are_placed_alike(rows, policy, together, sizes, quotas):
    nodes = tuple(NodeType(f"n{i}", "v100", 1, gpus) for i, gpus in enumerate(sizes))
    machines = Cluster(nodes, quotas, **together)
    tenants = ["ab"[run_s % 2] for _, _, run_s in rows] if quotas else None
    most = [quotas[tenant] for tenant in tenants] if quotas else [16] * len(rows)
    rows = [(submit_s, min(gpus, limit), run_s) for (submit_s, gpus, run_s), limit in zip(rows, most, strict=True)]
    estimates = [run_s * (1 + submit_s % 3) for submit_s, _, run_s in rows]
    work = workload(rows, estimates=estimates, tenants=tenants)
    quick = placements(run(work, machines, policy))
    assert placements(run(work, machines, policy, make_scheduler=WALKING)) == quick


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("rule", ["consolidate", "relax"])
def test_many_jobs_that_must_lie_together_are_placed_alike(policy, rule):
    work, machines = random_workload(4, 300, mean_gap_s=90.0), cluster(5, placement=rule, patience_s=3_600.0)
    quick = placements(run(work, machines, policy))
    assert placements(run(work, machines, policy, make_scheduler=WALKING)) == quick


def placements(done):
    """Facts with the GPUs of every start."""
    events = done.events
    columns = (events.time_s, events.kind, events.job_id, events.part, events.node, events.gpu_mask)
    return sorted(zip(*(column.tolist() for column in columns), strict=True))


def mixed() -> Cluster:
    return Cluster((NodeType("a100", "a100", 1, 8), NodeType("t4", "t4", 2, 4)))


def test_job_runs_on_the_type_it_asks_for():
    work = workload([(0, 4, 100), (0, 4, 100)], kinds=["t4", "a100"])
    events = run(work, mixed(), "fifo").events
    nodes = dict(zip(events.job_id[events.kind == Kind.START], events.node[events.kind == Kind.START], strict=True))
    assert nodes[0] in (1, 2)
    assert nodes[1] == 0


def test_tenant_borrows_idle_gpus_and_gives_them_back_to_a_preempting_owner():
    machines = cluster(2, virtual_clusters={"a": 8, "b": 8}, borrowing=True)
    work = workload([(0, 16, 1_000), (100, 8, 100)], tenants=["a", "b"])
    assert finish_s(run(work, machines, "backfill", 0.0)).tolist() == [1_000, 1_100]
    assert finish_s(run(work, machines, "mlfq", 0.0)).tolist() == [1_100, 200]


def test_tenant_without_borrowing_stays_within_its_quota():
    work = workload([(0, 8, 1_000), (0, 8, 1_000)], tenants=["a", "a"])
    machines = cluster(2, virtual_clusters={"a": 8, "b": 8})
    assert finish_s(run(work, machines, "backfill")).tolist() == [1_000, 2_000]


def test_several_heads_of_one_tenant_borrow_at_once():
    work = workload([(0, 8, 100), (0, 8, 100), (0, 8, 100)], tenants=["a"] * 3)
    machines = cluster(3, virtual_clusters={"a": 8, "b": 16}, borrowing=True)
    assert finish_s(run(work, machines, "fifo")).tolist() == [100, 100, 100]


def test_wide_job_waits_for_whole_nodes_only_where_it_must():
    rows = [(0, 4, 1_000), (0, 4, 1_000), (0, 4, 1_000), (1, 16, 100), (2, 8, 500)]
    loose = finish_s(run(workload(rows), cluster(4), "backfill"))
    strict = finish_s(run(workload(rows), cluster(4, placement="consolidate"), "backfill"))
    assert loose[3] == strict[3] == 101
    fragmented = [(0, 5, 1_000), (0, 5, 1_000), (0, 5, 1_000), (1, 9, 100)]
    assert finish_s(run(workload(fragmented), cluster(3), "backfill"))[3] == 101
    assert finish_s(run(workload(fragmented), cluster(3, placement="consolidate"), "backfill"))[3] == 1_100
