"""Measuring keeps to its time, its memory and its settings; agents only pretend."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from exec import controllers_backend
from exec.controllers_agents import FakeAgent
from exec.controllers_backend import TaskBackend

from synergy_exec.commands import profile as command
from synergy_exec.commands.profile import table
from synergy_exec.job_file import JobFile
from synergy_exec.messages import Failure, Launch, Message, PlanMessage, Rebuild
from synergy_exec.profiling import profile as profiling
from synergy_exec.profiling.finder import CandidatePlans
from synergy_exec.profiling.grid import batches_of, plans
from synergy_exec.profiling.measure import Effort
from synergy_exec.profiling.profile import add_to_profile
from synergy_exec.profiling.progress import progress
from synergy_exec.settings import Settings
from synergy_runs.profiles import read_profile

HERE = "this machine"
TINY = Effort(seconds=0.1, noise_s=0.0)
LARGE = 16
"""Samples of a micro-batch that do not fit."""


class Agent(FakeAgent):
    """Has no memory for large micro-batches; what is to run on several slots in `stuck` never steps."""

    launches: list[Launch]
    stuck = False

    def hear(self, message: Message, now_s: float) -> list[Message]:
        answers = super().hear(message, now_s)
        if isinstance(message, Rebuild) or (isinstance(message, Launch) and not message.waits):
            self.launches.append(self.runs[message.run].launch)
        return answers

    def pass_time(self, now_s: float) -> list[Message]:
        for number, run in list(self.runs.items()):
            if self.stuck and run.launch.plan.world > 1:
                run.began_s, run.launch = now_s, dataclasses.replace(run.launch, first_rank=1)
            elif run.launch.plan.micro_batch >= LARGE:
                reason = "rank 0: OutOfMemoryError"
                failure = Failure(run=number, rank=0, reason=reason, out_of_memory=True)
                return [failure, self.end(number, "failed", reason)]
        return super().pass_time(now_s)


class Found:
    """In place of the process that builds models: replicas, and stages of replicas."""

    async def candidates(self, file: JobFile, sizes: list[int]) -> CandidatePlans:
        def refusal(plan: PlanMessage) -> str | None:
            return "no" if plan.tensor > 1 or plan.zero or plan.interleave > 1 else None

        batches = batches_of(file.initial_batch, file.max_batch)
        return CandidatePlans(1e3, {size: plans(size, batches, refusal) for size in sizes})


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """What agents were told to launch and to build anew."""

    @contextlib.asynccontextmanager
    async def finder() -> AsyncIterator[Found]:
        yield Found()

    monkeypatch.setattr(profiling, "finder", finder)
    monkeypatch.setattr(controllers_backend, "FakeAgent", Agent)
    monkeypatch.setattr(Agent, "launches", [], raising=False)
    return Agent.launches


def file_of(name: str, **more: Any) -> JobFile:
    return JobFile(**{"job_class": "a.b:C", "name": name, "initial_batch": 4, "max_batch": 8, "work": 1.0, **more})


def test_time_that_is_up_ends_measuring_and_what_there_was_none_for_is_predicted(
    tmp_path: Path, launches: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two models, each of which trains on one slot and stands still on two; nobody else would end that. What stands
    still takes half of the model's time, and leaves the rest to other plans.
    """
    monkeypatch.setattr(Agent, "stuck", True)
    path, said = tmp_path / "profile.json", list[str]()
    files = [file_of("first"), file_of("second")]
    made = add_to_profile(path, files, TaskBackend(2), HERE, TINY, said.append, Settings(profile_s=10.0))
    assert [each.name for each in made.models] == ["first", "second"]
    for model in read_profile(path).models.values():
        known = {(row.plan.gpus, row.plan.global_batch, row.predicted) for row in model.rows}
        assert known == {(1, 4, False), (1, 8, False), (2, 4, True), (2, 8, True)}
        assert [line.endswith(", predicted") for line in table(model)[1:]] == [False, False, True, True]
    assert made.remarks[0].startswith("first: left out, dp2 · 2×1: it was not measured after 2.")
    assert made.remarks[1].startswith(
        "first: time was up before 4 more step times were measured; 2 of them are predict"
    )
    assert said[0].startswith("first: 1 on 1 × cpu (0 of 8 step times decided, ")
    assert said[1].startswith("first: dp2 on 2 × cpu (2 of 8 step times decided, ")
    assert "first: 2 of 8 step times measured" in said


