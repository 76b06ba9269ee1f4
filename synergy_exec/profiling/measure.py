"""A model measured: how long steps of every admitted plan take, what starting and stopping costs, how noisy it is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field, fields
from math import inf
from statistics import mean, median
from typing import TypeVar

from synergy_core.cluster import Cluster
from synergy_core.errors import InputError
from synergy_core.jobs.record import Placed
from synergy_core.jobs.testbed_profiles import NoiseFrom, ProfiledCosts, ProfiledInput, ProfiledModel, ProfiledRow
from synergy_exec.job_file import JobFile
from synergy_exec.messages import PlanMessage, Report
from synergy_exec.profiling.candidates import CandidatePlans
from synergy_exec.profiling.grid import sizes_of
from synergy_exec.profiling.input import measured_input
from synergy_exec.profiling.testbed import RunOnTestbed, Testbed
from synergy_exec.training.noise import FEWEST_STEPS as FEWEST_NOISE_STEPS

Say = Callable[[str], None]
Seen = dict[PlanMessage, list[tuple[float, Report]]]
"""Each plan's measurements, one per copy of the job: seconds a step, and the last report."""
Result = TypeVar("Result")
FEWEST_STEPS = 5
STRETCH = 1.5
"""Gradient noise is taken as constant from some amount of work to so many times that amount."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How carefully to measure. seconds: of training at each batch of each plan. report_s: between reports of a run.

    hopeless: a plan that takes so many times what another does at a batch is not measured at further ones.
    """

    seconds: float = 3.0
    report_s: float = 0.5
    hopeless: float = 2.5


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


async def measured(
    testbed: Testbed, jobs: list[int], file: JobFile, candidates: CandidatePlans, *, effort: Effort, say: Say
) -> tuple[ProfiledModel, list[str]]:
    """The model's profile, and which plans failed with what. Raises InputError where none ran, or TestbedError.

    jobs: as many job numbers as there are slots of its own; copies run side by side, for a cluster under load has no
    idle slots beside one's own. candidates: for all of `sizes`.
    """
    found = Measurements()
    for gpu_type, first_node, nodes, per_node in _parts(testbed.cluster):
        for size in sizes_of(nodes * per_node):
            places = _places(size, first_node, nodes, per_node)
            best: dict[int, float] = {}
            for same_degrees in candidates.plans[size]:
                say(f"{file.name}: {same_degrees[0].degrees} on {size} × {gpu_type}")
                copies = list(zip(jobs, places, strict=False))
                seen = await _undisturbed(testbed, copies, same_degrees, effort, found, best)
                found.rows += _rows(gpu_type, len(places[0]), same_degrees, seen)
    if not found.rows or not found.starts:
        raise InputError(f"{file.name} could not be profiled: {'; '.join(found.failed) or 'no plan is admitted'}.")
    given = await _input(testbed, jobs[0], file.name, candidates, effort, say, found.failed)
    launch_s = median(found.starts)
    costs = ProfiledCosts(launch_s, median(found.restarts or [launch_s]), median(found.exits))
    rows = tuple(found.rows)
    batch = max(row.plan.global_batch for row in rows)
    return ProfiledModel(
        file.name, file.initial_batch, batch, candidates.parameters, noise_curve(found.noises), costs, rows, given
    ), found.failed


def sizes(cluster: Cluster) -> list[int]:
    """Numbers of slots that anything is measured on."""
    return sorted({size for _, _, nodes, per_node in _parts(cluster) for size in sizes_of(nodes * per_node)})


async def _undisturbed(
    testbed: Testbed,
    copies: list[tuple[int, Placed]],
    same_degrees: list[PlanMessage],
    effort: Effort,
    found: Measurements,
    best: dict[int, float],
) -> Seen:
    """Runs `_copies`, again where an agent was lost meanwhile, which says nothing of the plan. Raises TestbedError."""
    while True:
        losses, seen = testbed.losses, Seen()
        tried = Measurements()
        try:
            await _copies(testbed, copies, same_degrees, effort, tried, best, seen)
        except InputError as error:
            testbed.check()
            tried.failed.append(f"{same_degrees[0].degrees}: {error}")
        if testbed.losses == losses:
            found.add(tried)
            return seen


