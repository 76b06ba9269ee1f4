"""CPUs and memory that a policy shares out reach the agents: with a launch, and while jobs train."""

from __future__ import annotations

from pathlib import Path

import pytest
from exec.controllers_agents import FakeAgent, Stage
from exec.controllers_jobs import file_of

from synergy_core.cluster import Cluster, NodeType, Share
from synergy_core.errors import InputError
from synergy_core.goodput.pipeline import Pipeline
from synergy_core.jobs.testbed_profiles import (
    NoiseFrom,
    Profile,
    ProfiledCosts,
    ProfiledInput,
    ProfiledModel,
    StepAtCpus,
    profile_of,
)
from synergy_core.policies import get_policy
from synergy_exec.controller.execution import Execution
from synergy_exec.controller.jobs import spec_of
from synergy_exec.controller.journal import Journal
from synergy_exec.messages import Hello, Launch, PlanMessage, Reshare
from synergy_exec.nodes.links import cluster_of
from synergy_exec.nodes.runs import Run
from synergy_exec.settings import Settings
from synergy_exec.wire import decode, encode

GB = 1e9
CLUSTER = Cluster((NodeType("cpu-0", "cpu", 1, 2, 4.0, 8 * GB, 1e6),))


def model(name: str, *, cpu_s: float) -> ProfiledModel:
    """A sample takes a GPU 10 ms; the initial batch is that of `file_of`."""
    file = file_of(name=name)
    given = ProfiledInput("cpu", 16, cpu_s, 0.16, 1e5, 1e9, (StepAtCpus(1.0, 0.2, 0.04, 0.2),))
    noise, costs = (NoiseFrom(0.0, 0.0),), ProfiledCosts(1.0, 1.0, 1.0)
    return ProfiledModel(name, file.initial_batch, file.max_batch, 1.0, noise, costs, (), given)


def staged(folder: Path, policy: str, *models: ProfiledModel) -> Stage:
    profile = Profile({each.name: each for each in models})
    execution = Execution(Journal(folder / "journal.sqlite"), get_policy(policy), CLUSTER, Settings(), folder, profile)
    return Stage(execution, [FakeAgent(0, 2, {})])


def shares(stage: Stage) -> dict[int, float | None]:
    """CPUs of each job, as its node's agent knows."""
    return {
        run.launch.job: None if run.launch.share is None else run.launch.share.cpus
        for run in stage.agents[0].runs.values()
    }


def test_shares_are_launched_with_and_change_without_a_restart(tmp_path: Path) -> None:
    """Alone the hungry job gets 3.2 CPUs; beside another that wants 1.2 it has what that leaves."""
    stage = staged(tmp_path, "fifo+tune", model("hungry", cpu_s=0.032), model("modest", cpu_s=0.012))
    execution = stage.execution
    hungry = execution.submit("hungry", file_of(name="hungry", work=200.0), 0.0)
    stage.advance(1.0)
    assert shares(stage) == {hungry.job_id: pytest.approx(3.2)}
    modest = execution.submit("modest", file_of(name="modest", work=40.0), stage.now_s)
    stage.advance(1.0)
    stage.advance(1.0)
    assert shares(stage) == {hungry.job_id: pytest.approx(2.8), modest.job_id: pytest.approx(1.2)}
    stage.finish()
    assert (hungry.restarts, modest.restarts) == (0, 0)
    told = [each for each in execution.journal.timings() if each.kind == "share"]
    assert [(each.run, each.parts["cpus"]) for each in told] == [
        (0, pytest.approx(3.2)),
        (1, pytest.approx(1.2)),
        (0, pytest.approx(2.8)),
        (0, pytest.approx(3.2)),
    ]
    assert all(each.parts["memory_bytes"] > 0 for each in told)


def test_policies_that_share_nothing_out_launch_as_ever(tmp_path: Path) -> None:
    stage = staged(tmp_path, "fifo", model("hungry", cpu_s=0.032))
    job = stage.execution.submit("hungry", file_of(name="other", work=40.0), 0.0)
    stage.advance(1.0)
    assert shares(stage) == {job.job_id: None}
    assert not [each for each in stage.execution.journal.timings() if each.kind == "share"]


