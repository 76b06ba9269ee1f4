"""Runs what tests of checkpoints need in process groups: `python checkpoint_groups.py FOLDER [--thorough]`.

Every group is forked from this process, which has imported torch and run none of it. Writes FOLDER/results.json.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoint_families import FAMILIES, OPTIMIZERS, split, world
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed

from synergy_exec.training import checkpoint
from synergy_exec.training.progress import Progress
from synergy_exec.training.state import State

BEFORE, AFTER = 5, 5
KILLS = 4
Results = dict[str, Any]


def start(ranks: int, folder: Path, run: Callable[[int], Results]) -> list[int]:
    """Fork a group that meets in a file and runs; rank 0's results go to `folder`/<pid>.json."""
    folder.mkdir(parents=True, exist_ok=True)
    store = folder / f"store-{time.monotonic_ns()}"
    return [_fork(rank, ranks, store, folder, run) for rank in range(ranks)]


def _fork(rank: int, ranks: int, store: Path, folder: Path, run: Callable[[int], Results]) -> int:
    if pid := os.fork():
        return pid
    try:
        if ranks > 1:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
        results = run(rank)
        if rank == 0:
            (folder / f"{os.getpid()}.json").write_text(json.dumps(results))
        if ranks > 1:
            dist.barrier()
            dist.destroy_process_group()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def collect(pids: list[int], folder: Path) -> Results:
    statuses = [os.waitpid(pid, 0)[1] for pid in pids]
    if any(statuses):
        raise SystemExit(f"a group failed: {statuses}")
    return json.loads((folder / f"{pids[0]}.json").read_text())


# Every family's checkpoints, read by every family


def progress_after(steps: int) -> Progress:
    return Progress(step=steps, samples=8 * steps, work=1.25 * steps, grad_sqr=0.5, grad_var=2.0, noise_weight=3.0)


def write_all(ranks: int, folder: Path) -> Results:
    losses = {}
    for family in [each for each in FAMILIES if world(each) == ranks]:
        for optimizer in OPTIMIZERS:
            job = split(family, optimizer)
            losses[f"{family} {optimizer}"] = [job.step(number) for number in range(BEFORE)]
            checkpoint.save(folder / f"{family}-{optimizer}", [job.part], [job.optimizer], progress_after(BEFORE))
            # Saving must not disturb the run that saves.
            losses[f"{family} {optimizer}"] += [job.step(BEFORE + number) for number in range(AFTER)]
    return losses


def read_all(ranks: int, folder: Path, thorough: bool) -> Results:
    losses: Results = {}
    for family in [each for each in FAMILIES if world(each) == ranks]:
        for saved in [each for each in FAMILIES if thorough or read_by_default(each, family)]:
            for optimizer in optimizers_between(saved, family):
                job = split(family, optimizer, seed=1)
                progress = checkpoint.load(folder / f"{saved}-{optimizer}", [job.part], [job.optimizer])
                assert progress == progress_after(BEFORE)
                losses[f"{saved} {family} {optimizer}"] = [job.step(BEFORE + number) for number in range(AFTER)]
        for optimizer in OPTIMIZERS if ranks < 4 else ():
            losses[f"control {family} {optimizer}"] = without_optimizer(family, optimizer, folder)
    return losses


def read_by_default(writer: str, reader: str) -> bool:
    """Every family reads its own and the lone process's, which reads all: so each way to write and each to read."""
    return writer == reader or "single" in (writer, reader)


def optimizers_between(writer: str, reader: str) -> tuple[str, ...]:
    """With four ranks on either side one optimizer is enough: what the other adds shows between smaller worlds."""
    return ("adamw",) if max(world(writer), world(reader)) > 2 else tuple(OPTIMIZERS)


def without_optimizer(family: str, optimizer: str, folder: Path) -> list[float]:
    """Losses after loading the model alone. The optimizer's key is not asked for: asking would alias live state."""
    job = split(family, optimizer, seed=1)
    state = State([job.part], [job.optimizer], with_optimizer=False)
    load_distributed(state.tree, storage_reader=FileSystemReader(folder / f"single-{optimizer}" / "step-00000005"))
    state.apply()
    return [job.step(BEFORE + number) for number in range(AFTER)]


# Things that happen to a group


def later(folder: Path) -> Results:
    """save_later under dp2tp2 while training goes on, twice without a wait between, then read back."""
    job = split("dp2tp2", "adamw")
    losses = [job.step(number) for number in range(BEFORE)]
    first = checkpoint.save_later(folder, [job.part], [job.optimizer], progress_after(BEFORE))
    losses += [job.step(BEFORE + number) for number in range(AFTER)]
    second = checkpoint.save_later(folder, [job.part], [job.optimizer], progress_after(BEFORE + AFTER))
    first_done = first.done()
    second.wait()
    names = sorted(each.name for each in folder.iterdir())
    (folder / "step-00000010" / "progress.json").unlink(missing_ok=True)
    dist.barrier()
    again = split("dp2tp2", "adamw", seed=1)
    progress = checkpoint.load(folder, [again.part], [again.optimizer])
    return {
        "losses": losses,
        "first_done": first_done,
        "names": names,
        "step": progress.step,
        "resumed": [again.step(BEFORE + number) for number in range(AFTER)],
    }


