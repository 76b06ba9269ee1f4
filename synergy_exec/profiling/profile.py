"""Profiles made: models measured on the agents of a backend, and put into a file."""

from __future__ import annotations

import asyncio
import datetime
import os
import platform
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from synergy_core.errors import InputError
from synergy_core.jobs.testbed_profiles import Profile, ProfiledModel
from synergy_exec.backends import Backend
from synergy_exec.job_file import JobFile
from synergy_exec.messages import Launch
from synergy_exec.nodes.runs import Run
from synergy_exec.profiling.candidates import finder
from synergy_exec.profiling.measure import Effort, Say, measured, sizes
from synergy_exec.profiling.testbed import TestbedError, testbed
from synergy_exec.settings import Settings
from synergy_runs.profiles import read_profile, write_profile

ENDLESS = 1e15
QUICK = Effort(seconds=0.4, report_s=0.2, hopeless=1.6)
"""The effort of `profile=auto`, which somebody waits for."""
WITHOUT = "profile=null does without"


@dataclass(slots=True)
class Made:
    """What profiling gave.

    models: what was measured now. remarks: plans that did not run, models that could not be profiled at all.
    broken: why the rest was not tried.
    """

    models: list[ProfiledModel]
    remarks: list[str]
    broken: str = ""


def machine(backend: str, options: Mapping[str, Any], *, bfloat16: bool) -> str:
    """What a profile was measured on, in words; with float32 where GPUs were not to compute in bfloat16."""
    given = ", ".join(f"{name}={value}" for name, value in sorted(options.items()))
    cores = len(os.sched_getaffinity(0))
    options_given = f" ({given})" if given else ""
    precision = "" if bfloat16 else ", float32"
    return f"{socket.gethostname()}, {platform.machine()}, {cores} cores, {backend}{options_given}{precision}"


def add_to_profile(
    path: Path, files: Sequence[JobFile], backend: Backend, where: str, effort: Effort, say: Say, settings: Settings
) -> Made:
    """Measures models, and writes them beside those that are in the file; a model measured again is replaced.

    where: see `machine`; a file from elsewhere is begun anew. Models that cannot be profiled are left out. Raises
    InputError where agents are lost again and again; what was measured until then is written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    made = asyncio.run(_made(files, backend, path.parent, effort, say, settings))
    there = read_profile(path) if path.is_file() else Profile()
    older = there.models if there.machine == where else {}
    now = datetime.datetime.now().strftime("%Y-%m-%d %H:%M")
    if made.models:
        write_profile(Profile({**older, **{each.name: each for each in made.models}}, where, now), path)
    if made.broken:
        kept = f"{', '.join(each.name for each in made.models) or 'nothing'} was measured and is kept in {path}"
        raise InputError(f"profiling ended: {made.broken}\n{kept}; type the same command again.")
    return made


def current_profile(
    path: Path,
    files: Sequence[JobFile],
    make_backend: Callable[[], Backend],
    where: str,
    say: Say,
    settings: Settings,
) -> Profile:
    """The profile in a file, made or completed first where it lacks one of these models, or is of another machine."""
    there = read_profile(path) if path.is_file() else Profile()
    missing = [each for each in files if there.machine != where or not _covers(there, each)]
    if not missing:
        return there
    say(f"measuring {', '.join(each.name for each in missing)} here, once; {WITHOUT}")
    began_s = time.monotonic()
    try:
        made = add_to_profile(path, missing, make_backend(), where, QUICK, say, settings)
    except InputError as error:
        raise InputError(f"{error} Or {WITHOUT}.") from None
    for remark in made.remarks:
        say(remark)
    say(f"measured in {time.monotonic() - began_s:.0f} s; {path} is kept, and truth.profile={path} simulates with it")
    return read_profile(path) if path.is_file() else Profile()


def _covers(profile: Profile, file: JobFile) -> bool:
    model = profile.models.get(file.name)
    return model is not None and model.initial_batch == file.initial_batch and 2 * model.max_batch > file.max_batch


async def _made(
    files: Sequence[JobFile], backend: Backend, beside: Path, effort: Effort, say: Say, settings: Settings
) -> Made:
    made = Made([], [])
    with tempfile.TemporaryDirectory(prefix="synergy-profile-", dir=beside) as text:
        folder = Path(text)
        owner: dict[int, JobFile] = {}

        def launch_of(run: Run) -> Launch:
            file = owner[run.job]
            return Launch(
                run=run.number,
                job=run.job,
                job_class=file.job_class,
                arguments=file.arguments,
                plan=run.plan,
                initial_batch=file.initial_batch,
                work=ENDLESS,
                slots=[],
                first_rank=0,
                world=run.plan.world,
                store_host="",
                store_port=0,
                folder=str(folder / "jobs" / str(run.job)),
                report_s=effort.report_s,
                **{**settings.of_runs(), "checkpoint_interval_s": ENDLESS},
            )

        async with finder() as find, testbed(backend, folder, launch_of, settings) as bench:
            for file in files:
                first = len(owner)
                mine = list(range(first, first + bench.cluster.gpus))
                owner.update(dict.fromkeys(mine, file))
                try:
                    candidates = await find.candidates(file, sizes(bench.cluster))
                    model, failed = await measured(bench, mine, file, candidates, effort=effort, say=say)
                except TestbedError as error:
                    made.broken = str(error)
                    break
                except InputError as error:
                    made.remarks.append(str(error))
                    continue
                made.models.append(model)
                made.remarks.extend(f"{file.name}: left out, {each}" for each in failed)
    return made
