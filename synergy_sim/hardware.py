"""Converts logged run times to the GPU types of the cluster, and checks that these types are known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from synergy_core.errors import InputError, same_product, unknown
from synergy_core.performance.catalog import gpu_sheet, gpu_sheets, gpu_type_named, run_time_ratio
from synergy_core.scheduling.jobs.cluster import Cluster
from synergy_core.units import on_grid
from synergy_runs.inputs.workload import Conversion, Workload
from synergy_runs.traces.cluster_seen import types_ran_on
from synergy_sim.assignment import alike, packed_as_requested
from synergy_sim.truth import Truth

SHEET_HINT = (
    "For another type, give a data sheet in the form of synergy_core/performance/catalog/gpus/v100.yaml "
    "(cluster.gpu_sheets=[{name}.yaml]), or type cluster.anonymous_gpu_types=[{name}] to use run times unchanged on it."
)
NOMINAL = "v100"
"""GPU type of the default cluster. No note about unconverted run times is shown for it."""


def check_types(
    cluster: Cluster, workload: Workload, truth: Truth, timed_on: str | None, anonymous: Sequence[str] = ()
) -> None:
    """Raises InputError for an unknown GPU type of the cluster: one without data sheet and measurements that is neither
    named by the log nor in `anonymous`. Also raises it if `timed_on` has no data sheet.
    """
    if timed_on is not None and gpu_sheet(timed_on) is None:
        hint = "trace.gpu_type=null keeps run times as they are."
        raise unknown("trace.gpu_type", timed_on, gpu_sheets(), hint=hint, alike=same_product)
    if truth.profile:
        return
    for gpu_type in cluster.gpu_types:
        in_log = gpu_type in (*workload.jobs["gpu_type"].categories, *workload.jobs["given_gpu_type"].categories)
        measured = truth.profiles is not None and any(truth.profiles.glob(f"*/placements-{gpu_type}.csv"))
        if not (gpu_sheet(gpu_type) is not None or in_log or gpu_type in anonymous or measured):
            hint = SHEET_HINT.format(name=gpu_type)
            raise unknown("GPU type", gpu_type, gpu_sheets(), hint=hint, alike=same_product)


def converted(given: Workload, made: Workload, cluster: Cluster, timed_on: str | None) -> Workload:
    """Returns the workload `made` with run times converted to this cluster's GPU types.

    given: the workload as logged; made: the same jobs after models were assigned. A logged run time belongs to the GPU
    type that the job ran on, else the type that it requested, else `timed_on`. It is converted to the type that the job
    requests in `made`, else to the first type of the cluster with enough GPUs. Estimates, and the work of jobs with a
    model, are scaled alike. If the logged type is unknown, run times are used unchanged.

    Raises InputError if the speeds of `timed_on` and of a type of the cluster cannot be compared. Run times on a type
    that only the log names and that has no data sheet are used unchanged, with a note.
    """
    ran_on, bound = types_ran_on(given.jobs), given.jobs["gpu_type"] != ""
    codes = ran_on.codes
    types = [gpu_type_named(name) or (gpu_type_named(timed_on) if timed_on else "") for name in ran_on.categories]
    base = _base(types, codes, given, cluster, timed_on)
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
    only_run_times, kinds = np.isnan(made.jobs["work_scale"]), made.jobs["gpu_type"]
    for (ran, stays, code, gpus), mine in alike(codes, bound, kinds.codes, made.jobs["gpus"]):
        on, count = packed_as_requested(kinds.categories[code], gpus, cluster)[1], int(mine.sum())
        if not _comparable(types[ran], on, timed_on):
            unchanged[types[ran]] += count
            continue
        factor[mine] = run_time_ratio(types[ran], on).factor
        # A job that requests no type may run on all types, with speeds relative to the type `on`.
        anywhere = cluster.gpu_types if not stays and only_run_times[mine].any() else (on,)
        for each in anywhere:
            jobs[types[ran], each.partition("@")[0]] += count
    conversions = []
    for (of, on), count in sorted(jobs.items(), key=lambda item: (-item[1], item[0])):
        if of != on:
            ratio = run_time_ratio(of, on)
            how = f"{ratio.how}, {ratio.of}"
            conversions.append(Conversion(of, on, ratio.factor, ratio.low, ratio.high, how, jobs=count))
    in_log = {types[code] for code in np.unique(codes).tolist()}
    is_log_hardware = {each.partition("@")[0] for each in cluster.gpu_types} <= in_log
    iterations = made.jobs["iterations"]
    whole = np.where(factor == 1.0, iterations, np.maximum(np.floor(iterations * factor), 1.0))
    work = np.where(np.isfinite(whole), whole / iterations, factor)
    notes = [
        f"{count:,} jobs ran on {of or 'an unknown GPU type'} in the log: their run times are used unchanged, because "
        f"its speed is not known{'; trace.gpu_type=TYPE converts them' if not of else ''}"
        for of, count in unchanged.items()
    ]
    changed = made.with_columns(
        duration_s=on_grid(made.jobs["duration_s"] * factor),
        estimate_s=on_grid(made.jobs["estimate_s"] * factor),
        ran_before_s=on_grid(made.jobs["ran_before_s"] * factor),
        work_scale=made.jobs["work_scale"] * work,
        # Logged waits mean nothing on GPU types that the log's cluster did not have.
        log_wait_s=np.where((factor == 1.0) | is_log_hardware, made.jobs["log_wait_s"], np.nan),
        converted_by=factor,
        iterations=whole,
    )
    return replace(
        changed,
        timed_on=base,
        conversions=tuple(conversions),
        notes=(*made.notes, *notes),
        assumptions=(*made.assumptions, *([_in_words(conversions)] if conversions else [])),
    )


def _base(
    types: Sequence[str], codes: NDArray[np.integer[Any]], given: Workload, cluster: Cluster, timed_on: str | None
) -> str:
    """The GPU type on which run times were logged: `timed_on`, else the type that most jobs ran on.

    Returns "" if that type is unknown, or if its speed cannot be compared with every type of the cluster.
    """
    if timed_on is not None:
        return gpu_type_named(timed_on)
    ran = Counter(types[code] for code in codes.tolist() if types[code])
    base = max(ran, key=lambda each: ran[each]) if ran else ""
    return base if base and all(_comparable(base, each, None) for each in cluster.gpu_types) else ""


def _comparable(of: str, on: str, timed_on: str | None) -> bool:
    """Whether the ratio of the two types' speeds is known. If not, raises InputError if `of` is `timed_on`."""
    if not of:
        return False
    try:
        run_time_ratio(of, on)
    except InputError:
        if timed_on is not None and of == gpu_type_named(timed_on):
            raise
        return False
    return True


