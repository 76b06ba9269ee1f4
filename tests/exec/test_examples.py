"""The examples learn, and train alike under every plan that they offer; one of them as a stranger writes jobs."""

import dataclasses
from pathlib import Path

import groups
import numpy as np
import pytest
import torch
import yaml
from exec.saved import PLANS
from safetensors.torch import save_file
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from synergy_core.performance.planner.plan import Plan
from synergy_exec import examples
from synergy_exec.examples.cnn import Cnn
from synergy_exec.examples.gpt import Gpt
from synergy_exec.examples.mlp import Mlp
from synergy_exec.job_file import read_job_file
from synergy_exec.training import noise
from synergy_exec.training.loading import load_job
from synergy_exec.training.trainer import Trainer
from synergy_exec.workload import models

NANOGPT = read_job_file(Path(examples.__file__).with_name("nanogpt.yaml"))
"""The example that is written like a user's own job, with a job file."""


def nanogpt():
    """A small model. Its learning rate is low because Adam magnifies rounding errors of small gradients."""
    given = {"tokens": 8, "width": 16, "depth": 2, "heads": 2, "learning_rate": 1e-4, "dropout": 0.0}
    return load_job(NANOGPT.trained.job_class, given)


SMALL = {
    "mlp": lambda: Mlp(width=16, features=8, classes=4),
    "cnn": lambda: Cnn(channels=4, side=8),
    "gpt": lambda: Gpt(hidden=16, heads=2, tokens=8, vocabulary=32),
    "nanogpt": nanogpt,
}


def train(name, plan, precision="fp32"):
    """Two steps of a small one, with its own optimizer: losses, norms of gradients, what an evaluation finds."""
    job = SMALL[name]()
    trainer = Trainer(job, PLANS[plan], precision=precision)
    first, second = trainer.step(0), trainer.step(1)
    evaluated = trainer.evaluate(2) if job.evaluate_every else {}
    return [first.loss, second.loss, first.grad_norm, second.grad_norm, *evaluated.values()]


def alive(plan):
    """Bytes of the weights of a model of 1.6 MB in bfloat16 that a forward pass keeps for the backward pass."""
    job = Gpt(hidden=128, heads=2, tokens=8, vocabulary=32)
    trainer = Trainer(job, PLANS[plan], precision="bf16")
    sizes = {each.numel() for each in Gpt(hidden=128, heads=2, tokens=8, vocabulary=32).build_model().parameters()}
    kept = []

    def keep(tensor):
        if tensor.dtype == torch.bfloat16 and tensor.numel() in sizes and tensor.dim() == 2:
            kept.append(tensor)
        return tensor

    inputs, targets = job.batch(0, 2)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = job.loss(trainer._modules[0](inputs), targets)
    bytes_alive = sum(each.untyped_storage().nbytes() for each in kept)
    loss.backward()
    return len(kept), bytes_alive


def plainly_sharded(steps):
    """Losses of plain PyTorch: FSDP2 in bfloat16 over two ranks, each on its half of the same batches."""
    job, rank = SMALL["gpt"](), torch.distributed.get_rank()
    torch.manual_seed(0)
    model = job.build_model()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in model.get_submodule(job.blocks).children():
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=dataclasses.replace(policy, output_dtype=torch.float32))
    optimizer, losses, plan = job.build_optimizer(model.parameters()), [], PLANS["fsdp2"]
    for step in range(steps):
        optimizer.zero_grad()
        inputs, targets = job.batch(step, plan.global_batch)
        half = plan.global_batch // 2
        own = slice(rank * half, (rank + 1) * half)
        loss = job.loss(model(inputs[own]), targets[own])
        loss.backward()
        optimizer.step()
        torch.distributed.all_reduce(loss)
        losses.append(float(loss) / 2)
    return losses


