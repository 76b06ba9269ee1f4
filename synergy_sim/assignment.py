"""Turns rows of a log into training jobs: assigns each a model and an amount of work."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from synergy_core.cluster import Cluster, NodeType
from synergy_core.errors import InputError
from synergy_core.planner import tables
from synergy_core.planner.tables import PlannedModel
from synergy_core.units import GB, MB, TICK_S, on_grid
from synergy_runs.workload import CLASSES, Workload, in_turn, uniform
from synergy_sim.truth import Truth
from synergy_sim.truth.application import DataParallelApplication, NodeGpus, packed

SIZES = (
    (1.0, ("cifar10", "ncf")),
    (10.0, ("deepspeech2", "bert")),
    (100.0, ("yolov3",)),
    (float("inf"), ("imagenet",)),
)
"""GPU-hours up to which a row becomes one of these models (Pollux, OSDI 2021, section 5.1)."""

PROFILED_ON = NodeType("profiled", "v100", 1, 8, cpus=24.0, memory_bytes=500 * GB, storage_bytes_per_s=500 * MB)
"""The servers on which models were profiled for Synergy (OSDI 2022), 16 of which are its cluster."""


def as_given(workload: Workload, cluster: Cluster, truth: Truth) -> Workload:
    """Every row names its application and its batch, and has all of the application's work.

    A row of an architecture with parallel plans has the iterations that the log gives, on the GPUs that it asks for
    or, if no plan fits there, on the nearest on which one does (`enlarged`). duration_s becomes how long the job would
    run as requested, alone and packed, on the type that it asks for, or the cluster's first that has room.
    """
    used = [workload.models[code] for code in np.unique(workload.model_code)]
    if odd := [name for name in used if name not in truth.names and not truth.plans(name)]:
        raise InputError(
            f"{workload.source}: nothing is known of application {odd[0] or '(none)'}; "
            f"known: {', '.join(truth.names) or 'none (set SYNERGY_DATA, or truth.profiles=FOLDER)'}. What `python -m "
            "synergy_exec profile` measured of others is read by truth.profile=FILE."
        )
    workload = with_profiled_batches(workload, truth)
    if not (workload.global_batch > 0).all():
        row = int(np.argmin(workload.global_batch))
        raise InputError(
            f"{workload.source}, line {workload.line[row]}: job {workload.job_name[row]} has no batch size; expected "
            "at least 1 sample. trace.models=mix gives every job one."
        )
    workload = enlarged(with_bound_gpus(workload, truth), cluster, truth)
    duration_s, scale = np.zeros(len(workload)), np.ones(len(workload))
    columns = (workload.model_code, workload.gpus, workload.global_batch, workload.gpu_type_code)
    for (model, gpus, batch, asked), mine in alike(*columns):
        node_gpus, gpu_type = packed_as_asked(workload.gpu_types[asked], gpus, cluster)
        name = workload.models[model]
        if truth.plans(name):
            app = truth.planned_application(name, batch, cluster)
            scale[mine] = workload.iterations[mine] / app.work
            duration_s[mine] = workload.iterations[mine] * app.step_s(gpu_type, node_gpus, batch)
        else:
            duration_s[mine] = truth.requested_run_s(name, gpu_type, node_gpus, batch)
    notes = (*workload.notes, truth.source(cluster, used))
    return replace(workload, duration_s=on_grid(duration_s), work_scale=scale, notes=notes)


def alike(*columns: NDArray[Any]) -> Iterator[tuple[list[int], NDArray[np.bool_]]]:
    """Each combination of values that rows have in these columns, and which rows have it."""
    rows, inverse = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    for at, values in enumerate(rows.tolist()):
        yield values, inverse.reshape(-1) == at


def with_profiled_batches(workload: Workload, truth: Truth) -> Workload:
    """The workload with the initial batch of its model for every job of a profiled one that names none."""
    initial = [truth.profile[name].initial_batch if name in truth.profile else 0 for name in workload.models]
    batch = np.where(workload.global_batch > 0, workload.global_batch, np.array(initial)[workload.model_code])
    return replace(workload, global_batch=batch.astype(np.int32))


def with_bound_gpus(workload: Workload, truth: Truth) -> Workload:
    """The workload in which jobs request numbers of GPUs that truth.fixed_gpus and truth.min_gpus allow their model.

    So every policy that gives what is requested keeps to these limits too. Logged run times are kept.
    """
    gpus = workload.gpus.copy()
    for model in {*truth.fixed_gpus, *truth.min_gpus} & set(workload.models):
        mine = workload.model_code == workload.models.index(model)
        gpus[mine] = [truth.requested_gpus(model, each) for each in gpus[mine].tolist()]
    if not (changed := int((gpus != workload.gpus).sum())):
        return workload
    note = f"{changed:,} jobs request other GPUs than logged, as truth.fixed_gpus and truth.min_gpus say of their model"
    return replace(workload, gpus=gpus, notes=(*workload.notes, note))


def mixed(workload: Workload, cluster: Cluster, truth: Truth, random: np.random.Generator) -> Workload:
    """A model for every row, drawn by its GPU-time; its work is what it does as requested in the traced run time.

    Classes and models as in Pollux (OSDI 2021, section 5.1); the row's GPUs and run time are kept, unlike there, so
    that policies which give every job what it requested reproduce the trace. A row that names a model which is known
    keeps it. The requested batch is the initial one times the requested GPUs, within what fits.
    """
    whose = "each job" if workload.models == ("",) else "each job whose model the log does not name"
    names, code = _named(workload, truth, SIZES)
    draw = uniform(workload, random)
    gpu_h = (workload.ran_before_s + workload.duration_s) * workload.gpus / 3600.0
    size = np.searchsorted([below_h for below_h, _ in SIZES], gpu_h)
    for at, (_, models) in enumerate(SIZES):
        drawn = np.array([names.index(name) for name in models])[(draw * len(models)).astype(np.int64)]
        code = np.where((code < 0) & (size == at), drawn, code).astype(np.int32)
    workload = with_bound_gpus(replace(workload, models=names, model_code=code), truth)
    batch, scale = np.zeros(len(workload), dtype=np.int32), np.zeros(len(workload))
    for (model, count, asked), mine in alike(code, workload.gpus, workload.gpu_type_code):
        node_gpus, gpu_type = packed_as_asked(workload.gpu_types[asked], count, cluster)
        batch[mine] = _batch_of(truth.application(names[model]), gpu_type, node_gpus)
        alone_s = truth.requested_run_s(names[model], gpu_type, node_gpus, int(batch[mine][0]))
        scale[mine] = np.maximum(workload.duration_s[mine], TICK_S) / alone_s
    used = [names[each] for each in np.unique(code)]
    assumption = (
        f"The log does not say what jobs train: {whose} was given one of {', '.join(used)} by its GPU time, and as "
        "much work as its logged run time means on its requested GPUs."
    )
    return _with_models(workload, cluster, truth, assumption, global_batch=batch, work_scale=scale)


def _with_models(workload: Workload, cluster: Cluster, truth: Truth, assumption: str, **columns: Any) -> Workload:
    """The workload with these columns, whose jobs were given their models; says so, and where step times are from."""
    used = [workload.models[each] for each in np.unique(workload.model_code)]
    return replace(
        workload,
        **columns,
        models_assigned=True,
        assumptions=(*workload.assumptions, assumption),
        notes=(*workload.notes, truth.source(cluster, used)),
    )


def _batch_of(app: DataParallelApplication, gpu_type: str, node_gpus: NodeGpus) -> int:
    """The batch that a job requests: the initial batch × its GPUs, limited to what fits."""
    count = sum(node_gpus)
    smallest, largest = app.local_batches(gpu_type, node_gpus)
    wanted = min(app.max_batch, max(app.initial_batch * count, smallest * count))
    return max(app.initial_batch, min(wanted, largest * count))


def by_class(workload: Workload, cluster: Cluster, truth: Truth, mix: Sequence[float]) -> Workload:
    """The model that a row names, else one by class (`CLASSES`); its work is what it does in the traced run time.

    As in the simulator of Synergy (Mohan et al., OSDI 2022), a run time counts as that of a job whose GPUs have
    their part of a node of `PROFILED_ON`, whatever the nodes here, and the work is the whole iterations that this is
    enough for. Where nodes name no CPUs, input is never waited for. The requested batch is as in `mixed`. The window's
    own jobs take turns at the models first, carried ones after them.
    """
    names, code = _named(workload, truth, CLASSES)
    silent = np.array([not each for each in workload.models])[workload.model_code]
    if odd := np.flatnonzero((code < 0) & ~silent).tolist():
        raise InputError(
            f"{workload.source}, line {workload.line[odd[0]]}: nothing is known of application "
            f"{workload.models[workload.model_code[odd[0]]]}; known: {', '.join(truth.names)}."
        )
    turns = np.concatenate([np.flatnonzero(silent & part) for part in (~workload.carried, workload.carried)])
    code[turns] = [names.index(each) for each in in_turn(mix, len(turns))]
    workload = with_bound_gpus(replace(workload, models=names, model_code=code), truth)
    batch, scale = np.zeros(len(workload), dtype=np.int32), np.zeros(len(workload))
    iterations = np.zeros(len(workload))
    for (model, count, asked), mine in alike(code, workload.gpus, workload.gpu_type_code):
        node_gpus, gpu_type = packed_as_asked(workload.gpu_types[asked], count, cluster)
        app = truth.application(names[model])
        plan = app.as_requested(gpu_type, node_gpus, _batch_of(app, gpu_type, node_gpus))
        step_s = app.iteration_s(gpu_type, node_gpus, plan)
        if cluster.counts_shares:
            samples = plan.global_batch / count
            step_s = max(step_s, app.fed_s(PROFILED_ON.proportional, PROFILED_ON, min(node_gpus), samples))
        whole = np.floor(workload.duration_s[mine] / (step_s * truth.slowdown.get(names[model], 1.0)))
        batch[mine], iterations[mine] = plan.global_batch, np.maximum(whole, 1.0)
        scale[mine] = iterations[mine] / app.iterations(plan.global_batch)[-1]
    assumption = "Each job was given a model by its class, and the whole iterations that fill its traced run time"
    if cluster.counts_shares:
        share, storage = PROFILED_ON.proportional, PROFILED_ON.storage_bytes_per_s / PROFILED_ON.gpus_per_node
        gpu_has = f"{share.cpus:g} CPUs, {share.memory_bytes / GB:g} GB and {storage / MB:g} MB/s of storage"
        assumption += f" where each GPU has {gpu_has}"
    columns = {"global_batch": batch, "work_scale": scale, "iterations": iterations}
    return _with_models(workload, cluster, truth, f"{assumption}.", **columns)


def _named(
    workload: Workload, truth: Truth, groups: Iterable[tuple[Any, Sequence[str]]]
) -> tuple[tuple[str, ...], NDArray[np.int32]]:
    """The models that jobs may have, and for each row the index of the one that its log names; −1 for none of them."""
    names = tuple(dict.fromkeys([*(name for _, models in groups for name in models), *truth.names]))
    given = np.array([names.index(each) if each in names else -1 for each in workload.models], dtype=np.int32)
    return names, given[workload.model_code]


def packed_as_asked(asked: str, gpus: int, cluster: Cluster) -> tuple[NodeGpus, str]:
    """A job's GPUs by node, packed, and their type: the one that it asks for, else the first that has room."""
    gpu_types = [asked] if asked else [gpu_type for gpu_type in cluster.gpu_types if cluster.gpus_of(gpu_type) >= gpus]
    gpu_type = (gpu_types or list(cluster.gpu_types))[0]
    return packed(gpus, cluster.largest_nodes[gpu_type]), gpu_type


