"""Agents that only pretend: they answer as messages.py says, and train by a clock that the test sets."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from synergy_exec.controller.execution import Execution
from synergy_exec.messages import (
    Ended,
    Kill,
    Launch,
    Message,
    Outcome,
    Rebuild,
    Report,
    Reserve,
    Reserved,
    Reshare,
    Retune,
    Shutdown,
    Started,
    Stop,
)
from synergy_exec.wire import decode, encode

STEP_S = 0.25
"""Of one step on one slot; as many times as fast on more."""


@dataclass
class FakeRun:
    launch: Launch
    began_s: float
    done: float
    stopping: bool = False
    order: Rebuild | None = None
    stepped: bool = False
    measured: bool = False


@dataclass
class FakeAgent:
    """One node. checkpoints: work saved by job, on the file system that all nodes share."""

    node: int
    slots: int
    checkpoints: dict[int, float]
    failing: set[int] = field(default_factory=set)
    deaf: bool = False
    runs: dict[int, FakeRun] = field(default_factory=dict)
    reserved: int = 0
    launched: list[int] = field(default_factory=list)

    def hear(self, message: Message, now_s: float) -> list[Message]:
        """What it answers at once."""
        if isinstance(message, Reserve):
            self.reserved += 1
            return [Reserved(run=message.run, host="127.0.0.1", port=20_000 + self.reserved)]
        if isinstance(message, Launch):
            held = {slot for run in self.runs.values() for slot in run.launch.slots}
            assert not held & set(message.slots), "launched on slots that are held"
            assert max(message.slots) < self.slots
            self.launched.append(message.job)
            self.runs[message.run] = FakeRun(message, now_s, self.checkpoints.get(message.job, 0.0))
            return []
        if isinstance(message, Kill):
            return [self.end(message.run, "lost")] if message.run in self.runs else []
        if isinstance(message, Stop) and message.run in self.runs:
            self.runs[message.run].stopping = True
        if isinstance(message, Shutdown):
            for run in self.runs.values():
                run.stopping = True
        if isinstance(message, Reshare) and message.run in self.runs:
            run = self.runs[message.run]
            assert run.launch.share is not None
            run.launch = replace(run.launch, share=message.share)
        if isinstance(message, Retune) and message.run in self.runs:
            run = self.runs[message.run]
            assert message.micro_batch >= 1
            cut = {"micro_batch": message.micro_batch, "accumulation": message.accumulation}
            run.launch = replace(run.launch, plan=replace(run.launch.plan, **cut))
            run.order = run.order and replace(run.order, steps=message.steps)
            run.measured = False
        if isinstance(message, Rebuild) and message.run in self.runs:
            run = self.runs[message.run]
            run.launch, run.order = replace(run.launch, plan=message.plan), message
            run.stepped = run.measured = False
        return []

    def end(self, number: int, outcome: Outcome, reason: str = "") -> Ended:
        run = self.runs.pop(number)
        if outcome in ("paused", "done"):
            self.checkpoints[run.launch.job] = run.done
        return Ended(run=number, outcome=outcome, reason=reason)

    def pass_time(self, now_s: float) -> list[Message]:
        """What it says by itself, half a second or more after it was last asked."""
        said: list[Message] = []
        for number, run in list(self.runs.items()):
            launch = run.launch
            first = launch.first_rank == 0
            copies = range(1)
            if launch.waits:
                if run.order is None:
                    continue
                copies = range(len(run.order.copies))
            if not run.stepped and first:
                run.stepped = True
                seconds = {"launch_s": 0.1, "build_s": 0.1, "load_s": 0.1, "first_step_s": 0.1}
                begun = Started(run=number, step=int(run.done), samples=0, work=run.done, **seconds)
                said += [replace(begun, copy=copy) for copy in copies]
            if launch.job in self.failing:
                said.append(self.end(number, "failed", "rank 0: ValueError: no"))
                continue
            speed = launch.world / STEP_S
            run.done = min(launch.work, run.done + max(1.0, (now_s - run.began_s) * speed))
            run.began_s = now_s
            if first and not run.measured:
                run.measured = run.order is not None and run.order.steps > 0
                measured_s = STEP_S / launch.plan.world if run.measured else 0.0
                told = replace(report(number, launch, run.done), told_s=now_s, measured_s=measured_s)
                said += [replace(told, copy=copy) for copy in copies]
            if run.done >= launch.work:
                said.append(self.end(number, "done"))
            elif run.stopping:
                said.append(self.end(number, "paused"))
        return said


def report(number: int, launch: Launch, work: float) -> Report:
    plan = launch.plan
    return Report(
        run=number,
        step=int(work),
        samples=int(work) * plan.global_batch,
        work=work,
        loss=1.0 / (1.0 + work),
        micro_batch=plan.micro_batch,
        accumulation=plan.accumulation,
        step_s=STEP_S * (0.1 + 0.9 * plan.micro_batch * plan.accumulation / 32),
        sync_s=0.02 if plan.data > 1 else 0.0,
        steps=10,
        grad_sqr=1.0,
        grad_var=4.0,
        memory_bytes=10_000_000,
    )


class Stage:
    """An execution and its pretended agents on one clock."""

    def __init__(self, execution: Execution, agents: list[FakeAgent]) -> None:
        self.execution = execution
        self.agents = {agent.node: agent for agent in agents}
        self.now_s = 0.0
        for agent in agents:
            execution.agent_came(agent.node, 0.0)

    def deliver(self) -> None:
        """Messages to and fro until nobody has anything to say. Each goes through its text form."""
        while self.execution.outbox:
            node, message = self.execution.outbox.pop(0)
            agent = self.agents.get(node)
            if agent is None or agent.deaf:
                continue
            for answer in agent.hear(decode(encode(message)), self.now_s):
                self.execution.heard(node, decode(encode(answer)), self.now_s)

    def advance(self, seconds: float, *, decide: bool = True) -> None:
        self.now_s += seconds
        for agent in list(self.agents.values()):
            for message in [] if agent.deaf else agent.pass_time(self.now_s):
                self.execution.heard(agent.node, decode(encode(message)), self.now_s)
        self.deliver()
        if decide:
            self.execution.decide(self.now_s)
            self.deliver()

    def finish(self, most: int = 500) -> None:
        for _ in range(most):
            if self.execution.idle:
                return
            self.advance(1.0)
        raise AssertionError(f"jobs go on: {[(job.job_id, job.state) for job in self.execution.jobs.values()]}")
