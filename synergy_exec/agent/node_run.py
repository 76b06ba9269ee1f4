"""The part of a run on one node: starts its workers, passes messages on, detects hangs, and reports how it ended."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from synergy_core.errors import InputError
from synergy_core.units import MB
from synergy_exec.agent.cores import CoreGrant, Slot
from synergy_exec.agent.forkserver import Forkserver
from synergy_exec.job_folder import LOG, OLD_LOG
from synergy_exec.messages import (
    LOST_PEERS,
    PAUSED,
    Ended,
    Failure,
    Granted,
    Launch,
    MeansToLeave,
    Message,
    Outcome,
    Retune,
    Stop,
)
from synergy_exec.training.cache import Cache
from synergy_exec.wire import decode, encode
from synergy_exec.worker import processes
from synergy_exec.worker.start import PEER_LOST, Descriptors, Heartbeat, Start
from synergy_runs.files import atomic_file

# The log of a job: what its workers print in all runs. Workers of all nodes append to one file.


def open_log(launch: Launch) -> int:
    """Opens the job's log for appending; returns the descriptor."""
    path = Path(launch.folder) / LOG
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)


def bound_log(launch: Launch) -> None:
    """Moves the end of the log into the old log when it has reached half of `log_mb`.

    It is called about every second, so a job may exceed the limit for that long. Workers hold the file open, so it is
    emptied and not renamed; output printed at the moment between copying and emptying is lost.
    """
    path, most_bytes = Path(launch.folder) / LOG, int(launch.settings.log_mb * MB / 2)
    with suppress(OSError, InputError):  # an error here is no reason to end a run; the next call comes in a second
        if (size := path.stat().st_size) > most_bytes:
            with path.open("rb") as file, atomic_file(path.with_name(OLD_LOG)) as partial:
                file.seek(size - most_bytes)
                partial.write_bytes(file.read())
                os.truncate(path, 0)


# Decides why a run ended from everything known of its workers on this node.


def outcome(
    codes: Mapping[int, int],
    meant: Mapping[int, int | None],
    failures: Mapping[int, Failure],
    killed: Collection[int],
    verdict: str,
) -> tuple[Outcome, str]:
    """Returns the outcome, and the reason in a sentence if the run failed or was lost.

    codes: by rank, its exit code, or minus the number of the signal that killed it. meant: by rank, the exit code that
    it announced, or None. failures: errors that ranks reported. killed: ranks that the agent killed; their exit codes
    say nothing. verdict: why the agent killed them; "" if another rank had failed. A rank's own error counts before
    errors that another rank caused.
    """
    own = {rank: code for rank, code in codes.items() if rank not in killed and code not in (0, PAUSED)}
    failed = {rank: failure for rank, failure in failures.items() if not failure.from_peers}
    erred = [rank for rank, code in own.items() if code > 0 and code != PEER_LOST]
    # A rank that reported an error before it was killed counts, too.
    erred += [rank for rank in failed if rank not in erred and rank in killed]
    for rank in sorted(erred, key=lambda rank: not (rank in failed and failed[rank].out_of_memory)):
        failure = failed.get(rank)
        if failure is not None and failure.unsaved:
            return "lost", failure.reason
        return "failed", failure.reason if failure else f"rank {rank} left with exit code {own[rank]}"
    # The job's own code may exit at any time, also with code 0 or PAUSED; it announced no such code.
    for rank, code in codes.items():
        if code in (0, PAUSED) and rank not in killed and meant.get(rank) != code:
            return "failed", f"the job's code ended rank {rank} with exit code {code} in the middle of its work"
    for rank, code in own.items():
        if code < 0:
            return "lost", f"rank {rank} was killed by {_name(-code)}"
    if verdict:
        return "lost", verdict
    for rank in own:
        said = failures.get(rank)
        return "lost", f"{said.reason}: {LOST_PEERS}" if said else f"rank {rank} {LOST_PEERS}"
    if set(codes.values()) <= {0}:
        return "done", ""
    return "paused", ""


def _name(number: int) -> str:
    hint = " (out of memory?)" if number == signal.SIGKILL else ""
    return f"{signal.Signals(number).name}{hint}"


