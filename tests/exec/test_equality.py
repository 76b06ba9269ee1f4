"""Every plan that is admitted trains what plain PyTorch trains in one process."""

from __future__ import annotations

from functools import cache

import equality_cases as cases
import groups
import pytest
import torch
from equality_cases import GLOBAL_BATCH, PLANS, SEED, STEPS, SgdGpt

from synergy_exec.messages import PlanMessage
from synergy_exec.training.admitted import PROVEN, kind
from synergy_exec.training.trainer import StepResult

TOLERANCE = 1e-5
CONTINUED = [
    PlanMessage(data=2, micro_batch=4, accumulation=2),
    PlanMessage(data=2, zero=3, micro_batch=4, accumulation=2),
    PlanMessage(pipeline=2, micro_batch=4, accumulation=4),
    PlanMessage(pipeline=2, interleave=2, micro_batch=4, accumulation=4),
]
"""Retuned in the middle."""
PIPELINE = PlanMessage(pipeline=2, micro_batch=4, accumulation=4)


@cache
def single(steps: tuple[tuple[int, int, float], ...]) -> list[tuple[float, float]]:
    """Losses and gradient norms of (step, batch, factor of the learning rate), without any of our code but the job."""
    job = SgdGpt()
    torch.manual_seed(SEED)
    model = job.build_model()
    results = []
    for number, batch, rate in steps:
        inputs, targets = job.batch(number, batch)
        loss = job.loss(model(inputs), targets)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        results.append((loss.item(), sum(float(each.double().square().sum()) for each in gradients) ** 0.5))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= job.learning_rate * rate * gradient
    return results


@cache
def squares_of_micro_batches(size: int) -> float:
    """Of the first step, the mean over micro-batches of the squared norm of their gradients."""
    job = SgdGpt()
    torch.manual_seed(SEED)
    model = job.build_model()
    inputs, targets = job.batch(0, GLOBAL_BATCH)
    squares = []
    for x, y in zip(inputs.split(size), targets.split(size), strict=True):
        gradients = torch.autograd.grad(job.loss(model(x), y), list(model.parameters()))
        squares.append(sum(float(each.double().square().sum()) for each in gradients))
    return sum(squares) / len(squares)


def difference(results: list[StepResult], steps: object = None) -> float:
    """The largest difference of a loss or a gradient norm from the single process."""
    expected = single(tuple(steps or ((number, GLOBAL_BATCH, 1.0) for number in range(STEPS))))
    assert len(results) == len(expected)
    pairs = zip(results, expected, strict=True)
    return max(max(abs(r.loss - loss), abs(r.grad_norm - norm)) for r, (loss, norm) in pairs)


def check(plans: list[PlanMessage], answers: dict[str, list[StepResult]]) -> None:
    """Losses, gradient norms and squares of plans are the single process's."""
    wrong = {}
    for plan in plans:
        results = answers[cases.name(plan)]
        if not difference(results) <= TOLERANCE:
            wrong[cases.name(plan)] = difference(results)
        squares = results[0].squares
        assert squares is not None
        assert (squares.small_batch, squares.big_batch) == (plan.micro_batch, GLOBAL_BATCH)
        assert squares.big == pytest.approx(results[0].grad_norm ** 2, rel=1e-6)
        if plan.micro_batch == GLOBAL_BATCH:
            assert squares.small is None
        else:
            expected = squares_of_micro_batches(plan.micro_batch)
            assert squares.small == pytest.approx(expected, rel=1e-6), cases.name(plan)
    assert not wrong


def of_world(world: int) -> list[PlanMessage]:
    return [plan for plan in PLANS if plan.world == world]


def simplest(plans: list[PlanMessage]) -> list[PlanMessage]:
    """Without replicas under every schedule, with them under none and under 1F1B."""
    return [plan for plan in plans if plan.data == 1 or kind(plan).schedule in ("", "1f1b")]


def joined(plans: list[PlanMessage]) -> list[PlanMessage]:
    """The others: replicas under the schedules that plans without replicas show."""
    return [plan for plan in plans if plan not in simplest(plans)]


def equality(plans: list[PlanMessage]) -> list[groups.Case]:
    return [(cases.name(plan), "equality_cases:train", (plan,)) for plan in plans]


def test_every_admitted_kind_is_among_the_plans() -> None:
    assert {kind(plan) for plan in PLANS} == PROVEN


def test_plans_of_one_and_two_ranks_equal_a_single_process_and_wrong_ones_do_not() -> None:
    doubled = [PlanMessage(micro_batch=16), PlanMessage(data=2, zero=2, micro_batch=8), PIPELINE]
    answers = groups.run(
        {
            1: [*equality(of_world(1)), ("doubled 0", "equality_cases:train_doubled", (doubled[0],))],
            2: [
                *equality(of_world(2)),
                *((f"doubled {at}", "equality_cases:train_doubled", (doubled[at],)) for at in (1, 2)),
                ("twice", "equality_cases:train_twice", (PIPELINE,)),
                ("unmeasured", "equality_cases:unmeasured", (PIPELINE,)),
                *((f"retuned {at}", "equality_cases:train_retuned", (each,)) for at, each in enumerate(CONTINUED)),
            ],
        },
        timeout_s=120,
    )
    check(of_world(1) + of_world(2), answers)
    for at in range(len(doubled)):
        first, *later = answers[f"doubled {at}"]
        assert abs(first.loss - single(((0, GLOBAL_BATCH, 1.0),))[0][0]) <= TOLERANCE
        assert difference([first, *later]) > 100 * TOLERANCE
    assert difference(answers["twice"]) > 100 * TOLERANCE
    (unmeasured,) = answers["unmeasured"]
    assert unmeasured.squares is None
    for at, plan in enumerate(CONTINUED):
        assert difference(answers[f"retuned {at}"], cases.RETUNED) <= TOLERANCE, plan
        sizes = [each.squares.big_batch for each in answers[f"retuned {at}"] if each.squares is not None]
        assert sizes == [batch for _, batch, _ in cases.RETUNED]


def test_plans_of_four_ranks_equal_a_single_process() -> None:
    plans = simplest(of_world(4))
    names = (
        "names",
        "equality_cases:parameter_names",
        (PlanMessage(data=2, pipeline=2, interleave=2, accumulation=2),),
    )
    answers = groups.run({4: [*equality(plans), names]}, timeout_s=180)
    check(plans, answers)
    whole = {name for name, _ in SgdGpt().build_model().named_parameters()}
    first, second, *others = answers["names"]
    assert sorted({*first, *others[0]}) == sorted(whole)
    assert first == second
    assert not set(first) & set(others[0])
    assert others[0] == others[1]


def test_plans_of_eight_ranks_equal_a_single_process() -> None:
    plans = simplest(of_world(8))
    check(plans, groups.run({8: equality(plans)}, timeout_s=240))


@pytest.mark.thorough  # replicas, and each schedule, by themselves: above
def test_plans_that_join_replicas_with_other_schedules_equal_a_single_process() -> None:
    four, eight = joined(of_world(4)), joined(of_world(8))
    assert {kind(plan) for plan in [*four, *eight]} | {kind(plan) for plan in simplest(PLANS)} == PROVEN
    check([*four, *eight], groups.run({4: equality(four), 8: equality(eight)}, timeout_s=240))
