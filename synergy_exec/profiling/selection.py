"""Chooses which plans of a model are measured, and in which order: not all, but without missing the fastest.

A record, a file of JSON lines, keeps candidates, measurements and failures. Measuring ranks append to it and
`Selection` reads it, so a run that is launched again after a failure continues with the remaining plans.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from synergy_core.jobs.testbed_profiles import Degrees, PlanTimes, SeenPlan, degrees_of
from synergy_core.planner.plan import Plan
from synergy_exec.plans import Candidates
from synergy_exec.profiling.machine import Part
from synergy_exec.wire import whole_lines

HOPELESS = 1.5
"""A plan is not measured if its predicted step time is this many times that of the fastest at its batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How carefully to measure.

    seconds: of training for each plan and batch, at least one step. every_batch: whether batches between the smallest
    and the largest are measured; otherwise they are predicted. noise_s: seconds of training, once per model, to measure
    its gradient noise, at least the steps before which it is unknown.
    """

    seconds: float = 3.0
    every_batch: bool = True
    noise_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The task of a measuring run on the slots of one type, in a file that the launch names.

    batches: in samples. memory_bytes: limit of a slot; `inf` without. noise: whether to measure gradient noise, too.
    input_at: if given, measure the preparation of input under this plan on one slot, and no plans.
    """

    part: Part
    batches: list[int]
    effort: Effort
    memory_bytes: float = inf
    noise: bool = False
    input_at: Plan | None = None

    def write(self, path: Path) -> None:
        """Writes the task as JSON."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")

    @staticmethod
    def read(path: Path) -> Task:
        """Reads a task from the file of `write`."""
        values = json.loads(path.read_text(encoding="utf-8"))
        part, effort = Part(**values.pop("part")), Effort(**values.pop("effort"))
        plan = values.pop("input_at")
        return Task(part=part, effort=effort, input_at=plan and Plan(**plan), **values)


def record_of(task: Path) -> Path:
    """The record of a task: the file to which its measurements are appended."""
    return task.with_suffix(".jsonl")


def lines_of(task: Path) -> list[dict[str, Any]]:
    """The lines of a task's record; none if there is no record yet."""
    return [json.loads(each) for each in whole_lines(record_of(task))]


