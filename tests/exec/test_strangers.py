"""Jobs as strangers write them, in synergy_exec/examples/ with a job file each: short, learning, alike under plans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import groups
import pytest
import torch

from synergy_exec import examples
from synergy_exec.job_file import JobFile, read_job_file
from synergy_exec.messages import PlanMessage
from synergy_exec.training import learning_rate
from synergy_exec.training.loading import load_job
from synergy_exec.training.progress import Progress
from synergy_exec.training.trainer import Trainer

FOLDER = Path(examples.__file__).parent
MOST_LINES = 80
SMALL: dict[str, dict[str, Any]] = {
    "nanogpt": {"tokens": 8, "width": 16, "depth": 2, "heads": 2, "learning_rate": 1e-4},
    "bert": {"words": 8, "hidden": 16, "learning_rate": 1e-4},
}
"""Arguments. Adam divides small gradients by smaller ones: at a low rate rounding stays rounding."""
QUICK = {"nanogpt": {"tokens": 32, "width": 64, "depth": 2}, "bert": {"words": 12, "topics": 4, "hidden": 32}}
BATCH, MICRO = 8, 2
ONE = PlanMessage(micro_batch=MICRO, accumulation=4)
TWO = {
    "ddp": PlanMessage(data=2, micro_batch=MICRO, accumulation=2),
    "fsdp": PlanMessage(data=2, zero=3, micro_batch=MICRO, accumulation=2),
    "pp": PlanMessage(pipeline=2, micro_batch=MICRO, accumulation=4),
    "tp": PlanMessage(tensor=2, micro_batch=MICRO, accumulation=4),
}
OFFERED = {"nanogpt": ("ddp", "fsdp", "pp", "tp"), "bert": ("ddp", "fsdp")}
STEPS = 2

Seen = tuple[float, float, dict[str, float]]
"""Of a step: loss, norm of the gradient, evaluation after it."""


def needs(name: str) -> None:
    if name == "bert":
        pytest.importorskip("transformers")


def file_of(name: str) -> JobFile:
    return read_job_file(FOLDER / f"{name}.yaml")


def train(
    name: str, plan: PlanMessage, folder: str, dropout: float = 0.0
) -> list[tuple[float, float, dict[str, float]]]:
    """Steps of a small one, from the folder's checkpoint on where there is one: losses, norms, evaluations."""
    job = load_job(file_of(name).job_class, {**SMALL[name], "dropout": 0.0})
    trainer = Trainer(job, plan)
    progress = trainer.load(Path(folder)) or Progress()
    found = []
    for _ in range(STEPS):
        rate = learning_rate.rate(job, BATCH, BATCH, None, float(progress.step), 100.0)
        result = trainer.step(progress.step, rate=rate)
        progress.step += 1
        found.append((result.loss, result.grad_norm, trainer.evaluate(progress.step)))
    trainer.save(Path(folder), progress)
    return found


@pytest.mark.parametrize("name", SMALL)
def test_an_example_is_short(name: str) -> None:
    assert len((FOLDER / f"{name}.py").read_text().splitlines()) <= MOST_LINES


@pytest.mark.parametrize("name", SMALL)
def test_an_example_learns_what_was_held_out(name: str) -> None:
    needs(name)
    file = file_of(name)
    job = load_job(file.job_class, QUICK[name])
    trainer = Trainer(job, PlanMessage(micro_batch=2 * file.initial_batch))
    before = trainer.evaluate(0)["loss"]
    for step in range(60):
        trainer.step(step, rate=learning_rate.rate(job, 16, 16, None, float(step), 80.0))
    after = trainer.evaluate(60)["loss"]
    assert after < 0.75 * before


@pytest.mark.parametrize("name", SMALL)
def test_an_example_trains_alike_through_all_plans_that_it_offers(name: str, tmp_path: Path) -> None:
    needs(name)
    cases = [(plan, "test_strangers:train", (name, TWO[plan], str(tmp_path / "chain"))) for plan in OFFERED[name]]
    answers = groups.run({2: cases}, timeout_s=240)
    through = [seen for plan in OFFERED[name] for seen in answers[plan]]
    alone = [seen for _ in OFFERED[name] for seen in train(name, ONE, str(tmp_path / "alone"))]
    for (loss, norm, metrics), (its_loss, its_norm, its_metrics) in zip(through, alone, strict=True):
        assert loss == pytest.approx(its_loss, abs=1e-5)
        assert norm == pytest.approx(its_norm, abs=1e-4)
        assert metrics == pytest.approx(its_metrics, abs=1e-5)
        assert 0 < metrics["loss"] < 10


def test_plans_that_the_bert_does_not_offer_are_refused_with_a_reason() -> None:
    needs("bert")
    from synergy_exec.training.admitted import refusal

    job = load_job(file_of("bert").job_class, SMALL["bert"])
    assert "a pipeline takes one tensor of inputs" in (refusal(job, TWO["pp"]) or "")
    assert "no tensor_plan" in (refusal(job, TWO["tp"]) or "")


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("name", SMALL)
def test_training_begins_with_weights_of_a_file(name: str, suffix: str, tmp_path: Path) -> None:
    """As what they were written from, by what an evaluation finds; by replicas too, whose seed is another."""
    needs(name)
    job, path = load_job(file_of(name).job_class, SMALL[name]), tmp_path / f"weights{suffix}"
    trained = Trainer(job, ONE)
    for step in range(3):
        trained.step(step, rate=100.0)
    (model,) = trained.parts
    if suffix == ".pt":
        torch.save(model.state_dict(), path)
    else:
        pytest.importorskip("safetensors.torch").save_file(model.state_dict(), path)
    expected = trained.evaluate(3)
    assert Trainer(job, ONE, seed=7).evaluate(0) != pytest.approx(expected, abs=1e-3)
    assert Trainer(job, ONE, seed=7, weights=path).evaluate(0) == expected
    case = ("fsdp", "test_strangers:begun", (name, TWO["fsdp"], str(path)))
    assert groups.run({2: [case]}, timeout_s=120)["fsdp"] == pytest.approx(expected, abs=1e-6)


def begun(name: str, plan: PlanMessage, weights: str) -> dict[str, float]:
    """What is found of weights that training begins with."""
    job = load_job(file_of(name).job_class, SMALL[name])
    return Trainer(job, plan, seed=8, weights=Path(weights)).evaluate(0)
