"""Jobs, ranks and an agent that share one GPU, or this machine's CPU cores, for `gpu_check.py`.

NCCL refuses two ranks with the same host and GPU, so each rank gets an NCCL_HOSTID of its own, and NCCL then talks over
sockets. This has not been tried on a GPU yet.
"""

from __future__ import annotations

import contextlib
import csv
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.distributed import FileStore

from synergy_core.performance.planner.plan import Plan
from synergy_exec.agent.cores import own_cores
from synergy_exec.agent.gpus import UNTYPED, Gpu
from synergy_exec.backends.local import Local
from synergy_exec.examples.cnn import Cnn
from synergy_exec.examples.gpt import Gpt
from synergy_exec.examples.pictures import Pictures
from synergy_exec.job_file import job_of
from synergy_exec.job_folder import STEPS
from synergy_exec.messages import Reporting
from synergy_exec.profiling.testbed import Testbed, TestbedRun, testbed
from synergy_exec.settings import AgentSettings, RunSettings
from synergy_exec.worker import processes

SMALL: dict[str, Any] = {"hidden": 64, "depth": 4, "heads": 4, "tokens": 32}
MEDIUM: dict[str, Any] = {"hidden": 512, "depth": 6, "heads": 8, "tokens": 128}
LARGE: dict[str, Any] = {"hidden": 1024, "depth": 24, "heads": 16, "tokens": 128, "vocabulary": 8192}
"""Arguments of the example's GPT: 0.2, 19 and 320 million parameters."""
BATCH = 8
ONE, TWO = Plan(micro_batch=BATCH), Plan(data=2, micro_batch=BATCH // 2)
FAULTY_STEP = 4
HANG_S, STUCK_S = 3.0, 20.0
"""Seconds without a step after which agents call a run hung, and without progress of ranks that have no agent."""


# Jobs that the workers load from this file.


class Probe(Gpt):
    """The example's GPT, in which something goes wrong on purpose from step `FAULTY_STEP` on.

    fault: the last rank is killed (kill) or stopped (stop), what memory runs out (tensor, host; library: of the GPU
    but for 32 MB, from the start), or the first loss at another micro-batch takes longer than `HANG_S` (cold).
    """

    def __init__(self, fault: str = "", **sizes: Any) -> None:
        super().__init__(**SMALL | sizes)
        os.environ["NCCL_HOSTID"] = f"rank-{os.getpid()}"
        self.fault, self.step, self.warm_size = fault, 0, 0
        self.held: list[Tensor] = []
        if fault == "library" and torch.cuda.is_initialized():
            for size_bytes in (1 << 30, 1 << 27, 1 << 24):
                with contextlib.suppress(torch.OutOfMemoryError):
                    while True:
                        self.held.append(torch.empty(size_bytes, dtype=torch.uint8, device="cuda"))
            del self.held[-2:]

    def batch(self, step: int, size: int) -> tuple[Tensor, Tensor]:
        time.sleep(0.02)
        self.step = step
        return super().batch(step, size)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        if self.step >= FAULTY_STEP and self.fault in ("kill", "stop") and distributed.get_rank():
            os.kill(os.getpid(), signal.SIGKILL if self.fault == "kill" else signal.SIGSTOP)
        if self.step >= FAULTY_STEP and self.fault == "cold":
            if self.warm_size not in (0, len(target)):
                time.sleep(HANG_S + 2)
            self.warm_size = len(target)
        if self.fault == "tensor":
            torch.empty(1 << 46, device=output.device)
        elif self.fault == "host":
            bytearray(1 << 46)
        return super().loss(output, target)


class Holding(Pictures):
    """Pictures with loaders and much memory. exits: whether the rank ends its own process after some losses."""

    def __init__(self, hold_bytes: int, exits: bool) -> None:
        super().__init__(pictures=256)
        self.hold_bytes, self.exits, self.held = hold_bytes, exits, list[Tensor]()

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        if output.device.type != "meta":
            if self.exits and len(self.held) > FAULTY_STEP:
                os._exit(9)
            size_bytes = 1 if self.held else self.hold_bytes
            self.held.append(torch.ones(size_bytes, dtype=torch.uint8, device=output.device))
        return super().loss(output, target)


class Resnet34(Cnn):
    """The example's residual network with BatchNorm and the blocks of ResNet-34 (He et al. 2016, table 1)."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.GroupNorm):
                    setattr(module, name, nn.BatchNorm2d(child.num_channels))
        return model


# What a step is given.


@dataclass
class Check:
    """The environment of a step. send: passes figures on at once, so that those of a killed step are kept."""

    dry: bool
    folder: Path
    rounds: int
    send: Callable[[dict[str, Any]], None]
    wrong: list[str] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.dry else torch.device("cuda", 0)

    def note(self, **figures: Any) -> None:
        self.send({name: round(each, 4) if isinstance(each, float) else each for name, each in figures.items()})

    def expect(self, is_met: bool, sentence: str) -> None:
        """Fails the step with this sentence unless that is so; the step goes on."""
        if not is_met and sentence not in self.wrong:
            self.wrong.append(sentence)

    @contextlib.asynccontextmanager
    async def testbed(self, slots: int, **settings: Any) -> AsyncIterator[Testbed]:
        """Starts a real agent whose slots are all on the one GPU."""
        visible = os.environ["CUDA_VISIBLE_DEVICES"]
        backend = Local(1, slots, [] if self.dry else [Gpu(UNTYPED)] * slots, own_cores())
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join([visible] * slots)
        given = RunSettings(precision="fp32", **settings)
        async with testbed(backend, self.folder, AgentSettings(nodes_s=60.0, leave_s=10.0), given) as bed:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible  # this process may not see a GPU twice
            yield bed


def start(bed: Testbed, plan: Plan, number: int, job: str = "Probe", **given: Any) -> TestbedRun:
    """Starts a run of a job of this file. number: of the job, which goes on from its last checkpoint. given: arguments
    of the job, besides `compile`.
    """
    compiles = given.pop("compile", False)
    name, sizes = f"{Path(__file__).resolve()}:{job}", {"initial_batch": BATCH, "max_batch": 8 * BATCH}
    file = job_of({"class": name, "name": job, "arguments": given, "work": 1, "compile": compiles, **sizes}, job)
    return bed.start(file, number, ((0, (1 << plan.gpus) - 1),), plan, Reporting(report_s=0.02))


async def trained(run: TestbedRun, step: int) -> float:
    """Waits until it has trained that step; returns its peak memory in GB."""
    while (report := await run.report()).step < step:
        pass
    return report.memory.used_bytes / 1e9


def losses(run: TestbedRun) -> dict[int, float]:
    with (Path(run.launch.folder) / STEPS).open() as file:
        return {int(row["step"]): float(row["loss"]) for row in csv.DictReader(file)}


class Rank(NamedTuple):
    """One of several forks that share the device. store: descriptor of a file at which they can meet."""

    number: int
    world: int
    device: torch.device
    store: int

    def join(self, store: Any = None, **more: Any) -> None:
        """Creates the default process group as `worker.rank` does."""
        os.environ |= {"NCCL_HOSTID": f"rank-{os.getpid()}", "NCCL_SOCKET_IFNAME": "=lo", "GLOO_SOCKET_IFNAME": "lo"}
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        store = store or FileStore(f"/proc/self/fd/{self.store}", self.world)
        backend = "gloo" if self.device.type == "cpu" else "cpu:gloo,cuda:nccl"
        distributed.init_process_group(backend, store=store, rank=self.number, world_size=self.world, **more)


def on_ranks(check: Check, world: int, function: Any, *given: Any, beat: Path | None = None) -> list[Any]:
    """Calls function(rank, *given) on each rank; returns the results by rank. Raises RuntimeError if a rank fails.

    beat: a file that grows while ranks make progress. Raises TimeoutError if they make none for `STUCK_S` seconds.
    """
    store, seen, until_s = os.memfd_create("store"), -1, 0.0
    forks, workers, pipes, results = multiprocessing.get_context("fork"), [], {}, dict[int, Any]()
    try:
        for number in range(world):
            ours, theirs = multiprocessing.Pipe(duplex=False)
            rank = Rank(number, world, check.device, store)
            workers.append(forks.Process(target=_on_rank, args=(theirs, function, rank, given)))
            workers[-1].start()
            theirs.close()
            pipes[ours] = number
        while pipes:
            for pipe in connection.wait(list(pipes), 0.05):
                try:
                    failed, results[pipes[pipe]] = pipe.recv()
                except EOFError:
                    failed = "its process died"
                if failed:
                    raise RuntimeError(f"rank {pipes[pipe]}: {failed}")
                del pipes[pipe]
            if (size := beat.stat().st_size if beat else 0) != seen:
                seen, until_s = size, time.monotonic() + STUCK_S
            if time.monotonic() > until_s:
                raise TimeoutError(f"{world} ranks made no progress for {STUCK_S:g} s")
    finally:
        for worker in workers:
            worker.kill()
            worker.join(5)
        os.close(store)
    return [results[number] for number in range(world)]


def _on_rank(answer: Any, function: Any, rank: Rank, given: Any) -> None:
    try:
        answer.send(("", function(rank, *given)))
    except BaseException as error:
        traceback.print_exc()
        answer.send((f"{type(error).__name__}: {error}", None))


def timed(call: Callable[..., Any], *given: Any, **more: Any) -> tuple[float, Any]:
    """Seconds that the call took, with the work that it queued on the GPU, and its result."""
    began_s = time.monotonic()
    value = call(*given, **more)
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.monotonic() - began_s, value


def gpu_bytes() -> int:
    """Memory of the GPU in use, of all processes."""
    free, total = torch.cuda.mem_get_info(0)
    return total - free


def host_bytes() -> int:
    """Memory of this process's descendants, without what they share."""
    pids, page_bytes = processes.descendants(os.getpid()), os.sysconf("SC_PAGE_SIZE")
    fields = [processes.told(pid, "statm").split() or ["0"] * 3 for pid in pids]
    return page_bytes * sum(int(resident) - int(shared) for _, resident, shared, *_ in fields)
