"""Rounds with shares and nodes as drawn, what holds of every answer, and the best there is by integer programme."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_array

from synergy_core.scheduling.allocator.nodes import NodeGroups, NodeProblem, NodeSolution, Pieces
from synergy_core.units import GB

SHAPES = ((4, 12.0, 64.0), (8, 24.0, 500.0), (2, 16.0, 32.0), (3, 7.0, 50.0), (8, 96.0, 250.0))


def random_nodes(rng: np.random.Generator, groups: int, most_nodes: int) -> NodeGroups:
    """Groups of any shape; the second may be of the first one's GPU type."""
    shape = [SHAPES[int(rng.integers(len(SHAPES)))] for _ in range(groups)]
    kind = np.arange(groups)
    if groups > 1 and rng.random() < 0.4:
        kind[1:] -= 1
    gpus, cpus, memory = (np.array(each) for each in zip(*shape, strict=True))
    return NodeGroups(kind, rng.integers(1, most_nodes + 1, groups), gpus, cpus, memory * GB)


def random_round(
    seed: int,
    jobs: int,
    *,
    groups: int = 1,
    most_nodes: int = 3,
    sizes: tuple[int, ...] = (1, 2, 4, 8),
    levels: int = 3,
    tenants: int = 0,
    pinned: bool = False,
    movable: bool = False,
    spare: bool = True,
) -> NodeProblem:
    """Jobs whose utility grows with GPUs and share; some hold GPUs, some of those are pinned."""
    rng = np.random.default_rng(seed)
    nodes = random_nodes(rng, groups, most_nodes)
    types = int(nodes.gpu_type.max()) + 1
    gpus = np.tile(np.repeat(np.array(sizes), levels), types)
    kind = np.repeat(np.arange(types), len(sizes) * levels)
    level = np.tile(np.arange(levels), types * len(sizes))
    hunger = rng.choice([0.3, 1.0, 3.0], (jobs, 1)) * rng.uniform(0.8, 1.2, (jobs, 1))
    part = (1 + level) / levels
    least = np.array([(nodes.cpus / nodes.gpus)[nodes.gpu_type == each].min() for each in range(types)])
    fewest = np.array([(nodes.memory_bytes / nodes.gpus)[nodes.gpu_type == each].min() for each in range(types)])
    cpus = least[kind] * hunger * part
    memory = fewest[kind] * hunger * part * rng.uniform(0.3, 1.5, (jobs, 1))
    gain = rng.uniform(0.2, 1.0, (jobs, 1))
    utility = rng.uniform(0.3, 2.0, (jobs, 1)) * (gpus * part**gain) ** rng.uniform(0.3, 0.9, (jobs, 1))
    utility[rng.random(utility.shape) < 0.1] = -np.inf
    room = np.zeros((2, len(gpus)))
    for each in range(groups):
        here = (kind == nodes.gpu_type[each]) & (gpus <= nodes.gpus[each] * nodes.nodes[each])
        here &= (gpus <= nodes.gpus[each]) | (nodes.gpus[each] == nodes.gpus[nodes.gpu_type == kind[0]].max())
        on_node = np.minimum(gpus, nodes.gpus[each])
        for at, have in enumerate((nodes.cpus[each], nodes.memory_bytes[each])):
            room[at] = np.where(here, np.maximum(room[at], have / on_node), room[at])
    utility[(cpus > room[0]) | (memory > room[1])] = -np.inf
    rows = utility, gpus, kind, cpus, memory
    held, kept = _laid(rng, nodes, rows, pinned)
    tenant = quota = None
    if tenants:
        tenant = rng.integers(tenants, size=jobs)
        has = np.bincount(held.job, held.gpus, jobs)
        most = np.bincount(tenant, np.where(kept, has, 0), tenants).astype(np.int64)
        quota = np.maximum(most, int((nodes.nodes * nodes.gpus).sum()) // tenants)
    move_cost = rng.uniform(0.0, 0.3, jobs) if movable else None
    most_of = [
        np.full((jobs, types), float(each.max())) * rng.random((jobs, 1)) if spare else None
        for each in (nodes.cpus, nodes.memory_bytes)
    ]
    return NodeProblem(*rows, nodes, held, kept, move_cost, tenant, quota, *most_of)


def _laid(
    rng: np.random.Generator, nodes: NodeGroups, rows: tuple[np.ndarray, ...], pinned: bool
) -> tuple[Pieces, np.ndarray]:
    """Who lies where: whole nodes, and the rest on one more; pinned only where all the levels asked for fit there.

    rows: utility, GPUs, types, CPUs and memory, as of `NodeProblem`.
    """
    utility, gpus, kind, cpus, memory = rows
    of, size = nodes.group_of, nodes.gpus[nodes.group_of]
    free = np.stack((size, nodes.cpus[of], nodes.memory_bytes[of])).astype(float)
    pieces: list[tuple[int, int, int]] = []
    kept = np.zeros(len(utility), dtype=bool)
    for job in range(len(utility)):
        wanted = np.nonzero(utility[job] > -np.inf)[0]
        if rng.random() < 0.5 or not len(wanted):
            continue
        row = int(rng.choice(wanted))
        for group in np.nonzero(nodes.gpu_type == kind[row])[0].tolist():
            count = int(nodes.gpus[group])
            if gpus[row] > count and count < nodes.gpus[nodes.gpu_type == kind[row]].max():
                continue
            here = np.nonzero(of == group)[0]
            empty = here[free[0, here] == size[here]]
            whole, rest = divmod(int(gpus[row]), count)
            last = [node for node in here if free[0, node] >= rest and node not in empty[:whole]][:1] if rest else []
            if len(empty) < whole or (rest and not last):
                continue
            parts = [(node, count) for node in empty[:whole].tolist()] + [(int(node), rest) for node in last]
            share = np.array([cpus[job, row], memory[job, row]])
            kept[job] = pinned and rng.random() < 0.5
            kept[job] &= all((share * taken <= free[1:, node]).all() for node, taken in parts)
            for node, taken in parts:
                free[0, node] -= taken
                if kept[job]:
                    free[1:, node] -= share * taken
                pieces.append((job, node, taken))
            break
    return Pieces(*(np.array([each[at] for each in pieces], dtype=np.int64) for at in range(3))), kept


def check(problem: NodeProblem, found: NodeSolution) -> None:
    """Everything allocated is placed, within every node and quota, as jobs are laid; the figures are those of it."""
    nodes, of, placed = problem.nodes, problem.nodes.group_of, found.placed
    jobs = len(problem.utility)
    given = found.choice >= 0
    total = np.bincount(placed.job, placed.gpus, jobs)
    assert (total == np.where(given, problem.gpus[found.choice], 0)).all()
    assert (np.diff(placed.job) >= 0).all()
    for share, room, each in (
        (np.ones(jobs), nodes.gpus, 0.0),
        (found.cpus, nodes.cpus, 1e-6),
        (found.memory_bytes, nodes.memory_bytes, 1e-6),
    ):
        used = np.bincount(placed.node, placed.gpus * share[placed.job], len(of))
        assert (used <= room[of] * (1 + each)).all()
    chosen = np.nonzero(given)[0]
    row = found.choice[chosen]
    assert (problem.utility[chosen, row] > -np.inf).all()
    assert (found.cpus[chosen] >= problem.cpus[chosen, row]).all()
    assert (found.memory_bytes[chosen] >= problem.memory_bytes[chosen, row]).all()
    assert (found.cpus[~given] == 0).all()
    kept = np.zeros(jobs, dtype=bool) if problem.pinned is None else problem.pinned
    held = problem.held if problem.held is not None else Pieces.none()
    was, now = ({job: set() for job in range(jobs)} for _ in range(2))
    for pieces, into in ((held, was), (placed, now)):
        for job, node, gpus in zip(pieces.job.tolist(), pieces.node.tolist(), pieces.gpus.tolist(), strict=True):
            into[job].add((node, gpus))
    for job in chosen.tolist():
        parts = now[job]
        groups = {int(of[node]) for node, _ in parts}
        assert {int(nodes.gpu_type[group]) for group in groups} == {int(problem.gpu_type[found.choice[job]])}
        if kept[job]:
            assert parts == was[job]
        else:
            assert len(groups) == 1
            assert sum(gpus < nodes.gpus[of[node]] for node, gpus in parts) <= 1
    assert (given | ~kept).all()
    if problem.tenant is not None and problem.quota is not None:
        assert (np.bincount(problem.tenant, total, len(problem.quota)) <= problem.quota).all()
    worth = float(problem.utility[chosen, row].sum())
    cost = np.zeros(jobs) if problem.move_cost is None else problem.move_cost
    assert found.objective == pytest.approx(worth - float(cost[found.moved].sum()))
    assert found.objective <= found.bound + 1e-9
    for job in np.nonzero(found.moved)[0].tolist():
        assert was[job] != now[job]
        assert sum(gpus for _, gpus in was[job]) == total[job]


def best_placed(problem: NodeProblem) -> float:
    """The utility of the best that can be placed, by an integer programme with a variable for every node."""
    nodes, of = problem.nodes, problem.nodes.group_of
    held = problem.held if problem.held is not None else Pieces.none()
    kept = np.zeros(len(problem.utility), dtype=bool) if problem.pinned is None else problem.pinned
    worth: list[float] = []
    rows: list[tuple[list[tuple[int, float]], float, float]] = []
    used: list[list[list[tuple[int, float]]]] = [[[], [], []] for _ in of]
    owned: dict[int, list[tuple[int, float]]] = {}
    quota: list[list[tuple[int, float]]] = [[] for _ in range(0 if problem.quota is None else len(problem.quota))]

    def variable(value: float = 0.0) -> int:
        worth.append(value)
        return len(worth) - 1

    def take(node: int, gpus: int, job: int, row: int, at: int) -> None:
        for terms, share in zip(
            used[node], (1.0, problem.cpus[job, row], problem.memory_bytes[job, row] / GB), strict=True
        ):
            terms.append((at, float(gpus * share)))

    for job, row in np.argwhere(problem.utility > -np.inf).tolist():
        for group in np.nonzero(nodes.gpu_type == problem.gpu_type[row])[0].tolist():
            gpus, count = int(nodes.gpus[group]), int(problem.gpus[row])
            here = np.nonzero(of == group)[0].tolist()
            mine = [(int(n), int(g)) for j, n, g in zip(held.job, held.node, held.gpus, strict=True) if j == job]
            if kept[job] and (sum(g for _, g in mine) != count or of[mine[0][0]] != group):
                continue
            if not kept[job] and count > gpus and gpus < nodes.gpus[nodes.gpu_type == problem.gpu_type[row]].max():
                continue
            taken = variable(float(problem.utility[job, row]))
            owned.setdefault(job, []).append((taken, 1.0))
            if problem.tenant is not None:
                quota[int(problem.tenant[job])].append((taken, float(count)))
            if kept[job]:
                for node, part in mine:
                    take(node, part, job, row, taken)
                continue
            whole, rest = divmod(count, gpus)
            for nodes_taken, size in ((whole, gpus), (int(rest > 0), rest)):
                if nodes_taken:
                    alone = [variable() for _ in here]
                    rows.append(([*((each, 1.0) for each in alone), (taken, -float(nodes_taken))], 0.0, 0.0))
                    for node, each in zip(here, alone, strict=True):
                        take(node, size, job, row, each)
    rows += [(terms, float(kept[job]), 1.0) for job, terms in owned.items()]
    for node, parts in enumerate(used):
        room = nodes.gpus[of[node]], nodes.cpus[of[node]], nodes.memory_bytes[of[node]] / GB
        rows += [(terms, -np.inf, float(limit)) for terms, limit in zip(parts, room, strict=True)]
    if problem.quota is not None:
        rows += [(terms, -np.inf, float(limit)) for terms, limit in zip(quota, problem.quota, strict=True)]
    if not worth:
        return 0.0
    matrix = lil_array((len(rows), len(worth)))
    for at, (terms, _, _) in enumerate(rows):
        for each, value in terms:
            matrix[at, each] += value
    limits = LinearConstraint(matrix.tocsr(), [each[1] for each in rows], [each[2] for each in rows])
    found = milp(-np.array(worth), integrality=1, bounds=Bounds(0, 1), constraints=limits, options={"mip_rel_gap": 0.0})
    assert found.status == 0
    return -float(found.fun)
