"""Ways to allocate CPUs and memory, beside each other: what each can place, and what it bounds it by.

    python bench/allocator_ways.py [--jobs N ...]

256 nodes of 8 GPUs, 24 CPUs, 500 GB (`node_rounds`); everything as a part of the least bound known, which is that of
the charges or that of node patterns. A job counts with the share that it was allocated; where those of a node do not
fit, the jobs worth least are left out. CPU seconds are of one core.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from node_rounds import Mix, first_round, groups_of, jobs_of

from synergy_core.allocator import OtherResources, Problem, solve
from synergy_core.allocator.nodes import NodeProblem, allocate
from synergy_core.allocator.nodes.allocate import levels_of, set_levels
from synergy_core.allocator.nodes.layout import Layout, exchange, settle
from synergy_core.allocator.nodes.problem import Pooled, pooled
from synergy_core.units import GB

SHAPE = ((256, 8, 24.0, 500.0),)
MIXES: tuple[Mix, ...] = ((0.2, 0.7, 0.1), (0.33, 0.34, 0.33), (0.5, 0.0, 0.5))
Answer = tuple[float, float]
"""Utility placed, and the bound."""


def sums(pool: Pooled) -> Problem:
    """CPUs and memory as they are taken, summed."""
    assert pool.problem.others is not None
    demand = pool.columns.share[:, pool.jobs] * pool.columns.gpus
    return replace(pool.problem, others=OtherResources(("CPUs", "memory"), demand, pool.problem.others.capacity[1:]))


def dominant(pool: Pooled) -> Problem:
    """The largest part of a node that a row takes of anything."""
    assert pool.problem.others is not None
    room = pool.problem.others.capacity[1:] / pool.problem.capacity
    demand = pool.columns.share[:, pool.jobs] * pool.columns.gpus
    part = np.maximum(pool.columns.gpus, (demand / room[:, :1, None]).max(axis=0))
    return replace(pool.problem, others=OtherResources(("node",), part[None], pool.problem.others.capacity[:1]))


def proportional(pool: Pooled) -> Problem:
    """No share beyond the proportional one."""
    assert pool.problem.others is not None
    room = pool.problem.others.capacity[1:] / pool.problem.capacity
    beyond = (pool.columns.share[:, pool.jobs] > room[:, :1, None] * (1 + 1e-9)).any(axis=0)
    return replace(pool.problem, utility=np.where(beyond, -np.inf, pool.problem.utility), others=None)


def charges(pool: Pooled) -> Problem:
    """What a row leaves unusable is charged to it."""
    return pool.problem


def placed(problem: NodeProblem, made: Callable[[Pooled], Problem], *, swap: bool, level: bool) -> Answer:
    """What can be placed of a choice among pools; swap: jobs change places, level: shares may change."""
    pool = pooled(problem)
    columns, asked = pool.columns, made(pool)
    found = solve(asked, method="priced", gap=1e-3)
    layout = Layout(problem, pool)
    settle(layout, found.choice)
    host = np.zeros((2, 1)) if asked.others is None else found.prices[-2:][:, None]
    if swap:
        exchange(layout, 0, np.array([found.prices[0], *host[:, 0]]))
    if level:
        set_levels(layout, levels_of(columns.family), host)
    for node, here in enumerate(layout.jobs_on):
        for job in sorted(here, key=lambda each: columns.utility[each, layout.column[each]]):
            if (layout.free[1:, node] >= -1e-6 * layout.size[1:, node]).all():
                break
            layout.remove_job(job)
    return layout.utility(), found.bound


def whole(problem: NodeProblem) -> Answer:
    """`allocate` itself."""
    found = allocate(problem)
    return found.objective, found.bound


def patterns(problem: NodeProblem, steps: int = 400) -> Answer:
    """The linear programme over node patterns by column generation, jobs of one GPUs, CPUs and memory being one class.

    Its value is the least bound that patterns give; nothing is placed.
    """
    import highspy
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csc_matrix, hstack

    columns = pooled(problem).columns
    job, column = np.nonzero(columns.utility > 0)
    shared = columns.rest[column] > 0
    taken = np.stack((columns.rest[column], *columns.demand[:, job, column])) / np.array([[1], [1], [GB]])
    classes, of = np.unique(taken[:, shared], axis=1, return_inverse=True)
    room = np.array([problem.nodes.gpus[0], problem.nodes.cpus[0], problem.nodes.memory_bytes[0] / GB])
    jobs, kinds, count = len(problem.utility), classes.shape[1], len(job)
    at = np.arange(count)
    entries = (
        np.concatenate((np.ones(count + shared.sum()), columns.whole[column][~shared])),
        (
            np.concatenate((job, jobs + of.ravel(), np.full((~shared).sum(), jobs + kinds))),
            np.concatenate((at, at[shared], at[~shared])),
        ),
    )
    first = [np.eye(kinds)[each] * (room / classes[:, each]).min().astype(int) for each in range(kinds)]
    added = np.vstack((np.zeros((jobs, kinds)), -np.array(first).T, np.ones((1, kinds))))
    matrix = hstack((csc_matrix(entries, shape=(jobs + kinds + 1, count)), csc_matrix(added))).tocsc()
    model: Any = highspy.HighsLp()
    model.num_row_, model.num_col_ = matrix.shape
    model.sense_ = highspy.ObjSense.kMaximize
    model.col_cost_ = np.concatenate((columns.utility[job, column], np.zeros(kinds)))
    model.col_lower_, model.col_upper_ = np.zeros(count + kinds), np.full(count + kinds, highspy.kHighsInf)
    model.row_lower_ = np.full(jobs + kinds + 1, -highspy.kHighsInf)
    model.row_upper_ = np.concatenate((np.ones(jobs), np.zeros(kinds), problem.nodes.nodes.astype(float)))
    model.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    model.a_matrix_.start_, model.a_matrix_.index_ = matrix.indptr, matrix.indices
    model.a_matrix_.value_ = matrix.data
    highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    highs.passModel(model)
    bound = np.inf
    for _ in range(steps):
        highs.run()
        dual = np.array(highs.getSolution().row_dual)[jobs:]
        with silent():
            best = milp(
                -dual[:-1], constraints=LinearConstraint(classes, -np.inf, room), integrality=1, bounds=Bounds(0)
            )
        gain = -best.fun - dual[-1]
        bound = min(bound, highs.getInfo().objective_function_value + problem.nodes.nodes[0] * max(gain, 0.0))
        if gain <= 1e-7:
            break
        used = np.nonzero(best.x > 0.5)[0]
        value = np.append(-np.round(best.x[used]), 1.0)
        highs.addCol(
            0.0, 0.0, highspy.kHighsInf, len(value), np.append(jobs + used, jobs + kinds).astype(np.int32), value
        )
    return np.nan, float(bound)


@contextmanager
def silent() -> Iterator[None]:
    """HiGHS in SciPy prints a line about itself now and then, past Python's own output."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


