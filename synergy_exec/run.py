"""Runs every policy on the same jobs, one after another; the results of each are written as soon as it has ended."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import io
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from synergy_core.errors import InputError
from synergy_core.performance.goodput.compression import compressor_named
from synergy_core.performance.planner.plan import Plan
from synergy_core.scheduling.jobs.cluster import Cluster
from synergy_core.scheduling.jobs.testbed_profiles import TestbedProfile
from synergy_core.scheduling.policies import Policy
from synergy_exec import job_folder
from synergy_exec.backends import Backend, checked_options, get_backend
from synergy_exec.controller.controller import Arrival, Controller, whole_cluster
from synergy_exec.controller.execution import with_queue
from synergy_exec.controller.journal import Journal, open_journal
from synergy_exec.folders import WORK, Place, claim, unfinished
from synergy_exec.plain import plain, plain_lines
from synergy_exec.profiling.machine import known_profile, machine, profile_in
from synergy_exec.profiling.profile import Say, current_profile, progress
from synergy_exec.settings import AUTO, BackendSettings, Settings
from synergy_exec.wire import whole_lines
from synergy_exec.worker.network import check_interface
from synergy_exec.workload import arrivals_of, as_executed
from synergy_runs.files import atomic_file
from synergy_runs.inputs.from_settings import check_compression, read_profile
from synergy_runs.inputs.keys import TraceSettings, build
from synergy_runs.inputs.requested import policies_of, terms_of
from synergy_runs.inputs.workload import Workload
from synergy_runs.outputs.facts import TRUE_RUN_TIMES, Kind, Run, Training, TrainingLog
from synergy_runs.outputs.invariants import check
from synergy_runs.outputs.results import new_run, resumed_run, show, write_run

SOME_FAILED = 1
"""Exit code if everything was carried out but some jobs failed."""
PROGRESS_EVERY_S = 0.5
SERVED = "served"
"""Name of the results folder of a run without a trace."""


def run(values: dict[str, Any], *, resumed: Path | None = None) -> None:
    """Runs the policies in the settings, writes the results and prints the table. resumed: see `execute_all`."""
    settings = build(Settings, values)
    settings = dataclasses.replace(settings, backend=_with_slots(settings.backend, settings.trace))
    _check(settings)
    name = settings.trace.name if settings.trace is not None else SERVED
    folder = settings.results_dir / name
    places = execute_all(
        settings,
        values,
        folder,
        lambda: get_backend(settings.backend.name, settings.backend.options),
        resumed=resumed,
        shown=lambda results, into: show(results, into, figures=settings.figures),
    )
    if failed := [line for each in places for line in _failed(each)]:
        print(*failed, sep="\n", file=sys.stderr)
        sys.exit(SOME_FAILED)


def _with_slots(backend: BackendSettings, trace: TraceSettings | None) -> BackendSettings:
    """The backend with the trace's number of slots, if the user gave none and there are no GPUs."""
    from synergy_exec.agent.gpus import gpus_here

    slots = None if trace is None else trace.slots
    if slots is None or backend.name != "local" or {"nodes", "slots"} & set(backend.options) or gpus_here():
        return backend
    return dataclasses.replace(backend, options={**backend.options, "slots": slots})


def _failed(place: Place) -> list[str]:
    """A message about the failed jobs of a run."""
    with contextlib.closing(open_journal(place.work)) as journal:
        jobs = journal.jobs()
    failed = [each for each in jobs if each.state == "failed"]
    if not failed:
        return []
    first = f"{place.work.name.removesuffix(WORK)}: {len(failed)} of {len(jobs)} jobs failed:"
    told = [f"  job {each.job} ({plain(each.name)}): {plain_lines(each.reason)}" for each in failed]
    last = f"To have one wait again: python -m synergy_exec retry JOB --dir {place.work}"
    return [first, *told, last]


def _check(settings: Settings) -> None:
    if settings.trace is None and not settings.serve:
        raise InputError("there is no trace, and serve=false: nothing would ever run. Type serve=true, or +trace=demo.")
    if settings.serve and (policies := len(settings.policies.policy)) > 1:
        raise InputError(f"serve=true runs until it is interrupted; give one policy, not {policies}.")
    if settings.run.interface is not None and settings.backend.name == "local":
        check_interface(settings.run.interface)
    checked_options(settings.backend.name, settings.backend.options)
    compressor_named(settings.exchange.compressor)
    compression, profile = settings.exchange.compression, settings.profiling.profile
    if compression != "none" and profile not in (None, AUTO):
        raise InputError(
            f"compression={compression}: profile={profile} has step times of uncompressed gradients "
            "alone, and does not say what of them was exchanging. Type profile=null."
        )


