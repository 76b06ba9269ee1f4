"""A slot that kills what trains on it is set aside; a job that dies wherever it is, is not taken for that."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from exec.controllers_agents import FakeAgent, Stage
from exec.controllers_jobs import cluster_of, file_of
from exec.test_controller import POLICIES, facts_hold, states
from exec.test_weights_live import HERE, answer, serving, until

from synergy_core.cluster import Cluster, NodeType
from synergy_core.errors import InputError
from synergy_core.jobs.testbed_profiles import Profile
from synergy_core.policies import get_policy
from synergy_exec.agent.slots import own_cores
from synergy_exec.alert_limits import AlertLimits
from synergy_exec.client import client_for
from synergy_exec.controller.alerts import alerts
from synergy_exec.controller.aside import Aside
from synergy_exec.controller.execution import Execution
from synergy_exec.controller.journal import Journal
from synergy_exec.messages import Ended, Message, PlanMessage
from synergy_exec.nodes.agents import Agents
from synergy_exec.nodes.runs import Run
from synergy_exec.settings import Settings


@dataclass
class Killing(FakeAgent):
    """bad: slots on which workers die. cursed: jobs whose workers die wherever they are."""

    bad: set[int] = field(default_factory=set)
    cursed: set[int] = field(default_factory=set)

    def pass_time(self, now_s: float) -> list[Message]:
        said: list[Message] = []
        for number, run in list(self.runs.items()):
            slots = self.bad & set(run.launch.slots)
            if not run.stopping and (slots or run.launch.job in self.cursed):
                died = min(slots or run.launch.slots)
                del self.runs[number]
                said.append(Ended(run=number, outcome="lost", reason="rank 0 was killed by SIGSEGV", died=died))
        return said + super().pass_time(now_s)


def staged(folder: Path, policy: str, *agents: Killing) -> Stage:
    journal, settings = Journal(folder / "journal.sqlite"), Settings(retries=3)
    cluster = cluster_of(*(each.slots for each in agents))
    return Stage(Execution(journal, get_policy(policy), cluster, settings, folder, Profile()), list(agents))


def test_a_slot_that_kills_is_set_aside_and_named_and_jobs_end_on_the_others(tmp_path: Path) -> None:
    stage = staged(tmp_path, "fifo", Killing(0, 2, {}, bad={1}))
    execution = stage.execution
    jobs = [execution.submit(f"j{number}", file_of(work=40.0), 0.0) for number in range(2)]
    stage.finish()
    assert states(stage) == {0: "done", 1: "done"}
    facts_hold(stage)
    why = "2 workers died on it within an hour, of jobs 1"
    assert execution.decider.aside.slots == {(0, 1): why}
    assert execution.notes == [f"node 0, slot 1 is set aside: {why}"]
    assert execution.decider.cluster.gpus == 1
    # The other job went on as if nothing had been.
    assert jobs[0].restarts == 0
    assert [run.job for run in execution.journal.runs()] == [0, 1, 1, 1]
    backend = type("Nodes", (), {"nodes": 0})()
    assert alerts(execution, Agents(backend, 3), stage.now_s, AlertLimits(free_fraction=0.0)) == execution.notes


def test_a_job_that_dies_everywhere_is_to_blame_and_the_slot_comes_back(tmp_path: Path) -> None:
    stage = staged(tmp_path, "fifo", Killing(0, 3, {}, cursed={1}))
    for number in range(2):
        stage.execution.submit(f"j{number}", file_of(work=400.0), 0.0)
    stage.finish()
    assert states(stage) == {0: "done", 1: "failed"}
    assert stage.execution.decider.aside.slots == {}
    assert stage.execution.decider.cluster.gpus == 3
    assert [each.split(":")[0] for each in stage.execution.notes] == [
        "node 0, slot 1 is set aside",
        "node 0, slot 1 is used again",
    ]
    assert stage.execution.jobs[0].restarts == 0
    facts_hold(stage)


@pytest.mark.parametrize("policy", [each for each in POLICIES if each != "srtf"])
def test_every_policy_goes_on_without_the_slot(tmp_path: Path, policy: str) -> None:
    stage = staged(tmp_path, policy, Killing(0, 2, {}), Killing(1, 2, {}, bad={0}))
    for number in range(6):
        stage.execution.submit(f"j{number}", file_of(work=60.0, max_batch=32), stage.now_s)
        stage.advance(1.0)
    stage.finish()
    assert list(stage.execution.decider.aside.slots) == [(1, 0)]
    assert set(states(stage).values()) == {"done"}
    facts_hold(stage)


@pytest.mark.parametrize("policy", ["fifo", "las", "synergy"])
def test_a_node_without_an_agent_gets_no_job_until_it_has_one(tmp_path: Path, policy: str) -> None:
    stage = staged(tmp_path, policy, Killing(0, 1, {}), Killing(1, 1, {}))
    execution = stage.execution
    jobs = [execution.submit(f"j{number}", file_of(work=80.0, max_batch=32), 0.0) for number in range(2)]
    stage.advance(0.0)
    stage.advance(1.0)
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
    stage.advance(0.0)
    stage.advance(1.0)
    assert execution.notes[1:] == ["node 1 is used again: it has an agent"]
    stage.finish()
    assert states(stage) == {0: "done", 1: "done"}
    assert {node for agent in stage.agents.values() for node in [agent.node] if agent.launched} == {0, 1}
    facts_hold(stage)


def test_a_run_may_be_lost_on_a_node_after_one_that_is_not_used(tmp_path: Path) -> None:
    """Failed before, and ended the controller: its place was looked up among the nodes that are left."""
    stage = staged(tmp_path, "fifo", Killing(0, 1, {}), Killing(1, 1, {}))
    execution = stage.execution
    stage.agents.pop(0)
    execution.agent_left(0, stage.now_s)
    execution.tell(execution.decider.without({0}, stage.now_s))
    execution.submit("only", file_of(work=20.0), 0.0)
    stage.advance(0.0)
    stage.advance(1.0)
    (run,) = stage.agents[1].runs
    execution.heard(1, stage.agents[1].end(run, "lost", "a peer is gone"), stage.now_s)
    stage.finish()
    assert states(stage) == {0: "done"}


def test_gpu_types_keep_their_order_and_quotas_fit_into_what_is_left() -> None:
    types = NodeType("a", "h100", 1, 2), NodeType("b", "cpu", 1, 2), NodeType("c", "h100", 1, 1)
    aside = Aside(Cluster(types, virtual_clusters={"x": 3, "y": 2}))
    assert aside.without({0}, [1]) == ["node 0 is not used until it has an agent again"]
    assert aside.cluster.gpu_types == ("h100", "cpu")
    assert aside.placed(((0, 1),)) == ((2, 1),)
    assert aside.cluster.virtual_clusters == {"x": 1, "y": 2}
    assert aside.without(set(), [1]) == ["node 0 is used again: it has an agent"]
    assert aside.cluster.virtual_clusters == {"x": 3, "y": 2}
    assert (aside.cluster.gpus, aside.slots) == (5, {})


@pytest.mark.skipif(len(own_cores()) < 2, reason="a core for each slot")
def test_a_core_on_which_a_real_job_dies_is_left_out_and_the_job_ends_elsewhere(tmp_path: Path) -> None:
    results, said, note = tmp_path / "r", tmp_path / "said.txt", tmp_path / "note"
    classes = {"holds": f"Breaking\narguments: {{way: obey, at: 2, note: {note}}}"}
    classes["dies"] = f"Deadly\narguments: {{core: {own_cores()[1]}}}"
    for name, text in classes.items():
        job = f"class: {HERE}/agents_jobs.py:{text}\nname: {name}\ninitial_batch: 8\nwork: 10\n"
        (tmp_path / f"{name}.yaml").write_text(job)
    serve = ("serve=true", "policy=[fifo]", f"results_dir={results}", "backend.options.slots=2", "figures=false")
    with two_cores(), serving(said, *serve, "profile=null"):

        def ask(method: str, path: str, body: Any = None) -> Any:
            try:
                return client_for(results, None).ask(method, path, body)
            except InputError:
                return None

        until(lambda: ask("GET", "/state"), said)
        for name in classes:
            answer("submit", tmp_path / f"{name}.yaml", "--dir", results)
        until(lambda: "node 0, slot 1 is set aside: 2 workers died" in said.read_text(), said)
        assert any("node 0, slot 1 is set aside" in each for each in ask("GET", "/alerts"))
        note.write_text("go on\n")
        until(lambda: [each["state"] for each in ask("GET", "/jobs")] == ["done", "done"], said)
        assert [each["restarts"] for each in ask("GET", "/jobs")] == [0, 2]


@contextlib.contextmanager
def two_cores() -> Iterator[None]:
    """What is started meanwhile has these alone, so that each slot is one."""
    all_of_them = own_cores()
    os.sched_setaffinity(0, all_of_them[:2])
    try:
        yield
    finally:
        os.sched_setaffinity(0, all_of_them)


def run_of(number: int, job: int, *placed: tuple[int, int]) -> Run:
    return Run(number, job, placed, PlanMessage(data=1, micro_batch=1))


def test_ranks_of_one_job_accuse_no_slot_but_those_of_two_do() -> None:
    aside = Aside(cluster_of(4))
    for number in range(3):
        assert aside.died(run_of(number, 0, (0, 0b0110)), (0, 2), 0.0, [2]) == []
    assert len(aside.died(run_of(3, 1, (0, 0b1100)), (0, 2), 0.0, [2])) == 1


def test_deaths_are_forgotten_after_an_hour() -> None:
    aside = Aside(cluster_of(4))
    for hour in range(3):
        assert aside.died(run_of(hour, 0, (0, 1)), (0, 0), 3_601.0 * hour, [1]) == []


def test_a_slot_that_was_set_aside_stays_so_whatever_dies_elsewhere_later() -> None:
    """Failed before: what set it aside was forgotten after an hour, and the next death anywhere freed it."""
    aside = Aside(cluster_of(4))
    for job in range(2):
        aside.died(run_of(job, job, (0, 1)), (0, 0), 0.0, [1])
    assert aside.died(run_of(2, 2, (0, 0b1000)), (0, 3), 2 * 3_600.0, [1]) == []
    assert list(aside.slots) == [(0, 0)]


def test_what_jobs_ask_for_and_the_last_slot_of_a_type_stay() -> None:
    cluster = Cluster((NodeType("a", "cpu", 1, 2), NodeType("b", "h100", 1, 1)))
    aside = Aside(cluster)
    for slot, asked in (((1, 0), 1), ((0, 1), 3)):
        for _ in range(3):
            assert aside.died(run_of(0, slot[0], (slot[0], 1 << slot[1])), slot, 0.0, [asked]) == []
    assert aside.cluster is cluster


def test_nodes_that_differ_now_are_numbered_anew_and_places_translated() -> None:
    aside = Aside(Cluster((NodeType("a", "cpu", 3, 4),)))
    for _ in range(2):
        said = aside.died(run_of(0, 0, (0, 2)), (0, 1), 0.0, [1])
    assert said == ["node 0, slot 1 is set aside: 2 workers died on it within an hour, of jobs 0"]
    assert [(each.nodes, each.gpus_per_node) for each in aside.cluster.node_types] == [(1, 3), (2, 4)]
    assert aside.placed(((0, 0b111), (2, 0b1))) == ((0, 0b1101), (2, 0b1))
    for _ in range(2):
        aside.died(run_of(1, 1, (1, 1)), (1, 0), 0.0, [1])
    assert [(each.nodes, each.gpus_per_node) for each in aside.cluster.node_types] == [(2, 3), (1, 4)]
    assert aside.placed(((1, 0b001), (2, 0b1000))) == ((1, 0b0010), (2, 0b1000))
