"""A plan as what training software reads: one module each, an `Emitter`; being in the folder registers it."""

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
    """A plan, and what it is a plan of. model: the name that it was asked by. gpus_per_node: of the machines."""

    plan: Plan
    model: str
    architecture: Architecture
    software: Software
    gpus_per_node: int


class Emitter(Protocol):
    """A file of this folder. SUMMARY: one line. SOFTWARE: the training stacks of the catalog that read the form."""

    SUMMARY: str
    SOFTWARE: tuple[str, ...]

    def emit(self, launch: PlannedLaunch) -> str:
        """The text. Raises InputError with the reason where the software cannot run the plan."""

    def recognises(self, text: str) -> bool:
        """Whether a text is of that form."""

    def read(self, text: str, gpus: int) -> Plan:
        """The plan that a text means on so many GPUs, whoever wrote it. Raises InputError where they do not fit."""

    def beside(self, launch: PlannedLaunch) -> str:
        """One sentence on what the emitted text leaves to the user."""


def emitter_names() -> list[str]:
    """Every form."""
    return module_names(__name__)


def emitter_named(name: str) -> Emitter:
    """A form's module. Raises InputError with the nearest match for an unknown one."""
    if name not in emitter_names():
        hint = "A module synergy_core/planner/emitters/<name>.py adds one."
        raise unknown("form of a plan", name, emitter_names(), hint=hint)
    return cast(Emitter, import_module(f"{__name__}.{name}"))


def emitter_for(name: str, software: str) -> Emitter:
    """A form's module. Raises InputError for an unknown one, and where its software is another."""
    form = emitter_named(name)
    if software not in form.SOFTWARE:
        raise InputError(
            f"--emit {name}: the plan is for {software}; this form is read by {', '.join(form.SOFTWARE)}. "
            f"Type software={form.SOFTWARE[0]}."
        )
    return form


def emitted(name: str, launch: PlannedLaunch) -> str:
    """The plan in that form. Raises InputError where the form's software is not the plan's, or cannot run it."""
    from synergy_core.planner.plan import NO_COMPRESSOR

    form, plan, software = emitter_for(name, launch.software.name), launch.plan, launch.software.name
    refuse(
        name,
        (plan.compressor != NO_COMPRESSOR, f"no setting of {software} compresses gradients by {plan.compressor}."),
        (
            plan.zero and plan.data * plan.context == 1,
            f"zero={plan.zero} shards over replicas, and there is one; fix zero=0.",
        ),
    )
    return form.emit(launch)


def refuse(name: str, *refusals: tuple[Any, str]) -> None:
    """Raises InputError with the reason of the first of (condition, reason) that holds."""
    for refused, reason in refusals:
        if refused:
            raise InputError(f"--emit {name}: {reason}")


def stages(layers: int, plan: Plan) -> list[int]:
    """How many layers each stage has, in the order in which a sample passes them: as even as their number allows."""
    parts = plan.pipeline * plan.interleave
    cuts = [ceil(each * layers / parts) for each in range(parts + 1)]
    return [after - before for before, after in pairwise(cuts)]


def replicas(gpus: int, model_parallel: int, words: str) -> int:
    """Data-parallel replicas on so many GPUs. words: what takes the others. Raises InputError if none is whole."""
    if gpus % model_parallel:
        raise InputError(f"{words} = {model_parallel} GPUs for one replica, which does not divide gpus={gpus}.")
    return gpus // model_parallel


def accumulated(global_batch: int, data: int, micro_batch: int) -> int:
    """Micro-batches that a replica adds up in a step. Raises InputError if the batch is no multiple of them."""
    if global_batch % (data * micro_batch):
        raise InputError(
            f"a batch of {global_batch} is no multiple of {data} replicas × {micro_batch} of a micro-batch; "
            f"such as {-(-global_batch // (data * micro_batch)) * data * micro_batch}."
        )
    return global_batch // (data * micro_batch)
