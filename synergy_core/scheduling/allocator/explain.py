"""Explains a job's allocation: its best rows, their prices in this round, and the resource that limited it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from synergy_core.errors import InputError
from synergy_core.scheduling.allocator.problem import ROUNDING, Problem, Solution
from synergy_core.units import GB, Floats, Ints

MAX_ROWS = 5
MIN_GAIN = 1e-3
"""Minimum gain from more CPUs or memory that is reported, as a fraction of the job's utility."""
MIN_FRACTION = 5e-3
"""A smaller `price_fraction` is reported as zero."""
UNITS = {"GPUs": ("GPUs", "GPU", 1.0), "CPUs": ("CPUs", "CPU", 1.0), "memory": ("GB", "GB", GB)}
"""The unit in which each resource is reported: plural, singular, and how much of the resource one unit is."""


@dataclass(frozen=True, slots=True)
class ExplainedRow:
    """One configuration of the job.

    price: utility that other jobs could gain from the row's resources. paid: the part of the price for each of
    `Explanation.resources`. reduced: utility − price.
    """

    configuration: int
    label: str
    gpus: int
    utility: float
    price: float
    reduced: float
    paid: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Limit:
    """The capacity of a resource on a GPU type or group of nodes, or a quota. total, used: GPUs, CPUs or bytes.

    price: utility per unit. binding: whether one more unit would have value.
    """

    label: str
    resource: str
    total: float
    used: float
    price: float
    binding: bool

    def text(self) -> str:
        several, one, size = UNITS.get(self.resource, (self.resource, "unit", 1.0))
        used = f"{self.label}: {_amount(self.used / size)} of {_amount(self.total / size)} {several}"
        if self.binding:
            return f"{used} used, each {one} worth {self.price * size:.4g} to others"
        full = self.used >= self.total * (1.0 - ROUNDING)
        return f"{used}: all used, but no other job would gain from more" if full else f"{used} used, the rest is free"


def _amount(value: float) -> str:
    return str(round(value)) if abs(value - round(value)) < 1e-6 else f"{value:.1f}"


