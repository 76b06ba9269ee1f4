"""What a rank holds in memory as it starts, at the most, and how long starting takes, under each kind of plan.

python bench/large_models.py [HIDDEN [DEPTH [REPEATS]]]                # minutes: 2

The small GPT at another size, on CPU cores with gloo, one thread a rank. Counted per rank is resident memory of its
own: VmHWM since the rank began to start, less what was resident then (a worker that has started a tiny model under the
same plan, so that torch's code is there). MiB:
owned: its parameters and buffers; and gradients and the optimizer's state, when it goes on from a checkpoint.
needed: what the plan itself has to hold once more at a time: the largest group of layers whole, under FSDP2.
peak: of rank 0 / the largest of the others. Rank 0 draws the whole model at the first start, on its host.
allowed: 1.3 × owned + needed.
start: seconds from there to the end of the first step, median of REPEATS.
"""

from __future__ import annotations

import gc
import multiprocessing
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from synergy_core.planner.plan import Plan
from synergy_exec.examples.gpt import Gpt
from synergy_exec.training.checkpoint import Checkpoints
from synergy_exec.training.integrity import Progress
from synergy_exec.training.trainer import Trainer
from synergy_exec.worker import resources

PLANS = {
    "alone": Plan(micro_batch=2, accumulation=2),
    "DDP 2": Plan(data=2, micro_batch=1, accumulation=2),
    "FSDP2 2": Plan(data=2, zero=3, micro_batch=1, accumulation=2),
    "TP 2": Plan(tensor=2, micro_batch=2, accumulation=2),
    "PP 2": Plan(pipeline=2, micro_batch=2, accumulation=2),
}
MIB = 1 << 20


class Started(NamedTuple):
    """Of a rank; bytes, and seconds."""

    owned: int
    needed: int
    peak: int
    start_s: float


def gpt(hidden: int, depth: int) -> Gpt:
    """The job."""
    return Gpt(hidden=hidden, depth=depth, heads=8, tokens=8, vocabulary=512)


def held(values: Any) -> int:
    """Bytes of all tensors in it that are on this rank, each storage once."""
    storages = {}
    for each in tree_leaves(values):
        if isinstance(each, Tensor):
            local = each.to_local() if isinstance(each, DTensor) else each
            storages[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
    return sum(storages.values())


def begun(job: Gpt, plan: Plan, folder: Path | None) -> tuple[Trainer, int]:
    """A trainer that is about to take its first step, and the number of that, from a checkpoint if there is one."""
    trainer = Trainer(job, plan, begun=folder is not None)
    if folder is None:
        return trainer, 0
    progress = trainer.load(Checkpoints(folder))
    assert progress is not None
    return trainer, progress.step


def started(job: Gpt, plan: Plan, folder: Path | None) -> Started:
    """Starts, from the folder's checkpoint if one is given, and takes a step."""
    tiny = gpt(32, 2)
    trainer, step = begun(tiny, plan, None)
    trainer.step(step)
    if folder is not None:
        place = folder / "tiny"
        Checkpoints(place).save(trainer.state(), Progress(step=1, samples=4, work=1.0))
        begun(tiny, plan, place)
    del trainer
    gc.collect()
    if plan.gpus > 1:
        distributed.barrier()
    began = time.monotonic()
    before = resources.held_bytes()
    resources.forget()
    trainer, step = begun(job, plan, folder)
    peak = resources.report(before)["memory_bytes"]
    trainer.step(step)
    start_s = time.monotonic() - began
    parameters = [list(part.parameters()) for part in trainer.parts]
    owned = held([parameters, [list(part.buffers()) for part in trainer.parts]])
    if folder is not None:
        owned += held(parameters) + held([each.state_dict()["state"] for each in trainer.optimizers])
    return Started(owned, needed(trainer), peak, start_s)


def needed(trainer: Trainer) -> int:
    """Bytes of the largest group of layers that this plan gathers."""
    if not trainer.plan.zero:
        return 0
    (part,) = trainer.parts
    blocks = list(part.layers.children())
    sizes = [sum(each.numel() * each.element_size() for each in block.parameters()) for block in blocks]
    whole = sum(each.numel() * each.element_size() for each in part.parameters())
    return max(*sizes, whole - sum(sizes))


def rank_of(rank: int, job: Gpt, plan: Plan, store: Path, folder: Path | None, answer: Connection) -> None:
    """A rank of a group: its answer."""
    torch.set_num_threads(1)
    if plan.gpus > 1:
        meeting = distributed.FileStore(str(store), plan.gpus)
        distributed.init_process_group(
            "gloo", store=meeting, rank=rank, world_size=plan.gpus, timeout=timedelta(seconds=100)
        )
        distributed.all_reduce(torch.zeros(1))
    answer.send(started(job, plan, folder))


def group(job: Gpt, plan: Plan, folder: Path | None) -> list[Started]:
    """What each rank of a group answers."""
    with tempfile.TemporaryDirectory() as place:
        ranks = []
        for rank in range(plan.gpus):
            ours, theirs = multiprocessing.Pipe(duplex=False)
            arguments = (rank, job, plan, Path(place) / "store", folder, theirs)
            process = multiprocessing.get_context("fork").Process(target=rank_of, args=arguments)
            process.start()
            theirs.close()
            ranks.append((process, ours))
        answers = [ours.recv() for _, ours in ranks]
        for process, _ in ranks:
            process.join()
    return answers


def save(job: Gpt, folder: Path) -> None:
    """A checkpoint after one step, of a process of its own."""
    trainer = Trainer(job, PLANS["alone"])
    trainer.step(0)
    Checkpoints(folder).save(trainer.state(), Progress(step=1, samples=4, work=1.0))


def line(name: str, runs: list[list[Started]]) -> str:
    """Of a plan."""
    ranks = list(zip(*runs, strict=True))
    owned, needs = max(each[0].owned for each in ranks), max(each[0].needed for each in ranks)
    peaks = [statistics.median(each.peak for each in rank) for rank in ranks]
    start_s = statistics.median(max(each.start_s for each in run) for run in runs)
    figures = [owned, needs, peaks[0], max(peaks[1:], default=peaks[0]), 1.3 * owned + needs]
    own, needs_mib, first, others, allowed = (f"{each / MIB:.0f}" for each in figures)
    return f"| {name} | {own} | {needs_mib} | {first} / {others} | {allowed} | {start_s:.2f} |"


def main(hidden: int, depth: int, repeats: int) -> None:
    job = gpt(hidden, depth)
    with tempfile.TemporaryDirectory() as place:
        saved = Path(place)
        saving = multiprocessing.get_context("fork").Process(target=save, args=(job, saved))
        saving.start()
        saving.join()
        for title, folder in (("first start", None), ("from a checkpoint", saved)):
            print(f"\n| {title} | owned | needed | peak | allowed | start, s |\n|---|---|---|---|---|---|", flush=True)
            for name, plan in PLANS.items():
                print(line(name, [group(job, plan, folder) for _ in range(repeats)]), flush=True)


if __name__ == "__main__":
    given = [int(each) for each in sys.argv[1:]]
    main(*given, *(512, 8, 5)[len(given) :])
