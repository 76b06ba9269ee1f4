"""Quotas of virtual clusters and priorities of jobs."""

import dataclasses

import pytest
from exec.pretended import cluster_of, execution_of, file_of
from exec.served import ask, job, refused, served, until

from synergy_core.errors import InputError
from synergy_exec.controller import api
from synergy_exec.settings import QuotaSettings, Settings
from synergy_runs.settings import build, defaults

SHARED = QuotaSettings(virtual_clusters={"vision": 2, "speech": 1})


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
