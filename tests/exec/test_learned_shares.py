"""What executed jobs report of their input is learned from: no profile is needed to share CPUs out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from exec.controllers_agents import FakeAgent, Stage, report
from exec.controllers_jobs import file_of

from synergy_core.cluster import Cluster, NodeType, Share
from synergy_core.jobs.testbed_profiles import Profile
from synergy_core.policies import get_policy
from synergy_exec.controller.execution import Execution
from synergy_exec.controller.journal import Journal
from synergy_exec.messages import Launch, Message, PlanMessage, Report
from synergy_exec.settings import Settings

GB = 1e9
CLUSTER = Cluster((NodeType("cpu-0", "cpu", 1, 2, 8.0, 8 * GB),))
GPU_SAMPLE_S = 0.010
CPU_S = {"hungry": 0.060, "modest": 0.002}
"""CPU-seconds of a sample: at 10 ms of its GPU, 6 CPUs and 0.2."""


class LoadingAgent(FakeAgent):
    """Its jobs load 1 GB of samples; how long that takes follows from the CPUs that they have. names: by job."""

    names: dict[int, str]

    def pass_time(self, now_s: float) -> list[Message]:
        return [self._loaded(each) if isinstance(each, Report) else each for each in super().pass_time(now_s)]

    def _loaded(self, said: Report) -> Report:
        launch = self.runs[said.run].launch if said.run in self.runs else None
        if launch is None or launch.share is None:
            return said
        samples, cpus = said.micro_batch * said.accumulation, launch.share.cpus
        gpu_s = samples * GPU_SAMPLE_S
        step_s = max(gpu_s, samples * CPU_S[self.names[launch.job]] / cpus)
        return replace(said, step_s=step_s, waited_s=step_s - gpu_s, cpus=cpus, data_bytes=GB)


def staged(folder: Path, policy: str) -> Stage:
    learning = get_policy(policy).with_input("learned")
    execution = Execution(Journal(folder / "journal.sqlite"), learning, CLUSTER, Settings(), folder, Profile())
    agent = LoadingAgent(0, 2, {})
    agent.names = {}
    return Stage(execution, [agent])


def test_shares_follow_what_jobs_report_and_no_profile_is_needed(tmp_path: Path) -> None:
    """Both begin with the proportional 4 CPUs; in the end the modest one has 1, and the hungry one the 6 it needs."""
    stage = staged(tmp_path, "fifo+tune")
    agent = stage.agents[0]
    assert isinstance(agent, LoadingAgent)
    jobs = [stage.execution.submit(name, file_of(name=name, work=400.0), 0.0) for name in ("hungry", "modest")]
    agent.names.update({job.job_id: job.name for job in jobs})
    seen = []
    for _ in range(8):
        stage.advance(1.0)
        given = {run.launch.job: run.launch.share for run in agent.runs.values()}
        assert sum(each.cpus for each in given.values() if each) <= 8.0 + 1e-6
        seen.append([given[job.job_id].cpus for job in jobs])  # type: ignore[union-attr]
    assert seen[0] == [4.0, 4.0]
    assert seen[-1] == [pytest.approx(6.0, rel=0.01), pytest.approx(1.0, rel=0.06)]
    assert [job.restarts for job in jobs] == [0, 0]
    for job in jobs:
        assert job.task is not None
        inputs = job.task.pool.inputs
        assert inputs is not None
        assert inputs.found is not None
        assert inputs.found.cpu_s.state == ("measured" if job.name == "hungry" else "bounded")
        # Unprofiled, its rate as requested says nothing: its pace is what its own steps show.
        spec = job.task.spec
        requested_s = spec.requested_gpus / (spec.requested_rate["cpu"] * spec.requested_batch)
        assert job.task.gpu_slowdown == pytest.approx(GPU_SAMPLE_S / requested_s)


def recorded(cpus: float, step_s: float, waited_s: float) -> Report:
    """Of a job of 32 samples on one GPU, as a worker says it."""
    launch = Launch(
        run=0, job=0, job_class="a:B", plan=PlanMessage(micro_batch=32), initial_batch=32, work=400.0, slots=[0],
        first_rank=0, world=1, store_host="", store_port=0, folder="/tmp", share=Share(cpus, GB),
    )  # fmt: skip
    return replace(report(0, launch, 10.0), step_s=step_s, waited_s=waited_s, cpus=cpus, data_bytes=GB)


def test_a_fit_to_recorded_reports_and_what_is_no_report_of_input(tmp_path: Path) -> None:
    """320 ms of the GPU; 60 CPU-ms a sample, 3 % of noise. What GPUs take is learned apart from waiting."""
    stage = staged(tmp_path, "fifo+tune")
    job = stage.execution.submit("hungry", file_of(name="hungry", work=400.0), 0.0)
    decider = stage.execution.decider
    decider.decide(0.0)
    assert job.task is not None
    inputs = job.task.pool.inputs
    assert inputs is not None
    for nothing in ({"steps": 1}, {"waited_s": 1.0}, {"step_s": 0.0}):
        decider.report(job, replace(recorded(4.0, 0.48, 0.16), **nothing))  # type: ignore[arg-type]
        assert inputs.believed is None
    observation = decider.report(job, recorded(4.0, 0.494, 0.17))
    assert observation is not None
    assert observation.step_s == pytest.approx(0.324)
    before = inputs.believed
    for nothing in ({"cpus": 0.0}, {"data_bytes": 0.0}):
        decider.report(job, replace(recorded(1.0, 9.0, 8.0), **nothing))  # type: ignore[arg-type]
        assert inputs.believed is before
    for cpus, step_s, waited_s in ((2.0, 0.95, 0.64), (3.0, 0.65, 0.33), (8.0, 0.33, 0.0), (1.0, 1.9, 1.57)):
        decider.report(job, recorded(cpus, step_s, waited_s))
    assert inputs.believed is not None
    assert inputs.found is not None
    assert inputs.found.cpu_s.value == pytest.approx(0.060, rel=0.03)
    assert inputs.found.cpu_s.steps == 4
    assert inputs.found.cpu_s.lower < 0.060 < inputs.found.cpu_s.upper
