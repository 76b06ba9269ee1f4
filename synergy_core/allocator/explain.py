"""Why a job got what it got: its rows, what the things that they take cost in this round, what would have to change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from synergy_core.allocator.problem import ROUNDING, Problem, Solution
from synergy_core.arrays import Floats, Ints
from synergy_core.errors import InputError
from synergy_core.units import GB

MOST_ROWS = 5
LEAST_GAIN = 1e-3
"""Of a job's utility: what is less is not called a gain from more CPUs or memory."""
LEAST_FRACTION = 5e-3
"""Of today's prices: what is less counts as nothing."""
UNITS = {"GPUs": ("GPUs", "GPU", 1.0), "CPUs": ("CPUs", "CPU", 1.0), "memory": ("GB", "GB", GB)}
"""Of each resource: how amounts are called, how one of them is, and its size."""


@dataclass(frozen=True, slots=True)
class ExplainedRow:
    """One configuration of the job.

    price: utility that what it takes is worth to others; paid: the part of that for each of the explanation's
    `resources`; reduced: utility − price.
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
    """What there is of a resource somewhere, or a quota. total, used: GPUs, CPUs, or bytes of memory.

    price: utility per one of it; binding: whether one more would be worth something.
    """

    label: str
    resource: str
    total: float
    used: float
    price: float
    binding: bool

    def text(self) -> str:
        """A line to read."""
        several, one, size = UNITS.get(self.resource, (self.resource, "unit", 1.0))
        used = f"{self.label}: {_amount(self.used / size)} of {_amount(self.total / size)} {several}"
        if self.binding:
            return f"{used} used, each {one} worth {self.price * size:.4g} to others"
        full = self.used >= self.total * (1.0 - ROUNDING)
        return f"{used}: all used, but nobody else wants them" if full else f"{used} used, the rest is free"


def _amount(value: float) -> str:
    return str(round(value)) if abs(value - round(value)) < 1e-6 else f"{value:.1f}"


@dataclass(frozen=True, slots=True)
class Weighed:
    """One job's C configurations at the prices of a round.

    names, gpus, utility: (C,). paid: (R, C) utility for each of `resources`, (R,). possible: (P,) those that the
    cluster could hold and that are worth more than nothing. chosen: −1 none. beside: (B,) those on as many GPUs with
    more beside them than the job has.
    """

    names: Sequence[str]
    gpus: Ints
    utility: Floats
    resources: tuple[str, ...]
    paid: Floats
    possible: Ints
    chosen: int
    beside: Ints


@dataclass(frozen=True, slots=True)
class Explanation:
    """One job in a solved problem.

    chosen: None if it got nothing. wanted: its best row if all were free of charge, None if no row that the cluster
    could hold is worth more than nothing.
    rows: its best by reduced value, falling. limits: every capacity and quota. resources: what has a price.
    with_more: its best row on as many GPUs with more beside them, None where it gains from no more.
    bound_by: the resource for which `with_more`, or else `wanted`, would pay most beyond what the chosen row pays;
    "nodes" where it would pay no more, but does not fit; "" where it has what it wants.
    missing_utility: what `wanted` lacks to be its best row at these prices, ≥ 0.
    price_fraction: the part of today's prices, in [0, 1], up to which `wanted` is its best row.
    rounding_loss: by how much the chosen row's reduced value is below the best row's: the job's share in what it costs
    that GPUs cannot be divided. forced: whether it had no choice.
    objective, bound, gap: of the round, of all jobs, as in `Solution`. notes: what else is to be known, in sentences.
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
    resources: tuple[str, ...]
    with_more: ExplainedRow | None
    bound_by: str
    objective: float
    bound: float
    gap: float
    notes: tuple[str, ...] = ()

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
        if self.bound_by and len(self.resources) > 1:
            lines.append(self._bound(self.with_more or self.wanted))
        lines += self.notes
        split = len(self.resources) > 1
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
        if self.chosen and self.chosen.configuration == wanted.configuration:
            if self.rounding_loss <= ROUNDING:
                return ["It is the configuration it gains most from, and worth its price."]
            return ["It is the configuration it gains most from.", self._rounded()]
        lines = []
        if self.missing_utility > ROUNDING:
            taken = "its GPUs are" if len(self.resources) == 1 else "what it takes is"
            lines.append(
                f"It would gain most from {_named(wanted)} ({wanted.utility:.4f}), but {taken} worth "
                f"{wanted.price:.4f} to others. {self._affordable()}"
            )
        if self.rounding_loss > ROUNDING:
            lines.append(self._rounded())
        elif self.missing_utility <= ROUNDING:
            lines.append(f"{_named(wanted)} would be worth as much, less its price: a tie.")
        return lines

    def _affordable(self) -> str:
        """At which prices it would get what it wants; of one alone, if only one is above nothing."""
        priced = [each.label for each in self.limits if each.binding]
        whose = f"{priced[0]}'s price" if len(priced) == 1 else "prices"
        what = "it" if self.wanted and self.wanted.gpus == 1 else "them"
        to = "nothing" if self.price_fraction < LEAST_FRACTION else f"{100 * self.price_fraction:.0f} % of today's"
        return f"It would get {what} if {whose} fell to {to}."

    def _bound(self, better: ExplainedRow | None) -> str:
        assert better is not None
        more = better.price - (self.chosen.price if self.chosen else 0.0)
        if self.bound_by == "nodes":
            return f"bound by: nodes. {_named(better)} would pay no more, but does not fit beside the other jobs."
        return (
            f"bound by: {self.bound_by}. {_named(better)} ({better.utility:.4f}) would pay {more:.4f} more, the "
            f"largest part of it for {self.bound_by}."
        )

    def _rounded(self) -> str:
        return (
            f"At these prices another row would be better by {self.rounding_loss:.4f}; together with the other jobs it "
            "does not fit."
        )


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
    per_gpu = solution.prices[problem.gpu_type]
    if problem.tenant is not None:
        per_gpu = per_gpu + solution.prices[problem.types + problem.tenant[job]]
    paid: Floats = (per_gpu * problem.gpus)[None]
    if problem.beside is not None:
        # What goes beside its GPUs is paid for as well.
        beside = solution.prices[len(problem.rows) :].reshape(problem.beside.capacity.shape)
        paid = np.concatenate((paid, beside[:, problem.gpu_type] * problem.beside.demand[:, job]))
    within = problem.gpus <= problem.capacity[problem.gpu_type]
    if problem.tenant is not None and problem.quota is not None:
        within &= problem.gpus <= problem.quota[problem.tenant[job]]
    weighed = Weighed(
        names=names,
        gpus=problem.gpus,
        utility=problem.utility[job],
        resources=("GPUs", *(problem.beside.names if problem.beside is not None else ())),
        paid=paid,
        possible=np.nonzero((problem.utility[job] > 0) & within)[0],
        chosen=int(solution.choice[job]),
        beside=np.zeros(0, dtype=np.int64),
    )
    return explanation_of(
        weighed,
        job,
        label,
        forced=problem.forced is not None and bool(problem.forced[job] >= 0),
        limits=_limits(problem, solution, kinds, list(tenants)),
        round_worth=(solution.objective, solution.bound, solution.gap),
    )


