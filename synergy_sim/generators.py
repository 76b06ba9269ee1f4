"""`python -m synergy_sim.generators` generates traces (`synergy_runs.generators`) and simulates their waits.

The waits of generated jobs under their tenants' quotas are compared with those of the real jobs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from synergy_core.cli import run
from synergy_core.scheduling.jobs.cluster import Cluster, NodeType
from synergy_core.scheduling.policies import get_policy
from synergy_runs.generators.statistics import Statistics
from synergy_runs.inputs.from_settings import without_misfits
from synergy_runs.inputs.workload import from_rows, with_estimates
from synergy_runs.outputs.facts import Kind
from synergy_runs.traces.rows import TraceRows
from synergy_sim.simulate import simulate

CASES = (("fifo", True), ("backfill", True), ("backfill", False))
"""(policy, whether tenants have quotas). `fifo` keeps the order of arrival; `backfill` lets jobs overtake."""


def queueing_delays(known: Statistics, rows: TraceRows) -> Iterator[tuple[str, NDArray[np.float64]]]:
    """Yields (name of the case, seconds from submission to first start of every job); launches take no time."""
    # The cluster has at least as many nodes as the tenants' quotas need.
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
        yield f"{name}, {'quotas' if quotas else 'one pool'}", first_s - work.jobs["submit_time_s"]


def _main() -> int:
    from synergy_runs.generators.command import main

    return main(delays=queueing_delays)


if __name__ == "__main__":
    run("error", _main, interrupted="no partial log was written.")
