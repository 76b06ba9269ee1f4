"""What run times become on GPUs of another type than those of the log, and which types are known at all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from synergy_core.catalog.sheets import gpu_sheet, gpu_sheets, gpu_type_named
from synergy_core.catalog.transfer import run_time_ratio
from synergy_core.cluster import Cluster
from synergy_core.errors import unknown
from synergy_core.units import on_grid
from synergy_runs.workload import Workload
from synergy_sim.assignment import packed_as_asked
from synergy_sim.ground_truth import Truth

SHEET_HINT = (
    "Another needs a data sheet, cluster.gpu_sheets=[{name}.yaml] in the form of synergy_core/catalog/gpus/v100.yaml, "
    "or cluster.anonymous_gpu_types=[{name}] where run times hold on it as they are."
)
NOMINAL = "v100"
"""The type of the default cluster: where it is kept, nobody asks what GPUs mean."""


def check_types(
    cluster: Cluster, workload: Workload, truth: Truth, timed_on: str | None, anonymous: Sequence[str] = ()
) -> None:
    """Raises InputError for a GPU type of which nobody knows anything: no data sheet, no measurements, no job of the
    log that asks for it, and not among the anonymous ones; and for a `timed_on` without a data sheet.
    """
    if timed_on is not None and gpu_sheet(timed_on) is None:
        raise unknown("trace.gpu_type", timed_on, gpu_sheets(), hint="trace.gpu_type=null keeps run times as they are.")
    if truth.profile:
        return
    for gpu_type in cluster.gpu_types:
        known = gpu_sheet(gpu_type) is not None or gpu_type in workload.gpu_types or gpu_type in anonymous
        if not known and not _measured(truth.profiles, gpu_type):
            raise unknown("GPU type", gpu_type, gpu_sheets(), hint=SHEET_HINT.format(name=gpu_type))


def _measured(profiles: Path | None, gpu_type: str) -> bool:
    """Whether there are measured step times of that type."""
    return profiles is not None and any(profiles.glob(f"*/placements-{gpu_type}.csv"))


def converted(given: Workload, made: Workload, cluster: Cluster, timed_on: str | None) -> Workload:
    """The workload with run times as they are on this cluster.

    given: as the log has it; made: with models, where it has them. A row that asks for a GPU type keeps its run time;
    that of another is on `timed_on`, and becomes that on the type of `made`, else on the cluster's first that has room.
    Estimates, and the work of rows with a model, follow. None: run times hold on any type.

    Raises InputError where the speeds of two types cannot be compared.
    """
    bound = np.array([bool(each) for each in given.gpu_types])[given.gpu_type_code]
    if timed_on is None:
        return replace(made, notes=(*made.notes, *_kept(cluster, bool(bound.all()))))
    timed_on = gpu_type_named(timed_on)
    rows, inverse = np.unique(np.stack([bound, made.gpu_type_code, made.gpus], axis=1), axis=0, return_inverse=True)
    factor, types = np.ones(len(made)), dict.fromkeys(cluster.gpu_types, False)
    for at, (stays, code, gpus) in enumerate(rows.tolist()):
        on = packed_as_asked(made.gpu_types[code], gpus, cluster)[1]
        factor[inverse.reshape(-1) == at] = 1.0 if stays else run_time_ratio(timed_on, on).factor
        types[on] |= not stays
    everywhere = not (bound | np.isfinite(made.work_scale)).all()
    told = [each for each, used in types.items() if each != timed_on and (used or everywhere)]
    if not told:
        return replace(made, timed_on=timed_on)
    whole = np.where(factor == 1.0, made.iterations, np.maximum(np.floor(made.iterations * factor), 1.0))
    work = np.where(np.isfinite(whole), whole / made.iterations, factor)
    return replace(
        made,
        timed_on=timed_on,
        duration_s=on_grid(made.duration_s * factor),
        estimate_s=on_grid(made.estimate_s * factor),
        ran_before_s=on_grid(made.ran_before_s * factor),
        work_scale=made.work_scale * work,
        # The log's own waits belong to its own run times: together with others they are nobody's.
        log_wait_s=np.where(factor == 1.0, made.log_wait_s, np.nan),
        iterations=whole,
        notes=(*made.notes, _in_words(told, timed_on)),
    )


def _in_words(told: Sequence[str], timed_on: str) -> str:
    """`run times from V100 (trace.gpu_type) × 0.269 to H100 (900 to 3,350 GB/s), by the data sheets' memory …`."""
    groups: dict[str, list[str]] = {}
    for on in told:
        ratio = run_time_ratio(timed_on, on)
        groups.setdefault(ratio.how, []).append(f"× {ratio.factor:.3g} to {_title(on)} ({ratio.of})")
    parts = "; ".join(f"{', '.join(changes)}, {how}" for how, changes in groups.items())
    return f"run times from {_title(timed_on)} (trace.gpu_type) {parts}"


def _kept(cluster: Cluster, bound: bool) -> list[str]:
    """That run times stay, where that may surprise: on other GPUs than the default cluster's, or on several types."""
    if bound or cluster.gpu_types == (NOMINAL,):
        return []
    on = cluster.gpu_types[0] if len(cluster.gpu_types) == 1 else "every GPU type"
    return [f"run times on {on} are those of the log; trace.gpu_type=TYPE, on which they were, converts them"]


def _title(gpu_type: str) -> str:
    sheet = gpu_sheet(gpu_type)
    return sheet.title if sheet else gpu_type


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
