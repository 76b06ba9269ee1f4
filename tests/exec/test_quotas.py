"""Quotas of virtual clusters and priorities of jobs."""

import dataclasses
import json
import sys

import pytest
from exec.pretended import cluster_of, execution_of, file_of, staged
from exec.real import Service, answer
from exec.served import ask, job, refused, served, until

from synergy_core.errors import InputError
from synergy_exec.controller import api
from synergy_exec.settings import QueueSettings, Settings
from synergy_runs.inputs.keys import build, defaults

SHARED = QueueSettings(virtual_clusters={"vision": 2, "speech": 1})


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
    assert build(Settings, typed).cluster == QueueSettings(virtual_clusters={"vision": 2}, borrowing=True)

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


WAITS = """
import os, time
from synergy_exec.reporting import report

step = 0
while not os.path.exists("go"):
    time.sleep(0.1)
    step += 1
    report(step, 1.0)
"""


@pytest.mark.parametrize(("policy", "keys"), [("fifo", ["cluster.reclaim=any"]), ("synergy", [])])
def test_a_job_within_its_quota_takes_its_slot_back_from_processes_that_borrowed_it(policy, keys, tmp_path):
    results = tmp_path / "r"
    (tmp_path / "waits.py").write_text(WAITS)
    owner = {"command": [sys.executable, "-c", "pass"]}
    borrower = {"command": [sys.executable, "waits.py"], "grace_s": 5, "code": "in_place"}
    if policy == "synergy":
        owner, borrower = ({**each, "batch": 8, "work": 10_000} for each in (owner, borrower))
    for name, tenant, each in (("first", "a", borrower), ("second", "a", borrower), ("owner", "b", owner)):
        (tmp_path / f"{name}.yaml").write_text(json.dumps({"name": name, "virtual_cluster": tenant, **each}))
    quotas = ("cluster.virtual_clusters={a: 1, b: 1}", "cluster.borrowing=true", *keys)
    with Service(results) as service:

        def states(*names):
            return [service.jobs()[name]["state"] for name in names]

        service.start(
            "serve=true",
            f"policy=[{policy}]",
            f"results_dir={results}",
            "backend.options.slots=2",
            "round_s=0.2",
            *quotas,
        )
        for name in ("first", "second"):
            answer("submit", tmp_path / f"{name}.yaml", "--dir", results)
        service.until(lambda: states("first", "second") == ["running", "running"])
        answer("submit", tmp_path / "owner.yaml", "--dir", results)
        service.until(lambda: states("owner") == ["done"])
        assert sorted(states("first", "second")) != ["done", "done"]
        service.until(lambda: states("first", "second") == ["running", "running"])  # the idle slot is lent again
        assert sorted(service.jobs()[name]["restarts"] for name in ("first", "second")) == [0, 1]
        (tmp_path / "go").touch()
        service.until(lambda: states("first", "second") == ["done", "done"])


@pytest.mark.parametrize("max_wait", [2.0, 0.0])
def test_a_command_on_all_slots_starts_within_its_bound_beside_a_stream_of_small_ones(tmp_path, max_wait):
    # Jobs of 6 s on one slot arrive every 4 s: one always runs. The bound is 2 × 60 s.
    stage = staged(tmp_path, "synergy", cluster=dataclasses.replace(cluster_of(2), max_wait=max_wait), slots=(2,))

    def submit(slots, work):
        limits = dict.fromkeys(("slots", "min_slots", "max_slots"), slots)
        stage.submit(work, command=["true"], **limits)

    submit(1, 24.0)
    stage.advance(1.0)
    submit(2, 200.0)
    for second in range(120):
        if second % 4 == 0:
            submit(1, 24.0)
        stage.advance(1.0)
        assert not stage.execution.jobs[1].running or second == 119
    assert stage.execution.jobs[1].running == (max_wait > 0)
