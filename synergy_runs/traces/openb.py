"""Reader of OpenB (Alibaba, ATC '23): `openb_pod_list_*.csv` of cluster-trace-gpu-v2023, one pod per row.

Each pod becomes a job, submitted at creation_time, that held its GPUs from scheduled_time to deletion_time. Times are
seconds from the log's start and are read as seconds since 1970. Pods without GPUs and pods that were never scheduled
are left out. Succeeded means completed; a pod deleted while Running counts as killed. If several were deleted at the
log's last instant, these were still running.

`cpu_milli` is in thousandths of a core, `memory_mib` in MiB; 0 memory means no request, as in Kubernetes. `gpu_milli`
below 1000 requests part of a GPU. We allocate whole GPUs, so such pods get one each; the notes give their number and
mean request. `gpu_spec` lists the GPU types a pod may run on. A pod with a single type is bound to it, under its name
in the catalog (V100M32: v100-32gb) or else in the log (G2: g2). Pods with several types run anywhere and are counted.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from synergy_core.performance.catalog import gpu_type_named
from synergy_runs.traces._reading import Number, Text, by_header, read_tables
from synergy_runs.traces.columns import UNKNOWN
from synergy_runs.traces.rows import RUNNING, TraceRows, cpus, memory_bytes, number, one_of, seconds, whole

NAME = "openb"
SUMMARY = "OpenB: openb_pod_list_*.csv, pods with CPUs, memory and parts of a GPU (alibaba/clusterdata, v2023)"

WHOLE_GPU = 1_000
MIB_BYTES = 2.0**20
END_STATES = {"Succeeded": "completed", "Failed": "failed", "Running": "killed", "Pending": "killed"}
recognises = by_header("cpu_milli", "gpu_milli", "num_gpu")


def gpu_types(spec: str, column: str) -> str:
    """The GPU types in a text such as `V100M16|V100M32`, by their catalog names and without duplicates."""
    return "|".join(dict.fromkeys(gpu_type_named(each.strip().lower()) for each in spec.split("|")))


def cores(text: str, column: str) -> float:
    """Parses thousandths of a CPU core into cores."""
    return cpus(text, column) / 1_000


COLUMNS = {
    "job_name": Text("name"),
    "gpus": Number("num_gpu", whole),
    "part": Number("gpu_milli", partial(number, expected="thousandths of a GPU")),
    "gpu_types": Text("gpu_spec", gpu_types, missing="", is_required=True),
    "end_state": Text("pod_phase", partial(one_of, meanings=END_STATES)),
    "start_s": Number("scheduled_time", seconds),
    "end_s": Number("deletion_time", seconds),
    "submit_s": Number("creation_time", seconds),
    "cpus": Number("cpu_milli", cores, missing=UNKNOWN, is_required=True),
    "memory_bytes": Number("memory_mib", partial(memory_bytes, unit=MIB_BYTES), missing=UNKNOWN, is_required=True),
}


def read(path: Path, rows: TraceRows) -> None:
    """Adds every pod that requests GPUs and was scheduled."""
    parts: list[float] = []
    for table in read_tables(path, rows, COLUMNS):
        gpus = table["gpus"]
        table.leave_out(gpus == 0, "no GPU (CPU-only pods)")
        table.leave_out(table.missing("scheduled_time"), "never scheduled")
        table.leave_out(table.missing("deletion_time"), "no end recorded")
        part = table["part"] / WHOLE_GPU
        table.reject(~((part > 0) & (part <= 1)), "gpu_milli", f"above 0, to {WHOLE_GPU}")
        table.reject((gpus > 1) & (part < 1), "gpu_milli", f"{WHOLE_GPU}, since num_gpu is above 1")
        several = np.array(["|" in each for each in table["gpu_types"]])
        gpu_type = np.where(several, "", table["gpu_types"])
        added = table.add(
            duration_s=table["end_s"] - table["start_s"],
            gpu_type=gpu_type,
            columns={"duration_s": "deletion_time − scheduled_time"},
        )
        parts += part[added & (part < 1)].tolist()
        table.count(added & several, "pods list several GPU types: here they run on any type")
    end_s, end_state = rows.jobs["start_s"] + rows.jobs["duration_s"], rows.jobs["end_state"]
    at_end = (end_state == "killed") & (end_s == end_s.max(initial=0))
    rows.jobs = rows.jobs.with_columns(end_state=np.where(at_end & (at_end.sum() > 1), RUNNING, end_state))
    pods = len(rows) + sum(rows.left_out.values()) + rows.bad_count
    if pods:
        rows.notes.append(f"{len(rows):,} of {pods:,} pods ({len(rows) / pods * 100:.1f} %) are replayed")
    rows.notes.append("times count from the log's start: dates count from 1970-01-01")
    if parts:
        rows.notes.append(
            f"{len(parts):,} of {len(rows):,} pods request part of a GPU, {sum(parts) / len(parts):.3f} on average: "
            "here each is a job on one whole GPU"
        )
