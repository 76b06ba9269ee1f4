"""The clock: a discrete-event simulation on SimPy. The only file that imports it.

One process feeds arrivals, one pending at a time; a completion is a one-shot `Call` that can be cancelled; everything
that happens at one instant is followed by one decision. Ordering policies decide when something happened; with a
round, decisions come once per round (`rounds.py`).
"""

from __future__ import annotations

import gc
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import numpy as np
import simpy

from synergy_core.allocation import AllocationScheduler
from synergy_core.cluster import Cluster
from synergy_core.decision import Decision
from synergy_core.errors import InputError
from synergy_core.planner import tables
from synergy_core.policies import OrderingPolicy, Policy
from synergy_core.scheduler import scheduler_for
from synergy_core.state import NEVER, Allocations, ClusterState, Placed, gpus_in
from synergy_core.units import on_grid
from synergy_runs.fit import check_fit
from synergy_runs.log import DecisionLog, EventLog, Kind, Run, truth_read_by
from synergy_runs.workload import Workload
from synergy_sim.execution import Costs, ExecutionModel, SimulatedJob
from synergy_sim.ground_truth import Application, Truth
from synergy_sim.planned_job import PlannedJob, ProfiledJob
from synergy_sim.rounds import Leaving, rounds
from synergy_sim.training import TrainingJob

SUBMIT, STOP, FINISH = int(Kind.SUBMIT), int(Kind.STOP), int(Kind.FINISH)
AFTER_ALL_ELSE = 2  # SimPy's own priorities are 0 (urgent) and 1 (normal)
AFTER_DECISIONS = 3
DECISIONS_PER_PROGRESS = 2_000
MOST_IN_VAIN = 100_000

Progress = Callable[[float, int], None]
"""Called now and then with (simulated seconds, jobs done)."""


class Call(simpy.Event):
    """Calls a function once, at an instant; `cancel` makes it do nothing."""

    def __init__(
        self, env: simpy.Environment, delay_s: float, function: Callable[[Any], None], argument: Any, priority: int = 1
    ) -> None:
        self.env = env
        self.callbacks = [function]
        self._ok = True
        self._value = argument
        env.schedule(self, priority, delay_s)  # type: ignore[arg-type]

    def cancel(self) -> None:
        """Nothing will be called. The event stays in SimPy's heap until its time."""
        if self.callbacks is not None:
            self.callbacks.clear()


