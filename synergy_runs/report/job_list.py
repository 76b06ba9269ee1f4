"""The jobs of a comparison for the report's list: whoever they are, and how each fared under every policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from synergy_runs.comparison import ComparedPolicy
from synergy_runs.report.packed import packed_columns, packed_text, steps_of, unit_for
from synergy_runs.stored import StoredRun

MOST_CELLS = 800_000
"""Jobs × policies: about 2 bytes each in the report."""
_NAMED = ("user", "virtual_cluster", "gpu_type", "model", "end_state")


def job_list(rows: Sequence[ComparedPolicy], *, most_cells: int = MOST_CELLS) -> dict[str, str]:
    """Sections of the page by id: names, and columns over the jobs that are listed.

    All jobs if they are few enough; else those that waited longest under any of the policies, which the section says.
    Of each policy's first seed; a policy that did not have these same jobs has no columns.
    """
    runs = [row.runs[0] for row in rows]
    names = runs[0].jobs("job_name")["job_name"]
    same = [run for run in runs if len(run.jobs("job_id")["job_id"]) == len(names)]
    fared = {number: _fared(run) for number, run in enumerate(runs) if run in same}
    most = max(1, most_cells // max(1, len(fared)))
    keep = np.arange(len(names))
    if len(names) > most:
        longest_s = np.nanmax([np.nan_to_num(each["waiting_s"]) for each in fared.values()], axis=0)
        keep = np.sort(np.argsort(-longest_s, kind="stable")[:most])
    plain = runs[0].jobs("gpus", "submit_time_s", "duration_s", "estimate_s", "estimate_drawn", "carried", *_NAMED)
    latest_s = max(float(np.nanmax(each["jct_s"], initial=1.0)) for each in fared.values())
    unit_s = unit_for(max(latest_s, float(plain["submit_time_s"].max(initial=1.0))))
    about: dict[str, Any] = {"unit_s": unit_s, "policies": list(fared), "names": {}}
    about |= {"jobs": int((~plain["carried"]).sum()), "left_out": len(names) - len(keep)}
    columns: dict[str, NDArray[Any]] = {
        "id": keep,
        "gpus": plain["gpus"][keep],
        "carried": plain["carried"][keep].astype(np.int64),
        "duration": steps_of(plain["duration_s"][keep], unit_s),
    }
    limit_s = np.where(plain["estimate_drawn"], np.nan, plain["estimate_s"])[keep]
    if np.isfinite(limit_s).any():
        columns["limit"] = steps_of(limit_s, unit_s)
    submitted = np.maximum(steps_of(plain["submit_time_s"][keep], unit_s), 0)
    columns["submitted_after_last"] = np.diff(submitted, prepend=0)
    for name in _NAMED:
        classes, code = np.unique(plain[name][keep].astype(str), return_inverse=True)
        if len(classes) > 1:
            about["names"][name] = classes.tolist()
            columns[name] = code
    for number, each in fared.items():
        columns |= _columns_of(number, each, keep, columns["duration"], unit_s)
    return {
        "job-names": packed_text("\n".join(map(_one_line, names[keep].tolist()))),
        "jobs": packed_columns(columns, about),
    }


def _fared(run: StoredRun) -> dict[str, NDArray[Any]]:
    return run.jobs("jct_s", "waiting_s", "preemptions")


def _columns_of(
    number: int, fared: dict[str, NDArray[Any]], keep: NDArray[Any], duration: NDArray[np.int64], unit_s: float
) -> dict[str, NDArray[Any]]:
    """Waiting, preemptions, and by how much the time held was longer (even numbers) or shorter (odd) than the run time.

    Of most jobs under most policies the last is 0 throughout and takes no room.
    """
    waiting, jct = (steps_of(fared[name][keep], unit_s) for name in ("waiting_s", "jct_s"))
    over = jct - waiting - duration
    folded = np.where(over >= 0, 2 * over, -2 * over - 1)
    return {
        f"waiting{number}": waiting,
        f"over{number}": np.where((jct < 0) | (waiting < 0), -1, folded),
        f"preemptions{number}": fared["preemptions"][keep],
    }


def _one_line(name: Any) -> str:
    return " ".join(str(name).splitlines())
