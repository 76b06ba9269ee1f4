"""Drivers say when the scheduler decides, on events (`OnEvents`) or in rounds (`Rounds`), and carry decisions out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Mapping
from math import floor
from typing import Any

from synergy_core.scheduling.decisions.leaving import Departures
from synergy_core.scheduling.decisions.reasons import Stopped, why_stopped
from synergy_core.scheduling.jobs.record import NEVER, Decision, Placed
from synergy_core.units import on_grid
from synergy_sim.engine import AFTER_ALL_ELSE, Call, Engine
from synergy_sim.execution import ExecutionModel, SimulatedJob


class OnEvents:
    """Decides when jobs arrive or end, and at the scheduler's own next change (`Scheduler.next_change_s`).

    There is one decision per instant, after all other events of that instant.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._pass_pending = False
        self._wake_s = NEVER
        self._departures = Departures()

    def begin(self) -> None:
        """Nothing to do: no decision is made before the first event."""

    def on_job_end(self, job: SimulatedJob) -> None:
        self._engine.scheduler.finish(job, self._engine.env.now)

    def on_event(self) -> None:
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
            if not self._stop_now(job, placed, now_s):
                left_already.add(job.job_id)
        for job, placed in decision.starts:
            if job.job_id in left_already:  # the job was to move, but had done its last step
                continue
            engine.occupy((job, placed, job.share))
            engine.run_from(job, max(now_s, self._departures.free_s(placed)))
        engine.note(decision, took_s)
        if left_already and any(job.job_id in left_already for job, _ in decision.starts):
            self.on_event()  # the GPUs to which the job was to move are free
        elif (change_s := engine.scheduler.next_change_s(now_s)) < NEVER:
            self._await_change(now_s, change_s)

    def _stop_now(self, job: SimulatedJob, placed: Placed, now_s: float) -> bool:
        """Stops the job; returns False if it had already done its last step and has ended instead.

        While it saves, its GPUs count as service of the job that has received them.
        """
        engine = self._engine
        if exit_s := job.costs.exit_s:
            self._departures.settle(now_s)
            self._departures.stop(job, placed, now_s, min(now_s, job.instants.end_s) + exit_s)
        if now_s >= job.instants.end_s:
            job.completion.cancel()
            engine.end(job)
            return False
        engine.vacate((job, why_stopped(placed, job.placement)))
        engine.break_off(job, now_s)
        return True

    def _await_change(self, now_s: float, change_s: float) -> None:
        """Schedules a decision at the scheduler's next change, unless a job arrives (and causes a decision) before.

        Changes that come before any other event and need no decision are applied immediately.
        """
        arrives_s, ask = self._engine.arrives_s, self._engine.scheduler.next_change_s
        asked_s, next_s = now_s, min(arrives_s, self._engine.env.peek())
        while asked_s < change_s < next_s:
            asked_s, change_s = change_s, ask(change_s)
        if change_s < arrives_s and (change_s < self._wake_s or self._wake_s <= now_s < change_s):
            self._wake_s = change_s
            Call(self._engine.env, change_s - now_s, self._wake, None)

    def _wake(self, _: Any) -> None:
        """Decides if a change is due now; a start or an end may have made the expected change obsolete."""
        now_s = self._engine.env.now
        if self._wake_s <= now_s:
            self._wake_s = NEVER
        change_s = self._engine.scheduler.next_change_s(now_s)
        if change_s <= now_s:
            self.on_event()
        elif change_s < NEVER:
            self._await_change(now_s, change_s)


SLACK = 1e-3
"""Tolerance, as a fraction of `refill_s`, for instants that were rounded to the grid of times."""


