"""The allocation problem of one round, its solution, and the checks of both.

x_jc is 1 if job j gets configuration c, with utility u_jc and n_c GPUs. Maximise Σ_jc u_jc x_jc with Σ_c x_jc ≤ 1 per
job (a forced job keeps its configuration); per GPU type t Σ_j Σ_{c of type t} n_c x_jc ≤ capacity_t; per tenant v Σ_{j
of v} Σ_c n_c x_jc ≤ quota_v (Sia, SOSP 2023, section 3.4, with quotas added); per other resource d, such as CPUs, and
type t Σ_j Σ_{c of type t} a_djc x_jc ≤ b_dt, where job j uses a_djc. Such an allocation may still not fit the nodes:
see `allocator.nodes`.

The code treats all constraints alike, as R *limits*: T capacities, then V quotas, then D·T limits of other resources.
A *demand*, for GPUs, for quotas or for one other resource, is a pair of arrays that broadcast to (J, C): the index of
the limit that job j uses in configuration c, and the amount that it uses.
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
"""Tolerance of sums of utilities of about 1 (`solve` scales others); a sum of thousands of float64 errs by less."""


def taken_of(demand: Demand, jobs: Ints, columns: Ints) -> Demand:
    """For N pairs of a job and a column: the limit that the job uses there, and how much of it; (N,) each.

    jobs, columns: (N,) indices. demand: limits (C,), (J, C), or (J, 1) if equal in all columns; amounts (C,) or (J, C).
    """
    limit, amount = demand
    return (
        limit[columns] if limit.ndim == 1 else limit[jobs, columns if limit.shape[1] > 1 else 0],
        amount[columns] if amount.ndim == 1 else amount[jobs, columns],
    )


def use_of(demands: Iterable[Demand], jobs: Ints, columns: Ints, limits: int) -> Floats:
    """(R,) the total use of each of R limits by N jobs, each in one column. jobs, columns: (N,) indices. limits: R."""
    used = np.zeros(limits)
    for demand in demands:
        used += np.bincount(*taken_of(demand, jobs, columns), limits)
    return used


def reduced_utility(utility: Floats, demands: Iterable[Demand], prices: Floats) -> Floats:
    """(J, C) reduced utility: utility minus Σ price · amount over all demands. prices: (R,) per unit of each limit."""
    (limit, amount), *others = demands
    left: Floats = utility - prices[limit] * amount
    for limit, amount in others:
        price = prices[limit]
        if price.any():
            left -= price * amount
    return left


@dataclass(frozen=True, slots=True)
class OtherResources:
    """Demand for D resources other than GPUs, such as CPUs and memory, each in its own unit.

    names: (D,). demand: (D, J, C) ≥ 0, of all GPUs of a job together. capacity: (D, T) ≥ 0, of each GPU type.
    """

    names: tuple[str, ...]
    demand: Floats
    capacity: Floats

    def per_gpu(self, gpus: Ints) -> Floats:
        """(D, T) number of GPUs of each type ÷ capacity of each resource; 1 where the capacity is 0. gpus: (T,)."""
        return np.where(self.capacity > 0, gpus / np.where(self.capacity > 0, self.capacity, 1.0), 1.0)


@dataclass(frozen=True, slots=True)
class Problem:
    """One round's choice for J jobs among C configurations on T GPU types, with quotas for V tenants.

    Raises InputError if shapes or ranges do not match, for NaN and +inf, and if the forced jobs alone exceed a limit.
    """

    utility: Floats
    """(J, C) float64, utility of job j in configuration c; −inf if it is not allowed. A job without GPUs has utility 0,
    so a configuration of utility ≤ 0 is chosen only if it is forced."""
    gpus: Ints
    """(C,) GPUs of each configuration, ≥ 1."""
    gpu_type: Ints
    """(C,) index into `capacity` of each configuration."""
    capacity: Ints
    """(T,) GPUs of each type, ≥ 0."""
    forced: Ints | None = None
    """(J,) configuration that a job must keep, −1 for none; None if no job is forced."""
    tenant: Ints | None = None
    """(J,) index into `quota` of each job, or (J, C) if the quota depends on the configuration. Set both or neither."""
    quota: Ints | None = None
    """(V,) GPUs of each quota, ≥ 0; None without quotas."""
    others: OtherResources | None = None
    """Limits of other resources, such as CPUs; None if only GPUs are limited."""

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
        """(R,) the amount that each limit permits."""
        quota = np.zeros(0) if self.quota is None else self.quota
        others = np.zeros(0) if self.others is None else self.others.capacity.ravel()
        return np.concatenate((self.capacity, quota, others), dtype=np.float64)

    @property
    def demands(self) -> list[Demand]:
        """The demands for GPUs of each type, quotas and other resources, in this order."""
        gpus = self.gpus.astype(np.float64)
        demands: list[Demand] = [(self.gpu_type, gpus)]
        if self.tenant is not None:
            tenant = self.tenant if self.tenant.ndim == 2 else self.tenant[:, None]
            demands.append((self.types + tenant, gpus))
        if self.others is not None:
            first = self.types + self.tenants
            demands += [(first + d * self.types + self.gpu_type, amount) for d, amount in enumerate(self.others.demand)]
        return demands

    def equals(self, other: Problem) -> bool:
        """Whether both have equal arrays; other resources are not compared."""
        names = ("utility", "gpus", "gpu_type", "capacity", "forced", "tenant", "quota")
        return all(np.array_equal(getattr(self, name), getattr(other, name)) for name in names)

    def names_of_limits(self, types: Sequence[str] = (), tenants: Sequence[str] = ()) -> list[tuple[str, str]]:
        """(GPU type or quota, resource) of each limit. types, tenants: names of the GPU types and tenants."""
        types = types or [f"type {index}" for index in range(self.types)]
        tenants = tenants or [f"tenant {index}" for index in range(self.tenants)]
        if len(tenants) < self.tenants:  # limits by tenant and type
            tenants = [f"{tenant}, {each}" for tenant in tenants for each in types]
        names = [(each, "GPUs") for each in (*types, *(f"quota of {each}" for each in tenants[: self.tenants]))]
        return names + [(each, name) for name in (self.others.names if self.others else ()) for each in types]

    def demands_of(self, job: int) -> list[Demand]:
        """The demands of one job, each as (C,) limits and (C,) amounts."""
        columns = np.arange(len(self.gpus))
        return [taken_of(each, np.full_like(columns, job), columns) for each in self.demands]

    def possible(self, job: int) -> Ints:
        """(P,) the configurations of positive utility that an empty cluster could hold."""
        possible, limits = self.utility[job] > 0, self.limits
        for limit, amount in self.demands_of(job):
            possible &= amount <= limits[limit] * (1.0 + ROUNDING)
        return np.nonzero(possible)[0]

    def objective(self, choice: Ints) -> float:
        """The total utility of `choice`: (J,) configurations, −1 for none."""
        chosen = np.nonzero(choice >= 0)[0]
        return float(self.utility[chosen, choice[chosen]].sum())

    def use(self, choice: Ints) -> Floats:
        """(R,) use of every limit by `choice`, (J,)."""
        chosen = np.nonzero(choice >= 0)[0]
        return use_of(self.demands, chosen, choice[chosen], len(self.limits))

    def fits(self, choice: Ints) -> bool:
        """Whether `choice`, (J,), respects all limits, keeps forced configurations and uses only allowed ones."""
        kept = self.forced is None or bool(((self.forced < 0) | (choice == self.forced)).all())
        within = bool((self.use(choice) <= self.limits * (1.0 + ROUNDING)).all())
        return kept and within and self.objective(choice) > -np.inf

    def _check_arrays(self) -> None:
        if self.utility.ndim != 2 or self.utility.dtype != np.float64:
            raise InputError(
                f"utility is {self.utility.dtype}{self.utility.shape}, expected float64, jobs × configurations."
            )
        jobs, columns = self.utility.shape
        if not self.utility.max(initial=-np.inf) < np.inf:  # finds NaN, too, which max() propagates
            job, column = np.argwhere(~(self.utility < np.inf))[0]
            raise InputError(
                f"utility[{job}, {column}] is {self.utility[job, column]}, expected a finite number, or −inf for not "
                "allowed."
            )
        if (self.tenant is None) != (self.quota is None):
            raise InputError(f"quotas need both: {'tenant' if self.tenant is None else 'quota'} is None.")
        by_column = columns if self.tenant is not None and self.tenant.ndim == 2 else 1
        for name, array, length, least, end in (
            ("gpus", self.gpus, columns, 1, np.inf),
            ("gpu_type", self.gpu_type, columns, 0, self.types),
            ("capacity", self.capacity, self.types, 0, np.inf),
            ("forced", self.forced, jobs, -1, columns),
            ("tenant", None if self.tenant is None else self.tenant.ravel(), jobs * by_column, 0, self.tenants),
            ("quota", self.quota, self.tenants, 0, np.inf),
        ):
            if array is None:
                continue
            if array.shape != (length,) or array.dtype.kind != "i":
                raise InputError(f"{name} is {array.dtype}{array.shape}, expected {length} integers.")
            if length and not (array.min() >= least and array.max() < end):
                expected = f"{least} to {end - 1}" if end < np.inf else f"at least {least}"
                raise InputError(f"{name} has {array.min()} to {array.max()}, expected {expected}.")
        if self.others is not None:
            count = len(self.others.names)
            for name, taken, shape in (
                ("demand", self.others.demand, (count, jobs, columns)),
                ("capacity", self.others.capacity, (count, self.types)),
            ):
                if taken.shape != shape:
                    raise InputError(f"others.{name} is {taken.shape}, expected {shape}.")
                if len(wrong := np.argwhere(~((taken >= 0) & (taken < np.inf)))):
                    index = tuple(wrong[0].tolist())
                    raise InputError(f"others.{name}{list(index)} is {taken[index]}, expected a finite number ≥ 0.")

    def _check_forced(self, forced: Ints) -> None:
        jobs = np.nonzero(forced >= 0)[0]
        banned = jobs[self.utility[jobs, forced[jobs]] == -np.inf]
        if len(banned):
            raise InputError(
                f"job {banned[0]} is forced to keep configuration {forced[banned[0]]}, but its utility there is −inf; "
                "give that utility a number or set forced to −1."
            )
        used, limits = self.use(forced), self.limits
        for limit in np.nonzero(used > limits * (1.0 + ROUNDING))[0].tolist():
            where, resource = self.names_of_limits()[limit]
            taken = [taken_of(each, jobs, forced[jobs])[0] == limit for each in self.demands]
            holders = jobs[np.any(taken, axis=0)].tolist()
            first = ", ".join(map(str, holders[:5])) + (", …" if len(holders) > 5 else "")
            raise InputError(
                f"infeasible: the forced jobs hold {used[limit]:g} {resource} of {where}, which has {limits[limit]:g}; "
                f"set forced to −1 for one of them (job {first}) or raise the limit."
            )


@dataclass(frozen=True, slots=True)
class Solution:
    """A feasible allocation with an upper bound on the utility of any allocation.

    choice: (J,) configurations, −1 for none. objective: their total utility. bound: no allocation has more utility.
    gap: (bound − objective) / |bound|, ≥ 0. prices: (R,) utility per unit of each limit, for the next round's warm
    start. status: optimal · within_gap (gap ≤ the target) · gap_open (the method ended with a larger gap) · time_limit.
    """

    choice: Ints
    objective: float
    bound: float
    gap: float
    status: Status
    prices: Floats


def relative_gap(objective: float, bound: float) -> float:
    """(bound − objective) / |bound|, at least 0; 0 if they differ only by rounding."""
    difference = bound - objective
    if difference <= ROUNDING * abs(bound):
        return 0.0
    return difference / max(abs(bound), TINY)


def certify(problem: Problem, choice: Ints, bound: float, prices: Floats, target: float, otherwise: Status) -> Solution:
    """Makes the solution from an allocation and an upper bound. otherwise: its status if the gap exceeds `target`."""
    objective = problem.objective(choice)
    gap = relative_gap(objective, bound)
    status: Status = "optimal" if gap == 0.0 else "within_gap" if gap <= target else otherwise
    return Solution(choice, objective, max(bound, objective), gap, status, prices)


def proven(problem: Problem, choice: Ints, prices: Floats | None) -> Solution | None:
    """The solution with this choice if these prices prove it optimal, else None.

    prices: (R,) ≥ 0, such as those of the previous round. The proof is weak duality: no allocation has more utility
    than prices · limits + Σ_j max(0, max_c (u_jc − prices · demand_jc)); a forced job has only one configuration.
    """
    if prices is None or prices.shape != problem.limits.shape or not problem.fits(choice):
        return None
    reduced = reduced_utility(problem.utility, problem.demands, prices)
    best = reduced.max(axis=1, initial=0.0)
    if problem.forced is not None:
        kept = np.flatnonzero(problem.forced >= 0)
        best[kept] = reduced[kept, problem.forced[kept]]
    found = certify(problem, choice, float(prices @ problem.limits + best.sum()), prices, 0.0, "gap_open")
    return found if found.status == "optimal" else None
