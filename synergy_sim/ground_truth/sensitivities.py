"""How published models' speed follows from CPUs and memory, as measured (SYNERGY_DATA: resource_sensitivity).

Two tables (Mohan et al., OSDI 2022, as their simulator has them): `models.csv`, a row a model with its batch, its
iteration at the proportional share and the share with which it is fastest; `cpu_memory_throughput.csv`, its
throughput on one GPU relative to that, by CPUs and memory. At 20.83 GB the models that gain from memory all have 0.1,
whatever their CPUs: a stand-in for "far too little", not a measurement. It is kept as the table's end, and the line
from it to the first measured memory is as steep as speed in proportion to memory, or steeper, so that giving up
memory there never pays.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from synergy_core.errors import InputError
from synergy_core.goodput.pipeline import PipelineTable
from synergy_core.measurements import Table, read_table
from synergy_core.units import GB

OTHER_MODELS = frozenset({"bert"})
"""Published names that are another application in the catalog: iterations of 11 ms there, of seconds here."""

POSITIVE = "a number > 0"


def published_pipelines(folder: Path) -> dict[str, PipelineTable]:
    """The table of every published model, by its name. Raises InputError, with file and line, for what is missing,
    double, no number or not above 0.
    """
    speeds = read_table(folder / "cpu_memory_throughput.csv")
    measured: dict[str, dict[tuple[float, float], float]] = {}
    columns = zip(
        speeds.cells("model"),
        _positive(speeds, "cpus_per_gpu"),
        _positive(speeds, "memory_gb_per_gpu"),
        _positive(speeds, "relative_throughput"),
        speeds.lines,
        strict=True,
    )
    for model, cpus, memory_gb, relative, line in columns:
        grid = measured.setdefault(model, {})
        if (cpus, memory_gb) in grid:
            raise InputError(
                f"{speeds.path}, line {line}: {model} with {cpus:g} CPUs and {memory_gb:g} GB stands there twice; "
                "delete one of them."
            )
        grid[cpus, memory_gb] = relative
    return {
        name: each for name, each in _tables(folder / "models.csv", speeds.path, measured) if name not in OTHER_MODELS
    }


def _tables(
    path: Path, speeds: Path, measured: dict[str, dict[tuple[float, float], float]]
) -> list[tuple[str, PipelineTable]]:
    models = read_table(path)
    names = models.cells("model")
    if odd := [name for name in measured if name not in names]:
        raise InputError(f"{path}: has no row of {odd[0]}, which {speeds} has; expected one.")
    found = []
    columns = zip(
        names,
        _positive(models, "batch_size"),
        _positive(models, "iter_time_s_at_proportional"),
        _positive(models, "best_cpus_per_gpu"),
        _positive(models, "best_memory_gb_per_gpu"),
        models.lines,
        strict=True,
    )
    for name, batch, iteration_s, best_cpus, best_gb, line in columns:
        if names.count(name) > 1 or name not in measured:
            raise InputError(
                f"{path}, line {line}: {name} has {names.count(name)} rows here and "
                f"{len(measured.get(name, ()))} in {speeds}; expected one here, and there one per share."
            )
        cpus, memory_gb = (sorted({share[axis] for share in measured[name]}) for axis in (0, 1))
        _check_whole(name, cpus, memory_gb, measured[name], speeds)
        relative = np.array([[measured[name][here, there] for there in memory_gb] for here in cpus])
        seconds = iteration_s / relative / batch
        memory_bytes = [each * GB for each in memory_gb]
        found.append((name, PipelineTable(cpus, memory_bytes, seconds, (best_cpus, best_gb * GB))))
    return found


def _check_whole(
    name: str, cpus: list[float], memory_gb: list[float], grid: dict[tuple[float, float], float], path: Path
) -> None:
    """Every CPU number with every memory, at least two of each."""
    missing = [(here, there) for here in cpus for there in memory_gb if (here, there) not in grid]
    if missing:
        here, there = missing[0]
        raise InputError(
            f"{path}: {len(missing)} rows of {name} are missing, such as {name},{here:g},{there:g},THROUGHPUT; "
            "expected every number of CPUs with every memory."
        )
    if min(len(cpus), len(memory_gb)) < 2:
        raise InputError(
            f"{path}: {name} was measured at {len(cpus)} numbers of CPUs and {len(memory_gb)} of memory; expected two "
            "or more of each, so that there is something between."
        )


def _positive(table: Table, column: str) -> list[float]:
    return table.numbers(column, POSITIVE, lambda value: value > 0)
