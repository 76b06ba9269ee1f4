"""One rank of one run, from its fork to its exit code."""

from __future__ import annotations

import contextlib
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
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import distributed
from torch.distributed import FileStore, Store, TCPStore  # type: ignore[attr-defined]

from synergy_core import errors
from synergy_core.errors import InputError
from synergy_exec.job_folder import kept_code
from synergy_exec.messages import Failure, Started
from synergy_exec.plans import batches_of, write_candidates
from synergy_exec.training import checkpoint_folder
from synergy_exec.training.admitted import Admission
from synergy_exec.training.cache import Cache
from synergy_exec.training.checkpoint import Checkpoints
from synergy_exec.training.checkpoint_folder import FencedError, Staging
from synergy_exec.training.compression.exchange import layers_of, measured_codecs
from synergy_exec.training.compression.schemes import schemes
from synergy_exec.training.integrity import Progress
from synergy_exec.training.job import LoadedJob, TrainingJob
from synergy_exec.training.loading import load_job
from synergy_exec.training.parallel import UnusedParametersError
from synergy_exec.training.precision import chosen
from synergy_exec.training.ranks import LONGEST_WAIT, Ranks
from synergy_exec.training.supply import Supply
from synergy_exec.training.trainer import Trainer
from synergy_exec.worker import resources
from synergy_exec.worker.loop import Loop, UnsavedError
from synergy_exec.worker.network import talk_over
from synergy_exec.worker.start import FAILED, PEER_LOST, AgentConnection, Descriptors, Heartbeat, Start, see_only

# Imports all compression schemes now, before ranks are forked.
schemes()

# Classification of a worker's errors: the job's own, or a consequence of another rank's.


_BROKEN_DEVICE = re.compile(r"uncorrectable (ECC|NVLink) error|hardware stack error", re.I)
"""cudaErrorECCUncorrectable, cudaErrorNvlinkUncorrectable, cudaErrorHardwareStackError (CUDA Runtime API)."""
_LOST_DEVICE = re.compile(
    r"busy or unavailable|no CUDA-capable device|No (CUDA|HIP) GPUs are available|system not yet initialized"
    r"|(CUDA|HIP) (error|failure)\b.*?(unspecified launch failure|unknown error|launch timed out)",
    re.I | re.S,
)
"""cudaErrorDevicesUnavailable, NoDevice, SystemNotReady, LaunchFailure, Unknown, LaunchTimeout (CUDA Runtime API). A
kernel of the job may cause some of them, too, so the node is not left out, and the job is tried again."""
_PEER = re.compile(
    r"gloo.*(closed by peer|reset by peer|timed? ?out|connect|read error|write error|broken pipe)"
    r"|(closed|reset) by peer|NCCL.*(remote|unhandled system|aborted|timeout)|Socket Timeout",
    re.I | re.S,
)
_LONGEST = 600
_OURS = (Path(torch.__file__).parent, Path(__file__).parent, Path(__file__).parents[1] / "training")


def out_of_memory(error: BaseException) -> bool:
    """Whether the GPU or the machine ran out of memory."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, MemoryError | RuntimeError | OSError) and errors.out_of_memory(error)


def disk_full(error: BaseException) -> bool:
    """Whether the disk or the quota is full, which is not the job's fault."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def broken_device(error: BaseException) -> bool:
    """Whether the device reports a hardware error, by the texts of CUDA and HIP."""
    return isinstance(error, RuntimeError) and bool(_BROKEN_DEVICE.search(str(error)))


def lost_device(error: BaseException) -> bool:
    """Whether the device may be gone or was never there, by the texts of CUDA and HIP."""
    return isinstance(error, RuntimeError) and bool(_LOST_DEVICE.search(str(error)))


def from_peers(error: BaseException) -> bool:
    """Whether the error may only mean that another rank is gone or silent.

    An error raised in the job's own code, or in a library that it calls, counts as the job's whatever its text: the
    job's own connections may be reset, too. NCCL reports memory that ran out here as an unhandled error; it is not.
    """
    if not _raised_here(error) or out_of_memory(error):
        return False
    if isinstance(error, distributed.DistError):
        return True
    return isinstance(error, RuntimeError | OSError) and bool(_PEER.search(str(error)))


