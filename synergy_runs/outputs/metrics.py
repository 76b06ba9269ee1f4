"""Computes one row per job and one summary per run from the facts. docs/metrics.md defines every name."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from synergy_core import __version__
from synergy_core.performance.goodput.calibration import spearman
from synergy_core.scheduling.jobs.cluster import Cluster
from synergy_core.units import DAY_S, TICKS_PER_S, Floats
from synergy_runs.inputs.workload import Workload, measured_ids
from synergy_runs.outputs.facts import (
    WAITING,
    Events,
    Kind,
    Run,
    compressed_gpu_s,
    gpus_in_use,
    integral,
    last_time_s,
    share_intervals,
    steps,
    ticks,
    waiting_jobs,
)
from synergy_runs.traces.rows import END_STATES, iso

Ints = NDArray[np.int32]
Summary = dict[str, Any]

SIZE_CLASSES = ("1", "2-4", "5-8", ">8")
SIZE_LIMITS = (1, 4, 8)
NO_NAME = "(none)"
MIN_JOBS_FOR_OVERLOAD = 100
"""Smaller workloads are never called overloaded."""
POINTS = 400
OVERLOAD_FRACTION = 0.03
"""Minimum growth of the waiting work, as a fraction of the cluster's capacity, that counts as overload. Chosen on
arrivals of known load; docs/metrics.md, "Overloaded", says how often the verdict is wrong."""
MIN_WAITING_JOBS = 10
"""Fewer waiting jobs never reach `OVERLOAD_FRACTION`, because a single wide job that starves is no overload."""
OF_WHOLE_JOBS = (
    *("predicted_duration_s", "jct_s", "waiting_s", "queueing_delay_s", "slowdown"),
    *("log_wait_s", "log_room_s", "mean_contention", "finish_time_fairness"),
)
"""Columns that describe whole jobs. They are NaN for jobs that are not `Workload.whole`, because a part of such a job
is outside. Means of these columns are over measured jobs."""


def mean(values: NDArray[Any]) -> float:
    """Mean of the finite values; NaN if there are none."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else np.nan


def percentile(values: NDArray[Any], q: float) -> float:
    """Percentile of the finite values, interpolated linearly; NaN if there are none."""
    known = values[np.isfinite(values)]
    return float(np.percentile(known, q)) if len(known) else np.nan


def ratio(top: float, bottom: float) -> float:
    """top ÷ bottom; NaN if bottom is not above 0."""
    return top / bottom if bottom > 0 else np.nan


def quotient(top: Floats, bottom: Floats) -> Floats:
    """top ÷ bottom by element; NaN where bottom is not above 0."""
    result: Floats = np.divide(top, bottom, out=np.full(len(top), np.nan), where=bottom > 0)
    return result


def size_class(gpus: NDArray[Any]) -> NDArray[np.int64]:
    """The index in `SIZE_CLASSES` of each GPU count."""
    return np.searchsorted(SIZE_LIMITS, gpus)


def overloaded(run: Run) -> bool:
    """Whether the queue kept growing: both figures of `growth` reach `OVERLOAD_FRACTION`.

    False if fewer than `MIN_JOBS_FOR_OVERLOAD` jobs were submitted in the window.
    """
    enough = int(run.workload.whole.sum()) >= MIN_JOBS_FOR_OVERLOAD
    return enough and all(each >= OVERLOAD_FRACTION for each in growth(run))


def growth(run: Run) -> tuple[float, float]:
    """(growth, level) of the waiting work W(t), in GPU-seconds, while jobs arrive, as fractions of the capacity.

    growth: least-squares slope of W(t) ÷ the cluster's GPUs, that is, the rate of arriving work minus that of served
    work. level: mean W in the last quarter ÷ (GPUs × length of the window). NaN if all jobs arrive at once.
    """
    length_s = run.workload.arrival_window_s
    return growth_until(run, length_s) if length_s > 0 else (np.nan, np.nan)


