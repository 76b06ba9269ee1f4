"""One rank of one run, from its fork to its exit code."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import random
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
from torch import distributed
from torch.distributed import FileStore, Store, TCPStore  # type: ignore[attr-defined]

from synergy_exec.messages import Failure, Noted
from synergy_exec.training import origin, shelf
from synergy_exec.training.cache import Cache
from synergy_exec.training.compression.codecs import measured_codecs
from synergy_exec.training.data_parallel import UnusedParametersError
from synergy_exec.training.fence import Desk, FencedError
from synergy_exec.training.job import LoadedJob, TrainingJob
from synergy_exec.training.loading import load_job
from synergy_exec.training.ranks import Ranks
from synergy_exec.training.supply import Supply
from synergy_exec.training.trainer import Trainer
from synergy_exec.worker import cores, memory
from synergy_exec.worker.connection import AgentConnection
from synergy_exec.worker.exchanges import layers_of
from synergy_exec.worker.exits import FAILED, PEER_LOST
from synergy_exec.worker.failure import broken_device, disk_full, from_peers, out_of_memory, sentence
from synergy_exec.worker.gpus import see_only
from synergy_exec.worker.loop import Beginning, Loop
from synergy_exec.worker.network import talk_over
from synergy_exec.worker.pulse import Pulse
from synergy_exec.worker.saves import UnsavedError
from synergy_exec.worker.start import Descriptors, Start

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
                unsaved=isinstance(error, UnsavedError | FencedError) or disk_full(error),
                out_of_memory=out_of_memory(error),
                unused=isinstance(error, UnusedParametersError),
                broken_device=broken_device(error),
            )
        )
        # The rank that failed by itself says why.
        return PEER_LOST if echo else FAILED


class Rank:
    """One rank of a run. doing: what it is at, for error messages."""

    def __init__(self, start: Start, agent: AgentConnection, pulse: Pulse) -> None:
        self._start, self._agent, self._pulse = start, agent, pulse
        self._loop: Loop | None = None
        self._doing = "starting"
        self._stop = False

    @property
    def doing(self) -> str:
        """What the rank is at, such as `step 12`."""
        return self._loop.doing if self._loop else self._doing

    def train(self, descriptors: Descriptors) -> int:
        """Trains until done or stopped; returns the exit code."""
        signal.signal(signal.SIGTERM, self._terminate)
        # A hung rank shows where it stands before it is killed.
        faulthandler.register(signal.SIGUSR1)
        launch, folder = self._start.launch, Path(self._start.launch.folder)
        self._beat()
        device = self._take_slot()
        self._meet(descriptors.store, device)
        # Before anything is read: from here on no older run changes it.
        desk = Desk(folder / "checkpoints", launch.run)
        begun = Ranks().first(lambda: _takes_over(desk, folder))
        self._now("building")
        launched_s = time.time() - self._start.launched_s
        if launch.spare_memory:
            memory.give_back()
        began, bare_bytes = time.monotonic(), memory.held_bytes()
        job = load_job(launch.job_class, launch.arguments, Path(launch.code) if launch.code else None)
        self._warn_of_changes(job, folder)
        _make_data(job, folder / "data")
        supply = Supply(job, cache=Cache(descriptors.cache))
        cores.load(supply, self._start.cpus)
        halves = launch.bfloat16 and device.type == "cuda"
        trainer = Trainer(
            job,
            launch.plan,
            device,
            seed=launch.seed,
            measure_squares=launch.noise,
            bfloat16=halves,
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
            codecs = measured_codecs(device)
        self._now("loading")
        began = time.monotonic()
        progress = trainer.load(folder / "checkpoints", job=launch.job_uuid, saved_step=launch.saved_step)
        load_s = time.monotonic() - began
        layers = layers_of(trainer.parts) if launch.say_layers else []
        began_with = Beginning(launched_s, build_s, load_s, layers, codecs, bare_bytes)
        self._loop = Loop(self._start, job, trainer, progress, desk, self._agent, self._pulse, began_with)
        if self._stop:
            self._loop.stop()
        code = self._loop.run()
        if self._start.rank == 0:
            desk.leave()
        if distributed.is_initialized():
            distributed.destroy_process_group()
        return code

    def _warn_of_changes(self, job: TrainingJob, folder: Path) -> None:
        if self._start.rank == 0 and not self._start.launch.code:
            for line in origin.changes(job, folder / "code.json"):
                print(line, flush=True)
                self._agent.say(Noted(run=self._start.launch.run, text=line))

    def _now(self, doing: str) -> None:
        self._doing = doing
        self._beat()

    def _beat(self) -> None:
        self._pulse.beat(self._start.launch.start_s, patient=True)

    def _terminate(self, *_: object) -> None:
        self._stop = True
        if self._loop is not None:
            self._loop.stop()

    def _take_slot(self) -> torch.device:
        start = self._start
        cores.move(start.cores, start.cpus)
        for seed in (random.seed, np.random.seed):
            seed(start.launch.seed)
        if start.gpu is None:
            return torch.device("cpu")
        os.environ |= see_only([start.gpu], os.environ)
        torch.cuda.set_device(0)
        return torch.device("cuda", 0)

    def _meet(self, store: int | None, device: torch.device) -> None:
        launch = self._start.launch
        if launch.world == 1:
            return
        self._now("meeting the other ranks")
        talk_over(launch.interface, launch.store_host)
        # Of waiting for peers, which may build, save or wait for data for long: a hang is for the agents to find.
        timeout = max(timedelta(seconds=launch.start_s), LONGEST_WAIT)
        meeting: Store
        if launch.store_host:
            meeting = TCPStore(
                launch.store_host,
                launch.store_port,
                launch.world,
                is_master=store is not None,
                timeout=timeout,
                wait_for_workers=False,
                master_listen_fd=store,
            )
        else:
            # The kernel opens another process's descriptors to its own user alone (man 5 proc, PTRACE_MODE_READ).
            meeting = FileStore(f"/proc/self/fd/{store}", launch.world)
            meeting.set_timeout(timeout)
        distributed.init_process_group(
            "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
            store=meeting,
            rank=self._start.rank,
            world_size=launch.world,
            timeout=timeout,
            device_id=None if device.type == "cpu" else device,
        )


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
