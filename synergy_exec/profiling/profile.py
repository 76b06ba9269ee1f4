"""Profiles made: models measured on the agents of a backend, one after another, and put into a file."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

from synergy_core.cluster import Cluster, Share
from synergy_core.errors import InputError
from synergy_core.jobs.record import Placed
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
from synergy_exec.profiling.finder import CandidatePlans, Data, Finder, finder
from synergy_exec.profiling.machine import Part, keep_profile, known_profile, parts_of, sizes
from synergy_exec.profiling.selection import Effort, Selection, Task, record_of
from synergy_exec.profiling.testbed import Testbed, TestbedError, TestbedRun, testbed
from synergy_exec.settings import Settings
from synergy_exec.training.integrity import FEWEST_NOISE_STEPS
from synergy_exec.wire import whole_lines

Say = Callable[[str], None]
QUICK = Effort(seconds=0.1, every_batch=False, noise_s=0.0)
"""The effort of `profile=auto`, which somebody waits for."""
ENDING_FRACTION = 0.1
"""Fraction of the time that is kept for agents to leave."""
WITHOUT = "profile=null does without"
LOOK_S = 0.1
"""Between two looks at what a measuring run has written."""
CACHE_FACTOR = 2.0
"""Bytes of memory per byte of data, so that all of it fits with what is kept beside each item."""
STRETCH = 1.5
"""Gradient noise is taken as constant from some amount of work to so many times that amount."""


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
    patient = dataclasses.replace(settings, nodes_s=min(settings.nodes_s, until_s - clock()))
    with tempfile.TemporaryDirectory(prefix="synergy-profile-", dir=beside) as text:
        folder = Path(text)
        async with finder() as find, testbed(backend, folder, patient) as bench:
            for at, file in enumerate(files):
                its_end_s = clock() + (until_s - clock()) / (len(files) - at)
                try:
                    candidates = await _candidates(find, file, bench.cluster, its_end_s)
                    job = at * (1 + bench.cluster.gpus)
                    measuring = Measuring(bench, file, candidates, effort, its_end_s, say, job, folder)
                    model, remarks = await measuring.model(settings.restart_s)
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


class Measuring:
    """One model that is being measured.

    until_s: when time is up, on the loop's clock; a plan that takes half of the time until then hangs, or is too slow
    to be of use. job: the first of the model's numbers, one more than the testbed has slots: under it step times are
    measured, under the others starts and stops. folder: files of tasks lie in it.
    """

    def __init__(
        self,
        testbed: Testbed,
        file: JobFile,
        candidates: CandidatePlans,
        effort: Effort,
        until_s: float,
        say: Say,
        job: int,
        folder: Path,
    ) -> None:
        self._testbed, self._file, self._candidates = testbed, file, candidates
        self._effort, self._until_s, self._tell, self._job = effort, until_s, say, job
        self._longest_s = max(0.0, until_s - asyncio.get_running_loop().time()) / 2
        self._folder = folder / f"tasks-{job}"
        self._costs: ProfiledCosts | None = None
        self._failed: list[str] = []
        self._parts = [(part, self._task(part, at)) for at, part in enumerate(parts_of(testbed.cluster))]

    def _task(self, part: Part, at: int) -> Task:
        there = range(part.first_node, part.first_node + part.nodes)
        return Task(
            part=part,
            plans={size: found for size in part.sizes if (found := self._candidates.plans[size])},
            effort=self._effort,
            held_bytes=self._candidates.held_bytes,
            memory_bytes=min(self._testbed.memory_bytes(there), self._file.memory_gb * GB or inf),
            noise=at == 0,
        )

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.json"

    async def model(self, restart_s: float) -> tuple[ProfiledModel, list[str]]:
        """The model's profile, and remarks: plans that failed, what there was no time for.

        restart_s: assumed for starts and stops that were not measured. Raises InputError where nothing was measured, or
        TestbedError.
        """
        name, late = self._file.name, False
        try:
            async with asyncio.timeout_at(self._until_s):
                if self._candidates.data is not None and self._candidates.plans[1]:
                    await self._input(self._candidates.data)
                for part, task in self._parts:
                    if task.plans:
                        await self._carry_out(task, self._path(part.gpu_type), part.whole)
                await self._measure_costs()
        except TimeoutError:
            late = True
        records = [_lines(self._path(part.gpu_type)) for part, _ in self._parts]
        selections = [Selection.after(task, lines) for (_, task), lines in zip(self._parts, records, strict=True)]
        failed = [
            f"{Plan(**each['plan']).describe()}: {each['reason']}"
            for lines in records
            for each in lines
            if each["kind"] == "failed"
        ] + self._failed
        rows = self._rows(records, selections)
        if all(row.predicted for row in rows):
            why = "time was up before one was" if late else "no plan is admitted"
            raise InputError(f"{name} could not be profiled: {'; '.join(failed) or why}.")
        noise = [
            NoiseFrom(*seen) for lines in records for each in lines if each["kind"] == "noise" for seen in each["seen"]
        ]
        model = ProfiledModel(
            name,
            self._file.initial_batch,
            max(row.plan.global_batch for row in rows),
            self._candidates.parameters,
            noise_curve(noise),
            self._costs or ProfiledCosts(restart_s, restart_s, restart_s),
            rows,
            self._prepared(),
            self._file.application,
            self._file.max_batch,
        )
        measured = sum(not row.predicted for row in rows)
        left_out = sum((each.left_out for each in selections), Counter[str]())
        why = "".join(f"; {count} {reason}" for reason, count in left_out.items())
        self._tell(f"{name}: {measured} of {sum(each.plans for each in selections)} step times measured{why}")
        remarks = [f"{name}: left out, {each}" for each in failed]
        if self._costs is None:
            remarks.append(f"{name}: starts were not measured; restart_s={restart_s:g} is assumed")
        if late:
            undecided = sum(each.undecided for each in selections)
            remarks.append(
                f"{name}: time was up before {undecided} more step times were measured; {len(rows) - measured} of them "
                "are predicted, the others not used; a larger profile_s measures more"
            )
        return model, remarks

    def _rows(self, records: list[list[dict[str, Any]]], selections: list[Selection]) -> tuple[ProfiledRow, ...]:
        """What was measured, and what is predicted in its place."""
        rows, predicted = list[ProfiledRow](), list[ProfiledRow]()
        for (part, _), lines, selection in zip(self._parts, records, selections, strict=True):
            for each in lines:
                if each["kind"] == "measured":
                    plan = Plan(**each["plan"])
                    figures = each["step_s"], each["spread"], each["memory_bytes"]
                    rows.append(ProfiledRow(part.gpu_type, part.nodes_of(plan.gpus), plan, *figures))
            predicted += [
                ProfiledRow(part.gpu_type, part.nodes_of(plan.gpus), plan, step_s, predicted=True)
                for plan, step_s in selection.predicted()
            ]
        return (*rows, *predicted)

    def _say(self, words: str, decided: str = "") -> None:
        left_s = self._until_s - asyncio.get_running_loop().time()
        self._tell(f"{self._file.name}: {words} ({decided}{left_s:.0f} s left)")

    async def _carry_out(self, task: Task, path: Path, placed: Placed, share: Share | None = None) -> None:
        """Launches measuring runs until one has done all of the task. Of a plan that ends its run it is noted why, and
        the next run goes on after it. Raises TestbedError, and InputError for a run that fails before any plan.
        """
        task.write(path)
        record = record_of(path)
        first = next(iter(task.plans.values()))[0][0]
        while True:
            losses = self._testbed.losses
            run = self._testbed.start(self._file, self._job, placed, first, share, measure=str(path))
            try:
                hung = await self._watch(run, record, task.part.gpu_type)
            finally:
                await self._testbed.kill(run)
            outcome, reason = run.left.result()
            if outcome == "done" and not hung:
                return
            self._testbed.check()
            if self._testbed.losses != losses:
                continue
            lines = _lines(path)
            last = lines[-1]["kind"] if lines else ""
            why = f"it was not measured after {self._longest_s:.3g} s" if hung else reason
            if last == "begun":
                line = {"kind": "failed", "plan": lines[-1]["plan"], "reason": why, "out_of_memory": run.out_of_memory}
            elif last == "measured":
                self._failed.append(f"gradient noise: {why}")
                line = {"kind": "noise", "seen": []}
            else:
                raise InputError(reason or "the run ended by itself")
            with record.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    async def _watch(self, run: TestbedRun, record: Path, gpu_type: str) -> bool:
        """Says what the run does until it has ended, or a plan takes too long; whether that is so."""
        told = len(whole_lines(record))
        clock = asyncio.get_running_loop().time
        moved_s = clock()
        while True:
            ended = run.left.done()
            lines = whole_lines(record)
            for each in map(json.loads, lines[told:]):
                if each["kind"] == "begun":
                    plan = Plan(**each["plan"])
                    decided = f"{each['decided']} of {each['plans']} step times decided, "
                    self._say(f"{plan.degrees} on {plan.gpus} × {gpu_type}", decided)
                elif each["kind"] == "cpus":
                    self._say(f"input with {each['cpus']} CPUs")
            if len(lines) > told:
                told, moved_s = len(lines), clock()
            if ended:
                return False
            if clock() - moved_s > self._longest_s:
                return True
            await asyncio.wait((run.left,), timeout=LOOK_S)

    async def _input(self, data: Data) -> None:
        """Measures the input of a job that loads its samples, on one slot of the first node, alone."""
        task = dataclasses.replace(self._parts[0][1], plans={1: self._candidates.plans[1]}, input_only=True)
        share = Share(float(self._testbed.cores(0)), CACHE_FACTOR * data.samples * data.item_bytes)
        try:
            await self._carry_out(task, self._path("input"), ((0, 1),), share)
        except TestbedError:
            raise
        except InputError as error:
            self._failed.append(f"input: {error}")

    def _prepared(self) -> ProfiledInput | None:
        """CPU-seconds as the kernel counted them, which neighbours on the machine change little, unlike step times."""
        data = self._candidates.data
        steps = [StepAtCpus(*each["step"]) for each in _lines(self._path("input")) if each["kind"] == "input"]
        if data is None or not steps:
            return None
        batch = self._candidates.plans[1][0][0].global_batch
        return ProfiledInput(
            self._testbed.cluster.node_types[0].gpu_type,
            batch,
            cpu_s=median(each.cpu_s for each in steps) / batch,
            gpu_s=min(each.step_s - each.waited_s for each in steps),
            sample_bytes=float(data.item_bytes),
            data_bytes=float(data.samples * data.item_bytes),
            steps=tuple(sorted(steps)),
        )

    async def _measure_costs(self) -> None:
        """Measures how long a job takes to start, to stop with a checkpoint, and to start from it.

        Several jobs do so at once, as many as fill the slots, under the first plan that uses several slots, which takes
        longer to load and to stop. Raises TestbedError.
        """
        part, _ = self._parts[0]
        rows = [each for each in _lines(self._path(part.gpu_type)) if each["kind"] == "measured"]
        if not rows:
            return
        row = max(rows, key=lambda each: Plan(**each["plan"]).gpus > 1)
        plan = Plan(**row["plan"])
        placed = list(enumerate(part.places(plan.gpus), self._job + 1))
        losses = -1
        while losses != self._testbed.losses:
            losses, starts, exits = self._testbed.losses, list[list[float]](), list[float]()
            try:
                for _ in ("new", "from a checkpoint"):
                    runs = [self._testbed.start(self._file, job, where, plan) for job, where in placed]
                    try:
                        starts.append(
                            [seconds - row["step_s"] for seconds in await _all(run.first_step() for run in runs)]
                        )
                        if len(starts) == 1:
                            exits = await _all(self._testbed.stop(run) for run in runs)
                    finally:
                        await self._testbed.kill(*runs)
            except InputError as error:
                self._testbed.check()
                if losses == self._testbed.losses:
                    self._failed.append(f"starting and stopping {plan.describe()}: {error}")
            else:
                self._costs = ProfiledCosts(median(starts[0]), median(starts[1]), median(exits))


def _lines(task: Path) -> list[dict[str, Any]]:
    """The record of a task; nothing where none was begun."""
    return [json.loads(each) for each in whole_lines(record_of(task))]


async def _all(waiting: Iterable[Awaitable[float]]) -> list[float]:
    """The results of all, once the last is there. Raises InputError if any of them does."""
    results = await asyncio.gather(*waiting, return_exceptions=True)
    for each in results:
        if isinstance(each, BaseException):
            raise each
    return [each for each in results if not isinstance(each, BaseException)]


def noise_curve(seen: list[NoiseFrom]) -> tuple[NoiseFrom, ...]:
    """Medians over stretches of work, each half as long as all before it together; unknown in the first steps."""
    curve, began = [NoiseFrom(0.0, 0.0)], float(FEWEST_NOISE_STEPS)
    last = max((each.work for each in seen), default=0.0)
    while began <= last:
        ends = STRETCH * began
        if here := [each.ratio for each in seen if (began <= each.work or len(curve) == 1) and each.work < ends]:
            # What is first seen of noise stands for all before it, from where it can be seen at all.
            curve.append(NoiseFrom(began if len(curve) > 1 else float(FEWEST_NOISE_STEPS), median(here)))
        began = ends
    return tuple(curve)


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
