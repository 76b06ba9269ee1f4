"""Turns rows of a log into training jobs: assigns each a model and an amount of work."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from synergy_core.errors import InputError
from synergy_core.performance.planner import tables
from synergy_core.performance.planner.tables import PlannedModel
from synergy_core.scheduling.jobs.cluster import Cluster, NodeType
from synergy_core.units import GB, MB, TICK_S, on_grid
from synergy_runs.generators.by_class import CLASSES, in_turn
from synergy_runs.inputs.workload import Workload, uniform
from synergy_runs.traces.columns import coded
from synergy_sim.truth import Truth
from synergy_sim.truth.application import DataParallelApplication, NodeGpus, packed

SIZES = (
    (1.0, ("cifar10", "ncf")),
    (10.0, ("deepspeech2", "bert")),
    (100.0, ("yolov3",)),
    (float("inf"), ("imagenet",)),
)
"""Entries (maximum GPU-hours of a job, models that such jobs may be given) (Pollux, OSDI 2021, section 5.1)."""

TUNED_BATCHES = 40
"""Number of batch sizes that a user tries, from the initial batch to the model's largest in equal ratios."""
PROFILED_ON = NodeType("profiled", "v100", 1, 8, cpus=24.0, memory_bytes=500 * GB, storage_bytes_per_s=500 * MB)
"""Server type on which Synergy (OSDI 2022) profiled its models; its cluster has 16 of them."""


def as_given(workload: Workload, cluster: Cluster, truth: Truth) -> Workload:
    """Makes every job train the application that its row in the log names, at the row's batch, to the end.

    A job with parallel plans does the logged iterations; if no plan fits the GPUs that it requests, it requests more or
    other GPUs (`enlarged`). duration_s becomes the run time of the job as requested, alone, on packed GPUs of the
    requested type, else the first type with enough GPUs. Raises InputError for an unknown application or batch.
    """
    used = _models(workload)
    if odd := [name for name in used if name not in truth.names and not truth.plans(name)]:
        raise InputError(
            f"{workload.source}: unknown application {odd[0] or '(none)'}; "
            f"known: {', '.join(truth.names) or 'none (set SYNERGY_DATA, or truth.profiles=FOLDER)'}. The speed of "
            "other models, such as the small ones that the executor trains with +trace=demo, has to be measured: type "
            "python -m synergy_exec profile, and then, to simulate what was measured, "
            "truth.profile=results/profile.json testbed=executor cluster.gpu_type=cpu cluster.max_wait=2."
        )
    workload = with_profiled_batches(workload, truth)
    jobs = workload.jobs
    if not (jobs["global_batch"] > 0).all():
        row = int(np.argmin(jobs["global_batch"]))
        raise InputError(
            f"{workload.source}, line {jobs['line'][row]}: job {jobs['job_name'][row]} has no batch size; expected "
            "at least 1 sample. trace.models=mix gives every job one."
        )
    workload = enlarged(with_bound_gpus(workload, truth), cluster, truth)
    duration_s, scale = np.zeros(len(workload)), np.ones(len(workload))
    jobs, models, kinds = workload.jobs, workload.jobs["model"], workload.jobs["gpu_type"]
    columns = (models.codes, jobs["gpus"], jobs["global_batch"], kinds.codes)
    for (model, gpus, batch, requested), mine in alike(*columns):
        node_gpus, gpu_type = packed_as_requested(kinds.categories[requested], gpus, cluster)
        name = models.categories[model]
        if truth.plans(name):
            app = truth.planned_application(name, batch, cluster)
            scale[mine] = jobs["iterations"][mine] / app.work
            duration_s[mine] = jobs["iterations"][mine] * app.step_s(gpu_type, node_gpus, batch)
        else:
            duration_s[mine] = truth.requested_run_s(name, gpu_type, node_gpus, batch)
    notes = (*workload.notes, truth.source(cluster, used))
    made = workload.with_columns(duration_s=on_grid(duration_s), work_scale=scale)
    return replace(made, notes=notes)


def _models(workload: Workload) -> list[str]:
    """The models that jobs have, in the order of their codes."""
    model = workload.jobs["model"]
    return [str(model.categories[code]) for code in np.unique(model.codes)]


def alike(*columns: NDArray[Any]) -> Iterator[tuple[list[int], NDArray[np.bool_]]]:
    """Yields each combination of values that occurs in these columns, and a mask of the rows with this combination."""
    rows, inverse = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    for index, values in enumerate(rows.tolist()):
        yield values, inverse.reshape(-1) == index


