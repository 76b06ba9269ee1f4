"""Which configuration each job gets: the problem of one round, its answer, and what both must satisfy.

maximise Σ_jc u_jc x_jc, x binary; Σ_c x_jc ≤ 1 per job (= 1, and which, if forced); per GPU type t
Σ_j Σ_{c of type t} n_c x_jc ≤ capacity_t; per tenant v Σ_{j of v} Σ_c n_c x_jc ≤ quota_v
(Sia, SOSP 2023, section 3.4, with quotas added); for each resource d beside GPUs, and per type t,
Σ_j Σ_{c of type t} a_djc x_jc ≤ b_dt. That these sums fit does not mean that nodes can hold it: `allocator.nodes`.

All code below these lines knows one kind of constraint, a *limit*: T capacities, then V quotas, then D T of resources
beside GPUs. What configurations take of limits is a list of *demands*, a pair of arrays each that broadcast to (J, C):
the number of the limit, and how much is taken of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from synergy_core.errors import InputError
from synergy_core.units import Floats, Ints

Status = Literal["optimal", "within_gap", "gap_open", "time_limit"]
Demand = tuple[Ints, Floats]

TINY = 1e-12
ROUNDING = 1e-9
"""On utilities of about 1 (`solve` scales others): sums of thousands of float64 differ by less in another order."""


def taken_of(demand: Demand, jobs: Ints, columns: Ints) -> Demand:
    """(N,) limits and amounts of these jobs in these columns.

    demand: limits (C,), (J, C) or, alike in all columns, (J, 1); amounts (C,) or (J, C).
    """
    limit, amount = demand
    return (
        limit[columns] if limit.ndim == 1 else limit[jobs, columns if limit.shape[1] > 1 else 0],
        amount[columns] if amount.ndim == 1 else amount[jobs, columns],
    )


def use_of(demands: Iterable[Demand], jobs: Ints, columns: Ints, limits: int) -> Floats:
    """(R,) what these jobs take of every limit in these columns."""
    used = np.zeros(limits)
    for demand in demands:
        used += np.bincount(*taken_of(demand, jobs, columns), limits)
    return used


def less_price(utility: Floats, demands: Iterable[Demand], prices: Floats) -> Floats:
    """(J, C) utility less the price of all that is taken; prices: (R,) of every limit."""
    (limit, amount), *others = demands
    left: Floats = utility - prices[limit] * amount
    for limit, amount in others:
        price = prices[limit]
        if price.any():
            left -= price * amount
    return left


@dataclass(frozen=True, slots=True)
class Beside:
    """What configurations take beside GPUs, of D resources such as CPUs and memory; each in a unit of its own.

    names: (D,). demand: (D, J, C) ≥ 0, of the whole configuration, not per GPU. capacity: (D, T) ≥ 0, of each GPU type.
    """

    names: tuple[str, ...]
    demand: Floats
    capacity: Floats

    def per_gpu(self, gpus: Ints) -> Floats:
        """(D, T): GPUs of a type, (T,), for each unit of what it has beside them; 1 where it has none of it."""
        return np.where(self.capacity > 0, gpus / np.where(self.capacity > 0, self.capacity, 1.0), 1.0)


@dataclass(frozen=True, slots=True)
class Problem:
    """One round's choice for J jobs among C configurations on T GPU types, with quotas for V tenants.

    utility: (J, C) float64, what giving job j configuration c is worth; −inf where that is not allowed. Nothing is
    worth 0, so a utility ≤ 0 is never chosen unless forced. gpus: (C,) ≥ 1. gpu_type: (C,) indices into capacity.
    capacity: (T,) GPUs. forced: (J,) the configuration a job must keep, −1 for none; None forces nobody.
    tenant: (J,) indices into quota, (V,) GPUs summed over types; both or neither. beside: what they take beside GPUs.
    Raises InputError where shapes or ranges do not match, on NaN or +inf, and where the forced jobs alone exceed a
    capacity or a quota.
    """

    utility: Floats
    gpus: Ints
    gpu_type: Ints
    capacity: Ints
    forced: Ints | None = None
    tenant: Ints | None = None
    quota: Ints | None = None
    beside: Beside | None = None

    def __post_init__(self) -> None:
        self._check_arrays()
        if self.forced is not None and (self.forced >= 0).any():
            self._check_forced(self.forced)

    @property
    def jobs(self) -> int:
        """The number of jobs, J."""
        return len(self.utility)

    @property
    def types(self) -> int:
        """The number of GPU types, T."""
        return len(self.capacity)

    @property
    def tenants(self) -> int:
        """The number of quotas, V."""
        return 0 if self.quota is None else len(self.quota)

    @property
    def limits(self) -> Floats:
        """(R,) the amount of each limited resource; each has a price."""
        quota = np.zeros(0) if self.quota is None else self.quota
        beside = np.zeros(0) if self.beside is None else self.beside.capacity.ravel()
        return np.concatenate((self.capacity, quota, beside), dtype=np.float64)

    @property
    def demands(self) -> list[Demand]:
        """How much every configuration uses of each limited resource; GPUs of its type come first."""
        gpus = self.gpus.astype(np.float64)
        demands: list[Demand] = [(self.gpu_type, gpus)]
        if self.tenant is not None:
            demands.append((self.types + self.tenant[:, None], gpus))
        if self.beside is not None:
            first = self.types + self.tenants
            demands += [(first + at * self.types + self.gpu_type, each) for at, each in enumerate(self.beside.demand)]
        return demands

    def equals(self, other: Problem) -> bool:
        """Whether both have the same arrays; for problems with nothing beside GPUs."""
        names = ("utility", "gpus", "gpu_type", "capacity", "forced", "tenant", "quota")
        return all(np.array_equal(getattr(self, name), getattr(other, name)) for name in names)

    def names_of_limits(self, types: Sequence[str] = (), tenants: Sequence[str] = ()) -> list[tuple[str, str]]:
        """(owner, resource) of each limit. types, tenants: names of the GPU types and tenants."""
        types = types or [f"type {at}" for at in range(self.types)]
        tenants = tenants or [f"tenant {at}" for at in range(self.tenants)]
        names = [(each, "GPUs") for each in (*types, *(f"quota of {each}" for each in tenants[: self.tenants]))]
        return names + [(each, name) for name in (self.beside.names if self.beside else ()) for each in types]

    def demands_of(self, job: int) -> list[Demand]:
        """The demands of one job: (C,) limits and (C,) amounts each."""
        columns = np.arange(len(self.gpus))
        return [taken_of(each, np.full_like(columns, job), columns) for each in self.demands]

    def possible(self, job: int) -> Ints:
        """(P,) the configurations that a job would like and that an empty cluster could hold."""
        possible, limits = self.utility[job] > 0, self.limits
        for limit, amount in self.demands_of(job):
            possible &= amount <= limits[limit] * (1.0 + ROUNDING)
        return np.nonzero(possible)[0]

    def objective(self, choice: Ints) -> float:
        """The utility of `choice`, (J,) configurations, −1 none."""
        chosen = np.nonzero(choice >= 0)[0]
        return float(self.utility[chosen, choice[chosen]].sum())

    def use(self, choice: Ints) -> Floats:
        """(R,) what `choice` takes of every limit."""
        chosen = np.nonzero(choice >= 0)[0]
        return use_of(self.demands, chosen, choice[chosen], len(self.limits))

    def fits(self, choice: Ints) -> bool:
        """Whether `choice` keeps every limit, every forced job and every −inf."""
        kept = self.forced is None or bool(((self.forced < 0) | (choice == self.forced)).all())
        within = bool((self.use(choice) <= self.limits * (1.0 + ROUNDING)).all())
        return kept and within and self.objective(choice) > -np.inf

    def _check_arrays(self) -> None:
        if self.utility.ndim != 2 or self.utility.dtype != np.float64:
            raise InputError(
                f"utility is {self.utility.dtype}{self.utility.shape}, expected float64, jobs × configurations."
            )
        jobs, columns = self.utility.shape
        if not self.utility.max(initial=-np.inf) < np.inf:  # NaN too: max() hands it on
            job, column = np.argwhere(~(self.utility < np.inf))[0]
            raise InputError(
                f"utility[{job}, {column}] is {self.utility[job, column]}, expected a finite number, or −inf for not "
                "allowed."
            )
        if (self.tenant is None) != (self.quota is None):
            raise InputError(f"quotas need both: {'tenant' if self.tenant is None else 'quota'} is None.")
        for name, array, length, least, end in (
            ("gpus", self.gpus, columns, 1, np.inf),
            ("gpu_type", self.gpu_type, columns, 0, self.types),
            ("capacity", self.capacity, self.types, 0, np.inf),
            ("forced", self.forced, jobs, -1, columns),
            ("tenant", self.tenant, jobs, 0, self.tenants),
            ("quota", self.quota, self.tenants, 0, np.inf),
        ):
            if array is None:
                continue
            if array.shape != (length,) or array.dtype.kind != "i":
                raise InputError(f"{name} is {array.dtype}{array.shape}, expected {length} integers.")
            if length and not (array.min() >= least and array.max() < end):
                expected = f"{least} to {end - 1}" if end < np.inf else f"at least {least}"
                raise InputError(f"{name} has {array.min()} to {array.max()}, expected {expected}.")
        if self.beside is not None:
            count = len(self.beside.names)
            for name, taken, shape in (
                ("demand", self.beside.demand, (count, jobs, columns)),
                ("capacity", self.beside.capacity, (count, self.types)),
            ):
                if taken.shape != shape:
                    raise InputError(f"beside.{name} is {taken.shape}, expected {shape}.")
                if len(wrong := np.argwhere(~((taken >= 0) & (taken < np.inf)))):
                    at = tuple(wrong[0].tolist())
                    raise InputError(f"beside.{name}{list(at)} is {taken[at]}, expected a finite number ≥ 0.")

    def _check_forced(self, forced: Ints) -> None:
        jobs = np.nonzero(forced >= 0)[0]
        banned = jobs[self.utility[jobs, forced[jobs]] == -np.inf]
        if len(banned):
            raise InputError(
                f"job {banned[0]} is forced to keep configuration {forced[banned[0]]}, but its utility there is −inf; "
                "give that utility a number or set forced to −1."
            )
        used, limits = self.use(forced), self.limits
        for at in np.nonzero(used > limits * (1.0 + ROUNDING))[0].tolist():
            where, resource = self.names_of_limits()[at]
            taken = [taken_of(each, jobs, forced[jobs])[0] == at for each in self.demands]
            holders = jobs[np.any(taken, axis=0)].tolist()
            first = ", ".join(map(str, holders[:5])) + (", …" if len(holders) > 5 else "")
            raise InputError(
                f"infeasible: the forced jobs hold {used[at]:g} {resource} of {where}, which has {limits[at]:g}; let "
                f"one of them go (forced = −1 for job {first}) or raise the limit."
            )


@dataclass(frozen=True, slots=True)
class Solution:
    """What each job gets, and how far from the best that can be at most.

    choice: (J,) configurations, −1 none. objective: Σ u of it. bound: no allocation is worth more.
    gap: (bound − objective) / |bound|, ≥ 0. prices: (R,) utility per unit of every limit; the bound follows from them
    alone (weak duality), and they start the next round warm.
    status: optimal (nothing is better) · within_gap (gap ≤ the target) · gap_open (nothing more to try) · time_limit:
    all with a feasible choice and a true bound.
    """

    choice: Ints
    objective: float
    bound: float
    gap: float
    status: Status
    prices: Floats


def relative_gap(objective: float, bound: float) -> float:
    """(bound − objective) / |bound|, at least 0; 0 where both differ by rounding only."""
    apart = bound - objective
    if apart <= ROUNDING * abs(bound):
        return 0.0
    return apart / max(abs(bound), TINY)


def certify(problem: Problem, choice: Ints, bound: float, prices: Floats, target: float, otherwise: Status) -> Solution:
    """`choice` with its gap to `bound`; the status follows from the gap, `otherwise` where the target is missed."""
    objective = problem.objective(choice)
    gap = relative_gap(objective, bound)
    status: Status = "optimal" if gap == 0.0 else "within_gap" if gap <= target else otherwise
    return Solution(choice, objective, max(bound, objective), gap, status, prices)


def proven(problem: Problem, choice: Ints, prices: Floats | None) -> Solution | None:
    """A solution with this choice if these prices prove that no allocation is worth more; None if they do not.

    prices: (R,) ≥ 0, such as those of the round before. The proof is weak duality: no allocation is worth more than
    prices · limits + Σ_j max(0, max_c (u_jc − prices · what it takes)), where a forced job has its one configuration.
    """
    if prices is None or prices.shape != problem.limits.shape or not problem.fits(choice):
        return None
    reduced = less_price(problem.utility, problem.demands, prices)
    best = reduced.max(axis=1, initial=0.0)
    if problem.forced is not None:
        kept = np.flatnonzero(problem.forced >= 0)
        best[kept] = reduced[kept, problem.forced[kept]]
    found = certify(problem, choice, float(prices @ problem.limits + best.sum()), prices, 0.0, "gap_open")
    return found if found.status == "optimal" else None
