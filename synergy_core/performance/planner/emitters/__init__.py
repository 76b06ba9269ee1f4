"""Formats in which training software reads plans. Each module is an `Emitter`; adding a module registers its format."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from synergy_core import module_names
from synergy_core.errors import InputError, unknown
from synergy_core.performance.planner.enumerate import FIXABLE, candidates, with_options
from synergy_core.performance.planner.options import Stated
from synergy_core.performance.planner.plan import NO_COMPRESSOR, SPLITS, Plan

if TYPE_CHECKING:
    from synergy_core.performance.planner.machine import Software
    from synergy_core.performance.planner.work import Architecture


@dataclass(frozen=True, slots=True)
class PlannedLaunch:
    """A plan with its model, software and machines. model: the name that the user typed."""

    plan: Plan
    model: str
    architecture: Architecture
    software: Software
    gpus_per_node: int


class Emitter(Protocol):
    """A module of this folder. SUMMARY: the format in one line. SOFTWARE: the training software that reads it.

    A format without `emit` is only read, and has no `beside` either.
    """

    SUMMARY: str
    SOFTWARE: tuple[str, ...]

    def emit(self, launch: PlannedLaunch) -> str:
        """Writes the plan as text. Raises InputError with the reason if the software cannot run the plan."""

    def recognises(self, text: str) -> bool:
        """Whether a text is in this format."""

    def read(self, text: str, gpus: int, folder: Path) -> Stated:
        """Reads what a text says, emitted or not. folder: the file's, for files that the text names.

        Raises InputError if the plan is not for this number of GPUs."""

    def beside(self, launch: PlannedLaunch) -> str:
        """One sentence that says what the user has to add to the emitted text."""


def form_names() -> list[str]:
    """The names of all formats."""
    return module_names(__name__)


def emitter_names() -> list[str]:
    """The names of the formats in which plans are written; all formats are read."""
    return [name for name in form_names() if hasattr(emitter_named(name), "emit")]


def emitter_named(name: str) -> Emitter:
    """A format's module. Raises InputError with the nearest match for an unknown name."""
    if name not in form_names():
        hint = "A module synergy_core/performance/planner/emitters/<name>.py adds one."
        raise unknown("form of a plan", name, form_names(), hint=hint)
    return cast(Emitter, import_module(f"{__name__}.{name}"))


def emitter_for(name: str, software: str) -> Emitter:
    """A format's module. Raises InputError for an unknown format, and if the software does not read the format."""
    form = emitter_named(name)
    if not hasattr(form, "emit"):
        raise InputError(f"--emit {name}: this form is only read; --emit writes {', '.join(emitter_names())}.")
    if software not in form.SOFTWARE:
        raise InputError(
            f"--emit {name}: the plan is for {software}; this form is read by {', '.join(form.SOFTWARE)}. "
            f"Type software={form.SOFTWARE[0]}."
        )
    return form


def emitted(name: str, launch: PlannedLaunch) -> str:
    """Writes the plan in a format. Raises InputError if its software cannot read the format or run the plan."""
    form, software = emitter_for(name, launch.software.name), launch.software
    if not _is_possible(launch):
        raise InputError(
            f"--emit {name}: {launch.plan.describe()} is no plan of {launch.model} under {software.name}; the command "
            "plan lists those that are."
        )
    return form.emit(launch)


def _is_possible(launch: PlannedLaunch) -> bool:
    """Whether `plan` could have found the plan: the software and the model have its degrees and options together."""
    plan, software = launch.plan, launch.software
    fixed = {name: int(getattr(plan, name)) for name in FIXABLE}
    splits = {name for name in SPLITS if fixed[name] > 1}
    tried: dict[str, Any] = {"micro_batches": [plan.micro_batch], "max_tensor": plan.tensor, "fixed": fixed}
    if (
        plan.compressor != NO_COMPRESSOR
        or plan.recompute not in software.recompute_modes
        or splits - {*software.supports.splits}
    ):
        return False
    try:
        same = candidates(launch.architecture.limits(), [plan.gpus], plan.global_batch, software, **tried)
    except InputError:
        return False
    return len(with_options(same, fixed, software, software.recompute_modes)[0]) > 0


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
