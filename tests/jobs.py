"""Small workloads for tests, and the facts of a run as plain tuples."""

from __future__ import annotations

from functools import partial

import numpy as np

from synergy_core.scheduling.decisions.ordering import walks
from synergy_core.scheduling.decisions.scheduler import scheduler_for
from synergy_core.scheduling.jobs.cluster import Cluster, NodeType
from synergy_core.scheduling.policies import get_policy, policy_names
from synergy_core.units import TICKS_PER_S, on_grid
from synergy_runs.inputs.workload import COLUMNS, Workload
from synergy_runs.outputs.facts import Kind
from synergy_runs.traces.columns import JobTable

RIGID = sorted(name for name in policy_names() if not getattr(get_policy(name), "reads_goodput", False))
"""Policies that run jobs of which only a run time is known."""
WALKING = partial(scheduler_for, walker_of=walks)
"""Makes schedulers that walk over all jobs also where lanes would do."""
NAMES = {Kind.START: "start", Kind.STOP: "stop", Kind.FINISH: "finish"}


def workload(rows, *, tenants=None, kinds=None, given=None, estimates=None, models=None) -> Workload:
    """rows: (submit_s, gpus, duration_s), in any order; the other columns are texts or numbers per row."""
    order = sorted(range(len(rows)), key=lambda i: rows[i][0])
    rows = [rows[i] for i in order]

    def texts(given):
        return "" if given is None else [given[i] for i in order]

    durations = on_grid(np.array([float(row[2]) for row in rows]))
    columns = {
        "submit_time_s": on_grid(np.array([float(row[0]) for row in rows])),
        "duration_s": durations,
        "estimate_s": durations if estimates is None else on_grid(np.array([float(estimates[i]) for i in order])),
        "gpus": [row[1] for row in rows],
        "virtual_cluster": texts(tenants),
        "gpu_type": texts(kinds),
        "given_gpu_type": texts(given),
        "model": texts(models),
        "log_wait_s": 0.0,
        "log_room_s": 0.0,
    }
    jobs = JobTable.of(COLUMNS, len(rows), job_name=[f"job-{i}" for i in order], **columns)
    return Workload(name="test", source="made by a test", sha256="", origin_s=0.0, jobs=jobs)


def random_workload(seed, jobs, *, sizes=(1, 2, 4, 8, 16, 32), mean_gap_s=60.0, mean_duration_s=3_000.0, whole=True):
    random = np.random.default_rng(seed)
    gaps = random.exponential(mean_gap_s, jobs) * (random.random(jobs) > 0.3)
    durations = random.lognormal(np.log(mean_duration_s), 1.5, jobs)
    if whole:
        gaps, durations = np.rint(gaps), np.rint(durations)
    weights = 1.0 / np.asarray(sizes)
    gpus = random.choice(sizes, jobs, p=weights / weights.sum())
    made = workload(list(zip(np.cumsum(gaps), gpus.tolist(), durations, strict=True)))
    return made.with_columns(estimate_s=on_grid(made.jobs["duration_s"] * (1 + 3 * random.random(jobs))))


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
    ticks = np.rint(work.jobs["duration_s"] * TICKS_PER_S).astype(np.int64)
    return sum(int(t) * int(g) for t, g in zip(ticks, work.jobs["gpus"], strict=True))
