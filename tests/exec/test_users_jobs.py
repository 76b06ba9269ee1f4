"""What a job may say beside its four methods trains alike under every plan, across changes of plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import groups
import pytest
import torch
import users_cases as cases
from users_cases import BATCH, CHAINS, MICRO, SEED, STEPS, TOTAL, Seen

from synergy_core.errors import InputError
from synergy_exec.messages import PlanMessage
from synergy_exec.training.admitted import refusal
from synergy_exec.training.job import TrainingJob
from synergy_exec.training.trainer import Trainer

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every job of CHAINS through its plans, run by run from checkpoint to checkpoint."""
    folder = tmp_path_factory.mktemp("chains")
    two, one = [], []
    for job, plans in CHAINS.items():
        for at, plan in enumerate(plans):
            case = (f"{job} {at}", "users_cases:run", (job, plan, str(folder / job)))
            (one if plan == "one" else two).append(case)
    two.append(("odd", "users_cases:refused", ("OddlyStreamed", "ddp")))
    two += [(f"resized {plan}", "users_cases:resized", (plan,)) for plan in ("ddp", "fsdp", "pp")]
    pieces = (("first", "paused", STEPS), ("second", "paused", STEPS), ("whole", "whole", 2 * STEPS))
    two += [
        (f"dropping {name}", "users_cases:run", ("Dropping", "pp", str(folder / where), steps))
        for name, where, steps in pieces
    ]
    return groups.run({2: two, 1: one}, timeout_s=300)


def chain(answers: dict[str, Any], job: str) -> list[Seen]:
    return [seen for at in range(len(CHAINS[job])) for seen in answers[f"{job} {at}"]]


def difference(one: list[Seen], other: list[Seen]) -> float:
    """The largest of losses, norms of gradients, and metrics."""
    assert len(one) == len(other)
    found = []
    for (loss, norm, metrics), (its_loss, its_norm, its_metrics) in zip(one, other, strict=True):
        assert metrics.keys() == its_metrics.keys() != set()
        found += [abs(loss - its_loss), abs(norm - its_norm)]
        found += [abs(value - its_metrics[name]) for name, value in metrics.items()]
    return max(found)


@pytest.mark.parametrize("job", CHAINS)
def test_a_job_through_all_its_plans_is_one_run_without_a_break(
    answers: dict[str, Any], job: str, tmp_path: Path
) -> None:
    """Nested batches, clipping, schedule and evaluation; BatchNorm; dropout; a stream of samples."""
    through = chain(answers, job)
    alone = cases.run(job, "one", str(tmp_path), STEPS * len(CHAINS[job]))
    assert difference(through, alone) <= TOLERANCE


def test_dropout_under_a_pipeline_goes_on_as_if_it_had_not_been_paused(answers: dict[str, Any]) -> None:
    """Though the first step of every run sends something through the stages to learn shapes."""
    paused = [*answers["dropping first"], *answers["dropping second"]]
    assert difference(paused, answers["dropping whole"]) <= TOLERANCE


def test_nested_batches_are_trained_clipped_and_scheduled_as_plain_torch_does(tmp_path: Path) -> None:
    job = cases.Masked()
    torch.manual_seed(SEED)
    model = job.build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: job.learning_rate_schedule(step, TOTAL))
    expected = []
    for step in range(6):
        inputs, targets = job.batch(step, BATCH)
        optimizer.zero_grad()
        loss = job.loss(model(**inputs), targets)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        schedule.step()
        expected.append((loss.item(), norm.item()))
    found = [(loss, norm) for loss, norm, _ in cases.run("Masked", "one", str(tmp_path / "masked"), 6)]
    for control in ("Unclipped", "Unscheduled"):
        other = [(loss, norm) for loss, norm, _ in cases.run(control, "one", str(tmp_path / control), 6)]
        assert torch.tensor(other).sub(torch.tensor(expected)).abs().max() > 100 * TOLERANCE
    assert torch.tensor(found).sub(torch.tensor(expected)).abs().max() <= TOLERANCE


def test_nested_outputs_are_of_single_precision_in_bfloat16_too() -> None:
    losses = [
        Trainer(cases.Masked(), cases.PLANS["one"], seed=SEED, bfloat16=each).step(0).loss for each in (False, True)
    ]
    assert losses[1] == pytest.approx(losses[0], abs=2e-2)
    assert losses[1] != losses[0]
    trainer = Trainer(cases.Masked(), cases.PLANS["one"], bfloat16=True)
    output = trainer.parts[0](**cases.Masked().batch(0, 2)[0])
    assert (output["scores"].dtype, output["sizes"][0].dtype) == (torch.float32, torch.float32)


