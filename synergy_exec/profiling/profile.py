"""Profiles made: models measured on the agents of a backend, and put into a file."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from synergy_core.cluster import Cluster
from synergy_core.errors import InputError
from synergy_core.jobs.testbed_profiles import Profile, ProfiledModel
from synergy_core.units import GB
from synergy_exec.backends import Backend
from synergy_exec.job_file import JobFile
from synergy_exec.messages import Launch
from synergy_exec.nodes.runs import Run
from synergy_exec.profiling.finder import CandidatePlans, Finder, finder
from synergy_exec.profiling.machine import keep_profile, known_profile, sizes
from synergy_exec.profiling.measure import Effort, Say, measured
from synergy_exec.profiling.testbed import TestbedError, testbed
from synergy_exec.settings import Settings

# Plans that need more of a slot's memory than their job may have.


def within(model: ProfiledModel, memory_gb: float) -> tuple[ProfiledModel, list[str]]:
    """The model with those of its plans that fit into so many GB of each slot, and a sentence for each other plan.

    0: whatever there is. Raises InputError where none fits.
    """
    if not memory_gb:
        return model, []
    limit = memory_gb * GB
    rows = tuple(row for row in model.rows if row.memory_bytes <= limit)
    least: dict[str, float] = {}
    for row in model.rows:
        if row.memory_bytes > limit:
            name = f"{row.plan.describe()} at batch {row.plan.global_batch}"
            least[name] = min(row.memory_bytes, least.get(name, row.memory_bytes))
    said = [f"{name} needs {needs / GB:.3g} GB of a slot's {memory_gb:g}" for name, needs in least.items()]
    if not rows:
        raise InputError(f"{model.name}: no plan fits into memory_gb={memory_gb:g}: {'; '.join(said)}.")
    return dataclasses.replace(model, rows=rows, max_batch=max(row.plan.global_batch for row in rows)), said


ENDLESS = 1e15
QUICK = Effort(seconds=0.1, every_batch=False, noise_s=0.0)
"""The effort of `profile=auto`, which somebody waits for."""
ENDING_FRACTION = 0.1
"""Of the time there is, what is left for agents to leave."""
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


def add_to_profile(
    path: Path,
    files: Sequence[JobFile],
    backend: Backend,
    where: str,
    effort: Effort,
    say: Say,
    settings: Settings,
) -> Made:
    """Measures models, and writes them beside those that are in the file; a model measured again is replaced.

    where: see `machine`; a file from elsewhere is begun anew. It takes `profile_s` at the most, agents' coming and
    leaving included; each model has an equal part of what those before it left. Models that cannot be profiled are left
    out. Raises InputError where agents do not come, or are lost again and again; what was measured is written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    made = asyncio.run(_made(files, backend, path.parent, effort, say, settings))
    older = known_profile(path, where).models
    if made.models:
        keep_profile({**older, **{each.name: each for each in made.models}}, where, path)
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
) -> tuple[Profile, list[str]]:
    """The profile in a file, made or completed first where it lacks one of these models, or is of another machine; and
    what is to be said of that.
    """
    there = known_profile(path, where)
    missing = [each for each in files if not _covers(there, each)]
    if not missing:
        return there, []
    names = ", ".join(each.name for each in missing)
    say(f"measuring {names} here, once, for at most {settings.profile_s:g} s (profile_s); {WITHOUT}")
    began_s = time.monotonic()
    try:
        made = add_to_profile(path, missing, make_backend(), where, QUICK, say, settings)
    except InputError as error:
        raise InputError(f"{error} Or {WITHOUT}.") from None
    took_s = time.monotonic() - began_s
    kept = f"measured in {took_s:.0f} s; {path} is kept, and truth.profile={path} simulates with it"
    return known_profile(path, where), [*made.remarks, kept]


def _covers(profile: Profile, file: JobFile) -> bool:
    model = profile.of(file.name, file.application)
    if model is None or model.initial_batch != file.initial_batch:
        return False
    return 2 * max(model.max_batch, model.tried_batch) > file.max_batch


async def _made(
    files: Sequence[JobFile],
    backend: Backend,
    beside: Path,
    effort: Effort,
    say: Say,
    settings: Settings,
) -> Made:
    made = Made([], [])
    clock = asyncio.get_running_loop().time
    until_s = clock() + (1.0 - ENDING_FRACTION) * settings.profile_s
    patience_s = min(settings.nodes_s, until_s - clock())
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
                world=run.plan.gpus,
                store_host="",
                store_port=0,
                folder=str(folder / "jobs" / str(run.job)),
                report_s=effort.report_s,
                observed=False,
                spare_memory=file.memory_gb > 0,
                **{**settings.of_runs(), "checkpoint_interval_s": ENDLESS},
            )

        patient = dataclasses.replace(settings, nodes_s=patience_s)
        async with finder() as find, testbed(backend, folder, launch_of, patient) as bench:
            for at, file in enumerate(files):
                first = len(owner)
                mine = list(range(first, first + 1 + bench.cluster.gpus))
                owner.update(dict.fromkeys(mine, file))
                its_end_s = clock() + (until_s - clock()) / (len(files) - at)
                try:
                    candidates = await _candidates(find, file, bench.cluster, its_end_s)
                    model, remarks = await measured(
                        bench, mine, file, candidates, effort=effort, until_s=its_end_s, say=say
                    )
                    model, large = within(model, file.memory_gb)
                except TestbedError as error:
                    made.broken = str(error)
                    break
                except InputError as error:
                    made.remarks.append(str(error))
                    continue
                made.models.append(model)
                made.remarks += [*remarks, *(f"{file.name}: left out, {each}" for each in large)]
    return made


async def _candidates(find: Finder, file: JobFile, cluster: Cluster, until_s: float) -> CandidatePlans:
    """What may be measured of a model. Raises InputError where it cannot be built, in time or at all."""
    try:
        async with asyncio.timeout_at(until_s):
            return await find.candidates(file, sizes(cluster))
    except TimeoutError:
        raise InputError(f"{file.name} could not be profiled: time was up before its model was built.") from None


@contextmanager
def progress(*, quiet: bool = False) -> Iterator[Say]:
    """What to say each step to. quiet: nothing is wanted."""
    if quiet:
        yield lambda words: None
    elif not sys.stderr.isatty():
        yield lambda words: print(words, file=sys.stderr, flush=True)
    else:
        from rich.console import Console
        from rich.markup import escape

        with Console(stderr=True).status("measuring") as status:
            yield lambda words: status.update(escape(words))
