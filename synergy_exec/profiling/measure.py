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
from synergy_core.jobs.testbed_profiles import NoiseFrom, ProfiledCosts, ProfiledInput, ProfiledModel, ProfiledRow
from synergy_core.units import GB
from synergy_exec.job_file import JobFile
from synergy_exec.messages import PlanMessage, Report
from synergy_exec.profiling.finder import CandidatePlans
from synergy_exec.profiling.input import measured_input
from synergy_exec.profiling.parts import Part, parts_of
from synergy_exec.profiling.selection import Selection
from synergy_exec.profiling.testbed import Copy, RunOnTestbed, Testbed
from synergy_exec.training.progress import FEWEST_NOISE_STEPS

Say = Callable[[str], None]
Result = TypeVar("Result")
MOST_NOISE_STEPS = 3 * FEWEST_NOISE_STEPS
"""Steps in which gradient noise should have become known."""
STRETCH = 1.5
"""Gradient noise is taken as constant from some amount of work to so many times that amount."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How carefully to measure.

    seconds: of training at each batch of each plan, and at least one step. hopeless: a plan that should take so many
    times as long as another at a batch is not measured there. every_batch: whether batches between the smallest and the
    largest are measured; else they are predicted. noise_s: seconds of training, once per model, to see its gradient
    noise, and at least the steps before which it is unknown.
    """

    seconds: float = 3.0
    hopeless: float = 1.5
    every_batch: bool = True
    noise_s: float = 30.0

    @property
    def report_s(self) -> float:
        """Seconds between reports of a run: a few of them fall into what is measured."""
        return self.seconds / 4


