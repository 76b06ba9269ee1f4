"""Quotas of virtual clusters and priorities of jobs, as the core knows both, carried out by the executor."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from exec.controllers_agents import FakeAgent, Stage
from exec.controllers_jobs import cluster_of, file_of
from exec.test_api import FAST, ask, controller_of, job, served, until

from synergy_core.cluster import Cluster
from synergy_core.errors import InputError
from synergy_core.jobs.testbed_profiles import Profile
from synergy_core.policies import get_policy
from synergy_exec.client import Client
from synergy_exec.controller.controller import Controller
from synergy_exec.controller.execution import Execution
from synergy_exec.controller.journal import Journal
from synergy_exec.controller.metrics import Metrics
from synergy_exec.controller.resume import resume
from synergy_exec.settings import QuotaSettings, Settings
from synergy_runs.settings import build, defaults

SHARED = QuotaSettings(virtual_clusters={"vision": 2, "speech": 1})


def execution_of(folder: Path, cluster: Cluster, policy: str) -> Execution:
    journal = Journal(folder / "journal.sqlite")
    return Execution(journal, get_policy(policy), cluster, Settings(), folder, Profile())


@pytest.mark.parametrize("policy", ["fifo", "priority", "las", "synergy", "fifo+proportional"])
def test_nobody_holds_more_than_the_quota(tmp_path: Path, policy: str) -> None:
    """Under each kind of scheduler: three jobs of one tenant get its two slots, however many are idle."""
    cluster = dataclasses.replace(cluster_of(2, 2), virtual_clusters={"vision": 2, "speech": 1})
    if "+" in policy:
        nodes = tuple(dataclasses.replace(each, cpus=4.0, memory_bytes=8e9) for each in cluster.node_types)
        cluster = dataclasses.replace(cluster, node_types=nodes)
    execution = execution_of(tmp_path, cluster, policy)
    for number in range(3):
        execution.submit(f"v{number}", file_of(virtual_cluster="vision", max_batch=32), 0.0)
    execution.submit("s", file_of(virtual_cluster="speech", max_batch=32), 0.0)
    for now_s in (0.0, 60.0, 120.0):
        execution.decide(now_s)
        held = [each.held_gpus for each in execution.jobs.values()]
        assert sum(held[:3]) == 2
        assert held[3] == 1


def test_what_can_never_have_a_place_is_refused(tmp_path: Path) -> None:
    async def work(controller: Controller, client: Client) -> None:
        for wrong, says in (
            (job(), "virtual_cluster is missing; expected one of speech, vision"),
            (job(virtual_cluster="visoin"), "Did you mean 'vision'"),
            (job(virtual_cluster="speech", slots=2), "slots=2; virtual cluster speech has 1"),
            (job(virtual_cluster="vision", priority=3), "policy fifo does not look at priorities.*: priority"),
            (job(virtual_cluster="vision", priority=9_999), "-1000 to 1000"),
            (job(virtual_cluster="a\nb"), "the name of a virtual cluster"),
            (job(user=7), "user=7; expected the name of a user"),
        ):
            with pytest.raises(InputError, match=says):
                await ask(client, "POST", "/jobs", wrong)
        await ask(client, "POST", "/jobs", job(virtual_cluster="vision", slots=2))
        await until(lambda: controller.execution.jobs[0].state == "running")
        state = await ask(client, "GET", "/state")
        assert state["virtual_clusters"] == {"vision": {"slots": 2, "used": 2}, "speech": {"slots": 1, "used": 0}}
        text = Metrics(controller.agents).text(controller.execution).decode().splitlines()
        assert {
            'synergy_quota{virtual_cluster="vision"} 2.0',
            'synergy_quota_used{virtual_cluster="vision"} 2.0',
        } <= set(text)
        await ask(client, "DELETE", "/jobs/0")
        assert len(controller.execution.jobs) == 1

    served(tmp_path, work, 3, policy="fifo", cluster=SHARED)


def test_quotas_are_typed_as_in_the_simulator_and_fit_the_cluster(tmp_path: Path) -> None:
    typed = {**defaults(Settings), "cluster": {"virtual_clusters": {"vision": 2}, "borrowing": True}}
    assert build(Settings, typed).cluster == QuotaSettings(virtual_clusters={"vision": 2}, borrowing=True)

    async def never(controller: Controller, client: Client) -> None:
        raise AssertionError("it began")

    with pytest.raises((InputError, AssertionError), match="add up to 3 GPUs"):
        served(tmp_path, never, 2, cluster=SHARED)
    assert not dataclasses.replace(FAST).cluster.virtual_clusters
    assert controller_of(tmp_path, 1)[0].settings.cluster == QuotaSettings()


def test_borrowing_lends_idle_slots(tmp_path: Path) -> None:
    lent = dataclasses.replace(cluster_of(3), virtual_clusters={"vision": 1, "speech": 1}, borrowing=True)
    execution = execution_of(tmp_path, lent, "fifo")
    execution.submit("wide", file_of(virtual_cluster="vision", slots=3), 0.0)
    execution.decide(0.0)
    assert execution.jobs[0].held_gpus == 3


def test_a_job_whose_tenant_is_gone_fails_with_the_reason_when_a_controller_begins(tmp_path: Path) -> None:
    before = dataclasses.replace(cluster_of(2), virtual_clusters={"vision": 1, "speech": 1})
    execution = execution_of(tmp_path, before, "fifo")
    for name in ("vision", "speech"):
        execution.submit(name, file_of(virtual_cluster=name), 0.0)
    execution.journal.close()
    after = execution_of(tmp_path, dataclasses.replace(before, virtual_clusters={"vision": 2}), "fifo")
    resume(after, 1.0)
    assert [each.state for each in after.jobs.values()] == ["waiting", "failed"]
    assert "unknown virtual cluster" in after.jobs[1].reason
    after.decide(1.0)


def test_the_higher_priority_goes_first_and_takes_slots(tmp_path: Path) -> None:
    stage = Stage(execution_of(tmp_path, cluster_of(1), "priority"), [FakeAgent(0, 1, {})])
    execution = stage.execution
    for name, priority in (("low", 0), ("later", 0), ("high", 5)):
        execution.submit(name, file_of(work=1e6, priority=priority), 0.0)
    execution.decide(0.0)
    assert [each.name for each in execution.jobs.values() if each.held_gpus] == ["high"]
    execution.cancel(execution.jobs[2], 1.0)
    execution.decide(2.0)
    assert execution.jobs[0].held_gpus == 1
    execution.submit("urgent", file_of(work=1e6, priority=1), 3.0)
    execution.decide(4.0)
    assert [each.name for each in execution.jobs.values() if each.held_gpus] == ["urgent"]
    assert execution.jobs[3].priority == 1
