"""Tenants' quotas while jobs get GPUs one after another: who is within its quota, who borrows next, who gives back.

What is within a quota comes before what is borrowed. Borrowed GPUs are shared equally among the tenants that ask for
them: the next job to borrow is always one of the tenant that has borrowed least. If a job within its tenant's quota
finds too few GPUs, jobs beyond their tenants' quotas give GPUs back (`Cluster.reclaim`), as few as suffice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

Tenant = TypeVar("Tenant", bound=Hashable)
AnyJob = TypeVar("AnyJob")


class Quotas(Generic[Tenant]):
    """Counts the GPUs that tenants hold against their quotas. Without any quotas, every job is within its quota.

    gpus: each tenant's quota; 0 for a tenant without one.
    """

    def __init__(self, gpus: Mapping[Tenant, float]) -> None:
        self._gpus = gpus
        self._used: dict[Tenant, float] = {}

    def use(self, tenant: Tenant, gpus: float) -> None:
        """Counts GPUs that a job of the tenant holds; negative, if it gives them back."""
        if self._gpus:
            self._used[tenant] = self._used.get(tenant, 0) + gpus

    def left(self, tenant: Tenant) -> float:
        """GPUs of the tenant's quota that are unused; negative if the tenant has borrowed, inf without quotas."""
        return self._gpus.get(tenant, 0) - self._used.get(tenant, 0) if self._gpus else float("inf")

    def in_turn(self, jobs: Iterable[tuple[Tenant, AnyJob]]) -> Iterator[AnyJob]:
        """The jobs in the order in which they may borrow: next is the first job of the tenant that has borrowed least.

        jobs: with their tenants; of equal tenants, the one whose job is listed first has its turn. The caller counts
        what a job has got (`use`) before it takes the next one.
        """
        lines: dict[Tenant, deque[tuple[int, AnyJob]]] = {}
        for position, (tenant, job) in enumerate(jobs):
            lines.setdefault(tenant, deque()).append((position, job))
        heap = [(max(0.0, -self.left(tenant)), line[0][0], tenant) for tenant, line in lines.items()]
        heapify(heap)
        while heap:
            tenant = heappop(heap)[2]
            yield lines[tenant].popleft()[1]
            if lines[tenant]:
                heappush(heap, (max(0.0, -self.left(tenant)), lines[tenant][0][0], tenant))


def fewest(gpus: Sequence[int], short: int) -> Iterator[list[int]]:
    """Positions of jobs that hold at least `short` GPUs together, for each possible total, the smallest total first.

    Totals end where some job could be left out. Of sets with the same total, the one with the last positions is taken.
    gpus: of each job, at least 1.
    """
    reached = [1]  # bit t of entry n: whether some of the first n jobs hold t GPUs together
    for count in gpus:
        reached.append(reached[-1] | reached[-1] << count)
    for total in range(max(short, 1), max(short, 1) + max(gpus, default=0)):
        if reached[-1] >> total & 1:
            chosen, rest = [], total
            for at in range(len(gpus) - 1, -1, -1):
                if gpus[at] <= rest and reached[at] >> (rest - gpus[at]) & 1:
                    chosen.append(at)
                    rest -= gpus[at]
            yield chosen
