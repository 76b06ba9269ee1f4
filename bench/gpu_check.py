"""Runs the executor's real parts on one GPU in at most eight minutes: the first thing to do on a machine with a GPU.

    python bench/gpu_check.py [--only 1,3,7] [--limit 480] [--record results/gpu_check.json]
    python bench/gpu_check.py --dry          # on CPU cores with gloo, in at most two minutes

Every step is a process in a group of its own, which is killed when its time is up. It prints one line and never stops
the others: `STEP n OK|FAIL|SKIP seconds what: figures`. A JSON record of everything is written at the end. The exit
code is 1 if a step failed. Step 0 always runs, because its figures describe the machine.

Several ranks share the GPU (`ranks/one_gpu.py`), so times of NCCL say nothing about several GPUs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import faulthandler
import json
import math
import multiprocessing
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# Steps are forks of this process, which therefore starts no thread and runs no operator, like the forkserver.
os.environ.update({"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "NCCL_NET": "Socket"})

import torch
from ranks.one_gpu import (
    BATCH,
    FAULTY_STEP,
    HANG_S,
    LARGE,
    MEDIUM,
    ONE,
    SMALL,
    TWO,
    Check,
    Rank,
    Resnet34,
    gpu_bytes,
    host_bytes,
    losses,
    on_ranks,
    start,
    timed,
    trained,
)
from torch import distributed
from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

from synergy_core.performance.planner.plan import Plan
from synergy_exec.agent.cores import Slot, own_cores
from synergy_exec.agent.forkserver import Forkserver
from synergy_exec.agent.node_run import NodeRun
from synergy_exec.commands import profile as profile_command
from synergy_exec.examples.gpt import Gpt
from synergy_exec.examples.pictures import Pictures
from synergy_exec.job_file import job_of
from synergy_exec.messages import Ended, Launch, NodeSlots
from synergy_exec.settings import ProfileSettings, RunSettings
from synergy_exec.training.checkpoint import Checkpoints
from synergy_exec.training.integrity import Progress
from synergy_exec.training.supply import Supply
from synergy_exec.training.trainer import Trainer
from synergy_exec.worker import processes
from synergy_runs.files import atomic_file
from synergy_runs.inputs.from_settings import read_profile

MAX_DIFFERENCE_FRACTION = 1e-3
"""Largest relative difference of float32 losses under two plans, which sum in different orders."""
LEFTOVERS_S, LOG_CHARACTERS = 3.0, 1500
"""Seconds that processes may take to exit after a step; characters of a log's end that the record keeps."""

# The steps.


def machine(check: Check) -> None:
    """Says what machine this is: versions, GPU, topology. It fails if torch sees no GPU."""
    memory_gb = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    check.note(torch=torch.__version__, cuda=torch.version.cuda, cores=len(own_cores()), memory_gb=memory_gb)
    query = ("--query-gpu=name,driver_version,memory.total,compute_mode,mig.mode.current", "--format=csv,noheader")
    for name, words in (("gpus", query), ("topology", ("topo", "-m"))) if shutil.which("nvidia-smi") else ():
        said = subprocess.run(["nvidia-smi", *words], capture_output=True, text=True)
        check.note(**{name: said.stdout.strip()[:2000]})
    if not check.dry:
        found = torch.cuda.get_device_properties(0)
        check.note(gpu=found.name, gpu_memory_gb=found.total_memory / 1e9, capability=f"{found.major}.{found.minor}")
        check.note(nccl=".".join(map(str, torch.cuda.nccl.version())), has_bf16=torch.cuda.is_bf16_supported())


async def forked_contexts(check: Check) -> None:
    """Three forks of the real forkserver use the device at once. Good: none is poisoned; a context takes under 1 s."""
    forkserver, pipes = await Forkserver.start(), []
    for _ in range(3):
        forks = multiprocessing.get_context("forkserver")
        ours, theirs = forks.Pipe(duplex=False)
        forks.Process(target=_multiply, args=(theirs, check.device)).start()
        theirs.close()
        pipes.append(ours)
    found = [await asyncio.to_thread(each.recv) for each in pipes]
    await forkserver.close()
    poisoned = [text for _, text in found if text]
    check.note(context_s=max(seconds for seconds, _ in found), poisoned_forks=len(poisoned))
    check.expect(not poisoned, f"a fork cannot use its device: {' '.join(poisoned)}")