OFFERED = {
    "mlp": ("ddp2", "pp2", "tp2"),
    "cnn": ("fsdp2", "pp2"),
    "gpt": ("pp2", "tp2"),
    "nanogpt": ("pp2", "tp2"),
}
"""Each model is cut by stages and by layers, if it can be; replicas know nothing of what a model is made of."""


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    two = [(train, job, plan) for job in OFFERED for plan in OFFERED[job]]
    two += [(train, "gpt", plan, "bf16") for plan in ("fsdp2", "pp2")]
    two += [(alive, "fsdp2"), (alive, "ddp2"), (plainly_sharded, 2)]
    return groups.run_once(tmp_path_factory, "examples", {2: two})


@pytest.mark.parametrize("job", OFFERED)
def test_every_example_trains_alike_under_the_plans_it_offers(answers, job):
    expected = np.array(train(job, "single"))
    assert np.isfinite(expected).all()
    for plan in OFFERED[job]:
        assert answers[train, job, plan] == pytest.approx(expected, abs=1e-4 if job == "nanogpt" else 1e-5), plan
    for plan in ("fsdp2", "pp2") if job == "gpt" else ():
        losses = answers[train, "gpt", plan, "bf16"][:2]
        assert losses == pytest.approx(expected[:2], abs=2e-2), plan
        assert losses != pytest.approx(expected[:2], abs=1e-5), f"{plan}: is it?"


def test_sharded_weights_in_bfloat16_are_not_kept_for_the_backward_pass(answers):
    count, bytes_alive = answers[alive, "fsdp2"]
    assert count
    assert bytes_alive == 0
    assert answers[alive, "ddp2"][1] > 1e5, "autocast keeps its copies: is this what was measured?"


def test_bfloat16_under_fsdp_is_plain_pytorchs(answers):
    # Gradients are added up over another number of micro-batches; bfloat16 has 8 bits.
    assert answers[train, "gpt", "fsdp2", "bf16"][:2] == pytest.approx(answers[plainly_sharded, 2], rel=2**-8)


SHIPPED = {
    name: load_job(yaml.safe_load(path.read_text(encoding="utf-8"))["class"], {}) for name, path in models().items()
}
"""The examples' classes without arguments, which are small."""


@pytest.mark.parametrize("job", SHIPPED.values(), ids=SHIPPED)
def test_an_example_learns(job):
    trainer = Trainer(job, Plan(micro_batch=32))
    losses = [trainer.step(number).loss for number in range(40)]
    assert sum(losses[-5:]) / 5 < losses[0] / 2


def test_a_strangers_job_learns_what_was_held_out():
    job = load_job(NANOGPT.trained.job_class, {"tokens": 32, "width": 64, "depth": 2})
    trainer = Trainer(job, Plan(micro_batch=2 * NANOGPT.initial_batch))
    before = trainer.evaluate(0)["loss"]
    for step in range(60):
        trainer.step(step, rate=noise.learning_rate_scale(job, 16, 16, None, float(step), 80.0))
    assert trainer.evaluate(60)["loss"] < 0.75 * before


@pytest.mark.parametrize(("suffix", "save"), [(".pt", torch.save), (".safetensors", save_file)])
def test_training_begins_with_weights_of_a_file(suffix, save, tmp_path):
    """As what they were written from, by what an evaluation finds; by replicas too, whose seed is another."""
    job, path = nanogpt(), tmp_path / f"weights{suffix}"
    trained = Trainer(job, PLANS["single"])
    for step in range(3):
        trained.step(step, rate=100.0)
    save(trained.parts[0].state_dict(), path)
    expected = trained.evaluate(3)
    assert Trainer(job, PLANS["single"], seed=7).evaluate(0) != pytest.approx(expected, abs=1e-3)
    assert Trainer(job, PLANS["single"], seed=7, weights=path).evaluate(0) == expected
    case = (begun, path)
    assert groups.run({2: [case]})[case] == pytest.approx(expected, abs=1e-6)


def begun(weights):
    """Evaluates replicas whose training begins with these weights."""
    return Trainer(nanogpt(), PLANS["fsdp2"], seed=8, weights=weights).evaluate(0)