def explanation_of(
    weighed: Weighed,
    job: int,
    label: str,
    *,
    forced: bool,
    limits: tuple[Limit, ...],
    round_worth: tuple[float, float, float],
    notes: tuple[str, ...] = (),
) -> Explanation:
    """Why a job has the configuration that it has of those weighed. round_worth: objective, bound and gap."""
    utility, possible, chosen = weighed.utility, weighed.possible, weighed.chosen
    price: Floats = weighed.paid.sum(axis=0)
    reduced = utility - price

    def row(column: int) -> ExplainedRow:
        worth, costs = float(utility[column]), float(price[column])
        paid = tuple(weighed.paid[:, column].tolist())
        return ExplainedRow(column, weighed.names[column], int(weighed.gpus[column]), worth, costs, worth - costs, paid)

    best = float(np.max(reduced[possible], initial=0.0))
    wanted = int(possible[utility[possible].argmax()]) if len(possible) else -1
    if chosen >= 0 and wanted >= 0 and utility[chosen] == utility[wanted]:
        wanted = chosen
    order = possible[np.lexsort((possible != chosen, -reduced[possible]))].tolist()
    rows: dict[tuple[str, float, float], ExplainedRow] = {}
    for column in order:
        if len(rows) < MOST_ROWS:
            each = row(column)
            rows.setdefault((each.label, each.utility, each.price), each)  # several levels of share may be the same
    for column in (chosen, wanted):
        if column >= 0:
            each = row(column)
            rows.setdefault((each.label, each.utility, each.price), each)
    missing = max(0.0, best - float(reduced[wanted])) if wanted >= 0 else 0.0
    with_more = _with_more(weighed)
    better = with_more if with_more >= 0 else wanted
    return Explanation(
        job=job,
        label=label or f"job {job}",
        forced=forced,
        chosen=row(chosen) if chosen >= 0 else None,
        wanted=row(wanted) if wanted >= 0 else None,
        rows=tuple(rows.values()),
        limits=limits,
        missing_utility=missing,
        price_fraction=_price_fraction(utility[possible], price[possible]),
        rounding_loss=max(0.0, best - (float(reduced[chosen]) if chosen >= 0 else 0.0)),
        resources=weighed.resources,
        with_more=row(with_more) if with_more >= 0 else None,
        bound_by=_bound_by(weighed, better) if better not in (-1, chosen) else "",
        objective=round_worth[0],
        bound=round_worth[1],
        gap=round_worth[2],
        notes=notes,
    )


