"""The user's job: a class of four methods; what else it may say has defaults.

One whose samples take long to prepare says how to prepare a single one, instead of a batch: `LoadedJob`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

LearningRateRule = Literal["adascale", "square_root", "none"]
Tree = Any
"""A tensor, or dicts, tuples and lists of them, nested: each tensor has a row for every sample."""
Batch = tuple[Tree, Tree]
"""Inputs, and targets; `()` for targets that the model itself is given among its inputs."""


class TrainingJob(ABC):
    """What to train. Everything about how (devices, plans, batch sizes, checkpoints) is Synergy's.

    Its constructor takes what the job file gives under `arguments`, by name.

    blocks: the attribute that holds the layers a pipeline may cut between, an `nn.ModuleList` whose layers take and
    return one tensor; "" for a model that cannot be cut. What the model does before and after them is what its
    `embed(x)` and `head(h)` methods do: `forward(x)` must equal head(blocks(embed(x))).
    tensor_plan: which linear layers and embeddings tensor parallelism splits, by pattern of their names:
    {"layers.*.up": "column", "layers.*.down": "row"}.
    learning_rate_rule: how the learning rate follows the batch: `adascale` (SGD), `square_root` (Adam) or `none`.
    max_grad_norm: the whole gradient, of all layers and the whole batch, is scaled down to this norm where its is
    larger, under every plan; None: never.
    evaluate_every: steps from one evaluation to the next; 0: none.
    """

    blocks: ClassVar[str] = ""
    tensor_plan: ClassVar[Mapping[str, Literal["column", "row"]]] = {}
    learning_rate_rule: ClassVar[LearningRateRule] = "adascale"
    max_grad_norm: float | None = None
    evaluate_every: int = 0

    @abstractmethod
    def build_model(self) -> nn.Module:
        """The whole model, on the default device, its weights drawn from torch's default generator (seeded by us).

        It is called on torch's meta device too, where tensors have no numbers, to learn the model's form, and under
        plans that leave each rank a part of the weights to make it so. A model that cannot be made there is made whole.
        """

    @abstractmethod
    def batch(self, step: int, size: int) -> Batch:
        """Inputs and targets of `size` samples; a pure function of its arguments.

        The model is called with the inputs: `model(x)`, `model(*x)` of a tuple or list, `model(**x)` of a dict.
        """

    @abstractmethod
    def loss(self, output: Any, target: Tree) -> Tensor:
        """A scalar: the mean over the samples given, each with the same weight: a batch is cut into pieces, whose
        losses are averaged. A mean over tokens, of which samples have more or less, would be another under each cut.
        """

    @abstractmethod
    def build_optimizer(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer at the initial batch."""

    def learning_rate_schedule(self, work: float, total: float) -> float:
        """What to multiply the learning rate by, beside what follows from the batch, 0 or more.

        A function of the work done, in iterations at the initial batch, of `total` that the job file says: a step at
        a larger batch goes as far along the schedule as it is worth, so that batches and plans do not move it.
        `warmed_up` and `cosine` below are two.
        """
        return 1.0

    def evaluation(self) -> Iterable[Batch]:
        """Batches to evaluate on, of any sizes; the same whenever, and on whichever rank, it is called."""
        return ()

    def metrics(self, output: Any, target: Tree) -> Mapping[str, Tensor | float]:
        """By name, what to know of a batch that was evaluated: each the mean over the samples given, as the loss is."""
        return {"loss": self.loss(output, target)}

    def on_step(self, step: int, loss: float) -> None:
        """Called on rank 0 when a step is done, the first is 1; a step trained again is told again. It is part of the
        step's time.
        """
        return

    def on_checkpoint(self, step: int, folder: Path) -> None:
        """Called on rank 0 when a checkpoint of so many steps is complete in `folder`, which a later one replaces."""
        return


class LoadedJob(TrainingJob):
    """A job whose samples are read from storage and take long to prepare.

    Loader processes do that ahead of the steps, each rank's for its own rows, as many and on as many cores as the job
    was given, with items kept in memory as far as it was given any. None of that changes what is trained: a sample
    follows from its number and epoch, and every epoch takes each sample once.

    samples: how many there are. item_bytes: the most that storage holds of one.
    """

    samples: int
    item_bytes: int

    def make_data(self, folder: Path) -> None:
        """Where data are to lie that the job makes itself, if it does; every rank calls it, once rank 0 has."""

    @abstractmethod
    def item(self, number: int) -> bytes:
        """What storage holds of a sample; also where `make_data` was not called, as when a model is looked at."""

    @abstractmethod
    def sample(self, item: bytes, number: int, epoch: int) -> tuple[Tree, Tree]:
        """Input and target of one sample, prepared from `item`; a pure function of its arguments."""

    def batch(self, step: int, size: int) -> Batch:
        return self.stretch(range(step * size, (step + 1) * size), self.item)

    def stretch(self, places: range, item: Callable[[int], bytes]) -> Batch:
        """The samples at these places of all epochs one after another. item: as the method is, or from memory."""
        from synergy_exec.training.trees import stacked

        prepared = []
        for place in places:
            epoch, at = divmod(place, self.samples)
            number = int(_order(self.samples, epoch)[at])
            prepared.append(self.sample(item(number), number, epoch))
        inputs, targets = zip(*prepared, strict=True)
        return stacked(inputs), stacked(targets)


@lru_cache(maxsize=2)
def _order(samples: int, epoch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The order in which an epoch takes the samples."""
    return np.random.default_rng(epoch).permutation(samples)


# Learning-rate schedules, as functions of the work done; for a job's `learning_rate_schedule`.


def warmed_up(work: float, warm_up: float) -> float:
    """Rises in a straight line from near 0 to 1 over the first `warm_up` iterations, and stays there."""
    return min(1.0, (work + 1) / warm_up) if warm_up > 0 else 1.0


def cosine(work: float, total: float, *, warm_up: float = 0.0, least: float = 0.0) -> float:
    """A warm-up, then half a cosine from 1 down to `least` at `total` iterations (Loshchilov and Hutter 2017, SGDR)."""
    if work < warm_up:
        return warmed_up(work, warm_up)
    part = min(1.0, (work - warm_up) / max(total - warm_up, 1.0))
    return least + (1 - least) * (1 + math.cos(math.pi * part)) / 2
