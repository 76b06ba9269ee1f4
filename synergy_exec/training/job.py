"""The user's job: a class of four methods, and two optional fields without which it is only data-parallel.

One whose samples take long to prepare says how to prepare a single one, instead of a batch: `LoadedJob`.
"""

from __future__ import annotations

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


class TrainingJob(ABC):
    """What to train. Everything about how (devices, plans, batch sizes, checkpoints) is Synergy's.

    Its constructor takes what the job file gives under `arguments`, by name.

    blocks: the attribute that holds the layers a pipeline may cut between, an `nn.ModuleList` whose layers take and
    return one tensor; "" for a model that cannot be cut. What the model does before and after them is what its
    `embed(x)` and `head(h)` methods do: `forward(x)` must equal head(blocks(embed(x))).
    tensor_plan: which linear layers and embeddings tensor parallelism splits, by pattern of their names:
    {"layers.*.up": "column", "layers.*.down": "row"}.
    learning_rate_rule: how the learning rate follows the batch: `adascale` (SGD), `square_root` (Adam) or `none`.
    """

    blocks: ClassVar[str] = ""
    tensor_plan: ClassVar[Mapping[str, Literal["column", "row"]]] = {}
    learning_rate_rule: ClassVar[LearningRateRule] = "adascale"

    @abstractmethod
    def build_model(self) -> nn.Module:
        """The whole model, on the default device, its weights drawn from torch's default generator (seeded by us)."""

    @abstractmethod
    def batch(self, step: int, size: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of `size` samples, the first dimension; a pure function of its arguments."""

    @abstractmethod
    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """A scalar: the mean over the samples given."""

    @abstractmethod
    def build_optimizer(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer at the initial batch."""


class LoadedJob(TrainingJob):
    """A job whose samples are read from storage and take long to prepare.

    Loader processes do that ahead of the steps, each rank's for its own rows, as many and on as many cores as the job
    was given, with items kept in memory as far as it was given any. None of that changes what is trained: a sample
    follows from its number and epoch, and every epoch takes each sample once, in an order of its own.

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
    def sample(self, item: bytes, number: int, epoch: int) -> tuple[Tensor, Tensor]:
        """Input and target, prepared from `item`; a pure function of its arguments."""

    def batch(self, step: int, size: int) -> tuple[Tensor, Tensor]:
        return self.stretch(range(step * size, (step + 1) * size), self.item)

    def stretch(self, places: range, item: Callable[[int], bytes]) -> tuple[Tensor, Tensor]:
        """The samples at these places of all epochs one after another. item: as the method is, or from memory."""
        import torch

        prepared = []
        for place in places:
            epoch, at = divmod(place, self.samples)
            number = int(_order(self.samples, epoch)[at])
            prepared.append(self.sample(item(number), number, epoch))
        inputs, targets = zip(*prepared, strict=True)
        return torch.stack(inputs), torch.stack(targets)


@lru_cache(maxsize=2)
def _order(samples: int, epoch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The order in which an epoch takes the samples."""
    return np.random.default_rng(epoch).permutation(samples)
