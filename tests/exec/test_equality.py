"""Every plan that is admitted trains what plain PyTorch trains in one process."""

import itertools
from functools import cache, partial

import groups
import pytest
import torch

from synergy_core.performance.planner.plan import Plan
from synergy_exec.examples.gpt import Gpt
from synergy_exec.training import trees
from synergy_exec.training.admitted import plan_refusal
from synergy_exec.training.trainer import Trainer

GLOBAL_BATCH = 16
SEED = 3
STEPS = 2


class SgdGpt(Gpt):
    """A wrong scale of the gradient shows under SGD; Adam divides it away."""

    def __init__(self):
        super().__init__(hidden=16, depth=4, heads=2, tokens=8, vocabulary=32, learning_rate=0.5)

    def build_optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=self.learning_rate)


class DoublingGpt(SgdGpt):
    """A control: gradients are twice what they should be, the loss that is reported is not."""

    def loss(self, output, target):
        loss = super().loss(output, target)
        return 2 * loss - loss.detach()


class PreciseGpt(SgdGpt):
    """A GPT in double precision, in which plans differ by far less than single precision can show."""

    def build_model(self):
        return super().build_model().double()


def smallest(data, zero, tensor, pipeline, interleave):
    """The plan of a kind with the fewest ranks; where layers are split, with the fewest micro-batches: it is slow."""
    accumulation = 2 if tensor > 1 else 4
    sizes = {"micro_batch": GLOBAL_BATCH // data // accumulation, "accumulation": accumulation}
    return Plan(data=data, zero=zero, tensor=tensor, pipeline=pipeline, interleave=interleave, **sizes)


KINDS = [smallest(*each) for each in itertools.product((1, 2), (0, 1, 2, 3), (1, 2), (1, 2), (1, 2))]
PLANS = [
    *(plan for plan in KINDS if plan_refusal(plan) is None),
    Plan(micro_batch=GLOBAL_BATCH),
    *(Plan(data=4, zero=zero, micro_batch=4) for zero in (0, 3)),
    Plan(pipeline=4, micro_batch=2, accumulation=8),
]
"""One of every kind that is admitted, and some of other degrees."""


def train(plan, job=SgdGpt):
    """Steps of the small GPT under a plan."""
    trainer = Trainer(job(), plan, seed=SEED)
    return [trainer.step(number) for number in range(STEPS)]


RETUNED = [(0, 16, 1.0), (1, 16, 1.0), (2, 32, 0.5), (3, 32, 0.5), (4, 16, 1.0)]
"""Step, global batch, factor of the learning rate."""


def train_retuned(plan, compiled=False):
    """The steps of RETUNED, the larger batch by larger micro-batches and half as many more of them."""
    trainer = Trainer(SgdGpt(), plan, seed=SEED, compiled=compiled)
    results = []
    for number, batch, rate in RETUNED:
        if batch != trainer.plan.global_batch:
            trainer.retune(plan.micro_batch * batch // GLOBAL_BATCH, plan.accumulation)
        results.append(trainer.step(number, rate=rate))
        if number == 2:
            trainer.retune(plan.micro_batch, 2 * plan.accumulation)
    return results


def train_compiled(plan):
    """The same with compiled blocks, by the compiler's first half, which needs no other compiler; how many graphs."""
    compiled, torch.compile = torch.compile, partial(torch.compile, backend="aot_eager")
    torch._dynamo.reset()
    try:
        return train_retuned(plan, compiled=True), torch._dynamo.utils.counters["stats"]["unique_graphs"]
    finally:
        torch.compile = compiled


def moved_rows(plan):
    """The most samples that a step moves to the device at once."""
    rows, moved = [], trees.moved
    trees.moved = lambda tree, device: rows.extend(map(len, trees.tensors(tree))) or moved(tree, device)
    try:
        Trainer(SgdGpt(), plan, seed=SEED).step(0)
    finally:
        trees.moved = moved
    return max(rows)


# What plain PyTorch trains

TOLERANCE = 1e-5
CONTINUED = [
    Plan(data=2, micro_batch=4, accumulation=2),
    Plan(data=2, zero=3, micro_batch=4, accumulation=2),
    Plan(pipeline=2, micro_batch=4, accumulation=4),
    Plan(pipeline=2, interleave=2, micro_batch=4, accumulation=4),
]
"""Retuned in the middle."""
PIPELINE = Plan(pipeline=2, micro_batch=4, accumulation=4)


@cache
def single(steps, kind=SgdGpt):
    """Losses and gradient norms of (step, batch, factor of the learning rate), without any of our code but the job."""
    job = kind()
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
def squares_of_micro_batches(size):
    """Mean over the micro-batches of the first step of the squared norm of their gradients."""
    job = SgdGpt()
    torch.manual_seed(SEED)
    model = job.build_model()
    inputs, targets = job.batch(0, GLOBAL_BATCH)
    squares = []
    for x, y in zip(inputs.split(size), targets.split(size), strict=True):
        gradients = torch.autograd.grad(job.loss(model(x), y), list(model.parameters()))
        squares.append(sum(float(each.double().square().sum()) for each in gradients))
    return sum(squares) / len(squares)


def difference(results, steps=None, kind=SgdGpt):
    """The largest difference of a loss or a gradient norm from the single process."""
    expected = single(tuple(steps or ((number, GLOBAL_BATCH, 1.0) for number in range(STEPS))), kind)
    assert len(results) == len(expected)
    pairs = zip(results, expected, strict=True)
    return max(max(abs(r.loss - loss), abs(r.grad_norm - norm)) for r, (loss, norm) in pairs)


def check(plans, answers):
    """Losses, gradient norms and squares of plans are the single process's."""
    wrong = {}
    for plan in plans:
        results = answers[train, plan]
        if not difference(results) <= TOLERANCE:
            wrong[plan] = difference(results)
        squares = results[0].squares
        assert (squares.small_batch, squares.big_batch) == (plan.micro_batch, GLOBAL_BATCH)
        assert squares.big == pytest.approx(results[0].grad_norm ** 2, rel=1e-6)
        if plan.micro_batch == GLOBAL_BATCH:
            assert squares.small is None
        else:
            expected = squares_of_micro_batches(plan.micro_batch)
            assert squares.small == pytest.approx(expected, rel=1e-6), plan
    assert not wrong


def of_world(world):
    return [plan for plan in PLANS if plan.gpus == world]


def simplest(plans):
    """Without replicas under every schedule, with them under none and under 1F1B; ZeRO 2 of two ranks alone."""
    return [each for each in plans if each.data == 1 or (each.interleave == 1 and not (each.zero == 2 < each.gpus))]


def test_plans_of_one_and_two_ranks_equal_a_single_process_and_wrong_ones_do_not():
    doubled = [
        (train, plan, DoublingGpt) for plan in (Plan(micro_batch=16), Plan(data=2, zero=2, micro_batch=8), PIPELINE)
    ]
    continued = [(train_retuned, plan) for plan in CONTINUED]
    two = [*((train, plan) for plan in of_world(2)), *doubled[1:], *continued]
    answers = groups.run({1: [*((train, plan) for plan in of_world(1)), doubled[0]], 2: two})
    check(of_world(1) + of_world(2), answers)
    for case in doubled:
        first, *later = answers[case]
        assert abs(first.loss - single(((0, GLOBAL_BATCH, 1.0),))[0][0]) <= TOLERANCE
        assert difference([first, *later]) > 100 * TOLERANCE
    for case in continued:
        assert difference(answers[case], RETUNED) <= TOLERANCE, case
        sizes = [each.squares.big_batch for each in answers[case] if each.squares is not None]
        assert sizes == [batch for _, batch, _ in RETUNED]


def test_compiled_blocks_train_the_same_also_after_a_retune():
    one, *two = [(train_compiled, plan) for plan in (Plan(micro_batch=8, accumulation=2), *CONTINUED)]
    answers = groups.run({1: [one], 2: two})
    for case in (one, *two):
        results, graphs = answers[case]
        assert difference(results, RETUNED) <= TOLERANCE, case
        assert graphs > 0


def test_samples_go_to_the_device_one_micro_batch_at_a_time():
    one, two = (moved_rows, Plan(micro_batch=4, accumulation=4)), (moved_rows, PIPELINE)
    answers = groups.run({1: [one], 2: [two]})
    assert answers[one] == answers[two] == 4


def test_model_in_double_precision_trains_under_every_kind_of_plan():
    one, *two = [(train, plan, PreciseGpt) for plan in (Plan(micro_batch=16), *simplest(of_world(2)))]
    answers = groups.run({1: [one], 2: two})
    assert max(difference(answers[case], kind=PreciseGpt) for case in (one, *two)) <= 1e-6


@pytest.mark.parametrize("world", [4, pytest.param(8, marks=pytest.mark.thorough)])
def test_plans_of_more_ranks_equal_a_single_process(world, request):
    """Four ranks join any two ways of splitting, eight all three."""
    plans = of_world(world) if world == 4 and request.config.getoption("--thorough") else simplest(of_world(world))
    assert plans
    check(plans, groups.run({world: [(train, plan) for plan in plans]}))
