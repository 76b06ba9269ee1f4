"""The controller handles arrivals, rounds, agents and users' requests in real time, in one asyncio thread."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
import os
import shlex
import signal
import socket
import sqlite3
import sys
import time
from collections.abc import Coroutine, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from synergy_core.errors import InputError
from synergy_core.scheduling.decisions.reasons import Stopped
from synergy_core.scheduling.jobs.cluster import Cluster, NodeType
from synergy_core.scheduling.jobs.record import gpus_in
from synergy_core.scheduling.jobs.testbed_profiles import TestbedProfile
from synergy_core.scheduling.policies import Policy, SharingPolicy
from synergy_core.units import MB, on_grid
from synergy_exec import job_folder
from synergy_exec.backends import Backend, Meeting
from synergy_exec.controller.api import PUBLIC, routes
from synergy_exec.controller.execution import EXCHANGES, FINISH, START, STOP, Execution, check_asks, recall, with_queue
from synergy_exec.controller.jobs import ExecutedJob, Seen
from synergy_exec.controller.journal import BACKUP_S, Journal, NoRoomError, back_up
from synergy_exec.job_file import MOST_BYTES, JobFile, job_of
from synergy_exec.messages import Hello, Message
from synergy_exec.nodes.agents import Agents, listening
from synergy_exec.plain import plain_lines
from synergy_exec.settings import Settings
from synergy_exec.worker.processes import began, wait_or_kill
from synergy_runs.files import atomic_file
from synergy_runs.outputs.facts import Kind

# Resuming where an earlier controller ended.


def resume(execution: Execution, now_s: float) -> None:
    """Restores the state from the journal: runs that had not ended count as lost, and jobs that had not ended wait."""
    journal, decider = execution.journal, execution.decider
    reports = journal.reports()
    if (known := journal.meta().get(EXCHANGES)) is not None:
        execution.exchanges.restore(known)
    for row in journal.jobs():
        job = execution.made(row, job_of(row.file, f"job {row.job} of the journal"))
        if row.job in reports:
            seen = reports[row.job]
            job.seen = Seen(**{name: seen[name] for name in Seen.__slots__ if name in seen})
            job.seen.statistics = seen["statistics"] and tuple(seen["statistics"])
    for run in journal.runs():
        execution.next_run = max(execution.next_run, run.run + 1)
        if not run.outcome:
            journal.ended(run.run, "lost", "the controller was restarted")
            if run.launched:
                job = execution.jobs[run.job]
                kind, reason = (FINISH, None) if job.ended else (STOP, Stopped.CONTROLLER_ENDED)
                journal.fact(now_s, kind, run.job, gpus_in(run.placement), reason=reason)
        execution.jobs[run.job].run = run.run
    journal.commit()
    for number, folder in job_folder.folders(execution.folder).items():
        # The number of a job that has a folder, or of a run that trained there, is never given to a new one.
        execution.next_job = max(execution.next_job, number + 1)
        execution.next_run = max(execution.next_run, job_folder.newest_run(folder) + 1)
        if number not in execution.jobs:
            what = f"python -m synergy_exec export {folder} reads its weights; submit the job again to train it"
            print(f"{folder}: the journal does not know this job. {what}.", file=sys.stderr)
    _restore_service(execution)
    for job in execution.jobs.values():
        if not job.ended:
            _check_asks(execution, job)
        if not job.ended:
            job.service.settled_s = now_s
            # A job that has started had its `after` done, even if one of these was retried since.
            held_back = job.file.after and job.service.first_start_s == math.inf
            execution.arrive(job, now_s) if held_back else decider.arrive(job)
    recall(execution.jobs, journal.observations())


def _check_asks(execution: Execution, job: ExecutedJob) -> None:
    """Ends a job that can never start any more, for instance because quotas have changed; it can be retried."""
    try:
        check_asks(job.name, job.file, execution.decider.cluster, execution.decider.policy)
    except InputError as error:
        job.state, job.reason = "failed", str(error)
        execution.journal.job_is(job.job_id, job.state, job.reason, job.losses)
        print(error, file=sys.stderr)


def _restore_service(execution: Execution) -> None:
    """Restores first start, restarts and service of every job from the facts."""
    since: dict[int, float] = {}
    for fact in execution.journal.facts():
        job = execution.jobs[fact.job]
        job.moved_s = fact.time_s
        if fact.kind == START:
            since[fact.job] = fact.time_s
            if job.service.first_start_s == float("inf"):
                job.service.first_start_s = fact.time_s
            else:
                job.service.restarts += 1
        elif fact.kind in (STOP, FINISH):
            held_s = fact.time_s - since.pop(fact.job)
            job.ran_s += held_s
            job.service.attained_gpu_s += fact.gpus * held_s
            job.stopped_for = Stopped(fact.reason) if fact.reason else None


# The cluster to which all facts of a run refer, even if its successive controllers found different clusters.


CLUSTER = "cluster"
"""Key of this cluster in the journal's `meta`."""


