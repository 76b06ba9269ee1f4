"""What run times become on GPUs of another type than those of the log, and which types are known at all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from synergy_core.catalog import gpu_sheet, gpu_sheets, gpu_type_named, run_time_ratio
from synergy_core.cluster import Cluster
from synergy_core.errors import InputError, unknown
from synergy_core.units import on_grid
from synergy_runs.workload import Conversion, Workload, ran_on
from synergy_sim.assignment import alike, packed_as_asked
from synergy_sim.truth import Truth

SHEET_HINT = (
    "Another needs a data sheet, cluster.gpu_sheets=[{name}.yaml] in the form of synergy_core/catalog/gpus/v100.yaml, "
    "or cluster.anonymous_gpu_types=[{name}] where run times hold on it as they are."
)
NOMINAL = "v100"
"""The type of the default cluster: where it is kept, nobody asks what GPUs mean."""


def check_types(
    cluster: Cluster, workload: Workload, truth: Truth, timed_on: str | None, anonymous: Sequence[str] = ()
) -> None:
    """Raises InputError for an unknown GPU type: no data sheet, no measurements, no job of the
    log that asks for it, and not among the anonymous ones; and for a `timed_on` without a data sheet.
    """
    if timed_on is not None and gpu_sheet(timed_on) is None:
        raise unknown("trace.gpu_type", timed_on, gpu_sheets(), hint="trace.gpu_type=null keeps run times as they are.")
    if truth.profile:
        return
    for gpu_type in cluster.gpu_types:
        in_log = gpu_type in (*workload.gpu_types, *workload.given_gpu_types)
        measured = truth.profiles is not None and any(truth.profiles.glob(f"*/placements-{gpu_type}.csv"))
        if not (gpu_sheet(gpu_type) is not None or in_log or gpu_type in anonymous or measured):
            raise unknown("GPU type", gpu_type, gpu_sheets(), hint=SHEET_HINT.format(name=gpu_type))


def converted(given: Workload, made: Workload, cluster: Cluster, timed_on: str | None) -> Workload:
    """The workload with run times as they are on this cluster.

    given: as the log has it; made: with models, where it has them. A job's run time is of the GPU type that it ran on
    in the log, else that it asked for, else `timed_on`, and becomes that on the type which `made` is bound to, else on
    the cluster's first that has room. Estimates, and the work of jobs with a model, follow. Where none of these types
    is known, run times are used unchanged.

    Raises InputError where the speeds of `timed_on` and of a type of the cluster cannot be compared. A type that the
    log alone names is not compared without a data sheet: its run times are used unchanged, and a note says so.
    """
    codes, names = ran_on(given)
    types = [gpu_type_named(name) or (gpu_type_named(timed_on) if timed_on else "") for name in names]
    base = _base(types, codes, given, cluster, timed_on)
    bound = np.array([bool(each) for each in given.gpu_types])[given.gpu_type_code]
    if not base:
        if bound.all() or cluster.gpu_types == (NOMINAL,):
            return made
        on = cluster.gpu_types[0] if len(cluster.gpu_types) == 1 else "every GPU type"
        note = (
            f"run times were logged on an unknown GPU type and are used unchanged on {on}; trace.gpu_type=TYPE "
            "converts them"
        )
        return replace(made, notes=(*made.notes, note))
    factor, jobs, unchanged = np.ones(len(made)), Counter[tuple[str, str]](), Counter[str]()
    only_run_times = np.isnan(made.work_scale)
    for (ran, stays, code, gpus), mine in alike(codes, bound, made.gpu_type_code, made.gpus):
        on, count = packed_as_asked(made.gpu_types[code], gpus, cluster)[1], int(mine.sum())
        if not _comparable(types[ran], on, timed_on):
            unchanged[types[ran]] += count
            continue
        factor[mine] = run_time_ratio(types[ran], on).factor
        # A job that is bound to no type may run on others too, at the speed that they have relative to this one.
        anywhere = cluster.gpu_types if not stays and only_run_times[mine].any() else (on,)
        for each in anywhere:
            jobs[types[ran], each.partition("@")[0]] += count
    told = []
    for (of, on), count in sorted(jobs.items(), key=lambda item: (-item[1], item[0])):
        if of != on:
            ratio = run_time_ratio(of, on)
            told.append(Conversion(of, on, ratio.factor, ratio.low, ratio.high, f"{ratio.how}, {ratio.of}", jobs=count))
    in_log = {types[code] for code in np.unique(codes).tolist()}
    is_log_hardware = {each.partition("@")[0] for each in cluster.gpu_types} <= in_log
    whole = np.where(factor == 1.0, made.iterations, np.maximum(np.floor(made.iterations * factor), 1.0))
    work = np.where(np.isfinite(whole), whole / made.iterations, factor)
    notes = [
        f"{count:,} jobs ran on {of or 'GPUs of a type that the log does not say'} in the log: their run times are "
        f"used unchanged, as it is not known how fast that is{'; trace.gpu_type=TYPE converts them' if not of else ''}"
        for of, count in unchanged.items()
    ]
    return replace(
        made,
        timed_on=base,
        conversions=tuple(told),
        duration_s=on_grid(made.duration_s * factor),
        estimate_s=on_grid(made.estimate_s * factor),
        ran_before_s=on_grid(made.ran_before_s * factor),
        work_scale=made.work_scale * work,
        # On other GPUs than the log's, its waits were never observed.
        log_wait_s=np.where((factor == 1.0) | is_log_hardware, made.log_wait_s, np.nan),
        converted_by=factor,
        iterations=whole,
        notes=(*made.notes, *notes),
        assumptions=(*made.assumptions, *([_in_words(told)] if told else [])),
    )


def _base(
    types: Sequence[str], codes: NDArray[np.int32], given: Workload, cluster: Cluster, timed_on: str | None
) -> str:
    """The GPU type on which run times were logged: `timed_on`, else the type that most jobs ran on.

    Returns "" where nobody knows it, or where it cannot be compared with every type of the cluster.
    """
    if timed_on is not None:
        return gpu_type_named(timed_on)
    ran = Counter(types[code] for code in codes.tolist() if types[code])
    base = max(ran, key=lambda each: ran[each]) if ran else ""
    return base if base and all(_comparable(base, each, None) for each in cluster.gpu_types) else ""


def _comparable(of: str, on: str, timed_on: str | None) -> bool:
    """Whether it is known how much faster one type is than the other. Raises InputError for `timed_on` where not."""
    if not of:
        return False
    try:
        run_time_ratio(of, on)
    except InputError:
        if timed_on is not None and of == gpu_type_named(timed_on):
            raise
        return False
    return True


def _in_words(told: Sequence[Conversion]) -> str:
    """`run times converted from V100 to H100: × 0.269 (by the data sheets' memory bandwidth, 900 to 3,350 GB/s; …)`."""
    parts = []
    for each in told:
        of, on = (sheet.title if (sheet := gpu_sheet(name)) else name for name in (each.of, each.on))
        between = "by application" if "measured" in each.how else "between the ratios of memory bandwidth and of FLOP/s"
        reach = f"× {each.low:.3g} to × {each.high:.3g} {between}"
        parts.append(f"from {of} to {on} × {each.factor:.3g} ({each.how}; {reach})")
    return f"Run times were converted {'; '.join(parts)}. Results hold only as far as these factors do."


def speeds(cluster: Cluster, sizes: Iterable[int], timed_on: str | None) -> dict[int, dict[str, float]]:
    """By GPUs asked for and GPU type, how fast a job that asks for no type runs there: 1 on the type that its converted
    run time is of. {} where that is the same on all.

    Raises InputError where the speeds of two types cannot be compared.
    """
    if not timed_on or len(cluster.gpu_types) == 1:
        return {}
    ratios = {each: run_time_ratio(timed_on, each).factor for each in cluster.gpu_types}
    return {
        gpus: {each: ratios[packed_as_asked("", gpus, cluster)[1]] / ratio for each, ratio in ratios.items()}
        for gpus in sizes
    }
