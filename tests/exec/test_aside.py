"""Nodes without an agent, and the queue's books when jobs lose their slots."""

import random

import pytest
from exec.pretended import cluster_of, staged

from synergy_core.cluster import Cluster, NodeType
from synergy_core.jobs.record import Job, gpus_in
from synergy_core.policies import get_policy
from synergy_core.scheduling.scheduler import scheduler_for
from synergy_exec.controller.decider import Aside


@pytest.mark.parametrize("policy", ["fifo", "las", "synergy"])
def test_a_node_without_an_agent_gets_no_job_until_it_has_one(tmp_path, policy):
    stage = staged(tmp_path, policy, (1, 1))
    execution = stage.execution
    jobs = stage.submit(80.0, 80.0, max_batch=32)
    stage.advance(0.0, 1.0)
    gone = stage.agents.pop(1)
    gone.runs.clear()
    execution.agent_left(1, stage.now_s)
    for _ in range(2):
        execution.tell(execution.decider.without({1}, stage.now_s))
        stage.advance(1.0)
    assert execution.notes == ["node 1 is not used until it has an agent again"]
    assert [job.state for job in jobs].count("waiting") == 1
    assert sum(job.restarts for job in jobs) == 0
    stage.agents[1] = gone
    execution.agent_came(1, stage.now_s)
    execution.tell(execution.decider.without(set(), stage.now_s))
    stage.finish()
    assert execution.notes[1:] == ["node 1 is used again: it has an agent"]
    assert stage.states() == {0: "done", 1: "done"}
    assert all(agent.launched for agent in stage.agents.values())
    stage.facts_hold()


def test_a_run_may_be_lost_on_a_node_after_one_that_is_not_used(tmp_path):
    """Failed before, and ended the controller: its place was looked up among the nodes that are left."""
    stage = staged(tmp_path, "fifo", (1, 1))
    execution = stage.execution
    stage.agents.pop(0)
    execution.agent_left(0, stage.now_s)
    execution.tell(execution.decider.without({0}, stage.now_s))
    stage.submit(20.0)
    stage.advance(0.0, 1.0)
    (run,) = stage.agents[1].runs
    execution.heard(1, stage.agents[1].end(run, "lost", "a peer is gone"), stage.now_s)
    stage.finish()
    assert stage.states() == {0: "done"}


def test_gpu_types_keep_their_order_and_quotas_fit_into_what_is_left():
    types = NodeType("a", "h100", 1, 2), NodeType("b", "cpu", 1, 2), NodeType("c", "h100", 1, 1)
    aside = Aside(Cluster(types, virtual_clusters={"x": 3, "y": 2}))
    assert len(aside.without({0}, [1])) == 1
    assert aside.cluster.gpu_types == ("h100", "cpu")
    assert aside.placed(((0, 1),)) == ((2, 1),)
    assert aside.cluster.virtual_clusters == {"x": 1, "y": 2}
    assert len(aside.without(set(), [1])) == 1
    assert aside.cluster.virtual_clusters == {"x": 3, "y": 2}
    assert (aside.cluster.gpus, aside.nodes) == (5, frozenset())


def test_what_jobs_ask_for_and_the_last_node_of_a_type_stay():
    cluster = Cluster((NodeType("a", "cpu", 2, 2), NodeType("b", "h100", 1, 1)))
    aside = Aside(cluster)
    assert aside.without({2}, [1]) == []
    assert aside.without({0}, [4]) == []
    assert aside.cluster is cluster
    assert len(aside.without({0, 1}, [2])) == 1
    assert aside.placed(((0, 0b10), (1, 1))) == ((1, 0b10), (2, 1))


# A job that lost its GPUs unasked waits and is started again


class OracleJob(Job):
    __slots__ = ()
    duration_s = property(lambda self: 100.0 * (1 + self.job_id % 3))
    remaining_s = property(lambda self: self.duration_s - self.attained_service_gpu_s)


@pytest.mark.parametrize("slots", [(4,), (2, 3)])
@pytest.mark.parametrize("policy", ["fifo", "srtf", "las", "easy", "backfill"])
def test_books_stay_right_under_random_evictions(policy, slots):
    draw = random.Random(f"{policy} {slots}")
    scheduler = scheduler_for(get_policy(policy), cluster_of(*slots))
    active, job_id = {}, 0
    for now in range(300):
        now_s = float(now)
        kind = draw.random()
        if kind < 0.4 or not active:
            active[job_id] = OracleJob(job_id, now_s, draw.choice((1, 1, 2)), estimate_s=200.0)
            scheduler.arrive(active[job_id])
            job_id += 1
        running = [job for job in active.values() if job.running]
        if running and kind > 0.4:
            job = draw.choice(running)
            if kind < 0.7:
                scheduler.evicted(job, now_s)
            else:
                scheduler.finish(job, now_s)
                del active[job.job_id]
        decision = scheduler.decide(now_s)
        moved = {job.job_id for job, _ in decision.starts}
        for job, _ in decision.stops:
            if job.job_id not in moved:
                scheduler.requeue(job)
        held = [(node, bit) for job in active.values() for node, mask in job.placement for bit in _bits(mask)]
        assert len(held) == len(set(held)) == sum(job.held_gpus for job in active.values()) <= sum(slots)
        assert all(gpus_in(job.placement) == job.gpus for job in active.values() if job.running)
        assert scheduler.waiting == sum(not job.running for job in active.values())
    # All that was started, evicted and requeued can still end: nothing was lost from the queue.
    for now in range(300, 300 + 4 * job_id):
        for job in [job for job in active.values() if job.running]:
            scheduler.finish(job, float(now))
            del active[job.job_id]
        scheduler.decide(float(now))
    assert not active


def _bits(mask):
    return [bit for bit in range(mask.bit_length()) if mask >> bit & 1]
