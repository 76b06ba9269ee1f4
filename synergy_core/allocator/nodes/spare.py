"""CPUs and memory that nobody asked for: handed to jobs that still gain from them, alike per GPU."""

from __future__ import annotations

import numpy as np

from synergy_core.allocator.nodes.layout import Layout
from synergy_core.arrays import Floats


def hand_out(layout: Layout) -> Floats:
    """(2, J) CPUs and memory of each GPU: what the row asks for, and of what is left on its nodes an equal part, up to
    what the job gains most from. 0 for jobs without GPUs.
    """
    problem, columns = layout.problem, layout.columns
    share = np.zeros((2, len(layout.column)))
    jobs = np.nonzero(layout.column >= 0)[0]
    share[:, jobs] = columns.share[:, jobs, layout.column[jobs]]
    if problem.most_cpus is None or problem.most_memory_bytes is None or not len(jobs):
        return share
    kind = problem.nodes.gpu_type[columns.group[layout.column[jobs]]]
    most = np.zeros_like(share)
    most[:, jobs] = np.stack((problem.most_cpus[jobs, kind], problem.most_memory_bytes[jobs, kind]))
    for at in range(2):
        _hand_out(layout, share[at], most[at], at + 1)
    return share


def _hand_out(layout: Layout, share: Floats, most: Floats, resource: int) -> None:
    left = np.maximum(layout.free[resource], 0.0)
    rest = np.where(layout.column >= 0, layout.columns.rest[layout.column], 0)
    for job, whole in layout.whole.items():
        # Every GPU of a job has the same share: what its whole nodes have, and no more than its part of the last one.
        more = min(float(layout.size[resource, whole[0]] / layout.size[0, whole[0]]), most[job]) - share[job]
        spot = int(layout.spot[job])
        if spot >= 0:
            hungry = sum(int(rest[each]) for each in layout.on[spot] if most[each] > share[each])
            more = min(more, left[spot] / max(hungry, 1))
            left[spot] -= max(more, 0.0) * rest[job]
        share[job] += max(more, 0.0)
    alone = [job for here in layout.on for job in here if job not in layout.whole and most[job] > share[job]]
    wanting = np.array(alone, dtype=np.int64)
    # In rounds: who reaches what it gains most from leaves the rest to the others.
    while len(wanting):
        node, gpus = layout.spot[wanting], rest[wanting]
        part = left[node] / np.bincount(node, gpus, len(left))[node]
        more = np.minimum(part, most[wanting] - share[wanting])
        share[wanting] += more
        left = np.maximum(left - np.bincount(node, more * gpus, len(left)), 0.0)
        full = more < part
        if not full.any():
            return
        crowded = np.bincount(node[full], minlength=len(left)) > 0
        wanting = wanting[~full & crowded[node]]
