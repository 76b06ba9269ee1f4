"""Jobs that figures are over: the others run like all, before to fill the cluster and after to keep it full."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np

from synergy_core.errors import InputError
from synergy_runs.workload import Workload


def with_measured(workload: Workload, ids: str | None) -> Workload:
    """The workload with the jobs of these ids measured, as `4000-4999` or `17`; None: all. Ids are row numbers.

    The last step of making a workload: what takes jobs out of it changes the ids of those behind.
    """
    if ids is None:
        return workload
    found = re.fullmatch(r"(\d+)(?:\s*[-–]\s*(\d+))?", str(ids).strip())
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
    if not 0 <= first <= last < len(workload):
        raise InputError(
            f"trace.measured_jobs={ids}: expected ids from 0 to {len(workload) - 1}, such as 0-{len(workload) - 1}; "
            "null measures all jobs."
        )
    row = np.arange(len(workload))
    return replace(workload, measured=(first <= row) & (row <= last))


def measured_ids(workload: Workload) -> str | None:
    """The ids of the measured jobs as `with_measured` takes them; None where all are, "none" where none came to run."""
    if workload.measured.all():
        return None
    rows = np.flatnonzero(workload.measured)
    return f"{rows[0]}-{rows[-1]}" if len(rows) else "none"