class Simulation:
    """One policy on one workload and one cluster; `run` once."""

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        policy: Policy,
        execution: ExecutionModel,
        truth: Truth | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.workload = workload
        self.cluster = cluster
        self.execution = execution
        self.truth = truth
        self._tunes_batch = not isinstance(policy, OrderingPolicy) and policy.tunes_batch
        self._asks_progress = not isinstance(policy, OrderingPolicy) and policy.reads_goodput
        self.training: dict[int, TrainingJob] = {}
        self.env = simpy.Environment()
        profile = None if truth is None else truth.profile
        self.scheduler = scheduler_for(policy, cluster, free_moves=execution.free_moves, profile=profile)
        self.event_driven = isinstance(policy, OrderingPolicy) and execution.round_s is None
        own_round_s = 0.0 if isinstance(policy, OrderingPolicy) else policy.round_s
        own = own_round_s if execution.own_rounds or execution.round_s is None else 0.0
        self.round_s = on_grid(own) or execution.round_s or 0.0
        self._type_of_node = [each.gpu_type for each in cluster.node_types for _ in range(each.nodes)]
        self._gpus_per_node = {each.gpu_type: each.gpus_per_node for each in reversed(cluster.node_types)}
        self.log = EventLog()
        self.decisions = DecisionLog()
        self.progress = progress
        self.active = 0
        self.running = 0
        self.gpus_used = 0
        self.done = 0
        self._all_done = self.env.event()
        self.arrived = self.env.event()
        self._pass_pending = False
        self._wake_s = NEVER
        self._most_in_vain = MOST_IN_VAIN + len(workload)
        self._in_vain = 0  # runs broken off, one after another, before they got anything done
        self._vacated: list[tuple[float, int, int]] = []
        self.leaving: list[Leaving] = []
        self.promised_gpus: Counter[str] = Counter()
        self.quotas = {} if cluster.borrowing else cluster.virtual_clusters
        self.predicted_s = np.full(len(workload), np.nan) if policy.predicted else None

    def run(self) -> None:
        """Simulates until every job has ended."""
        self.env.process(self._arrivals())
        if not self.event_driven:
            self.env.process(rounds(self))
        self.env.run(until=self._all_done)

    def run_until(self, at_s: float, job_id: int) -> tuple[ClusterState, Allocations] | None:
        """Simulates up to the first round from `at_s` on that decides on the job, instead of `run`; None if none does.

        Only for policies that allocate.
        """
        scheduler = self.scheduler
        assert isinstance(scheduler, AllocationScheduler)
        self.env.process(self._arrivals())
        self.env.process(rounds(self))
        seen = None
        while not self._all_done.triggered:
            self.env.step()
            if scheduler.last is not seen:
                seen = scheduler.last
                if seen is not None and seen[0].now_s >= at_s and job_id in seen[0].job_id:
                    return seen
        return None

    # Arrivals

    def _jobs(self) -> Iterator[SimulatedJob]:
        """The workload's rows as jobs, one at a time."""
        work = self.workload
        columns = (work.submit_time_s, work.gpus, work.duration_s, work.estimate_s)
        codes = (work.virtual_cluster_code, work.user_code, work.gpu_type_code, work.model_code)
        tenants, users, kinds, models = work.virtual_clusters, work.users, work.gpu_types, work.models
        costs = [self._costs_of(model) for model in models]
        trained = [] if self.truth is None else np.flatnonzero(np.isfinite(work.work_scale)).tolist()
        is_trained = set(trained)
        chunk = 4_096
        for first in range(0, len(work), chunk):
            rows = zip(*(column[first : first + chunk].tolist() for column in (*columns, *codes)), strict=True)
            for job_id, (submit_s, gpus, duration_s, estimate_s, tenant, user, kind, model) in enumerate(rows, first):
                if job_id in is_trained:
                    yield self._training_job(job_id, costs[model])
                    continue
                yield SimulatedJob(
                    job_id,
                    submit_s,
                    gpus,
                    duration_s,
                    costs[model],
                    virtual_cluster=tenants[tenant],
                    user=users[user],
                    gpu_type=kinds[kind],
                    estimate_s=estimate_s,
                )

    def _costs_of(self, model: str) -> Costs:
        if self.truth is not None and model in self.truth.profile:
            return self.execution.costs_as_measured(model, self.truth.profile[model].costs)
        if self.truth is not None and self.truth.plans(model):
            return self.execution.costs_of_checkpoint(model, tables.model_named(model).checkpoint_bytes)
        return self.execution.costs_of(model)

    def _training_job(self, job_id: int, costs: Costs) -> TrainingJob:
        """A row whose speed depends on what it is given."""
        work, truth, cluster = self.workload, self.truth, self.cluster
        assert truth is not None
        model = work.models[work.model_code[job_id]]
        make: type[TrainingJob]
        app: Application
        if truth.plans(model):
            make = ProfiledJob if model in truth.profile else PlannedJob
            app = truth.planned_application(
                model, int(work.global_batch[job_id]), cluster, float(work.work_scale[job_id])
            )
        else:
            make, app = TrainingJob, truth.application(model)
        return make(
            job_id,
            float(work.submit_time_s[job_id]),
            int(work.gpus[job_id]),
            float(work.duration_s[job_id]),
            costs,
            spec=truth.spec(work, job_id, cluster, costs),
            application=app,
            work_scale=float(work.work_scale[job_id]),
            slowdown=truth.slowdown.get(model, 1.0),
            # Of work that was scaled to a traced run time, epochs can be so short that all of them round to nothing.
            whole_seconds=self.execution.whole_seconds and work.work_scale[job_id] == 1.0,
            tunes_batch=self._tunes_batch,
            type_of_node=self._type_of_node,
            gpus_per_node=self._gpus_per_node,
            disturbance=truth.disturbance,
            virtual_cluster=work.virtual_clusters[work.virtual_cluster_code[job_id]],
            user=work.users[work.user_code[job_id]],
            gpu_type=work.gpu_types[work.gpu_type_code[job_id]],
            estimate_s=float(work.estimate_s[job_id]),
        )

    def _arrivals(self) -> Generator[simpy.Event, None, None]:
        env, arrive, log = self.env, self.scheduler.arrive, self.log.append
        now_s = 0.0
        predicted_s = self.predicted_s
        for job in self._jobs():
            if job.submit_time_s > now_s:
                if self.active:
                    self._something_happened()
                yield env.timeout(job.submit_time_s - now_s)
                now_s = job.submit_time_s
            self.active += 1
            log(now_s, SUBMIT, job.job_id, job.gpus)
            arrive(job)
            if predicted_s is not None:
                predicted_s[job.job_id] = job.predicted_duration_s
        self._something_happened()

    # Completions

    def _finish(self, event: Any) -> None:
        self._end(event.value)
        self._something_happened()

    def _end(self, job: SimulatedJob) -> None:
        """The job is done and holds nothing from now on."""
        job.completion = None
        now_s = self.env.now
        gpus = job.on_gpus
        self.log.append(now_s, FINISH, job.job_id, gpus)
        self.training.pop(job.job_id, None)
        if self.event_driven or job.running:  # the scheduler may know already that its last round was its last
            self.scheduler.finish(job, now_s)
            if not self.event_driven:
                self.promised_gpus[job.virtual_cluster] -= gpus
        self.running -= 1
        self.gpus_used -= gpus
        self.active -= 1
        self.done += 1
        self._in_vain = 0
        if self.done == len(self.workload):
            self._all_done.succeed()

    # One decision per instant, after everything else that happens at it

    def _something_happened(self) -> None:
        if not self.event_driven:
            if self.active and not self.arrived.triggered:
                self.arrived.succeed()
        elif not self._pass_pending:
            if self.env.peek() > self.env.now:
                self._decide_now()
            else:
                self._pass_pending = True
                Call(self.env, 0.0, self._pass, None, AFTER_ALL_ELSE)

    def _pass(self, _: Any) -> None:
        self._pass_pending = False
        self._decide_now()

    def _decide_now(self) -> None:
        now_s = self.env.now
        decision, took_s = self.decide(now_s)
        left_already: set[int] = set()
        for job, placed in decision.stops:
            if not self._stop_now(job, placed, now_s):  # type: ignore[arg-type]
                left_already.add(job.job_id)
        for job, placed in decision.starts:
            if job.job_id in left_already:  # it was to move, but was done
                continue
            self.occupy((job, placed))  # type: ignore[arg-type]
            start_s = max(now_s, self._free_s(placed)) if self._vacated else now_s
            self.run_from(job, start_s)  # type: ignore[arg-type]
        self.note(decision, took_s)
        change_s = self.scheduler.next_change_s()
        if change_s < NEVER:
            self._wake_for_change(now_s, change_s)
        if left_already and any(job.job_id in left_already for job, _ in decision.starts):
            self._something_happened()  # the GPUs it was to move to are free

    def decide(self, now_s: float) -> tuple[Decision, float]:
        """The scheduler's decision, and the seconds it took."""
        if self._asks_progress:
            for job in self.training.values():
                job.report(now_s)
        began = time.perf_counter()
        decision = self.scheduler.decide(now_s)
        return decision, time.perf_counter() - began

    def note(self, decision: Decision, took_s: float) -> None:
        """Logs the decision, once it is carried out; reports progress now and then."""
        now_s = self.env.now
        log = self.decisions
        started, stopped = len(decision.starts), len(decision.stops)
        log.append(now_s, took_s, started, stopped, self.running, self.scheduler.waiting, self.gpus_used)
        if not self.event_driven:
            log.optimum(decision.objective, decision.bound)
        if self.progress is not None and len(log) % DECISIONS_PER_PROGRESS == 0:
            self.progress(now_s, self.done)

    def at(self, instant_s: float, function: Callable[[Any], None], argument: Any) -> None:
        """Calls the function at that instant, at once if it has come."""
        if instant_s <= self.env.now:
            function(argument)
        else:
            Call(self.env, instant_s - self.env.now, lambda event: function(event.value), argument)

    def after_all_else(self) -> simpy.Event:
        """An event after everything else that happens at this instant."""
        return Call(self.env, 0.0, _nothing, None, AFTER_ALL_ELSE)

    def occupy(self, what: tuple[SimulatedJob, Placed]) -> None:
        """The job holds these GPUs from now on."""
        job, placed = what
        job.on_gpus = gpus_in(placed)
        self.log.start(self.env.now, job.job_id, job.on_gpus, placed)
        self.running += 1
        self.gpus_used += job.on_gpus

    def vacate(self, job: SimulatedJob) -> None:
        """The job holds nothing from now on, and is not done."""
        self.log.append(self.env.now, STOP, job.job_id, job.on_gpus)
        self.running -= 1
        self.gpus_used -= job.on_gpus

    def run_from(self, job: SimulatedJob, start_s: float) -> None:
        """The job's GPUs are its own from `start_s` on, now or later; its end is fixed unless it is stopped."""
        job.carry_on(start_s)
        if isinstance(job, TrainingJob):
            self.training[job.job_id] = job
        if job.end_s < NEVER:
            self._complete_later(job)

    def _complete_later(self, job: SimulatedJob) -> None:
        """Its end is known. One that the truth has after this instant, though rounded to it, comes after decisions."""
        late = isinstance(job, TrainingJob) and job.ends_after_decision
        delay_s = job.end_s + job.costs.exit_s - self.env.now
        job.completion = Call(self.env, delay_s, self._finish, job, AFTER_DECISIONS if late else 1)

    def end_in_order(self, job: SimulatedJob) -> None:
        """A decision has given its GPUs away as of its end, which so comes before all that starts at that very instant.

        Where that instant is the present one, the next to start is about to: the job is done at once.
        """
        if not job.ends_after_decision:
            return
        job.ends_after_decision = False
        job.completion.cancel()
        if job.end_s + job.costs.exit_s <= self.env.now:
            self._end(job)
        else:
            self._complete_later(job)

    def look_ahead(self, until_s: float, jobs: Iterable[TrainingJob] | None = None) -> None:
        """Training jobs that tune their batch run up to `until_s`, before which nothing is decided.

        Those whose models are out of date are fitted together, and go on.
        """
        if not self._tunes_batch:
            return
        pending = list(self.training.values()) if jobs is None else list(jobs)
        while pending:
            halted = [job for job in pending if not job.look_ahead(until_s)]
            for job in pending:
                if job.end_s < NEVER and job.completion is None:
                    self._complete_later(job)
            if halted:
                self.scheduler.refresh(halted)
            pending = halted

    def break_off(self, job: SimulatedJob, stop_s: float) -> None:
        """The job's training ends at `stop_s`, now or later, before it is done; it waits unless it moves."""
        if job.completion is not None:
            job.completion.cancel()
            job.completion = None
        self.training.pop(job.job_id, None)
        self._in_vain = 0 if job.break_off(stop_s) else self._in_vain + 1
        if self._in_vain > self._most_in_vain:
            raise InputError(
                f"the last {self._in_vain:,} runs were each broken off before anything was done: {job.gpus}-GPU job "
                f"{job.job_id} needs {job.delay_s():g} s from its GPUs to its first step, and a checkpoint every "
                f"{job.costs.checkpoint_interval_s:g} s (0: whenever it is stopped). Let jobs start sooner (restart_s, "
                "testbed.launch_s, testbed.checkpoint_interval_s) or run longer (round_s, a quantum or limits under "
                "parameters)."
            )
        if not job.running:
            self.scheduler.requeue(job)

    def _stop_now(self, job: SimulatedJob, placed: Placed, now_s: float) -> bool:
        """The job gives its GPUs up; False if it was leaving anyway, and is done."""
        exit_s = job.costs.exit_s
        if exit_s:
            self._vacated = [each for each in self._vacated if each[0] > now_s]
            self._vacated += [(min(now_s, job.end_s) + exit_s, node, mask) for node, mask in placed]
        if now_s >= job.end_s:
            job.completion.cancel()
            self._end(job)
            return False
        self.vacate(job)
        self.break_off(job, now_s)
        return True

    def _free_s(self, placed: Placed) -> float:
        """When the last of the jobs that were stopped on these GPUs has saved and left."""
        ends = [until_s for until_s, at, left in self._vacated for node, mask in placed if node == at and mask & left]
        return max(ends, default=0.0)

    def _wake_for_change(self, now_s: float, change_s: float) -> None:
        if change_s < self._wake_s or self._wake_s <= now_s < change_s:
            self._wake_s = change_s
            Call(self.env, change_s - now_s, self._wake, None)

    def _wake(self, _: Any) -> None:
        if self._wake_s <= self.env.now:
            self._wake_s = NEVER
        self._something_happened()


