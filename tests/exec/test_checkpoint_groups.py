"""Checkpoints of process groups: any plan reads what any plan wrote, and what may happen to a group."""

import glob
import os
import pickle
import random
import resource
import signal
import tempfile
import time
from pathlib import Path

import groups
import pytest
import torch.distributed as dist
from exec.saved import PLANS, Training, flipped, names

from synergy_exec.training import checkpoint
from synergy_exec.training.checkpoint import Checkpoints
from synergy_exec.training.integrity import Progress
from synergy_exec.worker import processes

BEFORE, AFTER = 2, 2
KILLS = 2


def progress_after(steps):
    return Progress(step=steps, samples=8 * steps, work=1.25 * steps, grad_sqr=0.5, grad_var=2.0, noise_weight=3.0)


def steps(job, first, count=AFTER):
    return [job.step(first + number) for number in range(count)]


def everybodys(outcome):
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, outcome)
    return found


def raised(action):
    try:
        return action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


# What ranks do


def write(plan, optimizer, folder):
    job = Training(plan, optimizer)
    losses = steps(job, 0, BEFORE)
    job.save(folder / f"{plan}-{optimizer}", progress_after(BEFORE))
    return losses + steps(job, BEFORE)  # saving must not disturb the run that saves


def read(writer, reader, optimizer, folder):
    job = Training(reader, optimizer, seed=1)
    assert job.load(folder / f"{writer}-{optimizer}") == progress_after(BEFORE)
    return steps(job, BEFORE)


def later(folder):
    """save_later under FSDP2 while training goes on, twice without a wait between, then read back."""
    job = Training("fsdp2")
    losses = steps(job, 0, BEFORE)
    checkpoints = Checkpoints(folder)
    first = checkpoints.save_later(job.trainer.state(), progress_after(BEFORE))
    losses += steps(job, BEFORE)
    checkpoints.save_later(job.trainer.state(), progress_after(BEFORE + AFTER)).result()
    first_done = first.done()
    there = names(folder)
    (folder / "step-00000004" / "progress.json").unlink(missing_ok=True)
    dist.barrier()
    again = Training("fsdp2", seed=1)
    step = again.load(folder).step
    return first_done, there, step, losses[BEFORE:], steps(again, BEFORE)