def execute_all(
    settings: Settings,
    values: dict[str, Any],
    folder: Path,
    make_backend: Callable[[], Backend],
    *,
    resumed: Path | None = None,
    shown: Callable[[list[Path], Path], None] = lambda results, into: None,
) -> list[Place]:
    """Runs every policy; returns their folders, which are in the command's own folder below `folder`.

    If the same command was interrupted, it goes on in its folder: finished policies are kept and the unfinished one
    resumes. resumed: the folder of the command to go on with. shown: makes figures and reports of the results. Raises
    InputError for a folder in which everything is finished.
    """
    from omegaconf import OmegaConf

    values = {**values, "compared_with": list(settings.policies.policy)}
    chosen, seed = settings.policies, settings.run.seed
    policies = policies_of(chosen.policy, chosen.parameters, chosen.information, chosen.input)
    trace, arrivals = arrivals_of(settings.trace, policies.values(), load=settings.load, seed=seed)
    check_compression(settings.exchange.compression, policies.values())
    if any(each.batch == "tuned" for each in policies.values()):
        raise InputError("batch=tuned: only the simulator knows the best batch of a job; type it in the job file.")
    own = {f"{policy.name}-{seed}": {**values, "policy": name, "seed": seed} for name, policy in policies.items()}
    into = resumed or unfinished(folder, own, is_service=settings.serve and settings.trace is None)
    with contextlib.ExitStack() as held:
        if into is None:
            into = held.enter_context(new_run(folder, "synergy_exec", sys.argv[1:]))
            places = claim(into, own, held)
        else:
            places = claim(into, own, held)
            if all(place.done for place in places):
                raise InputError(
                    f"{into}: it has ended; there is nothing to go on with. A job of it that failed waits again with "
                    "python -m synergy_exec retry JOB; the command that began it begins another run."
                )
            held.enter_context(resumed_run(into))
        profile = _profile(settings, arrivals, make_backend)
        for at, (place, policy) in enumerate(zip(places, policies.values(), strict=True), 1):
            results, work, done = place
            if done:
                print(f"{results}: done before this command was broken off; kept", file=sys.stderr)
            else:
                controller = Controller(policy, arrivals, make_backend(), settings, work, profile)
                run = _execute_one(controller, trace)
                write_run(run, results, OmegaConf.to_yaml(OmegaConf.create(own[results.name])))
                write_recorded(work / "jobs", job_folder.STEPS, results / "losses.parquet")
                write_recorded(work / "jobs", job_folder.EVALUATIONS, results / "metrics.parquet")
                with contextlib.closing(Journal(work / "journal.sqlite")) as journal:
                    journal.set_meta("written", True)
            shown([each.results for each in places[:at]], into)
    return places


def _profile(settings: Settings, arrivals: list[Arrival], make_backend: Callable[[], Backend]) -> TestbedProfile:
    """The profile for scheduling. With profile=auto it is this machine's profile, and the trace's models that it lacks
    are measured now.
    """
    if settings.profiling.profile is None or settings.exchange.compression != "none":
        return TestbedProfile()
    if settings.profiling.profile != AUTO:
        return read_profile(Path(settings.profiling.profile))
    files = list({each.file.name: each.file for each in arrivals}.values())
    where = machine(settings.backend.name, settings.backend.options, precision=settings.run.precision)
    path = profile_in(settings.results_dir)
    if not files:
        return known_profile(path, where)
    with progress() as say:
        profile, remarks = current_profile(path, files, make_backend, where, say, settings)
    for remark in remarks:
        print(remark, file=sys.stderr, flush=True)
    return profile


def _execute_one(controller: Controller, trace: Workload | None) -> Run:
    """Runs one policy until all its jobs have ended. Raises KeyboardInterrupt if the user interrupts it."""
    settings, work = controller.settings, controller.folder
    began_s = time.process_time()
    asyncio.run(_with_progress(controller))
    execution = controller.execution
    if execution is None or (controller.interrupted and not (settings.serve and execution.idle)):
        raise KeyboardInterrupt
    cpu_s = time.process_time() - began_s
    journal = Journal(work / "journal.sqlite")
    whole = whole_cluster(journal)
    assert whole is not None
    cluster = with_queue(whole, settings.cluster)
    return executed(journal, trace, controller.policy, cluster, work.parents[1].name, settings.run.seed, cpu_s)