def _with_more(weighed: Weighed) -> int:
    """Of the configurations with more beside the job's GPUs, the one it gains most from; −1 where it gains nothing."""
    if weighed.chosen < 0:
        return -1
    least = weighed.utility[weighed.chosen] * (1.0 + LEAST_GAIN)
    richer = weighed.beside[weighed.utility[weighed.beside] > least]
    return int(richer[weighed.utility[richer].argmax()]) if len(richer) else -1


def _bound_by(weighed: Weighed, better: int) -> str:
    """For what a better configuration would pay most beyond what the job pays; nodes where it would pay no more."""
    more = weighed.paid[:, better] - (weighed.paid[:, weighed.chosen] if weighed.chosen >= 0 else 0.0)
    return weighed.resources[int(more.argmax())] if more.max() > ROUNDING else "nodes"


def _limits(problem: Problem, solution: Solution, kinds: list[str], tenants: list[str]) -> tuple[Limit, ...]:
    labels = kinds + [
        f"quota of {tenants[at] if tenants else f'tenant {at}'}" for at in range(len(problem.rows) - problem.types)
    ]
    resources = ["GPUs"] * len(labels)
    total, used = problem.rows.astype(np.float64), problem.use(solution.choice).astype(np.float64)
    if problem.beside is not None:
        labels += kinds * len(problem.beside.names)
        resources += [name for name in problem.beside.names for _ in kinds]
        total = np.concatenate((total, problem.beside.capacity.ravel()))
        used = np.concatenate((used, problem.beside.use(problem.gpu_type, solution.choice).ravel()))
    return limits_of(labels, resources, total, used, solution.prices)


def limits_of(
    labels: Sequence[str], resources: Sequence[str], total: Floats, used: Floats, prices: Floats
) -> tuple[Limit, ...]:
    """Everything that has a price, all columns of one length."""
    columns = total.tolist(), used.tolist(), prices.tolist()
    return tuple(Limit(*each, binding=each[-1] > 0) for each in zip(labels, resources, *columns, strict=True))


def _price_fraction(utility: Floats, price: Floats) -> float:
    """The largest f in [0, 1] at which the row of the highest utility is the best of u − f · price, and ≥ 0."""
    if not len(utility):
        return 0.0
    best = int(utility.argmax())
    dearer = np.append(price[best] - price, price[best])
    ahead = np.append(utility[best] - utility, utility[best])
    rivals = dearer > 0
    return float(np.clip(np.min(ahead[rivals] / dearer[rivals], initial=1.0), 0.0, 1.0))
