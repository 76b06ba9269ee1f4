"""One rank of one run, from its fork to its exit code."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import faulthandler
import os
import random
import re
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
from torch import distributed
from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from synergy_core.errors import InputError
from synergy_exec.messages import PAUSED, Failure, Noted, Rebuild, Retune, Started, Stop
from synergy_exec.training import loading, shelf
from synergy_exec.training.cache import Cache
from synergy_exec.training.checkpoint import Checkpoints
from synergy_exec.training.compression.choices import measured_codecs
from synergy_exec.training.compression.exchange import layers_of
from synergy_exec.training.compression.schemes import kinds
from synergy_exec.training.integrity import Progress
from synergy_exec.training.job import LoadedJob, TrainingJob
from synergy_exec.training.loading import load_job
from synergy_exec.training.parallel import UnusedParametersError
from synergy_exec.training.ranks import Ranks
from synergy_exec.training.shelf import Desk, FencedError
from synergy_exec.training.supply import Supply
from synergy_exec.training.trainer import Trainer
from synergy_exec.worker import resources
from synergy_exec.worker.loop import LOOK_S, HeardOrders, Loop, UnsavedError
from synergy_exec.worker.network import talk_over
from synergy_exec.worker.start import FAILED, PEER_LOST, AgentConnection, Descriptors, Pulse, Start, see_only

# Every scheme is imported with this module, so before ranks are forked.
kinds()

# What an error in a worker means: the job's own, or the echo of another rank's.


_OUT_OF_MEMORY = re.compile(r"can't allocate memory|cannot allocate memory|not enough memory|out of memory", re.I)
_BROKEN_DEVICE = re.compile(r"uncorrectable (ECC|NVLink) error|hardware stack error", re.I)
"""cudaErrorECCUncorrectable, cudaErrorNvlinkUncorrectable, cudaErrorHardwareStackError (CUDA Runtime API)."""
_PEER = re.compile(
    r"gloo.*(closed by peer|reset by peer|timed? ?out|connect|read error|write error|broken pipe)"
    r"|(closed|reset) by peer|NCCL.*(remote|unhandled system|aborted|timeout)|Socket Timeout",
    re.I | re.S,
)
_LONGEST = 600
_OURS = (Path(torch.__file__).parent, Path(__file__).parent, Path(__file__).parents[1] / "training")


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, of the GPU or of the machine."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError | OSError) and bool(_OUT_OF_MEMORY.search(str(error)))


def disk_full(error: BaseException) -> bool:
    """Whether there was no room for what was to be written: nobody's fault who trains."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def broken_device(error: BaseException) -> bool:
    """Whether the device says that it is broken itself, as CUDA and HIP name such errors."""
    return isinstance(error, RuntimeError) and bool(_BROKEN_DEVICE.search(str(error)))


def from_peers(error: BaseException) -> bool:
    """Whether it may only say that another rank is gone or silent.

    What was raised in the job's own code, or in a library that it calls, is its own, whatever it says: a connection to
    somewhere else may be reset too.
    """
    if not _raised_here(error):
        return False
    if isinstance(error, distributed.DistError):
        return True
    return isinstance(error, RuntimeError | OSError) and bool(_PEER.search(str(error)))


def _raised_here(error: BaseException) -> bool:
    """Whether the innermost line of Python that it passed is torch's or Synergy's: what talks to other ranks is."""
    innermost = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        innermost = frame.f_code.co_filename
    return not innermost or any(Path(innermost).is_relative_to(each) for each in _OURS)


def sentence(rank: int, doing: str, error: BaseException) -> str:
    """Which rank failed at what, and how; one line of bounded length."""
    kind = "" if isinstance(error, InputError) else f"{type(error).__name__}: "
    text = " ".join(str(error).split()) or "no message"
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]}…"
    return f"rank {rank}, {doing}: {kind}{text}"


LONGEST_WAIT = timedelta(minutes=30)
"""Of one rank for another, before it gives up by itself."""


def run(start: Start, descriptors: Descriptors) -> int:
    """Trains until done, stopped or failed; returns the exit code. Errors go to the log and to the agent."""
    agent, pulse = AgentConnection(descriptors.agent), Pulse(descriptors.pulse)
    rank = Rank(start, agent, pulse)
    try:
        return rank.train(descriptors)
    except BaseException as error:
        with contextlib.suppress(OSError):  # the log's disk may be what is full
            traceback.print_exc()
            sys.stderr.flush()
        echo = start.launch.world > 1 and from_peers(error)
        agent.say(
            Failure(
                run=start.launch.run,
                rank=start.rank,
                reason=sentence(start.rank, rank.doing, error),
                from_peers=echo,
                unsaved=isinstance(error, UnsavedError | FencedError) or disk_full(error) or broken_device(error),
                out_of_memory=out_of_memory(error),
                unused=isinstance(error, UnusedParametersError),
            )
        )
        # The rank that failed by itself says why.
        return PEER_LOST if echo else FAILED


