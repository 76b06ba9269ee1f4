"""Makes profiles: measures models one after another on the agents of a backend, and writes the results to a file."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import mean, median
from typing import TypeVar

from synergy_core.errors import InputError
from synergy_core.performance.goodput.pipeline import searched_steps
from synergy_core.performance.planner.plan import Plan
from synergy_core.scheduling.jobs.cluster import Share
from synergy_core.scheduling.jobs.record import Placed
from synergy_core.scheduling.jobs.testbed_profiles import (
    NoiseFrom,
    ProfiledCosts,
    ProfiledInput,
    ProfiledModel,
    ProfiledRow,
    StepAtCpus,
    TestbedProfile,
    degrees_of,
)
from synergy_core.units import GB
from synergy_exec.backends import Backend
from synergy_exec.job_file import JobFile
from synergy_exec.messages import Report, Reporting
from synergy_exec.plans import Candidates, read_candidates
from synergy_exec.profiling.machine import Part, keep_profile, known_profile, noted, parts_of
from synergy_exec.profiling.selection import Selection
from synergy_exec.profiling.testbed import Testbed, TestbedError, TestbedRun, testbed
from synergy_exec.settings import Settings
from synergy_exec.training.integrity import FEWEST_NOISE_STEPS

Say = Callable[[str], None]
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Time and detail of the measurements.

    seconds: of training for each plan and batch, at least one step. every_batch: whether batches between the smallest
    and the largest are measured; otherwise they are predicted. noise_s: seconds of training, once per model, to measure
    its gradient noise, but at most a quarter of the model's time; longer if the noise is still unknown then.
    """

    seconds: float = 3.0
    every_batch: bool = True
    noise_s: float = 30.0


QUICK = Effort(seconds=0.1, every_batch=False, noise_s=0.0)
"""The effort of `profile=auto`, for which a user waits."""
ENDING_FRACTION = 0.1
"""Fraction of the time reserved for agents to exit."""
WITHOUT = "profile=null does without"
GPU_SETTLING_S = 1.0
"""Minimum of `Effort.seconds` on GPUs, whose clocks rise when work begins."""
REPORTING = Reporting(report_s=0.05)
"""How often a run that is measured reports."""
MIN_INPUT_STEPS = 20
MAX_NOISE_STEPS = 3 * FEWEST_NOISE_STEPS
"""Maximum number of steps in which to measure gradient noise."""
CACHE_FACTOR = 2.0
"""Bytes of cache per byte of data, so that all items fit with their headers."""
AFTER_PLANS_FRACTION = 0.2
"""Fraction of a model's time reserved for measuring starts, stops and input."""