def _multiply(answer: Any, device: torch.device) -> None:
    try:
        seconds, _ = timed(lambda: torch.ones(64, 64, device=device) @ torch.ones(64, 64, device=device))
        answer.send((seconds, ""))
    except BaseException as error:
        answer.send((0.0, f"{type(error).__name__}: {error}"))


async def data_limits(check: Check) -> None:
    """A rank trains under `memory_gb_per_slot`. CUDA reserves far more address space. Good: it starts under both."""
    for limit_gb in (4, 16):
        async with check.testbed(1, memory_gb_per_slot=float(limit_gb)) as bed:
            run = start(bed, ONE, limit_gb)
            check.note(**{f"first_step_at_{limit_gb}_gb_s": await run.first_step()})
            await bed.kill(run)


async def memory_after_death(check: Check) -> None:
    """A rank with loaders that holds much memory is killed, and another ends its own process. Good: the memory is free
    as soon as the agent reports the end, because the next run starts then.
    """
    async with check.testbed(1) as bed:
        used_bytes = host_bytes if check.dry else gpu_bytes
        hold_bytes = 300_000_000 if check.dry else int(0.7 * torch.cuda.get_device_properties(0).total_memory)
        for number, (how, expected) in enumerate((("kill", "lost"), ("exit", "failed"))):
            before_bytes = used_bytes()
            run = start(bed, ONE, number, "Holding", hold_bytes=hold_bytes, exits=how == "exit")
            await run.first_step()
            held_bytes, began_s = used_bytes() - before_bytes, time.monotonic()
            if how == "kill":
                await bed.kill(run)
            ended, ended_s = await run.left, time.monotonic()
            while used_bytes() - before_bytes > 0.2 * hold_bytes and time.monotonic() < ended_s + 5:
                await asyncio.sleep(0.002)
            free_ms = 1e3 * (time.monotonic() - ended_s)
            check.note(**{f"{how}_held_gb": held_bytes / 1e9, f"{how}_end_ms": 1e3 * (ended_s - began_s)})
            check.note(**{f"{how}_free_after_end_ms": free_ms, f"{how}_outcome": ended.outcome})
            check.expect(ended.outcome == expected, f"{how}: {ended.outcome}, not {expected}: {ended.reason}")
            check.expect(free_ms < 5_000, f"{how}: memory was not free 5 s after the reported end")


def communicator(check: Check) -> None:
    """NCCL with one rank at the executor's file store (with --dry: gloo). Good: a second to the first collective, under
    500 MB of GPU memory for each communicator.
    """
    (figures,) = on_ranks(check, 1, _communicate)
    check.note(**figures)


def _communicate(rank: Rank) -> dict[str, float]:
    is_gpu, figures = rank.device.type == "cuda", {}
    values, before_bytes = torch.ones(1 << 20, device=rank.device), gpu_bytes() if is_gpu else 0
    figures["init_s"], _ = timed(rank.join)
    for name, group in (("first", None), ("second", distributed.new_group())):
        figures[f"{name}_collective_s"], _ = timed(distributed.all_reduce, values, group=group)
        if is_gpu:
            figures[f"{name}_communicator_mb"], before_bytes = (gpu_bytes() - before_bytes) / 1e6, gpu_bytes()
    figures["destroy_s"], _ = timed(distributed.destroy_process_group)
    return figures


