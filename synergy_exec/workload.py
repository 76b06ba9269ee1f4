"""Turns a trace into jobs that can be trained, and trained jobs into a workload for the results."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path

import numpy as np

from synergy_core.errors import InputError, unknown
from synergy_core.scheduling.policies import Policy
from synergy_core.units import on_grid
from synergy_exec.controller.controller import Arrival
from synergy_exec.controller.journal import Journal
from synergy_exec.job_file import JobFile, job_of
from synergy_runs.files import conf_folder
from synergy_runs.inputs.from_settings import estimated, workload_of
from synergy_runs.inputs.keys import ClusterSettings, TraceSettings
from synergy_runs.inputs.workload import Workload, from_rows, with_measured
from synergy_runs.outputs.facts import Kind
from synergy_runs.traces.columns import UNKNOWN
from synergy_runs.traces.rows import TraceRows

_END_STATE = {"done": "completed", "cancelled": "killed", "failed": "failed"}


def models() -> dict[str, Path]:
    """Reads the job files of the models that a trace may name. They state everything but the amount of work."""
    return {path.stem: path for path in sorted((conf_folder() / "jobs").glob("*.yaml"))}


def arrivals_of(
    given: TraceSettings | None, policies: Collection[Policy], *, load: float = 1.0, seed: int = 0
) -> tuple[Workload | None, list[Arrival]]:
    """The trace's jobs; none without a trace. Raises InputError if one names no model or no work.

    policies: those that are to run, because some need estimates of run times.
    """
    if given is None:
        return None, []
    # Agents report what the cluster is; a trace requests slots of any type.
    anything = ClusterSettings(
        nodes=None,
        gpus_per_node=None,
        cpus_per_node=None,
        memory_gb_per_node=None,
        storage_mb_per_s=None,
        gpu_type="cpu",
        node_types=None,
        load=load,
        virtual_clusters=None,
        borrowing=False,
        placement="spread",
        patience_s=0.0,
        ignore_gpu_types=True,
    )
    trace = dataclasses.replace(given, carry_in=False)  # nothing runs on the agents before they are there
    workload = estimated(trace, workload_of(trace, anything, seed), seed, policies)
    workload = with_measured(workload, trace.measured_jobs)
    if workload.bad_rows and given.bad_rows == "stop":
        shown = "\n  ".join(map(str, workload.bad_examples))
        raise InputError(
            f"{workload.source}: {workload.bad_rows} impossible rows:\n  {shown}\n"
            "Fix these rows, or leave them out with trace.bad_rows=skip."
        )
    jobs, hint = workload.jobs, "A trace for the executor names the model of each job."
    files = {name: template(name, hint) for name in jobs["model"].categories}
    return workload, [
        Arrival(float(jobs["submit_time_s"][row]), jobs["job_name"][row], _file(workload, row, files))
        for row in range(len(workload))
    ]


def template(model: str, hint: str) -> dict[str, object]:
    """The job file, without the work, of a model that ships with Synergy. Raises InputError with the hint."""
    import yaml  # type: ignore[import-untyped]

    known = models()
    if model not in known:
        raise unknown("model", model, known, hint=f"{hint} The known models are the files in conf/jobs.")
    values: dict[str, object] = yaml.safe_load(known[model].read_text(encoding="utf-8"))
    return values


def _file(workload: Workload, row: int, files: dict[str, dict[str, object]]) -> JobFile:
    jobs = workload.jobs
    model = jobs["model"][row]
    where = f"{workload.source}, line {jobs['line'][row]} (job {jobs['job_name'][row]})"
    iterations = float(jobs["iterations"][row])
    if not np.isfinite(iterations):
        raise InputError(f"{where}: how many iterations it trains is missing; the executor needs the work of each job.")
    batch = int(jobs["global_batch"][row])
    user = jobs["user"][row]
    where_to = jobs["virtual_cluster"][row]
    values = {**files[model], "work": iterations, "slots": int(jobs["gpus"][row])}
    values |= {"user": user, "virtual_cluster": where_to}
    return job_of({**values, "batch": batch} if batch else values, where)


def as_executed(trace: Workload | None, journal: Journal, name: str) -> tuple[Workload, dict[int, int]]:
    """The workload that really ran, and each job's row in it.

    Jobs are in the order of their real arrival times. A job that was submitted, or whose trace has only its work, gets
    GPU-seconds held ÷ requested slots as its run time.
    """
    jobs = sorted(journal.jobs(), key=lambda each: (each.submit_s, each.job))
    held = _held_gpu_s(journal)
    rows = TraceRows(Path(name), "submitted")
    rows.from_zero = True
    took_s = np.array([held.get(job.job, 0.0) / int(job.file["slots"]) for job in jobs])
    logged = {each: np.full(len(jobs), UNKNOWN) for each in ("duration_s", "estimate_s", "cpus", "memory_bytes")}
    for at, job in enumerate(jobs):
        if trace is not None and job.row is not None:
            for column, values in logged.items():
                values[at] = trace.jobs[column][job.row]
    has_run_time = logged["duration_s"] > 0
    if jobs:
        rows.add(
            np.zeros(len(jobs)),
            submit_s=[job.submit_s for job in jobs],
            duration_s=np.where(has_run_time, logged["duration_s"], took_s),
            estimate_s=np.where(has_run_time, logged["estimate_s"], took_s),
            gpus=[int(job.file["slots"]) for job in jobs],
            cpus=logged["cpus"],
            memory_bytes=logged["memory_bytes"],
            job_name=[job.name for job in jobs],
            end_state=[_END_STATE.get(job.state, "completed") for job in jobs],
            model=[str(job.file["name"]) for job in jobs],
            virtual_cluster=[str(job.file.get("virtual_cluster", "")) for job in jobs],
            user=[str(job.file.get("user", "")) for job in jobs],
            columns={"submit_s": "submit_s", "duration_s": "duration_s", "gpus": "gpus"},
        )
    made = from_rows(rows, name=name)
    if trace is not None:
        # Indexed by job id, as in the trace. Jobs submitted during a trace count only if the whole trace is measured.
        measured = trace.jobs["measured"]
        measured = np.concatenate((measured, np.full(len(jobs), measured.all())))[: len(jobs)]
        made = dataclasses.replace(
            made.with_columns(measured=measured), source=trace.source, sha256=trace.sha256, notes=trace.notes
        )
    return made, {job.job: row for row, job in enumerate(jobs)}


def _held_gpu_s(journal: Journal) -> dict[int, float]:
    held: dict[int, float] = {}
    for fact in journal.facts():
        sign = {int(Kind.START): -1, int(Kind.STOP): 1, int(Kind.FINISH): 1}.get(fact.kind, 0)
        held[fact.job] = held.get(fact.job, 0.0) + sign * fact.gpus * fact.time_s
    return {job: on_grid(seconds) for job, seconds in held.items()}
