"""What optimistic profiling saves and how far it is off, on the published profiles by CPUs and memory.

    SYNERGY_DATA=… python bench/optimistic_profiling.py

Each published table plays the machine: between its points in straight lines, all data in memory. Measured are the CPU
counts that the search chooses, of the 24 that there are; memory is predicted with the catalog's bytes per sample and
data set, which a job knows of itself. Scored is throughput at all published shares of 62.5 GB and more (below, the
table has a stand-in), of the table that profiling makes and of the formula fitted to the same steps.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from fit_sensitivity import STORAGE_BYTES_PER_S, Published, published

from synergy_core.catalog import load_model
from synergy_core.goodput.calibration import Accuracy, accuracy
from synergy_core.goodput.pipeline import (
    InputPipeline,
    ObservedInputs,
    Pipeline,
    PipelineTable,
    fit_pipeline,
    searched_steps,
)
from synergy_sim.truth.measured import published_pipelines

MOST_CPUS = 24
MEMORIES = 5
AS_FAST = 1.03
"""A share is as good as the best one if its step takes at most this many times as long: noise of short runs."""
CACHED_FRACTIONS = np.linspace(0.0, 1.0, 11)
"""Parts of the data set for which the memory axis is predicted."""


def predicted_table(
    steps: Mapping[int, float],
    *,
    gpus: int,
    samples: int,
    sample_bytes: float,
    data_bytes: float,
    storage_bytes_per_s: float,
) -> PipelineTable:
    """Speeds by CPUs and memory per GPU, from steps measured with all data in memory.

    steps: seconds by the job's CPUs, at least two counts. gpus: of the job, on one node. samples: per GPU and step.
    storage_bytes_per_s: at which each GPU's part of the job reads.
    """
    cpus = sorted(steps)
    prepared = np.array([steps[each] for each in cpus]) / samples
    read = sample_bytes * (1.0 - CACHED_FRACTIONS) / storage_bytes_per_s
    seconds = np.maximum(prepared[:, None], read)
    enough = seconds <= AS_FAST * seconds.min()
    most = len(CACHED_FRACTIONS) - 1
    fewest = int(np.argmax(enough[:, most]))
    least = int(np.argmax(enough[fewest]))
    memory = CACHED_FRACTIONS * data_bytes / gpus
    return PipelineTable(
        [each / gpus for each in cpus], memory.tolist(), seconds, (cpus[fewest] / gpus, float(memory[least]))
    )


def throughput_error(rows: Published, pipeline: InputPipeline) -> Accuracy:
    """Of samples per second, over the rows."""
    sample_s = pipeline.sample_s(rows.cpus, rows.memory_bytes, storage_bytes_per_s=STORAGE_BYTES_PER_S)
    predicted_s = np.maximum(rows.gpu_step_s, rows.batch * sample_s)
    return accuracy(1.0 / predicted_s, 1.0 / rows.step_s)


def profiled(name: str, rows: Published, machine: InputPipeline) -> tuple[int, InputPipeline, Pipeline]:
    """How many runs it took, the table they make, and the formula fitted to them."""
    stated = load_model(name).pipeline
    assert stated is not None
    everything = float(rows.memory_bytes.max())

    def seconds_of(cpus: int) -> float:
        return rows.batch * float(machine.sample_s(cpus, everything, storage_bytes_per_s=STORAGE_BYTES_PER_S))

    steps = searched_steps(seconds_of, MOST_CPUS)
    table = predicted_table(
        steps,
        gpus=1,
        samples=rows.batch,
        sample_bytes=stated.sample_bytes,
        data_bytes=stated.data_bytes,
        storage_bytes_per_s=STORAGE_BYTES_PER_S,
    )
    seen = ObservedInputs(
        list(steps), stated.data_bytes, STORAGE_BYTES_PER_S, 1, rows.batch, min(steps.values()), list(steps.values())
    )
    cpu_s = fit_pipeline(seen, stated.data_bytes).cpu_s.value
    return len(steps), table, Pipeline(cpu_s, stated.sample_bytes, stated.data_bytes)


def main() -> None:
    folder = Path(os.environ["SYNERGY_DATA"]) / "resource_sensitivity"
    machines = published_pipelines(folder)
    print("model        runs  of CPUs  of shares    table: error   p90    max    formula: error   p90    max")
    runs, tables, formulas = [], [], []
    for name, rows in published(folder).items():
        count, table, formula = profiled(name, rows, machines[name])
        first, second = throughput_error(rows, table), throughput_error(rows, formula)
        runs.append(count)
        tables.append(first.mape)
        formulas.append(second.mape)
        print(
            f"{name:12}{count:5}{count / MOST_CPUS:9.0%}{count / MOST_CPUS / MEMORIES:11.1%}"
            f"{first.mape:16.1%}{first.p90:7.1%}{first.max:7.1%}{second.mape:17.1%}{second.p90:7.1%}{second.max:7.1%}"
        )
    part = float(np.mean(runs)) / MOST_CPUS
    print(
        f"{'mean':12}{np.mean(runs):5.1f}{part:9.0%}{part / MEMORIES:11.1%}{np.mean(tables):16.1%}{'':14}"
        f"{np.mean(formulas):17.1%}"
    )


if __name__ == "__main__":
    main()
