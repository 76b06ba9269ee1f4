"""What a job may say beside its four methods trains alike under every plan, across changes of plan."""

from pathlib import Path

import groups
import pytest
import torch
from exec.pretended import refuses
from exec.saved import MICRO, PLANS
from exported_model import Layer, Net
from torch import distributed, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import orthogonal

from synergy_core.errors import InputError
from synergy_core.performance.planner.plan import Plan
from synergy_exec.training import noise
from synergy_exec.training.admitted import Admission
from synergy_exec.training.checkpoint import Checkpoints
from synergy_exec.training.integrity import Progress
from synergy_exec.training.job import TrainingJob, cosine
from synergy_exec.training.trainer import Trainer
from synergy_exec.worker.loop import odd_data

SEED, BATCH = 5, 8
STEPS, TOTAL = 2, 18.0
"""Steps of a run, and work of a whole job for its learning-rate schedule."""
WORDS, WIDTH, CLASSES = 6, 8, 3


def numbers(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Small(TrainingJob):
    """SGD, so that a wrong scale of a gradient shows; clipped, scheduled, evaluated on sizes nothing divides."""

    learning_rate_rule = "none"
    max_grad_norm = 0.3
    evaluate_every = 1

    def build_optimizer(self, parameters):
        return torch.optim.SGD((each for each in parameters if each.requires_grad), lr=0.5, momentum=0.9)

    def learning_rate_schedule(self, work, total):
        return cosine(work, total, warm_up=4.0, least=0.1)

    def evaluation(self):
        return [self.batch(1000 + size, size) for size in (1, 7, 16)]

    def loss(self, output, target):
        return functional.cross_entropy(output, target)

    def metrics(self, output, target):
        return {"loss": self.loss(output, target), "twice": 2 * float(self.loss(output, target))}


class MaskedModel(nn.Module):
    """Means over words that are there; a dict of two outputs; a weight that tensor parallelism splits is frozen."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList(Layer(WIDTH) for _ in range(2))
        self.layers[1].up.weight.requires_grad_(False)
        self.scores = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids, mask, *, extra, flag):
        assert flag
        hidden = self.words(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        pooled = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return {"scores": self.scores(pooled + extra["shift"]), "sizes": (pooled.square().mean(1),)}


class Masked(Small):
    """Batches of a dict with a mask, a nested dict and a flag, and of a tuple with a dict."""

    blocks = "layers"
    tensor_plan = {"layers.*.up": "column", "layers.*.down": "row"}  # noqa: RUF012

    def build_model(self):
        return MaskedModel()

    def batch(self, step, size):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(32, (size, WORDS), generator=generator)
        mask = torch.arange(WORDS) < torch.randint(1, WORDS + 1, (size, 1), generator=generator)
        extra = {"shift": torch.randn(size, WIDTH, generator=generator)}
        labels = torch.randint(CLASSES, (size,), generator=generator)
        inputs = {"ids": ids, "mask": mask.float(), "extra": extra, "flag": True}
        return inputs, (labels, {"small": extra["shift"][:, 0]})

    def loss(self, output, target):
        labels, more = target
        (sizes,) = output["sizes"]
        return functional.cross_entropy(output["scores"], labels) + ((sizes - more["small"]) ** 2).mean()


class NormedLayer(Layer):
    """Statistics, a frozen weight, a single number, and constants that are drawn and that no checkpoint has."""

    def __init__(self, momentum):
        super().__init__(WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH, momentum=momentum)
        self.down.bias.requires_grad_(False)
        self.scale = nn.Parameter(torch.rand(1))
        self.register_buffer("turns", torch.randn(WIDTH), persistent=False)

    def forward(self, x):
        return x + self.scale * self.turns * self.down(torch.tanh(self.up(self.norm(x))))


class NormedModel(Net):
    """A model with BatchNorm before, inside and after its blocks, frozen weights and an infinite constant.

    The BatchNorm of block 1 has momentum None: it averages over all batches so far.
    """

    def __init__(self):
        super().__init__(4, WIDTH, CLASSES, 4, lambda at: NormedLayer(None if at == 1 else 0.2))
        self.first_norm, self.last_norm = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH)
        for each in (self.first.bias, self.last_norm.bias):
            each.requires_grad_(False)
        self.register_buffer("constant", torch.tensor([float("-inf"), 1.0]))

    def embed(self, x):
        return self.first_norm(super().embed(x))

    def head(self, hidden):
        return super().head(self.last_norm(hidden))


class Normed(Small):
    blocks = "layers"
    tensor_plan = Masked.tensor_plan
    max_grad_norm = None

    def build_model(self):
        model = NormedModel()
        nn.init.trunc_normal_(model.last.weight, std=0.3)
        self.change(model)
        return model

    def change(self, model):
        """Makes the model's unusual change."""

    def batch(self, step, size):
        return numbers(step, size, 4) * (1 + step % 3), numbers(step + 10_000, size, CLASSES).argmax(1)


class Dropping(Normed):
    max_grad_norm = 0.3  # without norms it would run away, and carry rounding with it

    def change(self, model):
        for at, layer in enumerate(model.layers):
            layer.norm = nn.Dropout(0.1 * (at + 1))
        model.first_norm, model.last_norm = nn.Dropout(0.2), nn.Dropout(0.3)


class Unusual(Normed):
    """Expanded buffers, a parametrization with a buffer, blocks whose results are not contiguous, a parameter that the
    optimizer does not get, and a loss of one dimension.
    """

    tensor_plan = {}  # noqa: RUF012
    max_grad_norm = 0.3

    def change(self, model):
        for layer in model.layers:
            layer.norm = nn.LayerNorm(WIDTH)
            layer.register_buffer("ones", torch.ones(1).expand(WIDTH))
            orthogonal(layer.up)
            layer.register_forward_hook(lambda _layer, _inputs, output: output.t().contiguous().t())
        model.first_norm, model.last_norm = nn.Identity(), nn.Identity()

    def loss(self, output, target):
        return super().loss(output, target).reshape(1)

    def build_optimizer(self, parameters):
        return super().build_optimizer(each for each in parameters if each.shape != (CLASSES,))


class Tied(Dropping):
    """Two blocks have one weight, and so have what is before the blocks and what is after them."""

    blocks = ""

    def change(self, model):
        super().change(model)
        model.layers[3].up.weight = model.layers[0].up.weight
        before, after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        after.weight = before.weight
        model.first, model.last_norm = nn.Sequential(model.first, before), nn.Sequential(after, model.last_norm)


class Sparse(Small):
    """An embedding with sparse gradients, clipped; a scheduler of torch that the job keeps."""

    def build_model(self):
        return nn.Sequential(nn.Embedding(32, WIDTH, sparse=True), nn.Linear(WIDTH, CLASSES))

    def batch(self, step, size):
        ids, labels = torch.randint(32, (2, size), generator=torch.Generator().manual_seed(step))
        return ids, labels % CLASSES

    def build_optimizer(self, parameters):
        optimizer = torch.optim.SGD(parameters, lr=0.5)
        self.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return optimizer


class Both(torch.optim.Optimizer):
    """Two optimizers, which keep their own state."""

    def __init__(self, parameters):
        parameters = list(parameters)
        super().__init__(parameters, {"lr": 0.1})
        self.each = [torch.optim.SGD(parameters[:2], lr=0.1, momentum=0.9), torch.optim.AdamW(parameters[2:])]

    def step(self):
        for each in self.each:
            each.step()


CHAINS = {
    Masked: ("ddp2", "fsdp2", "tp2", "zero2", "single"),
    Normed: ("ddp2", "pp2", "fsdp2", "ppi2", "single"),
    Dropping: ("ddp2", "fsdp2", "zero2", "single"),
    Unusual: ("pp2", "fsdp2", "ddp2", "single"),
    Tied: ("fsdp2", "zero2", "single"),
    Sparse: ("ddp2", "single"),
}
"""Plans that a job goes through, a run each; a single process comes last."""


def run(job, plan, folder, steps=STEPS):
    """Goes on from the folder's checkpoint, if there is one, and saves at the end."""
    made, path = job(), Path(folder)
    trainer = Trainer(made, PLANS[plan], seed=SEED)
    progress = trainer.load(Checkpoints(path)) or Progress()
    found = []
    for _ in range(steps):
        rate = noise.learning_rate_scale(made, BATCH, BATCH, None, float(progress.step), TOTAL)
        result = trainer.step(progress.step, rate=rate)
        progress.step += 1
        found.append((result.loss, result.grad_norm, trainer.evaluate(progress.step)))
    Checkpoints(path).save(trainer.state(), progress)
    return found


TOLERANCE = 1e-5


PIECES = [(run, Dropping, "pp2", *where) for where in (("paused", 2), ("paused", 4), ("whole", 6))]


class Taking(Small):
    """From step 2 on each replica uses a layer of its own, which is as large as the other's."""

    def build_model(self):
        return Turns(WIDTH, CLASSES)

    def batch(self, step, size):
        return (numbers(step, size, WIDTH), torch.full((size,), step)), torch.zeros(size, dtype=torch.int64)


class Turns(nn.Module):
    def __init__(self, width, classes):
        super().__init__()
        self.each = nn.ModuleList(nn.Linear(width, classes) for _ in range(2))

    def forward(self, x, step):
        return self.each[0](x) + self.each[1](x) if step[0] < 2 else self.each[distributed.get_rank()](x)


def takes_turns(plan):
    """The step at which it is refused, and why."""
    trainer = Trainer(Taking(), PLANS[plan], seed=SEED)
    for number in range(4):
        try:
            trainer.step(number)
        except InputError as error:
            return number, str(error)


TURNS = [(takes_turns, plan) for plan in ("fsdp2", "zero2")]


def run_in_half(plan, folder):
    """The default type of torch is the job's choice; the trainer must not depend on it."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        return run(Normed, plan, folder, 1)
    finally:
        torch.set_default_dtype(torch.float32)


HALF = run_in_half, "pp2", "half"


def links(job):
    return [(run, job, plan, job.__name__) for plan in CHAINS[job]]


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Every job of CHAINS through its plans, run by run from checkpoint to checkpoint."""
    chained = [case for job in CHAINS for case in links(job)]
    two = [case for case in chained if case[2] != "single"]
    two += [*PIECES, HALF, *TURNS]
    return groups.run_once(
        tmp_path_factory, "users-jobs", {2: two, 1: [case for case in chained if case[2] == "single"]}
    )


def difference(one, other):
    assert len(one) == len(other)
    found = []
    for (loss, norm, metrics), (its_loss, its_norm, its_metrics) in zip(one, other, strict=True):
        assert metrics.keys() == its_metrics.keys() != set()
        found += [abs(loss - its_loss), abs(norm - its_norm)]
        found += [abs(value - its_metrics[name]) for name, value in metrics.items()]
    return max(found)


@pytest.mark.parametrize("job", CHAINS)
def test_a_job_through_all_its_plans_is_one_run_without_a_break(answers, job, tmp_path):
    """Nested batches, clipping, schedule, evaluation; BatchNorm; dropout; odd and tied tensors; sparse gradients."""
    through = [seen for case in links(job) for seen in answers[case]]
    alone = run(job, "single", tmp_path, STEPS * len(CHAINS[job]))
    assert difference(through, alone) <= TOLERANCE


def test_dropout_under_a_pipeline_goes_on_as_if_it_had_not_been_paused(answers):
    """Though the first step of every run sends something through the stages to learn shapes."""
    first, second, whole = (answers[case] for case in PIECES)
    assert difference([*first, *second], whole) <= TOLERANCE


@pytest.mark.parametrize("case", TURNS)
def test_parameters_that_only_some_replicas_use_are_refused_under_fsdp(answers, case):
    step, reason = answers[case]
    assert step == 2
    assert "each.0.weight had a part in the loss of some replicas only" in reason


def test_a_job_in_bfloat16_trains_under_a_pipeline(answers, tmp_path):
    assert difference(answers[HALF], run_in_half("single", tmp_path)) <= 0.05


def test_nested_batches_are_trained_clipped_and_scheduled_as_plain_torch_does(tmp_path):
    job = Masked()
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
    found = [(loss, norm) for loss, norm, _ in run(Masked, "single", tmp_path / "masked", 6)]
    assert torch.tensor(found).sub(torch.tensor(expected)).abs().max() <= TOLERANCE


def test_running_statistics_move_by_the_mean_over_the_micro_batches_of_a_step(tmp_path):
    """As plain torch has them where each micro-batch begins with what the step began with."""
    job = Normed()
    trainer = Trainer(job, PLANS["single"], seed=SEED)
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


def test_what_a_pipeline_cannot_send_is_refused_before_the_start():
    assert "Masked.batch gives a dict" in Admission(Masked()).refusal(Plan(pipeline=2, accumulation=2))
    assert Admission(Masked()).refusal(Plan(tensor=2)) is None
    assert Admission(Normed()).refusal(Plan(pipeline=2, accumulation=2)) is None


@pytest.mark.parametrize(
    ("method", "odd", "says"),
    [
        ("evaluation", lambda job: [], r"evaluate_every is 1, and evaluation\(\) gives no batches"),
        ("evaluation", lambda job: [(numbers(0, 4, 4), torch.zeros(3))], "gave tensors of 3 or 4 rows"),
        (
            "batch",
            lambda job, step, size: (numbers(0, 1, 4), torch.zeros(1)),
            r"gave 1 inputs and 1 targets; give 2 of",
        ),
        ("batch", lambda job, step, size: (numbers(0, 2, 4).numpy(), torch.zeros(2)), r"gave no inputs .* of tensors"),
        ("loss", lambda job, output, target: output.mean(1), "gave a tensor of 2 numbers; give a tensor of one"),
        ("loss", lambda job, output, target: output.detach().mean(), "requires_grad is False"),
        ("loss", lambda job, output, target: (output.mean(), 1), "loss gave a tuple"),
        ("build_optimizer", lambda job, parameters: [torch.optim.SGD(parameters, lr=1.0)], "gave a list"),
        ("build_optimizer", lambda job, parameters: torch.optim.LBFGS(parameters), "LBFGS, whose step needs arguments"),
        ("build_optimizer", lambda job, parameters: torch.optim.SGD(MaskedModel().parameters()), "did not receive"),
        ("build_optimizer", lambda job, parameters: Both(parameters), "gave a Both around a SGD"),
    ],
)
def test_what_a_method_may_not_give_is_an_error(method, odd, says):
    def trained():
        trainer = Trainer(type("Odd", (Normed,), {method: odd})(), Plan(micro_batch=2))
        trainer.step(0)
        trainer.evaluate(1)

    refuses(says, trained)


def test_a_tensor_without_dimensions_in_a_batch_is_an_error():
    job = Masked()
    (inputs, targets) = job.batch(0, BATCH)
    job.batch = lambda step, size: (inputs | {"extra": torch.tensor(0.5)}, targets)
    assert not odd_data(job, Progress(), BATCH)
    refuses("gave 0 or 8 inputs", lambda: Trainer(job, PLANS["single"]).step(0))
