"""A controller without its processes: an execution, and agents that only pretend, on a clock that the test sets."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from synergy_core.errors import InputError
from synergy_core.performance.planner.plan import Plan
from synergy_core.scheduling.jobs.cluster import Cluster, NodeType
from synergy_core.scheduling.jobs.testbed_profiles import TestbedProfile
from synergy_core.scheduling.policies import Policy, get_policy
from synergy_exec import messages as said
from synergy_exec.controller.controller import resume
from synergy_exec.controller.execution import Execution
from synergy_exec.controller.journal import Journal
from synergy_exec.job_file import Command, JobFile, TrainedClass
from synergy_exec.messages import Ended, Launch, Message, NodeSlots, Outcome, Reporting
from synergy_exec.plans import Candidates, batches_of, plans, write_candidates
from synergy_exec.run import executed
from synergy_exec.settings import RunSettings, Settings
from synergy_exec.wire import decode, encode
from synergy_runs.outputs.facts import Kind, Run

STEP_S = 0.25
"""Seconds of a step on one slot; n slots are n times as fast."""


def refuses(says: str, asked: Callable[..., object], *arguments: Any, **more: Any) -> str:
    """That what is called does so, with a sentence in which `says` is found; the sentence."""
    with pytest.raises(InputError, match=says) as caught:
        asked(*arguments, **more)
    return str(caught.value)


def cluster_of(*slots: int) -> Cluster:
    """One node per number, each with so many slots."""
    return Cluster(tuple(NodeType(f"n{i}", "cpu", 1, each) for i, each in enumerate(slots)))


def file_of(work: float = 100.0, slots: int = 1, **more: Any) -> JobFile:
    """more: values as in a job file, which are not checked."""
    values = {"class": "examples.mlp:Mlp", "name": "mlp", "initial_batch": 32, "max_batch": 128, **more}
    return unchecked(work=work, slots=slots, **values)


def unchecked(**values: Any) -> JobFile:
    """A job of these values, as in a job file, even if `job_of` would refuse it."""
    of_class, of_command = {"job_class": values.pop("class", "")}, {"words": values.pop("command", [])}
    of_class |= {each.name: values.pop(each.name) for each in dataclasses.fields(TrainedClass) if each.name in values}
    of_command |= {each.name: values.pop(each.name) for each in dataclasses.fields(Command) if each.name in values}
    if of_command["words"]:
        return JobFile(**values, command=Command(**of_command))
    return JobFile(**values, trained=TrainedClass(**of_class))


OF_FILE = ("class", "arguments", "initial_batch", "work", "weights", "tensorboard")


def launch_of(**more: Any) -> Launch:
    """One rank of a job. more: fields of `Launch` and its parts, and `OF_FILE` of its job file."""
    file = {"name": "b", "class": "a:B", "initial_batch": 1, "max_batch": 1, "work": 1.0}
    file |= {name: more.pop(name) for name in OF_FILE if name in more}
    values = {"run": 0, "job": 0, "file": unchecked(**file), "plan": Plan()}
    parts: dict[str, Any] = {}
    for part, kind in {"settings": RunSettings, "node": NodeSlots, "reporting": Reporting}.items():
        usual = {"slots": [0], "world": 1} if kind is NodeSlots else {}
        own = {each.name: more.pop(each.name) for each in dataclasses.fields(kind) if each.name in more}
        parts[part] = kind(**usual | own)
    return Launch(**values | {"folder": "/tmp"} | parts | more)


@dataclass
class FakeRun:
    launch: Launch
    stepped_s: float
    done: float
    stopping: bool = False
    is_told: bool = False


@dataclass
class FakeAgent:
    """One node. checkpoints: work saved by job, on the file system that all nodes share. refusal: why a plan is no
    candidate for what it launches; None: it finds no candidates.
    """

    refusal = None

    node: int
    slots: int
    checkpoints: dict[int, float]
    runs: dict[int, FakeRun] = field(default_factory=dict)
    launched: list[int] = field(default_factory=list)

    def hear(self, message: Message, now_s: float) -> list[Message]:
        """Returns the messages that the agent answers at once."""
        run = self.runs.get(getattr(message, "run", -1))
        match message:
            case said.Reserve():
                return [said.Reserved(run=message.run, host="127.0.0.1", port=20_000 + message.run)]
            case Launch():
                held = {slot for run in self.runs.values() for slot in run.launch.node.slots}
                assert not held & set(message.node.slots), "launched on slots that are held"
                assert max(message.node.slots) < self.slots
                asked = message.reporting.plans_on
                if self.refusal and asked and message.node.first_rank == 0:
                    there = {
                        size: plans(size, batches_of(message.file), self.refusal) for size in message.reporting.plans_on
                    }
                    write_candidates(Path(message.folder), Candidates(there))
                self.launched.append(message.job)
                self.runs[message.run] = FakeRun(message, now_s, self.checkpoints.get(message.job, 0.0))
            case said.Shutdown():
                for each in self.runs.values():
                    each.stopping = True
            case said.Kill() if run:
                return [self.end(message.run, "lost")]
            case said.Stop() if run:
                run.stopping = True
            case said.Reshare() if run:
                assert run.launch.share is not None
                run.launch = replace(run.launch, share=message.share)
            case said.Retune() if run:
                assert message.micro_batch >= 1
                cut = {name: getattr(message, name) for name in ("micro_batch", "accumulation", "compressor")}
                run.launch = replace(run.launch, plan=replace(run.launch.plan, **cut))
        return []

    def started(self, launch: Launch) -> dict[str, Any]:
        """Fields of the report on a run's first step, besides the progress."""
        return dict.fromkeys(("launch_s", "build_s", "load_s", "first_step_s"), 0.1)

    def measured(self, launch: Launch) -> dict[str, Any]:
        """Fields of the reports on steps, besides the progress."""
        plan = launch.plan
        return {
            "step_s": STEP_S * (0.1 + 0.9 * plan.micro_batch * plan.accumulation / 32),
            "sync_s": 0.02 if plan.data > 1 else 0.0,
        }

    def end(self, number: int, outcome: Outcome, reason: str = "") -> Ended:
        run = self.runs.pop(number)
        if outcome in ("paused", "done"):
            self.checkpoints[run.launch.job] = run.done
        return Ended(run=number, outcome=outcome, reason=reason)

    def pass_time(self, now_s: float) -> list[Message]:
        """Returns the messages that the agent sends unasked, half a second or more after it was last asked."""
        told: list[Message] = []
        for number, run in list(self.runs.items()):
            launch, plan, first = run.launch, run.launch.plan, run.launch.node.first_rank == 0
            if first and not run.is_told:
                run.is_told = True
                told.append(
                    said.Started(run=number, step=int(run.done), samples=0, work=run.done, **self.started(launch))
                )
            speed = launch.node.world / STEP_S
            run.done = min(launch.file.work, run.done + max(1.0, (now_s - run.stepped_s) * speed))
            run.stepped_s = now_s
            if first:
                progress = {"step": int(run.done), "samples": int(run.done) * plan.global_batch, "work": run.done}
                cut = {"micro_batch": plan.micro_batch, "accumulation": plan.accumulation, "steps": 10}
                seen = {
                    "loss": 1.0 / (1.0 + run.done),
                    "grad_sqr": 1.0,
                    "grad_var": 4.0,
                    "memory": said.MemoryUse(used_bytes=10_000_000),
                }
                told.append(said.Report(run=number, **progress, **cut, **seen, **self.measured(launch)))
            if run.done >= launch.file.work:
                told.append(self.end(number, "done"))
            elif run.stopping:
                told.append(self.end(number, "paused"))
        return told


