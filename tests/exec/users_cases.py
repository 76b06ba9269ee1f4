"""Jobs as people write them, and what the ranks of test_users_jobs.py run of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional

from synergy_core.errors import InputError
from synergy_exec.messages import PlanMessage
from synergy_exec.training import learning_rate
from synergy_exec.training.job import TrainingJob
from synergy_exec.training.progress import Progress
from synergy_exec.training.schedules import cosine
from synergy_exec.training.stream import StreamedJob
from synergy_exec.training.trainer import Trainer

SEED, BATCH, MICRO = 5, 8, 2
STEPS, TOTAL = 3, 18.0
"""Of a run; of a whole job, for its schedule."""
WORDS, WIDTH, CLASSES = 6, 8, 3

PLANS = {
    "one": PlanMessage(micro_batch=MICRO, accumulation=4),
    "ddp": PlanMessage(data=2, micro_batch=MICRO, accumulation=2),
    "fsdp": PlanMessage(data=2, zero=3, micro_batch=MICRO, accumulation=2),
    "zero2": PlanMessage(data=2, zero=2, micro_batch=MICRO, accumulation=2),
    "tp": PlanMessage(tensor=2, micro_batch=MICRO, accumulation=4),
    "pp": PlanMessage(pipeline=2, micro_batch=MICRO, accumulation=4),
    "v2": PlanMessage(pipeline=2, interleave=2, micro_batch=MICRO, accumulation=4),
}
"""All with the same micro-batches."""

Seen = tuple[float, float, dict[str, float]]
"""Of a step: loss, norm of the gradient, evaluation after it."""


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Small(TrainingJob):
    """SGD, so that a wrong scale of a gradient shows; clipped, scheduled, evaluated on sizes nothing divides."""

    learning_rate_rule = "none"
    max_grad_norm = 0.3
    evaluate_every = 1

    def build_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)

    def learning_rate_schedule(self, work: float, total: float) -> float:
        return cosine(work, total, warm_up=4.0, least=0.1)

    def evaluation(self) -> Iterable[Any]:
        return [self.batch(1000 + size, size) for size in (1, 7, 16)]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output, target)

    def metrics(self, output: Any, target: Any) -> dict[str, Any]:
        return {"loss": self.loss(output, target), "twice": 2 * float(self.loss(output, target))}


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class MaskedModel(nn.Module):
    """Means over words that are there; a dict of two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList(Layer(WIDTH) for _ in range(2))
        self.scores = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor, mask: Tensor, *, extra: dict[str, Tensor], flag: bool) -> dict[str, Any]:
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

    def build_model(self) -> nn.Module:
        return MaskedModel()

    def batch(self, step: int, size: int) -> tuple[Any, Any]:
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(32, (size, WORDS), generator=generator)
        mask = torch.arange(WORDS) < torch.randint(1, WORDS + 1, (size, 1), generator=generator)
        extra = {"shift": torch.randn(size, WIDTH, generator=generator)}
        labels = torch.randint(CLASSES, (size,), generator=generator)
        return {"ids": ids, "mask": mask.float(), "extra": extra, "flag": True}, (
            labels,
            {"small": extra["shift"][:, 0]},
        )

    def loss(self, output: Any, target: Any) -> Tensor:
        labels, more = target
        (sizes,) = output["sizes"]
        return functional.cross_entropy(output["scores"], labels) + ((sizes - more["small"]) ** 2).mean()


class Unclipped(Masked):
    """A control: the same without clipping."""

    max_grad_norm = None


class Unscheduled(Masked):
    """A control: the same without a schedule."""

    def learning_rate_schedule(self, work: float, total: float) -> float:
        return 1.0


