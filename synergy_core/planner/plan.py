"""Parallel plans: one as a value, many as columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from synergy_core.arrays import Floats, Ints
from synergy_core.errors import InputError

NO_COMPRESSOR = "none"


class Recompute(IntEnum):
    """What is computed again in the backward pass; its number is what plans, columns and `recompute=` hold.

    SELECTIVE: the attention core. FULL: every layer, from its input. OPERATORS: all but fused attention and every
    second matrix product (torchtitan's selective activation checkpointing by operator).
    """

    NONE = 0
    SELECTIVE = 1
    FULL = 2
    OPERATORS = 3

    @property
    def label(self) -> str:
        """The name as it is printed, and as measurement files write it."""
        return self.name.lower()

    @property
    def again(self) -> str:
        """What is computed again, in a sentence."""
        return ("nothing", "attention", "every layer", "every second product")[self]

    @property
    def passes(self) -> float:
        """A layer's products in a step, in units of a forward pass: 1 forward, 2 backward, 1 more if recomputed."""
        return 4.0 if self is Recompute.FULL else 3.0


RISING = (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL)
"""Kinds by rising need of time and falling of memory: what a search tries, and what is meant where none is stated."""

_PASSES = np.array([each.passes for each in Recompute])


@dataclass(frozen=True, slots=True)
class Plan:
    """How one job is split over GPUs.

    tensor, pipeline, context, data: degrees; their product is the number of GPUs. expert: over how many of the
    data × context ranks a layer's experts are spread. interleave: stages per GPU. micro_batch: sequences (or images).
    accumulation: micro-batches per step on each replica. zero: ZeRO's stage; 3 is FSDP. recompute: a
    `Recompute`'s number. sequence: whether what tensor parallelism would repeat is split along the sequence.
    compressor: of the gradients that replicas exchange, by its name; of columns (`Plans`) it is no part.
    """

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    data: int = 1
    expert: int = 1
    interleave: int = 1
    micro_batch: int = 1
    accumulation: int = 1
    zero: int = 0
    recompute: int = Recompute.NONE.value
    sequence: bool = False
    compressor: str = NO_COMPRESSOR

    @property
    def gpus(self) -> int:
        """GPUs it needs."""
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def global_batch(self) -> int:
        """Sequences (or images) a step."""
        return self.micro_batch * self.accumulation * self.data

    def describe(self) -> str:
        """`tp8 pp4×2 dp2 · 1×16 · zero1 · selective`; what is 1 or none is left out."""
        names = (
            ("tp", self.tensor),
            ("pp", self.pipeline),
            ("cp", self.context),
            ("dp", self.data),
            ("ep", self.expert),
        )
        degrees = [f"{name}{value}" for name, value in names if value > 1] or ["1 GPU"]
        if self.interleave > 1:
            degrees = [f"{each}×{self.interleave}" if each.startswith("pp") else each for each in degrees]
        parts = [" ".join(degrees), f"{self.micro_batch}×{self.accumulation}"]
        parts += [f"zero{self.zero}"] if self.zero else []
        parts += ["sp"] if self.sequence else []
        parts += [Recompute(self.recompute).label] if self.recompute else []
        parts += [self.compressor] if self.compressor != NO_COMPRESSOR else []
        return " · ".join(parts)

    def as_dict(self) -> dict[str, int | bool | str]:
        """Its fields as plain values; the compressor only where there is one."""
        return {name: value for name, value in asdict(self).items() if (name, value) != ("compressor", NO_COMPRESSOR)}


@dataclass(frozen=True, slots=True)
class Plans:
    """Plans as columns, arrays (plans,), in the order and with the meanings of `Plan`."""

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
        """The plan at that index."""
        return Plan(**{each.name: getattr(self, each.name)[at].item() for each in fields(self)})

    def take(self, rows: NDArray[np.int64] | NDArray[np.bool_]) -> Plans:
        """Some of the plans, by index or by mask."""
        return Plans(*(getattr(self, each.name)[rows] for each in fields(self)))

    @property
    def gpus(self) -> Ints:
        """(plans,): GPUs each needs."""
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def passes(self) -> Floats:
        """(plans,): passes through a layer's products in a step; see `Recompute`."""
        return _PASSES[self.recompute]

    @property
    def global_batch(self) -> Ints:
        """(plans,): sequences (or images) a step."""
        return self.micro_batch * self.accumulation * self.data


def plans_of(plans: Sequence[Plan]) -> Plans:
    """Single plans as columns. Raises InputError for none."""
    if not plans:
        raise InputError("no plans given; expected at least one.")
    columns = {each.name: np.array([getattr(plan, each.name) for plan in plans]) for each in fields(Plans)}
    return Plans(**columns)
