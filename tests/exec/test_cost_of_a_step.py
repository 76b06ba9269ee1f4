"""What a step costs beside the model's own work, in operators, and the buffers that are kept in one tensor for this."""

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from synergy_core.performance.planner.plan import Plan
from synergy_exec.examples.gpt import Gpt
from synergy_exec.training.job import TrainingJob
from synergy_exec.training.trainer import Trainer

MICRO = 2


class Bottleneck(nn.Module):
    def __init__(self, inputs, width, stride):
        super().__init__()

        def normalised(*layer, **more):
            return nn.Sequential(nn.Conv2d(*layer, bias=False, **more), nn.BatchNorm2d(layer[1]))

        self.first, self.last = normalised(inputs, width, 1), normalised(width, 4 * width, 1)
        self.middle = normalised(width, width, 3, stride=stride, padding=1)
        self.beside = normalised(inputs, 4 * width, 1, stride=stride) if stride > 1 or inputs != 4 * width else None

    def forward(self, x):
        y = self.last(torch.relu(self.middle(torch.relu(self.first(x)))))
        return torch.relu(y + (x if self.beside is None else self.beside(x)))


class ResNet50(TrainingJob):
    """He et al. 2016, table 1, with thin layers."""

    learning_rate_rule = "none"

    def build_model(self):
        layers, inputs = [nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU()], 8
        for width, blocks, stride in ((2, 3, 1), (4, 4, 2), (8, 6, 2), (16, 3, 2)):
            for block in range(blocks):
                layers.append(Bottleneck(inputs, width, stride if block == 0 else 1))
                inputs = 4 * width
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10))

    def build_optimizer(self, parameters):
        return torch.optim.AdamW(parameters, foreach=True)

    def batch(self, number, size):
        generator = torch.Generator().manual_seed(number)
        labels = torch.randint(10, (size,), generator=generator)
        return torch.randn(size, 3, 32, 32, generator=generator), labels

    def loss(self, output, target):
        return nn.functional.cross_entropy(output, target)


class Gpt24(Gpt):
    def __init__(self):
        super().__init__(depth=24, hidden=16, heads=2, tokens=8, vocabulary=32)

    def build_optimizer(self, parameters):
        return torch.optim.AdamW(parameters, foreach=True)


def operators(step):
    """How many operators a step calls, after two others; those that an operator calls itself do not count."""
    step(0)
    step(1)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        step(2)
    ours = [each for each in seen.events() if each.name.startswith("aten::")]
    return sum(each.cpu_parent is None or not each.cpu_parent.name.startswith("aten::") for each in ours)


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("kind", [ResNet50, Gpt24])
def test_a_step_calls_few_operators_besides_the_models(kind, accumulation):
    job = kind()
    model = job.build_model()
    optimizer = job.build_optimizer(model.parameters())
    trainer = Trainer(kind(), Plan(micro_batch=MICRO, accumulation=accumulation))

    def plain(number):
        optimizer.zero_grad()
        for x, y in zip(*(each.split(MICRO) for each in job.batch(number, MICRO * accumulation)), strict=True):
            (job.loss(model(x), y) / accumulation).backward()
        optimizer.step()

    models = operators(plain)
    assert models > 500
    assert operators(trainer.step) - models <= 0.15 * models + 40


class Counting(nn.Module):
    """A module whose buffers change in three ways: in place, by replacement with another tensor, and not at all."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        for name in ("added", "replaced", "constant"):
            self.register_buffer(name, torch.zeros(3))
        self.register_buffer("passes", torch.tensor(0))

    def forward(self, x):
        self.added += 1.0
        self.replaced = self.replaced + 2.0
        self.passes += 1
        return self.layer(x) + self.added.sum() * 0


class Counts(ResNet50):
    def build_model(self):
        return Counting()

    def batch(self, number, size):
        return torch.ones(size, 4), torch.zeros(size, dtype=torch.int64)


def test_buffers_step_once_whatever_the_model_puts_in_their_place():
    trainer = Trainer(Counts(), Plan(micro_batch=MICRO, accumulation=3))
    (model,) = trainer.parts
    added = model.added
    for number in range(3):
        trainer.step(number)
    assert model.added is added
    assert (model.added.tolist(), model.replaced.tolist()) == ([3.0] * 3, [6.0] * 3)
    assert (model.constant.tolist(), int(model.passes)) == ([0.0] * 3, 3)
    again = Counting()
    again.load_state_dict(model.state_dict())
    assert again.replaced.tolist() == [6.0] * 3