def test_running_statistics_move_by_the_mean_over_the_micro_batches_of_a_step(tmp_path: Path) -> None:
    """As plain torch has them where each micro-batch begins with what the step began with."""
    job = cases.Normed()
    trainer = Trainer(job, cases.PLANS["one"], seed=SEED)
    (part,) = trainer.parts
    before = part.first_norm.running_mean.clone()
    first = part.first.weight.detach().clone(), part.first.bias.detach().clone()
    inputs, _ = job.batch(0, BATCH)
    means = [(each @ first[0].T + first[1]).mean(0) for each in inputs.split(MICRO)]
    trainer.step(0)
    assert torch.allclose(part.first_norm.running_mean, 0.9 * before + 0.1 * torch.stack(means).mean(0), atol=1e-6)
    assert int(part.first_norm.num_batches_tracked) == 1
    assert part.constant.tolist() == [float("-inf"), 1.0]
    trainer.evaluate(1)
    assert part.training
    assert int(part.first_norm.num_batches_tracked) == 1


def test_evaluation_is_the_mean_over_all_samples_whatever_the_batches() -> None:
    job = cases.Normed()
    trainer = Trainer(job, cases.PLANS["one"], seed=SEED)
    trainer.step(0)
    found = trainer.evaluate(1)
    (model,) = trainer.parts
    model.eval()
    with torch.no_grad():
        sums = [float(job.loss(model(x), y)) * len(x) for x, y in job.evaluation()]
    assert found["loss"] == pytest.approx(sum(sums) / 24, abs=1e-6)
    assert found["twice"] == pytest.approx(2 * sum(sums) / 24, abs=1e-6)


def test_a_batch_of_another_size_takes_the_next_samples_under_every_plan(answers: dict[str, Any]) -> None:
    alone = cases.resized("one")
    for plan in ("ddp", "fsdp", "pp"):
        assert answers[f"resized {plan}"] == pytest.approx(alone, abs=TOLERANCE), plan


def test_loaders_that_differ_between_ranks_are_found_out(answers: dict[str, Any]) -> None:
    assert "OddlyStreamed.loader() gives other samples on rank 1 than on rank 0, at step 1" in answers["odd"]


def test_what_a_pipeline_cannot_send_is_refused_before_the_start() -> None:
    reason = refusal(cases.Masked(), PlanMessage(pipeline=2, accumulation=2))
    assert reason == (
        "a pipeline takes one tensor of inputs and one of targets, and Masked.batch gives a dict; give tensors, or "
        "take pipeline 1 instead of 2"
    )
    assert refusal(cases.Masked(), PlanMessage(tensor=2)) is None
    assert refusal(cases.Normed(), PlanMessage(pipeline=2, accumulation=2)) is None


class Shorter(cases.Masked):
    """One of its tensors forgets a sample."""

    def batch(self, step: int, size: int) -> tuple[Any, Any]:
        inputs, targets = super().batch(step, size)
        return {**inputs, "mask": inputs["mask"][1:]}, targets


class Unready(cases.Normed):
    """It is to be evaluated, on nothing."""

    def evaluation(self) -> list[Any]:
        return []


class Lopsided(cases.Normed):
    """Its evaluation has fewer targets than inputs."""

    def evaluation(self) -> list[Any]:
        inputs, targets = self.batch(0, 4)
        return [(inputs, targets[1:])]


@pytest.mark.parametrize(
    ("job", "says"),
    [
        (Unready(), "Unready: evaluate_every is 1, and evaluation() gives no batches; give some"),
        (Lopsided(), r"Lopsided.evaluation\(\) gave tensors of 3 or 4 rows; give inputs and targets as many"),
    ],
)
def test_what_cannot_be_evaluated_is_said(job: TrainingJob, says: str) -> None:
    with pytest.raises(InputError, match=says.replace("()", r"\(\)") if "\\" not in says else says):
        Trainer(job, PlanMessage(micro_batch=2)).evaluate(1)


def test_a_tensor_of_another_length_is_an_error() -> None:
    with pytest.raises(InputError, match=r"Shorter.batch\(0, 4\) gave 3 or 4 inputs and 4 targets; give 4 of each"):
        Trainer(Shorter(), PlanMessage(micro_batch=4)).step(0)


def test_replicas_draw_different_numbers_and_ranks_that_split_one_the_same() -> None:
    """By the loss of the first step: that of both micro-batches in one process."""
    job, plan = cases.Dropping(), PlanMessage(micro_batch=4, accumulation=2)
    whole = Trainer(job, plan, seed=SEED).step(0).loss
    assert whole != Trainer(job, PlanMessage(micro_batch=8), seed=SEED).step(0).loss
    assert whole == Trainer(job, plan, seed=SEED).step(0).loss
    assert whole != Trainer(job, plan, seed=SEED).step(1).loss
