"""Small workloads for tests, and the facts of a run as plain tuples."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from synergy_core.scheduling.decisions.ordering import walks
from synergy_core.scheduling.decisions.scheduler import scheduler_for
from synergy_core.scheduling.jobs.cluster import Cluster, NodeType
from synergy_core.scheduling.policies import get_policy, policy_names
from synergy_core.units import TICKS_PER_S, on_grid
from synergy_runs.inputs.workload import Workload
from synergy_runs.outputs.facts import Kind

RIGID = sorted(name for name in policy_names() if not getattr(get_policy(name), "reads_goodput", False))
"""Policies that run jobs of which only a run time is known."""
WALKING = partial(scheduler_for, walker_of=walks)
"""Makes schedulers that walk over all jobs also where lanes would do."""
NAMES = {Kind.START: "start", Kind.STOP: "stop", Kind.FINISH: "finish"}


def workload(rows, *, tenants=None, kinds=None, given=None, estimates=None, models=None) -> Workload:
    """rows: (submit_s, gpus, duration_s), in any order; the other columns are texts or numbers per row."""
    order = sorted(range(len(rows)), key=lambda i: rows[i][0])
    rows = [rows[i] for i in order]

    def coded(texts):
        texts = [texts[i] for i in order] if texts is not None else [""] * len(rows)
        values = tuple(dict.fromkeys(texts))
        return np.array([values.index(text) for text in texts], dtype=np.int32), values

    tenant, tenant_names = coded(tenants)
    kind, kind_names = coded(kinds)
    got, got_names = coded(given)
    model, model_names = coded(models)
    durations = np.array([float(row[2]) for row in rows])
    estimate = durations if estimates is None else np.array([float(estimates[i]) for i in order])
    zeros = np.zeros(len(rows), dtype=np.int32)
    return Workload(
        name="test",
        source="made by a test",
        sha256="",
        origin_s=0.0,
        job_name=[f"job-{i}" for i in order],
        submit_time_s=on_grid(np.array([float(row[0]) for row in rows])),
        duration_s=on_grid(durations),
        estimate_s=on_grid(estimate),
        gpus=np.array([row[1] for row in rows], dtype=np.int32),
        cpus=np.full(len(rows), np.nan),
        memory_bytes=np.full(len(rows), np.nan),
        virtual_cluster_code=tenant,
        virtual_clusters=tenant_names,
        user_code=zeros,
        users=("",),
        partition_code=zeros,
        partitions=("",),
        gpu_type_code=kind,
        gpu_types=kind_names,
        given_gpu_type_code=got,
        given_gpu_types=got_names,
        model_code=model,
        models=model_names,
        global_batch=zeros,
        work_scale=np.full(len(rows), np.nan),
        iterations=np.full(len(rows), np.nan),
        estimate_drawn=np.zeros(len(rows), dtype=bool),
        carried=np.zeros(len(rows), dtype=bool),
        measured=np.ones(len(rows), dtype=bool),
        ran_before_s=np.zeros(len(rows)),
        log_wait_s=np.zeros(len(rows)),
        log_room_s=np.zeros(len(rows)),
        converted_by=np.ones(len(rows)),
        end_state_code=zeros,
        line=zeros,
        quotas={},
        left_out={},
        bad_rows=0,
        bad_examples=(),
        notes=(),
    )


def random_workload(seed, jobs, *, sizes=(1, 2, 4, 8, 16, 32), mean_gap_s=60.0, mean_duration_s=3_000.0, whole=True):
    random = np.random.default_rng(seed)
    gaps = random.exponential(mean_gap_s, jobs) * (random.random(jobs) > 0.3)
    durations = random.lognormal(np.log(mean_duration_s), 1.5, jobs)
    if whole:
        gaps, durations = np.rint(gaps), np.rint(durations)
    weights = 1.0 / np.asarray(sizes)
    gpus = random.choice(sizes, jobs, p=weights / weights.sum())
    made = workload(list(zip(np.cumsum(gaps), gpus.tolist(), durations, strict=True)))
    return replace(made, estimate_s=on_grid(made.duration_s * (1 + 3 * random.random(jobs))))


def cluster(nodes=4, gpus_per_node=8, placement="spread", **more) -> Cluster:
    """One GPU type on which counts decide what fits, unless another placement is asked for."""
    return Cluster((NodeType("v100", "v100", nodes, gpus_per_node),), placement=placement, **more)


def facts(run):
    """(time, what, job) of every start, stop and finish, sorted."""
    events = run.events
    rows = zip(events.time_s.tolist(), events.kind.tolist(), events.job_id.tolist(), events.part.tolist(), strict=True)
    return sorted((time_s, NAMES[kind], job_id) for time_s, kind, job_id, part in rows if kind in NAMES and part == 0)


def finish_s(run):
    """Finish time by job id."""
    ends = run.events.kind == Kind.FINISH
    result = np.full(len(run.workload), np.nan)
    result[run.events.job_id[ends]] = run.events.time_s[ends]
    return result


def work_ticks(work) -> int:
    """Σ duration × GPUs as an exact integer, in GPU-ticks (`units.TICKS_PER_S` per GPU-second)."""
    ticks = np.rint(work.duration_s * TICKS_PER_S).astype(np.int64)
    return sum(int(t) * int(g) for t, g in zip(ticks, work.gpus, strict=True))