def simulate(
    workload: Workload,
    cluster: Cluster,
    policy: Policy,
    execution: ExecutionModel | None = None,
    *,
    truth: Truth | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Run:
    """Runs one policy to the end of the workload and returns the facts.

    Raises InputError where some job can never run on the cluster (see `check_fit`).
    """
    check_fit(workload, cluster)
    simulation = Simulation(workload, cluster, policy, execution or ExecutionModel(), truth, progress)
    truth_read = truth_read_by(policy, workload)
    collecting = gc.isenabled()
    gc.disable()  # jobs and events are freed by reference counts; a full collection only costs
    began_s = time.process_time()
    try:
        simulation.run()
    except Exception as error:
        error.add_note(f"while simulating policy {policy.name}, at {simulation.env.now:.0f} s of {workload.name}")
        raise
    finally:
        if collecting:
            gc.enable()
    predicted_s = simulation.predicted_s
    return Run(
        policy=policy.name,
        oracle=bool(truth_read),
        truth_read=truth_read,
        seed=seed,
        workload=workload,
        cluster=cluster,
        events=simulation.log.events(),
        decisions=simulation.decisions.decisions(),
        predicted_duration_s=np.full(len(workload), np.nan) if predicted_s is None else predicted_s,
        simulation_cpu_s=time.process_time() - began_s,
        peak_memory_bytes=peak_memory_bytes(),
        information=policy.information if not isinstance(policy, OrderingPolicy) and policy.reads_goodput else "",
    )


def _nothing(_: Any) -> None:
    """For events that only mark an instant."""


def peak_memory_bytes() -> int:
    """The high-water mark of this process's resident memory."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) if sys.platform == "darwin" else int(peak) * 1024