class Rank:
    """One rank of a run. doing: what it is at, for error messages."""

    def __init__(self, start: Start, agent: AgentConnection, pulse: Pulse) -> None:
        self._start, self._agent, self._pulse = start, agent, pulse
        self._loop: Loop | None = None
        self._desk: Desk | None = None
        self._doing = "starting"
        self._stop = False

    @property
    def doing(self) -> str:
        """What the rank is at, such as `step 12`."""
        return self._loop.doing if self._loop else self._doing

    def train(self, descriptors: Descriptors) -> int:
        signal.signal(signal.SIGTERM, self._terminate)
        # A hung rank shows where it stands before it is killed.
        faulthandler.register(signal.SIGUSR1)
        self._beat()
        launch = self._start.launch
        # What it keeps when it builds its model again; without a store for a single rank.
        self._device, self._store = self._take_slot(), self._meeting_place(descriptors.store)
        self._cache, self._orders = Cache(descriptors.cache), HeardOrders()
        if launch.spare_memory:
            resources.give_back()
        order = self._next_order() if launch.waits else Rebuild(run=launch.run, plan=launch.plan)
        code, anew = PAUSED, launch.waits
        while order is not None:
            start = _in_copy(self._start, order)
            if start is None:
                order = self._next_order()
                continue
            self._meet(start)
            self._loop = self._built(start, order, anew=anew)
            if self._stop:
                self._loop.stop()
            code, order, anew = self._loop.run(), self._loop.rebuild, True
            if order is not None:
                self._loop = None  # and with it the model
                self._part(start)
            elif start.rank == 0 and self._desk is not None:
                self._desk.leave()
        if distributed.is_initialized():
            distributed.destroy_process_group()
        return code

    def _built(self, start: Start, order: Rebuild, *, anew: bool) -> Loop:
        """Builds the model under the order's plan and loads the newest checkpoint. anew: none is loaded."""
        launch, folder = start.launch, Path(start.launch.folder)
        # Before anything is read: from here on no older run changes it.
        self._desk = desk = Desk(folder / "checkpoints", launch.run)
        begun = Ranks().first(lambda: _takes_over(desk, folder)) and not anew
        self._now("building")
        launched_s, began = time.time() - start.launched_s, time.monotonic()
        bare_bytes = resources.held_bytes()
        job = load_job(launch.job_class, launch.arguments, Path(launch.code) if launch.code else None)
        self._warn_of_changes(job, start)
        _make_data(job, folder / "data")
        supply = Supply(job, cache=self._cache)
        resources.load(supply, start.cpus)
        trainer = Trainer(
            job,
            launch.plan,
            self._device,
            seed=launch.seed,
            measure_squares=launch.noise,
            bfloat16=launch.bfloat16 and self._device.type == "cuda",
            supply=supply,
            unused=launch.unused,
            weights=Path(launch.weights) if launch.weights and not begun else None,
            begun=begun,
            kept=folder / "form.json",
            beat=self._beat,
        )
        build_s = time.monotonic() - began
        codecs: dict[str, list[float]] = {}
        if launch.time_codecs:  # on all ranks at once, as gradients are encoded
            self._now("measuring how fast gradients are encoded")
            codecs = measured_codecs(self._device)
        self._now("loading")
        began = time.monotonic()
        checkpoints = Checkpoints(folder / "checkpoints", keep=launch.keep_checkpoints, job=launch.job_uuid, desk=desk)
        loaded = None if anew else trainer.load(checkpoints, saved_step=launch.saved_step)
        progress = loaded or Progress()
        load_s = time.monotonic() - began
        started = Started(
            run=launch.run,
            step=progress.step,
            samples=progress.samples,
            work=progress.work,
            launch_s=launched_s,
            build_s=build_s,
            load_s=load_s,
            layers=layers_of(trainer.parts) if launch.say_layers else [],
            codecs=codecs,
            copy=start.copy,
        )
        return Loop(
            *(start, job, trainer, progress, desk, checkpoints, self._agent, self._pulse),
            started=started,
            bare_bytes=bare_bytes,
            order=order,
            orders=self._orders,
        )

    def _next_order(self) -> Rebuild | None:
        """Waits for the next order of a rank that trains nothing. None: it was told to stop, or its agent is silent."""
        while not self._stop and self._pulse.unanswered_s() < self._start.launch.agent_silence_s:
            self._now("waiting for an order")
            for message in self._agent.heard():
                if isinstance(message, Stop):
                    self._stop = True
                elif isinstance(message, Retune | Rebuild):
                    self._orders.hear(message)
            order = self._orders.next(self._orders.count)
            if isinstance(order, Rebuild):
                return order
            time.sleep(LOOK_S)
        return None

    def _warn_of_changes(self, job: TrainingJob, start: Start) -> None:
        if start.rank == 0 and not start.launch.code:
            for line in loading.changes(job, Path(start.launch.folder) / "code.json"):
                print(line, flush=True)
                self._agent.say(Noted(run=self._start.launch.run, text=line))

    def _now(self, doing: str) -> None:
        self._doing = doing
        self._beat()

    def _beat(self) -> None:
        self._pulse.beat(self._start.launch.start_s)

    def _terminate(self, *_: object) -> None:
        self._stop = True
        if self._loop is not None:
            self._loop.stop()

    def _take_slot(self) -> torch.device:
        start = self._start
        resources.move(start.cores, start.cpus)
        for seed in (random.seed, np.random.seed):
            seed(start.launch.seed)
        if start.gpu is None:
            return torch.device("cpu")
        os.environ |= see_only([start.gpu], os.environ)
        torch.cuda.set_device(0)
        return torch.device("cuda", 0)

    def _meeting_place(self, descriptor: int | None) -> Store | None:
        """The store at which the ranks of this run meet; None for a single rank."""
        launch = self._start.launch
        if launch.world == 1:
            return None
        self._now("meeting the other ranks")
        talk_over(launch.interface, launch.store_host)
        if launch.store_host:
            return TCPStore(
                launch.store_host,
                launch.store_port,
                launch.world,
                is_master=descriptor is not None,
                timeout=self._patience,
                wait_for_workers=False,
                master_listen_fd=descriptor,
            )
        # The kernel opens another process's descriptors to its own user alone (man 5 proc, PTRACE_MODE_READ).
        store = FileStore(f"/proc/self/fd/{descriptor}", launch.world)
        store.set_timeout(self._patience)
        return store

    @property
    def _patience(self) -> timedelta:
        """How long to wait for other ranks. They may build, save or wait for data for long; agents look for hangs."""
        return max(timedelta(seconds=self._start.launch.start_s), LONGEST_WAIT)

    def _meet(self, start: Start) -> None:
        if self._store is None or start.launch.world == 1:
            return
        self._now("meeting the other ranks")
        cpu = self._device.type == "cpu"
        distributed.init_process_group(
            "gloo" if cpu else "cpu:gloo,cuda:nccl",
            store=PrefixStore(self._meeting(start), self._store),
            rank=start.rank,
            world_size=start.launch.world,
            timeout=self._patience,
            device_id=None if cpu else self._device,
        )

    def _meeting(self, start: Start) -> str:
        """Prefix of a process group's keys in the store. It is the same on all ranks of the copy and is used once."""
        return f"order {self._orders.done} copy {start.copy}"

    def _part(self, start: Start) -> None:
        """Frees the model's memory, and leaves the process group as soon as no other rank needs it."""
        resources.release()
        if not distributed.is_initialized():
            return
        self._now("parting from the other ranks")
        assert self._store is not None
        left = f"left {self._meeting(start)}"
        self._store.add(left, 1)
        while self._store.add(left, 0) < start.launch.world:
            time.sleep(LOOK_S)
        distributed.destroy_process_group()


