"""Decisions as soon as something has happened: one per instant, after everything else that happens at it."""

from __future__ import annotations

from typing import Any

from synergy_core.jobs.record import NEVER, Placed
from synergy_sim.engine import AFTER_ALL_ELSE, Call, Engine
from synergy_sim.execution import SimulatedJob


class OnEvents:
    """Decides when jobs arrive or end, and when the scheduler wants to be asked again."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._pass_pending = False
        self._wake_s = NEVER
        self._vacated: list[tuple[float, int, int]] = []  # (until when, node, mask): a stopped job saves and leaves

    def begin(self) -> None:
        """Nothing is due before something happens."""

    def ended(self, job: SimulatedJob) -> None:
        self._engine.scheduler.finish(job, self._engine.env.now)

    def happened(self) -> None:
        if self._pass_pending:
            return
        env = self._engine.env
        if env.peek() > env.now:
            self._decide()
        else:
            self._pass_pending = True
            Call(env, 0.0, self._pass, None, AFTER_ALL_ELSE)

    def _pass(self, _: Any) -> None:
        self._pass_pending = False
        self._decide()

    def _decide(self) -> None:
        engine = self._engine
        now_s = engine.env.now
        decision, took_s = engine.decide(now_s)
        left_already: set[int] = set()
        for job, placed in decision.stops:
            if not self._stop_now(job, placed, now_s):  # type: ignore[arg-type]
                left_already.add(job.job_id)
        for job, placed in decision.starts:
            if job.job_id in left_already:  # it was to move, but was done
                continue
            engine.occupy((job, placed, job.share))  # type: ignore[arg-type]
            start_s = max(now_s, self._free_s(placed)) if self._vacated else now_s
            engine.run_from(job, start_s)  # type: ignore[arg-type]
        engine.note(decision, took_s)
        if left_already and any(job.job_id in left_already for job, _ in decision.starts):
            self.happened()  # the GPUs it was to move to are free
        elif (change_s := engine.scheduler.next_change_s(now_s)) < NEVER:
            self._await_change(now_s, change_s)

    def _stop_now(self, job: SimulatedJob, placed: Placed, now_s: float) -> bool:
        """The job gives its GPUs up; False if it was leaving anyway, and is done."""
        engine = self._engine
        exit_s = job.costs.exit_s
        if exit_s:
            self._vacated = [each for each in self._vacated if each[0] > now_s]
            self._vacated += [(min(now_s, job.end_s) + exit_s, node, mask) for node, mask in placed]
        if now_s >= job.end_s:
            job.completion.cancel()
            engine.end(job)
            return False
        engine.vacate(job)
        engine.break_off(job, now_s)
        return True

    def _free_s(self, placed: Placed) -> float:
        """When the last of the jobs that were stopped on these GPUs has saved and left."""
        ends = [until_s for until_s, at, left in self._vacated for node, mask in placed if node == at and mask & left]
        return max(ends, default=0.0)

    def _await_change(self, now_s: float, change_s: float) -> None:
        """Plans to wake at the change of a key, unless a job arrives first: an arrival leads to a decision anyway.

        Changes that come before any other event and call for no decision are applied at once.
        """
        arrives_s, ask = self._engine.arrives_s, self._engine.scheduler.next_change_s
        asked_s, next_s = now_s, min(arrives_s, self._engine.env.peek())
        while asked_s < change_s < next_s:
            asked_s, change_s = change_s, ask(change_s)
        if change_s < arrives_s and (change_s < self._wake_s or self._wake_s <= now_s < change_s):
            self._wake_s = change_s
            Call(self._engine.env, change_s - now_s, self._wake, None)

    def _wake(self, _: Any) -> None:
        """Decides if something is due; what was foreseen may have been overtaken, by a start or an end."""
        now_s = self._engine.env.now
        if self._wake_s <= now_s:
            self._wake_s = NEVER
        change_s = self._engine.scheduler.next_change_s(now_s)
        if change_s <= now_s:
            self.happened()
        elif change_s < NEVER:
            self._await_change(now_s, change_s)
