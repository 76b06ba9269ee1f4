"""What a user writes: a class with four methods; everything else has defaults.

If samples take long to prepare, the class says how to prepare one sample instead of a batch: `LoadedJob`.
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
"""Inputs and targets. Targets are `()` if the model receives them among its inputs."""


class TrainingJob(ABC):
    """What to train. Synergy decides how: devices, plans, batch sizes and checkpoints.

    The constructor takes the job file's `arguments` by name.

    blocks: the attribute that holds the layers a pipeline may cut between, an `nn.ModuleList` whose layers take and
    return one tensor; "" for a model that cannot be cut. The model's methods `embed(x)` and `head(h)` compute the parts
    before and after these layers: `forward(x)` must equal head(blocks(embed(x))).
    tensor_plan: which linear layers and embeddings tensor parallelism splits, by pattern of their names:
    {"layers.*.up": "column", "layers.*.down": "row"}.
    learning_rate_rule: how the learning rate follows the batch: `adascale` (SGD), `square_root` (Adam) or `none`.
    max_grad_norm: the gradient of all layers over the whole batch is clipped to this norm, under every plan; None for
    no clipping.
    evaluate_every: steps between evaluations; 0 for none.
    """

    blocks: ClassVar[str] = ""
    tensor_plan: ClassVar[Mapping[str, Literal["column", "row"]]] = {}
    learning_rate_rule: ClassVar[LearningRateRule] = "adascale"
    max_grad_norm: float | None = None
    evaluate_every: int = 0

    @abstractmethod
    def build_model(self) -> nn.Module:
        """Builds the whole model on the default device. Synergy has seeded torch's default generator for its weights.

        It is also called on torch's meta device, where tensors have no numbers: to learn the model's structure, and
        under plans that shard the weights. If that fails, the model is built whole and then sharded.
        """

    @abstractmethod
    def batch(self, step: int, size: int) -> Batch:
        """Inputs and targets of `size` samples; a pure function of its arguments.

        The model is called with the inputs: `model(x)`, `model(*x)` of a tuple or list, `model(**x)` of a dict.
        """

    @abstractmethod
    def loss(self, output: Any, target: Tree) -> Tensor:
        """A scalar: the mean over the given samples, all with the same weight.

        A batch is cut into pieces whose losses are averaged. If samples have different numbers of tokens, a mean over
        tokens would depend on the cut.
        """

    @abstractmethod
    def build_optimizer(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer of these parameters at the initial batch; one that steps without a closure.

        A pipeline calls it once per stage with the parameters of that stage, so it must not depend on how many there
        are. All that is trained must be part of the model, and all that the optimizer keeps between steps must be in
        its `state` and groups, where checkpoints find it.
        """

    def learning_rate_schedule(self, work: float, total: float) -> float:
        """Factor of the learning rate, 0 or more; the factor for the batch size comes on top.

        work: done so far, in iterations at the initial batch. total: the job file's `work`. A step at a larger batch
        advances the schedule by as much as it is worth, so the schedule does not depend on batches and plans. See
        `warmed_up` and `cosine` below.
        """
        return 1.0

    def evaluation(self) -> Iterable[Batch]:
        """Batches to evaluate on, of any sizes; the same at every call and on every rank."""
        return ()

    def metrics(self, output: Any, target: Tree) -> Mapping[str, Tensor | float]:
        """Metrics of an evaluated batch by name; each is the mean over the given samples, like the loss."""
        return {"loss": self.loss(output, target)}

    def on_step(self, step: int, loss: float) -> None:
        """Called on rank 0 after each step, counted from 1; again for a step that is trained again. Its time counts as
        part of the step.
        """
        return

    def on_checkpoint(self, step: int, folder: Path) -> None:
        """Called on rank 0 when the checkpoint of this step is complete in `folder`; a later one replaces it."""
        return


class LoadedJob(TrainingJob):
    """A job whose samples are read from storage and take long to prepare.

    Loader processes prepare each rank's samples ahead of the steps, on the cores that the job was given, and cache
    items in the memory that it was given. This does not change what is trained: a sample depends only on its number and
    epoch, and every epoch takes each sample once.

    samples: number of samples. item_bytes: upper bound of a sample's size in storage.
    """

    samples: int
    item_bytes: int

    def make_data(self, folder: Path) -> None:
        """Makes the job's data in `folder`, if the job makes its own. Rank 0 calls it first, then all other ranks."""

    @abstractmethod
    def item(self, number: int) -> bytes:
        """Reads a sample from storage. It must also work before `make_data`, for instance to inspect the model."""

    @abstractmethod
    def sample(self, item: bytes, number: int, epoch: int) -> tuple[Tree, Tree]:
        """Prepares input and target of one sample from `item`; a pure function of its arguments."""

    def batch(self, step: int, size: int) -> Batch:
        return self.stretch(range(step * size, (step + 1) * size), self.item)

    def stretch(self, places: range, item: Callable[[int], bytes]) -> Batch:
        """The batch of samples at these places in the sequence of all epochs. item: the method above, or a cache."""
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
    """The order of samples in an epoch."""
    return np.random.default_rng(epoch).permutation(samples)


# Learning-rate schedules, as functions of the work done; for a job's `learning_rate_schedule`.


def warmed_up(work: float, warm_up: float) -> float:
    """Rises linearly from near 0 to 1 over the first `warm_up` iterations and stays at 1."""
    return min(1.0, (work + 1) / warm_up) if warm_up > 0 else 1.0


def cosine(work: float, total: float, *, warm_up: float = 0.0, least: float = 0.0) -> float:
    """Cosine schedule: rises to 1 during the warm-up, then falls along half a cosine to `least` at `total` iterations.

    Loshchilov and Hutter (SGDR, ICLR 2017).
    """
    if work < warm_up:
        return warmed_up(work, warm_up)
    part = min(1.0, (work - warm_up) / max(total - warm_up, 1.0))
    return least + (1 - least) * (1 + math.cos(math.pi * part)) / 2
