"""From rows of a log to training jobs: which model each is, and how much work."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from synergy_core.cluster import Cluster
from synergy_core.errors import InputError
from synergy_core.units import on_grid
from synergy_sim.ground_truth import Truth, packed
from synergy_sim.workload import Workload


def as_given(workload: Workload, cluster: Cluster, truth: Truth) -> Workload:
    """Every row names its application and its batch, and has all of the application's work.

    duration_s becomes how long the job would run as requested, alone, packed on its GPU type (the cluster's first
    unless it asks for one).
    """
    used = [workload.models[code] for code in np.unique(workload.model_code)]
    if odd := [name for name in used if name not in truth.names]:
        raise InputError(
            f"{workload.source}: nothing is known of application {odd[0] or '(none)'}; "
            f"known: {', '.join(truth.names) or 'none (set SYNERGY_DATA, or truth.profiles=FOLDER)'}."
        )
    duration_s = np.zeros(len(workload))
    keys = np.stack([workload.model_code, workload.gpus, workload.global_batch, workload.gpu_type_code], axis=1)
    rows, inverse = np.unique(keys, axis=0, return_inverse=True)
    for at, (model, gpus, batch, asked) in enumerate(rows.tolist()):
        kind = workload.gpu_types[asked] or cluster.gpu_types[0]
        per_node = next(each.gpus_per_node for each in cluster.node_types if each.gpu_type == kind)
        alone_s = truth.requested_run_s(workload.models[model], kind, packed(gpus, per_node), batch)
        duration_s[inverse.reshape(-1) == at] = alone_s
    return replace(workload, duration_s=on_grid(duration_s), work_scale=np.ones(len(workload)))


def mixed(workload: Workload, cluster: Cluster, truth: Truth, random: np.random.Generator) -> Workload:
    """A model for every row, drawn by its GPU-time; its work is what it does as requested in the traced run time."""
    raise InputError("trace.models=mix is not built yet.")
