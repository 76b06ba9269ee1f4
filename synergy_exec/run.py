"""One command: every policy on the same jobs, one after another, each written as soon as it has ended."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from synergy_core.cluster import Cluster
from synergy_core.errors import InputError
from synergy_core.goodput.compression import compressor_named
from synergy_core.jobs.testbed_profiles import Profile
from synergy_core.policies import Policy
from synergy_exec.backends import Backend, get_backend
from synergy_exec.controller.controller import Arrival, Controller
from synergy_exec.controller.journal import Journal
from synergy_exec.folders import claimed
from synergy_exec.losses import write_losses
from synergy_exec.settings import Settings
from synergy_exec.workload import arrivals_of, as_executed
from synergy_runs.filing import make_room, remove_report, say_if_replaced, show
from synergy_runs.inputs import check_compression, policies_of
from synergy_runs.invariants import check
from synergy_runs.log import TRUE_RUN_TIMES, CompressionLog, Compressions, Run
from synergy_runs.profiles import read_profile
from synergy_runs.results import write_run
from synergy_runs.settings import build
from synergy_runs.workload import Workload

if TYPE_CHECKING:
    from omegaconf import DictConfig

AUTO = "auto"
SERVED = "served"
"""What results are filed under where there is no trace."""


def run(config: DictConfig) -> None:
    """Runs what the configuration says, writes the results, prints the table."""
    from omegaconf import OmegaConf

    values: Any = OmegaConf.to_container(config, resolve=True)
    settings = build(Settings, values)
    _check(settings)
    name = settings.trace.name if settings.trace is not None else SERVED
    folder = settings.results_dir / name
    make_room(folder)
    folders = execute_all(
        settings, values, folder, lambda: get_backend(settings.backend.name, settings.backend.options)
    )
    show(folders, folder, program="synergy_exec", figures=settings.figures)


def _check(settings: Settings) -> None:
    if str(settings.results_dir) in ("", "."):
        raise InputError("results_dir is empty; expected a folder, such as results.")
    if settings.trace is None and not settings.serve:
        raise InputError("there is no trace, and serve=false: nothing would ever run. Type serve=true, or +trace=demo.")
    if settings.serve and len(settings.policy) > 1:
        raise InputError(f"serve=true goes on for ever; give one policy, not {len(settings.policy)}.")
    compressor_named(settings.compressor)
    if settings.compression != "none" and settings.profile not in (None, AUTO):
        raise InputError(
            f"compression={settings.compression}: profile={settings.profile} has step times of uncompressed gradients "
            "alone, and does not say what of them was exchanging. Type profile=null."
        )


def execute_all(
    settings: Settings, values: dict[str, Any], folder: Path, make_backend: Callable[[], Backend]
) -> list[Path]:
    """Every policy; returns the run folders, `<policy>-<seed>` below `folder`, with a number where such a run was made
    before.

    Where an earlier command with the same settings was broken off, its finished policies are kept, and the one under
    way goes on.
    """
    from omegaconf import OmegaConf

    values = {**values, "compared_with": list(settings.policy)}
    trace, arrivals = arrivals_of(settings)
    policies = policies_of(settings.policy, settings.parameters, settings.information, settings.input)
    check_compression(settings.compression, policies.values())
    bases = {name: folder / f"{name}-{settings.seed}" for name in policies}
    own = {name: {**values, "policy": name, "seed": settings.seed} for name in policies}
    with contextlib.ExitStack() as held:
        places = claimed(bases, own, held)
        profile = _profile(settings, arrivals, make_backend)
        remove_report(folder)
        for name, policy in policies.items():
            (results, work), done = places[name]
            if done:
                print(f"{results}: done before this command was broken off; kept", file=sys.stderr)
                continue
            say_if_replaced(results, own[name])
            made = _execute_one(settings, policy, trace, arrivals, profile, work, make_backend())
            write_run(made, results, OmegaConf.to_yaml(OmegaConf.create(own[name])))
            write_losses(work / "jobs", results / "losses.parquet")
            _mark_written(work)
    return [place.results for place, _ in places.values()]


def _profile(settings: Settings, arrivals: list[Arrival], make_backend: Callable[[], Backend]) -> Profile:
    """The profile that jobs are scheduled by; with profile=auto, the trace's models are measured now if need be."""
    if settings.profile is None or settings.compression != "none":
        return Profile()
    if settings.profile != AUTO:
        return read_profile(Path(settings.profile))
    files = list({each.file.name: each.file for each in arrivals}.values())
    if not files:
        return Profile()
    from synergy_exec.profiling.profile import current_profile, machine

    where = machine(settings.backend.name, settings.backend.options, bfloat16=settings.bfloat16)
    path = settings.results_dir / "profile.json"

    def say(words: str) -> None:
        print(words, file=sys.stderr, flush=True)

    return current_profile(path, files, make_backend, where, say, settings)


def _mark_written(work: Path) -> None:
    journal = Journal(work / "journal.sqlite")
    journal.set_meta("written", True)
    journal.close()


def _execute_one(
    settings: Settings,
    policy: Policy,
    trace: Workload | None,
    arrivals: list[Arrival],
    profile: Profile,
    work: Path,
    backend: Backend,
) -> Run:
    """Runs one policy to the end of all its jobs. Raises KeyboardInterrupt when a person breaks it off."""
    began_s = time.process_time()

    async def through() -> Controller:
        controller = Controller(policy, arrivals, backend, settings, work, profile)
        if settings.live and sys.stderr.isatty():
            from synergy_exec.console import live_table

            async with live_table(controller):
                await controller.run()
        else:
            await controller.run()
        return controller

    controller = asyncio.run(through())
    execution = controller.execution
    if execution is None or (controller.interrupted and not (settings.serve and execution.idle)):
        raise KeyboardInterrupt
    cpu_s = time.process_time() - began_s
    return executed(
        Journal(work / "journal.sqlite"),
        trace,
        policy,
        execution.decider.cluster,
        work.parent.name,
        settings.seed,
        cpu_s,
    )


def executed(
    journal: Journal, trace: Workload | None, policy: Policy, cluster: Cluster, name: str, seed: int, cpu_s: float
) -> Run:
    """What the journal of a finished run says, in the simulator's terms. Closes it."""
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
        compressions=_compressions(journal, numbers),
    )
    # A job that was cancelled while it waited has no end in the log: it held nothing.
    check(result, whole=not any(each.state == "cancelled" for each in journal.jobs()))
    journal.close()
    return result


def _compressions(journal: Journal, numbers: dict[int, int]) -> Compressions | None:
    """Under which compressors jobs trained, by the rows that they have in the workload; None where there were none."""
    job_of = {run.run: run.job for run in journal.runs()}
    changes: dict[int, list[tuple[float, str]]] = {}
    for each in journal.timings():
        if each.kind != "plan" or (name := each.parts.get("compressor")) is None:
            continue
        noted = changes.setdefault(job_of[each.run], [])
        if not noted or noted[-1][1] != name:
            noted.append((each.time_s, name))
    log = CompressionLog()
    for job, noted in changes.items():
        log.append(numbers[job], noted)
    return log.compressions()