def refused(folder):
    """Rank 1 alone may write files of 4 KB at most: what every rank says, and what is left; then it may again."""
    job = Training("fsdp2")
    job.step(0)
    job.save(folder, progress_after(1))
    job.step(1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    error = raised(lambda: job.save(folder, progress_after(2)))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    errors = everybodys(error)
    left = names(folder)
    dist.barrier()
    job.save(folder, progress_after(2))
    return errors, left, names(folder)


def damaged(folder):
    """Two checkpoints, the newer with a flipped bit in rank 1's file: both ranks take the older; then none is left."""
    job = Training("fsdp2", "sgd")
    for step in (1, 2):
        job.step(step - 1)
        job.save(folder, progress_after(step))
    outcomes = []
    for step in (2, 1):
        if dist.get_rank() == 0:
            flipped(folder / f"step-{step:08d}" / "rank-1.safetensors")
        dist.barrier()
        outcomes.append(everybodys(raised(lambda: job.load(folder).step)))
    return outcomes


def save_for_ever(folder):
    """Every step a checkpoint, in turns at once and later, from the newest there is; ends by being killed."""
    processes.die_with(os.getppid(), signal.SIGKILL)
    job, checkpoints = Training("ddp2"), Checkpoints(folder)
    progress = job.load(folder) or Progress()
    while True:
        job.step(progress.step)
        progress = progress_after(progress.step + 1)
        method = checkpoints.save_later if progress.step % 2 else checkpoints.save
        method(job.trainer.state(), progress)


def read_alone(folder):
    """What a lone reader loads, how often it had to pass one over, and how far that is from undisturbed training."""
    warned = []
    checkpoint._log.warning = lambda *args: warned.append(str(args))
    job, reference = Training("single", seed=1), Training("single")
    progress = job.load(folder)
    for number in range(progress.step):
        reference.step(number)
    return progress.step, warned, abs(job.step(progress.step) - reference.step(progress.step))


def newest(folder):
    return max((int(each.name[5:]) for each in folder.glob("step-*")), default=0) if folder.is_dir() else 0


def killed(folder):
    """kill -9 of a whole group that saves all the time, as it writes a file; after each what a reader finds."""
    moments = random.Random(0)
    found, partials = [], 0
    for _ in range(KILLS):
        before = newest(folder)
        with tempfile.TemporaryDirectory() as meeting:
            pids = groups.forked(2, [(save_for_ever, folder)], Path(meeting))
            until_s = time.monotonic() + 60
            while time.monotonic() < until_s and newest(folder) <= before + 1:
                time.sleep(0.01)
            time.sleep(moments.uniform(0, 0.05))
            # Not Path.glob, which fails if a folder is deleted meanwhile.
            while time.monotonic() < until_s and not glob.glob(".partial-*/*", root_dir=folder):
                pass
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            for pid in pids:
                os.waitpid(pid, 0)
            visible = newest(folder)
            partials += len(list(folder.glob(".partial-*")))
            (pid,) = groups.forked(1, [(read_alone, folder)], Path(meeting))
            os.waitpid(pid, 0)
            found.append((visible, *pickle.loads((Path(meeting) / "answers").read_bytes())[read_alone, folder]))
    return found, partials


# What is shown


def world(plan):
    return PLANS[plan].gpus


SGD = ("single", "fsdp2")
"""Plans between which a second optimizer is shown, too."""


def optimizers_between(writer, reader):
    return ("adamw", "sgd") if {writer, reader} <= set(SGD) else ("adamw",)


def readers_of(writer, thorough):
    """The lone process reads all plans, and all read it: each way to write and each to read."""
    return list(PLANS) if thorough or writer == "single" else ["single"]


SAVED = Path("saved")
KILLED, LATER, REFUSED, DAMAGED = ((case, Path(case.__name__)) for case in (killed, later, refused, damaged))


@pytest.fixture(scope="module")
def found(tmp_path_factory, request):
    """The results of all cases, which run once, however many processes run the tests."""
    writing, reading = {1: [], 2: [], 4: []}, {1: [KILLED], 2: [REFUSED, DAMAGED, LATER], 4: []}
    for writer in PLANS:
        writing[world(writer)] += [(write, writer, each, SAVED) for each in optimizers_between(writer, writer)]
        for reader in readers_of(writer, request.config.getoption("--thorough")):
            optimizers = optimizers_between(writer, reader)
            reading[world(reader)] += [(read, writer, reader, each, SAVED) for each in optimizers]
    return groups.run_once(tmp_path_factory, "checkpoints", writing, reading)


def single(found, optimizer):
    """Losses of the lone process."""
    return found[write, "single", optimizer, SAVED]


def largest_difference(one, other):
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("writer", PLANS)
def test_saving_disturbs_no_plan_and_every_reader_goes_on_as_if_uninterrupted(found, writer, request):
    for optimizer in optimizers_between(writer, writer):
        losses = found[write, writer, optimizer, SAVED]
        assert largest_difference(losses, single(found, optimizer)) < 1e-5, optimizer
    for reader in readers_of(writer, request.config.getoption("--thorough")):
        for optimizer in optimizers_between(writer, reader):
            losses = found[read, writer, reader, optimizer, SAVED]
            assert largest_difference(losses, single(found, optimizer)[BEFORE:]) < 1e-5, (reader, optimizer)


def test_saved_later_is_the_state_at_the_call(found):
    first_done, there, step, losses, resumed = found[LATER]
    assert first_done, "a second save_later is written after the first"
    assert there == ["step-00000002", "step-00000004"]
    assert step == 2
    assert largest_difference(resumed, losses) < 1e-5


def test_all_ranks_say_that_one_could_not_write(found):
    errors, left, afterwards = found[REFUSED]
    for each in errors:
        assert each.startswith("InputError")
        assert "File too large" in each
        assert "step-00000002" in each
    assert left == ["step-00000001"]
    assert afterwards == ["step-00000001", "step-00000002"]


def test_all_ranks_pass_over_the_same_damaged_checkpoint(found):
    older, (none, its_peer) = found[DAMAGED]
    assert older == [1, 1]
    assert none == its_peer
    assert none.startswith("InputError: no checkpoint in")
    assert "step-00000001 (the contents of rank-1.safetensors have changed" in none


def test_kill_9_while_a_checkpoint_is_written_leaves_whole_ones(found):
    kills, partials = found[KILLED]
    for visible, step, warned, difference in kills:
        assert (step, warned, difference < 1e-5) == (visible, [], True)
    loaded = [step for _, step, _, _ in kills]
    assert loaded == sorted(set(loaded)), "each life gets further"
    assert len(loaded) == KILLS
    assert partials > 0, "none was killed while it wrote: the test shows nothing"