@dataclass(frozen=True, slots=True)
class Explanation:
    """One job in a solved problem: its row, the rows that it could have had, and their prices."""

    job: int
    """Index of the job in the problem."""
    label: str
    """Name of the job in the text, by default `job 7`."""
    forced: bool
    """Whether the job had to keep its row (`Problem.forced`)."""
    chosen: ExplainedRow | None
    """The job's row; None if it got nothing."""
    wanted: ExplainedRow | None
    """The row of highest utility; None if no row that the cluster could hold has a positive utility."""
    rows: tuple[ExplainedRow, ...]
    """The rows of highest reduced utility, at most `MAX_ROWS`, then `chosen` and `wanted` if they are not among them.
    """
    limits: tuple[Limit, ...]
    """All capacities and quotas."""
    missing_utility: float
    """Highest reduced utility of any row, 0 for none, minus that of `wanted`; at least 0."""
    price_fraction: float
    """Largest fraction of these prices, in [0, 1], at which `wanted` is the best row."""
    rounding_loss: float
    """Highest reduced utility of any row, 0 for none, minus that of `chosen`. It is lost because GPUs cannot be
    divided; at least 0."""
    resources: tuple[str, ...]
    """Names of the resources that have a price."""
    with_more: ExplainedRow | None
    """The row of highest utility with as many GPUs as `chosen` and more CPUs or memory; None if no such row gains more
    than the fraction `MIN_GAIN` of the job's utility."""
    bound_by: str
    """The resource of which `with_more`, or else `wanted`, would cost most beyond `chosen`. "nodes" if that row costs
    no more and no nodes have room for it; "" if there is no better row."""
    objective: float
    """Total utility of the round, as in `Solution`."""
    bound: float
    """Upper bound on that utility, as in `Solution`."""
    gap: float
    """Relative gap between the two, as in `Solution`."""
    notes: tuple[str, ...] = ()
    """Further sentences, printed after the reasons."""

    def as_dict(self) -> dict[str, Any]:
        """The explanation as plain values, for JSON."""
        return asdict(self)

    def text(self) -> str:
        got = f"got {_named(self.chosen)}" if self.chosen else "got nothing"
        lines = [f"{self.label} {got}{', which it was forced to keep' if self.forced else ''}."]
        if self.wanted is None:
            lines.append("None of its configurations that the cluster could hold has a positive utility.")
        elif not self.forced:
            lines += self._why(self.wanted)
        split = len(self.resources) > 1
        better = self.with_more or self.wanted
        if self.bound_by and better and split:
            lines.append(self._bound(better))
        lines += self.notes
        paid_for = f"; paid for {' + '.join(self.resources)}" if split else ""
        lines.append(f"  utility − price = reduced{paid_for}")
        for row in self.rows:
            mark = "→" if self.chosen and row.configuration == self.chosen.configuration else " "
            paid = f"; {' + '.join(f'{each:.4f}' for each in row.paid)}" if split else ""
            lines.append(f"{mark} {row.utility:8.4f} − {row.price:.4f} = {row.reduced:8.4f}  {_named(row)}{paid}")
        lines += [f"  {limit.text()}" for limit in self.limits]
        lines.append(f"  round: utility {self.objective:.6g} of at most {self.bound:.6g}, a gap of {self.gap:.2%}")
        return "\n".join(lines)

    def _why(self, wanted: ExplainedRow) -> list[str]:
        rounded = (
            f"At these prices another row would be better by {self.rounding_loss:.4f}; together with the other jobs it "
            "does not fit."
        )
        if self.chosen and self.chosen.configuration == wanted.configuration:
            if self.rounding_loss <= ROUNDING:
                return ["It gains most from this configuration, which is worth its price."]
            return ["It gains most from this configuration.", rounded]
        lines = []
        if self.missing_utility > ROUNDING:
            taken = "its GPUs are" if len(self.resources) == 1 else "its resources are"
            priced = [each.label for each in self.limits if each.binding]
            whose = f"{priced[0]}'s price" if len(priced) == 1 else "prices"
            to = "nothing" if self.price_fraction < MIN_FRACTION else f"{100 * self.price_fraction:.0f} % of today's"
            lines.append(
                f"It would gain most from {_named(wanted)} ({wanted.utility:.4f}), but {taken} worth "
                f"{wanted.price:.4f} to others. It would get {'it' if wanted.gpus == 1 else 'them'} if {whose} fell to "
                f"{to}."
            )
        if self.rounding_loss > ROUNDING:
            lines.append(rounded)
        elif self.missing_utility <= ROUNDING:
            lines.append(f"{_named(wanted)} has the same utility minus price: a tie.")
        return lines

    def _bound(self, better: ExplainedRow) -> str:
        if self.bound_by == "nodes":
            return f"bound by: nodes. {_named(better)} costs no more, but does not fit beside the other jobs."
        more = better.price - (self.chosen.price if self.chosen else 0.0)
        return (
            f"bound by: {self.bound_by}. {_named(better)} ({better.utility:.4f}) costs {more:.4f} more, the "
            f"largest part of it for {self.bound_by}."
        )


def _named(row: ExplainedRow) -> str:
    # The default label begins with the number of GPUs.
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
    """Explains the allocation of `job`. Raises InputError for a job that the problem does not have.

    label, configurations, types, tenants: names of the job, the C configurations, the T GPU types and the V tenants.
    """
    if not 0 <= job < problem.jobs:
        raise InputError(f"job is {job}, expected 0 to {problem.jobs - 1}.")
    kinds = list(types) or [f"type {kind}" for kind in range(problem.types)]
    names = list(configurations) or [
        f"{gpus} × {kinds[kind]}" for gpus, kind in zip(problem.gpus.tolist(), problem.gpu_type.tolist(), strict=True)
    ]
    paid = [solution.prices[limit] * amount for limit, amount in problem.demands_of(job)]
    if problem.tenant is not None:  # adds the quota's price, which is also per GPU
        paid[0] += paid.pop(1)
    return explanation_of(
        job,
        label,
        names=names,
        gpus=problem.gpus,
        utility=problem.utility[job],
        resources=("GPUs", *(problem.others.names if problem.others is not None else ())),
        paid=np.stack(paid),
        possible=problem.possible(job),
        chosen=int(solution.choice[job]),
        richer=np.zeros(0, dtype=np.int64),
        forced=problem.forced is not None and bool(problem.forced[job] >= 0),
        limits=limits_of(
            problem.names_of_limits(kinds, tenants), problem.limits, problem.use(solution.choice), solution.prices
        ),
        totals=(solution.objective, solution.bound, solution.gap),
    )


