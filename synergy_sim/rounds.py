"""Decisions once per round: leases that extend without a restart, and rounds that wait for those that end.

The model is that of shared/research/fidelity.md, section 1, measured on physical runs. Round r starts at S_r and lasts
D. What runs in round r + 1 is decided at S_r + h·D. A job that keeps its GPUs trains on; any other stops at S_r + D,
and its GPUs are free once it has saved and left. The next round starts σ(leases that ended) late. A new job starts as
soon as its GPUs are free. With h = 1 and σ = 0 this is a plain tick: decide at the end of a round, carry out at once.
"""

from __future__ import annotations

from collections.abc import Generator
from math import floor
from typing import TYPE_CHECKING, Any, NamedTuple

from synergy_core.errors import InputError
from synergy_core.state import Placed, gpus_in
from synergy_core.units import on_grid
from synergy_sim.execution import SimulatedJob
from synergy_sim.training import TrainingJob

if TYPE_CHECKING:
    from synergy_sim.engine import Simulation


MOST_IDLE_ROUNDS = 10_000


class Leaving(NamedTuple):
    """GPUs that a job still holds while it saves and leaves: until when, which, and how many of which tenant's."""

    free_s: float
    placed: Placed
    gpus: int
    virtual_cluster: str


def rounds(simulation: Simulation) -> Generator[Any, None, None]:
    """The process that decides, round by round, until the simulation ends."""
    env, execution, round_s = simulation.env, simulation.execution, simulation.round_s
    start_s = execution.start_delay_s
    decide_s = on_grid(round_s * execution.decide_fraction)
    if start_s > 0:
        yield env.timeout(start_s)
    yield simulation.after_all_else()
    _decide_and_carry_out(simulation, boundary_s=start_s)
    simulation.look_ahead(start_s + decide_s)
    idle = 0
    while True:
        if not simulation.active:
            simulation.arrived = env.event()
            yield simulation.arrived
            start_s += max(0, floor((env.now - start_s) / round_s)) * round_s
        while start_s + decide_s < env.now:
            start_s += round_s
        yield env.timeout(start_s + decide_s - env.now)
        yield simulation.after_all_else()
        ended = _decide_and_carry_out(simulation, boundary_s=start_s + round_s)
        idle = 0 if simulation.running or not simulation.active else idle + 1
        if idle == MOST_IDLE_ROUNDS:
            raise InputError(
                f"{simulation.active} jobs wait, and for {idle:,} rounds the policy has given none of them a GPU; "
                "do its parameters allow it to?"
            )
        start_s += round_s + execution.stretch_of(ended)
        simulation.look_ahead(start_s + decide_s)


def _decide_and_carry_out(simulation: Simulation, *, boundary_s: float) -> int:
    """Decides now for the round after `boundary_s`; returns how many leases end there."""
    decision, took_s = simulation.decide(simulation.env.now)
    simulation.leaving = [each for each in simulation.leaving if each.free_s > simulation.env.now]
    done: set[int] = set()
    for job, placed in decision.stops:
        if not _end_lease(simulation, job, placed, boundary_s):  # type: ignore[arg-type]
            done.add(job.job_id)
    starts = [(job, placed) for job, placed in decision.starts if job.job_id not in done]
    for job, _ in starts:
        simulation.promised_gpus[job.virtual_cluster] += job.held_gpus
    ended = len(decision.stops) - len(done)
    next_start_s = boundary_s + simulation.execution.stretch_of(ended)
    for job, placed in starts:
        _launch(simulation, job, placed, next_start_s)  # type: ignore[arg-type]
    simulation.note(decision, took_s)
    return ended


def _end_lease(simulation: Simulation, job: SimulatedJob, placed: Placed, boundary_s: float) -> bool:
    """The job leaves its GPUs at the boundary; False if it is done before that, and only keeps them until then."""
    if isinstance(job, TrainingJob):
        simulation.look_ahead(boundary_s, [job])
    gpus = gpus_in(placed)
    own = job.end_s <= boundary_s and not (job.end_s == boundary_s and job.ends_after_decision)
    stop_s = max(boundary_s, job.began_s)  # a launch can wait for its GPUs longer than a round lasts
    job.free_s = (job.end_s if own else stop_s) + job.costs.exit_s
    simulation.leaving.append(Leaving(job.free_s, placed, gpus, job.virtual_cluster))
    simulation.promised_gpus[job.virtual_cluster] -= gpus
    job.attained_service_gpu_s += gpus * (job.free_s - max(simulation.env.now, job.began_s))
    job.settled_s = job.free_s
    if own:
        simulation.scheduler.finish(job, job.free_s)
        simulation.end_in_order(job)
        return False
    simulation.at(job.free_s, simulation.vacate, job)
    simulation.break_off(job, stop_s)
    return True


def _launch(simulation: Simulation, job: SimulatedJob, placed: Placed, next_start_s: float) -> None:
    """The job starts when its GPUs are free and, where launches may not be early, no sooner than the round."""
    start_s = max(simulation.env.now, job.free_s)
    if simulation.leaving:
        start_s = max(start_s, _gpus_free_s(simulation.leaving, placed), _quota_free_s(simulation, job.virtual_cluster))
    if not simulation.execution.early_launch:
        start_s = max(start_s, next_start_s)
    job.settled_s = job.began_s = start_s
    if not job.restarts:
        job.first_start_s = start_s
    simulation.at(start_s, simulation.occupy, (job, placed))
    simulation.run_from(job, start_s)


def _gpus_free_s(leaving: list[Leaving], placed: Placed) -> float:
    """When the last job that still holds one of these GPUs has left."""
    wanted = dict(placed)
    ends = [each.free_s for each in leaving if any(wanted.get(node, 0) & mask for node, mask in each.placed)]
    return max(ends, default=0.0)


def _quota_free_s(simulation: Simulation, virtual_cluster: str) -> float:
    """When enough of the tenant's jobs have left that all it was promised is within its quota."""
    quota = simulation.quotas.get(virtual_cluster)
    if quota is None:
        return 0.0
    leaving = sorted((each.free_s, each.gpus) for each in simulation.leaving if each.virtual_cluster == virtual_cluster)
    over = simulation.promised_gpus[virtual_cluster] + sum(gpus for _, gpus in leaving) - quota
    within_s = 0.0
    for free_s, gpus in leaving:
        if over <= 0:
            break
        over -= gpus
        within_s = free_s
    return within_s