@dataclass(slots=True)
class Made:
    """The result of profiling.

    models: those measured now. remarks: plans that failed, and models that could not be profiled. broken: why the other
    models were not tried.
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

    where: see `machine`; an existing file of another machine is renamed. Takes at most `profile_s`, including the start
    and exit of agents; models share the remaining time equally. Models that cannot be profiled are left out. Raises
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
) -> tuple[TestbedProfile, list[str]]:
    """Returns the profile in a file, and messages. If the file is of another machine or lacks some of these models,
    measures them first.
    """
    there = known_profile(path, where)
    missing = [each for each in files if not _covers(there, each)]
    if not missing:
        return there, []
    names = ", ".join(each.name for each in missing)
    say(f"measuring {names} here, once, for at most {settings.profiling.profile_s:g} s (profile_s); {WITHOUT}")
    began_s = time.monotonic()
    try:
        made = add_to_profile(path, missing, make_backend(), where, QUICK, say, settings)
    except InputError as error:
        raise InputError(f"{error} Or {WITHOUT}.") from None
    took_s = time.monotonic() - began_s
    kept = f"measured in {took_s:.0f} s; {path} is kept, and truth.profile={path} simulates with it"
    return known_profile(path, where), [*made.remarks, kept]


def _covers(profile: TestbedProfile, file: JobFile) -> bool:
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
    until_s = clock() + (1.0 - ENDING_FRACTION) * settings.profiling.profile_s
    agents = dataclasses.replace(settings.agents, nodes_s=min(settings.agents.nodes_s, until_s - clock()))
    with tempfile.TemporaryDirectory(prefix="synergy-profile-", dir=beside) as text:
        folder = Path(text)
        async with testbed(backend, folder, agents, settings.run) as bench:
            for at, file in enumerate(files):
                its_end_s = clock() + (until_s - clock()) / (len(files) - at)
                job = at * bench.cluster.gpus
                try:
                    measuring = Measuring(bench, file, effort, its_end_s, say, job)
                    model, remarks = await measuring.model(settings.profiling.restart_s)
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
    """Measures one model from the reports of runs that train it.

    until_s: end of its time on the loop's clock. A plan that is not measured after half of the model's time is given
    up. job: the first of the model's job numbers; the model has one for each slot of the testbed.
    """

    def __init__(self, testbed: Testbed, file: JobFile, effort: Effort, until_s: float, say: Say, job: int) -> None:
        self._testbed, self._file, self._effort, self._tell, self._job = testbed, file, effort, say, job
        self._clock = asyncio.get_running_loop().time
        left_s = max(0.0, until_s - self._clock())
        self._until_s, self._longest_s = until_s, left_s / 2
        self._plans_until_s = until_s - AFTER_PLANS_FRACTION * left_s
        self._selections = [
            Selection(part, every_batch=effort.every_batch, memory_bytes=self._memory_bytes(part))
            for part in parts_of(testbed.cluster)
        ]
        self._found = Candidates({})
        self._runs: list[TestbedRun] = []
        self._held: tuple[Part, Plan] | None = None
        self._rows: list[ProfiledRow] = []
        self._noise: list[tuple[float, float]] = []
        self._input_steps: list[StepAtCpus] = []
        self._noise_known = False
        self._costs: ProfiledCosts | None = None
        self._remarks: list[str] = []

    async def model(self, assumed_s: float) -> tuple[ProfiledModel, list[str]]:
        """Returns the model's profile and remarks: plans that failed or for which there was no time.

        assumed_s: its restart time if there is no time to measure that. Raises InputError if nothing was measured, or
        TestbedError.
        """
        name, late = self._file.name, False
        try:
            async with asyncio.timeout_at(self._plans_until_s):
                self._found = await self._candidates()
                for selection in self._selections:
                    await self._measure_plans(selection)
        except TimeoutError:
            late = True
        finally:
            await self._end_runs()
        predicted = [
            ProfiledRow(each.part.gpu_type, each.part.nodes_of(plan.gpus), plan, step_s, predicted=True)
            for each in self._selections
            for plan, step_s in each.predicted()
        ]
        candidates = sum(len(each.plans) for each in self._selections)
        if not self._rows:
            why = "; ".join(self._remarks) or ("time was up before one was" if late else "no plan is admitted")
            raise InputError(f"{name} could not be profiled: {why}.")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(self._until_s):
                # Loading and stopping takes longer on several slots than on one.
                await self._measure_costs(max(self._rows, key=lambda row: row.plan.gpus > 1))
                if self._found.samples and self._found.plans[1]:
                    await self._measure_input(self._found.plans[1][0])
        rows = (*self._rows, *predicted)
        model = ProfiledModel(
            name,
            self._file.initial_batch,
            max(row.plan.global_batch for row in rows),
            self._found.parameters,
            (NoiseFrom(0.0, 0.0),),
            self._costs or ProfiledCosts(assumed_s, assumed_s, assumed_s),
            rows,
            self._input(),
            self._file.application,
            self._file.max_batch,
        )
        for work, ratio in sorted(self._noise):
            model = noted(model, work, ratio)
        measured = len(self._rows)
        others = "; the others are between measured batches, slower by prediction, or too large for memory"
        self._tell(f"{name}: {measured} of {candidates} step times measured{others if measured < candidates else ''}")
        if self._costs is None:
            self._remarks.append(f"starts were not measured; restart_s={assumed_s:g} is assumed")
        if late:
            self._remarks.append(
                f"time was up when {measured} of {candidates} step times were measured; {len(predicted)} are "
                "predicted, the others not used; a larger profile_s measures more"
            )
        return model, self._remarks

    def _say(self, words: str) -> None:
        self._tell(f"{self._file.name}: {words} ({self._until_s - self._clock():.0f} s left)")

    async def _candidates(self) -> Candidates:
        """All possible plans, found by a run on one slot. Raises InputError if the run cannot build the model."""
        sizes = sorted({size for each in self._selections for size in each.part.sizes})
        first = Plan(micro_batch=self._file.initial_batch)
        place = self._selections[0].part.places(1)[0]
        while True:
            losses = self._testbed.losses
            run = self._start(self._job, place, first, dataclasses.replace(REPORTING, plans_on=sizes))
            reason = ""
            try:
                await run.first_step()
            except InputError as error:
                reason = str(error)
            await self._end_runs()
            if (found := read_candidates(self._testbed.folder_of(self._job))) is not None:
                return found
            self._testbed.check()
            if self._testbed.losses == losses:
                raise InputError(f"{self._file.name}: {reason}")

    async def _measure_plans(self, selection: Selection) -> None:
        """Measures the selected plans on nodes of one type, one after another."""
        selection.found(self._found)
        while (plan := selection.next()) is not None:
            self._say(f"{plan.degrees} on {plan.gpus} × {selection.part.gpu_type}, batch {plan.global_batch}")
            losses, reason = self._testbed.losses, ""
            try:
                async with asyncio.timeout(self._longest_s):
                    reports = await self._reports(selection.part, plan)
            except TimeoutError:
                reason = f"it was not measured after {self._longest_s:.3g} s"
            except InputError as error:
                reason = str(error)
            if not reason:
                self._measured(selection, plan, reports)
                continue
            out_of_memory = any(run.out_of_memory for run in self._runs)
            await self._end_runs()
            self._testbed.check()
            if self._testbed.losses == losses:
                selection.failed(plan, out_of_memory=out_of_memory)
                self._remarks.append(f"left out, {plan.describe()}: {reason}")

    def _memory_bytes(self, part: Part) -> float:
        """Memory of a slot, as far as settings say. memory_gb_per_slot limits the host's, and GPUs have their own."""
        of_host = self._testbed.settings.memory_gb_per_slot if part.gpu_type == "cpu" else None
        return GB * min((self._file.trained and self._file.trained.memory_gb) or inf, of_host or inf)

    def _measured(self, selection: Selection, plan: Plan, reports: Sequence[Report]) -> None:
        times = [each.step_s for each in reports]
        step_s, needs = mean(times), float(max(each.memory.used_bytes for each in reports))
        limits = [float(each.memory.limit_bytes) for each in reports if each.memory.limit_bytes]
        selection.measured(plan, step_s, needs, min(limits, default=inf))
        has_bytes = self._memory_bytes(selection.part)
        if needs > has_bytes:
            limit = f"{needs / GB:.3g} GB of a slot's {has_bytes / GB:g}"
            self._remarks.append(f"left out, {plan.describe()} at batch {plan.global_batch} needs {limit}")
            return
        part, spread = selection.part, (max(times) - min(times)) / step_s
        held = (
            float(max(getattr(each.memory, name) for each in reports)) for name in ("reserved_bytes", "outside_bytes")
        )
        row = ProfiledRow(part.gpu_type, part.nodes_of(plan.gpus), plan, step_s, spread, needs, False, 0.0, (), *held)
        self._rows.append(row)

    async def _reports(self, part: Part, plan: Plan) -> list[Report]:
        """Trains as many copies of the job under the plan as fit side by side, so that each is measured beside busy
        neighbours. Returns a report of each copy. Raises InputError if a copy fails.

        The runs continue under the next plan if only the batch differs.
        """
        if self._held is None or self._held[0] != part or degrees_of(self._held[1]) != degrees_of(plan):
            await self._end_runs()
            for job, placed in enumerate(part.places(plan.gpus), self._job):
                self._start(job, placed, plan)
        elif self._held[1] != plan:
            for run in self._runs:
                self._testbed.retune(run, plan)
        self._held = part, plan
        # Noise is measured once, under a plan of several slots if there is one: two replicas show it at once.
        several = min(2, max(each.gpus for each in self._selections[0].plans))
        sees_noise = not self._noise_known and plan.gpus >= several
        noise_s = min(self._effort.noise_s, self._longest_s / 2)
        seconds = max(self._effort.seconds, 0.0 if part.gpu_type == "cpu" else GPU_SETTLING_S)
        seconds = max(seconds, noise_s) if sees_noise else seconds
        enough = _shows_noise if sees_noise else lambda report: True
        reports = await _all(self._report(run, plan, seconds, enough) for run in self._runs)
        self._noise_known |= sees_noise
        return reports

    def _start(
        self, job: int, placed: Placed, plan: Plan, reporting: Reporting = REPORTING, share: Share | None = None
    ) -> TestbedRun:
        self._runs.append(self._testbed.start(self._file, job, placed, plan, reporting, share))
        return self._runs[-1]

    async def _end_runs(self) -> None:
        await self._testbed.kill(*self._runs)
        self._runs, self._held = [], None

    async def _report(self, run: TestbedRun, plan: Plan, seconds: float, enough: Callable[[Report], bool]) -> Report:
        """The first report that is `enough`, after at least that many seconds of steps under the plan."""
        since_s = inf
        while True:
            report = await run.report()
            if (report.micro_batch, report.accumulation) != (plan.micro_batch, plan.accumulation) or not report.steps:
                continue
            if report.grad_sqr > 0:
                self._noise.append((report.work, report.grad_var / report.grad_sqr))
            since_s = min(since_s, self._clock() - report.steps * report.step_s)
            if self._clock() - since_s >= seconds and enough(report):
                return report

    async def _measure_input(self, plan: Plan) -> None:
        """Measures the input of a job that loads its samples, alone on one slot of the first node, at the numbers of
        CPUs that optimistic profiling tries (`searched_steps`).
        """
        cores, loop = self._testbed.agents.there()[0].cpus, asyncio.get_running_loop()
        memory_bytes = CACHE_FACTOR * self._found.samples * self._found.item_bytes
        run = self._start(self._job, ((0, 1),), plan, share=Share(float(cores), memory_bytes))

        async def seconds_of(cpus: int) -> float:
            self._say(f"input with {cpus} CPUs")
            self._testbed.reshare(run, Share(float(cpus), memory_bytes))
            first = await self._report(run, plan, 0.0, lambda report: report.cpus == cpus)
            began_s, least = self._clock(), first.step + MIN_INPUT_STEPS
            last = await self._report(
                run,
                plan,
                self._effort.seconds,
                lambda report: report.cpus == cpus and report.cpu_s > 0 and report.step >= least,
            )
            # Not the median of the report: loaders deliver batches in bursts.
            step_s = (self._clock() - began_s) / (last.step - first.step)
            computing_s = last.step_s - last.waited_s
            self._input_steps.append(StepAtCpus(cpus, step_s, max(0.0, step_s - computing_s), last.cpu_s))
            return step_s

        def waited_for(cpus: int) -> float:
            return asyncio.run_coroutine_threadsafe(seconds_of(cpus), loop).result()

        try:
            await asyncio.to_thread(searched_steps, waited_for, cores)
        except InputError as error:
            self._testbed.check()
            self._remarks.append(f"input: {error}")
        finally:
            await self._end_runs()

    def _input(self) -> ProfiledInput | None:
        """The measured input. CPU-seconds are the kernel's: other programs affect these less than step times."""
        steps = self._input_steps
        if not steps:
            return None
        batch = self._found.plans[1][0].global_batch
        return ProfiledInput(
            self._selections[0].part.gpu_type,
            batch,
            cpu_s=median(each.cpu_s for each in steps) / batch,
            gpu_s=min(each.step_s - each.waited_s for each in steps),
            sample_bytes=float(self._found.item_bytes),
            data_bytes=float(self._found.samples * self._found.item_bytes),
            steps=tuple(sorted(steps)),
        )

    async def _measure_costs(self, row: ProfiledRow) -> None:
        """Measures how long a job takes to start, to stop with a checkpoint, and to start from the checkpoint, under
        the row's plan. As many jobs as fill the slots do this at once. Raises TestbedError.
        """
        placed = list(enumerate(self._selections[0].part.places(row.plan.gpus), self._job))
        starts, exits = list[list[float]](), list[float]()
        try:
            for _ in ("new", "from a checkpoint"):
                runs = [self._start(job, where, row.plan) for job, where in placed]
                starts.append([seconds - row.step_s for seconds in await _all(run.first_step() for run in runs)])
                if len(starts) == 1:
                    exits = await _all(self._testbed.stop(run) for run in runs)
                await self._end_runs()
        except InputError as error:
            self._testbed.check()
            self._remarks.append(f"starting and stopping {row.plan.describe()}: {error}")
        else:
            self._costs = ProfiledCosts(median(starts[0]), median(starts[1]), median(exits))
        finally:
            await self._end_runs()


def _shows_noise(report: Report) -> bool:
    """Whether the gradient noise is known, or still unknown after `MAX_NOISE_STEPS`."""
    return report.grad_sqr > 0 or report.step >= MAX_NOISE_STEPS


async def _all(waiting: Iterable[Awaitable[Result]]) -> list[Result]:
    """Waits for all and returns their results, or raises the first exception."""
    results = await asyncio.gather(*waiting, return_exceptions=True)
    for each in results:
        if isinstance(each, BaseException):
            raise each
    return [each for each in results if not isinstance(each, BaseException)]


@contextlib.contextmanager
def progress() -> Iterator[Say]:
    """Yields a function that prints progress: as lines, or on a terminal as one changing line."""
    if not sys.stderr.isatty():
        yield lambda words: print(words, file=sys.stderr, flush=True)
        return
    from rich.console import Console
    from rich.markup import escape

    with Console(stderr=True).status("starting") as status:
        yield lambda words: status.update(escape(words))