def enlarged(workload: Workload, cluster: Cluster, truth: Truth) -> Workload:
    """The workload with GPU requests doubled until a plan fits, for jobs that request too few.

    A type on which none fits at any number gives way to the first on which one does. Raises InputError where a job with
    plans has no iterations, or fits nowhere.
    """
    planned = np.array([truth.plans(name) for name in workload.models], dtype=bool)[workload.model_code]
    if not planned.any():
        return workload
    if np.isnan(workload.iterations[planned]).any():
        row = int(np.flatnonzero(planned & np.isnan(workload.iterations))[0])
        raise InputError(
            f"{workload.source}, line {workload.line[row]}: job {workload.job_name[row]} has parallel plans, and the "
            "log does not say after how many iterations it is done. Type trace.models=llm to keep its run time instead."
        )
    gpus, type_code = workload.gpus.copy(), workload.gpu_type_code.copy()
    gpu_types = tuple(dict.fromkeys((*workload.gpu_types, *cluster.gpu_types)))
    for row in np.flatnonzero(planned).tolist():
        name, batch = workload.models[workload.model_code[row]], int(workload.global_batch[row])
        app, asked = truth.planned_application(name, batch, cluster), gpu_types[type_code[row]]
        for gpu_type, count in _larger(int(gpus[row]), asked, cluster):
            node_gpus, _ = packed_as_asked(gpu_type, count, cluster)
            if np.isfinite(app.step_s(gpu_type, node_gpus, batch)):
                gpus[row], type_code[row] = count, gpu_types.index(gpu_type)
                break
        else:
            where = f"{workload.source}, line {workload.line[row]}"
            raise InputError(f"{where}: no plan of {app.name} fits on {cluster.describe()}.")
    asked_for = np.array([bool(gpu_type) for gpu_type in gpu_types])[workload.gpu_type_code]
    changed = int(((gpus != workload.gpus) | (asked_for & (type_code != workload.gpu_type_code))).sum())
    note = f"{changed:,} jobs asked for GPUs on which no plan of their model fits, and got more or others"
    notes = (*workload.notes, note) if changed else workload.notes
    return replace(workload, gpus=gpus, gpu_type_code=type_code, gpu_types=gpu_types, notes=notes)


def _larger(gpus: int, asked: str, cluster: Cluster) -> Iterator[tuple[str, int]]:
    """Alternatives to a job's request, the closest first: doubled GPU counts, then the same on other GPU types."""
    for gpu_type in dict.fromkeys((asked, *cluster.gpu_types)) if asked else cluster.gpu_types:
        count = gpus
        while count <= cluster.gpus_of(gpu_type):
            yield gpu_type, count
            count *= 2


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

    Arrivals, GPUs and run times are the log's. The model is drawn by the job's GPUs and GPU time, as in Arena's traces
    (EuroSys 2026), where arrivals alone are production data too.

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
    """A model and a GPU type for a job, chosen by two numbers in [0, 1); None if no plan fits."""
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
    """The GPU types on which the model fits this many GPUs under a fixed plan."""
    found = []
    for gpu_type in [asked] if asked else cluster.gpu_types:
        nodes = ((gpu_type, cluster.largest_nodes[gpu_type]),)
        if gpus <= cluster.gpus_of(gpu_type):
            table = tables.planned_tables(model.name, nodes, (gpus,), batch_of(model), data_parallel_only=True)
            if np.isfinite(table.step_time_s).all():
                found.append(gpu_type)
    return found