class NormedLayer(nn.Module):
    def __init__(self, momentum: float | None) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, momentum=momentum)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class NormedModel(nn.Module):
    """BatchNorm before, in and after the blocks, one of which averages over all it has seen; an infinite constant."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.first_norm = nn.Linear(4, WIDTH), nn.BatchNorm1d(WIDTH)
        self.layers = nn.ModuleList(NormedLayer(None if at == 1 else 0.2) for at in range(4))
        self.last, self.last_norm = nn.Linear(WIDTH, CLASSES), nn.BatchNorm1d(WIDTH)
        self.register_buffer("constant", torch.tensor([float("-inf"), 1.0]))

    def embed(self, x: Tensor) -> Tensor:
        return self.first_norm(self.first(x))

    def head(self, hidden: Tensor) -> Tensor:
        return self.last(self.last_norm(hidden))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


class Normed(Small):
    """BatchNorm."""

    blocks = "layers"
    max_grad_norm = None

    def build_model(self) -> nn.Module:
        return NormedModel()

    def batch(self, step: int, size: int) -> tuple[Tensor, Tensor]:
        return numbers(step, size, 4) * (1 + step % 3), numbers(step + 10_000, size, CLASSES).argmax(1)


class Dropping(Normed):
    """Dropout in and around the blocks."""

    max_grad_norm = 0.3  # without norms it would run away, and carry rounding with it

    def build_model(self) -> nn.Module:
        model = NormedModel()
        for at, layer in enumerate(model.layers):
            layer.norm = nn.Dropout(0.1 * (at + 1))
        model.first_norm, model.last_norm = nn.Dropout(0.2), nn.Dropout(0.3)
        return model


class Pieces:
    """A loader of 10 pieces of 3 samples an epoch, in an order drawn when it is iterated."""

    def __init__(self, odd: bool = False) -> None:
        self.given, self._odd = 0, odd

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(10).tolist()
        while self.given < len(order):
            number = order[self.given]
            self.given += 1
            rank = distributed.get_rank() if self._odd and distributed.is_initialized() else 0
            yield numbers(100 + number + rank, 3, 4), torch.arange(3) % CLASSES
        self.given = 0

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.given = state_dict["given"]


class Streamed(StreamedJob, Small):
    """Samples of a loader with a state."""

    blocks = "layers"
    max_grad_norm = None

    def build_model(self) -> nn.Module:
        model = NormedModel()
        model.first_norm, model.last_norm = nn.Identity(), nn.Identity()
        for layer in model.layers:
            layer.norm = nn.Identity()
        return model

    def loader(self) -> Any:
        return Pieces()

    def evaluation(self) -> Iterable[Any]:
        return [(numbers(7, 5, 4), torch.arange(5) % CLASSES)]


class OddlyStreamed(Streamed):
    """Its loader gives other samples on rank 1."""

    def loader(self) -> Any:
        return Pieces(odd=True)


JOBS: dict[str, type[TrainingJob]] = {
    each.__name__: each for each in (Masked, Unclipped, Unscheduled, Normed, Dropping, Streamed, OddlyStreamed)
}
CHAINS = {
    "Masked": ("ddp", "fsdp", "tp", "zero2", "one"),
    "Normed": ("ddp", "pp", "fsdp", "v2", "one"),
    "Dropping": ("ddp", "fsdp", "zero2", "one"),
    "Streamed": ("ddp", "pp", "fsdp", "one"),
}
"""Plans that a job goes through, a run each; a single process comes last."""


def run(job: str, plan: str, folder: str, steps: int = STEPS) -> list[Seen]:
    """Goes on from the folder's checkpoint, if there is one, and saves at the end."""
    made, path = JOBS[job](), Path(folder)
    trainer = Trainer(made, PLANS[plan], seed=SEED)
    progress = trainer.load(path) or Progress()
    found = []
    for _ in range(steps):
        rate = learning_rate.rate(made, BATCH, BATCH, None, float(progress.step), TOTAL)
        result = trainer.step(progress.step, rate=rate)
        progress.step += 1
        found.append((result.loss, result.grad_norm, trainer.evaluate(progress.step)))
    trainer.save(path, progress)
    return found


def refused(job: str, plan: str) -> str:
    """What the first step of a job says that cannot be trained."""
    try:
        Trainer(JOBS[job](), PLANS[plan], seed=SEED).step(0)
    except InputError as error:
        return str(error)
    return ""


def resized(plan: str) -> list[float]:
    """Losses of a stream whose batch changes on the way."""
    trainer = Trainer(Streamed(), PLANS[plan], seed=SEED)
    losses = []
    for step, accumulation in enumerate((1, 1, 2, 3, 1)):
        trainer.retune(MICRO, accumulation * 2 // trainer.plan.data)
        losses.append(trainer.step(step, rate=0.1).loss)
    return losses
