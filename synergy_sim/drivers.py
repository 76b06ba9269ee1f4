"""When the scheduler decides and how it is carried out: on events (`OnEvents`), or once per round (`Rounds`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Mapping
from math import floor
from typing import Any, NamedTuple

from synergy_core.errors import InputError
from synergy_core.jobs.record import NEVER, Decision, Placed, gpus_in
from synergy_core.scheduling.reasons import Stopped, why_stopped
from synergy_core.units import on_grid
from synergy_sim.engine import AFTER_ALL_ELSE, Call, Engine
from synergy_sim.execution import ExecutionModel, SimulatedJob


class OnEvents:
    """Decides when jobs arrive or end, and when the scheduler wants to be asked again.

    There is one decision per instant, after everything else that happens at it.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._pass_pending = False
        self._wake_s = NEVER
        self._vacated: list[tuple[float, int, int]] = []  # (until when, node, mask): a stopped job saves and leaves

    def begin(self) -> None:
        """No decision is due before an event."""

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
            if job.job_id in left_already:  # it was to move, but was done
                continue
            engine.occupy((job, placed, job.share))
            start_s = max(now_s, self._free_s(placed)) if self._vacated else now_s
            engine.run_from(job, start_s)
        engine.note(decision, took_s)
        if left_already and any(job.job_id in left_already for job, _ in decision.starts):
            self.on_event()  # the GPUs it was to move to are free
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
        engine.vacate((job, why_stopped(placed, job.placement)))
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
            self.on_event()
        elif change_s < NEVER:
            self._await_change(now_s, change_s)


MAX_IDLE_ROUNDS = 10_000
SLACK = 1e-3
"""Tolerance, as a fraction of `refill_s`, for instants that were rounded onto the grid of times."""


class Leaving(NamedTuple):
    """GPUs that a job still holds while it saves: until when, which ones, and how many of which tenant."""

    free_s: float
    placed: Placed
    gpus: int
    virtual_cluster: str


