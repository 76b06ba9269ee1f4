"""Every kind of plan trains in 16 bits what plain PyTorch trains under the same casts, and float16 scales its loss."""

import itertools
from functools import cache

import groups
import numpy as np
import pytest
import torch
from exec.test_equality import GLOBAL_BATCH, SEED, SgdGpt, smallest
from torch import nn
from torch.func import functional_call

from synergy_core.errors import InputError
from synergy_core.performance.planner.plan import Plan
from synergy_exec.training import precision
from synergy_exec.training.checkpoint import Checkpoints
from synergy_exec.training.integrity import Progress
from synergy_exec.training.job import TrainingJob
from synergy_exec.training.precision import LOW, LossScale
from synergy_exec.training.trainer import Trainer

STEPS = 3
KINDS = {
    "one rank": smallest(1, 0, 1, 1, 1),
    "ddp": smallest(2, 0, 1, 1, 1),
    "zero 2": smallest(2, 2, 1, 1, 1),
    "zero 3": smallest(2, 3, 1, 1, 1),
    "pipeline": smallest(1, 0, 1, 2, 1),
    "interleaved": smallest(1, 0, 1, 2, 2),
    "tensor": smallest(1, 0, 2, 1, 1),
    "ddp and pipeline": smallest(2, 0, 1, 2, 1),
    "zero 3 and pipeline": smallest(2, 3, 1, 2, 1),
    "zero 3 and tensor": smallest(2, 3, 2, 1, 1),
}


def train(kind, form):
    """Loss, norm of the gradient and whether it was skipped, of each step."""
    trainer = Trainer(SgdGpt(), KINDS[kind], seed=SEED, precision=form)
    return [(each.loss, each.grad_norm, each.skipped) for each in map(trainer.step, range(STEPS))]


