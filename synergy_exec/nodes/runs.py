"""States of runs over several agents: runs hold slots, wait for earlier runs to stop, and end with one outcome.

There are no sockets and no clock here. After every call the caller takes messages from `outbox` and events from
`happened`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from synergy_core.performance.planner.plan import Plan
from synergy_core.scheduling.jobs.cluster import Share
from synergy_core.scheduling.jobs.record import Placed, gpus_in
from synergy_exec.messages import (
    KILLED,
    LOST_PEERS,
    Ended,
    Kill,
    Launch,
    Message,
    NodeSlots,
    Reserve,
    Reserved,
    Reshare,
    Retune,
    Started,
    Stop,
)

Stage = Literal["waiting", "reserving", "launched", "started"]
Slot = tuple[int, int]
"""Node and slot."""
LaunchOf = Callable[["JobRun"], Launch]
"""Makes the launch message of a run without the parts that differ between nodes."""


@dataclass(slots=True)
class JobRun:
    """A job on fixed slots."""

    number: int
    """Number of the run. Earlier runs have smaller numbers and get slots first."""
    job: int
    """Number of the job."""
    placed: Placed
    """Nodes and slots, by the agents' node numbers."""
    plan: Plan
    """The parallel plan, with the compressor's name in the controller (`messages.Launch.plan`)."""
    share: Share | None = None
    """CPUs and memory of each slot; None if they are not shared out."""
    stage: Stage = "waiting"
    """Stage of the run: it waits for slots or agents, reserves the store of its ranks, is launched, or has done its
    first step."""
    stopping: bool = False
    """Whether the run was told to stop or is being killed."""
    killed: bool = False
    """Whether the run is being killed. It then counts as lost unless it is done."""
    store: tuple[str, int] = ("", 0)
    """Address and port at which ranks meet, as in `messages.Reserved`."""
    said: dict[int, Ended] = field(default_factory=dict)
    """Reports of the run's end, by node."""
    agent_lost: bool = False
    """Whether an agent was lost before it could report the run's end."""
    excused: bool = False
    """Whether the lost agent's node had other runs, each of which may be the cause."""

    @property
    def nodes(self) -> list[int]:
        return [node for node, _ in self.placed]

    @property
    def slots(self) -> set[Slot]:
        return {(node, slot) for node, mask in self.placed for slot in _bits(mask)}


class Happened(NamedTuple):
    """An event of a run.

    launched: its workers were told to start, on slots that no other run holds. stepped: its first step is done, see
    `started`. dropped: it was stopped before any worker was started. left: none of its processes is left; `ended` is
    the report of the node that explains the end.
    """

    what: Literal["launched", "stepped", "dropped", "left"]
    run: JobRun
    started: Started | None = None
    ended: Ended | None = None


