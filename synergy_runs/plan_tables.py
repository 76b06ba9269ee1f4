"""Published tables of measured step times by parallel plan, as profiles (`synergy_core.jobs.testbed_profiles`).

A table is a CSV file; its header says whose it is. Its models always train at one global batch per row, so that
every step counts as one iteration, and nothing is known of what their restarts cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from synergy_core.errors import InputError
from synergy_core.jobs.testbed_profiles import NoiseFrom, Profile, ProfiledModel, ProfiledRow
from synergy_core.planner.plan import Plan, Recompute
from synergy_runs.traces.arena import model_named

RUBICK_BATCHES = {"vit": 64, "roberta": 64, "bert": 32, "t5": 16, "gpt2": 16, "llama7": 8, "llama30": 4}
"""Global batches at which Rubick (MLSys 2025) measured its models; its table does not name them."""
RUBICK_PLANS = {
    "ga": Plan(),
    "gc": Plan(recompute=Recompute.FULL),
    "zero-dp": Plan(zero=2),
    "zero-offload": Plan(zero=2, offload=True),
}
ARENA_GPU_GB = {"a100": 40.0, "v100": 32.0, "a40": 48.0, "a10": 24.0, "h100": 80.0, "l20": 48.0}
ARENA_MARGIN, ARENA_USABLE = 1.2, 0.8
"""Memory of Arena's GPUs; data parallelism fits where 1.2 × what it needs is at most 0.8 of that, by its simulator."""
Rows = Iterator[tuple[str, ProfiledRow]]


def _rubick(table: Any, path: Path) -> Rows:
    """Rubick's table: nodes of 8 A800, digits for the GPUs used on each."""
    for row in table.itertuples():
        batch = RUBICK_BATCHES[row.model]
        plan = RUBICK_PLANS[row.plan] if row.plan != "3d" else Plan(tensor=int(row.tp), pipeline=int(row.pp))
        data = int(row.gpus) // (plan.tensor * plan.pipeline)
        if batch % data == 0:  # else some replicas had more samples than others, which no plan says
            micro = 1 if row.plan == "3d" else batch // data
            node_gpus = tuple(sorted(map(int, row.gpus_per_node_used)))
            made = _plan(plan, data, micro, batch)
            yield f"rubick-{row.model}", ProfiledRow("a800", int(row.nodes), made, row.iter_time_s, node_gpus=node_gpus)


def _arena(table: Any, path: Path) -> Rows:
    """Arena's measured best plans (EuroSys 2026), which it does not name.

    Where its dp_mem.csv, beside the table, says that data parallelism fits, they stand as replicas; else as stages, so
    that policies which know replicas alone know as little as in its simulator. A batch at which nothing was measured
    that fits takes the times of the model's nearest one, in proportion.
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
            plan = _plan(Plan(), gpus, batch // gpus, batch) if fits else _plan(Plan(pipeline=gpus), 1, 1, batch)
            step_s = row.iter_time_s * batch / nearest
            yield model_named(f"{family}__{size}", "model"), ProfiledRow(row.gpu_type, int(row.num_nodes), plan, step_s)


def _plan(of: Plan, data: int, micro_batch: int, batch: int) -> Plan:
    return replace(of, data=data, micro_batch=micro_batch, accumulation=batch // (data * micro_batch))


READERS: dict[frozenset[str], tuple[str, Callable[[Any, Path], Rows]]] = {
    frozenset({"plan", "gpus_per_node_used", "iter_time_s"}): ("Rubick (MLSys 2025)", _rubick),
    frozenset({"source", "size", "batch_size", "best_of_config", "iter_time_s"}): ("Arena (EuroSys 2026)", _arena),
}
"""By columns that only that table has: whose it is, and its reader."""


def plan_table(path: Path) -> Profile:
    """The profile in a table. Raises InputError for a file that is none of the known tables."""
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
    return Profile({model: _model(model, tuple(each)) for model, each in rows.items()}, f"GPUs of {name}")


def _model(name: str, rows: tuple[ProfiledRow, ...]) -> ProfiledModel:
    batches = [row.plan.global_batch for row in rows]
    noise = (NoiseFrom(0.0, 0.0),)
    return ProfiledModel(name, min(batches), max(batches), 0.0, noise, costs=None, rows=rows)