def enter(journal: Journal, found: Cluster) -> None:
    """Records that a controller begins on this cluster. Raises InputError if a node's GPU type differs from before."""
    before = whole_cluster(journal)
    if before is not None and any(fact.kind == Kind.START for fact in journal.facts()):
        found = _united(before, found)
    journal.set_meta(CLUSTER, [dataclasses.asdict(each) for each in found.node_types])


def whole_cluster(journal: Journal) -> Cluster | None:
    """The cluster to which the run's facts refer: each node at its largest size so far. None before any controller."""
    kept = journal.meta().get(CLUSTER)
    return None if kept is None else Cluster(tuple(NodeType(**each) for each in kept))


def _united(one: Cluster, other: Cluster) -> Cluster:
    nodes: list[NodeType] = []
    for number, (here, there) in enumerate(zip_longest(one.node_type_of, other.node_type_of)):
        if here is not None and there is not None and here.gpu_type != there.gpu_type:
            raise InputError(
                f"node {number} has {there.gpu_type} now, and had {here.gpu_type} when this run began. Give it nodes "
                "as it had, of other sizes or numbers if need be; or begin another run with results_dir=DIR."
            )
        larger = max(filter(None, (here, there)), key=lambda each: (each.gpus_per_node, each.cpus, each.memory_bytes))
        nodes.append(dataclasses.replace(larger, name=f"{larger.gpu_type}-{number}", nodes=1))
    return Cluster(tuple(nodes))


CLOCK = "clock"
"""Key in the journal's `meta` of the times at which controllers began: in seconds of the run and since 1970."""
FULL_S = 0.5
"""Seconds between two tries to write to a full disk."""
LATE_S = 0.25
"""A round that would begin more than this many seconds late is skipped."""


HURRY_S = 5.0
"""Seconds that jobs have left to save after a second Ctrl-C."""
EXTRA_S = 10.0
"""Seconds for an agent to leave after the grace of the commands on its node."""


class Arrival(NamedTuple):
    """A row of the workload: arrival time in seconds from the start, and the job."""

    submit_s: float
    name: str
    file: JobFile


