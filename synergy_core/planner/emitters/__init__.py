"""Formats in which training software reads plans. Each module is an `Emitter`; adding a module registers its format."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from math import ceil
from typing import TYPE_CHECKING, Any, Protocol, cast

from synergy_core import module_names
from synergy_core.errors import InputError, unknown

if TYPE_CHECKING:
    from synergy_core.planner.machine import Software
    from synergy_core.planner.plan import Plan
    from synergy_core.planner.work import Architecture


@dataclass(frozen=True, slots=True)
class PlannedLaunch:
    """A plan with its model, software and machines. model: the name that the user typed."""

    plan: Plan
    model: str
    architecture: Architecture
    software: Software
    gpus_per_node: int


class Emitter(Protocol):
    """A module of this folder. SUMMARY: the format in one line. SOFTWARE: the training software that reads it."""

    SUMMARY: str
    SOFTWARE: tuple[str, ...]

    def emit(self, launch: PlannedLaunch) -> str:
        """Writes the plan as text. Raises InputError with the reason if the software cannot run the plan."""

    def recognises(self, text: str) -> bool:
        """Whether a text is in this format."""

    def read(self, text: str, gpus: int) -> Plan:
        """Reads the plan in a text, emitted or not. Raises InputError if the plan is not for this number of GPUs."""

    def beside(self, launch: PlannedLaunch) -> str:
        """One sentence that says what the user has to add to the emitted text."""


def emitter_names() -> list[str]:
    """The names of all formats."""
    return module_names(__name__)


def emitter_named(name: str) -> Emitter:
    """A format's module. Raises InputError with the nearest match for an unknown name."""
    if name not in emitter_names():
        hint = "A module synergy_core/planner/emitters/<name>.py adds one."
        raise unknown("form of a plan", name, emitter_names(), hint=hint)
    return cast(Emitter, import_module(f"{__name__}.{name}"))


def emitter_for(name: str, software: str) -> Emitter:
    """A format's module. Raises InputError for an unknown format, and if the software does not read the format."""
    form = emitter_named(name)
    if software not in form.SOFTWARE:
        raise InputError(
            f"--emit {name}: the plan is for {software}; this form is read by {', '.join(form.SOFTWARE)}. "
            f"Type software={form.SOFTWARE[0]}."
        )
    return form


def emitted(name: str, launch: PlannedLaunch) -> str:
    """Writes the plan in a format. Raises InputError if its software cannot read the format or run the plan."""
    from synergy_core.planner.plan import NO_COMPRESSOR

    form, plan, software = emitter_for(name, launch.software.name), launch.plan, launch.software.name
    refuse(
        name,
        (plan.compressor != NO_COMPRESSOR, f"no setting of {software} compresses gradients by {plan.compressor}."),
        (
            plan.zero and plan.data * plan.context == 1,
            f"zero={plan.zero} shards over replicas, but there is only one; fix zero=0.",
        ),
    )
    return form.emit(launch)


def refuse(name: str, *refusals: tuple[Any, str]) -> None:
    """Raises InputError with the reason of the first (condition, reason) whose condition holds."""
    for refused, reason in refusals:
        if refused:
            raise InputError(f"--emit {name}: {reason}")


def stages(layers: int, plan: Plan) -> list[int]:
    """Number of layers of each stage, in the order in which a sample passes them; as even as possible.

    With interleaving, the last stage is the first to have a layer fewer, then the first, then the one before the last.
    """
    parts = plan.pipeline * plan.interleave
    cuts = [ceil(each * layers / parts) for each in range(parts + 1)]
    sizes = [after - before for before, after in pairwise(cuts)]
    if plan.interleave > 1:
        sizes.sort(reverse=True)
        if sizes[-2] < sizes[0]:
            sizes.insert(0, sizes.pop())
    return sizes


def replicas(gpus: int, model_parallel: int, words: str) -> int:
    """Number of replicas on `gpus` GPUs. words: the degrees of one replica. Raises InputError for a fraction."""
    if gpus % model_parallel:
        raise InputError(f"{words} = {model_parallel} GPUs for one replica, which does not divide gpus={gpus}.")
    return gpus // model_parallel


def accumulated(global_batch: int, data: int, micro_batch: int) -> int:
    """Micro-batches per step on each replica. Raises InputError if that is not a whole number."""
    if global_batch % (data * micro_batch):
        raise InputError(
            f"a batch of {global_batch} is not a multiple of {data} replicas × {micro_batch} per micro-batch; "
            f"use {-(-global_batch // (data * micro_batch)) * data * micro_batch}."
        )
    return global_batch // (data * micro_batch)
