"""A model measured: how long steps of every admitted plan take, what starting and stopping costs, how noisy it is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from statistics import median

from synergy_core.cluster import Cluster
from synergy_core.errors import InputError
from synergy_core.profiles import ProfiledCosts, ProfiledModel, ProfiledRow
from synergy_core.state import Placed
from synergy_exec.job_file import JobFile
from synergy_exec.messages import PlanMessage, Report
from synergy_exec.profiling.grid import Refusal, batches_of, plans, sizes_of
from synergy_exec.profiling.testbed import RunOnTestbed, Testbed

Say = Callable[[str], None]
FEWEST_STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How carefully to measure. seconds: of training at each batch of each plan. report_s: between reports of a run.

    hopeless: a plan that takes so many times what another does at a batch is not measured at further ones.
    """

    seconds: float = 3.0
    report_s: float = 0.5
    hopeless: float = 2.5


@dataclass(slots=True)
class Measured:
    """What was seen of one model. starts: seconds to the first step of fresh runs, restarts: of resumed ones.

    failed: plans that did not run, with the reason.
    """

    rows: list[ProfiledRow] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    restarts: list[float] = field(default_factory=list)
    exits: list[float] = field(default_factory=list)
    noises: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


async def measured(
    testbed: Testbed, jobs: list[int], file: JobFile, parameters: float, refusal: Refusal, *, effort: Effort, say: Say
) -> tuple[ProfiledModel, list[str]]:
    """The model's profile, and which plans failed with what.

    jobs: as many job numbers as there are slots of its own; copies run side by side, for a cluster under load has no
    idle slots beside one's own. parameters: of the model.
    """
    batches = batches_of(file.initial_batch, file.max_batch)
    found = Measured()
    for kind, first_node, nodes, per_node in _parts(testbed.cluster):
        for size in sizes_of(nodes * per_node):
            places = _places(size, first_node, nodes, per_node)
            best: dict[int, float] = {}
            for same_degrees in plans(size, batches, refusal):
                say(f"{file.name}: {_words(same_degrees[0])} on {size} × {kind}")
                each = await asyncio.gather(
                    *(
                        _run(testbed, job, placed, same_degrees, effort, found, best)
                        for job, placed in zip(jobs, places, strict=False)
                    )
                )
                found.rows += _rows(kind, len(places[0]), same_degrees, [seen for seen in each if seen])
    if not found.rows or not found.starts:
        raise InputError(f"{file.name} could not be profiled: {'; '.join(found.failed) or 'no plan is admitted'}.")
    launch_s = median(found.starts)
    costs = ProfiledCosts(launch_s, median(found.restarts or [launch_s]), median(found.exits))
    noise = median(found.noises) if found.noises else 0.0
    rows = tuple(found.rows)
    batch = max(row.plan.global_batch for row in rows)
    return ProfiledModel(file.name, file.initial_batch, batch, parameters, noise, costs, rows), found.failed


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


async def _run(
    testbed: Testbed,
    job: int,
    placed: Placed,
    same_degrees: list[PlanMessage],
    effort: Effort,
    found: Measured,
    best: dict[int, float],
) -> dict[PlanMessage, tuple[float, Report]]:
    """One run through all batches of one plan: seconds a step, and the last report, by plan.

    best: by batch, the least seconds a step so far on as many slots; brought up to date.
    """
    seen: dict[PlanMessage, tuple[float, Report]] = {}
    fresh = job not in testbed.trained
    run = testbed.start(job, placed, same_degrees[0])
    try:
        await run.first_step()
        testbed.trained.add(job)
        for plan in same_degrees:
            run.retune(plan)
            seen[plan] = await _steady(run, plan, effort.seconds)
            batch, step_s = plan.global_batch, seen[plan][0]
            best[batch] = min(step_s, best.get(batch, inf))
            if step_s > effort.hopeless * best[batch]:
                break
        standstill_s = run.stepped_s - run.launched_s - seen[same_degrees[0]][0]
        (found.starts if fresh else found.restarts).append(standstill_s)
        last = list(seen.values())[-1][1]
        if last.grad_sqr > 0:
            found.noises.append(last.grad_var / last.grad_sqr)
        found.exits.append(await run.stop())
    except InputError as error:
        found.failed.append(f"{_words(same_degrees[0])}: {error}")
    return seen


async def _steady(run: RunOnTestbed, plan: PlanMessage, seconds: float) -> tuple[float, Report]:
    """Seconds a step at that batch, by the wall clock between reports: with all that comes between two steps."""
    began: tuple[float, Report] | None = None
    while True:
        came_s, report = await run.report()
        if (report.micro_batch, report.accumulation) != (plan.micro_batch, plan.accumulation) or not report.step_s:
            continue
        if began is None:
            began = came_s, report
        elif came_s - began[0] >= seconds and report.step - began[1].step >= FEWEST_STEPS:
            return (came_s - began[0]) / (report.step - began[1].step), report


def _rows(
    kind: str, nodes: int, same_degrees: list[PlanMessage], copies: list[dict[PlanMessage, tuple[float, Report]]]
) -> list[ProfiledRow]:
    rows = []
    for plan in same_degrees:
        seen = [copy[plan] for copy in copies if plan in copy]
        if seen:
            step_s = [each for each, _ in seen]
            mean_s = sum(step_s) / len(step_s)
            spread = (max(step_s) - min(step_s)) / mean_s
            memory = max(report.memory_bytes for _, report in seen)
            rows.append(ProfiledRow(kind, nodes, plan.core, mean_s, spread, float(memory)))
    return rows


def _words(plan: PlanMessage) -> str:
    return plan.core.describe().split(" · ")[0] + (f" zero{plan.zero}" if plan.zero else "")