def _raised_here(error: BaseException) -> bool:
    """Whether the error was raised in torch or Synergy, which do all communication between ranks."""
    innermost = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        innermost = frame.f_code.co_filename
    return not innermost or any(Path(innermost).is_relative_to(each) for each in _OURS)


def sentence(rank: int, doing: str, error: BaseException) -> str:
    """One line of bounded length: which rank failed, what it was doing, and the error."""
    error_class = "" if isinstance(error, InputError) else f"{type(error).__name__}: "
    text = " ".join(str(error).split()) or "no message"
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]}…"
    return f"rank {rank}, {doing}: {error_class}{text}"


def run(start: Start, descriptors: Descriptors) -> int:
    """Trains until done, stopped or failed; returns the exit code. Errors go to the log and to the agent."""
    agent, heartbeat = AgentConnection(descriptors.agent), Heartbeat(descriptors.heartbeat)
    rank = Rank(start, agent, heartbeat)
    try:
        return rank.train(descriptors)
    except BaseException as error:
        with contextlib.suppress(OSError):  # the disk of the log may be full
            traceback.print_exc()
            sys.stderr.flush()
        echo = start.launch.node.world > 1 and from_peers(error)
        broken = broken_device(error) or rank.takes_device
        lost = broken or lost_device(error) or isinstance(error, UnsavedError | FencedError) or disk_full(error)
        agent.say(
            Failure(
                run=start.launch.run,
                reason=sentence(start.rank, rank.doing, error),
                from_peers=echo,
                unsaved=lost,
                out_of_memory=out_of_memory(error),
                unused=isinstance(error, UnusedParametersError),
                broken_device=broken,
            )
        )
        # If the error is a consequence, the rank that failed first reports the cause.
        return PEER_LOST if echo else FAILED


