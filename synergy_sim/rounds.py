"""Decisions once per round: leases that extend without a restart, and rounds that wait for those that end.

The model is that of shared/research/fidelity.md, section 1, measured on physical runs. Round r starts at S_r and lasts
D. What runs in round r + 1 is decided at S_r + h·D. A job that keeps its GPUs trains on; any other stops at S_r + D,
and its GPUs are free once it has saved and left. The next round starts σ(leases that ended) late. A new job starts as
soon as its GPUs are free. With h = 1 and σ = 0 this is a plain tick: decide at the end of a round, carry out at once.
"""

from __future__ import annotations

from collections.abc import Generator
from math import floor
from typing import TYPE_CHECKING, Any

from synergy_core.state import Placed
from synergy_core.units import on_grid
from synergy_sim.execution import SimulatedJob

if TYPE_CHECKING:
    from synergy_sim.engine import Simulation

Freed = list[tuple[float, int, int]]
"""(instant, node, mask): when GPUs become free."""


def rounds(simulation: Simulation) -> Generator[Any, None, None]:
    """The process that decides, round by round, until the simulation ends."""
    env, execution, round_s = simulation.env, simulation.execution, simulation.round_s
    start_s = execution.start_delay_s
    decide_s = on_grid(round_s * execution.decide_fraction)
    if start_s > 0:
        yield env.timeout(start_s)
    yield simulation.after_all_else()
    _decide_and_carry_out(simulation, boundary_s=start_s)
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
        start_s += round_s + execution.stretch_of(ended)


def _decide_and_carry_out(simulation: Simulation, *, boundary_s: float) -> int:
    """Decides now for the round after `boundary_s`; returns how many leases end there."""
    decision, took_s = simulation.decide(simulation.env.now)
    freed: Freed = []
    done: set[int] = set()
    for job, placed in decision.stops:
        if not _end_lease(simulation, job, placed, boundary_s, freed):  # type: ignore[arg-type]
            done.add(job.job_id)
    ended = len(decision.stops) - len(done)
    next_start_s = boundary_s + simulation.execution.stretch_of(ended)
    for job, placed in decision.starts:
        if job.job_id not in done:
            _launch(simulation, job, placed, freed, next_start_s)  # type: ignore[arg-type]
    simulation.note(decision, took_s)
    return ended


def _end_lease(simulation: Simulation, job: SimulatedJob, placed: Placed, boundary_s: float, freed: Freed) -> bool:
    """The job leaves its GPUs at the boundary; False if it is done before that, and only keeps them until then."""
    own = job.end_s <= boundary_s
    free_s = (job.end_s if own else boundary_s) + job.costs.exit_s
    freed += [(free_s, node, mask) for node, mask in placed]
    job.attained_service_gpu_s += job.gpus * (free_s - simulation.env.now)
    job.settled_s = free_s
    if own:
        simulation.scheduler.finish(job, free_s)
        return False
    simulation.at(free_s, simulation.vacate, job)
    simulation.break_off(job, boundary_s)
    return True


def _launch(simulation: Simulation, job: SimulatedJob, placed: Placed, freed: Freed, next_start_s: float) -> None:
    """The job starts when its GPUs are free and, where launches may not be early, no sooner than the round."""
    now_s = simulation.env.now
    waits = [free_s for free_s, at, left in freed for node, mask in placed if node == at and mask & left]
    start_s = max(now_s, *waits, job.settled_s) if waits or job.settled_s > now_s else now_s
    if not simulation.execution.early_launch:
        start_s = max(start_s, next_start_s)
    job.settled_s = start_s
    if not job.restarts:
        job.first_start_s = start_s
    simulation.at(start_s, simulation.occupy, (job, placed))
    simulation.run_from(job, start_s)
