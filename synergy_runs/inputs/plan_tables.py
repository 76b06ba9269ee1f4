"""Reads published tables of step times measured by parallel plan, as profiles (`jobs.testbed_profiles`).

A table is a CSV file; its columns show which publication it comes from. Global batches do not change while a model
trains, so every step counts as one iteration. The tables do not give costs of restarts; the simulator's settings do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from synergy_core.errors import InputError
from synergy_core.performance.planner.plan import Plan, Recompute
from synergy_core.scheduling.jobs.testbed_profiles import NoiseFrom, ProfiledModel, ProfiledRow, TestbedProfile
from synergy_runs.traces.arena import model_named

RUBICK_PLANS = {
    "ga": Plan(),
    "gc": Plan(recompute=Recompute.FULL),
    "zero-dp": Plan(zero=2),
    "zero-offload": Plan(zero=2, offload=True),
}
ARENA_GPU_GB = {"a100": 40.0, "v100": 32.0, "a40": 48.0, "a10": 24.0, "h100": 80.0, "l20": 48.0}
ARENA_MARGIN, ARENA_USABLE = 1.2, 0.8
"""In Arena's simulator, data parallelism fits if 1.2 × the memory that it needs is at most 0.8 × that of a GPU."""
Rows = Iterator[tuple[str, ProfiledRow]]


def _rubick(table: Any, path: Path) -> Rows:
    """Reads Rubick's table (nodes of 8 A800). Each digit of `gpus_per_node_used` is the number of GPUs on one node."""
    from synergy_core.commands.measurements.rubick_times import MODELS

    for row in table.itertuples():
        *_, batch = MODELS[row.model]
        plan = RUBICK_PLANS[row.plan] if row.plan != "3d" else Plan(tensor=int(row.tp), pipeline=int(row.pp))
        data = int(row.gpus) // (plan.tensor * plan.pipeline)
        if batch % data == 0:  # otherwise the replicas' batches differed, which a plan cannot express
            node_gpus = tuple(sorted(map(int, row.gpus_per_node_used)))
            made = replace(plan, data=data, micro_batch=batch // data)
            yield f"rubick-{row.model}", ProfiledRow("a800", int(row.nodes), made, row.iter_time_s, node_gpus=node_gpus)


def _arena(table: Any, path: Path) -> Rows:
    """Reads Arena's step times (EuroSys 2026), each under the best plan measured; the table does not name these plans.

    A row counts as data parallelism if that fits into memory (dp_mem.csv in the same folder), otherwise as pipeline
    stages. So policies that use only data parallelism know as little as in Arena's simulator. For a batch without
    measurements, step times of the model's nearest measured batch are scaled in proportion.
    """
    import pandas as pd

    memory: Any = pd.read_csv(path.with_name("dp_mem.csv")).itertuples()
    needed_gb = {(row.model, row.size, row.batch_size, row.num_gpus): row.dp_mem_gb for row in memory}
    table = table[table.source == "measured_best"]
    measured = table[table.iter_time_s > 0]
    for (family, size, batch), _ in table.groupby(["model", "size", "batch_size"]):
        mine = measured[(measured.model == family) & (measured["size"] == size)]
        known = mine.batch_size.unique().tolist()
        nearest = min(known, key=lambda each: abs(each - batch), default=0)
        for row in mine[mine.batch_size == nearest].itertuples():
            gpus, gb = int(row.num_gpus), needed_gb.get((family, size, batch, row.num_gpus), 0.0)
            fits = 0 < gb * ARENA_MARGIN <= ARENA_USABLE * ARENA_GPU_GB[row.gpu_type]
            stages = Plan(pipeline=gpus, accumulation=batch)
            plan = Plan(data=gpus, micro_batch=batch // gpus) if fits else stages
            step_s = row.iter_time_s * batch / nearest
            yield model_named(f"{family}__{size}", "model"), ProfiledRow(row.gpu_type, int(row.num_nodes), plan, step_s)


READERS: dict[frozenset[str], tuple[str, Callable[[Any, Path], Rows]]] = {
    frozenset({"plan", "gpus_per_node_used", "iter_time_s"}): ("Rubick (MLSys 2025)", _rubick),
    frozenset({"source", "size", "batch_size", "best_of_config", "iter_time_s"}): ("Arena (EuroSys 2026)", _arena),
}
"""The columns that identify each known table → (the publication, the function that reads the table)."""


def plan_table(path: Path) -> TestbedProfile:
    """Reads a published table as a profile. Raises InputError if the file is not a known table."""
    import pandas as pd

    table: Any
    try:
        table = pd.read_csv(path, dtype={"gpus_per_node_used": str})
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: expected a table of step times by plan ({error}).") from None
    whose = [each for columns, each in READERS.items() if columns <= set(table.columns)]
    if not whose:
        known = "; ".join(f"{name}: {', '.join(sorted(columns))}" for columns, (name, _) in READERS.items())
        raise InputError(f"{path}: columns {', '.join(table.columns)}; expected those of a known table ({known}).")
    name, read = whose[0]
    rows: dict[str, list[ProfiledRow]] = {}
    try:
        for model, row in read(table, path):
            rows.setdefault(model, []).append(row)
    except (OSError, KeyError, ValueError) as error:
        why = f"{error.args[0]!r} is unknown" if isinstance(error, KeyError) else str(error)
        raise InputError(f"{path}: cannot be read as a table of {name}: {why}.") from None
    return TestbedProfile({model: _model(model, tuple(each)) for model, each in rows.items()}, f"GPUs of {name}")


def _model(name: str, rows: tuple[ProfiledRow, ...]) -> ProfiledModel:
    batches = [row.plan.global_batch for row in rows]
    noise = (NoiseFrom(0.0, 0.0),)
    return ProfiledModel(name, min(batches), max(batches), 0.0, noise, costs=None, rows=rows)
