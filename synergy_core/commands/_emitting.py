"""A plan written as something to apply, and one read from such a text."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from synergy_core.commands._asked import AskedModel
from synergy_core.commands._output import write_whole
from synergy_core.commands._question import Question
from synergy_core.errors import InputError
from synergy_core.planner.emitters import PlannedLaunch, emitted, emitter_named, emitter_names
from synergy_core.planner.enumerate import FIXABLE
from synergy_core.planner.plan_table import PlanTable
from synergy_core.planner.software import Software


def emit(wanted: Sequence[Sequence[str]], model: AskedModel, table: PlanTable, software: Software) -> None:
    """Writes the best plan in every form that is wanted: (form, file) pairs. Raises InputError before the first file is
    written where one form cannot say the plan."""
    launch = PlannedLaunch(table.plans.plan(0), model.name, model.architecture, software, table.machine.gpus_per_node)
    texts = [emitted(form, launch) for form, _ in wanted]
    for (form, path), text in zip(wanted, texts, strict=True):
        if path == "-":
            print()
            sys.stdout.write(text)
            continue
        write_whole(Path(path), text)
        own = emitter_named(form)
        print(f"\nwrote {path}, {own.SUMMARY}: {launch.plan.describe()}\n  {own.beside(launch)}")


def plan_from(asked: Question) -> Question:
    """What was asked, with all degrees and the batch of the plan in a file. Raises InputError where they are said
    beside it, and for a file of no known form."""
    path = asked.plan
    assert path is not None
    beside = [*asked.fixed, *(["batch"] if asked.batch else [])]
    if beside:
        raise InputError(f"plan={path} says {beside[0]} already; leave {beside[0]}= out.")
    if len(asked.gpus) != 1:
        raise InputError(f"plan={path} is a plan for one number of GPUs; give one, such as gpus={asked.gpus[0]}.")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"plan={path}: cannot be read ({getattr(error, 'strerror', None) or 'not text'}).") from None
    form = next((each for each in map(emitter_named, emitter_names()) if each.recognises(text)), None)
    if form is None:
        raise InputError(f"plan={path}: is none of the forms that --emit writes: {', '.join(emitter_names())}.")
    if asked.software not in form.SOFTWARE:
        raise InputError(
            f"plan={path} is read by {', '.join(form.SOFTWARE)}, not by {asked.software}; type "
            f"software={form.SOFTWARE[0]}."
        )
    try:
        plan = form.read(text, asked.gpus[0])
    except InputError as error:
        raise InputError(f"plan={path}: {error}") from None
    fixed = {name: int(getattr(plan, name)) for name in FIXABLE}
    return replace(asked, batch=plan.global_batch, fixed=fixed)