@dataclass(slots=True)
class Measurements:
    """What was seen of one model.

    starts: seconds to the first step of fresh runs, restarts: of resumed ones; exits: from the order to stop until the
    slots are free. failed: plans that did not run, with the reason.
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

    jobs: one job number more than the testbed has slots, used by nobody else: the first to measure step times, the
    others to measure starts and stops. candidates: for all sizes of the testbed. until_s: when time is up, on the
    loop's clock; a plan that takes half of the time until then hangs, or is too slow to be of use. found, given: what
    was measured so far of plans and of input. parts: the nodes of each type, with the plans to measure there.
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
        self._longest_s = max(0.0, until_s - asyncio.get_running_loop().time()) / 2
        self._memory_bytes = file.memory_gb * GB or inf
        self._copies: Copies | None = None
        self._looked_for_noise = False
        self.found = Measurements()
        self.given: ProfiledInput | None = None
        self.parts = [(part, self._selection(part)) for part in parts_of(testbed.cluster)]

    def _selection(self, part: Part) -> Selection:
        there = range(part.first_node, part.first_node + part.nodes)
        return Selection(
            {size: found for size in part.sizes if (found := self._candidates.plans[size])},
            part.nodes_of,
            hopeless=self._effort.hopeless,
            every_batch=self._effort.every_batch,
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
        try:
            for part, selection in self.parts:
                while (same_degrees := selection.next()) is not None:
                    self._say(f"{same_degrees[0].degrees} on {same_degrees[0].world} × {part.gpu_type}")
                    await self._degrees(part, selection, same_degrees)
                    if input_too:  # after the first plan: before, one could not tell what a fresh start takes
                        input_too = False
                        await self._end_copies()
                        self.given = await self._input()
                await self._end_copies()
            await self._costs()
        finally:
            await self._end_copies()

    async def _degrees(self, part: Part, selection: Selection, plans: list[PlanMessage]) -> None:
        """Measures plans of the same degrees. If one runs out of memory, smaller pieces are tried in new processes."""
        # Noise is measured under a plan of several slots, where there is one: two replicas show it at once.
        several = min(2, max((size for size, found in self._candidates.plans.items() if found), default=1))
        while any(selection.worth(plan) for plan in plans):
            noise = plans[0].world >= several and not self._looked_for_noise
            attempt = await self._measured(part, selection, plans, noise)
            self.found.add(attempt.found)
            if not attempt.failure:
                self._looked_for_noise |= noise
                break
            self.found.failed.append(f"{attempt.plan.core.describe()}: {attempt.failure}")
            selection.failed(attempt.plan, out_of_memory=attempt.out_of_memory)
            plans = plans[plans.index(attempt.plan) + 1 :] if attempt.out_of_memory else []
        for plan in plans:
            selection.leave_out(plan)

    async def _measured(self, part: Part, selection: Selection, plans: list[PlanMessage], noise: bool) -> Copies:
        """Measures those plans, and again if an agent was lost meanwhile. Raises TestbedError."""
        while True:
            losses = self._testbed.losses
            if self._copies is None or not self._copies.alive or self._copies.part != part:
                await self._end_copies()
                self._copies = Copies(self._testbed, self._jobs[0], self._effort, selection, part)
            copies = self._copies
            try:
                async with asyncio.timeout(self._longest_s):
                    await copies.measure(plans, noise=noise)
            except InputError as error:
                self._testbed.check()
                copies.failure = str(error)
            except TimeoutError:
                copies.failure = f"it was not measured after {self._longest_s:.3g} s"
            if copies.failure:
                await self._end_copies()
            if self._testbed.losses == losses:
                return copies

    async def _end_copies(self) -> None:
        if self._copies is not None:
            copies, self._copies = self._copies, None
            await copies.end()

    async def _costs(self) -> None:
        """Measures how long a job takes to start, to stop with a checkpoint, and to start from it.

        Several jobs do so at once, as many as fill the slots, under the first plan that uses several slots, which takes
        longer to load and to stop. Raises TestbedError.
        """
        part, _ = self.parts[0]
        rows = [row for row in self.found.rows if row.gpu_type == part.gpu_type]
        if not rows:
            return
        row = max(rows, key=lambda row: row.plan.gpus > 1)
        plan = PlanMessage.of(row.plan)
        placed = list(zip(self._jobs[1:], part.places(plan.world), strict=False))
        losses = -1
        while losses != self._testbed.losses:
            losses, found = self._testbed.losses, Measurements()
            try:
                for standstills in (found.starts, found.restarts):
                    runs = [self._testbed.start(job, where, plan) for job, where in placed]
                    try:
                        await _all(run.first_step() for run in runs)
                        standstills += [run.standstill_s(row.step_s) for run in runs]
                        if standstills is found.starts:
                            found.exits += await _all(run.stop() for run in runs)
                    finally:
                        await _end(runs)
            except InputError as error:
                self._testbed.check()
                found.failed.append(f"starting and stopping {plan.core.describe()}: {error}")
        self.found.add(found)

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
    """One run on all slots of a part that trains copies of a job and measures their steps, one plan after another.

    All copies train the same batch at the same time. The processes stay from one plan to the next and build the model
    again: in new processes the first steps of each kind of plan are slow, since PyTorch sets much up at first use. A
    plan that fails ends the processes. The attributes describe the last call of `measure`. found: the measurements;
    plan: the plan that it reached; failure: why that plan did not run, "" if it did; out_of_memory: whether that was
    for lack of memory.
    """

    def __init__(self, testbed: Testbed, job: int, effort: Effort, selection: Selection, part: Part) -> None:
        self._testbed, self._job, self._effort, self._selection, self.part = testbed, job, effort, selection, part
        self._run: RunOnTestbed | None = None
        self._seen: set[tuple[bool, ...]] = set()
        self.found = Measurements()
        self.plan: PlanMessage
        self.failure, self.out_of_memory = "", False

    @property
    def alive(self) -> bool:
        """Whether the run may go on, or has yet to start."""
        return self._run is None or not self._run.left.done()

    async def measure(self, plans: list[PlanMessage], *, noise: bool) -> None:
        """Measures the plans that are worth it. noise: and the gradient noise. Raises InputError if one fails."""
        self.found, self.failure = Measurements(), ""
        # If an agent was lost after all of them were measured, none is worth it any more: the first is measured again.
        self.plan = first = next(filter(self._selection.worth, plans), plans[0])
        seconds = self._effort.seconds
        # The first step is left out, and the second, too, if DDP rebuilds its buckets in it or if the processes are new
        # to this kind of plan.
        kind = first.zero > 0, first.tensor > 1, first.pipeline > 1
        steps = 2 + int((first.data > 1 and not first.zero) or kind not in self._seen)
        self._seen.add(kind)
        is_new = self._run is None
        run = self._run = self._run or self._testbed.start(self._job, self.part.whole, first)
        run.rebuild(first, self.part.ranks(first.world), steps, seconds)
        await _all(copy.first_step() for copy in run.copies)
        step_s = await self._measure(run)
        if is_new:
            self.found.starts.append(run.standstill_s(step_s))
        for plan in plans[plans.index(first) + 1 :]:
            if self._selection.worth(plan):
                self.plan = plan
                run.retune(plan, 1, seconds)
                await self._measure(run)
        if noise:
            self.plan = first
            run.retune(first)
            await _all(self._until_noise(copy) for copy in run.copies)

    async def end(self) -> None:
        """Ends the run and waits until no process of it is left."""
        if self._run is not None:
            self.out_of_memory = self._run.out_of_memory
            await _end([self._run])

    async def _until_noise(self, copy: Copy) -> None:
        """Trains for `noise_s`, and until the noise is known; a gradient that is too noisy for that is given up."""
        began = copy.last or await copy.report()
        while True:
            report = await copy.report()
            if report.grad_sqr > 0:
                self.found.noises.append(NoiseFrom(report.work, report.grad_var / report.grad_sqr))
            known = report.grad_sqr > 0 or report.step >= MOST_NOISE_STEPS
            if known and report.told_s - began.told_s >= self._effort.noise_s:
                return

    async def _measure(self, run: RunOnTestbed) -> float:
        """Waits until all copies have measured the present plan. Returns the mean step time, in seconds."""
        plan, part = self.plan, self.part
        said = await _all(_measured(copy) for copy in run.copies)
        times = [each.measured_s for each in said]
        step_s, memory = mean(times), max(each.memory_bytes for each in said)
        spread = (max(times) - min(times)) / step_s
        row = ProfiledRow(part.gpu_type, part.nodes_of(plan.world), plan.core, step_s, spread, float(memory))
        self.found.rows.append(row)
        self._selection.measured(plan, step_s, fits=memory <= self._selection.memory_bytes)
        limits = [each.memory_limit_bytes for each in said if each.memory_limit_bytes]
        self._selection.memory_bytes = min([self._selection.memory_bytes, *limits])
        return step_s


async def _measured(copy: Copy) -> Report:
    """Waits for the report with the measured step time. Raises InputError if the run ends before."""
    while not (report := await copy.report()).measured_s:
        pass
    return report


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


async def _end(runs: list[RunOnTestbed]) -> None:
    """Kills the runs and waits until no process of them is left."""
    for run in runs:
        run.kill()
    await asyncio.wait([run.left for run in runs])


async def _all(waiting: Iterable[Awaitable[Result]]) -> list[Result]:
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
