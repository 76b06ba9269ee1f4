"""Makes profiles: measures models on the agents of a backend, one after another, and writes them into a file."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

from synergy_core.cluster import Share
from synergy_core.errors import InputError
from synergy_core.jobs.record import Placed, gpus_in
from synergy_core.jobs.testbed_profiles import (
    NoiseFrom,
    Profile,
    ProfiledCosts,
    ProfiledInput,
    ProfiledModel,
    ProfiledRow,
    StepAtCpus,
)
from synergy_core.planner.plan import Plan
from synergy_core.units import GB
from synergy_exec.backends import Backend
from synergy_exec.job_file import JobFile
from synergy_exec.plans import Candidates, batches_of
from synergy_exec.profiling.machine import Part, keep_profile, known_profile, noted, parts_of
from synergy_exec.profiling.selection import Effort, Selection, Task, lines_of, record_of
from synergy_exec.profiling.testbed import Testbed, TestbedError, TestbedRun, testbed
from synergy_exec.settings import Settings

Say = Callable[[str], None]
QUICK = Effort(seconds=0.1, every_batch=False, noise_s=0.0)
"""The effort of `profile=auto`, whose user waits for it."""
ENDING_FRACTION = 0.1
"""Fraction of the time reserved for agents to exit."""
WITHOUT = "profile=null does without"
LOOK_S = 0.1
"""Seconds between reads of a measuring run's record."""
CACHE_FACTOR = 2.0
"""Bytes of cache per byte of data, so that all items fit with their headers."""
AFTER_PLANS_FRACTION = 0.2
"""Fraction of a model's time reserved for measuring starts, stops and input."""