@cache
def plain(kind, form):
    """The same by one process of plain PyTorch: autocast casts, under FSDP's policy after every weight was cast, and
    what a stage of a pipeline sends is cast. With a GradScaler in float16.
    """
    plan, low, job = KINDS[kind], LOW[form], SgdGpt()
    torch.manual_seed(SEED)
    model = job.build_model()
    optimizer = job.build_optimizer(model.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=form == "fp16")
    stages, layers = plan.pipeline * plan.interleave, list(model.layers)
    for end in range(1, stages):
        layers[len(layers) * end // stages - 1].register_forward_hook(lambda _module, _inputs, sent: sent.to(low))
    results = []
    for number in range(STEPS):
        optimizer.zero_grad()
        inputs, targets = job.batch(number, GLOBAL_BATCH)
        total = 0.0
        for x, y in zip(inputs.split(plan.micro_batch), targets.split(plan.micro_batch), strict=True):
            gathered = {name: each.to(low) if plan.zero else each for name, each in model.named_parameters()}
            with torch.autocast("cpu", low):
                output = functional_call(model, gathered, x)
            loss = job.loss(output.float(), y) / (GLOBAL_BATCH // plan.micro_batch)
            scaler.scale(loss).backward()
            total += loss.item()
        scaler.unscale_(optimizer)
        norm = sum(float(each.grad.double().square().sum()) for each in model.parameters()) ** 0.5
        scaler.step(optimizer)
        scaler.update()
        results.append((total, norm))
    return results


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    several = {world: [] for world in (2, 4)}
    for kind, form in itertools.product(KINDS, LOW):
        if KINDS[kind].gpus > 1:
            several[KINDS[kind].gpus].append((train, kind, form))
    several[2] += [(mixed, kind, form) for kind in ("ddp", "zero 2", "zero 3") for form in LOW]
    several[2] += [(copies, "pipeline"), (scaled, "zero 3"), (scaled, "pipeline")]
    found = groups.run_once(tmp_path_factory, "precision", *({world: cases} for world, cases in several.items()))
    return found | {(train, "one rank", form): train("one rank", form) for form in LOW}


@pytest.mark.parametrize(("kind", "form"), [*itertools.product(KINDS, LOW)])
def test_a_plan_in_16_bits_trains_as_plain_pytorch_does(answers, kind, form):
    found = answers[train, kind, form]
    expected = plain(kind, form)
    epsilon = torch.finfo(LOW[form]).eps
    assert not any(skipped for _, _, skipped in found)
    assert [loss for loss, _, _ in found] == pytest.approx([loss for loss, _ in expected], rel=epsilon)
    assert [norm for _, norm, _ in found] == pytest.approx([norm for _, norm in expected], rel=4 * epsilon)


@pytest.mark.parametrize("form", LOW)
def test_it_does_compute_in_16_bits(answers, form):
    exact = train("one rank", "fp32")
    for kind in KINDS:
        assert answers[train, kind, form][-1] != pytest.approx(exact[-1], rel=1e-6), kind


class Mixed(nn.Module):
    """Meets float32 in its forward pass: running statistics, a buffer and a mask."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.register_buffer("offset", torch.ones(8))

    def forward(self, x):
        return self.last((self.norm(self.first(x)) + self.offset) * torch.ones(8))


class MixedJob(TrainingJob):
    evaluate_every = 1

    def build_model(self):
        return Mixed()

    def build_optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=0.1)

    def batch(self, number, size):
        drawn = torch.Generator().manual_seed(number)
        return torch.randn(size, 8, generator=drawn), torch.randint(4, (size,), generator=drawn)

    def loss(self, output, target):
        return nn.functional.cross_entropy(output, target)

    def evaluation(self):
        yield self.batch(9, GLOBAL_BATCH)

    def metrics(self, output, target):
        return {"loss": self.loss(output, target)}


def mixed(kind, form):
    trainer = Trainer(MixedJob(), KINDS[kind], seed=SEED, precision=form)
    return [*(trainer.step(number).loss for number in range(STEPS)), trainer.evaluate(STEPS)["loss"]]


@pytest.mark.parametrize("form", LOW)
def test_models_that_meet_float32_in_their_forward_pass_train_under_zero_as_under_ddp(answers, form):
    expected = pytest.approx(answers[mixed, "ddp", form], rel=torch.finfo(LOW[form]).eps)
    assert answers[mixed, "zero 2", form] == expected
    assert answers[mixed, "zero 3", form] == expected


class OddGpt(SgdGpt):
    """No activation has the shape of a weight."""

    def __init__(self):
        super().__init__()
        self.tokens = 7


def copies(kind):
    """How many different casts of a stage's weights its micro-batches keep, how many weights its blocks have, and the
    types that it sends.
    """
    trainer, alive, sent = Trainer(OddGpt(), KINDS[kind], seed=SEED, precision="bf16"), set(), set()
    weights = [each for name, each in trainer.parts[0].named_parameters() if "layers" in name and each.dim() == 2]
    shapes = {tuple(shape) for each in weights for shape in (each.shape, each.T.shape)}

    def keep(tensor):
        if tensor.dtype == torch.bfloat16 and tuple(tensor.shape) in shapes:
            alive.add(tensor.untyped_storage().data_ptr())
        return tensor

    trainer.parts[0].register_forward_hook(lambda _module, _inputs, output: sent.add(output.dtype))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        trainer.step(0)
    return len(alive), len(weights), sent


def test_micro_batches_of_a_pipeline_share_one_cast_of_each_weight(answers):
    alive, weights, sent = answers[copies, "pipeline"]
    assert 0 < alive <= weights
    assert sent == {torch.bfloat16}


class LargeGpt(SgdGpt):
    """A GPT whose gradients overflow float16 until the loss scale has shrunk."""

    def loss(self, output, target):
        return 100 * super().loss(output, target)

    def build_optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=1e-3)


def scaled(kind, folder=None):
    """Loss scales, skipped steps and losses; of a run that is saved and continued, if there is a folder. Skipped steps,
    and no others, leave the weights as they were.
    """
    found = []
    trainer = Trainer(LargeGpt(), KINDS[kind], seed=SEED, precision="fp16")
    for number in range(8):
        if folder is not None and number == 5:
            progress = Progress(5, loss_scale=trainer.loss_scale.value, finite_steps=trainer.loss_scale.finite_steps)
            Checkpoints(folder).save(trainer.state(), progress)
            trainer = Trainer(LargeGpt(), KINDS[kind], seed=SEED, precision="fp16", begun=True)
            trainer.load(Checkpoints(folder))
        before = [each.detach().clone() for each in trainer.parts[0].parameters()]
        result = trainer.step(number)
        same = [torch.equal(*each) for each in zip(before, trainer.parts[0].parameters(), strict=True)]
        assert all(same) if result.skipped else not any(same)
        found.append((trainer.loss_scale.value, trainer.loss_scale.finite_steps, result.skipped, result.loss))
    return found


def test_steps_beyond_float16_change_no_weight_until_the_scale_fits(answers):
    single = scaled("one rank")
    assert single[0][2]
    assert not single[4][2]
    values = [LossScale().value, *(value for value, *_ in single)]
    assert [after / before for before, after in itertools.pairwise(values)] == [
        0.5 if each[2] else 1 for each in single
    ]
    assert single[-1][3] < single[0][3]
    for kind in ("zero 3", "pipeline"):  # rounded in another order, a gradient may be beyond the range or just within
        value, _, _, loss = answers[scaled, kind][-1]
        assert value / single[-1][0] in (0.5, 1, 2), kind
        assert loss == pytest.approx(single[-1][3], rel=0.05), kind


def test_a_checkpoint_keeps_the_loss_scale(tmp_path):
    assert scaled("one rank", tmp_path / "checkpoints") == scaled("one rank")


class FarJob(MixedJob):
    """One batch is beyond float16's range in the forward pass."""

    def batch(self, number, size):
        inputs, targets = super().batch(number, size)
        return inputs * (1e6 if number == 1 else 1.0), targets


def test_a_step_beyond_float16_leaves_running_statistics_finite():
    trainer = Trainer(FarJob(), Plan(micro_batch=8, accumulation=2), seed=SEED, precision="fp16")
    assert [trainer.step(number).skipped for number in range(3)] == [False, True, False]
    assert all(each.isfinite().all() for each in trainer.parts[0].buffers())
    assert np.isfinite(list(trainer.evaluate(3).values())).all()


def test_the_loss_scale_moves_as_torchs_does(monkeypatch):
    monkeypatch.setattr(precision, "GROWTH_STEPS", 3)
    ours, theirs = LossScale(), torch.amp.GradScaler("cpu", growth_interval=3)
    weight = torch.nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for finite in (True, True, True, False, True, True, False, False, True, True, True, True, True, True):
        weight.grad = None
        theirs.scale(weight * (1.0 if finite else float("inf"))).backward()
        theirs.step(optimizer)
        theirs.update()
        ours.update(finite=finite)
        assert ours.value == theirs.get_scale()


def test_training_that_no_scale_helps_ends_with_what_to_set():
    scale = LossScale()
    for _ in range(40):
        scale.update(finite=False)
    with pytest.raises(InputError, match="bf16"):
        scale.update(finite=False)


class Gpu:
    """torch.cuda as a GPU of that architecture would have it."""

    def __init__(self, monkeypatch, *, ampere):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: ampere or including_emulation)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100-SXM2-16GB")


def test_what_auto_means_and_what_is_refused_depends_on_the_gpu(monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert precision.chosen("auto", cpu) == "fp32"
    assert precision.chosen("bf16", cpu) == "bf16"
    Gpu(monkeypatch, ampere=True)
    assert [precision.chosen(each, gpu) for each in ("auto", "bf16", "fp32")] == ["bf16", "bf16", "fp32"]
    Gpu(monkeypatch, ampere=False)
    assert [precision.chosen(each, gpu) for each in ("auto", "fp16", "tf32")] == ["fp32", "fp16", "tf32"]
    with pytest.raises(InputError, match=r"V100.*fp16"):
        precision.chosen("bf16", gpu)


@pytest.mark.parametrize(
    ("form", "products", "convolutions"),
    [("tf32", "high", True), ("fp32", "highest", False), ("bf16", "highest", True)],
)
def test_tf32_is_used_on_request_alone(form, products, convolutions):
    try:
        Trainer(SgdGpt(), Plan(micro_batch=4), precision=form)
        assert torch.get_float32_matmul_precision() == products
        assert torch.backends.cudnn.allow_tf32 is convolutions
    finally:
        precision.allow_tf32("bf16")
