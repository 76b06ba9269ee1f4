"""What optimistic profiling saves and how far it is off, on the published profiles by CPUs and memory.

Each published table plays the machine: between its points in straight lines, all data in memory. The search chooses the
CPU counts to measure; memory is predicted with the catalog's bytes per sample and data set, which a job knows of
itself. Scored is throughput at all published shares of 62.5 GB and more (below, the table has a stand-in).
"""

from __future__ import annotations

import numpy as np
from fits.sensitivity import MODELS, STORAGE_BYTES_PER_S, error, published
from runner.experiment import Experiment, Result, Results, data_file, measurement
from runner.tables import percent

from synergy_core.catalog import load_model
from synergy_core.goodput.pipeline import ObservedInputs, Pipeline, PipelineTable, fit_pipeline, searched_steps

MAX_CPUS = 24
AS_FAST = 1.03
"""A share is as good as the best one if its step takes at most this many times as long: noise of short runs."""
CACHED_FRACTIONS = np.linspace(0.0, 1.0, 11)
"""Parts of the data set for which the memory axis is predicted."""


def predicted_table(steps: dict[int, float], samples: int, sample_bytes: float, data_bytes: float) -> PipelineTable:
    """Speeds by CPUs and memory of one GPU, from the seconds of steps by CPUs, measured with all data in memory."""
    cpus = sorted(steps)
    prepared = np.array([steps[each] for each in cpus]) / samples
    seconds = np.maximum(prepared[:, None], sample_bytes * (1.0 - CACHED_FRACTIONS) / STORAGE_BYTES_PER_S)
    enough = seconds <= AS_FAST * seconds.min()
    fewest = int(np.argmax(enough[:, -1]))
    memory = CACHED_FRACTIONS * data_bytes
    best = (float(cpus[fewest]), float(memory[np.argmax(enough[fewest])]))
    return PipelineTable(cpus, memory.tolist(), seconds, best)


def profiled(model: str) -> Result:
    """Number of runs, and mean errors of the table that they make and of the formula fitted to them."""
    from synergy_sim.truth.measured import published_pipelines

    machine, rows = published_pipelines(data_file("resource_sensitivity"))[model], published()[model]
    stated = load_model(model).pipeline
    everything = float(rows.memory_bytes.max())

    def step_s(cpus: int) -> float:
        return rows.samples * float(machine.sample_s(cpus, everything, storage_bytes_per_s=STORAGE_BYTES_PER_S))

    steps = searched_steps(step_s, MAX_CPUS)
    by_table = predicted_table(steps, rows.samples, stated.sample_bytes, stated.data_bytes)
    known = (STORAGE_BYTES_PER_S, 1, rows.samples, min(steps.values()))
    seen = ObservedInputs(list(steps), stated.data_bytes, *known, list(steps.values()))
    cpu_s = fit_pipeline(seen, stated.data_bytes).cpu_s.value
    formula = Pipeline(cpu_s, stated.sample_bytes, stated.data_bytes)
    return {"runs": len(steps), "table": error(rows, by_table).mape, "formula": error(rows, formula).mape}


def tables(results: Results) -> dict[str, str]:
    found = list(results.values())
    by_table, by_formula = (percent(float(np.mean([each[name] for each in found]))) for name in ("table", "formula"))
    return {"runs": f"{np.mean([each['runs'] for each in found]):.1f}", "table": by_table, "formula": by_formula}


OPTIMISTIC_PROFILING = Experiment(
    lambda: [measurement(profiled, model=model) for model in MODELS],
    tables,
    needs=("data",),
    reads=("synergy_core/catalog/models",),
)
