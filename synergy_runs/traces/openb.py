"""OpenB (Alibaba, ATC '23): `openb_pod_list_*.csv` of cluster-trace-gpu-v2023, a pod a row.

A pod is a job: submitted at creation_time, it held its GPUs from scheduled_time to deletion_time, in seconds from the
log's start, which are taken as seconds since 1970. Left out: pods without GPUs, and those that were never scheduled.
Succeeded is completed; a pod that was deleted while Running was killed.

`cpu_milli` are thousandths of a core, `memory_mib` MiB; 0 memory is no request, as in Kubernetes. `gpu_milli` below
1000 is a part of one GPU: GPUs are whole here, so such a pod gets one, and the notes say how many did and what they
asked for. `gpu_spec` names the types that a pod may run on: one type binds it, by its name in the catalog (V100M32 is
v100-32gb) or, where the catalog knows none, its own (G2 is g2); several leave it open, and are counted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from synergy_core.catalog.sheets import gpu_sheet, gpu_type_named
from synergy_runs.traces._table import header_of, read_table
from synergy_runs.traces._values import BadValueError, is_missing, number, shown, whole
from synergy_runs.traces.demands import MIB_BYTES, demanded_bytes, demanded_cpus
from synergy_runs.traces.rows import TraceRows

NAME = "openb"
SUMMARY = "OpenB: openb_pod_list_*.csv, pods with CPUs, memory and parts of a GPU (alibaba/clusterdata, v2023)"

COLUMNS = (
    "name",
    "cpu_milli",
    "memory_mib",
    "num_gpu",
    "gpu_milli",
    "gpu_spec",
    "pod_phase",
    "creation_time",
    "deletion_time",
    "scheduled_time",
)
_WHOLE = 1_000
_END_STATES = {"Succeeded": "completed", "Failed": "failed", "Running": "killed", "Pending": "killed"}


@dataclass(slots=True)
class _Odd:
    """What of the jobs that were added is not as their pods asked, or not known.

    parts: of one GPU, where a pod asked for less than one. specs: with several types. unknown: types by name that the
    catalog does not have. deleted_s: when pods that were running were deleted.
    """

    parts: list[float] = field(default_factory=list)
    specs: Counter[str] = field(default_factory=Counter)
    unknown: Counter[str] = field(default_factory=Counter)
    deleted_s: Counter[float] = field(default_factory=Counter)


def recognises(path: Path, head: str) -> bool:
    """By three columns that nobody else has together."""
    return {"cpu_milli", "gpu_milli", "num_gpu"} <= header_of(head)


def read(path: Path, rows: TraceRows) -> None:
    """Adds every pod with GPUs that was scheduled."""
    odd = _Odd()

    def add(
        line: int,
        name: str,
        cpu_milli: str,
        memory_mib: str,
        num_gpu: str,
        gpu_milli: str,
        gpu_spec: str,
        phase: str,
        created: str,
        deleted: str,
        scheduled: str,
    ) -> None:
        gpus = whole(num_gpu, "num_gpu")
        if gpus == 0:
            return rows.leave_out("no GPU (CPU-only pods)")
        if is_missing(scheduled):
            return rows.leave_out("never scheduled")
        if is_missing(deleted):
            return rows.leave_out("no end recorded")
        part, gpu_types, end_state = _part(gpu_milli, gpus), _gpu_types(gpu_spec), _end_state(phase)
        start_s, end_s = number(scheduled, "scheduled_time", "seconds"), number(deleted, "deletion_time", "seconds")
        already = len(rows)
        rows.add(
            line,
            submit_s=number(created, "creation_time", "seconds"),
            start_s=start_s,
            duration_s=end_s - start_s,
            gpus=gpus,
            job_name=name.strip() or f"line-{line}",
            cpus=demanded_cpus(cpu_milli, "cpu_milli", per_core=1_000),
            memory_bytes=demanded_bytes(memory_mib, "memory_mib", unit=MIB_BYTES),
            end_state=end_state,
            gpu_type=gpu_types[0] if len(gpu_types) == 1 else "",
            columns=("creation_time", "deletion_time − scheduled_time", "num_gpu"),
            demand_columns=("cpu_milli", "memory_mib"),
            id_column="name" if name.strip() else "",
        )
        if len(rows) > already:
            if part < 1:
                odd.parts.append(part)
            if len(gpu_types) > 1:
                odd.specs[gpu_spec] += 1
            elif gpu_types and gpu_sheet(gpu_types[0]) is None:
                odd.unknown[gpu_types[0]] += 1
            if end_state == "killed":
                odd.deleted_s[end_s] += 1
        return None

    read_table(path, rows, add, required=COLUMNS)
    _note(odd, rows)


def _part(gpu_milli: str, gpus: int) -> float:
    """How much of each GPU is asked for, in (0, 1]; below 1 of one GPU alone."""
    part = number(gpu_milli, "gpu_milli", "thousandths of a GPU") / _WHOLE
    if not 0 < part <= 1 or (gpus > 1 and part < 1):
        expected = f"{_WHOLE}, since num_gpu is {gpus}" if gpus > 1 else f"above 0, to {_WHOLE}"
        raise BadValueError("gpu_milli", shown(gpu_milli), expected)
    return part


def _gpu_types(spec: str) -> tuple[str, ...]:
    """The types in `V100M16|V100M32`, each once, by the catalog's names; none for an empty one."""
    if is_missing(spec):
        return ()
    return tuple(dict.fromkeys(gpu_type_named(each.strip().lower()) for each in spec.split("|")))


def _end_state(phase: str) -> str:
    found = _END_STATES.get(phase.strip())
    if found is None:
        raise BadValueError("pod_phase", shown(phase), f"one of {', '.join(_END_STATES)}")
    return found


def _note(odd: _Odd, rows: TraceRows) -> None:
    pods = len(rows) + sum(rows.left_out.values()) + rows.bad_count
    if pods:
        rows.notes.append(f"{len(rows):,} of {pods:,} pods ({len(rows) / pods * 100:.1f} %) are replayed")
    rows.notes.append("times count from the log's start: dates count from 1970-01-01")
    if odd.parts:
        mean = sum(odd.parts) / len(odd.parts)
        rows.notes.append(
            f"{len(odd.parts):,} of {len(rows):,} pods ask for part of a GPU, {mean:.3f} on average: "
            "each is a job on one whole GPU here"
        )
    if odd.specs:
        rows.notes.append(f"{odd.specs.total():,} pods name several GPU types: here they run on any type")
    if odd.unknown:
        names = ", ".join(f"{name} ({count:,})" for name, count in sorted(odd.unknown.items()))
        rows.notes.append(f"GPU types that the catalog does not have bind pods by their names: {names}")
    last_s = max(odd.deleted_s, default=0.0)
    if odd.deleted_s[last_s] > 1:
        rows.notes.append(
            f"{odd.deleted_s[last_s]:,} running pods end at the log's last instant: how much longer they ran is unknown"
        )
