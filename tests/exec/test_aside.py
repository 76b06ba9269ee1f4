"""Slots set aside because workers die on them, nodes without an agent, and the queue's books when jobs lose slots."""

import random
from dataclasses import dataclass, field

import pytest
from exec.pretended import FakeAgent, Stage, cluster_of, execution_of

from synergy_core.cluster import Cluster, NodeType
from synergy_core.jobs.record import Job, gpus_in
from synergy_core.planner.plan import Plan
from synergy_core.policies import get_policy
from synergy_core.scheduling.scheduler import scheduler_for
from synergy_exec.controller.decider import Aside
from synergy_exec.messages import Ended
from synergy_exec.nodes.runs import Run


@dataclass
class Killing(FakeAgent):
    """bad: slots on which workers die. cursed: jobs whose workers die wherever they are."""

    bad: set[int] = field(default_factory=set)
    cursed: set[int] = field(default_factory=set)

    def pass_time(self, now_s):
        said = []
        for number, run in list(self.runs.items()):
            slots = self.bad & set(run.launch.slots)
            if not run.stopping and (slots or run.launch.job in self.cursed):
                died = min(slots or run.launch.slots)
                del self.runs[number]
                said.append(Ended(run=number, outcome="lost", reason="rank 0 was killed by SIGSEGV", died=died))
        return said + super().pass_time(now_s)


def staged(folder, policy, *agents):
    return Stage(execution_of(folder, policy, cluster_of(*(each.slots for each in agents))), list(agents))


def test_a_slot_that_kills_is_set_aside_and_named_and_jobs_end_on_the_others(tmp_path):
    stage = staged(tmp_path, "fifo", Killing(0, 2, {}, bad={1}))
    execution = stage.execution
    jobs = stage.submit(40.0, 40.0)
    stage.finish()
    assert stage.states() == {0: "done", 1: "done"}
    stage.facts_hold()
    why = "2 workers died on it within an hour, of jobs 1"
    assert execution.decider.aside.slots == {(0, 1): why}
    assert execution.notes == [f"node 0, slot 1 is set aside: {why}"]
    assert execution.decider.cluster.gpus == 1
    # The other job went on as if nothing had been.
    assert jobs[0].restarts == 0
    assert [run.job for run in execution.journal.runs()] == [0, 1, 1, 1]


def test_a_job_that_dies_everywhere_is_to_blame_and_the_slot_comes_back(tmp_path):
    stage = staged(tmp_path, "fifo", Killing(0, 3, {}, cursed={1}))
    stage.submit(400.0, 400.0)
    stage.finish()
    assert stage.states() == {0: "done", 1: "failed"}
    assert stage.execution.decider.aside.slots == {}
    assert stage.execution.decider.cluster.gpus == 3
    assert [each.split(":")[0] for each in stage.execution.notes] == [
        "node 0, slot 1 is set aside",
        "node 0, slot 1 is used again",
    ]
    assert stage.execution.jobs[0].restarts == 0
    stage.facts_hold()


@pytest.mark.parametrize("policy", ["fifo", "las", "tiresias", "synergy", "sia", "gavel", "pollux"])
def test_every_policy_goes_on_without_the_slot(tmp_path, policy):
    stage = staged(tmp_path, policy, Killing(0, 2, {}), Killing(1, 2, {}, bad={0}))
    for _ in range(6):
        stage.submit(60.0, max_batch=32)
        stage.advance(1.0)
    stage.finish()
    assert list(stage.execution.decider.aside.slots) == [(1, 0)]
    assert set(stage.states().values()) == {"done"}
    stage.facts_hold()


@pytest.mark.parametrize("policy", ["fifo", "las", "synergy"])
def test_a_node_without_an_agent_gets_no_job_until_it_has_one(tmp_path, policy):
    stage = staged(tmp_path, policy, Killing(0, 1, {}), Killing(1, 1, {}))
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
    stage = staged(tmp_path, "fifo", Killing(0, 1, {}), Killing(1, 1, {}))
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


# Which slot is to blame


def run_of(number, job, *placed):
    return Run(number, job, placed, Plan(data=1, micro_batch=1))


def test_gpu_types_keep_their_order_and_quotas_fit_into_what_is_left():
    types = NodeType("a", "h100", 1, 2), NodeType("b", "cpu", 1, 2), NodeType("c", "h100", 1, 1)
    aside = Aside(Cluster(types, virtual_clusters={"x": 3, "y": 2}))
    assert len(aside.without({0}, [1])) == 1
    assert aside.cluster.gpu_types == ("h100", "cpu")
    assert aside.placed(((0, 1),)) == ((2, 1),)
    assert aside.cluster.virtual_clusters == {"x": 1, "y": 2}
    assert len(aside.without(set(), [1])) == 1
    assert aside.cluster.virtual_clusters == {"x": 3, "y": 2}
    assert (aside.cluster.gpus, aside.slots) == (5, {})


def test_ranks_of_one_job_accuse_no_slot_but_those_of_two_do():
    aside = Aside(cluster_of(4))
    for number in range(3):
        assert aside.died(run_of(number, 0, (0, 0b0110)), (0, 2), 0.0, [2]) == []
    assert len(aside.died(run_of(3, 1, (0, 0b1100)), (0, 2), 0.0, [2])) == 1


def test_deaths_are_forgotten_after_an_hour():
    aside = Aside(cluster_of(4))
    for hour in range(3):
        assert aside.died(run_of(hour, 0, (0, 1)), (0, 0), 3_601.0 * hour, [1]) == []


def test_a_slot_that_was_set_aside_stays_so_whatever_dies_elsewhere_later():
    """Failed before: what set it aside was forgotten after an hour, and the next death anywhere freed it."""
    aside = Aside(cluster_of(4))
    for job in range(2):
        aside.died(run_of(job, job, (0, 1)), (0, 0), 0.0, [1])
    assert aside.died(run_of(2, 2, (0, 0b1000)), (0, 3), 2 * 3_600.0, [1]) == []
    assert list(aside.slots) == [(0, 0)]


def test_what_jobs_ask_for_and_the_last_slot_of_a_type_stay():
    cluster = Cluster((NodeType("a", "cpu", 1, 2), NodeType("b", "h100", 1, 1)))
    aside = Aside(cluster)
    for slot, requested in (((1, 0), 1), ((0, 1), 3)):
        for _ in range(3):
            assert aside.died(run_of(0, slot[0], (slot[0], 1 << slot[1])), slot, 0.0, [requested]) == []
    assert aside.cluster is cluster


def test_nodes_that_differ_now_are_numbered_anew_and_places_translated():
    aside = Aside(Cluster((NodeType("a", "cpu", 3, 4),)))
    for node, job, sizes, placed, moved in (
        (0, 0, [(1, 3), (2, 4)], ((0, 0b111), (2, 0b1)), ((0, 0b1101), (2, 0b1))),
        (1, 1, [(2, 3), (1, 4)], ((1, 0b001), (2, 0b1000)), ((1, 0b0010), (2, 0b1000))),
    ):
        for _ in range(2):
            aside.died(run_of(job, job, (node, 2 - node)), (node, 1 - node), 0.0, [1])
        assert [(each.nodes, each.gpus_per_node) for each in aside.cluster.node_types] == sizes
        assert aside.placed(placed) == moved


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