_WATCH_S = 1.0
_SETTLING_S = 0.5
"""Time between the first failure of a rank and killing the others, so that the rank at fault can report its error."""
_DUMPING_S = 0.2
"""Time for a hung rank to write its stack to the log."""
_ALL_DUMPING_S = 0.8
"""Time for all hung ranks of a node together."""


@dataclass(slots=True)
class Worker:
    """One worker process. code: its exit code once it has left. meant: the exit code that it announced."""

    pid: int
    heartbeat: Heartbeat
    writer: asyncio.StreamWriter
    code: int | None = None
    meant: int | None = None

    def tell(self, message: Message) -> None:
        """Sends the worker a message, unless the worker has exited."""
        if self.code is None:
            self.writer.write(encode(message).encode() + b"\n")


@dataclass(eq=False)
class NodeRun:
    """A run on this node, from its launch until none of its processes is left. One `Ended` message reports the end.

    grants: the CPUs of each rank on this node; empty if the run was launched without a share.
    """

    launch: Launch
    forkserver: Forkserver
    say: Callable[[Message], None]
    grants: dict[int, CoreGrant]

    def __post_init__(self) -> None:
        share, slots = self.launch.share, len(self.launch.node.slots)
        self._cache = Cache.create(share.memory_bytes * slots if share else 0)
        self._workers: dict[int, Worker] = {}
        self._failures: dict[int, Failure] = {}
        self._killed: set[int] = set()
        self._told: list[Message] = []
        self._starting, self._doomed, self._verdict = True, False, ""
        self._hung = False
        self._changed = asyncio.Event()

    async def carry_out(self, slots: list[Slot], store: socket.socket | None) -> None:
        """Starts the workers, watches them until all have exited, and reports the end. store: the socket on which
        rank 0 listens for ranks on other nodes; None if rank 0 is not here or all ranks are here.
        """
        readers = []
        alone = self.launch.node.world > 1 and not self.launch.node.store_host
        shared = os.memfd_create("store") if alone else None
        try:
            for place, own in enumerate([slots] if self.launch.file.command else [[slot] for slot in slots]):
                rank = self.launch.node.first_rank + place
                meets_at = store.fileno() if store is not None and rank == 0 else shared
                readers.append(await self._start(rank, own, meets_at))
        except OSError as error:
            self.kill(f"rank {rank} cannot be started: {error}")
        finally:
            self._starting = False
            if store is not None:
                store.close()
            if shared is not None:
                os.close(shared)
        watch = asyncio.create_task(self._watch())
        while any(worker.code is None for worker in self._workers.values()):
            self._changed.clear()
            await self._changed.wait()
        watch.cancel()
        await asyncio.gather(*readers)
        os.close(self._cache)
        self._tell_end()

    def tell(self, message: Stop | Retune) -> None:
        """Passes a message on to every worker here, including those that are not forked yet."""
        self._told.append(message)
        for worker in self._workers.values():
            worker.tell(message)

    def grant(self, rank: int, grant: CoreGrant) -> None:
        self.grants[rank] = grant
        if rank in self._workers:
            self._move(rank)

    def remember(self, memory_bytes: float) -> None:
        """Sets the limit of the run's data cache on this node. memory_bytes: for each rank here."""
        Cache(self._cache).limit(memory_bytes * len(self.launch.node.slots))

    def _move(self, rank: int) -> None:
        worker, grant = self._workers[rank], self.grants[rank]
        if worker.code is None:
            processes.pin(worker.pid, grant.cores)
            worker.tell(Granted(run=self.launch.run, cores=list(grant.cores), cpus=grant.cpus))

    def _tell_end(self) -> None:
        codes = {rank: worker.code for rank, worker in self._workers.items() if worker.code is not None}
        meant = {rank: worker.meant for rank, worker in self._workers.items()}
        result, reason = outcome(codes, meant, self._failures, self._killed, self._verdict)
        cause = next((each for each in self._failures.values() if each.reason == reason), None)
        flags = ("out_of_memory", "unused", "broken_device", "hung", "exit_code") if cause else ()
        of_cause = {"hung": self._hung} | {name: getattr(cause, name) for name in flags}
        if cause is None and self.launch.plan.zero and -signal.SIGABRT in codes.values():
            reason += "; FSDP aborts if a parameter has no part in the loss of some replicas; see the job's log"
        self.say(Ended(run=self.launch.run, outcome=result, reason=reason, **of_cause))

    async def _start(self, rank: int, own: list[Slot], store: int | None) -> asyncio.Task[None]:
        """Starts the worker of a rank. own: its slots: one, or for a command all slots of the run on this node."""
        launch, started_s = self.launch, time.time()
        grant = self.grants.get(rank)
        grants = [self.grants[rank + place] for place in range(len(own))] if grant else own
        start = Start(
            launch=launch,
            rank=rank,
            cores=tuple(sorted({core for each in grants for core in each.cores})),
            cpus=sum(each.cpus for each in grants),
            gpus=tuple(each.gpu for each in own if each.gpu is not None),
            launched_s=started_s,
            environment=self.forkserver.inherited if launch.file.command else {},
        )
        ours, theirs = socket.socketpair()
        heartbeat, log = Heartbeat.create(), open_log(launch)
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        beats = Heartbeat(heartbeat)
        beats.beat(launch.settings.start_s)
        beats.answer()
        descriptors = Descriptors(theirs.fileno(), heartbeat, log, self._cache, store)
        try:
            pid = await self.forkserver.fork(start, descriptors, lambda code: self._left(rank, code))
        except OSError:
            writer.close()
            raise
        finally:
            theirs.close()
            os.close(heartbeat)
            os.close(log)
        worker = self._workers[rank] = Worker(pid, beats, writer)
        for message in self._told:
            worker.tell(message)
        if self.grants.get(rank) != grant:
            # The rank's cores were changed while it was being forked.
            self._move(rank)
        if self._doomed:
            self.kill(self._verdict)
        return asyncio.create_task(self._listen(rank, reader, writer))

    async def _listen(self, rank: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):  # an earlier write may have failed
            while line := await reader.readline():
                try:
                    message = decode(line)
                except InputError as error:
                    print(f"run {self.launch.run}, rank {rank}: {error}", flush=True)
                    continue
                if isinstance(message, MeansToLeave):
                    self._workers[rank].meant = message.code
                elif isinstance(message, Failure):
                    self._failures[rank] = message
                    asyncio.get_running_loop().call_later(_SETTLING_S, self.kill, "")
                else:
                    self.say(message)
        writer.close()

    def _left(self, rank: int, code: int) -> None:
        self._workers[rank].code = code
        self._changed.set()
        if code == PEER_LOST:
            asyncio.get_running_loop().call_later(_SETTLING_S, self.kill, "")
        elif code not in (0, PAUSED):
            self.kill("")

    def kill(self, verdict: str) -> None:
        """Kills every worker. verdict: the reason; "" if a rank has failed, because its own error is the reason."""
        alive = {rank: worker.pid for rank, worker in self._workers.items() if worker.code is None}
        if not alive and not self._starting:
            return
        if not self._doomed:
            self._doomed, self._verdict = True, verdict
        self._killed |= alive.keys()
        self.forkserver.end(alive.values())

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(min(_WATCH_S, self.launch.settings.hang_s / 4))
            if self.launch.node.first_rank == 0:
                bound_log(self.launch)
            alive = {rank: each for rank, each in self._workers.items() if each.code is None}
            for each in alive.values():
                each.heartbeat.answer()
            silent = {rank: each.heartbeat.silence_s() for rank, each in alive.items()}
            # While one rank may still build, save or wait for data, the others may wait for it.
            if silent and all(silent.values()):
                rank = max(silent, key=lambda rank: silent[rank])
                await self._end_hang(rank, silent[rank])
                return

    async def _end_hang(self, rank: int, silence_s: float) -> None:
        alive = {rank: each.pid for rank, each in self._workers.items() if each.code is None}
        with open(open_log(self.launch), "wb", buffering=0) as log:
            # One after another, because they write into the same file.
            for each, pid in alive.items():
                log.write(f"rank {each} stands at:\n".encode())
                self.forkserver.show(pid)
                await asyncio.sleep(min(_DUMPING_S, _ALL_DUMPING_S / len(alive)))
        self._hung = True
        self.kill(f"rank {rank}: no step for {silence_s:.0f} s; its log says where it stood")