class Runs:
    """All runs that have not ended. A run holds its slots from its reservation until every agent has reported its end.

    ports: see `messages.Reserve`. connected: nodes of connected agents.
    """

    def __init__(self, launch_of: LaunchOf, ports: str) -> None:
        self._launch_of, self._ports = launch_of, ports
        self.runs: dict[int, JobRun] = {}
        self.connected: set[int] = set()
        self.outbox: list[tuple[int, Message]] = []
        self.happened: list[Happened] = []

    # Requests of the controller

    def start(self, run: JobRun) -> None:
        """Launches the run as soon as its slots are free and the job's earlier run has ended."""
        self.runs[run.number] = run
        self._launch_waiting()

    def stop(self, number: int) -> None:
        """Tells a run to save its state and stop. A run whose workers have not been started is cancelled instead."""
        run = self._goes_on(number)
        if run is None:
            return
        run.stopping = True
        if run.stage in ("waiting", "reserving"):
            if run.stage == "reserving":
                self._send(run.nodes[0], Kill(run=run.number))
            del self.runs[run.number]
            self.happened.append(Happened("dropped", run))
            self._launch_waiting()
            return
        self._tell(run, Stop(run=number))

    def kill(self, number: int) -> None:
        """Kills a run at once, without saving."""
        run = self.runs.get(number)
        if run is None or run.stage in ("waiting", "reserving"):
            self.stop(number)
        else:
            run.stopping = run.killed = True
            self._tell(run, Kill(run=number))

    def retune(self, number: int, plan: Plan) -> None:
        """Changes micro-batch, accumulation or compressor of a run."""
        if (run := self._goes_on(number)) is not None:
            run.plan = plan
            told = self._launch_of(run).plan
            cut = {name: getattr(told, name) for name in ("micro_batch", "accumulation", "compressor")}
            self._tell(run, Retune(run=number, **cut))

    def reshare(self, number: int, share: Share) -> None:
        """Changes the CPUs and memory of each slot of the run, which was started with a share."""
        if (run := self._goes_on(number)) is not None:
            run.share = share
            self._tell(run, Reshare(run=number, share=share))

    def _goes_on(self, number: int) -> JobRun | None:
        run = self.runs.get(number)
        return None if run is None or run.stopping else run

    def _tell(self, run: JobRun, message: Message) -> None:
        """Sends a message to every node of a run that has workers; a later launch includes the change."""
        if run.stage in ("launched", "started"):
            for node in run.nodes:
                if node not in run.said:
                    self._send(node, message)

    def of_job(self, job: int) -> list[int]:
        return [run.number for run in self.runs.values() if run.job == job]

    # Messages of agents

    def agent_came(self, node: int) -> None:
        self.connected.add(node)
        self._launch_waiting()

    def agent_left(self, node: int) -> None:
        """Handles the loss of an agent and of everything on its node: runs launched there are lost."""
        self.connected.discard(node)
        there = [run for run in self.runs.values() if node in run.nodes and run.stage != "waiting"]
        for run in there:
            if run.stage == "reserving":
                run.stage = "waiting"  # until the node has an agent again
            elif node not in run.said:
                run.agent_lost, run.excused = True, len(there) > 1
                reason = f"the agent of node {node} was lost"
                self._part_ended(run, node, Ended(run=run.number, outcome="lost", reason=reason))
        self._launch_waiting()

    def heard(self, node: int, message: Message) -> None:
        """Handles a message of an agent; ignores those about ended runs or runs of other nodes."""
        run = self.runs.get(getattr(message, "run", -1))
        if run is None or node not in run.nodes:
            return
        if isinstance(message, Reserved) and run.stage == "reserving":
            run.store = message.host, message.port
            self._launch(run)
        elif isinstance(message, Started) and run.stage == "launched":
            run.stage = "started"
            self.happened.append(Happened("stepped", run, started=message))
        elif isinstance(message, Ended) and run.stage in ("launched", "started") and node not in run.said:
            self._part_ended(run, node, message)
            self._launch_waiting()

    # Launching

    def _launch_waiting(self) -> None:
        """Reserves slots for every run that can be launched, in the order of decisions."""
        taken = {slot for run in self.runs.values() if run.stage != "waiting" for slot in run.slots}
        for run in sorted(self.runs.values(), key=lambda run: run.number):
            if run.stage != "waiting":
                continue
            first = not any(other.job == run.job and other.number < run.number for other in self.runs.values())
            if taken.isdisjoint(run.slots) and first and self.connected.issuperset(run.nodes):
                run.stage = "reserving"
                # The ranks of a command meet at a port even on one node.
                opens = len(run.nodes) > 1 or bool(self._ports and self._launch_of(run).file.command)
                self._send(run.nodes[0], Reserve(run=run.number, ports=self._ports, opens_port=opens))
            taken |= run.slots

    def _launch(self, run: JobRun) -> None:
        launch = self._launch_of(run)
        run.stage = "launched"
        self.happened.append(Happened("launched", run))
        first_rank = 0
        for node_rank, (node, mask) in enumerate(run.placed):
            slots = _bits(mask)
            part = dataclasses.replace(
                launch,
                node=NodeSlots(
                    slots=slots,
                    first_rank=first_rank,
                    world=gpus_in(run.placed),
                    nodes=len(run.placed),
                    node_rank=node_rank,
                    store_host=run.store[0],
                    store_port=run.store[1],
                ),
                share=run.share,
            )
            self._send(node, part)
            first_rank += len(slots)

    # Ending

    def _part_ended(self, run: JobRun, node: int, ended: Ended) -> None:
        run.said[node] = ended
        if ended.outcome in ("failed", "lost"):
            self._tell(run, Kill(run=run.number))
        if len(run.said) == len(run.nodes):
            ended = _together(list(run.said.values()))
            if run.killed and ended.outcome != "done":
                ended = dataclasses.replace(ended, outcome="lost")
            del self.runs[run.number]
            self.happened.append(Happened("left", run, ended=ended))

    def _send(self, node: int, message: Message) -> None:
        if node in self.connected:
            self.outbox.append((node, message))


def _together(said: list[Ended]) -> Ended:
    """The report that explains the end of a run, from those of its nodes.

    A node's own error counts before errors that another node caused, and a failure before a loss.
    """
    by_itself = [each for each in said if not each.reason.endswith((LOST_PEERS, KILLED))]
    for parts in (by_itself, said):
        for outcome in ("failed", "lost", "paused"):
            for each in parts:
                if each.outcome == outcome and (each.reason or outcome == "paused"):
                    return each
    return Ended(run=said[0].run, outcome="done")


def _bits(mask: int) -> list[int]:
    return [bit for bit in range(mask.bit_length()) if mask >> bit & 1]
