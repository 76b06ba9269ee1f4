"""A trace's large jobs as language models with parallel plans; their GPUs and run times stay as traced.

What is real is when jobs arrive, how many GPUs they ask for and how long they run; which model each trains is drawn, by
its GPUs and GPU-time, as in Arena's traces (EuroSys 2026), where arrivals alone are production data too.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from synergy_core.cluster import Cluster
from synergy_core.errors import InputError
from synergy_core.planner import tables
from synergy_core.planner.tables import PlannedModel
from synergy_core.units import TICK_S
from synergy_runs.workload import Workload, uniform
from synergy_sim.assignment import mixed
from synergy_sim.ground_truth import Truth, packed

PARAMETERS_PER_GPU = 0.9e9
"""A job's model has at most so many parameters per GPU asked for: 14 GB of weights, gradients, optimizer or more."""
SPREAD = 8.0
"""The smallest model that a job may have is so many times smaller than the largest."""
LONG_GPU_H = 10.0
"""Jobs of more GPU-time take the larger half of these models, others the smaller half."""
BATCH_TOKENS = ((1e9, 2**19), (5e9, 2**20), (float("inf"), 2**21))
"""Tokens per step of models up to so many parameters (Brown et al., NeurIPS 2020, table 2.1: 0.5, 1 and 2 million)."""


def with_language_models(
    workload: Workload, cluster: Cluster, truth: Truth, random: np.random.Generator, *, from_gpus: int
) -> Workload:
    """Jobs of `from_gpus` or more get a language model where their GPUs are a power of two; all others as `mixed`.

    A job keeps its run time on the GPUs it asks for, of the type that it asks for, else of one drawn in proportion to
    the cluster's GPUs among those on which the model fits, were its plan fixed.
    """
    result = mixed(workload, cluster, truth, random)
    gpus = workload.gpus.astype(np.int64)
    rows = np.flatnonzero((gpus >= from_gpus) & ((gpus & (gpus - 1)) == 0))
    draws = uniform(workload, random, 2)
    known = sorted((tables.model_named(name) for name in tables.language_models()), key=lambda each: each.parameters)
    names = tuple(dict.fromkeys((*result.models, *(each.name for each in known))))
    gpu_types = tuple(dict.fromkeys((*workload.gpu_types, *cluster.gpu_types)))
    code, type_code = result.model_code.copy(), workload.gpu_type_code.copy()
    batch, scale, on_gpus = result.global_batch.copy(), result.work_scale.copy(), result.gpus.copy()
    for row in rows.tolist():
        long = workload.duration_s[row] * gpus[row] > LONG_GPU_H * 3600.0
        asked = workload.gpu_types[workload.gpu_type_code[row]]
        found = _drawn(known, int(gpus[row]), bool(long), asked, cluster, draws[row])
        if found is None:
            continue
        model, gpu_type = found
        app = truth.planned_application(model.name, batch_of(model), cluster)
        step_s = app.step_s(gpu_type, packed(int(gpus[row]), cluster.largest_nodes[gpu_type]), app.initial_batch)
        code[row], type_code[row] = names.index(model.name), gpu_types.index(gpu_type)
        batch[row], on_gpus[row] = app.initial_batch, gpus[row]
        scale[row] = max(float(workload.duration_s[row]), TICK_S) / (app.work * step_s)
    made = int(np.isin(code, [names.index(each.name) for each in known]).sum())
    if not made:
        raise InputError(
            f"{workload.source}: trace.models=llm made no job a language model; none asks for {from_gpus} GPUs or "
            "more, or nothing fits. Type trace.llm_gpus=N."
        )
    assumption = (
        f"{made:,} jobs of {from_gpus} GPUs or more train a language model instead, under its best parallel plan, and "
        "have the work that fills their run time."
    )
    return replace(
        result,
        model_code=code,
        models=names,
        gpu_type_code=type_code,
        gpu_types=gpu_types,
        gpus=on_gpus,
        global_batch=batch,
        work_scale=scale,
        assumptions=(*result.assumptions, assumption),
    )


def batch_of(model: PlannedModel) -> int:
    """Sequences per step, a power of two."""
    tokens = next(tokens for most, tokens in BATCH_TOKENS if model.parameters <= most)
    return max(1, tokens // (1 << (model.seq_len - 1).bit_length()))


def _drawn(
    known: list[PlannedModel], gpus: int, long: bool, asked: str, cluster: Cluster, draw: NDArray[np.float64]
) -> tuple[PlannedModel, str] | None:
    """A model and a GPU type for a job, by two numbers in [0, 1); None if nothing fits."""
    most = PARAMETERS_PER_GPU * gpus
    sized = [each for each in known if most / SPREAD <= each.parameters <= most]
    half = len(sized) // 2
    sized = sized[half:] if long else sized[: max(1, half)]
    fitting = [(model, gpu_types) for model in sized if (gpu_types := _types_for(model, gpus, asked, cluster))]
    if not fitting:
        return None
    model, gpu_types = fitting[int(draw[0] * len(fitting))]
    weights = np.cumsum([cluster.gpus_of(gpu_type) for gpu_type in gpu_types])
    return model, gpu_types[int(np.searchsorted(weights, draw[1] * weights[-1], side="right"))]


def _types_for(model: PlannedModel, gpus: int, asked: str, cluster: Cluster) -> list[str]:
    """The GPU types on which so many GPUs hold the model under a fixed plan."""
    return [
        gpu_type
        for gpu_type in ([asked] if asked else cluster.gpu_types)
        if gpus <= cluster.gpus_of(gpu_type) and _fits(model, gpus, gpu_type, cluster)
    ]


def _fits(model: PlannedModel, gpus: int, gpu_type: str, cluster: Cluster) -> bool:
    nodes = ((gpu_type, cluster.largest_nodes[gpu_type]),)
    table = tables.planned_tables(model.name, nodes, (gpus,), batch_of(model), data_parallel_only=True)
    return bool(np.isfinite(table.step_time_s).all())
