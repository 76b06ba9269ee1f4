"""One rank of one run, from its fork to its exit code."""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import socket
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
from torch import distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from synergy_exec.messages import Failure
from synergy_exec.training.cache import Cache
from synergy_exec.training.compression.codecs import measured_codecs
from synergy_exec.training.job import LoadedJob, TrainingJob
from synergy_exec.training.loading import load_job
from synergy_exec.training.ranks import Ranks
from synergy_exec.training.supply import Supply
from synergy_exec.training.trainer import Trainer
from synergy_exec.worker import cores
from synergy_exec.worker.connection import AgentConnection
from synergy_exec.worker.exchanges import layers_of
from synergy_exec.worker.exits import FAILED, PEER_LOST
from synergy_exec.worker.failure import from_peers, out_of_memory, sentence
from synergy_exec.worker.loop import Beginning, Loop
from synergy_exec.worker.pulse import Pulse
from synergy_exec.worker.start import Descriptors, Start


def run(start: Start, descriptors: Descriptors) -> int:
    """Trains until done, stopped or failed; returns the exit code. Errors go to the log and to the agent."""
    agent, pulse = AgentConnection(descriptors.agent), Pulse(descriptors.pulse)
    rank = Rank(start, agent, pulse)
    try:
        return rank.train(descriptors)
    except BaseException as error:
        traceback.print_exc()
        sys.stderr.flush()
        if start.launch.world > 1 and from_peers(error):
            # The rank that failed by itself says why.
            return PEER_LOST
        reason = sentence(start.rank, rank.doing, error)
        agent.say(Failure(run=start.launch.run, rank=start.rank, reason=reason, out_of_memory=out_of_memory(error)))
        return FAILED


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
        self._now("building")
        launched_s = time.time() - self._start.launched_s
        began = time.monotonic()
        job = load_job(launch.job_class, launch.arguments)
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
        )
        build_s = time.monotonic() - began
        codecs: dict[str, list[float]] = {}
        if launch.time_codecs:  # on all ranks at once, as gradients are encoded
            self._now("measuring how fast gradients are encoded")
            codecs = measured_codecs(device)
        self._now("loading")
        began = time.monotonic()
        progress = trainer.load(folder / "checkpoints")
        load_s = time.monotonic() - began
        layers = layers_of(trainer.parts) if launch.say_layers else []
        began_with = Beginning(launched_s, build_s, load_s, layers, codecs)
        self._loop = Loop(self._start, job.learning_rate_rule, trainer, progress, self._agent, self._pulse, began_with)
        if self._stop:
            self._loop.stop()
        code = self._loop.run()
        if distributed.is_initialized():
            distributed.destroy_process_group()
        return code

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
        cores.move(start.cores, start.cpus)
        for seed in (random.seed, np.random.seed):
            seed(start.launch.seed)
        if start.gpu is None:
            return torch.device("cpu")
        torch.cuda.set_device(start.gpu)
        return torch.device("cuda", start.gpu)

    def _meet(self, store: int | None, device: torch.device) -> None:
        launch = self._start.launch
        if launch.world == 1:
            return
        self._now("meeting the other ranks")
        if socket.gethostbyname(launch.store_host).startswith("127."):
            # gloo would look the machine's own name up, which need not lead anywhere.
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        # Of waiting for peers, which may build or compute for long: a hang is for the agents to find.
        timeout = timedelta(seconds=launch.start_s)
        meeting = TCPStore(
            launch.store_host,
            launch.store_port,
            launch.world,
            is_master=store is not None,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=store,
        )
        distributed.init_process_group(
            "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
            store=meeting,
            rank=self._start.rank,
            world_size=launch.world,
            timeout=timeout,
            device_id=None if device.type == "cpu" else device,
        )


def _make_data(job: TrainingJob, folder: Path) -> None:
    """Tells a job where its data are to lie; rank 0 makes them before the others look."""
    if isinstance(job, LoadedJob):
        Ranks().first(lambda: job.make_data(folder))
        job.make_data(folder)