def with_profiled_batches(workload: Workload, truth: Truth) -> Workload:
    """The workload in which jobs of profiled models without a batch get the model's initial batch."""
    jobs = workload.jobs
    initial = [truth.profile[name].initial_batch if name in truth.profile else 0 for name in jobs["model"].categories]
    batch = np.where(jobs["global_batch"] > 0, jobs["global_batch"], np.array(initial)[jobs["model"].codes])
    return workload.with_columns(global_batch=batch)


def with_bound_gpus(workload: Workload, truth: Truth) -> Workload:
    """The workload with GPU requests changed to numbers that truth.fixed_gpus and truth.min_gpus allow.

    Policies that give jobs what they request therefore respect these limits too. Logged run times are kept.
    """
    jobs = workload.jobs
    gpus = jobs["gpus"].copy()
    for model in {*truth.fixed_gpus, *truth.min_gpus} & set(jobs["model"].categories):
        mine = jobs["model"] == model
        gpus[mine] = [truth.requested_gpus(model, each) for each in gpus[mine].tolist()]
    if not (changed := int((gpus != jobs["gpus"]).sum())):
        return workload
    note = f"{changed:,} jobs request another number of GPUs than logged, because of truth.fixed_gpus or truth.min_gpus"
    return replace(workload.with_columns(gpus=gpus), notes=(*workload.notes, note))


def mixed(workload: Workload, cluster: Cluster, truth: Truth, random: np.random.Generator) -> Workload:
    """Draws a model for every job by its GPU time, and work that takes the logged run time on the requested GPUs.

    Classes and models are those of Pollux (OSDI 2021, section 5.1). Unlike there, GPUs and run times are kept, so that
    policies which give every job what it requests reproduce the trace. A known model that the log names is kept.
    The requested batch is the initial batch × the requested GPUs, limited to what fits.
    """
    jobs = workload.jobs
    whose = "each job" if jobs["model"].categories.tolist() == [""] else "each job whose model the log does not name"
    names, code = _named(workload, truth, SIZES)
    draw = uniform(workload, random)
    gpu_h = (jobs["ran_before_s"] + jobs["duration_s"]) * jobs["gpus"] / 3600.0
    size = np.searchsorted([below_h for below_h, _ in SIZES], gpu_h)
    for size_class, (_, models) in enumerate(SIZES):
        drawn = np.array([names.index(name) for name in models])[(draw * len(models)).astype(np.int64)]
        code = np.where((code < 0) & (size == size_class), drawn, code).astype(np.int32)
    workload = with_bound_gpus(workload.with_columns(model=coded(code, names)), truth)
    jobs, kinds = workload.jobs, workload.jobs["gpu_type"]
    batch, scale = np.zeros(len(jobs), dtype=np.int32), np.zeros(len(jobs))
    for (model, count, requested), mine in alike(code, jobs["gpus"], kinds.codes):
        node_gpus, gpu_type = packed_as_requested(kinds.categories[requested], count, cluster)
        batch[mine] = _batch_of(truth.application(names[model]), gpu_type, node_gpus)
        alone_s = truth.requested_run_s(names[model], gpu_type, node_gpus, int(batch[mine][0]))
        scale[mine] = np.maximum(jobs["duration_s"][mine], TICK_S) / alone_s
    used = [names[each] for each in np.unique(code)]
    assumption = (
        f"The log does not say what jobs train: {whose} was given one of {', '.join(used)} by its GPU time, and as "
        "much work as its logged run time means on its requested GPUs."
    )
    return _with_models(workload, cluster, truth, assumption, global_batch=batch, work_scale=scale)


def _with_models(workload: Workload, cluster: Cluster, truth: Truth, assumption: str, **columns: Any) -> Workload:
    """Replaces columns after models were assigned; adds the assumption and a note on the source of step times."""
    return replace(
        workload.with_columns(**columns),
        models_assigned=True,
        assumptions=(*workload.assumptions, assumption),
        notes=(*workload.notes, truth.source(cluster, _models(workload))),
    )


def _batch_of(app: DataParallelApplication, gpu_type: str, node_gpus: NodeGpus) -> int:
    """The requested batch of a job: the initial batch × its GPUs, limited to what fits."""
    count = sum(node_gpus)
    smallest, largest = app.local_batches(gpu_type, node_gpus)
    wanted = min(app.max_batch, max(app.initial_batch * count, smallest * count))
    return max(app.initial_batch, min(wanted, largest * count))