async def _input(
    testbed: Testbed,
    job: int,
    name: str,
    candidates: CandidatePlans,
    effort: Effort,
    say: Say,
    failed: list[str],
) -> ProfiledInput | None:
    """The input of a job that loads its samples, None of any other, or where it did not train. Raises TestbedError."""
    plans = candidates.plans[1]
    if candidates.data is None or not plans:
        return None

    def tell(cpus: int) -> None:
        say(f"{name}: input with {cpus} CPUs")

    while True:
        losses = testbed.losses
        try:
            found = await measured_input(testbed, job, plans[0][0], candidates.data, seconds=effort.seconds, say=tell)
        except InputError as error:
            testbed.check()
            if testbed.losses == losses:
                failed.append(f"input: {error}")
                return None
        else:
            if testbed.losses == losses:
                return found


def _parts(cluster: Cluster) -> list[tuple[str, int, int, int]]:
    """GPU type, first node, nodes and slots of each of the cluster's node types."""
    firsts = cluster.first_nodes()
    return [
        (each.gpu_type, first, each.nodes, each.gpus_per_node)
        for each, first in zip(cluster.node_types, firsts, strict=True)
    ]


def _places(size: int, first_node: int, nodes: int, per_node: int) -> list[Placed]:
    """Disjoint placements of that size: within nodes as many as there is room for, or one over several."""
    if size <= per_node:
        mask = (1 << size) - 1
        return [
            ((first_node + node, mask << (place * size)),) for node in range(nodes) for place in range(per_node // size)
        ]
    whole, rest = divmod(size, per_node)
    parts = [(first_node + node, (1 << per_node) - 1) for node in range(whole)]
    return [tuple(parts + ([(first_node + whole, (1 << rest) - 1)] if rest else []))]


async def _copies(
    testbed: Testbed,
    copies: list[tuple[int, Placed]],
    same_degrees: list[PlanMessage],
    effort: Effort,
    found: Measurements,
    best: dict[int, float],
    seen: Seen,
) -> None:
    """Copies of the job side by side, each at the same batch at the same time, through all batches of one plan.

    best: by batch, the least seconds a step so far on as many slots; it and `seen` are brought up to date, also where
    a run fails, for which InputError is raised when all have left.
    """
    fresh = [job not in testbed.trained for job, _ in copies]
    runs = [testbed.start(job, placed, same_degrees[0]) for job, placed in copies]
    try:
        await _all(run.first_step() for run in runs)
        testbed.trained.update(job for job, _ in copies)
        for plan in same_degrees:
            for run in runs:
                run.retune(plan)
            seen[plan] = await _all(_steady(run, plan, effort.seconds, found) for run in runs)
            step_s, batch = mean(took_s for took_s, _ in seen[plan]), plan.global_batch
            best[batch] = min(step_s, best.get(batch, inf))
            if step_s > effort.hopeless * best[batch]:
                break
        for at, run in enumerate(runs):
            standstill_s = run.stepped_s - run.launched_s - seen[same_degrees[0]][at][0]
            (found.starts if fresh[at] else found.restarts).append(standstill_s)
        found.exits += await _all(run.stop() for run in runs)
    except InputError:
        await asyncio.gather(*(run.stop() for run in runs), return_exceptions=True)
        raise


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


def _rows(gpu_type: str, nodes: int, same_degrees: list[PlanMessage], seen: Seen) -> list[ProfiledRow]:
    rows = []
    for plan in same_degrees:
        if plan in seen:
            step_s = [each for each, _ in seen[plan]]
            spread = (max(step_s) - min(step_s)) / mean(step_s)
            memory = max(report.memory_bytes for _, report in seen[plan])
            rows.append(ProfiledRow(gpu_type, nodes, plan.core, mean(step_s), spread, float(memory)))
    return rows
