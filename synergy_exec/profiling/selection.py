"""Chooses which plans of a model to measure, and in which order: as few as possible, but among them the fastest."""

from __future__ import annotations

from math import inf

from synergy_core.performance.planner.plan import Plan
from synergy_core.scheduling.jobs.testbed_profiles import Degrees, PlanTimes, SeenPlan, degrees_of
from synergy_exec.plans import Candidates
from synergy_exec.profiling.machine import Part

HOPELESS = 1.5
"""A plan is not measured if its predicted step time is more than this many times the fastest measured at its batch."""


class Selection:
    """The plans of a model on slots of one type, and their measurements.

    Jobs fall back to the first plan for each number of slots, so it is always measured at its smallest and largest
    batch. every_batch: whether to measure batches between these, too. memory_bytes: memory of a slot; inf if unknown.
    """

    def __init__(self, part: Part, *, every_batch: bool, memory_bytes: float = inf) -> None:
        self.part, self.memory_bytes = part, memory_bytes
        self.candidates = Candidates({})
        self._every_batch, self._nodes_of = every_batch, part.nodes_of
        self._fallbacks: set[Degrees] = set()
        self._ends: set[Plan] = set()
        self._seen: dict[Plan, float] = {}
        self._best: dict[tuple[int, int], float] = {}
        self._times: PlanTimes | None = None
        self._too_large: list[Plan] = []
        self._tried: set[Degrees] = set()
        self._failed: set[Degrees] = set()
        self._last: Degrees | None = None

    def found(self, candidates: Candidates) -> None:
        """Keeps the candidates for the numbers of slots in `part.sizes`."""
        plans = {size: plans for size, plans in candidates.plans.items() if size in self.part.sizes}
        self.candidates = candidates._replace(plans=plans)
        self._fallbacks = {degrees_of(plans[0]) for plans in plans.values() if plans}
        batches: dict[Degrees, list[int]] = {}
        for plan in self.plans:
            batches.setdefault(degrees_of(plan), []).append(plan.global_batch)
        cut_once = set[Degrees]()
        for plan in self.plans:
            degrees = degrees_of(plan)
            smallest, largest = min(batches[degrees]), max(batches[degrees])
            first = plan.global_batch == smallest and (self._every_batch or degrees not in cut_once)
            if first or plan.global_batch == largest > smallest:
                self._ends.add(plan)
                cut_once.add(degrees)

    def measured(self, plan: Plan, step_s: float, memory_bytes: float, limit_bytes: float) -> None:
        """Adds a measured step time and memory. limit_bytes: memory of the device. A plan that needs more is not used,
        but other plans are predicted from it.
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

    def failed(self, plan: Plan, *, out_of_memory: bool) -> None:
        """Rules out plans after one failed: larger micro-batches if memory ran out, else all plans of its degrees."""
        if out_of_memory:
            self._too_large.append(plan)
        else:
            self._failed.add(degrees_of(plan))

    @property
    def plans(self) -> list[Plan]:
        """All candidates."""
        return [plan for plans in self.candidates.plans.values() for plan in plans]

    def next(self) -> Plan | None:
        """The next plan to measure; None if no remaining plan is worth it.

        The smallest and largest batch of all degrees come first, because batches between are predicted from them. Among
        these, fallback plans come first; then plans on fewer slots, from which plans on more are predicted; then plans
        with the degrees of the last plan, whose model is built; then the plan predicted fastest.
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
        """Whether to measure the plan: it may fit in memory, and either may be the fastest at its batch or has degrees
        that were not measured yet.
        """
        degrees = degrees_of(plan)
        if plan in self._seen or degrees in self._failed or self._does_not_fit(plan):
            return False
        if not self._every_batch and plan not in self._ends:
            return False
        known = degrees in self._tried and degrees not in self._fallbacks
        return not known or self._ratio(plan) <= HOPELESS

    def predicted(self) -> list[tuple[Plan, float]]:
        """The plan with the fastest prediction for each number of slots and batch without a measurement, and its step
        time. A plan whose `splits_of` was never measured is used only if no other fits: its prediction is too fast.
        """
        if self._times is None:
            return []
        measured = {splits_of(plan) for plan in self._seen}
        found: dict[tuple[int, int], tuple[bool, float, Plan]] = {}
        for plan in self.plans:
            key, degrees = (plan.gpus, plan.global_batch), degrees_of(plan)
            if key in self._best or degrees in self._failed or self._does_not_fit(plan):
                continue
            unseen = splits_of(plan) not in measured and degrees not in self._fallbacks
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
        """Whether the weights and gradients alone exceed memory, or a plan that needs no more memory did not fit."""
        replicas = plan.data if plan.zero else 1
        if self.candidates.held_bytes > self.memory_bytes * plan.tensor * plan.pipeline * replicas:
            return True
        return any(_parts(each) == _parts(plan) and each.micro_batch <= plan.micro_batch for each in self._too_large)


def splits_of(plan: Plan) -> tuple[bool, ...]:
    """Whether a plan uses ZeRO, tensor parallelism, pipeline stages, and interleaved stages."""
    return plan.zero > 0, plan.tensor > 1, plan.pipeline > 1, plan.interleave > 1


def _parts(plan: Plan) -> tuple[int, ...]:
    """The degrees of a plan that determine how much memory a rank needs."""
    return plan.tensor, plan.pipeline, plan.interleave, plan.zero, plan.data if plan.zero else 1