def meshes(check: Check) -> None:
    """Four ranks form the device mesh of a hybrid plan again and again, at both kinds of store. With `device_id`, which
    the executor does not pass, meshes split groups, and that may hang (pytorch issue 145376): this is shown, and is no
    failure. Good: 0 hangs without.
    """
    ways = [(store, False) for _ in range(check.rounds // 2) for store in ("file", "tcp")]
    ways += [] if check.dry else [("file", True), ("tcp", True)]
    rounds, hangs, errors, began_s = Counter[Any](), Counter[Any](), Counter[Any](), time.monotonic()
    while ways:
        done = Path(tempfile.mkstemp(dir=check.folder)[1])
        with contextlib.ExitStack() as stack:
            sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in ways]
            files = [stack.enter_context(open(os.memfd_create("store"), "rb")) for _ in ways]
            ports = [each.getsockname()[1] for each in sockets]
            places = [
                (*(one.fileno() for one in each), port) for *each, port in zip(files, sockets, ports, strict=True)
            ]
            try:
                on_ranks(check, 4, _form_meshes, ways, places, done, beat=done)
            except Exception as error:
                bad = ways[min(done.stat().st_size, len(ways) - 1)]
                (hangs if isinstance(error, TimeoutError) else errors)[bad] += 1
                check.expect(bad[1], f"round {bad}: {type(error).__name__}: {error}")
        tried = done.stat().st_size + 1
        rounds.update(ways[:tried])
        ways = ways[tried:]
    check.note(round_s=(time.monotonic() - began_s) / rounds.total())
    for way, count in rounds.items():
        name = f"{way[0]}_with_device_id" if way[1] else way[0]
        check.note(**{f"{name}_rounds": count, f"{name}_hangs": hangs[way], f"{name}_errors": errors[way]})


def _form_meshes(rank: Rank, ways: Sequence[tuple[str, bool]], places: Sequence[Any], done: Path) -> None:
    for (kind, is_split), (file, listening, port) in zip(ways, places, strict=True):
        if kind == "file":
            store: Any = FileStore(f"/proc/self/fd/{file}", rank.world)
        else:
            given = {"is_master": True, "master_listen_fd": os.dup(listening)} if rank.number == 0 else {}
            store = TCPStore("127.0.0.1", port, rank.world, wait_for_workers=False, **given)
        rank.join(store, **{"device_id": rank.device} if is_split else {})
        mesh = init_device_mesh(rank.device.type, (2, 2, 1), mesh_dim_names=("pipeline", "data", "tensor"))
        values = torch.full((1,), float(rank.number), device=rank.device)
        for name in ("pipeline", "data", "tensor"):
            distributed.all_reduce(values, group=mesh[name].get_group())
        if values.item() != sum(range(rank.world)):
            raise ValueError(f"the ranks' sum is {values.item()}")
        distributed.barrier()
        distributed.destroy_process_group()
        if rank.number == 0:
            with done.open("ab") as file:
                file.write(b".")


KINDS: dict[str, dict[str, Any]] = {each: {"precision": each} for each in ("fp32", "tf32", "bf16", "fp16")}
KINDS["bf16_without_noise"] = {"precision": "bf16", "measure_squares": False}
COMPILED: dict[str, dict[str, Any]] = {"bf16_compiled": {"precision": "bf16", "compiled": True}}


def step_times(check: Check) -> None:
    """Steps of a GPT and of a residual network. Good: bf16 takes half the time of fp32 or less, the noise scale a tenth
    of a step or less, and the GPU is busy for nine tenths of it. Not compiled with --dry.
    """
    sizes: dict[str, Any] = {"side": 8} if check.dry else {"channels": 64, "depths": (3, 4, 6, 3), "side": 128}
    for name, job in (("gpt", Gpt(**SMALL if check.dry else LARGE)), ("resnet", Resnet34(**sizes))):
        for kind, more in KINDS.items() if check.dry or name == "resnet" else (KINDS | COMPILED).items():
            trainer = Trainer(job, Plan(micro_batch=BATCH, accumulation=2), check.device, **more)
            steps = [timed(trainer.step, number) for number in range(6 if check.dry else 13)]
            with profile(activities=[ProfilerActivity.CPU, *([] if check.dry else [ProfilerActivity.CUDA])]) as seen:
                whole_s, _ = timed(trainer.step, 20)
            events = seen.events() or []
            busy_us = sum(each.time_range.elapsed_us() for each in events if each.device_type.name == "CUDA")
            what, word = ("operators", "aten::") if check.dry else ("launches", "LaunchKernel")
            key = f"{name}_{kind}"
            check.note(**{f"{key}_ms": 1e3 * statistics.median(seconds for seconds, _ in steps[3:])})
            check.note(**{f"{key}_{what}": sum(word in each.name for each in events)})
            check.note(**{} if check.dry else {f"{key}_busy_fraction": busy_us / 1e6 / whole_s})
            check.expect(all(math.isfinite(each.loss) for _, each in steps), f"{key}: a loss is not finite")


_BLOCKING_SYNC = 4
"""CU_CTX_SCHED_BLOCKING_SYNC of the CUDA driver API."""


def waiting(check: Check) -> None:
    """Trains on pictures beside one loader, on one and on two cores, while CUDA spins (its default) or blocks when it
    waits. Good: spinning is no slower; if it is, and takes a whole CPU, workers should block.
    """
    for is_blocking in (False,) if check.dry else (False, True):
        for cores in (1, 2):
            ((cpus, rate),) = on_ranks(check, 1, _beside_loader, own_cores()[:cores], is_blocking)
            key = f"{'blocking' if is_blocking else 'default'}_{cores}_cores"
            check.note(**{f"{key}_cpu_s_per_s": cpus, f"{key}_steps_per_s": rate})


def _beside_loader(rank: Rank, cores: Sequence[int], is_blocking: bool) -> tuple[float, float]:
    os.sched_setaffinity(0, cores)
    if is_blocking:
        driver = ctypes.CDLL("libcuda.so.1")
        if driver.cuInit(0) or driver.cuDevicePrimaryCtxSetFlags_v2(0, _BLOCKING_SYNC):
            raise RuntimeError("cuDevicePrimaryCtxSetFlags failed")
    is_gpu = rank.device.type == "cuda"
    job = Pictures(channels=64 if is_gpu else 8, side=64 if is_gpu else 16, pictures=512)
    trainer = Trainer(job, Plan(micro_batch=32), rank.device, supply=Supply(job, loaders=1))
    for number in range(3):
        trainer.step(number)
    began_s, began_cpu_s, steps = time.monotonic(), time.process_time(), 0
    while (seconds := time.monotonic() - began_s) < (4.0 if is_gpu else 0.7):
        trainer.step(3 + steps)
        steps += 1
    return (time.process_time() - began_cpu_s) / seconds, steps / seconds


def saving(check: Check) -> None:
    """Saves a state of 7 GB aside twice, and loads it. Good: the second save blocks for as long as a copy at 20 GB/s or
    less, pinned memory is little more than the state, and all is equal.
    """
    sizes = SMALL if check.dry else LARGE | {"depth": 48}
    trainer, checkpoints = Trainer(Gpt(**sizes), ONE, check.device), Checkpoints(check.folder / "checkpoints")
    trainer.step(0)
    check.note(state_gb=3 * sum(each.nbytes for each in trainer.parts[0].parameters()) / 1e9)
    for step in (1, 2):
        seconds, saved = timed(checkpoints.save_later, trainer.state(), Progress(step=step))
        check.note(**{f"save_{step}_blocks_s": seconds, f"save_{step}_s": timed(saved.result)[0]})
    if not check.dry:
        check.note(pinned_gb=torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0) / 1e9)
    other = Trainer(Gpt(**sizes), ONE, check.device, seed=1)
    check.note(load_s=timed(other.load, checkpoints)[0])
    pairs = zip(trainer.parts[0].state_dict().values(), other.parts[0].state_dict().values(), strict=True)
    check.expect(all(torch.equal(*each) for each in pairs), "loaded weights differ from those saved")
    steps = [(trainer.step(number).loss, other.step(number).loss) for number in (2, 3)]
    check.expect(all(one == another for one, another in steps), f"losses after loading differ: {steps}")


