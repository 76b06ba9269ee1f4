"""The user's job: a class of four methods, and two optional fields without which it is only data-parallel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

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
