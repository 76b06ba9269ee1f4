"""Facts → one row per job, and one summary per run. Pure and vectorised; docs/metrics.md defines every name."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from synergy_core import __version__
from synergy_core.accuracy import spearman
from synergy_core.arrays import Floats
from synergy_core.units import TICKS_PER_S
from synergy_runs.averages import counts_by, mean, means_by, percentile, present, quotient, ratio
from synergy_runs.fragmentation import fragmented_gpu_s
from synergy_runs.log import Events, Kind, Run
from synergy_runs.measured import measured_ids
from synergy_runs.overload import growth, overloaded
from synergy_runs.splits import split_starts_fraction
from synergy_runs.timeline import (
    Holdings,
    compressed_gpu_s,
    given,
    gpus_in_use,
    holdings,
    integral,
    last_time_s,
    steps,
    ticks,
    waiting_jobs,
)
from synergy_runs.traces.rows import END_STATES
from synergy_runs.traces.times import iso
from synergy_runs.workload import Workload

Ints = NDArray[np.int32]
Summary = dict[str, Any]

SIZE_CLASSES = ("1", "2-4", "5-8", ">8")
SIZE_LIMITS = (1, 4, 8)
NO_NAME = "(none)"


@dataclass(frozen=True, slots=True)
class JobColumns:
    """One row per job of the workload. NaN: it has not happened (a run that was cut), or is not defined."""

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
    slowdown: Floats
    service_gpu_s: Floats
    work_gpu_s: Floats
    preemptions: Ints
    restarts: Ints
    mean_contention: Floats
    finish_time_fairness: Floats


def size_class(gpus: NDArray[Any]) -> NDArray[np.int64]:
    """The index in `SIZE_CLASSES` of each GPU count."""
    return np.searchsorted(SIZE_LIMITS, gpus)


def job_table(run: Run, held: Holdings | None = None) -> JobColumns:
    """What became of each job."""
    held = holdings(run.events) if held is None else held
    workload, events, jobs = run.workload, run.events, len(run.workload)
    starts = np.bincount(held.job_id, minlength=jobs)
    first_start_s = np.full(jobs, np.nan)
    first_start_s[held.job_id[::-1]] = held.start_s[::-1]  # the earliest is written last
    finished = events.kind == Kind.FINISH
    finish_s = np.full(jobs, np.nan)
    finish_s[events.job_id[finished]] = events.time_s[finished]
    jct_s = finish_s - workload.submit_time_s
    contention = mean_contention(workload.submit_time_s, finish_s, last_time_s(events))
    return _known_of(
        ~workload.carried,
        JobColumns(
            job_id=np.arange(jobs, dtype=np.int32),
            carried=workload.carried,
            measured=workload.measured & ~workload.carried,
            gpus=workload.gpus,
            submit_time_s=workload.submit_time_s,
            duration_s=workload.duration_s,
            estimate_s=workload.estimate_s,
            estimate_drawn=workload.estimate_drawn,
            predicted_duration_s=np.asarray(run.predicted_duration_s, dtype=np.float64),
            first_start_s=first_start_s,
            finish_s=finish_s,
            jct_s=jct_s,
            waiting_s=jct_s - _held_s(held, jobs),
            queueing_delay_s=first_start_s - workload.submit_time_s,
            slowdown=quotient(jct_s, workload.duration_s),
            service_gpu_s=_service_gpu_s(held, jobs),
            work_gpu_s=workload.duration_s * workload.gpus,
            preemptions=_count(events, Kind.STOP, jobs),
            restarts=np.maximum(starts - 1, 0).astype(np.int32),
            mean_contention=contention,
            finish_time_fairness=finish_time_fairness(
                jct_s, workload.duration_s, gpus=workload.gpus, contention=contention, cluster_gpus=run.cluster.gpus
            ),
        ),
    )


OF_WHOLE_JOBS = (
    "predicted_duration_s",
    "jct_s",
    "waiting_s",
    "queueing_delay_s",
    "slowdown",
    "mean_contention",
    "finish_time_fairness",
)
"""Columns that are not defined for a job that was carried into the window: it is the rest of one. Figures of them are
over measured jobs."""


def _known_of(keep: NDArray[np.bool_], jobs: JobColumns) -> JobColumns:
    """The table with NaN in those columns for all other jobs."""
    if keep.all():
        return jobs
    return replace(jobs, **{name: np.where(keep, getattr(jobs, name), np.nan) for name in OF_WHOLE_JOBS})


def _count(events: Events, kind: Kind, jobs: int) -> Ints:
    return np.bincount(events.job_id[events.kind == kind], minlength=jobs).astype(np.int32)


def _held_s(held: Holdings, jobs: int) -> Floats:
    return np.bincount(held.job_id, weights=held.end_s - held.start_s, minlength=jobs).astype(np.float64)


def _service_gpu_s(held: Holdings, jobs: int) -> Floats:
    gpu_s = (held.end_s - held.start_s) * held.gpus
    return np.bincount(held.job_id, weights=gpu_s, minlength=jobs).astype(np.float64)


def mean_contention(submit_s: Floats, finish_s: Floats, end_s: float) -> Floats:
    """Mean number of active jobs (submitted, not finished) over each job's life; NaN for an unfinished or empty life.

    Differences of ∫A(t)dt, so its cost is a sort. end_s: when the log ends; later submissions never happened.
    """
    arrived = submit_s[submit_s <= end_s]
    left = finish_s[~np.isnan(finish_s)]
    times = np.concatenate((arrived, left))
    order = np.argsort(times, kind="stable")
    change = np.where(order < len(arrived), 1, -1)
    time_s, active = steps(times[order], change)
    life_s = finish_s - submit_s
    sums = integral(time_s, active, finish_s) - integral(time_s, active, submit_s)
    return quotient(sums, life_s)


def finish_time_fairness(
    jct_s: Floats, duration_s: Floats, *, gpus: Ints, contention: Floats, cluster_gpus: int
) -> Floats:
    """ρ = JCT ÷ JCT in an equal exclusive share of the cluster; above 1 the job would rather have had its share.

    Themis (NSDI 2020), section 3:  ρ = T_shared / T_independent. With N jobs active on G GPUs a share is G/N GPUs, on
    which a job of g GPUs and duration d takes d · max(1, g·N/G). NaN where the duration is 0.
    """
    alone_s = duration_s * np.maximum(1.0, gpus * contention / cluster_gpus)
    return quotient(jct_s, alone_s)


def summarise(run: Run, jobs: JobColumns | None = None, held: Holdings | None = None) -> Summary:
    """Every figure of a run, with units in the names; NaN where one is not defined."""
    held = holdings(run.events) if held is None else held
    jobs = job_table(run, held) if jobs is None else jobs
    measured = _known_of(jobs.measured, jobs)
    return {
        **_identity(run),
        **_completion(run, measured),
        **_use(run, jobs, held),
        **_compression(run, held),
        **_overload(run, held),
        **_fairness(measured),
        **_by_class(run, measured),
        **_prediction(measured),
        **_cost(run),
    }


def _identity(run: Run) -> Summary:
    workload, cluster = run.workload, run.cluster
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
        "assigned_models": _assigned_models(workload),
        "trace_windows": list(workload.windows),
        "run_times_on": workload.timed_on,
        "run_times_converted": [asdict(each) for each in workload.conversions],
        "jobs": int((~workload.carried).sum()),
        "jobs_carried_in": int(workload.carried.sum()),
        "carried_work_gpu_s": float((workload.duration_s * workload.gpus)[workload.carried].sum()),
        "jobs_measured": int((workload.measured & ~workload.carried).sum()),
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
        "offered_load_fraction": workload.offered_load_fraction(cluster.gpus),
        "sim_version": __version__,
        "event_log_sha256": run.events.digest(),
    }


def _assigned_models(workload: Workload) -> list[str]:
    """The models that jobs were assigned; none where the log names them, or jobs have no model."""
    if not workload.models_assigned:
        return []
    return [workload.models[code] for code in np.unique(workload.model_code[~workload.carried])]


def _completion(run: Run, jobs: JobColumns) -> Summary:
    own, finished = ~jobs.carried, np.isfinite(jobs.finish_s)
    first_s = jobs.submit_time_s[0] if len(jobs.submit_time_s) else np.nan
    return {
        "jobs_unfinished": int((own & ~finished).sum()),
        "jobs_failed": int((run.workload.end_state_code[own] == END_STATES.index("failed")).sum()),
        "mean_jct_s": mean(jobs.jct_s),
        "p50_jct_s": percentile(jobs.jct_s, 50),
        "p90_jct_s": percentile(jobs.jct_s, 90),
        "p99_jct_s": percentile(jobs.jct_s, 99),
        "p999_jct_s": percentile(jobs.jct_s, 99.9),
        "makespan_s": float(jobs.finish_s[finished].max() - first_s) if finished.any() else np.nan,
        "mean_waiting_s": mean(jobs.waiting_s),
        "p99_waiting_s": percentile(jobs.waiting_s, 99),
        "mean_queueing_delay_s": mean(jobs.queueing_delay_s),
        "p99_queueing_delay_s": percentile(jobs.queueing_delay_s, 99),
        "p50_slowdown": percentile(jobs.slowdown, 50),
        "p99_slowdown": percentile(jobs.slowdown, 99),
        "run_time_ratio": _run_time_ratio(jobs),
    }


def _run_time_ratio(jobs: JobColumns) -> float:
    """Time with GPUs ÷ run time in the log, each summed over the jobs that have ended; NaN of none."""
    held_s = jobs.jct_s - jobs.waiting_s
    known = np.isfinite(held_s)
    return ratio(float(held_s[known].sum()), float(jobs.duration_s[known].sum()))


def _use(run: Run, jobs: JobColumns, held: Holdings) -> Summary:
    submit_s = jobs.submit_time_s
    first_s, last_s = (float(submit_s[0]), float(submit_s[-1])) if len(submit_s) else (0.0, 0.0)
    used_gpu_s = float((_inside_s(held.start_s, held.end_s, first_s, last_s) * held.gpus).sum())
    cpu_s, memory_byte_s = np.nan, np.nan
    if run.shares is not None:
        had = given(run.shares, held)
        shared_s = _inside_s(had.start_s, had.end_s, first_s, last_s)
        cpu_s, memory_byte_s = float((shared_s * had.cpus).sum()), float((shared_s * had.memory_bytes).sum())
    queue_s, queue = waiting_jobs(run.events)
    span_s = queue_s[-1] - queue_s[0] if len(queue_s) else 0.0
    waited_s = integral(queue_s, queue, queue_s[-1:])
    return {
        "gpu_utilisation_fraction": ratio(used_gpu_s, run.cluster.gpus * (last_s - first_s)),
        "cpu_utilisation_fraction": ratio(cpu_s, run.cluster.cpus * (last_s - first_s)),
        "memory_utilisation_fraction": ratio(memory_byte_s, run.cluster.memory_bytes * (last_s - first_s)),
        "service_gpu_s": int(held.gpu_ticks().sum()) / TICKS_PER_S,
        "work_gpu_s": int((ticks(jobs.duration_s) * jobs.gpus).sum()) / TICKS_PER_S,
        "preemptions": int(jobs.preemptions.sum()),
        "restarts_per_job": mean(jobs.restarts[~jobs.carried]),
        "split_starts_fraction": split_starts_fraction(run.events, run.cluster),
        "fragmented_gpu_s": fragmented_gpu_s(run, held),
        "max_gpus_used": int(gpus_in_use(run.events)[1].max(initial=0)),
        "max_queue_jobs": int(queue.max(initial=0)),
        "mean_queue_jobs": ratio(float(waited_s.sum()), span_s),
    }


def _compression(run: Run, held: Holdings) -> Summary:
    """Only where replicas may compress the gradients that they exchange."""
    if run.compressions is None:
        return {}
    gpu_s = compressed_gpu_s(run.compressions, held)
    by_share = np.argsort(-gpu_s, kind="stable").tolist()
    shares = {run.compressions.compressors[at]: ratio(float(gpu_s[at]), float(gpu_s.sum())) for at in by_share}
    return {"gpu_time_fraction_by_compressor": shares}


def _inside_s(start_s: Floats, end_s: Floats, first_s: float, last_s: float) -> Floats:
    """How much of each interval lies between two instants."""
    inside_s: Floats = np.maximum(np.minimum(end_s, last_s) - np.maximum(start_s, first_s), 0.0)
    return inside_s


def _overload(run: Run, held: Holdings) -> Summary:
    slope, late = growth(run, held)
    return {"overloaded": overloaded(run, held), "queue_growth_fraction": slope, "late_queue_fraction": late}


def _fairness(jobs: JobColumns) -> Summary:
    rho = jobs.finish_time_fairness
    known = rho[np.isfinite(rho)]
    return {
        "mean_finish_time_fairness": mean(rho),
        "p99_finish_time_fairness": percentile(rho, 99),
        "worst_finish_time_fairness": percentile(rho, 100),
        "unfair_fraction": mean(known > 1.0),
    }


def _by_class(run: Run, jobs: JobColumns) -> Summary:
    workload, size = run.workload, size_class(jobs.gpus)
    tenants = [name or NO_NAME for name in workload.virtual_clusters]
    states = workload.end_state_code
    return {
        "jobs_by_size": counts_by(size[~jobs.carried], SIZE_CLASSES),
        "mean_jct_s_by_size": means_by(size, SIZE_CLASSES, jobs.jct_s),
        "mean_waiting_s_by_size": means_by(size, SIZE_CLASSES, jobs.waiting_s),
        "mean_queueing_delay_s_by_size": means_by(size, SIZE_CLASSES, jobs.queueing_delay_s),
        "jobs_by_virtual_cluster": _above_none(counts_by(workload.virtual_cluster_code[~jobs.carried], tenants)),
        "mean_jct_s_by_virtual_cluster": present(means_by(workload.virtual_cluster_code, tenants, jobs.jct_s)),
        "mean_waiting_s_by_virtual_cluster": present(means_by(workload.virtual_cluster_code, tenants, jobs.waiting_s)),
        "mean_queueing_delay_s_by_virtual_cluster": present(
            means_by(workload.virtual_cluster_code, tenants, jobs.queueing_delay_s)
        ),
        "jobs_by_end_state": counts_by(states[~jobs.carried], END_STATES),
        "mean_jct_s_by_end_state": means_by(states, END_STATES, jobs.jct_s),
    }


def _above_none(counts: dict[str, int]) -> dict[str, int]:
    return {name: count for name, count in counts.items() if count}


def _prediction(jobs: JobColumns) -> Summary:
    """How good predicted run times were; over jobs that had one and ran at all."""
    known = np.isfinite(jobs.predicted_duration_s) & (jobs.duration_s > 0)
    predicted_s, true_s = jobs.predicted_duration_s[known], jobs.duration_s[known]
    return {
        "jobs_predicted": int(known.sum()),
        "prediction_median_absolute_percentage_error": percentile(np.abs(predicted_s - true_s) / true_s * 100, 50),
        "prediction_spearman": spearman(predicted_s, true_s),
    }


def _cost(run: Run) -> Summary:
    return {
        "decisions": len(run.decisions.time_s),
        "decision_p50_s": percentile(run.decisions.decision_s, 50),
        "decision_p99_s": percentile(run.decisions.decision_s, 99),
        "simulation_cpu_s": run.simulation_cpu_s,
        "peak_memory_bytes": run.peak_memory_bytes,
    }