PLANS = {
    "ddp": TWO,
    "zero2": Plan(data=2, micro_batch=BATCH // 2, zero=2),
    "zero3": Plan(data=2, micro_batch=BATCH // 2, zero=3),
    "tensor": Plan(tensor=2, micro_batch=BATCH),
    "pipeline": Plan(pipeline=2, micro_batch=BATCH // 4, accumulation=4),
}


async def plans_alike(check: Check) -> None:
    """Trains a job under one plan for two ranks after another, each from the checkpoint of the one before; then the
    same job on one rank. Good: equal losses at every step.
    """
    sizes = SMALL if check.dry else MEDIUM
    async with check.testbed(2, hang_s=60.0) as bed:
        steps = 0
        for name, plan in PLANS.items():
            run = start(bed, plan, 0, **sizes)
            check.note(**{f"{name}_peak_gb": await trained(run, steps + 3)})
            await bed.stop(run)
            steps = max(losses(run))
        alone = start(bed, ONE, 1, **sizes)
        check.note(one_rank_peak_gb=await trained(alone, steps))
        await bed.stop(alone)
        expected, found = losses(alone), losses(run)
        worst = max(abs(found[step] / expected[step] - 1) for step in range(1, steps + 1))
        check.note(steps=steps, largest_difference_fraction=f"{worst:.1e}")
        check.expect(worst < MAX_DIFFERENCE_FRACTION, f"losses differ from those of one rank by {worst:.1e} of them")


def compressors(check: Check) -> None:
    """Two ranks exchange compressed gradients. Good: equal weights on both, to the bit."""
    for name in ("none", "fp16", "q4", "topk-0.01", "powersgd-4"):
        found = on_ranks(check, 2, _compressed, name, SMALL if check.dry else MEDIUM)
        check.note(**{f"{name}_step_ms": max(step_ms for step_ms, _ in found)})
        check.expect(found[0][1] == found[1][1], f"{name}: weights differ between ranks")


def _compressed(rank: Rank, name: str, sizes: dict[str, Any]) -> tuple[float, list[float]]:
    rank.join()
    trainer = Trainer(Gpt(**sizes), Plan(data=2, micro_batch=BATCH // 2, compressor=name), rank.device)
    steps = [timed(trainer.step, number)[0] for number in range(4)]
    return 1e3 * min(steps), [each.double().sum().item() for each in trainer.parts[0].parameters()]


async def lost_rank(check: Check) -> None:
    """One of two ranks is killed, or stopped by SIGSTOP. Good: both runs are lost, not failed: the one at once, the
    other after `hang_s`, because it hangs.
    """
    async with check.testbed(2, hang_s=HANG_S) as bed:
        for number, fault in enumerate(("kill", "stop")):
            run = start(bed, TWO, number, fault=fault)
            await run.first_step()
            began_s, ended = time.monotonic(), await run.left
            check.note(**{f"{fault}_outcome": ended.outcome, f"{fault}_s": time.monotonic() - began_s})
            check.note(**{f"{fault}_reason": ended.reason})
            is_right = ended.outcome == "lost" and ended.hung == (fault == "stop")
            check.expect(is_right, f"{fault}: {ended.outcome}, hung={ended.hung}: {ended.reason}")


async def out_of_memory(check: Check) -> None:
    """Memory runs out for a tensor, for cuBLAS and for NCCL (with --dry: for a tensor and for Python). Good: each is
    known as such, so that the micro-batch is halved and nobody is called a lost peer.
    """
    cases = [("tensor", "tensor", ONE), ("cublas", "library", ONE), ("nccl", "library", TWO)]
    async with check.testbed(2) as bed:
        for number, (name, fault, plan) in enumerate([cases[0], ("python", "host", TWO)] if check.dry else cases):
            ended = await start(bed, plan, number, fault=fault).left
            check.note(**{f"{name}_outcome": ended.outcome, f"{name}_text": ended.reason[:300]})
            check.expect(ended.out_of_memory, f"{name}: {ended.outcome}, not out of memory: {ended.reason}")


async def wrong_devices(check: Check) -> None:
    """An agent has more slots than visible GPUs, and a run is given a GPU that is not there. Good: the agent refuses in
    a sentence; the run is lost, because its job is not at fault.
    """
    command = [sys.executable, "-m", "synergy_exec.agent", "--url=http://127.0.0.1:9", "--node=0", "--slots=2"]
    given = os.environ | {"CUDA_VISIBLE_DEVICES": "0", "SYNERGY_TOKEN": "none"}
    agent = subprocess.run([*command, "--gpu-type=gpu"], env=given, capture_output=True, text=True, timeout=20)
    check.note(agent_exit_code=agent.returncode, agent_text=agent.stderr.strip()[-300:])
    check.expect("2 GPUs are needed" in agent.stderr, "the agent did not refuse its slots")
    del os.environ["CUDA_VISIBLE_DEVICES"]
    forkserver, said = await Forkserver.start(), list[Any]()
    job = {"class": "synergy_exec.examples.gpt:Gpt", "name": "gpt", "initial_batch": BATCH, "work": 1.0}
    file, folder = job_of(job, "gpt"), str(check.folder)
    launch = Launch(
        run=0, job=0, file=file, plan=ONE, folder=folder, settings=RunSettings(), node=NodeSlots(slots=[0], world=1)
    )
    await NodeRun(launch, forkserver, said.append, {}).carry_out([Slot(tuple(own_cores()), 1.0, gpu=63)], None)
    await forkserver.close()
    (ended,) = [each for each in said if isinstance(each, Ended)]
    check.note(outcome=ended.outcome, text=ended.reason[:300])
    check.expect(ended.outcome == "lost", f"{ended.outcome}, not lost: {ended.reason}")


def profiling(check: Check) -> None:
    """The command `profile` measures a GPT for 45 s, with starts and stops. Good: times spread by less than a tenth,
    and a start takes few seconds.
    """
    job, out = check.folder / "job.yaml", check.folder / "profile.json"
    sizes = SMALL if check.dry else LARGE | {"depth": 12}
    words = {"class": "synergy_exec.examples.gpt:Gpt", "arguments": sizes, "name": "gpt", "work": 100}
    job.write_text(json.dumps(words | {"initial_batch": 8, "max_batch": 32}))
    keys = ("profile_s=10", "backend.options.slots=2") if check.dry else ("profile_s=45", "backend.options.slots=1")
    profile_command.main([str(job), f"--out={out}", f"--seconds={0.2 if check.dry else 2}", *keys])
    (model,) = read_profile(out).models.values()
    measured = [row for row in model.rows if not row.predicted]
    check.note(plans=len({row.plan.degrees for row in measured}), rows=len(measured))
    check.note(median_spread_fraction=statistics.median(row.spread for row in measured))
    if (
        model.costs is not None and model.costs.launch_s != ProfileSettings().restart_s
    ):  # which is assumed for want of time
        check.note(launch_s=model.costs.launch_s, restart_s=model.costs.restart_s, exit_s=model.costs.exit_s)


async def cold_batch(check: Check) -> None:
    """A model, compiled on a GPU, gets another micro-batch, whose first step outlasts `hang_s`. Good: it goes on."""
    async with check.testbed(1, hang_s=HANG_S) as bed:
        run = start(bed, ONE, 0, fault="cold", compile=not check.dry, **SMALL if check.dry else MEDIUM)
        check.note(first_step_s=await run.first_step())
        await trained(run, FAULTY_STEP + 4)
        bed.retune(run, Plan(micro_batch=BATCH // 2, accumulation=4))
        began_s = time.monotonic()
        while (report := await run.report()).micro_batch == BATCH:
            pass
        check.note(retune_s=time.monotonic() - began_s)
        await trained(run, report.step + 3)
        check.note(stop_s=await bed.stop(run))


class Step(NamedTuple):
    """seconds: its time limit. runs_dry: whether any of it shows something without a GPU."""

    number: int
    seconds: float
    function: Callable[[Check], Any]
    runs_dry: bool = True


STEPS = (
    Step(0, 20, machine),
    Step(1, 20, forked_contexts),
    Step(2, 25, data_limits),
    Step(3, 40, memory_after_death),
    Step(7, 25, communicator),
    Step(10, 90, meshes),
    Step(4, 75, step_times),
    Step(5, 35, waiting),
    Step(6, 75, saving),
    Step(8, 90, plans_alike),
    Step(9, 45, compressors),
    Step(11, 40, lost_rank),
    Step(12, 40, out_of_memory),
    Step(13, 30, wrong_devices),
    Step(14, 70, profiling),
    Step(15, 60, cold_batch),
)
"""All steps, in the order in which they run."""


# Running them.


def run(step: Step, given: argparse.Namespace, folder: Path, left_s: float) -> dict[str, Any]:
    """Runs a step in a process of its own; returns its entry in the record."""
    entry: dict[str, Any] = {"step": step.number, "what": step.function.__name__, "outcome": "SKIP", "seconds": 0.0}
    entry |= {"figures": {}, "text": ""}
    limit_s = step.seconds if given.step_limit is None else given.step_limit
    if given.dry and not step.runs_dry:
        return entry | {"text": "it shows nothing without a GPU"}
    if limit_s > left_s:
        return entry | {"text": f"it may take {limit_s:g} s, and {left_s:.0f} s are left of --limit={given.limit:g}"}
    folder.mkdir()
    began_s = time.monotonic()
    ours, theirs = multiprocessing.Pipe(duplex=False)
    if (pid := os.fork()) == 0:
        _child(step, given, folder, limit_s, theirs)
    theirs.close()
    entry |= {"outcome": "FAIL", "text": "its time is up"}
    while ours.poll(max(0.0, began_s + limit_s - time.monotonic())):
        try:
            kind, value = ours.recv()
        except EOFError:
            kind, value = "FAIL", "its process died"
        if kind != "figures":
            entry |= {"outcome": kind, "text": value}
            break
        entry["figures"] |= value
    entry["seconds"] = round(time.monotonic() - began_s, 2)
    if entry["outcome"] == "OK":
        left = [(each, processes.began(each)) for each in processes.descendants(os.getpid())]
        if killed := processes.wait_or_kill(left, patience_s=LEFTOVERS_S):
            entry |= {"outcome": "FAIL", "text": f"{len(killed)} processes were left and had to be killed"}
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    ending = threading.Thread(target=processes.end_all, daemon=True)  # a driver may hold a process for ever
    ending.start()
    ending.join(10)
    if entry["outcome"] == "FAIL":
        logs = {str(each.relative_to(folder)): each.read_text(errors="replace") for each in folder.rglob("*.txt")}
        entry["logs"] = {name: log[-LOG_CHARACTERS:] for name, log in logs.items()}
    return entry


def _child(step: Step, given: argparse.Namespace, folder: Path, limit_s: float, answer: Any) -> None:
    os.setsid()
    output = os.open(folder / "step.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.dump_traceback_later(0.9 * limit_s)  # so that the log says where a step stood that is killed
    rounds = given.rounds or (50 if given.dry else 6)
    check = Check(given.dry, folder, rounds, lambda figures: answer.send(("figures", figures)))
    try:
        ended = step.function(check)
        if asyncio.iscoroutine(ended):
            asyncio.run(ended)
    except BaseException as error:
        traceback.print_exc()
        check.wrong.append(f"{type(error).__name__}: {error}")
    sys.stdout.flush()
    sys.stderr.flush()
    answer.send(("FAIL" if check.wrong else "OK", "; ".join(check.wrong)))
    os._exit(0)


def line(entry: dict[str, Any]) -> str:
    """Formats a step's result as one line, whatever its texts contain."""
    figures = [f"{name}={value}" for name, value in entry["figures"].items()]
    text = " ".join(" ".join([*figures, entry["text"]]).split())
    return f"STEP {entry['step']} {entry['outcome']} {entry['seconds']:.1f} {entry['what']}: {text[:1500]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="on CPU cores with gloo and tiny models")
    parser.add_argument("--only", type=lambda text: {0, *map(int, text.split(","))}, help="steps, such as 1,3,7")
    parser.add_argument(
        "--limit", type=float, default=480.0, help="seconds in all; steps that may take longer are skipped"
    )
    parser.add_argument(
        "--step-limit", type=float, help="seconds after which every step is killed, in place of its own"
    )
    parser.add_argument("--rounds", type=int, help="of step 10 without device_id; 6, or 50 with --dry")
    parser.add_argument("--record", type=Path, default=Path("results/gpu_check.json"))
    given = parser.parse_args()
    if given.only and (unknown := given.only - {step.number for step in STEPS}):
        parser.error(f"--only: there is no step {min(unknown)}; take 0 to {len(STEPS) - 1}")
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    processes.adopt_orphans()  # whatever a step leaves behind becomes a child of this process
    began_s, entries = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="gpu-check-", ignore_cleanup_errors=True) as folder:
        for step in STEPS:
            if given.only is None or step.number in given.only:
                left_s = given.limit - (time.monotonic() - began_s)
                entries.append(run(step, given, Path(folder) / str(step.number), left_s))
                print(line(entries[-1]), flush=True)
    seconds, counts = round(time.monotonic() - began_s, 1), dict.fromkeys(("OK", "FAIL", "SKIP"), 0)
    for each in entries:
        counts[each["outcome"]] += 1
    record = {"date": time.strftime("%Y-%m-%d %H:%M:%S %z"), "is_dry": given.dry, "seconds": seconds}
    record |= {"outcomes": counts, "machine": entries[0]["figures"], "steps": entries}
    with atomic_file(given.record) as partial:
        partial.write_text(json.dumps(record, indent=1), encoding="utf-8")
    print(f"{seconds:.0f} s: {', '.join(f'{count} {kind}' for kind, count in counts.items())}; wrote {given.record}")
    return 1 if counts["FAIL"] else 0


if __name__ == "__main__":
    sys.exit(main())
