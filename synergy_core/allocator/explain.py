"""Why a job got what it got: its rows, what each GPU costs in this round, and what would have to change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from synergy_core.allocator.problem import ROUNDING, Problem, Solution
from synergy_core.arrays import Floats
from synergy_core.errors import InputError
from synergy_core.units import GB

MOST_ROWS = 5


@dataclass(frozen=True, slots=True)
class ExplainedRow:
    """One configuration of the job. price: utility that its GPUs are worth to others; reduced: utility − price."""

    configuration: int
    label: str
    gpus: int
    utility: float
    price: float
    reduced: float


@dataclass(frozen=True, slots=True)
class Limit:
    """One capacity or quota. price: utility per GPU; binding: whether one GPU more would be worth something."""

    label: str
    gpus: int
    used_gpus: int
    price: float
    binding: bool


@dataclass(frozen=True, slots=True)
class HostPrice:
    """What GPUs with their share are worth to others: utility paid for the GPUs, for the CPUs and for the memory.

    gpus, cpus, memory_bytes: of the whole row, over all its nodes.
    """

    gpus: int
    cpus: float
    memory_bytes: float
    for_gpus: float
    for_cpus: float
    for_memory: float

    @property
    def total(self) -> float:
        """Utility paid for all of it."""
        return self.for_gpus + self.for_cpus + self.for_memory

    @property
    def dearest(self) -> str:
        """GPUs, CPUs or memory, whichever the most is paid for; nothing where all of it is free."""
        paid = {"GPUs": self.for_gpus, "CPUs": self.for_cpus, "memory": self.for_memory}
        return max(paid, key=lambda each: paid[each]) if self.total > 0 else "nothing"

    def text(self) -> str:
        """A line to read."""
        parts = (
            f"{self.gpus} GPU{'s' * (self.gpus > 1)} {self.for_gpus:.4f}",
            f"{self.cpus:g} CPUs {self.for_cpus:.4f}",
            f"{self.memory_bytes / GB:g} GB {self.for_memory:.4f}",
        )
        return f"{' + '.join(parts)} = {self.total:.4f} utility to others; scarcest for it: {self.dearest}."


def host_price(gpus: int, share: tuple[float, float], prices: tuple[float, float, float]) -> HostPrice:
    """What a row costs. share: CPUs and bytes with each GPU. prices: utility per GPU, CPU and byte, such as one group's
    of `NodeSolution`.
    """
    cpus, memory_bytes = gpus * share[0], gpus * share[1]
    return HostPrice(gpus, cpus, memory_bytes, gpus * prices[0], cpus * prices[1], memory_bytes * prices[2])


@dataclass(frozen=True, slots=True)
class Explanation:
    """One job in a solved problem.

    chosen: None if it got nothing. wanted: its best row if GPUs were free, None if no row that the cluster could hold
    is worth more than nothing.
    rows: its best by reduced value, falling. limits: every capacity and quota.
    missing_utility: what `wanted` lacks to be its best row at these prices, ≥ 0.
    price_fraction: the part of today's prices, in [0, 1], up to which `wanted` is its best row.
    rounding_loss: by how much the chosen row's reduced value is below the best row's: the job's share in what it costs
    that GPUs cannot be divided. forced: whether it had no choice.
    """

    job: int
    label: str
    forced: bool
    chosen: ExplainedRow | None
    wanted: ExplainedRow | None
    rows: tuple[ExplainedRow, ...]
    limits: tuple[Limit, ...]
    missing_utility: float
    price_fraction: float
    rounding_loss: float

    def as_dict(self) -> dict[str, Any]:
        """The explanation as plain values, for JSON."""
        return asdict(self)

    def text(self) -> str:
        """A few lines to read."""
        got = f"got {_named(self.chosen)}" if self.chosen else "got nothing"
        lines = [f"{self.label} {got}{', which it was forced to keep' if self.forced else ''}."]
        if self.wanted is None:
            lines.append("None of its configurations that the cluster could hold is worth more than nothing.")
        elif not self.forced:
            lines += self._why(self.wanted)
        lines.append("  utility − price = reduced")
        for row in self.rows:
            mark = "→" if self.chosen and row.configuration == self.chosen.configuration else " "
            lines.append(f"{mark} {row.utility:8.4f} − {row.price:.4f} = {row.reduced:8.4f}  {_named(row)}")
        for limit in self.limits:
            worth = f"{limit.price:.4g} utility per GPU" if limit.binding else "does not bind"
            lines.append(f"  {limit.label}: {limit.used_gpus} of {limit.gpus} GPUs used, {worth}")
        return "\n".join(lines)

    def _why(self, wanted: ExplainedRow) -> list[str]:
        if self.chosen and self.chosen.configuration == wanted.configuration:
            return ["It is the configuration it gains most from, and worth its price."]
        lines = []
        if self.missing_utility > ROUNDING:
            lines.append(
                f"It would gain most from {_named(wanted)} ({wanted.utility:.4f}), but its GPUs are worth "
                f"{wanted.price:.4f} to others: it lacks {self.missing_utility:.4f} utility, or prices at "
                f"{self.price_fraction:.0%} of today's."
            )
        if self.rounding_loss > ROUNDING:
            lines.append(
                f"At these prices another row would be better by {self.rounding_loss:.4f}; together with the other "
                "jobs it does not fit."
            )
        elif self.missing_utility <= ROUNDING:
            lines.append(f"{_named(wanted)} would be worth as much, less its price: a tie.")
        return lines


def _named(row: ExplainedRow | None) -> str:
    if row is None:
        return "nothing"
    # The default label begins with the count.
    return row.label if row.label.startswith(f"{row.gpus} ") else f"{row.label} ({row.gpus} GPU{'s' * (row.gpus > 1)})"


def explain(
    problem: Problem,
    solution: Solution,
    job: int,
    *,
    label: str = "",
    configurations: Sequence[str] = (),
    types: Sequence[str] = (),
    tenants: Sequence[str] = (),
) -> Explanation:
    """Why `job` got what it got. The labels name the job, the C configurations, the T types and the V tenants.

    Raises InputError for a job that the problem does not have.
    """
    if not 0 <= job < problem.jobs:
        raise InputError(f"job is {job}, expected 0 to {problem.jobs - 1}.")
    kinds = list(types) or [f"type {at}" for at in range(problem.types)]
    names = list(configurations) or [
        f"{gpus} × {kinds[at]}" for gpus, at in zip(problem.gpus.tolist(), problem.gpu_type.tolist(), strict=True)
    ]
    utility = problem.utility[job]
    per_gpu = solution.prices[problem.gpu_type]
    if problem.tenant is not None:
        per_gpu = per_gpu + solution.prices[problem.types + problem.tenant[job]]
    price: Floats = per_gpu * problem.gpus
    if problem.beside is not None:
        # What goes beside its GPUs is paid for as well.
        beside = solution.prices[len(problem.rows) :].reshape(problem.beside.capacity.shape)
        price = price + (beside[:, problem.gpu_type] * problem.beside.demand[:, job]).sum(axis=0)
    reduced = utility - price

    def row(column: int) -> ExplainedRow:
        worth, paid = float(utility[column]), float(price[column])
        return ExplainedRow(column, names[column], int(problem.gpus[column]), worth, paid, worth - paid)

    within = problem.gpus <= problem.capacity[problem.gpu_type]
    if problem.tenant is not None and problem.quota is not None:
        within &= problem.gpus <= problem.quota[problem.tenant[job]]
    possible = np.nonzero((utility > 0) & within)[0]
    best = float(np.max(reduced[possible], initial=0.0))
    chosen = int(solution.choice[job])
    wanted = int(possible[utility[possible].argmax()]) if len(possible) else -1
    order = possible[np.argsort(-reduced[possible], kind="stable")][:MOST_ROWS].tolist()
    for extra in (chosen, wanted):
        if extra >= 0 and extra not in order:
            order.append(extra)
    return Explanation(
        job=job,
        label=label or f"job {job}",
        forced=problem.forced is not None and bool(problem.forced[job] >= 0),
        chosen=row(chosen) if chosen >= 0 else None,
        wanted=row(wanted) if wanted >= 0 else None,
        rows=tuple(row(column) for column in order),
        limits=_limits(problem, solution, kinds, list(tenants)),
        missing_utility=max(0.0, best - float(reduced[wanted])) if wanted >= 0 else 0.0,
        price_fraction=_price_fraction(utility[possible], price[possible]),
        rounding_loss=max(0.0, best - (float(reduced[chosen]) if chosen >= 0 else 0.0)),
    )


def _limits(problem: Problem, solution: Solution, kinds: list[str], tenants: list[str]) -> tuple[Limit, ...]:
    rows, used = problem.rows.tolist(), problem.use(solution.choice).tolist()
    labels = kinds + [
        f"quota of {tenants[at] if tenants else f'tenant {at}'}" for at in range(len(rows) - problem.types)
    ]
    return tuple(
        Limit(label, limit, taken, price, price > 0)
        for label, limit, taken, price in zip(labels, rows, used, solution.prices[: len(rows)].tolist(), strict=True)
    )


def _price_fraction(utility: Floats, price: Floats) -> float:
    """The largest f in [0, 1] at which the row of the highest utility is the best of u − f · price, and ≥ 0."""
    if not len(utility):
        return 0.0
    best = int(utility.argmax())
    dearer = np.append(price[best] - price, price[best])
    ahead = np.append(utility[best] - utility, utility[best])
    rivals = dearer > 0
    return float(np.clip(np.min(ahead[rivals] / dearer[rivals], initial=1.0), 0.0, 1.0))
