"""A model measured: how long steps of the plans worth it take, what starting and stopping costs, how noisy it is."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from math import inf
from statistics import mean, median
from typing import TypeVar

from synergy_core.cluster import Share
from synergy_core.errors import InputError
from synergy_core.goodput.pipeline import searched_steps
from synergy_core.jobs.testbed_profiles import (
    Degrees,
    NoiseFrom,
    PlanTimes,
    ProfiledCosts,
    ProfiledInput,
    ProfiledModel,
    ProfiledRow,
    SeenPlan,
    StepAtCpus,
    degrees_of,
)
from synergy_core.planner.plan import Plan
from synergy_core.units import GB
from synergy_exec.job_file import JobFile
from synergy_exec.messages import Report
from synergy_exec.profiling.finder import CandidatePlans, Data
from synergy_exec.profiling.machine import Part, parts_of
from synergy_exec.profiling.testbed import Copy, RunOnTestbed, Testbed
from synergy_exec.training.integrity import FEWEST_NOISE_STEPS

# How a model's input is prepared: steps with as many CPUs as optimistic profiling asks for, while one run trains.


FEWEST_STEPS = 10
MEMORY = 2.0
"""Bytes of memory per byte of data, so that all of it fits with what is kept beside each item."""


async def measured_input(
    testbed: Testbed, job: int, plan: Plan, data: Data, *, seconds: float, say: Callable[[int], None]
) -> ProfiledInput:
    """The input of a job that is measured on one slot of the first node, alone. seconds: of training at each number of
    CPUs; say: is told each. Raises InputError where it does not train.
    """
    most = testbed.cores(0)
    memory_bytes = MEMORY * data.samples * data.item_bytes
    run = testbed.start(job, ((0, 1),), plan, Share(float(most), memory_bytes))
    steps: dict[int, StepAtCpus] = {}
    loop = asyncio.get_running_loop()

    def seconds_of(cpus: int) -> float:
        """A step with so many CPUs; called in a thread of its own, as the search waits for it."""
        loop.call_soon_threadsafe(say, cpus)
        share = Share(float(cpus), memory_bytes)
        steps[cpus] = asyncio.run_coroutine_threadsafe(_at(run, share, seconds), loop).result()
        return steps[cpus].step_s

    try:
        await run.first_step()
        await asyncio.to_thread(searched_steps, seconds_of, most)
    finally:
        run.kill()
        await run.left
    return _fitted(testbed.cluster.node_types[0].gpu_type, plan.global_batch, data, list(steps.values()))


async def _at(run: RunOnTestbed, share: Share, seconds: float) -> StepAtCpus:
    """Medians of the run's steps with that share. Raises InputError where the run ends before."""
    run.reshare(share)
    began_s: float | None = None
    while True:
        report = await run.report()
        granted = run.granted.get(0)
        if granted is not None and granted.cpus < granted.asked == share.cpus:
            raise InputError(f"the node gave {granted.cpus:g} of {share.cpus:g} CPUs; something else holds them.")
        if report.cpus != share.cpus or not report.step_s:
            continue
        began_s = report.told_s if began_s is None else began_s
        if report.told_s - began_s >= seconds and report.steps >= FEWEST_STEPS and report.cpu_s:
            return StepAtCpus(report.cpus, report.step_s, report.waited_s, report.cpu_s)


def _fitted(gpu_type: str, batch: int, data: Data, steps: list[StepAtCpus]) -> ProfiledInput:
    """CPU-seconds as the kernel counted them, which neighbours on the machine change little, unlike times of steps."""
    return ProfiledInput(
        gpu_type,
        batch,
        cpu_s=median(each.cpu_s for each in steps) / batch,
        gpu_s=min(each.step_s - each.waited_s for each in steps),
        sample_bytes=float(data.item_bytes),
        data_bytes=float(data.samples * data.item_bytes),
        steps=tuple(sorted(steps)),
    )


# Which plans of a model are worth measuring, and in which order, as what was measured tells of what was not.


SLOWER = "cannot be the fastest, by what was measured of others"
SELECTION_MEMORY = "need more memory than there is"
BETWEEN = "are of batches between those measured, and predicted"