async def _with_progress(controller: Controller) -> None:
    """Runs the controller; on a terminal, one changing line counts the jobs by state."""
    if not sys.stderr.isatty():
        return await controller.run()

    async def count(say: Say) -> None:
        while True:
            counts = controller.execution.counts if controller.execution else {}
            say("jobs: " + (", ".join(f"{count} {state}" for state, count in counts.items() if count) or "none yet"))
            await asyncio.sleep(PROGRESS_EVERY_S)

    with progress() as say:
        counting = asyncio.ensure_future(count(say))
        try:
            await controller.run()
        finally:
            counting.cancel()


def executed(
    journal: Journal, trace: Workload | None, policy: Policy, cluster: Cluster, name: str, seed: int, cpu_s: float
) -> Run:
    """The results of a finished run from its journal, in the simulator's form. Closes the journal."""
    if not journal.jobs():
        raise KeyboardInterrupt  # nothing was ever submitted
    workload, numbers = as_executed(trace, journal, name)
    result = Run(
        policy=policy.name,
        oracle=policy.oracle,
        truth_read=TRUE_RUN_TIMES if policy.oracle else "",  # estimates are what jobs declare, never drawn
        seed=seed,
        workload=workload,
        cluster=cluster,
        events=journal.events(numbers).events(),
        decisions=journal.decisions().decisions(),
        predicted_duration_s=np.full(len(workload), np.nan),
        simulation_cpu_s=cpu_s,
        peak_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        information=policy.knows,
        learns_input=policy.learns_input,
        terms=dataclasses.asdict(terms_of(policy)),
        training=_training(journal, numbers),
    )
    check(result, whole=_whole(journal))
    journal.close()
    return result


def _whole(journal: Journal) -> bool:
    """Whether the log has every job's end. A job that ended without holding slots has no end in the log."""
    ends = {fact.job for fact in journal.facts() if fact.kind == Kind.FINISH}
    unended = [job for job in journal.jobs() if job.job not in ends]
    return all(job.state == "done" for job in unended)


def _training(journal: Journal, numbers: dict[int, int]) -> Training | None:
    """The batches and compressors of jobs by their rows in the workload, from when each run held its slots."""
    runs = {run.run: run for run in journal.runs()}
    starts_s: dict[int, list[float]] = {}
    for fact in journal.facts():
        if fact.kind == Kind.START:
            starts_s.setdefault(fact.job, []).append(fact.time_s)
    changes: dict[int, list[tuple[float, int, str]]] = {}
    for each in journal.timings():
        if each.kind != "plan":
            continue
        run, parts = runs[each.run], each.parts
        if started := [time_s for time_s in starts_s.get(run.job, ()) if time_s >= run.decided_s]:
            batch = parts["micro_batch"] * parts["accumulation"] * Plan(**run.plan).data
            noted = max(each.time_s, started[0]), batch, parts.get("compressor", "")
            changes.setdefault(run.job, []).append(noted)
    log = TrainingLog()
    for job, noted_of_job in changes.items():
        log.append(numbers[job], noted_of_job)
    return log.training()


# The loss of every step, and evaluations, as workers wrote them.


def recorded(path: Path) -> pd.DataFrame:
    """The rows of a steps.csv or evaluations.csv by step. If a step was done twice, the later run's row counts;
    incomplete lines are left out.
    """
    columns = job_folder.COLUMNS[path.name]
    rows = pd.read_csv(
        io.StringIO("\n".join(whole_lines(path)[1:])),
        names=list(columns),
        dtype=str,
        on_bad_lines="skip",
        keep_default_na=False,
    )
    numbers = [name for name, column_type in columns.items() if column_type is not str]
    rows[numbers] = rows[numbers].apply(pd.to_numeric, errors="coerce")  # a loss may be NaN
    rows = rows.dropna(subset=[name for name, column_type in columns.items() if column_type is int]).astype(columns)
    key = [name for name in ("step", "metric") if name in columns]
    return rows.sort_values("run", kind="stable").drop_duplicates(key, keep="last").sort_values("step", kind="stable")


def write_recorded(jobs: Path, file: str, into: Path) -> None:
    """Writes the rows of a file of all jobs below `jobs` as one table with a column `job_id`, if there are any."""
    found = []
    for number, folder in sorted(job_folder.folders(jobs.parent).items()):
        rows = recorded(folder / file)
        rows.insert(0, "job_id", number)
        found.append(rows)
    if not any(map(len, found)):
        return
    with atomic_file(into) as partial:
        pd.concat(found).to_parquet(partial, compression="zstd", index=False)
