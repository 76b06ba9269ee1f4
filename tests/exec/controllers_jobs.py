"""Small jobs and clusters for the controller's tests."""

from __future__ import annotations

from synergy_core.cluster import Cluster, NodeType
from synergy_core.jobs.testbed_profiles import Profile
from synergy_exec.controller.jobs import ExecutedJob
from synergy_exec.job_file import JobFile


def cluster_of(*slots: int) -> Cluster:
    """One node per number, each with so many slots."""
    return Cluster(tuple(NodeType(f"n{i}", "cpu", 1, each) for i, each in enumerate(slots)))


def file_of(work: float = 100.0, slots: int = 1, **more: object) -> JobFile:
    values = {"job_class": "examples.mlp:Mlp", "name": "mlp", "initial_batch": 32, "max_batch": 128, **more}
    return JobFile(work=work, slots=slots, **values)  # type: ignore[arg-type]


def job_of(job_id: int, submit_s: float = 0.0, slots: int = 1, work: float = 100.0) -> ExecutedJob:
    return ExecutedJob(
        job_id, f"j{job_id}", file_of(work, slots), submit_s, gpu_types=("cpu",), restart_s=2.0, profile=Profile()
    )