def tuned(workload: Workload, cluster: Cluster, truth: Truth) -> Workload:
    """Every job requests the fixed batch with which it ends soonest, alone on its requested GPUs.

    As in Pollux's TunedJobs (OSDI 2021, section 5.2), users know this batch; unlike there, the number of GPUs is the
    log's. Jobs of models with parallel plans keep their batch. Run times of the log stay those of the requested batch.
    Raises InputError if jobs have no model.
    """
    jobs = workload.jobs
    if not np.isfinite(jobs["work_scale"]).any():
        raise InputError("batch=tuned: jobs have no models, so no batch is known to be best. Type trace.models=mix.")
    batch = jobs["global_batch"].copy()
    for (model, count, requested, typed), mine in alike(
        jobs["model"].codes, jobs["gpus"], jobs["gpu_type"].codes, jobs["global_batch"]
    ):
        name = jobs["model"].categories[model]
        if truth.plans(name) or typed <= 0:
            continue
        node_gpus, gpu_type = packed_as_requested(jobs["gpu_type"].categories[requested], count, cluster)
        app = truth.application(name)
        largest = max(typed, min(app.max_batch, count * app.local_batches(gpu_type, node_gpus)[1]))
        tried = np.unique(np.rint(np.geomspace(min(typed, app.initial_batch), largest, TUNED_BATCHES)).astype(int))
        run_s = {each: truth.requested_run_s(name, gpu_type, node_gpus, each) for each in (typed, *tried.tolist())}
        batch[mine] = min(run_s, key=lambda each: run_s[each])
    return workload.with_columns(global_batch=batch)


def by_class(workload: Workload, cluster: Cluster, truth: Truth, mix: Sequence[float]) -> Workload:
    """Gives jobs the model that their row names, else one by class (`CLASSES`), and work for their logged run time.

    As in the simulator of Synergy (Mohan et al., OSDI 2022), a logged run time is assumed to be that of a job with its
    proportional share of `PROFILED_ON`, whatever the nodes here, and the work is rounded down to whole iterations. If
    nodes declare no CPUs, training never waits for input. The requested batch is as in `mixed`. Models take turns
    (`in_turn`), first over the jobs of the window, then over the carried jobs.
    """
    names, code = _named(workload, truth, CLASSES)
    jobs = workload.jobs
    silent = jobs["model"] == ""
    if odd := np.flatnonzero((code < 0) & ~silent).tolist():
        raise InputError(
            f"{workload.source}, line {jobs['line'][odd[0]]}: unknown application "
            f"{jobs['model'][odd[0]]}; known: {', '.join(truth.names)}."
        )
    turns = np.concatenate([np.flatnonzero(silent & part) for part in (~jobs["carried"], jobs["carried"])])
    code[turns] = [names.index(each) for each in in_turn(mix, len(turns))]
    workload = with_bound_gpus(workload.with_columns(model=coded(code, names)), truth)
    jobs, kinds = workload.jobs, workload.jobs["gpu_type"]
    batch, scale = np.zeros(len(jobs), dtype=np.int32), np.zeros(len(jobs))
    iterations = np.zeros(len(jobs))
    for (model, count, requested), mine in alike(code, jobs["gpus"], kinds.codes):
        node_gpus, gpu_type = packed_as_requested(kinds.categories[requested], count, cluster)
        app = truth.application(names[model])
        plan = app.as_requested(gpu_type, node_gpus, _batch_of(app, gpu_type, node_gpus))
        step_s = app.iteration_s(gpu_type, node_gpus, plan)
        if cluster.counts_shares:
            samples = plan.global_batch / count
            step_s = max(step_s, app.fed_s(PROFILED_ON.proportional, PROFILED_ON, min(node_gpus), samples))
        whole = np.floor(jobs["duration_s"][mine] / (step_s * truth.slowdown.get(names[model], 1.0)))
        batch[mine], iterations[mine] = plan.global_batch, np.maximum(whole, 1.0)
        scale[mine] = iterations[mine] / app.iterations(plan.global_batch)[-1]
    assumption = "Each job was given a model by its class, and as many whole iterations as fit into its logged run time"
    if cluster.counts_shares:
        share, storage = PROFILED_ON.proportional, PROFILED_ON.storage_bytes_per_s / PROFILED_ON.gpus_per_node
        gpu_has = f"{share.cpus:g} CPUs, {share.memory_bytes / GB:g} GB and {storage / MB:g} MB/s of storage"
        assumption += f" if each GPU has {gpu_has}"
    columns = {"global_batch": batch, "work_scale": scale, "iterations": iterations}
    return _with_models(workload, cluster, truth, f"{assumption}.", **columns)