def test_cluster_of_agents_names_cpus_only_where_they_are_shared_out() -> None:
    given = {"host": "h", "pid": 1, "slots": 2, "gpu_type": "cpu"}
    large, small = (Hello(node=node, cpus=cpus, memory_bytes=10**9, **given) for node, cpus in enumerate((8, 4)))
    plain, _ = cluster_of([large, small])
    assert [(each.nodes, each.cpus) for each in plain.node_types] == [(2, 0.0)]
    named, order = cluster_of([large, small], storage_bytes_per_s=1e6)
    assert [(each.nodes, each.cpus, each.memory_bytes) for each in named.node_types] == [(1, 8.0, 1e9), (1, 4.0, 1e9)]
    assert order == [0, 1]
    with pytest.raises(InputError, match="node 2 \\(h\\) does not say how many CPUs"):
        cluster_of([large, Hello(node=2, **given)], storage_bytes_per_s=1e6)


def test_messages_without_shares_are_read_as_ever_and_odd_ones_refused() -> None:
    launch = Launch(
        run=1, job=2, job_class="a:B", plan=PlanMessage(), initial_batch=1, work=1.0, slots=[0], first_rank=0,
        world=1, store_host="", store_port=0, folder="/tmp", share=Share(1.5, 2e9),
    )  # fmt: skip
    assert decode(encode(launch)) == launch
    older = encode(launch).replace(',"share":[1.5,2000000000.0]', "")
    assert '"share"' not in older
    assert decode(older).share is None  # type: ignore[attr-defined]
    reshare = Reshare(run=1, share=Share(0.5, 0.0))
    assert decode(encode(reshare)) == reshare
    for odd in ("[1.5]", '["a",0]', "3"):
        with pytest.raises(InputError, match="Reshare"):
            decode(f'{{"kind":"reshare","run":1,"share":{odd}}}')


def test_share_of_a_run_that_waits_for_its_slots_is_the_newest(tmp_path: Path) -> None:
    stage = staged(tmp_path, "fifo+tune", model("hungry", cpu_s=0.032))
    runs = stage.execution.runs
    run = Run(0, 0, ((0, 1),), PlanMessage(), Share(1.0, GB))
    stage.execution.jobs[0] = stage.execution.made(0, "hungry", file_of(name="hungry"), 0.0, None)
    runs.connected.clear()
    runs.start(run)
    runs.reshare(0, Share(3.0, GB))
    assert runs.outbox == []
    runs.agent_came(0)
    stage.deliver()
    assert shares(stage) == {0: 3.0}


def test_profiled_input_says_what_a_job_can_use(tmp_path: Path) -> None:
    """The rate is that of as many GPUs as it asks for, at the batch it asks for."""
    profile = Profile({"hungry": model("hungry", cpu_s=0.032)})
    spec = spec_of(file_of(name="hungry", slots=2, batch=32), ("cpu",), 1.0, profile)
    assert spec.pipeline == Pipeline(0.032, 1e5, 1e9)
    assert spec.requested_rate["cpu"] == pytest.approx(2 / (32 * 0.010))
    assert spec_of(file_of(name="other"), ("cpu",), 1.0, profile).pipeline is None


def test_profiles_keep_inputs_and_those_without_are_read_as_ever() -> None:
    profile = Profile({"hungry": model("hungry", cpu_s=0.032)}, "here", "now")
    assert profile_of(profile.to_json(), "p") == profile
    older = profile.to_json()
    begins = older.index(',\n   "input"')
    older = older[:begins] + older[older.index("\n  }\n ]\n}", begins) :]
    assert profile_of(older, "p")["hungry"].input is None


def test_steps_of_the_formula_wait_for_input_or_do_not() -> None:
    given = model("hungry", cpu_s=0.032).input
    assert given is not None
    assert given.step_s(1.0) == pytest.approx(16 * 0.032)
    assert given.step_s(2.0) == pytest.approx(16 * 0.016)
    assert given.step_s(100.0) == 0.16