def growth_until(run: Run, length_s: float) -> tuple[float, float]:
    """`growth` over the first `length_s` seconds of the run."""
    at_s = np.linspace(0.0, length_s, POINTS)
    most_gpu_s = OVERLOAD_FRACTION / MIN_WAITING_JOBS * run.cluster.gpus * length_s
    waiting_s = waiting_gpu_s(run, at_s, most_gpu_s=most_gpu_s) / run.cluster.gpus
    centred_s = at_s - at_s.mean()
    slope = float(centred_s @ waiting_s / (centred_s @ centred_s))
    return slope, float(waiting_s[-(POINTS // 4) :].mean()) / length_s


def waiting_gpu_s(run: Run, at_s: Floats, *, most_gpu_s: float = np.inf) -> Floats:
    """Remaining work, in GPU-seconds, of the jobs that wait at each of the times `at_s`; same shape as at_s.

    A job's work is its run time × its GPUs. When a stopped job waits again, the GPU-seconds that it has held are
    subtracted. most_gpu_s: upper limit for one job.
    """
    jobs = run.workload.jobs
    held, work = run.held, jobs["duration_s"] * jobs["gpus"]
    order = np.lexsort((held.start_s, held.job_id))
    job = held.job_id[order]
    service = ((held.end_s - held.start_s) * held.gpus)[order]
    total = np.cumsum(service)
    first = np.append(True, job[1:] != job[:-1])[: len(job)]
    before_job = np.maximum.accumulate(np.where(first, total - service, 0.0))
    left_before, left_after = (np.maximum(work[job] - (done - before_job), 0.0) for done in (total - service, total))
    stopped = np.append(run.events.kind, np.uint8(Kind.FINISH))[held.end_row[order]] == Kind.STOP
    time_s = np.concatenate((jobs["submit_time_s"], held.start_s[order], held.end_s[order][stopped]))
    change = np.clip(np.concatenate((work, -left_before, left_after[stopped])), -most_gpu_s, most_gpu_s)
    in_time = np.argsort(time_s, kind="stable")
    level = np.concatenate(([0.0], np.cumsum(change[in_time])))
    return np.asarray(np.maximum(level[np.searchsorted(time_s[in_time], at_s, side="right")], 0.0))


def split_starts_fraction(events: Events, cluster: Cluster) -> float:
    """Fraction of the starts and resumes of multi-GPU jobs that use more nodes than necessary.

    The necessary number is what the job needs if all nodes of the GPU type are empty and the largest are filled first.
    NaN if there are no such starts, or if the nodes are unknown.
    """
    rows = np.flatnonzero(events.kind == Kind.START)
    first = np.flatnonzero(events.part[rows] == 0)
    gpus = events.gpus[rows[first]]
    several = gpus > 1
    if not several.any() or (events.node[rows] < 0).any():
        return float("nan")
    on = np.array(cluster.boards)[events.node[rows], 0]
    nodes = np.add.reduceat((events.part[rows] == 0) | (np.diff(on, prepend=-1) != 0), first, dtype=np.int64)
    node = on[first]
    fewest = np.ones(len(first), dtype=np.int64)
    types = np.array(cluster.type_of_node)[node]
    for gpu_type in cluster.gpu_types:
        sizes = sorted((each.gpus_per_node for each in cluster.node_type_of if each.gpu_type == gpu_type), reverse=True)
        on = types == gpu_type
        fewest[on] = np.searchsorted(np.cumsum(sizes), gpus[on]) + 1
    return float((nodes > fewest)[several].mean())


def fragmented_gpu_s(run: Run) -> float:
    """GPU-seconds in which GPUs are idle although a waiting job requests no more GPUs than are idle.

    Counted for each GPU type by itself, with the jobs that may run on it. Other reasons for waiting are ignored: idle
    GPUs on different nodes, priority, quotas, the time of the next round. NaN if it is unknown which GPUs jobs held.
    """
    jobs = run.workload.jobs
    events, cluster, held = run.events, run.cluster, run.held
    whole = events.part == 0
    starts = whole & (events.kind == Kind.START)
    if (events.node[starts] < 0).any():
        return float("nan")
    time_s = np.unique(events.time_s)
    if len(time_s) < 2:
        return 0.0
    requested = jobs["gpu_type"]
    type_of = [cluster.gpu_types.index(name) if name else -1 for name in requested.categories]
    asked = np.array(type_of, dtype=np.int64)[requested.codes]
    node = np.array(cluster.boards)[events.node[held.start_row], 0]
    types, idle = np.array(cluster.type_of_node)[node], []
    for name in cluster.gpu_types:
        on, change = types == name, np.zeros(len(time_s), dtype=np.int64)
        np.add.at(change, np.searchsorted(time_s, held.start_s[on]), -held.gpus[on])
        np.add.at(change, np.searchsorted(time_s, held.end_s[on]), held.gpus[on])
        idle.append(cluster.gpus_of(name) + np.cumsum(change))
    fits = [np.zeros(len(time_s), dtype=np.bool_) for _ in idle]
    waits = whole & (events.kind != Kind.FINISH)
    job, at_s, change = events.job_id[waits], events.time_s[waits], WAITING[events.kind[waits]]
    classes, which = np.unique(np.stack((asked[job], jobs["gpus"][job])), axis=1, return_inverse=True)
    for number, (kind_asked, gpus) in enumerate(classes.T.tolist()):
        rows = which == number
        waiting = np.append(0, np.cumsum(change[rows]))
        for kind, free in enumerate(idle):
            if kind_asked in (-1, kind):
                open_ = np.flatnonzero(~fits[kind] & (free >= gpus))
                fits[kind][open_] = waiting[np.searchsorted(at_s[rows], time_s[open_], side="right")] > 0
    length_s = np.diff(time_s)
    return float(sum((free * fit)[:-1] @ length_s for free, fit in zip(idle, fits, strict=True)))


@dataclass(frozen=True, slots=True)
class JobColumns:
    """One row per job of the workload. NaN: the event never happened (truncated run), or the value is not defined."""

    job_id: Ints
    carried: NDArray[np.bool_]
    measured: NDArray[np.bool_]
    gpus: Ints
    submit_time_s: Floats
    duration_s: Floats
    estimate_s: Floats
    estimate_drawn: NDArray[np.bool_]
    predicted_duration_s: Floats
    first_start_s: Floats
    finish_s: Floats
    jct_s: Floats
    waiting_s: Floats
    queueing_delay_s: Floats
    log_wait_s: Floats
    log_room_s: Floats
    slowdown: Floats
    service_gpu_s: Floats
    work_gpu_s: Floats
    preemptions: Ints
    restarts: Ints
    mean_contention: Floats
    finish_time_fairness: Floats


def job_table(run: Run) -> JobColumns:
    """Computes the outcome of each job."""
    work, events, held, jobs = run.workload.jobs, run.events, run.held, len(run.workload)
    starts = np.bincount(held.job_id, minlength=jobs)
    stopped_jobs = events.job_id[events.kind == Kind.STOP]
    length_s = held.end_s - held.start_s
    held_s = np.bincount(held.job_id, weights=length_s, minlength=jobs).astype(np.float64)
    service_gpu_s = np.bincount(held.job_id, weights=length_s * held.gpus, minlength=jobs).astype(np.float64)
    first_start_s = np.full(jobs, np.nan)
    first_start_s[held.job_id[::-1]] = held.start_s[::-1]  # the earliest is written last
    finished = events.kind == Kind.FINISH
    finish_s = np.full(jobs, np.nan)
    finish_s[events.job_id[finished]] = events.time_s[finished]
    jct_s = finish_s - work["submit_time_s"]
    contention = mean_contention(work["submit_time_s"], finish_s, last_time_s(events))
    return _known_of(
        run.workload.whole,
        JobColumns(
            job_id=np.arange(jobs, dtype=np.int32),
            carried=work["carried"],
            measured=work["measured"] & run.workload.whole,
            gpus=work["gpus"],
            submit_time_s=work["submit_time_s"],
            duration_s=work["duration_s"],
            estimate_s=work["estimate_s"],
            estimate_drawn=work["estimate_drawn"],
            predicted_duration_s=np.asarray(run.predicted_duration_s, dtype=np.float64),
            first_start_s=first_start_s,
            finish_s=finish_s,
            jct_s=jct_s,
            waiting_s=jct_s - held_s,
            queueing_delay_s=first_start_s - work["submit_time_s"],
            log_wait_s=work["log_wait_s"],
            log_room_s=work["log_room_s"],
            slowdown=quotient(jct_s, work["duration_s"]),
            service_gpu_s=service_gpu_s,
            work_gpu_s=work["duration_s"] * work["gpus"],
            preemptions=np.bincount(stopped_jobs, minlength=jobs).astype(np.int32),
            restarts=np.maximum(starts - 1, 0).astype(np.int32),
            mean_contention=contention,
            finish_time_fairness=finish_time_fairness(
                jct_s, work["duration_s"], gpus=work["gpus"], contention=contention, cluster_gpus=run.cluster.gpus
            ),
        ),
    )


def _known_of(keep: NDArray[np.bool_], jobs: JobColumns) -> JobColumns:
    """The table, in which jobs outside the mask `keep` have NaN in the columns `OF_WHOLE_JOBS`."""
    if keep.all():
        return jobs
    return replace(jobs, **{name: np.where(keep, getattr(jobs, name), np.nan) for name in OF_WHOLE_JOBS})


def mean_contention(submit_s: Floats, finish_s: Floats, end_s: float) -> Floats:
    """Mean number of active jobs (submitted, not finished) over each job's life; NaN for an unfinished or empty life.

    Computed from differences of ∫A(t)dt, with A(t) active jobs, so it costs one sort. end_s: time of the log's last
    event; later submissions are ignored.
    """
    arrived = submit_s[submit_s <= end_s]
    left = finish_s[~np.isnan(finish_s)]
    times = np.concatenate((arrived, left))
    order = np.argsort(times, kind="stable")
    change = np.where(order < len(arrived), 1, -1)
    time_s, active = steps(times[order], change)
    sums = integral(time_s, active, finish_s) - integral(time_s, active, submit_s)
    return quotient(sums, finish_s - submit_s)


def finish_time_fairness(
    jct_s: Floats, duration_s: Floats, *, gpus: Ints, contention: Floats, cluster_gpus: int
) -> Floats:
    """ρ = JCT ÷ JCT on an equal, exclusive share of the cluster; above 1, that share would have been faster.

    Themis (NSDI 2020), section 3:  ρ = T_shared / T_independent. With N active jobs on G GPUs, a share is G/N GPUs; on
    it, a job of g GPUs and duration d takes d · max(1, g·N/G). NaN if the duration is 0.
    """
    alone_s = duration_s * np.maximum(1.0, gpus * contention / cluster_gpus)
    return quotient(jct_s, alone_s)


def summarise(run: Run, jobs: JobColumns | None = None) -> Summary:
    """Computes every figure of a run, with units in the names; NaN for a figure that is not defined."""
    jobs = job_table(run) if jobs is None else jobs
    measured = _known_of(jobs.measured, jobs)
    slope, late = growth(run)
    compressors: Summary = {}  # stays empty unless replicas may compress the gradients that they exchange
    if run.training is not None and (compressed := run.training.with_compression()) is not None:
        gpu_s = compressed_gpu_s(compressed, run.held)
        by_share = np.argsort(-gpu_s, kind="stable").tolist()
        shares = {compressed.compressors[at]: ratio(float(gpu_s[at]), float(gpu_s.sum())) for at in by_share}
        compressors = {"gpu_time_fraction_by_compressor": shares}
    rho = measured.finish_time_fairness
    predicted = np.isfinite(measured.predicted_duration_s) & (measured.duration_s > 0)
    predicted_s, true_s = measured.predicted_duration_s[predicted], measured.duration_s[predicted]
    return {
        **_identity(run),
        **_completion(run, measured),
        **_use(run, jobs),
        **compressors,
        "overloaded": overloaded(run),
        "queue_growth_fraction": slope,
        "late_queue_fraction": late,
        "mean_finish_time_fairness": mean(rho),
        "p99_finish_time_fairness": percentile(rho, 99),
        "worst_finish_time_fairness": percentile(rho, 100),
        "unfair_fraction": mean(rho[np.isfinite(rho)] > 1.0),
        **_by_class(run, measured),
        # Quality of the predicted run times, over jobs with a prediction and a run time above 0.
        "jobs_predicted": int(predicted.sum()),
        "prediction_median_absolute_percentage_error": percentile(np.abs(predicted_s - true_s) / true_s * 100, 50),
        "prediction_spearman": spearman(predicted_s, true_s),
        "decisions": len(run.decisions.time_s),
        "decision_p50_s": percentile(run.decisions.decision_s, 50),
        "decision_p99_s": percentile(run.decisions.decision_s, 99),
        "simulation_cpu_s": run.simulation_cpu_s,
        "peak_memory_bytes": run.peak_memory_bytes,
    }


def demand(workload: Workload, gpus: int) -> tuple[float, list[float]]:
    """(seconds of a part, mean GPUs that jobs would hold in each part of the window if none waited ÷ `gpus`).

    The parts are days if the window has 3 to 14 days, else sevenths of it.
    """
    jobs = workload.jobs
    length_s = workload.arrival_window_s
    by_day = 2 * DAY_S < length_s <= 14 * DAY_S
    part_s = DAY_S if by_day else length_s / 7
    edges_s = np.minimum(part_s * np.arange(int(-(-length_s // DAY_S)) + 1 if by_day else 8), length_s)
    end_s, found = jobs["submit_time_s"] + jobs["duration_s"], []
    for from_s, until_s in pairwise(edges_s.tolist() if length_s > 0 else ()):
        held_s = np.clip(np.minimum(end_s, until_s) - np.maximum(jobs["submit_time_s"], from_s), 0.0, None)
        found.append(float(held_s @ jobs["gpus"]) / (until_s - from_s) / gpus)
    return part_s, found


def _identity(run: Run) -> Summary:
    workload, cluster = run.workload, run.cluster
    part_s, demand_by_part = demand(workload, cluster.gpus)
    jobs, carried = workload.jobs, workload.jobs["carried"]
    work_gpu_s, running = jobs["duration_s"] * jobs["gpus"], ~carried & ~workload.whole
    # This is empty if the log names the models, or if jobs have none.
    assigned = jobs["model"].codes[workload.whole & workload.models_assigned]
    return {
        "policy": run.policy,
        "oracle": run.oracle,
        "truth_read": run.truth_read,
        "information": run.information,
        "learns_input": run.learns_input,
        "terms": dict(run.terms),
        "seed": run.seed,
        "trace": workload.name,
        "trace_source": workload.source,
        "trace_sha256": workload.sha256,
        "trace_start": iso(workload.origin_s),
        "trace_notes": list(workload.notes),
        "assumptions": list(workload.assumptions),
        "assigned_models": jobs["model"].categories[np.unique(assigned)].tolist(),
        "trace_windows": list(workload.windows),
        "run_times_on": workload.timed_on,
        "run_times_converted": [asdict(each) for each in workload.conversions],
        "jobs": int(workload.whole.sum()),
        "jobs_carried_in": int(carried.sum()),
        "carried_work_gpu_s": float(work_gpu_s[carried].sum()),
        "jobs_running": int(running.sum()),
        "running_work_gpu_s": float(work_gpu_s[running].sum()),
        "jobs_measured": int((jobs["measured"] & workload.whole).sum()),
        "measured_job_ids": measured_ids(workload),
        "jobs_left_out": dict(workload.left_out),
        "bad_rows": workload.bad_rows,
        "gpus": cluster.gpus,
        "cpus": cluster.cpus or np.nan,
        "memory_bytes": cluster.memory_bytes or np.nan,
        "cluster": cluster.describe(),
        "node_types": [
            {"name": each.name, "gpu_type": each.gpu_type, "nodes": each.nodes, "gpus_per_node": each.gpus_per_node}
            for each in cluster.node_types
        ],
        "quotas": dict(cluster.virtual_clusters),
        "reclaims": cluster.reclaims(bool(run.terms["may_change"])) if cluster.lends and run.terms else None,
        "offered_load_fraction": workload.offered_load_fraction(cluster.gpus),
        "demand_part_s": part_s,
        "demand_fractions": demand_by_part,
        "sim_version": __version__,
        "event_log_sha256": run.events.digest(),
    }


def _completion(run: Run, jobs: JobColumns) -> Summary:
    whole, finished = run.workload.whole, np.isfinite(jobs.finish_s)
    first_s = jobs.submit_time_s[0] if len(jobs.submit_time_s) else np.nan
    held_s = jobs.jct_s - jobs.waiting_s
    ended = np.isfinite(held_s)
    return {
        "jobs_unfinished": int((whole & ~finished).sum()),
        "jobs_failed": int((run.workload.jobs["end_state"] == "failed")[whole].sum()),
        "mean_jct_s": mean(jobs.jct_s),
        **{f"p{q:g}_jct_s".replace(".", ""): percentile(jobs.jct_s, q) for q in (50, 90, 99, 99.9)},
        "makespan_s": float(jobs.finish_s[finished].max() - first_s) if finished.any() else np.nan,
        "mean_waiting_s": mean(jobs.waiting_s),
        "p99_waiting_s": percentile(jobs.waiting_s, 99),
        "max_waiting_s": percentile(jobs.waiting_s, 100),
        "mean_queueing_delay_s": mean(jobs.queueing_delay_s),
        "p99_queueing_delay_s": percentile(jobs.queueing_delay_s, 99),
        "log_room_fraction": ratio(float(np.nansum(jobs.log_room_s)), float(np.nansum(jobs.log_wait_s))),
        "p50_slowdown": percentile(jobs.slowdown, 50),
        "p99_slowdown": percentile(jobs.slowdown, 99),
        "run_time_ratio": ratio(float(held_s[ended].sum()), float(jobs.duration_s[ended].sum())),
    }


def _use(run: Run, jobs: JobColumns) -> Summary:
    held, cluster, submit_s = run.held, run.cluster, jobs.submit_time_s
    first_s, last_s = (float(submit_s[0]), float(submit_s[-1])) if len(submit_s) else (0.0, 0.0)

    def used_fraction(start_s: Floats, end_s: Floats, amount: NDArray[Any], capacity: float) -> float:
        """Fraction of the capacity that was used while jobs arrived."""
        inside_s = np.maximum(np.minimum(end_s, last_s) - np.maximum(start_s, first_s), 0.0)
        return ratio(float((inside_s * amount).sum()), capacity * (last_s - first_s))

    cpus, memory = np.nan, np.nan
    if run.shares is not None:
        had = share_intervals(run.shares, held)
        cpus = used_fraction(had.start_s, had.end_s, had.cpus, cluster.cpus)
        memory = used_fraction(had.start_s, had.end_s, had.memory_bytes, cluster.memory_bytes)
    queue_s, queue = waiting_jobs(run.events)
    waited_s = integral(queue_s, queue, queue_s[-1:])
    return {
        "gpu_utilisation_fraction": used_fraction(held.start_s, held.end_s, held.gpus, cluster.gpus),
        "cpu_utilisation_fraction": cpus,
        "memory_utilisation_fraction": memory,
        "service_gpu_s": int(held.gpu_ticks().sum()) / TICKS_PER_S,
        "lost_gpu_s": run.lost_gpu_s or np.nan,
        "work_gpu_s": int((ticks(jobs.duration_s) * jobs.gpus).sum()) / TICKS_PER_S,
        "preemptions": int(jobs.preemptions.sum()),
        "restarts_per_job": mean(jobs.restarts[run.workload.whole]),
        "max_restarts": int(jobs.restarts.max(initial=0)),
        "split_starts_fraction": split_starts_fraction(run.events, cluster),
        "fragmented_gpu_s": fragmented_gpu_s(run),
        "max_gpus_used": int(gpus_in_use(run.events)[1].max(initial=0)),
        "max_queue_jobs": int(queue.max(initial=0)),
        "mean_queue_jobs": ratio(float(waited_s.sum()), queue_s[-1] - queue_s[0] if len(queue_s) else 0.0),
    }


def _by_class(run: Run, jobs: JobColumns) -> Summary:
    """Number of jobs and mean times by size, tenant and end state; tenants without jobs are left out."""
    workload, whole = run.workload, run.workload.whole
    times = ("jct_s", "waiting_s", "queueing_delay_s")
    tenants = [name or NO_NAME for name in workload.jobs["virtual_cluster"].categories]
    found: Summary = {}
    for key, code, names, columns in (
        ("size", size_class(jobs.gpus), SIZE_CLASSES, times),
        ("virtual_cluster", workload.jobs["virtual_cluster"].codes, tenants, times),
        ("end_state", workload.jobs["end_state"].codes, END_STATES, times[:1]),
    ):
        kept = key != "virtual_cluster"
        counts = np.bincount(code[whole], minlength=len(names)).tolist()
        found[f"jobs_by_{key}"] = {name: count for name, count in zip(names, counts, strict=True) if count or kept}
        for column in columns:
            values = getattr(jobs, column)
            known = np.isfinite(values)
            total = np.bincount(code[known], weights=values[known], minlength=len(names)).astype(np.float64)
            means = quotient(total, np.bincount(code[known], minlength=len(names)).astype(np.float64)).tolist()
            by_name = dict(zip(names, means, strict=True))
            found[f"mean_{column}_by_{key}"] = {
                name: value for name, value in by_name.items() if kept or not np.isnan(value)
            }
    return found