@dataclass(slots=True)
class Made:
    """The result of profiling.

    models: measured now. remarks: plans that failed, and models that could not be profiled. broken: why the rest was
    not tried.
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
    """Measures models and adds them to the file; a model that is measured again replaces its old entry.

    where: see `machine`; a file of another machine is replaced. It takes at most `profile_s`, including the start and
    exit of agents; models share the remaining time equally. Models that cannot be profiled are left out. Raises
    InputError if agents do not connect or are lost again and again; what was measured until then is written.
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
    """Returns the profile in a file, and messages. It is made first if it is of another machine, and completed if it
    lacks one of these models.
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
    patient = dataclasses.replace(settings, nodes_s=min(settings.nodes_s, until_s - clock()))
    with tempfile.TemporaryDirectory(prefix="synergy-profile-", dir=beside) as text:
        folder = Path(text)
        async with testbed(backend, folder, patient) as bench:
            for at, file in enumerate(files):
                its_end_s = clock() + (until_s - clock()) / (len(files) - at)
                job = at * (1 + bench.cluster.gpus)
                try:
                    model, remarks = await Measuring(bench, file, effort, its_end_s, say, job, folder).model()
                except TestbedError as error:
                    made.broken = str(error)
                    break
                except InputError as error:
                    made.remarks.append(str(error))
                    continue
                made.models.append(model)
                made.remarks += [f"{file.name}: {each}" for each in remarks]
    return made


class Measuring:
    """Measures one model.

    until_s: end of its time on the loop's clock. A plan that takes half of the remaining time is given up as hanging or
    too slow. job: the first of the job numbers of this model, one more than the testbed has slots: step times are
    measured under the first, starts and stops under the others. folder: for files of tasks.
    """

    def __init__(
        self, testbed: Testbed, file: JobFile, effort: Effort, until_s: float, say: Say, job: int, folder: Path
    ) -> None:
        self._testbed, self._file, self._effort, self._tell, self._job = testbed, file, effort, say, job
        left_s = max(0.0, until_s - asyncio.get_running_loop().time())
        self._until_s, self._longest_s = until_s, left_s / 2
        self._plans_until_s = until_s - AFTER_PLANS_FRACTION * left_s
        self._folder = folder / f"tasks-{job}"
        self._costs: ProfiledCosts | None = None
        self._remarks: list[str] = []
        self._tasks = [self._task(part, noise=not at) for at, part in enumerate(parts_of(testbed.cluster))]

    def _task(self, part: Part, *, noise: bool) -> Task:
        limit_gb = min(self._file.memory_gb or inf, self._testbed.settings.memory_gb_per_slot or inf)
        return Task(
            part=part,
            batches=batches_of(self._file),
            effort=self._effort,
            memory_bytes=limit_gb * GB,
            noise=noise,
        )

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.json"

    async def model(self) -> tuple[ProfiledModel, list[str]]:
        """Returns the model's profile and remarks: plans that failed or for which there was no time.

        Raises InputError if nothing was measured, or TestbedError.
        """
        name, late = self._file.name, False
        try:
            async with asyncio.timeout_at(self._plans_until_s):
                for task in self._tasks:
                    await self._carry_out(task, self._path(task.part.gpu_type), task.part.whole)
        except TimeoutError:
            late = True
        records = [lines_of(self._path(task.part.gpu_type)) for task in self._tasks]
        selections = [Selection(task, lines) for task, lines in zip(self._tasks, records, strict=True)]
        lines = [line for record in records for line in record]
        self._remarks += [
            f"left out, {Plan(**each['plan']).describe()}: {each['reason']}"
            for each in lines
            if each["kind"] == "failed"
        ]
        rows = self._rows(records, selections)
        candidates = sum(len(each.plans) for each in selections)
        measured = sum(not row.predicted for row in rows)
        if not measured:
            why = "; ".join(self._remarks) or ("time was up before one was" if late else "no plan is admitted")
            raise InputError(f"{name} could not be profiled: {why}.")
        found = selections[0].candidates
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(self._until_s):
                # Loading and stopping takes longer on several slots than on one.
                await self._measure_costs(max(rows, key=lambda row: not row.predicted and row.plan.gpus > 1))
                if found.samples and found.plans[1]:
                    await self._measure_input(found)
        assumed_s = self._testbed.settings.restart_s
        model = ProfiledModel(
            name,
            self._file.initial_batch,
            max(row.plan.global_batch for row in rows),
            found.parameters,
            (NoiseFrom(0.0, 0.0),),
            self._costs or ProfiledCosts(assumed_s, assumed_s, assumed_s),
            rows,
            self._input(found),
            self._file.application,
            self._file.max_batch,
        )
        for work, ratio in [seen for each in lines for seen in each.get("noise", ())]:
            model = noted(model, work, ratio)
        others = "; the others are between measured batches, slower by prediction, or too large for memory"
        self._tell(f"{name}: {measured} of {candidates} step times measured{others if measured < candidates else ''}")
        if self._costs is None:
            self._remarks.append(f"starts were not measured; restart_s={assumed_s:g} is assumed")
        if late:
            self._remarks.append(
                f"time was up when {measured} of {candidates} step times were measured; {len(rows) - measured} are "
                "predicted, the others not used; a larger profile_s measures more"
            )
        return model, self._remarks

    def _rows(self, records: list[list[dict[str, Any]]], selections: list[Selection]) -> tuple[ProfiledRow, ...]:
        """Rows of measured plans that fit into memory, and predictions for the others."""
        rows, predicted = list[ProfiledRow](), list[ProfiledRow]()
        for task, lines, selection in zip(self._tasks, records, selections, strict=True):
            part = task.part
            for each in lines:
                if each["kind"] != "measured":
                    continue
                plan, needs = Plan(**each["plan"]), each["memory_bytes"]
                if needs > task.memory_bytes:
                    limits = f"{needs / GB:.3g} GB of a slot's {task.memory_bytes / GB:g}"
                    self._remarks.append(f"left out, {plan.describe()} at batch {plan.global_batch} needs {limits}")
                else:
                    nodes = part.nodes_of(plan.gpus)
                    rows.append(ProfiledRow(part.gpu_type, nodes, plan, each["step_s"], each["spread"], needs))
            predicted += [
                ProfiledRow(part.gpu_type, part.nodes_of(plan.gpus), plan, step_s, predicted=True)
                for plan, step_s in selection.predicted()
            ]
        return (*rows, *predicted)

    def _say(self, words: str) -> None:
        left_s = self._until_s - asyncio.get_running_loop().time()
        self._tell(f"{self._file.name}: {words} ({left_s:.0f} s left)")

    async def _carry_out(self, task: Task, path: Path, placed: Placed, share: Share | None = None) -> None:
        """Launches measuring runs until the task is done. If a plan ends its run, records why; the next run continues
        after it. Raises TestbedError, and InputError for a run that fails before any plan.
        """
        task.write(path)
        first = Plan(data=gpus_in(placed))  # of any plan: the run's ranks build others as they go
        while True:
            losses = self._testbed.losses
            run = self._testbed.start(self._file, self._job, placed, first, share, measure=str(path))
            try:
                hung = await self._watch(run, path, task.part.gpu_type)
            finally:
                await self._testbed.kill(run)
            outcome, reason = run.left.result()
            if outcome == "done" and not hung:
                return
            self._testbed.check()
            if self._testbed.losses != losses:
                continue
            last = (lines_of(path) or [{"kind": ""}])[-1]
            if last["kind"] != "begun":
                raise InputError(f"{self._file.name}: {reason or 'the run ended by itself'}")
            why = f"it was not measured after {self._longest_s:.3g} s" if hung else reason
            line = {"kind": "failed", "plan": last["plan"], "reason": why, "out_of_memory": run.out_of_memory}
            with record_of(path).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    async def _watch(self, run: TestbedRun, path: Path, gpu_type: str) -> bool:
        """Shows the run's progress until it has ended or a plan takes too long. Returns whether one took too long."""
        clock = asyncio.get_running_loop().time
        told, moved_s = len(lines_of(path)), clock()
        while True:
            ended = run.left.done()
            lines = lines_of(path)
            for each in lines[told:]:
                if each["kind"] == "begun":
                    plan = Plan(**each["plan"])
                    self._say(f"{plan.degrees} on {plan.gpus} × {gpu_type}, batch {plan.global_batch}")
                elif each["kind"] == "cpus":
                    self._say(f"input with {each['cpus']} CPUs")
            if len(lines) > told:
                told, moved_s = len(lines), clock()
            if ended:
                return False
            if clock() - moved_s > self._longest_s:
                return True
            await asyncio.wait((run.left,), timeout=LOOK_S)

    async def _measure_input(self, found: Candidates) -> None:
        """Measures the input of a job that loads its samples, on one slot of the first node and nothing else there."""
        task = dataclasses.replace(self._tasks[0], input_at=found.plans[1][0])
        share = Share(float(self._testbed.cores(0)), CACHE_FACTOR * found.samples * found.item_bytes)
        try:
            await self._carry_out(task, self._path("input"), ((0, 1),), share)
        except TestbedError:
            raise
        except InputError as error:
            self._remarks.append(f"input: {error}")

    def _input(self, found: Candidates) -> ProfiledInput | None:
        """CPU-seconds by the kernel's accounting, which neighbours on the machine affect less than step times."""
        steps = [StepAtCpus(*each["step"]) for each in lines_of(self._path("input")) if each["kind"] == "input"]
        if not steps:
            return None
        batch = found.plans[1][0].global_batch
        return ProfiledInput(
            self._tasks[0].part.gpu_type,
            batch,
            cpu_s=median(each.cpu_s for each in steps) / batch,
            gpu_s=min(each.step_s - each.waited_s for each in steps),
            sample_bytes=float(found.item_bytes),
            data_bytes=float(found.samples * found.item_bytes),
            steps=tuple(sorted(steps)),
        )

    async def _measure_costs(self, row: ProfiledRow) -> None:
        """Measures how long a job takes to start, to stop with a checkpoint, and to start from it, under that plan.

        As many jobs as fill the slots do this at once. Raises TestbedError.
        """
        placed = list(enumerate(self._tasks[0].part.places(row.plan.gpus), self._job + 1))
        starts, exits = list[list[float]](), list[float]()
        try:
            for _ in ("new", "from a checkpoint"):
                runs = [self._testbed.start(self._file, job, where, row.plan) for job, where in placed]
                try:
                    starts.append([seconds - row.step_s for seconds in await _all(run.first_step() for run in runs)])
                    if len(starts) == 1:
                        exits = await _all(self._testbed.stop(run) for run in runs)
                finally:
                    await self._testbed.kill(*runs)
        except InputError as error:
            self._testbed.check()
            self._remarks.append(f"starting and stopping {row.plan.describe()}: {error}")
        else:
            self._costs = ProfiledCosts(median(starts[0]), median(starts[1]), median(exits))


async def _all(waiting: Iterable[Awaitable[float]]) -> list[float]:
    """Waits for all and returns their results. Raises InputError if any does."""
    results = await asyncio.gather(*waiting, return_exceptions=True)
    for each in results:
        if isinstance(each, BaseException):
            raise each
    return [each for each in results if not isinstance(each, BaseException)]


@contextlib.contextmanager
def progress() -> Iterator[Say]:
    """A function that prints progress: in lines, or in one changing line on a terminal."""
    if not sys.stderr.isatty():
        yield lambda words: print(words, file=sys.stderr, flush=True)
        return
    from rich.console import Console
    from rich.markup import escape

    with Console(stderr=True).status("measuring") as status:
        yield lambda words: status.update(escape(words))
