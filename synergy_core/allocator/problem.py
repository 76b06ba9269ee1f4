"""Which configuration each job gets: the problem of one round, its answer, and what both must satisfy.

maximise Σ_jc u_jc x_jc, x binary; Σ_c x_jc ≤ 1 per job (= 1, and which, if forced); per GPU type t
Σ_j Σ_{c of type t} n_c x_jc ≤ capacity_t; per tenant v Σ_{j of v} Σ_c n_c x_jc ≤ quota_v
(Sia, SOSP 2023, section 3.4, with quotas added); for each resource d beside GPUs, and per type t,
Σ_j Σ_{c of type t} a_djc x_jc ≤ b_dt. That these sums fit does not mean that nodes can hold it: `allocator.nodes`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from synergy_core.arrays import Floats, Ints
from synergy_core.errors import InputError

Status = Literal["optimal", "within_gap", "gap_open", "time_limit", "no_solver"]

TINY = 1e-12
ROUNDING = 1e-9
"""On utilities of about 1 (`solve` scales others): sums of thousands of float64 differ by less in another order."""


@dataclass(frozen=True, slots=True)
class Beside:
    """What configurations take beside GPUs, of D resources such as CPUs and memory; each in a unit of its own.

    names: (D,). demand: (D, J, C) ≥ 0, of the whole configuration, not per GPU. capacity: (D, T) ≥ 0, of each GPU type.
    """

    names: tuple[str, ...]
    demand: Floats
    capacity: Floats

    def use(self, gpu_type: Ints, choice: Ints) -> Floats:
        """(D, T) that `choice` takes, (J,) configurations, −1 none."""
        chosen = np.nonzero(choice >= 0)[0]
        column = choice[chosen]
        taken = self.demand[:, chosen, column]
        return np.array([np.bincount(gpu_type[column], each, self.capacity.shape[1]) for each in taken])

    def per_gpu(self, gpus: Ints) -> Floats:
        """(D, T): GPUs of a type, (T,), for each unit of what it has beside them; 1 where it has none of it."""
        return np.where(self.capacity > 0, gpus / np.where(self.capacity > 0, self.capacity, 1.0), 1.0)

    def check(self, jobs: int, columns: int, types: int) -> None:
        """Raises InputError where a shape or a value is wrong."""
        count = len(self.names)
        for name, array, shape in (
            ("demand", self.demand, (count, jobs, columns)),
            ("capacity", self.capacity, (count, types)),
        ):
            if array.shape != shape:
                raise InputError(f"beside.{name} has shape {array.shape}, expected {shape}.")
            bad = ~((array >= 0) & (array < np.inf))
            if bad.any():
                at = tuple(np.argwhere(bad)[0].tolist())
                raise InputError(f"beside.{name}{list(at)} is {array[at]}, expected a finite number ≥ 0.")


@dataclass(frozen=True, slots=True)
class Problem:
    """One round's choice for J jobs among C configurations on T GPU types, with quotas for V tenants.

    utility: (J, C) float64, what giving job j configuration c is worth; −inf where that is not allowed. Nothing is
    worth 0, so a utility ≤ 0 is never chosen unless forced. gpus: (C,) ≥ 1. gpu_type: (C,) indices into capacity.
    capacity: (T,) GPUs. forced: (J,) the configuration a job must keep, −1 for none; None forces nobody.
    tenant: (J,) indices into quota, (V,) GPUs summed over types; both or neither. beside: what they take beside GPUs.
    Raises InputError where shapes, types or ranges do not match, on NaN or +inf, and where the forced jobs alone
    exceed a capacity or a quota.
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
        self._check_shapes()
        self._check_ranges()
        if self.beside is not None:
            self.beside.check(self.jobs, len(self.gpus), self.types)
        if self.forced is not None:
            self._check_forced()

    @property
    def jobs(self) -> int:
        """The number of jobs, J."""
        return len(self.utility)

    @property
    def types(self) -> int:
        """The number of GPU types, T."""
        return len(self.capacity)

    @property
    def rows(self) -> Ints:
        """(T + V,) GPUs on the right of every row: capacities, then quotas."""
        return self.capacity if self.quota is None else np.concatenate((self.capacity, self.quota))

    @property
    def priced_rows(self) -> int:
        """How many rows have a price: T + V + D T."""
        return len(self.rows) + (self.beside.capacity.size if self.beside is not None else 0)

    def objective(self, choice: Ints) -> float:
        """The utility of `choice`, (J,) configurations, −1 none."""
        chosen = np.nonzero(choice >= 0)[0]
        return float(self.utility[chosen, choice[chosen]].sum())

    def use(self, choice: Ints) -> Ints:
        """(T + V,) GPUs that `choice` takes of each row."""
        chosen = np.nonzero(choice >= 0)[0]
        column = choice[chosen]
        taken = self.gpus[column]
        used = np.bincount(self.gpu_type[column], taken, len(self.capacity))
        if self.tenant is not None and self.quota is not None:
            used = np.concatenate((used, np.bincount(self.tenant[chosen], taken, len(self.quota))))
        return used.astype(np.int64)

    def fits(self, choice: Ints) -> bool:
        """Whether `choice` keeps every row, every forced job and every −inf."""
        kept = self.forced is None or bool(((self.forced < 0) | (choice == self.forced)).all())
        kept = kept and bool((self.use(choice) <= self.rows).all()) and self.objective(choice) > -np.inf
        if self.beside is None or not kept:
            return kept
        limit = self.beside.capacity * (1.0 + ROUNDING)
        return bool((self.beside.use(self.gpu_type, choice) <= limit).all())

    def _check_shapes(self) -> None:
        array = self.utility
        if not isinstance(array, np.ndarray) or array.ndim != 2 or array.dtype != np.float64:
            got = f"{array.dtype}{array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
            raise InputError(f"utility is {got}, expected a float64 array of jobs × configurations.")
        jobs, columns = self.utility.shape
        if (self.tenant is None) != (self.quota is None):
            missing = "tenant" if self.tenant is None else "quota"
            raise InputError(f"quotas need both `tenant` and `quota`; {missing} is None.")
        for name, length in (("gpus", columns), ("gpu_type", columns), ("forced", jobs), ("tenant", jobs)):
            self._check_ints(name, getattr(self, name), length)
        self._check_ints("capacity", self.capacity, None)
        self._check_ints("quota", self.quota, None)

    @staticmethod
    def _check_ints(name: str, array: Ints | None, length: int | None) -> None:
        if array is None and name in ("forced", "tenant", "quota"):
            return
        if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind != "i":
            got = f"{array.dtype}{array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
            raise InputError(f"{name} is {got}, expected a one-dimensional integer array.")
        if length is not None and len(array) != length:
            raise InputError(f"{name} has {len(array)} entries, expected {length} to match utility.")

    def _check_ranges(self) -> None:
        if self.utility.size:
            largest = self.utility.max()
            if not largest < np.inf:  # NaN too: max() hands it on
                job, column = np.argwhere(np.isnan(self.utility) | (self.utility == np.inf))[0]
                got = self.utility[job, column]
                raise InputError(
                    f"utility[{job}, {column}] is {got}, expected a finite number, or −inf for not allowed."
                )
            if self.gpus.min() < 1:
                raise InputError(f"gpus has {self.gpus.min()}, expected at least 1 GPU in every configuration.")
        self._check_index("gpu_type", self.gpu_type, 0, len(self.capacity))
        self._check_index("forced", self.forced, -1, self.utility.shape[1])
        if self.quota is not None:
            self._check_index("tenant", self.tenant, 0, len(self.quota))
        for name, array in (("capacity", self.capacity), ("quota", self.quota)):
            if array is not None and len(array) and array.min() < 0:
                raise InputError(f"{name} has {array.min()}, expected at least 0 GPUs.")

    @staticmethod
    def _check_index(name: str, array: Ints | None, least: int, end: int) -> None:
        if array is not None and len(array) and not (array.min() >= least and array.max() < end):
            raise InputError(f"{name} has {array.min()} to {array.max()}, expected {least} to {end - 1}.")

    def _check_forced(self) -> None:
        assert self.forced is not None
        jobs = np.nonzero(self.forced >= 0)[0]
        if not len(jobs):
            return
        banned = self.utility[jobs, self.forced[jobs]] == -np.inf
        if banned.any():
            job = int(jobs[banned][0])
            raise InputError(
                f"job {job} is forced to keep configuration {self.forced[job]}, but its utility there is −inf; "
                "give that utility a number or set forced to −1."
            )
        used, rows = self.use(self.forced), self.rows
        self._check_forced_beside()
        for row in np.nonzero(used > rows)[0].tolist():
            kind = row < len(self.capacity)
            held = self.gpu_type[self.forced[jobs]] == row if kind else self.tenant[jobs] == row - len(self.capacity)  # type: ignore[index]
            where = f"GPU type {row}" if kind else f"tenant {row - len(self.capacity)}"
            limit = "capacity" if kind else "quota"
            first = ", ".join(map(str, jobs[held][:5].tolist())) + (", …" if held.sum() > 5 else "")
            raise InputError(
                f"infeasible: the {held.sum()} forced jobs on {where} hold {used[row]} GPUs, its {limit} is "
                f"{rows[row]}; let one of them go (forced = −1 for job {first}) or raise the {limit}."
            )

    def _check_forced_beside(self) -> None:
        if self.beside is None:
            return
        assert self.forced is not None
        used, limit = self.beside.use(self.gpu_type, self.forced), self.beside.capacity
        for at, kind in np.argwhere(used > limit * (1.0 + ROUNDING)).tolist():
            raise InputError(
                f"infeasible: the forced jobs on GPU type {kind} hold {used[at, kind]:g} of {self.beside.names[at]}, "
                f"its capacity is {limit[at, kind]:g}; let one of them go (forced = −1) or raise the capacity."
            )


@dataclass(frozen=True, slots=True)
class Solution:
    """What each job gets, and how far from the best that can be at most.

    choice: (J,) configurations, −1 none. objective: Σ u of it. bound: no allocation is worth more.
    gap: (bound − objective) / |bound|, ≥ 0. prices: (T + V,) utility per GPU of every row, capacities first, then (D T)
    per unit of what is beside GPUs, types within resources; the bound follows from them alone (weak duality), and they
    start the next round warm.
    status: optimal (nothing is better) · within_gap (gap ≤ the target) · gap_open (nothing more to try) · time_limit ·
    no_solver (neither HiGHS nor CBC is installed): all with a feasible choice and a true bound.
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