class Selection:
    """One model on the slots of one type.

    candidates: by number of slots, lists of plans that one run takes one after another, since only the batch and its
    cut differ; the first list of each is what a job falls back on, and is measured at both ends of the batches.
    nodes_of: how many nodes so many slots are on. hopeless: a plan that should take so many times what the fastest does
    is not measured, unless nothing is known of its degrees yet. every_batch: whether batches between the ends are, too,
    and the smallest in every cut: it is fastest in the fewest pieces, for what a step takes besides computing.
    held_bytes: of weights and gradients, the least that all slots of a job hold together. memory_bytes: that a slot
    may use. left_out: how many plans were not measured, by why.
    """

    def __init__(
        self,
        candidates: Mapping[int, list[list[Plan]]],
        nodes_of: Callable[[int], int],
        *,
        hopeless: float,
        every_batch: bool = True,
        held_bytes: float = 0.0,
        memory_bytes: float = inf,
    ) -> None:
        self._nodes_of, self._hopeless, self._held_bytes = nodes_of, hopeless, held_bytes
        self._all = [plan for lists in candidates.values() for same in lists for plan in same]
        self._ends, self._middles = list[list[Plan]](), list[list[Plan]]()
        for same in (same for size in sorted(candidates) for same in candidates[size]):
            ends, middle = _ends_first(same, every_cut=every_batch)
            self._ends.append(ends)
            self._middles += [middle] if middle else []
        self._first = {degrees_of(lists[0][0]) for lists in candidates.values() if lists}
        self._seen: dict[Plan, float] = {}
        self._best: dict[tuple[int, int], float] = {}
        self._times: PlanTimes | None = None
        self._too_large: list[Plan] = []
        self._failed: set[Degrees] = set()
        self.memory_bytes = memory_bytes
        self._left_out: dict[Plan, str] = {}
        if not every_batch:
            self._left_out |= {plan: BETWEEN for same in self._middles for plan in same}
            self._middles.clear()

    @property
    def plans(self) -> int:
        """How many candidates there are."""
        return len(self._all)

    @property
    def left_out(self) -> Counter[str]:
        """How many of them were not measured, by why."""
        return Counter(self._left_out.values())

    @property
    def undecided(self) -> int:
        """How many of them were neither measured nor left out, nor failed."""
        decided = {*self._seen, *self._left_out}
        return sum(plan not in decided and not self._has_failed(plan) for plan in self._all)

    def next(self) -> list[Plan] | None:
        """What to measure now; None when nothing is left that is worth it.

        First the smallest and the largest batch of each kind of plan, which tell of those between them; the others only
        when there is time left. Of these first what each number of slots falls back on, without which a job could not
        be there at all; then the fewest slots, which tell of more; on as many, what promises most.
        """
        while waiting := self._ends or self._middles:
            turn = min(map(self._turn, waiting))
            due = [each for each in waiting if self._turn(each) == turn]
            chosen = due[0] if turn[0] == 0 else min(due, key=lambda each: min(map(self._ratio, each)))
            waiting.remove(chosen)
            if any(map(self.worth, chosen)):
                return chosen
            for plan in chosen:
                self.leave_out(plan)
        return None

    def _turn(self, same: list[Plan]) -> tuple[int, int]:
        """0 for what its slots fall back on, 1 for others; and the slots."""
        return int(degrees_of(same[0]) not in self._first), same[0].gpus

    def worth(self, plan: Plan) -> bool:
        """Whether it is to be measured: it may fit in memory, and may be the fastest at its batch or shows what its
        degrees do.
        """
        if self._does_not_fit(plan):
            return False
        degrees = degrees_of(plan)
        unknown = degrees not in {degrees_of(each) for each in self._seen}
        return degrees in self._first or unknown or self._ratio(plan) <= self._hopeless

    def leave_out(self, plan: Plan) -> None:
        """It is not measured, unless it was."""
        if plan not in self._seen:
            self._left_out[plan] = SELECTION_MEMORY if self._does_not_fit(plan) else SLOWER

    def measured(self, plan: Plan, step_s: float, *, fits: bool = True) -> None:
        """A step took so long. fits: in memory; else it tells of others and is none to be chosen."""
        self._seen[plan] = step_s
        key = plan.gpus, plan.global_batch
        if fits:
            self._best[key] = min(step_s, self._best.get(key, inf))
        else:
            self._too_large.append(plan)
        seen = [SeenPlan(each, self._nodes_of(each.gpus), took_s) for each, took_s in self._seen.items()]
        self._times = PlanTimes(seen)

    def failed(self, plan: Plan, *, out_of_memory: bool) -> None:
        """It did not run: for lack of memory, or because its degrees do not, at any batch."""
        if out_of_memory:
            self._too_large.append(plan)
        else:
            self._failed.add(degrees_of(plan))

    def predicted(self) -> list[tuple[Plan, float]]:
        """Where nothing was measured, by slots and batch: the plan that should be fastest, and seconds of its step; one
        of a kind that was never seen only where no other fits, for it is believed to be faster than it is.
        """
        if self._times is None:
            return []
        seen = {_kind(plan) for plan in self._seen}
        found: dict[tuple[int, int], tuple[bool, float, Plan]] = {}
        for plan in self._all:
            key = plan.gpus, plan.global_batch
            if key in self._best or self._does_not_fit(plan) or self._has_failed(plan):
                continue
            unseen = _kind(plan) not in seen and degrees_of(plan) not in self._first
            ranked = unseen, self._step_s(plan), plan
            if key not in found or ranked[:2] < found[key][:2]:
                found[key] = ranked
        return [(plan, step_s) for _, step_s, plan in found.values()]

    def _step_s(self, plan: Plan) -> float:
        assert self._times is not None
        return self._times.step_s(plan, self._nodes_of(plan.gpus))

    def _ratio(self, plan: Plan) -> float:
        """Of its step to the fastest that was measured on as many slots at its batch; 0 where nothing was."""
        best_s = self._best.get((plan.gpus, plan.global_batch), inf)
        return 0.0 if best_s == inf else self._step_s(plan) / best_s

    def _has_failed(self, plan: Plan) -> bool:
        """Whether it ran out of memory itself, or its degrees do not run."""
        return plan not in self._seen and (plan in self._too_large or degrees_of(plan) in self._failed)

    def _does_not_fit(self, plan: Plan) -> bool:
        """Whether its share of weights and gradients alone is too much, or it holds no less than one that was."""
        replicas = plan.data if plan.zero else 1
        if self._held_bytes > self.memory_bytes * plan.tensor * plan.pipeline * replicas:
            return True
        return any(_parts(each) == _parts(plan) and each.micro_batch <= plan.micro_batch for each in self._too_large)


