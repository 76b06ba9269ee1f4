"""A rank begins with its part of a model, and with the numbers that a single process would draw."""

import logging
from pathlib import Path

import groups
import pytest
import torch
from exec.pretended import refuses
from exec.real import Controller, log_of
from exec.saved import PLANS
from test_users_jobs import WIDTH, Normed, Tied
from torch import distributed, nn
from torch.distributed.tensor import DTensor

from synergy_core.performance.planner.plan import Plan
from synergy_exec.training.checkpoint import Checkpoints
from synergy_exec.training.integrity import Progress
from synergy_exec.training.meta_model import on_meta_device
from synergy_exec.training.trainer import Trainer

SEED, STEPS = 7, 2


class Reading(Normed):
    """It computes with what it has drawn."""

    def change(self, model):
        model.layers[0].again = float(model.first.weight.sum())


class Keeping(Normed):
    """A tensor that is no buffer."""

    def change(self, model):
        model.shifts = [torch.randn(WIDTH)]
        model.last_norm.register_forward_hook(lambda _, __, output: output + model.shifts[0])


class Other(Normed):
    """It looks where it is made."""

    def change(self, model):
        if not model.first.weight.is_meta:
            model.last_norm = nn.LayerNorm(WIDTH)


WHOLE = {
    Reading: "its numbers are read as it is built (RuntimeError",
    Keeping: "it keeps tensors that are neither",
    Other: "its structure differs when it is built on the meta device",
}
"""Jobs whose model every rank makes whole, and why."""
JOBS = {each.__name__: each for each in (Normed, Tied, *WHOLE)}


def numbers(parts):
    """All tensors of these parts that have a name, whole."""
    found = {}
    for part in parts:
        for name, each in [*part.named_parameters(remove_duplicate=False), *part.named_buffers(remove_duplicate=False)]:
            found[name] = (each.full_tensor() if isinstance(each, DTensor) else each).detach().clone()
    return found


def begin(job, plan, again):
    """What training begins with, on all ranks together, the losses of some steps, and what rank 0 was told.

    again: from the checkpoint that the job has saved.
    """
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("synergy_exec.training.initial")
    logger.addHandler(handler)
    trainer = Trainer(JOBS[job](), PLANS[plan], seed=SEED, begun=again)
    first = trainer.load(Checkpoints(Path(job))).step if again else 0
    logger.removeHandler(handler)
    every = [numbers(trainer.parts)]
    if distributed.is_initialized():
        every *= distributed.get_world_size()
        distributed.all_gather_object(every, every[0])
    together = {name: each for one in every for name, each in one.items()}
    return together, [trainer.step(first + number).loss for number in range(STEPS)], said


def save_two_steps(job):
    trainer = Trainer(JOBS[job](), PLANS["single"], seed=SEED)
    for number in range(2):
        trainer.step(number)
    Checkpoints(Path(job)).save(trainer.state(), Progress(step=2, samples=8, work=2.0))


def plans_of(job):
    if not JOBS[job].blocks:
        return ["fsdp2", "zero2"]
    return [name for name, plan in PLANS.items() if plan.gpus == 2] if job == "Normed" else ["fsdp2", "tp2", "pp2"]


SAVED = ("Normed", "Tied")
BEGINNINGS = [*((job, False) for job in JOBS), *((job, True) for job in SAVED)]
"""Pairs of a job and whether it continues from a checkpoint."""


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    one = [(save_two_steps, job) for job in SAVED]
    one += [(begin, job, "single", again) for job, again in BEGINNINGS]
    two = [(begin, job, plan, again) for job, again in BEGINNINGS for plan in plans_of(job)]
    return groups.run_once(tmp_path_factory, "large-begun", {1: one, 2: two})


@pytest.mark.parametrize(("job", "again"), BEGINNINGS)
def test_every_plan_begins_with_what_one_process_has(begun, job, again):
    """Constants too that are in no checkpoint."""
    alone, losses, _ = begun[begin, job, "single", again]
    for plan in plans_of(job):
        found, its_losses, said = begun[begin, job, plan, again]
        assert found.keys() == alone.keys()
        assert [name for name, each in alone.items() if not torch.equal(found[name], each)] == []
        assert its_losses == pytest.approx(losses, abs=2e-5), plan
        reason = WHOLE.get(JOBS[job], "") if plan != "ddp2" else ""
        assert len(said) == bool(reason), plan
        assert all(reason in each for each in said), plan


def test_making_a_model_without_numbers_draws_none():
    torch.manual_seed(1)
    expected = torch.rand(())
    torch.manual_seed(1)
    made = on_meta_device(Normed())
    assert torch.rand(()) == expected
    assert all(each.is_meta for each in made.model.parameters())


def test_a_checkpoint_that_has_gone_is_an_error_where_numbers_were_to_come_from_it(tmp_path):
    trainer = Trainer(Normed(), PLANS["single"], begun=True)
    refuses("there is no checkpoint, and there was one", trainer.load, Checkpoints(tmp_path))


def test_workers_draw_numbers_once_and_none_where_a_checkpoint_has_them(tmp_path):
    with Controller(tmp_path) as controller:
        controller.start_agent(slots=2)
        plan = Plan(data=2, zero=3, micro_batch=4)
        first = controller.launch("Odd", {"way": "saying", "pause_s": 0.02}, world=2, plan=plan, work=1e6)
        controller.reached(first, 3)
        controller.stop(first)
        work = controller.saved(first).work + 2
        second = controller.done("Odd", {"way": "saying"}, world=2, plan=plan, work=work, folder=first.folder)
        made = [sorted(line for line in log_of(each).splitlines() if "made" in line) for each in (first, second)]
        # Before the first start one rank builds it once more, to see whether the plan is admitted.
        assert made == [["made on cpu", *3 * ["made on meta"]], 2 * ["made on meta"]]