def _named(
    workload: Workload, truth: Truth, groups: Iterable[tuple[Any, Sequence[str]]]
) -> tuple[tuple[str, ...], NDArray[np.int32]]:
    """The models that jobs may have, and for each row the index of the model that its log names, or −1."""
    names = tuple(dict.fromkeys([*(name for _, models in groups for name in models), *truth.names]))
    model = workload.jobs["model"]
    given = np.array([names.index(each) if each in names else -1 for each in model.categories], dtype=np.int32)
    return names, given[model.codes]


def packed_as_requested(requested: str, gpus: int, cluster: Cluster) -> tuple[NodeGpus, str]:
    """(GPUs by node, GPU type) of a packed job: on the requested type, else on the first type with enough GPUs."""
    gpu_types = [requested] if requested else [each for each in cluster.gpu_types if cluster.gpus_of(each) >= gpus]
    gpu_type = (gpu_types or list(cluster.gpu_types))[0]
    return packed(gpus, cluster.largest_nodes[gpu_type]), gpu_type


def enlarged(workload: Workload, cluster: Cluster, truth: Truth) -> Workload:
    """Doubles the GPUs that a job with plans requests until a plan of its model fits.

    If no plan fits any number of GPUs of the requested type, the next type is tried. Raises InputError if a job with
    plans has no logged iterations, or fits no type.
    """
    jobs = workload.jobs
    planned = np.array([truth.plans(name) for name in jobs["model"].categories], dtype=bool)[jobs["model"].codes]
    if not planned.any():
        return workload
    if np.isnan(jobs["iterations"][planned]).any():
        row = int(np.flatnonzero(planned & np.isnan(jobs["iterations"]))[0])
        raise InputError(
            f"{workload.source}, line {jobs['line'][row]}: job {jobs['job_name'][row]} has parallel plans, but the "
            "log does not give its iterations. Type trace.models=llm to keep its run time instead."
        )
    gpus, type_code = jobs["gpus"].copy(), jobs["gpu_type"].codes.astype(np.int32)
    gpu_types = tuple(dict.fromkeys((*jobs["gpu_type"].categories, *cluster.gpu_types)))
    for row in np.flatnonzero(planned).tolist():
        name, batch = jobs["model"][row], int(jobs["global_batch"][row])
        app, requested = truth.planned_application(name, batch, cluster), gpu_types[type_code[row]]
        for gpu_type, count in _larger(int(gpus[row]), requested, cluster):
            node_gpus, _ = packed_as_requested(gpu_type, count, cluster)
            if np.isfinite(app.step_s(gpu_type, node_gpus, batch)):
                gpus[row], type_code[row] = count, gpu_types.index(gpu_type)
                break
        else:
            where = f"{workload.source}, line {jobs['line'][row]}"
            raise InputError(f"{where}: no plan of {app.name} fits on {cluster.describe()}.")
    changed = int(((gpus != jobs["gpus"]) | ((jobs["gpu_type"] != "") & (type_code != jobs["gpu_type"].codes))).sum())
    note = f"{changed:,} jobs request more or other GPUs than logged, because no plan of their model fits those"
    notes = (*workload.notes, note) if changed else workload.notes
    made = workload.with_columns(gpus=gpus, gpu_type=coded(type_code, gpu_types))
    return replace(made, notes=notes)


def _larger(gpus: int, requested: str, cluster: Cluster) -> Iterator[tuple[str, int]]:
    """Yields alternatives to a request, the closest first: doubled GPU counts, then the same on other GPU types."""
    for gpu_type in dict.fromkeys((requested, *cluster.gpu_types)) if requested else cluster.gpu_types:
        count = gpus
        while count <= cluster.gpus_of(gpu_type):
            yield gpu_type, count
            count *= 2


PARAMETERS_PER_GPU = 0.9e9
"""Maximum parameters of a model per requested GPU; their weights, gradients and optimizer state need 14 GB or more."""
SPREAD = 8.0
"""Maximum ratio between the parameters of two models that jobs with the same number of GPUs may get."""
LONG_GPU_H = 10.0
"""Jobs with more GPU-hours draw from the larger half of the models for their GPUs, others from the smaller half."""
BATCH_TOKENS = ((1e9, 2**19), (5e9, 2**20), (float("inf"), 2**21))
"""Entries (maximum parameters, tokens per step) (Brown et al., NeurIPS 2020, table 2.1: 0.5, 1 and 2 million)."""


