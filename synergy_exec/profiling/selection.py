"""Which plans of a model are measured, and in which order: fewer than there are, without losing the fastest.

What was measured and what failed is kept in a file, a line of JSON each. The ranks that measure append to it, and
`Selection` reads it: a run that goes on where another one failed asks for the same plans in the same order.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from synergy_core.jobs.testbed_profiles import Degrees, PlanTimes, SeenPlan, degrees_of
from synergy_core.planner.plan import Plan
from synergy_exec.profiling.machine import Part

SLOWER = "cannot be the fastest, by what was measured of others"
TOO_LARGE = "need more memory than there is"
BETWEEN = "are of batches between those measured, and predicted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How carefully to measure.

    seconds: of training at each batch of each plan, and at least one step. hopeless: a plan predicted to take this many
    times as long as the fastest at its batch is not measured. every_batch: whether batches between the smallest and the
    largest are measured; otherwise they are predicted. noise_s: seconds of training, once per model, to see its
    gradient noise, and at least the steps before which it is unknown.
    """

    seconds: float = 3.0
    hopeless: float = 1.5
    every_batch: bool = True
    noise_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a measuring run is to do on the slots of one type; the launch names a file with it.

    plans: by number of slots, lists of plans that differ in the batch and its cut alone, so that one model takes them
    one after another. held_bytes: of weights and gradients, the least that all slots of a job hold together.
    memory_bytes: that a slot may use; `inf` without a limit. noise: whether gradient noise is measured, too.
    input_only: instead of plans, how the input of the first plan is prepared is measured, on one slot.
    """

    part: Part
    plans: Mapping[int, list[list[Plan]]]
    effort: Effort
    held_bytes: float = 0.0
    memory_bytes: float = inf
    noise: bool = False
    input_only: bool = False

    def write(self, path: Path) -> None:
        """Writes it as JSON."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")

    @staticmethod
    def read(path: Path) -> Task:
        """The task that `write` wrote."""
        values = json.loads(path.read_text(encoding="utf-8"))
        plans = {
            int(size): [[Plan(**each) for each in same_degrees] for same_degrees in lists]
            for size, lists in values.pop("plans").items()
        }
        part, effort = Part(**values.pop("part")), Effort(**values.pop("effort"))
        return Task(part=part, plans=plans, effort=effort, **values)


def record_of(task: Path) -> Path:
    """The file that a task's measurements are appended to."""
    return task.with_suffix(".jsonl")