class Controller:
    """Runs one policy on one backend; call `run` once.

    execution: None until all agents are connected. closing: whether the controller is ending. No other controller may
    work in the folder meanwhile (`folders.lock`). The clock stands still while no controller runs: a resumed run
    continues at the time of its last fact.
    """

    def __init__(
        self,
        policy: Policy,
        arrivals: Sequence[Arrival],
        backend: Backend,
        settings: Settings,
        folder: Path,
        profile: TestbedProfile,
    ) -> None:
        self.policy, self.arrivals = policy, arrivals
        self.settings, self.folder, self.profile = settings, folder, profile
        self.agents = Agents(
            backend,
            self,
            at_once=settings.agents.agents_per_hour,
            patience_s=settings.agents.nodes_s,
            give_up=not settings.serve,
        )
        self.agents.grace_s = lambda: 0.0 if self.execution is None else self.execution.grace_s()
        self.execution: Execution | None = None
        self.interrupted = self._full = False
        self._something, self._freed = asyncio.Event(), asyncio.Event()
        self._arrived_all = False
        self.closing = False
        self._tasks: list[asyncio.Task[None]] = []
        self._origin_s, self._began_s, self._last_s = 0.0, time.monotonic(), 0.0

    def now_s(self) -> float:
        """Seconds since the run's start, rounded to the time grid (`on_grid`); they never decrease."""
        self._last_s = max(self._last_s, on_grid(self._origin_s + time.monotonic() - self._began_s))
        return self._last_s

    def unix_s(self, time_s: float) -> float:
        """Seconds since 1970 at a time of the run, whose clock stands still while no controller runs."""
        since_s, began_s = max((each for each in self._clock if each[0] < time_s), default=self._clock[0])
        return float(began_s + time_s - since_s)

    async def run(self) -> None:
        """Runs until every job has ended, or with `serve` until it is interrupted. Raises InputError.

        After an interruption `interrupted` is true, and the journal holds what is needed to resume.
        """
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._journal = journal = Journal(self.folder / "journal.sqlite")
        try:
            journal.take_over()
            self._copy_journal()
            graces_s = [row.file.get("grace_s", 0.0) for row in journal.jobs()] if journal.agents() else []
            await asyncio.to_thread(self._wait_for_old_agents, journal.agents(), self._patience_s(*graces_s))
            journal.agents_left()
            journal.commit()
            async with listening(
                self.agents,
                self.folder,
                host=self.settings.agents.host,
                port=self.settings.agents.port,
                routes=routes(self),
                public=PUBLIC,
                most_bytes=MOST_BYTES,
            ) as meeting:
                self._announce(meeting)
                for number in (signal.SIGINT, signal.SIGTERM):
                    asyncio.get_running_loop().add_signal_handler(number, self._interrupt)
                try:
                    await self._begin(meeting)
                    if self.execution is not None:
                        work = (self._arrive(self.execution), self._rounds(self.execution), self._back_up())
                        self._tasks = [asyncio.create_task(self._guarded(each)) for each in work]
                    await self._over
                finally:
                    await self._leave()
        finally:
            (self.folder / "controller.json").unlink(missing_ok=True)
            journal.agents_left()
            journal.close()

    # Beginning

    def _patience_s(self, *graces_s: float) -> float:
        """Seconds that agents get to save and leave. graces_s: of commands that they may run."""
        return max(self.settings.agents.leave_s, max(graces_s, default=0.0) + EXTRA_S)

    def _wait_for_old_agents(self, agents: list[tuple[int, str, int, int]], patience_s: float) -> None:
        """Waits for the agents of a dead controller to save and exit; kills agents that do not."""
        here = [(pid, since) for _, host, pid, since in agents if host == socket.gethostname()]
        for pid in wait_or_kill(here, patience_s=patience_s):
            print(f"an agent of an earlier controller, process {pid}, had to be killed", file=sys.stderr)

    def _announce(self, meeting: Meeting) -> None:
        me = {"url": meeting.url, "host": socket.gethostname(), "pid": os.getpid()}
        with atomic_file(self.folder / "controller.json") as partial:
            partial.touch(mode=0o600)
            partial.write_text(json.dumps({**me, "began": began(os.getpid())}) + "\n", encoding="utf-8")
        listed = shlex.join(["python", "-m", "synergy_exec", "list", "--dir", str(self.folder)])
        print(f"jobs: {meeting.url} in a browser, or {listed}", file=sys.stderr)

    async def _begin(self, meeting: Meeting) -> None:
        """Creates the execution once all agents are there and the cluster is known."""
        storage_bytes_per_s = None
        if isinstance(self.policy, SharingPolicy):
            given = self.settings.storage_mb_per_s
            storage_bytes_per_s = math.inf if given is None else given * MB
        cluster = await self.agents.gather(meeting, self._over, storage_bytes_per_s=storage_bytes_per_s)
        if cluster is None:
            return
        cluster = with_queue(cluster, self.settings.cluster)
        for row, arrival in enumerate(self.arrivals):
            check_asks(f"{arrival.name} (row {row})", arrival.file, cluster, self.policy)
        enter(self._journal, cluster)
        execution = Execution(self._journal, self.policy, cluster, self.settings, self.folder, self.profile)
        execution.next_job = len(self.arrivals)
        self._origin_s, self._began_s = self._journal.last_s(), time.monotonic()
        self._clock = [*self._journal.meta().get(CLOCK, ()), [self._origin_s, time.time()]]
        self._journal.set_meta(CLOCK, self._clock)
        resume(execution, self.now_s())
        self.execution = execution
        for node in self.agents.there():
            self.agent_came(node)
        self._flush()

    # Messages of agents (`nodes.agents.Listener`)

    def hello(self, hello: Hello) -> None:
        since = began(hello.pid) if hello.host == socket.gethostname() else 0
        self._journal.agent(hello.node, hello.host, hello.pid, since)
        self._has_written()

    def agent_came(self, node: int) -> None:
        if self.execution is not None:
            self.execution.agent_came(node, self.now_s())
            self._flush()

    def heard(self, node: int, message: Message) -> None:
        if self.execution is not None:
            self.execution.heard(node, message, self.now_s())
            self._flush()

    def agent_left(self, node: int) -> None:
        if self.execution is not None:
            self.execution.agent_left(node, self.now_s())
            self._flush()

    # Rounds

    async def _arrive(self, execution: Execution) -> None:
        there = {job.row for job in execution.jobs.values()}
        for row, arrival in enumerate(self.arrivals):
            if row in there:
                continue
            await asyncio.sleep(max(0.0, arrival.submit_s - self.now_s()))
            while row not in execution.jobs:
                try:
                    execution.submit(arrival.name, arrival.file, self.now_s(), row=row)
                except NoRoomError as error:
                    self._say_full(error)
                    await asyncio.sleep(FULL_S)
            self.changed()
        self._arrived_all = True
        self.changed()

    async def _rounds(self, execution: Execution) -> None:
        """Decides at whole multiples of `round_s`, and as soon as a job's end has freed slots, as the simulator does
        (`refill_s`). Makes no decisions while there are no active jobs.
        """
        round_s, decided_s = self.settings.round_s, -math.inf
        while True:
            while not execution.decider.active:
                if self._has_written():
                    execution.leave_out(self.agents.away(), self.now_s())
                self._flush()
                self._something.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._something.wait(), round_s)
            due_s = max(decided_s + round_s, math.ceil((self.now_s() - LATE_S) / round_s) * round_s)
            if not await self._frees_slots(execution, due_s):
                decided_s = due_s
            if not self._has_written():  # on a full disk nothing is decided
                await asyncio.sleep(FULL_S)
            elif execution.decider.active:
                execution.end_overdue(self.now_s())
                if not execution.leave_out(self.agents.away(), self.now_s()):
                    execution.decide(self.now_s())
                self._flush()

    async def _frees_slots(self, execution: Execution, until_s: float) -> bool:
        """Waits until that time or until a job's end frees slots. Returns whether slots were freed."""
        if not execution.freed:
            self._freed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._freed.wait(), max(0.0, until_s - self.now_s()))
        return execution.freed

    def _copy_journal(self) -> None:
        with contextlib.suppress(InputError, sqlite3.Error):  # if the disk is full, `Journal.commit` reports it
            back_up(self.folder)

    async def _back_up(self) -> None:
        copied = -1
        while True:
            if (changes := self._journal.changes) != copied:
                await asyncio.to_thread(self._copy_journal)
                copied = changes
            await asyncio.sleep(BACKUP_S)

    def changed(self) -> None:
        self._something.set()
        self._flush()

    def _has_written(self) -> bool:
        """Writes what is recorded. Returns False if the disk is full."""
        try:
            self._journal.commit()
        except NoRoomError as error:
            self._say_full(error)
            return False
        self._full = False
        return True

    def _say_full(self, error: NoRoomError) -> None:
        """Tells the user, once for each time that the disk is full."""
        if not self._full:
            self._full = True
            with contextlib.suppress(OSError):  # standard error may be a file on the same disk
                print(f"{error} Until then nothing starts or stops.", file=sys.stderr, flush=True)

    def _flush(self) -> None:
        """Queues messages for agents, once the journal holds their reasons. Ends the run if nothing is left to do."""
        assert self.execution is not None
        # Reports alone are not committed here: the next decision commits them.
        if self._journal.is_behind and not self._has_written():
            return
        self.agents.say(self.execution.runs.outbox)
        if self.execution.freed:
            self._freed.set()
        for note in self.execution.notes:
            print(plain_lines(note), file=sys.stderr, flush=True)
        self.execution.notes.clear()
        if self.execution.idle and (self.interrupted or (self._arrived_all and not self.settings.serve)):
            self._end()

    # Ending

    def fail(self, error: Exception) -> None:
        if not self._over.done():
            self._over.set_exception(error)

    def _interrupt(self) -> None:
        """Ends the run. If every job has ended, first waits for the last processes, but not at a second interrupt.
        An interrupt while jobs save shortens their time.
        """
        again, self.interrupted = self.interrupted, True
        execution = self.execution
        if self.closing:
            print(f"interrupted again: jobs have {HURRY_S:g} s left to save, then they are killed", file=sys.stderr)
            self.agents.dismiss_within(HURRY_S)
            return
        if execution is None or execution.decider.active or execution.idle or again:
            self._end()
        else:
            asyncio.get_running_loop().call_later(self._patience_s(execution.grace_s()), self._end)

    def _end(self) -> None:
        if not self._over.done():
            self._over.set_result(None)

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:
            self.fail(error)

    async def _leave(self) -> None:
        self.closing = True
        for task in self._tasks:
            task.cancel()
        patience_s = self._patience_s()
        if self.execution is not None:
            self.execution.closing = True
            patience_s = self._patience_s(self.execution.grace_s())
            if self.interrupted and self.execution.runs.runs:
                print(f"jobs have up to {patience_s:g} s to save; after another Ctrl-C, {HURRY_S:g} s", file=sys.stderr)
        await self.agents.dismiss(patience_s)
