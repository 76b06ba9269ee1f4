"""Plans that need more of a slot's memory than their job may have."""

from __future__ import annotations

import dataclasses

from synergy_core.errors import InputError
from synergy_core.jobs.testbed_profiles import ProfiledModel
from synergy_core.units import GB


def within(model: ProfiledModel, memory_gb: float) -> tuple[ProfiledModel, list[str]]:
    """The model with those of its plans that fit into so many GB of each slot, and a sentence for each other plan.

    0: whatever there is. Raises InputError where none fits.
    """
    if not memory_gb:
        return model, []
    limit = memory_gb * GB
    rows = tuple(row for row in model.rows if row.memory_bytes <= limit)
    least: dict[str, float] = {}
    for row in model.rows:
        if row.memory_bytes > limit:
            name = f"{row.plan.describe()} at batch {row.plan.global_batch}"
            least[name] = min(row.memory_bytes, least.get(name, row.memory_bytes))
    said = [f"{name} needs {needs / GB:.3g} GB of a slot's {memory_gb:g}" for name, needs in least.items()]
    if not rows:
        raise InputError(f"{model.name}: no plan fits into memory_gb={memory_gb:g}: {'; '.join(said)}.")
    return dataclasses.replace(model, rows=rows, max_batch=max(row.plan.global_batch for row in rows)), said
