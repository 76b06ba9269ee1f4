"""Quotas of virtual clusters and priorities of jobs."""

import dataclasses

import pytest
from exec.pretended import cluster_of, execution_of, file_of, staged
from exec.served import ask, job, refused, served, until

from synergy_core.errors import InputError
from synergy_exec.controller import api
from synergy_exec.settings import QuotaSettings, Settings
from synergy_runs.settings import build, defaults

SHARED = QuotaSettings(virtual_clusters={"vision": 2, "speech": 1})


@pytest.mark.parametrize("policy", ["fifo", "priority", "las", "synergy", "fifo+proportional"])
def test_nobody_holds_more_than_the_quota(tmp_path, policy):
    """Under each kind of scheduler: three jobs of one tenant get its two slots, however many are idle."""
    cluster = dataclasses.replace(cluster_of(2, 2), virtual_clusters=SHARED.virtual_clusters)
    if "+" in policy:
        nodes = tuple(dataclasses.replace(each, cpus=4.0, memory_bytes=8e9) for each in cluster.node_types)
        cluster = dataclasses.replace(cluster, node_types=nodes)
    execution = execution_of(tmp_path, policy, cluster)
    for tenant in ("vision", "vision", "vision", "speech"):
        execution.submit(tenant, file_of(virtual_cluster=tenant, max_batch=32), 0.0)
    for now_s in (0.0, 60.0, 120.0):
        execution.decide(now_s)
        held = [each.held_gpus for each in execution.jobs.values()]
        assert (sum(held[:3]), held[3]) == (2, 1)


def test_what_can_never_have_a_place_is_refused(tmp_path):
    async def work(controller, client):
        for wrong, says in (
            (job(), "virtual_cluster is missing; expected one of speech, vision"),
            (job(virtual_cluster="visoin"), "Did you mean 'vision'"),
            (job(virtual_cluster="speech", slots=2), "slots=2; virtual cluster speech has 1"),
            (job(virtual_cluster="vision", priority=3), "policy fifo does not look at priorities.*: priority"),
        ):
            await refused(says, client, "POST", "/jobs", wrong)
        await ask(client, "POST", "/jobs", job(virtual_cluster="vision", slots=2))
        await until(lambda: controller.execution.jobs[0].state == "running")
        state = await ask(client, "GET", "/state")
        assert state["virtual_clusters"] == {"vision": {"slots": 2, "used": 2}, "speech": {"slots": 1, "used": 0}}
        text = api.metrics(controller.agents, controller.execution, controller.now_s()).decode().splitlines()
        assert {f'synergy_quota{each}{{virtual_cluster="vision"}} 2.0' for each in ("", "_used")} <= set(text)
        await ask(client, "DELETE", "/jobs/0")

    served(tmp_path, work, 3, cluster=SHARED)


def test_quotas_are_typed_as_in_the_simulator_and_fit_the_cluster(tmp_path):
    typed = {**defaults(Settings), "cluster": {"virtual_clusters": {"vision": 2}, "borrowing": True}}
    assert build(Settings, typed).cluster == QuotaSettings(virtual_clusters={"vision": 2}, borrowing=True)

    async def never(controller, client):
        raise AssertionError("it began")

    with pytest.raises((InputError, AssertionError), match="add up to 3 GPUs"):
        served(tmp_path, never, 2, cluster=SHARED)


def test_a_job_whose_tenant_is_gone_fails_with_the_reason_when_a_controller_begins(tmp_path):
    before = dataclasses.replace(cluster_of(2), virtual_clusters={"vision": 1, "speech": 1})
    execution = execution_of(tmp_path, "fifo", before)
    for name in ("vision", "speech"):
        execution.submit(name, file_of(virtual_cluster=name), 0.0)
    execution.journal.close()
    after = execution_of(tmp_path, "fifo", dataclasses.replace(before, virtual_clusters={"vision": 2}))
    assert [each.state for each in after.jobs.values()] == ["waiting", "failed"]
    assert "unknown virtual cluster" in after.jobs[1].reason
    after.decide(1.0)


def test_the_higher_priority_goes_first_and_takes_slots(tmp_path):
    stage = staged(tmp_path, "priority")
    execution = stage.execution

    def holding(now_s):
        execution.decide(now_s)
        return [each.name for each in execution.jobs.values() if each.held_gpus]

    for priority in (0, 0, 5):
        stage.submit(1e6, priority=priority)
    assert holding(0.0) == ["j2"]
    execution.cancel(execution.jobs[2], 1.0)
    assert holding(2.0) == ["j0"]
    stage.submit(1e6, priority=1)
    assert holding(4.0) == ["j3"]