WAYS: dict[str, Callable[[NodeProblem], Answer]] = {
    "proportional shares alone": lambda problem: placed(problem, proportional, swap=False, level=False),
    "dominant share charged": lambda problem: placed(problem, dominant, swap=False, level=False),
    "sums per GPU type": lambda problem: placed(problem, sums, swap=False, level=False),
    "sums, places and shares repaired": lambda problem: placed(problem, sums, swap=True, level=True),
    "charges": lambda problem: placed(problem, charges, swap=False, level=False),
    "charges, shares repaired": lambda problem: placed(problem, charges, swap=False, level=True),
    "charges, places and shares repaired": lambda problem: placed(problem, charges, swap=True, level=True),
    "and nodes dealt again: `allocate`": whole,
    "node patterns, the bound alone": patterns,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, nargs="+", default=[1_024, 3_072])
    chosen = parser.parse_args()
    nodes = groups_of(SHAPE)
    print("jobs  image/language/speech  way                                   placed    bound    CPU s")
    for jobs in chosen.jobs:
        for mix in MIXES:
            problem = first_round(nodes, jobs_of(nodes, jobs, mix, 0.0, 0))
            found = {}
            for name, way in WAYS.items():
                start = time.process_time()
                found[name] = (*way(problem), time.process_time() - start)
            # Bounds of ways that forbid some shares bound no others.
            least = min(found[name][1] for name in list(found)[-3:])
            for name, (utility, bound, took) in found.items():
                part = "       -" if np.isnan(utility) else f"{utility / least:8.2%}"
                mixed = "/".join(f"{each:.0%}"[:-1] for each in mix)
                print(f"{jobs:>5}  {mixed:<20}  {name:<36} {part} {bound / least:8.2%} {took:8.2f}", flush=True)


if __name__ == "__main__":
    main()