class Stage:
    """An execution and its pretended agents on one clock. again: makes another like it on the same folder."""

    def __init__(self, execution: Execution, agents: list[FakeAgent], again: Any = None) -> None:
        self.execution, self.again = execution, again
        self.agents = {agent.node: agent for agent in agents}
        self.now_s = 0.0
        for agent in agents:
            execution.agent_came(agent.node, 0.0)

    def heard(self, node: int, message: Message) -> None:
        """Hands the message to the controller in the form in which messages are sent."""
        self.execution.heard(node, decode(encode(message)), self.now_s)

    def deliver(self) -> None:
        """Messages to and fro until nobody has anything to say."""
        self.execution.journal.commit()  # as the controller does before it sends any
        while self.execution.runs.outbox:
            node, message = self.execution.runs.outbox.pop(0)
            if node in self.agents:
                for answer in self.agents[node].hear(decode(encode(message)), self.now_s):
                    self.heard(node, answer)

    def advance(self, *seconds: float, decide: bool = True) -> None:
        """Advances the clock by these times, one after another."""
        for each in seconds:
            self.now_s += each
            for agent in list(self.agents.values()):
                for message in agent.pass_time(self.now_s):
                    self.heard(agent.node, message)
            self.deliver()
            if decide:
                self.decide()

    def decide(self) -> None:
        self.execution.decide(self.now_s)
        self.deliver()

    def submit(self, *works: float, **more: Any) -> list[Any]:
        first = len(self.execution.jobs)
        files = [file_of(work, **more) for work in works]
        return [self.execution.submit(f"j{first + at}", file, self.now_s) for at, file in enumerate(files)]

    def ends(self, node: int, run: int, outcome: Outcome, reason: str, **what: Any) -> None:
        """One run ends without an order to. what: further fields of the agent's message."""
        self.heard(node, replace(self.agents[node].end(run, outcome, reason), **what))

    def lose(self, node: int) -> FakeAgent:
        """The node loses its agent and with it all runs on the node."""
        gone = self.agents.pop(node)
        gone.runs.clear()
        self.execution.agent_left(node, self.now_s)
        self.deliver()
        return gone

    def come_back(self, agent: FakeAgent) -> None:
        self.agents[agent.node] = agent
        self.execution.agent_came(agent.node, self.now_s)
        self.deliver()

    def resumed(self) -> Stage:
        """A new controller on the same journal after this one vanished; agents have saved and left."""
        for agent in self.agents.values():
            for number in list(agent.runs):
                agent.end(number, "paused")
        self.execution.journal._connection.close()  # not committed: as after SIGKILL
        again = self.again()
        for agent in again.agents.values():
            agent.checkpoints = self.agents[0].checkpoints
        again.now_s = max(again.execution.journal.last_s(), self.now_s)
        return again

    def finish(self) -> None:
        for _ in range(500):
            if self.execution.idle:
                return
            self.advance(1.0)
        raise AssertionError(f"jobs go on: {self.states()}")

    def states(self) -> dict[int, str]:
        return {number: job.state for number, job in sorted(self.execution.jobs.items())}

    def launch(self) -> Launch:
        (run,) = self.agents[0].runs.values()
        return run.launch

    def facts_hold(self) -> Run:
        """Ends what still runs. No slot was held twice, starts and stops took turns, each job ended at most once."""
        for agent in self.agents.values():
            for run in list(agent.runs):
                self.ends(agent.node, run, "paused", "")
        journal, decider = self.execution.journal, self.execution.decider
        journal.commit()
        result = executed(Journal(journal.path), None, decider.policy, decider.aside.whole, "facts", 0, 0.0)
        kinds = Counter(fact.kind for fact in journal.facts())
        assert kinds[Kind.START] == kinds[Kind.STOP] + kinds[Kind.FINISH]
        return result

    def finished(self) -> list[int]:
        return sorted(fact.job for fact in self.execution.journal.facts() if fact.kind == Kind.FINISH)


def execution_of(folder: Path, policy: Policy | str = "fifo", cluster: Cluster | int = 1, **more: Any) -> Execution:
    """Goes on with what is in the folder, as controllers do. cluster: or how many slots its only node has. more:
    settings and a profile.
    """
    chosen = get_policy(policy) if isinstance(policy, str) else policy
    nodes = cluster_of(cluster) if isinstance(cluster, int) else cluster
    given = {"settings": Settings(retries=2), "profile": TestbedProfile(), **more}
    journal = Journal(folder / "journal.sqlite")
    execution = Execution(journal, chosen, nodes, folder=folder, **given)
    resume(execution, journal.last_s())
    return execution


def staged(
    folder: Path, policy: Policy | str = "fifo", slots: tuple[int, ...] = (1,), agent: Any = FakeAgent, **more: Any
) -> Stage:
    """Makes a stage with an agent on each node. more: arguments of `execution_of`."""
    execution = execution_of(folder, policy, **{"cluster": cluster_of(*slots), **more})
    checkpoints: dict[int, float] = {}
    agents = [agent(node, each, checkpoints) for node, each in enumerate(slots)]
    return Stage(execution, agents, partial(staged, folder, policy, slots, agent, **more))