def refused(folder: Path) -> Results:
    """Rank 1 alone may write files of 4 KB at most: what every rank says, and what is left; then it may again."""
    job = split("fsdp2", "adamw")
    job.step(0)
    checkpoint.save(folder, [job.part], [job.optimizer], progress_after(1))
    job.step(1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    errors: list[Any] = [None, None]
    try:
        checkpoint.save(folder, [job.part], [job.optimizer], progress_after(2))
        error = ("", "")
    except Exception as raised:
        error = (type(raised).__name__, str(raised))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    dist.all_gather_object(errors, error)
    left = sorted(each.name for each in folder.iterdir())
    dist.barrier()
    checkpoint.save(folder, [job.part], [job.optimizer], progress_after(2))
    return {"errors": errors, "left": left, "afterwards": sorted(each.name for each in folder.iterdir())}


def damaged_under_two(folder: Path) -> Results:
    """Two checkpoints, the newer with a flipped bit in rank 1's file: both ranks take the older; then none is left."""
    job = split("fsdp2", "sgd")
    for step in (1, 2):
        job.step(step - 1)
        checkpoint.save(folder, [job.part], [job.optimizer], progress_after(step))
    outcomes: list[Any] = []
    for step in (2, 1):
        if dist.get_rank() == 0:
            path = folder / f"step-{step:08d}" / "__1_0.distcp"
            contents = bytearray(path.read_bytes())
            contents[len(contents) // 2] ^= 1
            path.write_bytes(contents)
        dist.barrier()
        gathered: list[Any] = [None, None]
        try:
            outcome: Any = checkpoint.load(folder, [job.part], [job.optimizer]).step
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"
        dist.all_gather_object(gathered, outcome)
        outcomes.append(gathered)
    return {"outcomes": outcomes}


def save_for_ever(folder: Path) -> Results:
    """Every step a checkpoint, in turns at once and later, from the newest there is; ends by being killed."""
    job = split("ddp2", "adamw")
    progress = checkpoint.load(folder, [job.part], [job.optimizer]) or Progress()
    while True:
        job.step(progress.step)
        progress = progress_after(progress.step + 1)
        method = checkpoint.save_later if progress.step % 2 else checkpoint.save
        method(folder, [job.part], [job.optimizer], progress)


def killed(folder: Path, repeats: int) -> Results:
    """kill -9 of a whole group that saves all the time, at random moments; after each what a reader finds."""
    moments = random.Random(0)
    steps, partials, errors = [], 0, []
    for _ in range(repeats):
        before = steps[-1] if steps else 0
        pids = start(2, folder / "groups", lambda rank: save_for_ever(folder / "job"))
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and _newest(folder / "job") <= before + 1:
            time.sleep(0.01)
        time.sleep(moments.uniform(0, 0.15))
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)
        visible = _newest(folder / "job")
        partials += len(list((folder / "job").glob(".partial-*")))
        found = collect(start(1, folder / "groups", lambda rank: reads(folder / "job")), folder / "groups")
        if found["step"] != visible or found["warnings"] or found["difference"] > 1e-5:
            errors.append({"visible": visible, **found})
        steps.append(found["step"])
    return {"steps": steps, "partials": partials, "errors": errors}


def _newest(folder: Path) -> int:
    return max((int(each.name[5:]) for each in folder.glob("step-*")), default=0) if folder.is_dir() else 0


def reads(folder: Path) -> Results:
    """What a lone reader loads, how often it had to pass one over, and how far that is from undisturbed training."""
    warned: list[str] = []
    checkpoint._log.warning = lambda *args: warned.append(str(args))  # type: ignore[method-assign]
    job, reference = split("single", "adamw", seed=1), split("single", "adamw")
    progress = checkpoint.load(folder, [job.part], [job.optimizer])
    for number in range(progress.step):
        reference.step(number)
    difference = abs(job.step(progress.step) - reference.step(progress.step))
    return {"step": progress.step, "warnings": warned, "difference": difference}


def main(folder: Path, thorough: bool) -> None:
    torch.set_num_threads(1)
    results: Results = {"seconds": {}}
    groups, saved = folder / "groups", folder / "saved"

    def group(name: str, ranks: int, run: Callable[[], Results]) -> None:
        began = time.monotonic()
        results.setdefault(name, {}).update(collect(start(ranks, groups, lambda rank: run()), groups))
        results["seconds"][f"{name} {ranks}"] = round(time.monotonic() - began, 2)

    for ranks in (1, 2, 4):
        group("written", ranks, lambda ranks=ranks: write_all(ranks, saved))
    for ranks in (1, 2, 4):
        group("read", ranks, lambda ranks=ranks: read_all(ranks, saved, thorough))
    group("later", 4, lambda: later(folder / "later"))
    group("refused", 2, lambda: refused(folder / "refused"))
    group("damaged", 2, lambda: damaged_under_two(folder / "damaged"))
    began = time.monotonic()
    results["killed"] = killed(folder / "killed", repeats=KILLS)
    results["seconds"]["killed"] = round(time.monotonic() - began, 2)
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), "--thorough" in sys.argv[2:])