class Rounds:
    """Decides once per round, and stops and starts jobs as the round begins.

    The model follows the physical runs that Shockwave published (NSDI 2023, artifact: 8 nodes of 4 V100, rounds of
    120 s), to whose job completion times it was fitted (conf/testbed/shockwave_v100.yaml). Round r starts at S_r and
    lasts D. The jobs of round r + 1 are decided at S_r + h·D. A job that keeps its GPUs continues to train; any other
    stops at S_r + D (its *lease* ends), and its GPUs are free once it has saved and left. If n leases end, the next
    round starts σ(n) late. A new job starts as soon as its GPUs are free. With h = 1 and σ = 0, the scheduler decides
    at the end of each round, and decisions take effect immediately. A decision includes jobs that arrive at its time.

    If `refill_s` is set, the end of a job causes another decision at the next multiple of `refill_s`. Jobs that choose
    their batch are then simulated ahead only up to the next time at which a decision is possible.

    quotas: GPUs of tenants that may not borrow.
    """

    def __init__(self, engine: Engine, execution: ExecutionModel, round_s: float, quotas: Mapping[str, int]) -> None:
        self._engine = engine
        self._execution = execution
        self._round_s = round_s
        self._quotas = quotas
        self._arrived = engine.env.event()
        self._departures = Departures()
        self._freed = False

    def begin(self) -> None:
        self._engine.env.process(self._rounds())

    def on_event(self) -> None:
        if self._engine.active and not self._arrived.triggered:
            self._arrived.succeed()

    def on_job_end(self, job: SimulatedJob) -> None:
        """Reports the end to the scheduler, unless `_end_lease` has reported it already."""
        self._freed = True
        if job.running:
            self._engine.scheduler.finish(job, self._engine.env.now)

    def _rounds(self) -> Generator[Any, None, None]:
        """The process that decides, round by round, until the simulation ends."""
        engine, execution, round_s = self._engine, self._execution, self._round_s
        env = engine.env
        start_s = execution.start_delay_s
        decide_s = on_grid(round_s * execution.decide_fraction)
        if start_s > 0:
            yield env.timeout(start_s)
        yield engine.after_all_else()
        self._decide_and_carry_out(boundary_s=start_s)
        if not execution.refill_s:
            engine.look_ahead(start_s + decide_s)
        while True:
            if not engine.active:
                self._arrived = env.event()
                yield self._arrived
                start_s += max(0, floor((env.now - decide_s - start_s) / round_s)) * round_s
            while start_s + decide_s < env.now:
                start_s += round_s
            if execution.refill_s:
                yield from self._refill(start_s + decide_s)
            yield env.timeout(start_s + decide_s - env.now)
            yield engine.after_all_else()
            ended = self._decide_and_carry_out(boundary_s=start_s + round_s)
            start_s += round_s + execution.stretch_of(ended)
            if not execution.refill_s:
                engine.look_ahead(start_s + decide_s)

    def _refill(self, until_s: float) -> Generator[Any, None, None]:
        """Decides soon after each job's end, up to `until_s`."""
        engine, refill_s = self._engine, self._execution.refill_s
        env = engine.env
        while engine.active:
            next_s = on_grid((floor(env.now / refill_s + SLACK) + 1) * refill_s)
            engine.look_ahead(min(next_s, until_s))
            if next_s >= until_s:
                return
            yield env.timeout(next_s - env.now)
            yield engine.after_all_else()
            if self._freed and engine.active:
                self._decide_and_carry_out(boundary_s=env.now)

    def _decide_and_carry_out(self, *, boundary_s: float) -> int:
        """Decides now for the round after `boundary_s`; returns the number of leases that end there."""
        engine = self._engine
        decision, took_s = engine.decide(engine.env.now)
        self._freed = False
        done: set[int] = set()
        relocated = self._relocated(decision, boundary_s)
        for job, placed in decision.stops:
            if job.job_id in relocated:
                engine.vacate((job, Stopped.MOVED))
            elif not self._end_lease(job, placed, boundary_s):
                done.add(job.job_id)
        starts = [(job, placed) for job, placed in decision.starts if job.job_id not in done]
        self._departures.settle(engine.env.now)
        ended = len(decision.stops) - len(done)
        next_start_s = boundary_s + self._execution.stretch_of(ended)
        # A job's CPUs and memory may come from other jobs than its GPUs do, so all shares change at the same instant.
        shared_s = max(boundary_s, self._departures.all_left_s)
        within_quota_s = self._within_quota_s(starts)
        for job, placed in starts:
            if job.job_id in relocated:
                engine.occupy((job, placed, job.share))
            else:
                earliest_s = within_quota_s.get(job.request.virtual_cluster, 0.0)
                self._launch(job, placed, earliest_s, next_start_s, shared_s)
        for job in decision.retuned:
            if job.share is not None:
                engine.reshare(job, shared_s)
        engine.note(decision, took_s)
        engine.decisions.optimum(decision.objective, decision.bound)
        return ended

    def _relocated(self, decision: Decision[SimulatedJob], boundary_s: float) -> set[int]:
        """Ids of jobs that move to other GPUs now without any cost, so that they need not be stopped and launched."""
        stops: list[SimulatedJob] = [job for job, _ in decision.stops]
        now_s = self._engine.env.now
        if self._departures.all_left_s > now_s or boundary_s > now_s or self._execution.stretch_of(len(stops)) > 0:
            return set()
        if any(job.costs.exit_s > 0 for job in stops):
            return set()
        return {job.job_id for job in stops if job.running and job.work.only_relocates(job, boundary_s)}

    def _end_lease(self, job: SimulatedJob, placed: Placed, boundary_s: float) -> bool:
        """Stops the job at the boundary; returns False if it finishes by then, so that there is nothing to stop."""
        self._engine.look_ahead(boundary_s, [job])
        own = job.instants.end_s <= boundary_s and not (job.instants.end_s == boundary_s and job.ends_after_decision)
        stop_s = max(boundary_s, job.instants.began_s)  # a launch can wait for its GPUs longer than a round lasts
        free_s = (job.instants.end_s if own else stop_s) + job.costs.exit_s
        self._departures.stop(job, placed, max(self._engine.env.now, job.instants.began_s))
        self._departures.leave(job, free_s)
        if own:
            self._engine.scheduler.finish(job, free_s)
            self._engine.end_in_order(job)
            return False
        self._engine.at(free_s, self._engine.vacate, (job, why_stopped(placed, job.placement)))
        self._engine.break_off(job, stop_s)
        return True

    def _launch(
        self, job: SimulatedJob, placed: Placed, earliest_s: float, next_start_s: float, shared_s: float
    ) -> None:
        """Starts the job as soon as its GPUs are free; without early launches, not before its round begins.

        A job with a share starts when the shares of the round change. A job that starts a whole round late keeps its
        GPUs until its first step; otherwise, it could be stopped before that step in every round.
        """
        start_s = max(self._engine.env.now, earliest_s, self._departures.free_s(placed, job))
        if not self._execution.early_launch:
            start_s = max(start_s, next_start_s)
        if job.share is not None:
            start_s = max(start_s, shared_s)
        self._departures.launch(job, start_s)
        self._engine.at(start_s, self._engine.occupy, (job, placed, job.share))
        self._engine.run_from(job, start_s)
        if start_s >= next_start_s + self._round_s:
            job.instants.keeps_until_s = max(job.instants.keeps_until_s, job.instants.first_step_s)

    def _within_quota_s(self, starts: list[tuple[SimulatedJob, Placed]]) -> dict[str, float]:
        """By tenant with a quota, the instant at which enough of its stopped jobs have left for these starts."""
        if not self._quotas or not self._departures.all_left_s:
            return {}
        held_gpus = Counter[str]()
        for job in {**self._engine.launched, **{job.job_id: job for job, _ in starts}}.values():
            held_gpus[job.request.virtual_cluster] += job.held_gpus
        within_s = self._departures.within_quota_s
        return {name: within_s(name, held_gpus[name], quota) for name, quota in self._quotas.items()}
