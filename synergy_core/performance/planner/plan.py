"""Parallel plans: `Plan` is a single plan, `Plans` holds many plans as columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from synergy_core.errors import InputError
from synergy_core.units import Floats, Ints, rows_at

NO_COMPRESSOR = "none"


class Recompute(IntEnum):
    """Which activations the backward pass recomputes. Plans and the setting `recompute=` use the number.

    SELECTIVE: the attention core. FULL: every layer, from its input. OPERATORS: all but fused attention and every
    second matrix product (torchtitan's selective activation checkpointing by operator). MODULES: the cheap modules of a
    layer (Megatron Core's --recompute-modules): dense MLPs and shared experts; the norm before the experts and the
    experts' activation functions; the norms of latent attention and its projections from latents to heads.
    """

    NONE = 0
    SELECTIVE = 1
    FULL = 2
    OPERATORS = 3
    MODULES = 4

    @property
    def label(self) -> str:
        """The name in printed tables and in measurement files."""
        return self.name.lower()

    @property
    def again(self) -> str:
        """What is recomputed, in words."""
        return ("nothing", "attention", "every layer", "every second product", "single modules")[self]

    @property
    def passes(self) -> float:
        """A layer's work in a step ÷ its forward pass: 1 forward, 2 backward, and 1 more under full recomputation."""
        return 4.0 if self is Recompute.FULL else 3.0


RISING = (Recompute.NONE, Recompute.SELECTIVE, Recompute.OPERATORS, Recompute.MODULES, Recompute.FULL)
"""Recomputation modes in order of rising step time and falling memory."""

SPLITS = ("tensor", "pipeline", "context", "expert", "interleave")
"""Degrees that some training software does not support; there they are fixed at 1."""
ZEROS = (0, 1, 2, 3)
"""The stages of ZeRO."""

_PASSES = np.array([each.passes for each in Recompute])


@dataclass(frozen=True, slots=True)
class Plan:
    """How one job is split over GPUs. `Plans` has neither compressor nor offload."""

    tensor: int = 1
    """Tensor-parallel degree. The product tensor · pipeline · context · data is the number of GPUs."""
    pipeline: int = 1
    """Pipeline-parallel degree."""
    context: int = 1
    """Context-parallel degree."""
    data: int = 1
    """Data-parallel degree, the number of replicas."""
    expert: int = 1
    """Number of data × context ranks over which a layer's experts are spread."""
    interleave: int = 1
    """Pipeline stages per GPU."""
    micro_batch: int = 1
    """Sequences (or images) that a replica processes at once."""
    accumulation: int = 1
    """Micro-batches per step on each replica."""
    zero: int = 0
    """Stage of ZeRO, 0 to 3; 3 is FSDP."""
    recompute: int = Recompute.NONE.value
    """Value of a `Recompute`."""
    sequence: bool = False
    """Whether sequence parallelism is used."""
    compressor: str = NO_COMPRESSOR
    """Name of the gradient compressor."""
    offload: bool = False
    """Whether CPUs hold the optimizer's states and update the weights (ZeRO-Offload, Ren et al., ATC 2021)."""

    @property
    def gpus(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def global_batch(self) -> int:
        """Sequences (or images) per step."""
        return self.micro_batch * self.accumulation * self.data

    @property
    def degrees(self) -> str:
        """The degrees that a running job cannot change, as text: `tp2 dp2 zero3` or `pp2×2`; `1` for one GPU."""
        interleaved = f"×{self.interleave}" if self.interleave > 1 else ""
        named = (("tp", self.tensor, ""), ("pp", self.pipeline, interleaved), ("dp", self.data, ""))
        parts = [f"{name}{degree}{more}" for name, degree, more in named if degree > 1]
        return " ".join([*parts, *([f"zero{self.zero}"] if self.zero else [])]) or "1"

    def describe(self) -> str:
        """Formats the plan without degrees of 1 and unused options: `tp8 pp4×2 dp2 · 1×16 · zero1 · selective`."""
        degrees = {"tp": self.tensor, "pp": self.pipeline, "cp": self.context, "dp": self.data, "ep": self.expert}
        words = [f"{name}{value}" for name, value in degrees.items() if value > 1] or ["1 GPU"]
        if self.interleave > 1:
            words = [f"{each}×{self.interleave}" if each.startswith("pp") else each for each in words]
        parts = [" ".join(words), f"{self.micro_batch}×{self.accumulation}"]
        parts += [f"zero{self.zero}"] if self.zero else []
        parts += ["sp"] if self.sequence else []
        parts += [Recompute(self.recompute).label] if self.recompute else []
        parts += [self.compressor] if self.compressor != NO_COMPRESSOR else []
        parts += ["offload"] if self.offload else []
        return " · ".join(parts)

    def as_dict(self) -> dict[str, int | bool | str]:
        """The plan's fields as plain values; `compressor` and `offload` only if they are used."""
        unused = {"compressor": NO_COMPRESSOR, "offload": False}
        return {name: value for name, value in asdict(self).items() if name not in unused or value != unused[name]}


@dataclass(frozen=True, slots=True)
class Plans:
    """Plans as columns: an array (plans,) for each field of `Plan` except compressor and offload, in the same order."""

    tensor: Ints
    pipeline: Ints
    context: Ints
    data: Ints
    expert: Ints
    interleave: Ints
    micro_batch: Ints
    accumulation: Ints
    zero: Ints
    recompute: Ints
    sequence: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.tensor)

    def __iter__(self) -> Iterator[Plan]:
        return (self.plan(at) for at in range(len(self)))

    def plan(self, at: int) -> Plan:
        return Plan(**{each.name: getattr(self, each.name)[at].item() for each in fields(self)})

    def take(self, rows: NDArray[np.int64] | NDArray[np.bool_]) -> Plans:
        return rows_at(self, rows)

    @property
    def gpus(self) -> Ints:
        return self.tensor * self.pipeline * self.context * self.data

    def expert_tensor(self, *, whole: bool = False) -> Ints:
        """(plans,): number of tensor-parallel ranks that split one expert.

        If `expert` exceeds data × context, tensor-parallel ranks hold different experts, and each rank dispatches its
        own part of the sequence (Megatron Core's parallel folding, --expert-tensor-parallel-size). whole: whether
        experts stay unsplit in plans with both expert and sequence parallelism.
        """
        spread = np.maximum(self.tensor * self.data * self.context // self.expert, 1)
        least = np.where(whole & self.sequence & (self.expert > 1), 1, self.tensor)
        result: Ints = np.minimum(least, spread)
        return result

    @property
    def passes(self) -> Floats:
        """(plans,): `Recompute.passes` of each plan."""
        return _PASSES[self.recompute]

    @property
    def global_batch(self) -> Ints:
        """(plans,): sequences (or images) per step."""
        return self.micro_batch * self.accumulation * self.data


def plans_of(plans: Sequence[Plan]) -> Plans:
    """Combines single plans into columns. Raises InputError if there are none."""
    if not plans:
        raise InputError("no plans given; expected at least one.")
    columns = {each.name: np.array([getattr(plan, each.name) for plan in plans]) for each in fields(Plans)}
    return Plans(**columns)