class Selection:
    """The plans of one task with the contents of its record, line by line through `add`.

    The first plans of each number of slots are the fallback of jobs, and are measured at their smallest and largest
    batch. memory_bytes: limit of a slot as far as it is known.
    """

    def __init__(self, task: Task, record: Iterable[dict[str, Any]] = ()) -> None:
        self.candidates = Candidates({})
        self.memory_bytes = task.memory_bytes
        self._task, self._nodes_of = task, task.part.nodes_of
        self._fallbacks: set[Degrees] = set()
        self._ends: set[Plan] = set()
        self._seen: dict[Plan, float] = {}
        self._best: dict[tuple[int, int], float] = {}
        self._times: PlanTimes | None = None
        self._too_large: list[Plan] = []
        self._tried: set[Degrees] = set()
        self._failed: set[Degrees] = set()
        self._last: Degrees | None = None
        for line in record:
            self.add(line)

    def add(self, line: dict[str, Any]) -> None:
        """Adds a line of the record."""
        match line["kind"]:
            case "candidates":
                self._found(Candidates.of_values(line["found"]))
            case "measured":
                self._measured(Plan(**line["plan"]), line["step_s"], line["memory_bytes"], line["limit_bytes"])
            case "failed" if line["out_of_memory"]:
                self._too_large.append(Plan(**line["plan"]))
            case "failed":
                self._failed.add(degrees_of(Plan(**line["plan"])))

    @property
    def plans(self) -> list[Plan]:
        """All candidates."""
        return [plan for plans in self.candidates.plans.values() for plan in plans]

    def next(self) -> Plan | None:
        """The next plan to measure; None if no remaining plan is worth it.

        The smallest and largest batch of each kind of plan come first, because batches between are predicted from them.
        Among these, fallback plans come first, then fewer slots, from which more slots are predicted; on equally many
        slots first the degrees of the last plan, whose model is built, then the fastest prediction.
        """
        left = [plan for plan in self.plans if self.worth(plan)]
        if not left:
            return None
        chosen = degrees_of(min(left, key=self._turn))
        of_these = [plan for plan in left if degrees_of(plan) == chosen]
        plan = min(of_these, key=self._turn) if chosen in self._tried else of_these[0]
        self._last = chosen
        return plan

    def _turn(self, plan: Plan) -> tuple[bool, bool, int, bool, float]:
        degrees = degrees_of(plan)
        return (
            plan not in self._ends,
            degrees not in self._fallbacks,
            plan.gpus,
            degrees != self._last,
            self._ratio(plan),
        )

    def worth(self, plan: Plan) -> bool:
        """Whether the plan should still be measured: it may fit in memory, and it may be the fastest at its batch or is
        the first of its degrees.
        """
        degrees = degrees_of(plan)
        if plan in self._seen or degrees in self._failed or self._does_not_fit(plan):
            return False
        if not self._task.effort.every_batch and plan not in self._ends:
            return False
        known = degrees in self._tried and degrees not in self._fallbacks
        return not known or self._ratio(plan) <= HOPELESS

    def _found(self, candidates: Candidates) -> None:
        self.candidates = candidates
        self._fallbacks = {degrees_of(plans[0]) for plans in candidates.plans.values() if plans}
        batches: dict[Degrees, list[int]] = {}
        for plan in self.plans:
            batches.setdefault(degrees_of(plan), []).append(plan.global_batch)
        cut_once = set[Degrees]()
        for plan in self.plans:
            degrees = degrees_of(plan)
            smallest, largest = min(batches[degrees]), max(batches[degrees])
            first = plan.global_batch == smallest and (self._task.effort.every_batch or degrees not in cut_once)
            if first or plan.global_batch == largest > smallest:
                self._ends.add(plan)
                cut_once.add(degrees)

    def _measured(self, plan: Plan, step_s: float, memory_bytes: float, limit_bytes: float) -> None:
        """Adds a measured step time and memory. limit_bytes: of the device. A plan above the limit is not chosen, but
        others are predicted from it.
        """
        self._seen[plan] = step_s
        self._tried.add(degrees_of(plan))
        key = plan.gpus, plan.global_batch
        if memory_bytes <= self.memory_bytes:
            self._best[key] = min(step_s, self._best.get(key, inf))
        else:
            self._too_large.append(plan)
        self.memory_bytes = min(self.memory_bytes, limit_bytes)
        self._times = PlanTimes(
            [SeenPlan(each, self._nodes_of(each.gpus), took_s) for each, took_s in self._seen.items()]
        )

    def predicted(self) -> list[tuple[Plan, float]]:
        """For each number of slots and batch without a measurement: the plan with the fastest prediction, and its step
        time. A kind of plan that was never measured is used only if no other fits, because its prediction is too fast.
        """
        if self._times is None:
            return []
        kinds = {kind_of(plan) for plan in self._seen}
        found: dict[tuple[int, int], tuple[bool, float, Plan]] = {}
        for plan in self.plans:
            key, degrees = (plan.gpus, plan.global_batch), degrees_of(plan)
            if key in self._best or degrees in self._failed or self._does_not_fit(plan):
                continue
            unseen = kind_of(plan) not in kinds and degrees not in self._fallbacks
            ranked = unseen, self._step_s(plan), plan
            if key not in found or ranked[:2] < found[key][:2]:
                found[key] = ranked
        return [(plan, step_s) for _, step_s, plan in found.values()]

    def _step_s(self, plan: Plan) -> float:
        assert self._times is not None
        return self._times.step_s(plan, self._nodes_of(plan.gpus))

    def _ratio(self, plan: Plan) -> float:
        """Predicted step time ÷ the fastest measured on equally many slots at its batch; 0 if none was measured."""
        best_s = self._best.get((plan.gpus, plan.global_batch), inf)
        return 0.0 if best_s == inf else self._step_s(plan) / best_s

    def _does_not_fit(self, plan: Plan) -> bool:
        """Whether its weights and gradients alone exceed memory, or a plan that needs no more memory did not fit."""
        replicas = plan.data if plan.zero else 1
        if self.candidates.held_bytes > self.memory_bytes * plan.tensor * plan.pipeline * replicas:
            return True
        return any(_parts(each) == _parts(plan) and each.micro_batch <= plan.micro_batch for each in self._too_large)


def kind_of(plan: Plan) -> tuple[bool, ...]:
    """Which kinds of parallelism a plan uses besides replicas."""
    return plan.zero > 0, plan.tensor > 1, plan.pipeline > 1, plan.interleave > 1


def _parts(plan: Plan) -> tuple[int, ...]:
    """The degrees of a plan that determine how much memory a rank needs."""
    return plan.tensor, plan.pipeline, plan.interleave, plan.zero, plan.data if plan.zero else 1
