"""Which plans of a model are worth measuring, and in which order, as what was measured tells of what was not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from math import inf

import scipy.optimize  # noqa: F401  by `PlanTimes`; imported late it would hold up what is being measured

from synergy_core.jobs.testbed_profiles import Degrees, degrees_of
from synergy_core.planner.seen_plans import PlanTimes, SeenPlan
from synergy_exec.messages import PlanMessage

SLOWER = "cannot be the fastest, by what was measured of others"
MEMORY = "need more memory than there is"
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
        candidates: Mapping[int, list[list[PlanMessage]]],
        nodes_of: Callable[[int], int],
        *,
        hopeless: float,
        every_batch: bool = True,
        held_bytes: float = 0.0,
        memory_bytes: float = inf,
    ) -> None:
        self._nodes_of, self._hopeless, self._held_bytes = nodes_of, hopeless, held_bytes
        self._all = [plan for lists in candidates.values() for same in lists for plan in same]
        self._ends, self._middles = list[list[PlanMessage]](), list[list[PlanMessage]]()
        for same in (same for size in sorted(candidates) for same in candidates[size]):
            ends, middle = _ends_first(same, every_cut=every_batch)
            self._ends.append(ends)
            self._middles += [middle] if middle else []
        self._first = {degrees_of(lists[0][0].core) for lists in candidates.values() if lists}
        self._seen: dict[PlanMessage, float] = {}
        self._best: dict[tuple[int, int], float] = {}
        self._times: PlanTimes | None = None
        self._too_large: list[PlanMessage] = []
        self._failed: set[Degrees] = set()
        self.memory_bytes = memory_bytes
        self._left_out: dict[PlanMessage, str] = {}
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

    def next(self) -> list[PlanMessage] | None:
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

    def _turn(self, same: list[PlanMessage]) -> tuple[int, int]:
        """0 for what its slots fall back on, 1 for others; and the slots."""
        return int(degrees_of(same[0].core) not in self._first), same[0].world

    def worth(self, plan: PlanMessage) -> bool:
        """Whether it is to be measured: it may fit in memory, and may be the fastest at its batch or shows what its
        degrees do.
        """
        if self._does_not_fit(plan):
            return False
        degrees = degrees_of(plan.core)
        unknown = degrees not in {degrees_of(each.core) for each in self._seen}
        return degrees in self._first or unknown or self._ratio(plan) <= self._hopeless

    def leave_out(self, plan: PlanMessage) -> None:
        """It is not measured, unless it was."""
        if plan not in self._seen:
            self._left_out[plan] = MEMORY if self._does_not_fit(plan) else SLOWER

    def measured(self, plan: PlanMessage, step_s: float, *, fits: bool = True) -> None:
        """A step took so long. fits: in memory; else it tells of others and is none to be chosen."""
        self._seen[plan] = step_s
        key = plan.world, plan.global_batch
        if fits:
            self._best[key] = min(step_s, self._best.get(key, inf))
        else:
            self._too_large.append(plan)
        seen = [SeenPlan(each.core, self._nodes_of(each.world), took_s) for each, took_s in self._seen.items()]
        self._times = PlanTimes(seen)

    def failed(self, plan: PlanMessage, *, out_of_memory: bool) -> None:
        """It did not run: for lack of memory, or because its degrees do not, at any batch."""
        if out_of_memory:
            self._too_large.append(plan)
        else:
            self._failed.add(degrees_of(plan.core))

    def predicted(self) -> list[tuple[PlanMessage, float]]:
        """Where nothing was measured, by slots and batch: the plan that should be fastest, and seconds of its step; one
        of a kind that was never seen only where no other fits, for it is believed to be faster than it is.
        """
        if self._times is None:
            return []
        seen = {_kind(plan) for plan in self._seen}
        found: dict[tuple[int, int], tuple[bool, float, PlanMessage]] = {}
        for plan in self._all:
            key = plan.world, plan.global_batch
            if key in self._best or self._does_not_fit(plan) or self._has_failed(plan):
                continue
            unseen = _kind(plan) not in seen and degrees_of(plan.core) not in self._first
            ranked = unseen, self._step_s(plan), plan
            if key not in found or ranked[:2] < found[key][:2]:
                found[key] = ranked
        return [(plan, step_s) for _, step_s, plan in found.values()]

    def _step_s(self, plan: PlanMessage) -> float:
        assert self._times is not None
        return self._times.step_s(plan.core, self._nodes_of(plan.world))

    def _ratio(self, plan: PlanMessage) -> float:
        """Of its step to the fastest that was measured on as many slots at its batch; 0 where nothing was."""
        best_s = self._best.get((plan.world, plan.global_batch), inf)
        return 0.0 if best_s == inf else self._step_s(plan) / best_s

    def _has_failed(self, plan: PlanMessage) -> bool:
        """Whether it ran out of memory itself, or its degrees do not run."""
        return plan not in self._seen and (plan in self._too_large or degrees_of(plan.core) in self._failed)

    def _does_not_fit(self, plan: PlanMessage) -> bool:
        """Whether its share of weights and gradients alone is too much, or it holds no less than one that was."""
        replicas = plan.data if plan.zero else 1
        if self._held_bytes > self.memory_bytes * plan.tensor * plan.pipeline * replicas:
            return True
        return any(_parts(each) == _parts(plan) and each.micro_batch <= plan.micro_batch for each in self._too_large)


def _ends_first(same: list[PlanMessage], *, every_cut: bool) -> tuple[list[PlanMessage], list[PlanMessage]]:
    """Those of the smallest batch, in its first cut or every one, and of the largest; and the others."""
    smallest = min(map(_batch, same))
    first = [plan for plan in same if _batch(plan) == smallest]
    largest = [plan for plan in same if _batch(plan) == max(map(_batch, same)) > smallest]
    ends = [*(first if every_cut else first[:1]), *largest]
    return ends, [plan for plan in same if plan not in ends]


def _batch(plan: PlanMessage) -> int:
    return plan.global_batch


def _kind(plan: PlanMessage) -> tuple[bool, ...]:
    return plan.zero > 0, plan.tensor > 1, plan.pipeline > 1, plan.interleave > 1


def _parts(plan: PlanMessage) -> tuple[int, ...]:
    """What a rank holds of the model; where there are stages, of as many micro-batches at once as there are."""
    return plan.tensor, plan.pipeline, plan.interleave, plan.zero, plan.data if plan.zero else 1