class Rank:
    """One rank of a run. takes_device: whether it is taking its GPU, so that any error is its node's fault."""

    def __init__(self, start: Start, agent: AgentConnection, heartbeat: Heartbeat) -> None:
        self._start, self._agent, self._heartbeat = start, agent, heartbeat
        self._loop: Loop | None = None
        self._device = torch.device("cpu")
        self._doing = "starting"
        self._stop = False
        self.takes_device = False

    @property
    def doing(self) -> str:
        """The present activity of the rank, such as `step 12`."""
        return self._loop.doing if self._loop else self._doing

    def train(self, descriptors: Descriptors) -> int:
        signal.signal(signal.SIGTERM, self._terminate)
        # A hung rank writes its stack into the log before it is killed.
        faulthandler.register(signal.SIGUSR1)
        self._beat()
        self._device = self._take_slot()
        if self._start.launch.file.trained and self._start.launch.file.trained.memory_gb:
            resources.give_back()
        if self._start.launch.node.world > 1:
            self._meet(descriptors.store)
        self._loop = self._built(Cache(descriptors.cache))
        if self._stop:
            self._loop.stop()
        code = self._loop.run()
        if distributed.is_initialized():
            distributed.destroy_process_group()
        return code

    def _built(self, cache: Cache) -> Loop:
        """Builds the model under the launch's plan and loads the newest checkpoint."""
        start, launch, folder = self._start, self._start.launch, Path(self._start.launch.folder)
        trained = launch.file.trained
        assert trained is not None
        # Take the folder over before reading anything; from here on no older run changes it.
        staging = Staging(folder / "checkpoints", launch.run)
        begun = Ranks().first(lambda: _takes_over(staging, folder))
        self._now("building")
        launched_s, began = time.time() - start.launched_s, time.monotonic()
        bare_bytes = resources.held_bytes()
        job = load_job(trained.job_class, trained.arguments, kept_code(trained.job_class, folder))
        if isinstance(job, LoadedJob):  # rank 0 makes the data before all other ranks find them
            Ranks().first(lambda: job.make_data(folder / "data"))
            job.make_data(folder / "data")
        if not begun and (reason := Ranks().first(lambda: Admission(job).refusal(launch.plan))):
            raise InputError(reason)
        if launch.reporting.plans_on and start.rank == 0:
            self._find_plans(job)
        supply = Supply(job, cache=cache)
        resources.load(supply, start.cpus)
        trainer = Trainer(
            job,
            launch.plan,
            self._device,
            seed=launch.settings.seed,
            measure_squares=launch.reporting.noise,
            precision=chosen(launch.settings.precision, self._device),
            compiled=trained.compile,
            supply=supply,
            unused=launch.unused,
            weights=Path(trained.weights) if trained.weights and not begun else None,
            begun=begun,
        )
        build_s = time.monotonic() - began
        codecs: dict[str, list[float]] = {}
        if launch.reporting.codecs:  # on all ranks at once, because gradients are encoded on all ranks at once
            self._now("measuring how fast gradients are encoded")
            codecs = measured_codecs(self._device)
        self._now("loading")
        began = time.monotonic()
        checkpoints = Checkpoints(
            folder / "checkpoints", keep=launch.settings.keep_checkpoints, job=launch.job_uuid, staging=staging
        )
        progress = trainer.load(checkpoints, saved_step=launch.saved_step) or Progress()
        load_s = time.monotonic() - began
        started = partial(
            Started,
            run=launch.run,
            launch_s=launched_s,
            build_s=build_s,
            load_s=load_s,
            layers=layers_of(trainer.parts) if launch.reporting.layers and start.rank == 0 else [],
            codecs=codecs,
        )
        return Loop(
            *(start, job, trainer, progress, staging, checkpoints, self._agent),
            heartbeat=self._heartbeat,
            started=started,
            bare_bytes=bare_bytes,
        )

    def _find_plans(self, job: TrainingJob) -> None:
        """Writes the possible plans for the controller. An error here does not end the run."""
        launch = self._start.launch
        try:
            found = Admission(job).candidates(launch.reporting.plans_on, batches_of(launch.file))
            write_candidates(Path(launch.folder), found)
        except Exception:
            traceback.print_exc()

    def _now(self, doing: str) -> None:
        self._doing = doing
        self._beat()

    def _beat(self) -> None:
        self._heartbeat.beat(self._start.launch.settings.start_s)

    def _terminate(self, *_: object) -> None:
        self._stop = True
        if self._loop is not None:
            self._loop.stop()

    def _take_slot(self) -> torch.device:
        start = self._start
        resources.move(start.cores, start.cpus)
        for seed in (random.seed, np.random.seed):
            seed(start.launch.settings.seed)
        if not start.gpus:
            return torch.device("cpu")
        self.takes_device = True
        self._now(f"taking GPU {start.gpus[0]} of its node")
        os.environ |= see_only(start.gpus, os.environ)
        torch.cuda.set_device(0)
        torch.cuda.synchronize()  # errors of a device appear when its context is created
        self.takes_device = False
        return torch.device("cuda", 0)

    def _meet(self, descriptor: int | None) -> None:
        """Meets the other ranks of this run at a store, and creates the default process group."""
        launch = self._start.launch
        self._now("meeting the other ranks")
        talk_over(launch.settings.interface, launch.node.store_host)
        # Other ranks may build, save or wait for data for long. Agents detect hangs.
        patience = max(timedelta(seconds=launch.settings.start_s), LONGEST_WAIT)
        store: Store
        if launch.node.store_host:
            store = TCPStore(
                launch.node.store_host,
                launch.node.store_port,
                launch.node.world,
                is_master=descriptor is not None,
                timeout=patience,
                wait_for_workers=False,
                master_listen_fd=descriptor,
            )
        else:
            # Only the same user can open a process's descriptors through /proc (man 5 proc, PTRACE_MODE_READ).
            store = FileStore(f"/proc/self/fd/{descriptor}", launch.node.world)
            store.set_timeout(patience)
        self._beat()
        distributed.init_process_group(
            "gloo" if self._device.type == "cpu" else "cpu:gloo,cuda:nccl",
            store=store,
            rank=self._start.rank,
            world_size=launch.node.world,
            timeout=patience,
            # No device_id: with it, device meshes split groups, and splitting may hang (pytorch issue 145376).
        )


def _takes_over(staging: Staging, folder: Path) -> bool:
    """Takes the job's folder over for this run. Returns whether it has a checkpoint.

    Raises FencedError if a newer run has taken it, and UnsavedError if the disk refuses.
    """
    try:
        staging.take_over()
    except OSError as error:
        raise UnsavedError(f"{folder} cannot be written: {error.strerror}") from error
    return bool(checkpoint_folder.newest_first(folder / "checkpoints"))
