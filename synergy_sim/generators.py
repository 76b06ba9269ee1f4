"""`python -m synergy_sim.generators`: generated traces (`synergy_runs.generators`), with the waits of their jobs.

How long generated jobs would wait under their tenants' quotas stands beside how long the real ones did.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from synergy_core.cluster import Cluster, NodeType
from synergy_core.commands import run
from synergy_core.policies import get_policy
from synergy_runs.facts import Kind
from synergy_runs.generators.statistics import Statistics
from synergy_runs.inputs import without_misfits
from synergy_runs.traces.rows import TraceRows
from synergy_runs.workload import from_rows, with_estimates
from synergy_sim.simulate import simulate

CASES = (("fifo", True), ("backfill", True), ("backfill", False))
"""(policy, whether tenants have quotas): strictly in order of arrival, or past jobs that do not fit yet."""


def queueing_delays(known: Statistics, rows: TraceRows) -> Iterator[tuple[str, NDArray[np.float64]]]:
    """(what is simulated, first start − submission of every job in seconds); launches take no time."""
    # The number of nodes that the tenants' quotas need, if that is more than the cluster has.
    nodes = max(known.nodes, sum(known.virtual_cluster_nodes))
    cluster = Cluster((NodeType("gpu", "gpu", nodes, known.gpus_per_node),), virtual_clusters=dict(known.quotas))
    work = without_misfits(from_rows(rows, name=known.name), cluster)  # a real log has tenants without a quota
    work = with_estimates(work, 0.0, np.random.default_rng(0))
    for name, quotas in CASES:
        on = cluster if quotas else replace(cluster, virtual_clusters={})
        events = simulate(work, on, get_policy(name)).events
        starts = (events.kind == Kind.START) & (events.part == 0)
        first_s = np.full(len(work), np.inf)
        np.minimum.at(first_s, events.job_id[starts], events.time_s[starts])
        yield f"{name}, {'quotas' if quotas else 'one pool'}", first_s - work.submit_time_s


def _main() -> int:
    from synergy_runs.generators.command import main

    return main(delays=queueing_delays)


if __name__ == "__main__":
    run("error", _main, interrupted="the log is written whole or not at all.")