def test_model_that_is_not_built_in_time_is_left_out(
    tmp_path: Path, launches: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Agent, "stuck", True)
    path = tmp_path / "profile.json"
    files = [file_of("small"), file_of("wide", arguments={"never": "built"})]

    async def never(self: Found, file: JobFile, sizes: list[int]) -> CandidatePlans:
        if file.arguments:
            await asyncio.Event().wait()
        return CandidatePlans(1.0, {1: plans(1, [4], lambda plan: None), 2: []})

    monkeypatch.setattr(Found, "candidates", never)
    made = add_to_profile(path, files, TaskBackend(2), HERE, TINY, lambda _: None, Settings(profile_s=8.0))
    assert [each.name for each in made.models] == ["small"]
    assert made.remarks == ["wide could not be profiled: time was up before its model was built."]


def test_smaller_pieces_are_measured_where_memory_ran_out(tmp_path: Path, launches: list[Launch]) -> None:
    """Batch 32 on one slot is two pieces of 16, which do not fit; nor would the same on two replicas, which is not
    tried then; on two stages two pieces of 16 do not fit, and four of 8 do.
    """
    path = tmp_path / "profile.json"
    file = file_of("large", initial_batch=8, max_batch=32)
    made = add_to_profile(path, [file], TaskBackend(2), HERE, TINY, lambda _: None, Settings())
    rows = made.models[0].rows
    known = {(each.plan.gpus, each.plan.pipeline, each.plan.global_batch, each.plan.micro_batch) for each in rows}
    assert {(1, 1, 8, 4), (1, 1, 16, 8), (2, 1, 8, 4), (2, 1, 16, 8), (2, 2, 32, 8)} <= known
    assert max(micro_batch for *_, micro_batch in known) < LARGE
    assert not [each for each in rows if each.predicted]
    assert [each.partition(":")[2] for each in made.remarks] == [
        " left out, 1 GPU · 16×2: rank 0: OutOfMemoryError",
        " left out, pp2 · 16×2: rank 0: OutOfMemoryError",
    ]
    assert len([each for each in launches if each.plan.pipeline == 2]) == 3  # what fits of 32, and 16


def test_plan_is_measured_again_where_its_agent_was_lost_meanwhile(
    tmp_path: Path, launches: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is lost when its ranks are to build the model anew, and with it all that was warm."""
    left: list[int] = []

    class Leaving(Agent):
        def hear(self, message: Message, now_s: float) -> list[Message]:
            if isinstance(message, Rebuild) and not left and message.plan.pipeline > 1:
                left.append(message.run)
                raise asyncio.CancelledError
            return super().hear(message, now_s)

    monkeypatch.setattr(controllers_backend, "FakeAgent", Leaving)
    path, file = tmp_path / "profile.json", file_of("small", max_batch=4)
    made = add_to_profile(path, [file], TaskBackend(2), HERE, TINY, lambda _: None, Settings(profile_s=60.0))
    assert made.remarks == []
    assert len(left) == 1
    assert {(row.plan.gpus, row.plan.pipeline) for row in made.models[0].rows} == {(1, 1), (2, 1), (2, 2)}


def test_command_measures_as_a_run_would(
    tmp_path: Path, launches: list[Launch], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """On two nodes that reach the controller by another address than its own."""
    urls: list[str] = []

    class Elsewhere(TaskBackend):
        async def start(self, node: int, meeting: Any) -> None:
            urls.append(meeting.url)
            await super().start(node, meeting)

    monkeypatch.setattr(command, "get_backend", lambda name, options: Elsewhere(*[1] * options["nodes"]))
    job = tmp_path / "job.yaml"
    job.write_text(json.dumps({"class": "a.b:C", "name": "small", "initial_batch": 4, "work": 1}))
    of_run = ["host=127.0.0.2", "interface=lo", "bfloat16=false", "memory_gb_per_slot=3", "start_s=77", "profile_s=60"]
    out = tmp_path / "profile.json"
    command.main([str(job), "--seconds", "0.1", "--out", str(out), "--option", "nodes=2", *of_run])
    assert [url.rpartition(":")[0] for url in urls] == ["http://127.0.0.2"] * 2
    given = {(each.interface, each.bfloat16, each.memory_gb_per_slot, each.start_s) for each in launches}
    assert given == {("lo", False, 3.0, 77.0)}
    model = read_profile(out)["small"]
    assert {(row.nodes, row.plan.gpus) for row in model.rows} == {(1, 1), (2, 2)}
    assert read_profile(out).machine.endswith("local (nodes=2), float32")
    heard = capfd.readouterr().err.splitlines()
    assert heard[0] == "measuring small for at most 60 s (profile_s)"
    assert heard[1].startswith("small: 1 on 1 × cpu (0 of ")


def test_progress_is_plain_lines_where_there_is_no_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    with progress() as say:
        say("one")
        say("two")
    with progress(quiet=True) as say:
        say("three")
    assert capfd.readouterr().err == "one\ntwo\n"
