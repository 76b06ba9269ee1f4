"""Jobs with parallel plans: how fast the planner says they train, corrected by what was observed, and their batch."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from synergy_core.arrays import Floats
from synergy_core.cluster import Cluster
from synergy_core.errors import InputError
from synergy_core.goodput.efficiency import gain
from synergy_core.jobs.configurations import Configurations
from synergy_core.jobs.fitted import SynergyTask
from synergy_core.jobs.reports import Observations
from synergy_core.jobs.spec import JobSpec
from synergy_core.planner import tables

_Of = tuple[str, int, str, bool]
"""Architecture, global batch, GPU type, whether only its replicas may vary in number."""


class Speeds(Protocol):
    """What a scheduler reads of jobs with plans: seconds of a step, inf where no plan fits."""

    gpu_types: tuple[str, ...]

    def believed_s(self, architecture: str, batch: int, rows: Configurations) -> Floats:
        """(rows,): as whoever asks believes, on packed nodes."""

    def believed_on(self, architecture: str, batch: int, kind: str, gpus: int) -> float:
        """The same, on one number of GPUs of one type."""

    def best_on(self, architecture: str, batch: int, kind: str, gpus: int) -> float:
        """Under the best plan, with which jobs run whoever allocates."""


class PlannedSpeeds:
    """Step times on one cluster's GPU types, from the planner's tables, remembered.

    plans: whether who asks may read the tables in full; else a job's one plan, the smallest that fits, in replicas.
    """

    def __init__(self, cluster: Cluster, *, plans: bool) -> None:
        self.gpu_types = cluster.gpu_types
        self._plans = plans
        self._per_node = cluster.largest_nodes
        self._known: dict[_Of, dict[int, float]] = {}
        self._rows: dict[tuple[str, int, bytes], Floats] = {}

    def believed_s(self, architecture: str, batch: int, rows: Configurations) -> Floats:
        """(rows,): seconds of a step as whoever asks believes, on packed nodes; inf where no plan fits."""
        key = (architecture, batch, rows.key())
        if key not in self._rows:
            result = np.full(len(rows), np.inf)
            for index, kind in enumerate(self.gpu_types):
                at = np.flatnonzero(rows.gpu_type == index)
                known = self._table((architecture, batch, kind, not self._plans), rows.gpus[at].tolist())
                result[at] = [known[count] for count in rows.gpus[at].tolist()]
            self._rows[key] = result
        return self._rows[key]

    def believed_on(self, architecture: str, batch: int, kind: str, gpus: int) -> float:
        """The same, on one number of GPUs of one type."""
        return self._table((architecture, batch, kind, not self._plans), [gpus])[gpus]

    def best_on(self, architecture: str, batch: int, kind: str, gpus: int) -> float:
        """Seconds of a step under the best plan, with which jobs run whoever allocates."""
        return self._table((architecture, batch, kind, False), [gpus])[gpus]

    def _table(self, of: _Of, counts: list[int]) -> dict[int, float]:
        """Step times by number of GPUs, these among them."""
        known = self._known.setdefault(of, {})
        missing = tuple(sorted({count for count in counts if count not in known}))
        if missing:
            architecture, batch, kind, replicas_only = of
            nodes = ((kind, self._per_node[kind]),)
            table = tables.planned_tables(architecture, nodes, missing, batch, data_parallel_only=replicas_only)
            known.update(zip(table.gpus.tolist(), table.step_time_s.tolist(), strict=True))
        return known


class PlannedTask(SynergyTask):
    """What is believed of a job with plans: the planner's step times × what observed ones were of them.

    speeds: what the policy may read of the planner.
    """

    __slots__ = ("speeds",)

    def __init__(self, spec: JobSpec, pool: Observations, speeds: Speeds, *, shared: bool, declares: bool) -> None:
        super().__init__(spec, pool, shared=shared, declares=declares)
        self.speeds = speeds

    def batches(self, *, requested: bool = False) -> list[int]:
        """Global batches it may train at: doublings of the requested one; that alone until its noise is known."""
        spec = self.spec
        if requested or spec.fixed_batch or self.believed_statistics is None:
            return [spec.requested_batch]
        doublings = int(np.log2(max(1.0, spec.max_batch / spec.requested_batch)))
        return [spec.requested_batch << each for each in range(doublings + 1)]

    def gain(self, batch: int) -> float:
        """Iterations at the initial batch that one at that batch is worth."""
        sqr, var = self.believed_statistics or (1.0, 0.0)
        return gain(batch / self.spec.initial_batch, sqr, var)

    def goodput(self, rows: Configurations, *, requested: bool) -> Floats:
        """(rows,): initial-batch iterations per second at the best batch; 0 where no plan fits."""
        name = self.spec.architecture
        ratio = np.array([self.pool.ratio(kind) for kind in self.speeds.gpu_types])[rows.gpu_type]
        rates = [
            self.gain(batch) / self.speeds.believed_s(name, batch, rows) for batch in self.batches(requested=requested)
        ]
        return np.asarray(np.max(rates, axis=0) / ratio)

    def requested_rate(self, kind: str) -> float:
        """Iterations per second with the requested GPUs and batch; 0 where no plan fits."""
        spec = self.spec
        step_s = self.speeds.believed_on(spec.architecture, spec.requested_batch, kind, spec.requested_gpus)
        return 1.0 / (step_s * self.pool.ratio(kind))

    def choose_batch(self, gpu_type: str, gpus: int) -> int:
        """The global batch of most goodput there, under the best plan for it.

        Raises InputError where no plan fits.
        """
        name = self.spec.architecture
        steps = {batch: self.speeds.best_on(name, batch, gpu_type, gpus) for batch in self.batches()}
        best = max(steps, key=lambda batch: self.gain(batch) / steps[batch])
        if steps[best] == np.inf:
            raise InputError(f"{name} was given {gpus} GPUs of type {gpu_type}, on which no plan fits.")
        return best

    def observe_step(self, gpu_type: str, nodes: int, gpus: int, batch: int, step_s: float) -> None:
        """A mean step time of the running job, as a ratio to what was believed."""
        believed_s = self.speeds.believed_on(self.spec.architecture, batch, gpu_type, gpus)
        if believed_s < np.inf:
            self.pool.add_ratio(gpu_type, (nodes, gpus, batch), step_s / believed_s, later=self.shared)