def _ends_first(same: list[Plan], *, every_cut: bool) -> tuple[list[Plan], list[Plan]]:
    """Those of the smallest batch, in its first cut or every one, and of the largest; and the others."""
    smallest = min(map(_batch, same))
    first = [plan for plan in same if _batch(plan) == smallest]
    largest = [plan for plan in same if _batch(plan) == max(map(_batch, same)) > smallest]
    ends = [*(first if every_cut else first[:1]), *largest]
    return ends, [plan for plan in same if plan not in ends]


def _batch(plan: Plan) -> int:
    return plan.global_batch


def _kind(plan: Plan) -> tuple[bool, ...]:
    return plan.zero > 0, plan.tensor > 1, plan.pipeline > 1, plan.interleave > 1


def _parts(plan: Plan) -> tuple[int, ...]:
    """What a rank holds of the model; where there are stages, of as many micro-batches at once as there are."""
    return plan.tensor, plan.pipeline, plan.interleave, plan.zero, plan.data if plan.zero else 1


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
                    self._say(f"{same_degrees[0].degrees} on {same_degrees[0].gpus} × {part.gpu_type}")
                    await self._degrees(part, selection, same_degrees)
                    if input_too:  # after the first plan: before, one could not tell what a fresh start takes
                        input_too = False
                        await self._end_copies()
                        self.given = await self._input()
                await self._end_copies()
            await self._costs()
        finally:
            await self._end_copies()

    async def _degrees(self, part: Part, selection: Selection, plans: list[Plan]) -> None:
        """Measures plans of the same degrees. If one runs out of memory, smaller pieces are tried in new processes."""
        # Noise is measured under a plan of several slots, where there is one: two replicas show it at once.
        several = min(2, max((size for size, found in self._candidates.plans.items() if found), default=1))
        while any(selection.worth(plan) for plan in plans):
            noise = plans[0].gpus >= several and not self._looked_for_noise
            attempt = await self._measured(part, selection, plans, noise)
            self.found.add(attempt.found)
            if not attempt.failure:
                self._looked_for_noise |= noise
                break
            self.found.failed.append(f"{attempt.plan.describe()}: {attempt.failure}")
            selection.failed(attempt.plan, out_of_memory=attempt.out_of_memory)
            plans = plans[plans.index(attempt.plan) + 1 :] if attempt.out_of_memory else []
        for plan in plans:
            selection.leave_out(plan)

    async def _measured(self, part: Part, selection: Selection, plans: list[Plan], noise: bool) -> Copies:
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
        plan = row.plan
        placed = list(zip(self._jobs[1:], part.places(plan.gpus), strict=False))
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
                found.failed.append(f"starting and stopping {plan.describe()}: {error}")
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
        self.plan: Plan
        self.failure, self.out_of_memory = "", False

    @property
    def alive(self) -> bool:
        """Whether the run may go on, or has yet to start."""
        return self._run is None or not self._run.left.done()

    async def measure(self, plans: list[Plan], *, noise: bool) -> None:
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
        run.rebuild(first, self.part.ranks(first.gpus), steps, seconds)
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
        row = ProfiledRow(part.gpu_type, part.nodes_of(plan.gpus), plan, step_s, spread, float(memory))
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
        ProfiledRow(part.gpu_type, part.nodes_of(plan.gpus), plan, step_s, predicted=True)
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