def explanation_of(
    job: int,
    label: str,
    *,
    names: Sequence[str],
    gpus: Ints,
    utility: Floats,
    resources: tuple[str, ...],
    paid: Floats,
    possible: Ints,
    chosen: int,
    richer: Ints,
    forced: bool,
    limits: tuple[Limit, ...],
    totals: tuple[float, float, float],
    notes: tuple[str, ...] = (),
) -> Explanation:
    """Explains the choice of one of C configurations for a job.

    names, gpus, utility: (C,). paid: (R, C) price in utility for each of `resources`, (R,). possible: (P,)
    configurations of positive utility that the cluster could hold. chosen: −1 for none. richer: (B,) configurations
    with as many GPUs as `chosen` and more CPUs or memory. totals: objective, bound and gap of the round.
    """
    price: Floats = paid.sum(axis=0)
    reduced = utility - price

    def row(column: int) -> ExplainedRow:
        worth, costs = float(utility[column]), float(price[column])
        parts = tuple(paid[:, column].tolist())
        return ExplainedRow(column, names[column], int(gpus[column]), worth, costs, worth - costs, parts)

    best = float(np.max(reduced[possible], initial=0.0))
    wanted = int(possible[utility[possible].argmax()]) if len(possible) else -1
    if chosen >= 0 and wanted >= 0 and utility[chosen] == utility[wanted]:
        wanted = chosen
    order = possible[np.lexsort((possible != chosen, -reduced[possible]))].tolist()
    rows: dict[tuple[str, float, float], ExplainedRow] = {}
    for position, column in enumerate([*order, chosen, wanted]):
        if column >= 0 and (len(rows) < MAX_ROWS or position >= len(order)):
            each = row(column)
            rows.setdefault((each.label, each.utility, each.price), each)  # rows with equal shares are listed once
    # The configuration with more CPUs or memory from which the job gains most; −1 if it gains from none.
    gaining = richer[utility[richer] > utility[chosen] * (1.0 + MIN_GAIN)] if chosen >= 0 else richer[:0]
    with_more = int(gaining[utility[gaining].argmax()]) if len(gaining) else -1
    better, bound_by = with_more if with_more >= 0 else wanted, ""
    if better not in (-1, chosen):
        more = paid[:, better] - (paid[:, chosen] if chosen >= 0 else 0.0)
        bound_by = resources[int(more.argmax())] if more.max() > ROUNDING else "nodes"
    price_fraction = 0.0
    if len(possible):  # the largest f at which the row of highest utility still maximises u − f · price ≥ 0
        first = possible[utility[possible].argmax()]
        extra_price = np.append(price[first] - price[possible], price[first])
        extra_utility = np.append(utility[first] - utility[possible], utility[first])
        cheaper = extra_price > 0
        price_fraction = float(np.clip(np.min(extra_utility[cheaper] / extra_price[cheaper], initial=1.0), 0.0, 1.0))
    return Explanation(
        job=job,
        label=label or f"job {job}",
        forced=forced,
        chosen=row(chosen) if chosen >= 0 else None,
        wanted=row(wanted) if wanted >= 0 else None,
        rows=tuple(rows.values()),
        limits=limits,
        missing_utility=max(0.0, best - float(reduced[wanted])) if wanted >= 0 else 0.0,
        price_fraction=price_fraction,
        rounding_loss=max(0.0, best - (float(reduced[chosen]) if chosen >= 0 else 0.0)),
        resources=resources,
        with_more=row(with_more) if with_more >= 0 else None,
        bound_by=bound_by,
        objective=totals[0],
        bound=totals[1],
        gap=totals[2],
        notes=notes,
    )


def limits_of(names: Sequence[tuple[str, str]], total: Floats, used: Floats, prices: Floats) -> tuple[Limit, ...]:
    """One `Limit` for each of R limits. names: label and resource of each. total, used, prices: (R,)."""
    columns = zip(names, total.tolist(), used.tolist(), prices.tolist(), strict=True)
    return tuple(Limit(*name, there, taken, price, binding=price > 0) for name, there, taken, price in columns)