def _in_copy(start: Start, order: Rebuild) -> Start | None:
    """The rank's start within its copy of the job, with the copy's plan and folder; None if it is in no copy."""
    launch = dataclasses.replace(start.launch, plan=order.plan)
    if not order.copies:
        return dataclasses.replace(start, launch=launch)
    for copy, ranks in enumerate(order.copies):
        if start.rank in ranks:
            folder = str(Path(launch.folder) / "copies" / str(copy))
            launch = dataclasses.replace(launch, world=len(ranks), folder=folder)
            return dataclasses.replace(start, launch=launch, rank=ranks.index(start.rank), copy=copy)
    return None


def _takes_over(desk: Desk, folder: Path) -> bool:
    """Has the run's desk take the job's folder over; whether a checkpoint is there.

    Raises FencedError, and UnsavedError where the disk refuses.
    """
    try:
        desk.taken().take_file(folder / "steps.csv")
    except OSError as error:
        raise UnsavedError(f"{folder} cannot be written: {error.strerror}") from error
    return bool(shelf.newest_first(folder / "checkpoints"))


def _make_data(job: TrainingJob, folder: Path) -> None:
    """Tells a job where its data are to lie; rank 0 makes them before the others look."""
    if isinstance(job, LoadedJob):
        Ranks().first(lambda: job.make_data(folder))
        job.make_data(folder)