class Selection:
    """The plans of one task that are still worth measuring.

    The first list of each number of slots is what a job falls back on; it is measured at both ends of its batches.
    memory_bytes: that a slot may use, as far as is known. left_out: plans that are not measured, with the reason.
    """

    def __init__(self, task: Task) -> None:
        self._nodes_of, self._hopeless = task.part.nodes_of, task.effort.hopeless
        self._held_bytes, self.memory_bytes = task.held_bytes, task.memory_bytes
        self._all = [plan for lists in task.plans.values() for same in lists for plan in same]
        self._ends, self._middles = list[list[Plan]](), list[list[Plan]]()
        self._first = {degrees_of(lists[0][0]) for lists in task.plans.values() if lists}
        self._current: list[Plan] = []
        self._seen: dict[Plan, float] = {}
        self._best: dict[tuple[int, int], float] = {}
        self._times: PlanTimes | None = None
        self._too_large: list[Plan] = []
        self._failed: set[Degrees] = set()
        self._left_out: dict[Plan, str] = {}
        for same in (same for size in sorted(task.plans) for same in task.plans[size]):
            ends, middle = _ends_first(same, every_cut=task.effort.every_batch)
            self._ends.append(ends)
            if task.effort.every_batch and middle:
                self._middles.append(middle)
            else:
                self._left_out |= dict.fromkeys(middle, BETWEEN)

    @staticmethod
    def after(task: Task, record: Iterable[Mapping[str, Any]]) -> Selection:
        """The selection after everything in the record of the task, which may end in the middle of a plan."""
        result = Selection(task)
        for line in record:
            if line["kind"] == "measured":
                result.next()
                result.measured(Plan(**line["plan"]), line["step_s"], line["memory_bytes"], line["limit_bytes"])
            elif line["kind"] == "failed":
                result.next()
                result.failed(Plan(**line["plan"]), out_of_memory=line["out_of_memory"])
        return result

    @property
    def plans(self) -> int:
        """How many candidates there are."""
        return len(self._all)

    @property
    def left_out(self) -> Counter[str]:
        """How many candidates are not measured, by reason."""
        return Counter(self._left_out.values())

    @property
    def undecided(self) -> int:
        """How many candidates were neither measured nor left out, and have not failed."""
        decided = {*self._seen, *self._left_out}
        return sum(plan not in decided and not self._has_failed(plan) for plan in self._all)

    def next(self) -> Plan | None:
        """The plan to measure now; None when nothing is left that is worth it.

        The smallest and the largest batch of each kind of plan come first, because they tell of those between; the
        others follow when there is time left. Among these come first the plans that a job falls back on, then the
        fewest slots, which tell of more; on as many slots, what promises most.
        """
        while True:
            while self._current:
                plan = self._current.pop(0)
                if self.worth(plan):
                    return plan
                if plan not in self._seen:
                    self._left_out[plan] = TOO_LARGE if self._does_not_fit(plan) else SLOWER
            waiting = self._ends or self._middles
            if not waiting:
                return None
            turn = min(map(self._turn, waiting))
            due = [each for each in waiting if self._turn(each) == turn]
            chosen = due[0] if turn[0] == 0 else min(due, key=lambda each: min(map(self._ratio, each)))
            waiting.remove(chosen)
            self._current = list(chosen)

    def _turn(self, same: list[Plan]) -> tuple[int, int]:
        """0 for what its slots fall back on, 1 for others; and the slots."""
        return int(degrees_of(same[0]) not in self._first), same[0].gpus

    def worth(self, plan: Plan) -> bool:
        """Whether the plan may fit in memory, and may be the fastest at its batch or shows what its degrees do."""
        if self._does_not_fit(plan):
            return False
        degrees = degrees_of(plan)
        unknown = degrees not in {degrees_of(each) for each in self._seen}
        return degrees in self._first or unknown or self._ratio(plan) <= self._hopeless

    def measured(self, plan: Plan, step_s: float, memory_bytes: float = 0.0, limit_bytes: float = inf) -> None:
        """A step took this long and a rank held so much. limit_bytes: of its device; a plan that used more than it may
        tells of others, and is not chosen itself.
        """
        self._seen[plan] = step_s
        key = plan.gpus, plan.global_batch
        if memory_bytes <= self.memory_bytes:
            self._best[key] = min(step_s, self._best.get(key, inf))
        else:
            self._too_large.append(plan)
        self.memory_bytes = min(self.memory_bytes, limit_bytes)
        self._times = PlanTimes(
            [SeenPlan(each, self._nodes_of(each.gpus), took_s) for each, took_s in self._seen.items()]
        )

    def failed(self, plan: Plan, *, out_of_memory: bool) -> None:
        """The plan did not run: for lack of memory, or because its degrees do not run at any batch."""
        if out_of_memory:
            self._too_large.append(plan)
        else:
            self._failed.add(degrees_of(plan))
            self._current.clear()

    def predicted(self) -> list[tuple[Plan, float]]:
        """For each number of slots and batch where nothing was measured: the plan that should be fastest, and seconds
        of its step. A kind of plan that was never seen is taken only where no other fits, because it is predicted to be
        faster than it is.
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
        """Predicted time of its step ÷ the fastest measured on as many slots at its batch; 0 where nothing was."""
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
    """The plans of the smallest batch, in its first cut or every one, and of the largest; and the others."""
    batches = [plan.global_batch for plan in same]
    smallest, largest = min(batches), max(batches)
    first = [plan for plan in same if plan.global_batch == smallest]
    last = [plan for plan in same if plan.global_batch == largest > smallest]
    ends = [*(first if every_cut else first[:1]), *last]
    return ends, [plan for plan in same if plan not in ends]


def _kind(plan: Plan) -> tuple[bool, ...]:
    return plan.zero > 0, plan.tensor > 1, plan.pipeline > 1, plan.interleave > 1


def _parts(plan: Plan) -> tuple[int, ...]:
    """What a rank holds of the model; where there are stages, of as many micro-batches at once as there are."""
    return plan.tensor, plan.pipeline, plan.interleave, plan.zero, plan.data if plan.zero else 1
