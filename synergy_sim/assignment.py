"""From rows of a log to training jobs: which model each is, and how much work."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from synergy_core.cluster import Cluster
from synergy_core.errors import InputError
from synergy_core.units import on_grid
from synergy_sim.ground_truth import Shape, Truth, packed
from synergy_sim.workload import Workload

CLASSES = (
    (1.0, ("cifar10", "ncf")),
    (10.0, ("deepspeech2", "bert")),
    (100.0, ("yolov3",)),
    (float("inf"), ("imagenet",)),
)
"""GPU-hours up to which a row becomes one of these models (goodput_policies.md, section 7)."""


def as_given(workload: Workload, cluster: Cluster, truth: Truth) -> Workload:
    """Every row names its application and its batch, and has all of the application's work.

    duration_s becomes how long the job would run as requested, alone and packed, on the type that it asks for, or the
    cluster's first that has room.
    """
    used = [workload.models[code] for code in np.unique(workload.model_code)]
    if odd := [name for name in used if name not in truth.names]:
        raise InputError(
            f"{workload.source}: nothing is known of application {odd[0] or '(none)'}; "
            f"known: {', '.join(truth.names) or 'none (set SYNERGY_DATA, or truth.profiles=FOLDER)'}."
        )
    if not (workload.global_batch > 0).all():
        row = int(np.argmin(workload.global_batch))
        raise InputError(
            f"{workload.source}, line {workload.line[row]}: job {workload.job_name[row]} has no batch size; expected "
            "at least 1 sample. trace.models=mix gives every job one."
        )
    duration_s = np.zeros(len(workload))
    keys = np.stack([workload.model_code, workload.gpus, workload.global_batch, workload.gpu_type_code], axis=1)
    rows, inverse = np.unique(keys, axis=0, return_inverse=True)
    for at, (model, gpus, batch, asked) in enumerate(rows.tolist()):
        shape, kind = _as_requested(workload.gpu_types[asked], gpus, cluster)
        alone_s = truth.requested_run_s(workload.models[model], kind, shape, batch)
        duration_s[inverse.reshape(-1) == at] = alone_s
    notes = (*workload.notes, truth.source(cluster))
    return replace(workload, duration_s=on_grid(duration_s), work_scale=np.ones(len(workload)), notes=notes)


def mixed(workload: Workload, cluster: Cluster, truth: Truth, random: np.random.Generator) -> Workload:
    """A model for every row, drawn by its GPU-time; its work is what it does as requested in the traced run time.

    Classes and models as in Pollux (OSDI 2021, section 5.1); the row's GPUs and run time are kept, unlike there, so
    that policies which give every job what it requested reproduce the trace. A row that names a model which is known
    keeps it. The requested batch is the initial one times the requested GPUs, within what fits.
    """
    names, code = _drawn_models(workload, truth, random)
    duration_s, gpus = workload.duration_s, workload.gpus
    batch, scale = np.zeros(len(workload), dtype=np.int32), np.zeros(len(workload))
    keys = np.stack([code, gpus, workload.gpu_type_code], axis=1)
    rows, inverse = np.unique(keys, axis=0, return_inverse=True)
    for at, (model, count, asked) in enumerate(rows.tolist()):
        mine = inverse.reshape(-1) == at
        shape, kind = _as_requested(workload.gpu_types[asked], count, cluster)
        app = truth.application(names[model])
        smallest, largest = app.local_batches(kind, shape)
        wanted = min(app.max_batch, max(app.initial_batch * count, smallest * count))
        batch[mine] = max(app.initial_batch, min(wanted, largest * count))
        alone_s = truth.requested_run_s(names[model], kind, shape, int(batch[mine][0]))
        scale[mine] = np.maximum(duration_s[mine], 1.0) / alone_s
    note = f"{len(workload):,} jobs got a model by their GPU-time, and the work that fills their traced run time"
    return replace(
        workload,
        model_code=code,
        models=names,
        global_batch=batch,
        work_scale=scale,
        notes=(*workload.notes, note, truth.source(cluster)),
    )


def _drawn_models(
    workload: Workload, truth: Truth, random: np.random.Generator
) -> tuple[tuple[str, ...], NDArray[np.int32]]:
    """Names, and each row's index among them."""
    gpu_h = workload.duration_s * workload.gpus / 3600.0
    names = tuple(dict.fromkeys([*(name for _, models in CLASSES for name in models), *truth.names]))
    draw = random.random(len(workload))
    code = np.zeros(len(workload), dtype=np.int32)
    floor_h = -1.0
    for below_h, models in CLASSES:
        chosen = np.array([names.index(name) for name in models])[(draw * len(models)).astype(np.int64)]
        code = np.where((gpu_h > floor_h) & (gpu_h <= below_h), chosen, code).astype(np.int32)
        floor_h = below_h
    given = np.array([names.index(name) if name in names else -1 for name in workload.models], dtype=np.int32)
    return names, np.where(given[workload.model_code] >= 0, given[workload.model_code], code)


def _as_requested(asked: str, gpus: int, cluster: Cluster) -> tuple[Shape, str]:
    """Packed on the type that the job asks for, else on the cluster's first that has room."""
    kinds = [asked] if asked else [kind for kind in cluster.gpu_types if cluster.gpus_of(kind) >= gpus]
    kind = (kinds or list(cluster.gpu_types))[0]
    per_node = next(each.gpus_per_node for each in cluster.node_types if each.gpu_type == kind)
    return packed(gpus, per_node), kind