class Rounds:
    """Decides once per round, and ends leases and launches jobs as the round begins.

    The model follows the physical runs that Shockwave published (NSDI 2023, artifact: 8 nodes of 4 V100, rounds of
    120 s), to whose job completion times it was fitted (conf/testbed/shockwave_v100.yaml). Round r starts at S_r and
    lasts D. What runs in round r + 1 is decided at S_r + h·D. A job that keeps its GPUs trains on; any other stops at
    S_r + D, and its GPUs are free once it has saved and left. The next round starts σ(leases that ended) late. A new
    job starts as soon as its GPUs are free. With h = 1 and σ = 0 this is a plain tick: decide at the end of a round,
    carry out at once. A job that arrives at the very instant of a decision is seen by it, whether or not others run.

    With `refill_s` a job's end brings a tick of its own, at the next multiple of so many seconds: jobs that choose
    their batch are run ahead up to the next instant at which anything may be decided.

    quotas: the GPUs of tenants that may not borrow. What is promised to a tenant is held by its jobs, or about to be.
    """

    def __init__(self, engine: Engine, execution: ExecutionModel, round_s: float, quotas: Mapping[str, int]) -> None:
        self._engine = engine
        self._execution = execution
        self._round_s = round_s
        self._quotas = quotas
        self._arrived = engine.env.event()
        self._leaving: list[Leaving] = []
        self._promised_gpus: Counter[str] = Counter()
        self._freed = False

    def begin(self) -> None:
        self._engine.env.process(self._rounds())

    def on_event(self) -> None:
        if self._engine.active and not self._arrived.triggered:
            self._arrived.succeed()

    def on_job_end(self, job: SimulatedJob) -> None:
        """The scheduler may know already that the job's last round was its last."""
        self._freed = True
        if job.running:
            self._engine.scheduler.finish(job, self._engine.env.now)
            self._promised_gpus[job.virtual_cluster] -= job.on_gpus

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
        idle = 0
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
            idle = 0 if engine.running or not engine.active else idle + 1
            if idle == MAX_IDLE_ROUNDS:
                raise InputError(
                    f"{engine.active} jobs wait, and for {idle:,} rounds the policy has given none of them a GPU; "
                    "do its parameters allow it to?"
                )
            start_s += round_s + execution.stretch_of(ended)
            if not execution.refill_s:
                engine.look_ahead(start_s + decide_s)

    def _refill(self, until_s: float) -> Generator[Any, None, None]:
        """Up to that instant: decides soon after each job's end."""
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
        """Decides now for the round after `boundary_s`; returns how many leases end there."""
        engine = self._engine
        decision, took_s = engine.decide(engine.env.now)
        self._freed = False
        self._leaving = [each for each in self._leaving if each.free_s > engine.env.now]
        done: set[int] = set()
        relocated = self._relocated(decision, boundary_s)
        for job, placed in decision.stops:
            if job.job_id in relocated:
                engine.vacate((job, Stopped.MOVED))
            elif not self._end_lease(job, placed, boundary_s):
                done.add(job.job_id)
        starts = [(job, placed) for job, placed in decision.starts if job.job_id not in done]
        for job, _ in starts:
            if job.job_id not in relocated:
                self._promised_gpus[job.virtual_cluster] += job.held_gpus
        ended = len(decision.stops) - len(done)
        next_start_s = boundary_s + self._execution.stretch_of(ended)
        # A job's CPUs and memory can come from others than those on whose GPUs it goes: they change hands all at once.
        shared_s = max([boundary_s, *(each.free_s for each in self._leaving)])
        for job, placed in starts:
            if job.job_id in relocated:
                engine.occupy((job, placed, job.share))
            else:
                self._launch(job, placed, next_start_s, shared_s)
        for job in decision.retuned:
            if job.share is not None:
                engine.reshare(job, shared_s)
        engine.note(decision, took_s)
        engine.decisions.optimum(decision.objective, decision.bound)
        return ended

    def _relocated(self, decision: Decision[SimulatedJob], boundary_s: float) -> set[int]:
        """Jobs that go on elsewhere at this very instant as if nothing had happened: most of those that mechanisms
        place anew in every round. They need not be stopped and launched.
        """
        stops: list[SimulatedJob] = [job for job, _ in decision.stops]
        if self._leaving or boundary_s > self._engine.env.now or self._execution.stretch_of(len(stops)) > 0:
            return set()
        if any(job.costs.exit_s > 0 for job in stops):
            return set()
        return {job.job_id for job in stops if job.running and job.only_relocates(boundary_s)}

    def _end_lease(self, job: SimulatedJob, placed: Placed, boundary_s: float) -> bool:
        """Has the job leave its GPUs at the boundary; False if it is done before, and only keeps them until then."""
        self._engine.look_ahead(boundary_s, [job])
        gpus = gpus_in(placed)
        own = job.end_s <= boundary_s and not (job.end_s == boundary_s and job.ends_after_decision)
        stop_s = max(boundary_s, job.began_s)  # a launch can wait for its GPUs longer than a round lasts
        job.free_s = (job.end_s if own else stop_s) + job.costs.exit_s
        if job.free_s > self._engine.env.now:
            self._leaving.append(Leaving(job.free_s, placed, gpus, job.virtual_cluster))
        self._promised_gpus[job.virtual_cluster] -= gpus
        job.attained_service_gpu_s += gpus * (job.free_s - max(self._engine.env.now, job.began_s))
        job.settled_s = job.free_s
        if own:
            self._engine.scheduler.finish(job, job.free_s)
            self._engine.end_in_order(job)
            return False
        self._engine.at(job.free_s, self._engine.vacate, (job, why_stopped(placed, job.placement)))
        self._engine.break_off(job, stop_s)
        return True

    def _launch(self, job: SimulatedJob, placed: Placed, next_start_s: float, shared_s: float) -> None:
        """Has the job start when its GPUs are free and, where launches may not be early, no sooner than the round; one
        with a share, when those of the round change hands.

        Where that is so late that it could be stopped before it has begun, round after round, it keeps its GPUs up to
        its first step.
        """
        start_s = max(self._engine.env.now, job.free_s)
        if self._leaving:
            wanted = dict(placed)
            for each in self._leaving:
                if any(wanted.get(node, 0) & mask for node, mask in each.placed):
                    start_s = max(start_s, each.free_s)
            start_s = max(start_s, self._quota_free_s(job.virtual_cluster))
        if not self._execution.early_launch:
            start_s = max(start_s, next_start_s)
        if job.share is not None:
            start_s = max(start_s, shared_s)
        job.settled_s = job.began_s = start_s
        if not job.restarts:
            job.first_start_s = start_s
        self._engine.at(start_s, self._engine.occupy, (job, placed, job.share))
        self._engine.run_from(job, start_s)
        if start_s >= next_start_s + self._round_s:
            job.keeps_until_s = max(job.keeps_until_s, job.first_step_s)

    def _quota_free_s(self, virtual_cluster: str) -> float:
        """When enough of the tenant's jobs have left that all it was promised is within its quota."""
        quota = self._quotas.get(virtual_cluster)
        if quota is None:
            return 0.0
        leaving = sorted((each.free_s, each.gpus) for each in self._leaving if each.virtual_cluster == virtual_cluster)
        over = self._promised_gpus[virtual_cluster] + sum(gpus for _, gpus in leaving) - quota
        within_s = 0.0
        for free_s, gpus in leaving:
            if over <= 0:
                break
            over -= gpus
            within_s = free_s
        return within_s
