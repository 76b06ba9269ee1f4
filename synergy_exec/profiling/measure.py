"""A model measured: how long steps of the plans worth it take, what starting and stopping costs, how noisy it is."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field, fields
from math import inf
from statistics import mean, median
from typing import TypeVar

from synergy_core.errors import InputError
from synergy_core.jobs.record import Placed
from synergy_core.jobs.testbed_profiles import NoiseFrom, ProfiledCosts, ProfiledInput, ProfiledModel, ProfiledRow
from synergy_core.units import GB
from synergy_exec.job_file import JobFile
from synergy_exec.messages import PlanMessage, Report
from synergy_exec.profiling.finder import CandidatePlans
from synergy_exec.profiling.input import measured_input
from synergy_exec.profiling.parts import Part, parts_of
from synergy_exec.profiling.selection import Selection
from synergy_exec.profiling.testbed import RunOnTestbed, Testbed
from synergy_exec.training.noise import FEWEST_STEPS as FEWEST_NOISE_STEPS

Say = Callable[[str], None]
Result = TypeVar("Result")
FEWEST_STEPS = 5
STRETCH = 1.5
"""Gradient noise is taken as constant from some amount of work to so many times that amount."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How carefully to measure. seconds: of training at each batch of each plan. report_s: between reports of a run.

    hopeless: a plan that should take so many times what another does at a batch is not measured there.
    """

    seconds: float = 3.0
    report_s: float = 0.5
    hopeless: float = 1.5


@dataclass(slots=True)
class Measurements:
    """What was seen of one model. starts: seconds to the first step of fresh runs, restarts: of resumed ones.

    failed: plans that did not run, with the reason.
    """

    rows: list[ProfiledRow] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    restarts: list[float] = field(default_factory=list)
    exits: list[float] = field(default_factory=list)
    noises: list[NoiseFrom] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def add(self, more: Measurements) -> None:
        """Adds what was seen besides."""
        for each in fields(self):
            getattr(self, each.name).extend(getattr(more, each.name))


class Measuring:
    """One model that is being measured.

    jobs: as many job numbers as the testbed has slots, of its own; copies run side by side, for a cluster under load
    has no idle slots beside one's own. candidates: for all sizes of the testbed. until_s: by the loop's clock, when
    time is up. found, given: what was seen until now of plans and of input. parts: what is measured where.
    """

    def __init__(
        self,
        testbed: Testbed,
        jobs: list[int],
        file: JobFile,
        candidates: CandidatePlans,
        *,
        effort: Effort,
        until_s: float,
        say: Say,
    ) -> None:
        self._testbed, self._jobs, self._name, self._candidates = testbed, jobs, file.name, candidates
        self._effort, self._until_s, self._tell = effort, until_s, say
        self._memory_bytes = file.memory_gb * GB or inf
        self.found = Measurements()
        self.given: ProfiledInput | None = None
        self.parts = [(part, self._selection(part)) for part in parts_of(testbed.cluster)]

    def _selection(self, part: Part) -> Selection:
        there = range(part.first_node, part.first_node + part.nodes)
        return Selection(
            {size: found for size in part.sizes if (found := self._candidates.plans[size])},
            part.nodes_of,
            hopeless=self._effort.hopeless,
            held_bytes=self._candidates.held_bytes,
            memory_bytes=min(self._testbed.memory_bytes(there), self._memory_bytes),
        )

    def _say(self, words: str) -> None:
        """With how much of all is decided, and how much time there is for the rest."""
        plans = sum(selection.plans for _, selection in self.parts)
        decided = plans - sum(selection.undecided for _, selection in self.parts)
        left_s = self._until_s - asyncio.get_running_loop().time()
        self._tell(f"{self._name}: {words} ({decided} of {plans} step times decided, {left_s:.0f} s left)")

    async def all(self) -> None:
        """Measures what is worth it, the most valuable first; `found` grows meanwhile. Raises TestbedError."""
        input_too = self._candidates.data is not None
        for part, selection in self.parts:
            while (same_degrees := selection.next()) is not None:
                self._say(f"{same_degrees[0].degrees} on {same_degrees[0].world} × {part.gpu_type}")
                await self._degrees(part, selection, same_degrees)
                if input_too:  # once it has trained: before, one could not tell what a fresh start takes
                    input_too = False
                    self.given = await self._input()

    async def _degrees(self, part: Part, selection: Selection, plans: list[PlanMessage]) -> None:
        """Plans of the same degrees, in one run; where memory runs out, the smaller pieces after that in another."""
        while any(selection.worth(plan) for plan in plans):
            attempt = await self._undisturbed(part, selection, plans)
            self.found.add(attempt.found)
            if not attempt.failure:
                return
            self.found.failed.append(f"{attempt.plan.core.describe()}: {attempt.failure}")
            selection.failed(attempt.plan, out_of_memory=attempt.out_of_memory)
            plans = plans[plans.index(attempt.plan) + 1 :] if attempt.out_of_memory else []
        for plan in plans:
            selection.leave_out(plan)

    async def _undisturbed(self, part: Part, selection: Selection, plans: list[PlanMessage]) -> Copies:
        """Copies through those plans, again where an agent was lost meanwhile, which says nothing of them. Raises
        TestbedError.
        """
        copies = list(zip(self._jobs, part.places(plans[0].world), strict=False))
        while True:
            losses = self._testbed.losses
            attempt = Copies(self._testbed, copies, self._effort, selection, part.gpu_type)
            try:
                await attempt.through(plans)
            except InputError as error:
                self._testbed.check()
                attempt.failure = str(error)
            if self._testbed.losses == losses:
                return attempt

    async def _input(self) -> ProfiledInput | None:
        """The input of a job that loads its samples; None where it did not train. Raises TestbedError."""
        plans, data = self._candidates.plans[1], self._candidates.data
        if data is None or not plans:
            return None

        def tell(cpus: int) -> None:
            self._say(f"input with {cpus} CPUs")

        while True:
            losses = self._testbed.losses
            seconds = self._effort.seconds
            try:
                found = await measured_input(self._testbed, self._jobs[0], plans[0][0], data, seconds=seconds, say=tell)
            except InputError as error:
                self._testbed.check()
                if self._testbed.losses == losses:
                    self.found.failed.append(f"input: {error}")
                    return None
            else:
                if self._testbed.losses == losses:
                    return found


class Copies:
    """Copies of a job side by side, each at the same batch at the same time, through plans of the same degrees.

    found: what was seen. plan: the one that it is at. failure: why that did not run; out_of_memory: for lack of it.
    """

    def __init__(
        self,
        testbed: Testbed,
        copies: list[tuple[int, Placed]],
        effort: Effort,
        selection: Selection,
        gpu_type: str,
    ) -> None:
        self._testbed, self._copies, self._effort = testbed, copies, effort
        self._selection, self._gpu_type = selection, gpu_type
        self.found = Measurements()
        self.plan: PlanMessage
        self.failure, self.out_of_memory = "", False

    async def through(self, plans: list[PlanMessage]) -> None:
        """Measures those that are worth it. Raises InputError when all have left, where one fails."""
        self.plan = next(plan for plan in plans if self._selection.worth(plan))
        fresh = [job not in self._testbed.trained for job, _ in self._copies]
        runs = [self._testbed.start(job, placed, self.plan) for job, placed in self._copies]
        try:
            await self._through(plans, runs, fresh)
        except asyncio.CancelledError:  # time is up, which leaves none to save
            for run in runs:
                run.kill()
            raise

    async def _through(self, plans: list[PlanMessage], runs: list[RunOnTestbed], fresh: list[bool]) -> None:
        try:
            await _all(run.first_step() for run in runs)
            self._testbed.trained.update(job for job, _ in self._copies)
            first_s = await self._measure(runs)
            for run, is_fresh, step_s in zip(runs, fresh, first_s, strict=True):
                standstill_s = run.stepped_s - run.launched_s - step_s
                (self.found.starts if is_fresh else self.found.restarts).append(standstill_s)
            for plan in plans[plans.index(self.plan) + 1 :]:
                if self._selection.worth(plan):
                    self.plan = plan
                    for run in runs:
                        run.retune(plan)
                    await self._measure(runs)
            self.found.exits += await _all(run.stop() for run in runs)
        except InputError:
            self.out_of_memory = any(run.out_of_memory for run in runs)
            await asyncio.gather(*(run.stop() for run in runs), return_exceptions=True)
            raise

    async def _measure(self, runs: list[RunOnTestbed]) -> list[float]:
        """Seconds of a step of each copy under the present plan, which all of them have or soon will."""
        plan = self.plan
        seen = await _all(_steady(run, plan, self._effort.seconds, self.found) for run in runs)
        step_s, said = [took_s for took_s, _ in seen], [report for _, report in seen]
        spread = (max(step_s) - min(step_s)) / mean(step_s)
        memory = max(each.memory_bytes for each in said)
        nodes = len(self._copies[0][1])
        self.found.rows.append(ProfiledRow(self._gpu_type, nodes, plan.core, mean(step_s), spread, float(memory)))
        self._selection.measured(plan, mean(step_s), fits=memory <= self._selection.memory_bytes)
        limits = [each.memory_limit_bytes for each in said if each.memory_limit_bytes]
        self._selection.memory_bytes = min([self._selection.memory_bytes, *limits])
        return step_s


async def measured(
    testbed: Testbed,
    jobs: list[int],
    file: JobFile,
    candidates: CandidatePlans,
    *,
    effort: Effort,
    until_s: float,
    say: Say,
) -> tuple[ProfiledModel, list[str]]:
    """The model's profile, and what is to be known of it: plans that failed, what there was no time for. Raises
    InputError where nothing was measured, or TestbedError. For the arguments see `Measuring`.
    """
    measuring = Measuring(testbed, jobs, file, candidates, effort=effort, until_s=until_s, say=say)
    found, late = measuring.found, False
    try:
        async with asyncio.timeout_at(until_s):
            await measuring.all()
    except TimeoutError:
        late = True
    if not found.rows:
        why = "time was up before one was" if late else "no plan is admitted"
        raise InputError(f"{file.name} could not be profiled: {'; '.join(found.failed) or why}.")
    launch_s = median(found.starts)
    costs = ProfiledCosts(launch_s, median(found.restarts or [launch_s]), median(found.exits or [launch_s]))
    predicted = [
        ProfiledRow(part.gpu_type, part.nodes_of(plan.world), plan.core, step_s, predicted=True)
        for part, selection in measuring.parts
        for plan, step_s in selection.predicted()
    ]
    rows = (*found.rows, *predicted)
    batch = max(row.plan.global_batch for row in rows)
    noise = noise_curve(found.noises)
    model = ProfiledModel(
        file.name,
        file.initial_batch,
        batch,
        candidates.parameters,
        noise,
        costs,
        rows,
        measuring.given,
        file.application,
        file.max_batch,
    )
    selections = [selection for _, selection in measuring.parts]
    say(f"{file.name}: {_account(len(found.rows), selections)}")
    remarks = [f"{file.name}: left out, {each}" for each in found.failed]
    if late:
        undecided = sum(each.undecided for each in selections)
        remarks.append(
            f"{file.name}: time was up before {undecided} more step times were measured; {len(predicted)} of them are "
            "predicted, the others not used; a larger profile_s measures more"
        )
    return model, remarks


def _account(measured: int, selections: list[Selection]) -> str:
    """How many of all step times were measured, and why the others were not."""
    left_out = sum((each.left_out for each in selections), Counter[str]())
    why = "".join(f"; {count} {reason}" for reason, count in left_out.items())
    return f"{measured} of {sum(each.plans for each in selections)} step times measured{why}"


async def _all(waiting: Iterable[Awaitable[Result]]) -> list[Result]:
    """The results of all, once the last is there. Raises InputError if any of them does."""
    results = await asyncio.gather(*waiting, return_exceptions=True)
    for each in results:
        if isinstance(each, BaseException):
            raise each
    return [each for each in results if not isinstance(each, BaseException)]


async def _steady(run: RunOnTestbed, plan: PlanMessage, seconds: float, found: Measurements) -> tuple[float, Report]:
    """Seconds a step at that batch, by the wall clock between reports: with all that comes between two steps."""
    began: tuple[float, Report] | None = None
    while True:
        came_s, report = await run.report()
        if report.grad_sqr > 0:
            found.noises.append(NoiseFrom(report.work, report.grad_var / report.grad_sqr))
        if (report.micro_batch, report.accumulation) != (plan.micro_batch, plan.accumulation) or not report.step_s:
            continue
        if began is None:
            began = came_s, report
        elif came_s - began[0] >= seconds and report.step - began[1].step >= FEWEST_STEPS:
            return (came_s - began[0]) / (report.step - began[1].step), report


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