def with_language_models(
    workload: Workload, cluster: Cluster, truth: Truth, random: np.random.Generator, *, from_gpus: int
) -> Workload:
    """Gives jobs of `from_gpus` or more GPUs, a power of two, a language model; `mixed` gives all others a model.

    Arrivals, GPUs and run times are the log's. The model is drawn by the job's GPUs and GPU time, as in Arena's traces
    (EuroSys 2026), in which only arrivals are production data.

    A job's work takes its logged run time on the GPUs and the GPU type that it requests. A job without a requested type
    gets one on which the model fits (`_types_for`), drawn in proportion to the cluster's GPUs.
    """
    jobs = workload.jobs
    result = mixed(workload, cluster, truth, random)
    gpus = jobs["gpus"].astype(np.int64)
    rows = np.flatnonzero((gpus >= from_gpus) & ((gpus & (gpus - 1)) == 0))
    draws = uniform(workload, random, 2)
    known = sorted((tables.model_named(name) for name in tables.language_models()), key=lambda each: each.parameters)
    names = tuple(dict.fromkeys((*result.jobs["model"].categories, *(each.name for each in known))))
    gpu_types = tuple(dict.fromkeys((*jobs["gpu_type"].categories, *cluster.gpu_types)))
    code, type_code = (each.codes.astype(np.int32) for each in (result.jobs["model"], jobs["gpu_type"]))
    batch, scale, on_gpus = (result.jobs[name].copy() for name in ("global_batch", "work_scale", "gpus"))
    for row in rows.tolist():
        long = jobs["duration_s"][row] * gpus[row] > LONG_GPU_H * 3600.0
        found = _drawn(known, int(gpus[row]), bool(long), jobs["gpu_type"][row], cluster, draws[row])
        if found is None:
            continue
        model, gpu_type = found
        app = truth.planned_application(model.name, batch_of(model), cluster)
        step_s = app.step_s(gpu_type, packed(int(gpus[row]), cluster.largest_nodes[gpu_type]), app.initial_batch)
        code[row], type_code[row] = names.index(model.name), gpu_types.index(gpu_type)
        batch[row], on_gpus[row] = app.initial_batch, gpus[row]
        scale[row] = max(float(jobs["duration_s"][row]), TICK_S) / (app.work * step_s)
    language = int(np.isin(code, [names.index(each.name) for each in known]).sum())
    if not language:
        raise InputError(
            f"{workload.source}: trace.models=llm gave no job a language model: none requests {from_gpus} GPUs or "
            "more (a power of two), or no model fits. Type trace.llm_gpus=N."
        )
    assumption = (
        f"{language:,} jobs of {from_gpus} GPUs or more train a language model instead, under its best parallel plan, "
        "and have the work that fills their run time."
    )
    made = result.with_columns(
        model=coded(code, names),
        gpu_type=coded(type_code, gpu_types),
        gpus=on_gpus,
        global_batch=batch,
        work_scale=scale,
    )
    return replace(made, assumptions=(*result.assumptions, assumption))


def batch_of(model: PlannedModel) -> int:
    """The global batch of a language model in sequences per step: `BATCH_TOKENS` ÷ the length, as a power of two."""
    tokens = next(tokens for most, tokens in BATCH_TOKENS if model.parameters <= most)
    return max(1, tokens // (1 << (model.seq_len - 1).bit_length()))


def _drawn(
    known: list[PlannedModel], gpus: int, long: bool, requested: str, cluster: Cluster, draw: NDArray[np.float64]
) -> tuple[PlannedModel, str] | None:
    """A model and a GPU type for a job, chosen by two random numbers in [0, 1); None if no plan fits."""
    most = PARAMETERS_PER_GPU * gpus
    sized = [each for each in known if most / SPREAD <= each.parameters <= most]
    half = len(sized) // 2
    sized = sized[half:] if long else sized[: max(1, half)]
    fitting = [(model, gpu_types) for model in sized if (gpu_types := _types_for(model, gpus, requested, cluster))]
    if not fitting:
        return None
    model, gpu_types = fitting[int(draw[0] * len(fitting))]
    weights = np.cumsum([cluster.gpus_of(gpu_type) for gpu_type in gpu_types])
    return model, gpu_types[int(np.searchsorted(weights, draw[1] * weights[-1], side="right"))]


def _types_for(model: PlannedModel, gpus: int, requested: str, cluster: Cluster) -> list[str]:
    """The GPU types on which this many GPUs hold replicas of the model, each on the fewest GPUs that hold it."""
    found = []
    for gpu_type in [requested] if requested else cluster.gpu_types:
        nodes = ((gpu_type, cluster.largest_nodes[gpu_type]),)
        if gpus <= cluster.gpus_of(gpu_type):
            table = tables.planned_tables(model.name, nodes, (gpus,), batch_of(model), data_parallel_only=True)
            if np.isfinite(table.step_time_s).all():
                found.append(gpu_type)
    return found
