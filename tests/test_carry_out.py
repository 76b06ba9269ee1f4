"""From an allocation policy's answer to stops and starts: who moves, who is left alone, and whose move is free."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import cluster, workload

from synergy_core.scheduling.decisions.allocation import Placer
from synergy_core.scheduling.decisions.snapshots import Snapshots
from synergy_core.scheduling.jobs.cluster import Cluster, NodeType
from synergy_core.scheduling.jobs.record import Job, gpus_in
from synergy_core.scheduling.jobs.views import Allocations, ClusterState
from synergy_core.scheduling.policies import get_policy
from synergy_runs.outputs.facts import Kind
from synergy_sim.simulate import simulate

MACHINES = {
    rule: Cluster((NodeType("a", "a100", 2, 4), NodeType("b", "t4", 2, 4)), placement=rule)
    for rule in ("consolidate", "spread")
}


@st.composite
def two_rounds(draw):
    """GPUs and types that a few jobs are given in one round, and in the next."""
    machines = MACHINES[draw(st.sampled_from(sorted(MACHINES)))]
    jobs = draw(st.integers(1, 7))
    rounds = []
    for _ in range(2):
        left, gpus, kinds = [8, 8], [], []
        for _ in range(jobs):
            kind = draw(st.integers(0, 1))
            gpus.append(min(left[kind], draw(st.sampled_from((0, 1, 1, 2, 3, 4, 6)))))
            kinds.append(kind)
            left[kind] -= gpus[-1]
        rounds.append(Allocations(np.array(gpus), np.array(kinds)))
    return machines, rounds


@settings(max_examples=300)
@given(two_rounds(), st.booleans())
def test_only_who_must_is_stopped_and_only_moves_of_the_same_shape_are_free(made, packs):
    machines, (first, second) = made
    placer = Placer(machines, free_moves=True, packs=packs)
    jobs = [Job(at, 0.0, max(1, gpus)) for at, gpus in enumerate(first.gpus.tolist())]
    snapshots = Snapshots(ClusterState, machines, None, round_s=60.0)
    for job in jobs:
        snapshots.entered(job)
    for job, placed in placer.changes(first, jobs, snapshots.of(jobs, 0.0, None)).starts:
        job.started(0.0, placed)
    held = {job.job_id: job.placement for job in jobs}
    decision = placer.changes(second, jobs, snapshots.of(jobs, 1.0, None))
    stops, starts, moved = decision.stops, decision.starts, decision.moved
    after = {job.job_id: placed for job, placed in starts}
    used = set()
    for at, placed in {**held, **{job.job_id: () for job, _ in stops}, **after}.items():
        gpus = {(node, bit) for node, mask in placed for bit in range(4) if mask >> bit & 1}
        assert not gpus & used, "two jobs hold one GPU"
        used |= gpus
        assert gpus_in(placed) in (0, second.gpus[at])
    for job, before in stops:
        now = after.get(job.job_id, ())
        counts = [{node: mask.bit_count() for node, mask in each} for each in (before, now)]
        assert counts[0] != counts[1], "stopped for other GPUs of the same nodes"
        shapes = [sorted(each.values()) for each in counts]
        types = [{machines.type_of_node[node] for node in each} for each in counts]
        assert (job.job_id in moved) == (shapes[0] == shapes[1] and types[0] == types[1])


@pytest.mark.parametrize(("placement", "moves"), [("spread", 0), ("consolidate", 1)])
def test_themis_moves_nobody_where_jobs_may_be_spread(placement, moves):
    """One GPU is free on each of two nodes when a job of two arrives."""
    rows = [(0, 1, 9_000), (0, 1, 100), (0, 1, 9_000), (500, 2, 100)]
    done = simulate(workload(rows), cluster(2, 2, placement=placement), get_policy("themis"))
    assert (done.events.kind == Kind.STOP).sum() == moves
