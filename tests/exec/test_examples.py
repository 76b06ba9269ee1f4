"""The examples learn, and train alike under every plan that they offer; one of them as a stranger writes jobs."""

from pathlib import Path

import groups
import numpy as np
import pytest
import torch
import yaml
from exec.saved import PLANS
from safetensors.torch import save_file

from synergy_core.planner.plan import Plan
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
    return load_job(NANOGPT.job_class, given)


SMALL = {
    "mlp": lambda: Mlp(width=16, features=8, classes=4),
    "cnn": lambda: Cnn(channels=4, side=8),
    "gpt": lambda: Gpt(hidden=16, heads=2, tokens=8, vocabulary=32),
    "nanogpt": nanogpt,
}


def train(name, plan, bfloat16=False):
    """Two steps of a small one, with its own optimizer: losses, norms of gradients, what an evaluation finds."""
    job = SMALL[name]()
    trainer = Trainer(job, PLANS[plan], bfloat16=bfloat16)
    first, second = trainer.step(0), trainer.step(1)
    evaluated = trainer.evaluate(2) if job.evaluate_every else {}
    return [first.loss, second.loss, first.grad_norm, second.grad_norm, *evaluated.values()]


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
    two += [(train, "gpt", plan, True) for plan in ("fsdp2", "pp2")]
    return groups.run_once(tmp_path_factory, "examples", {2: two})


@pytest.mark.parametrize("job", OFFERED)
def test_every_example_trains_alike_under_the_plans_it_offers(answers, job):
    expected = np.array(train(job, "single"))
    assert np.isfinite(expected).all()
    for plan in OFFERED[job]:
        assert answers[train, job, plan] == pytest.approx(expected, abs=1e-4 if job == "nanogpt" else 1e-5), plan
    for plan in ("fsdp2", "pp2") if job == "gpt" else ():
        losses = answers[train, "gpt", plan, True][:2]
        assert losses == pytest.approx(expected[:2], abs=2e-2), plan
        assert losses != pytest.approx(expected[:2], abs=1e-5), f"{plan}: is it?"


SHIPPED = {
    name: load_job(yaml.safe_load(path.read_text(encoding="utf-8"))["class"], {}) for name, path in models().items()
}
"""As their classes are without arguments: small."""


@pytest.mark.parametrize("job", SHIPPED.values(), ids=SHIPPED)
def test_an_example_learns(job):
    trainer = Trainer(job, Plan(micro_batch=32))
    losses = [trainer.step(number).loss for number in range(40)]
    assert sum(losses[-5:]) / 5 < losses[0] / 2


def test_a_strangers_job_learns_what_was_held_out():
    job = load_job(NANOGPT.job_class, {"tokens": 32, "width": 64, "depth": 2})
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
    """What replicas find of weights that training begins with."""
    return Trainer(nanogpt(), PLANS["fsdp2"], seed=8, weights=weights).evaluate(0)