def _in_words(conversions: Sequence[Conversion]) -> str:
    """Returns `Run times were converted from V100 to H100 × 0.269 (by memory bandwidth, 900 to 3,350 GB/s; …). …`."""
    parts = []
    for each in conversions:
        of, on = (sheet.title if (sheet := gpu_sheet(name)) else name for name in (each.of, each.on))
        between = "by application" if "measured" in each.how else "between the ratios of memory bandwidth and of FLOP/s"
        reach = f"× {each.low:.3g} to × {each.high:.3g} {between}"
        parts.append(f"from {of} to {on} × {each.factor:.3g} ({each.how}; {reach})")
    return (
        "A logged run time is that on the GPU type that the job ran on. On other types, run times were converted "
        f"{'; '.join(parts)}. The results are only as accurate as these factors."
    )


def speeds(cluster: Cluster, sizes: Iterable[int], timed_on: str | None) -> dict[int, dict[str, float]]:
    """Speeds of jobs that request no type: GPUs → GPU type → speed, where 1 is that of the first type that fits them.

    Returns {} if all types are equally fast. Raises InputError if the speeds of two types cannot be compared.
    """
    if not timed_on or len(cluster.gpu_types) == 1:
        return {}
    ratios = {each: run_time_ratio(timed_on, each).factor for each in cluster.gpu_types}
    return {
        gpus: {each: ratios[packed_as_requested("", gpus, cluster)[1]] / ratio for each, ratio in ratios.items()}
        for gpus in sizes
    }
