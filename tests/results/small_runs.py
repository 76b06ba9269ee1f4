"""A scheduler for tests of results only: the head of a queue blocks, GPUs first come first served, exact facts."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count

import numpy as np
from jobs import workload as jobs_of

from synergy_core.scheduling.jobs.cluster import Cluster, NodeType
from synergy_core.units import on_grid
from synergy_runs.inputs.workload import Workload
from synergy_runs.outputs.facts import DecisionLog, EventLog, Kind, Run
from synergy_runs.traces.columns import coded
from synergy_runs.traces.rows import STATES

Key = Callable[[int], float]


def cluster(nodes: int = 2, gpus_per_node: int = 8, **more) -> Cluster:
    return Cluster((NodeType("node", "v100", nodes, gpus_per_node),), **more)


def workload(
    submit_s: Sequence[float],
    duration_s: Sequence[float],
    gpus: Sequence[int],
    *,
    tenants: Sequence[int] | None = None,
    tenant_names: tuple[str, ...] = ("vc1", "vc2", "vc3"),
    end_state: Sequence[int] | None = None,
    name: str = "hand",
) -> Workload:
    jobs = len(submit_s)
    made = jobs_of(list(zip(submit_s, gpus, duration_s, strict=True)))
    made = made.with_columns(
        estimate_s=on_grid(np.asarray(duration_s, dtype=np.float64) * 1.5),
        virtual_cluster=coded([0] * jobs if tenants is None else tenants, tenant_names),
        user="someone",
        end_state=coded([0] * jobs if end_state is None else end_state, STATES),
        line=np.arange(1, jobs + 1),
    )
    return replace(made, name=name, source="by hand", sha256="0" * 64, origin_s=1_507_532_515.0)


def drawn_workload(jobs: int, *, seed: int = 0, gap_s: float = 120.0) -> Workload:
    random = np.random.default_rng(seed)
    drawn = workload(
        np.cumsum(random.exponential(gap_s, jobs)) - 1e-3,
        random.lognormal(7.0, 1.8, jobs),
        random.choice([1, 2, 4, 8, 16], jobs, p=[0.6, 0.12, 0.12, 0.12, 0.04]),
        tenants=random.integers(0, 3, jobs),
        end_state=random.choice(3, jobs, p=[0.7, 0.2, 0.1]),
        name="drawn",
    )
    return replace(drawn, sha256=f"{seed:064d}")


def simulate(
    jobs: Workload,
    on: Cluster,
    *,
    policy: str = "fifo",
    key: Key | None = None,
    quantum_s: float = float("inf"),
    restart_s: float = 0.0,
    seed: int = 0,
    oracle: bool = False,
    predicted_s: np.ndarray | None = None,
) -> Run:
    """The smallest `key` runs first and blocks the rest; one that held its GPUs for `quantum_s` goes behind others."""
    log, decisions, serial, columns = EventLog(), DecisionLog(), count(), jobs.jobs
    free = [(node, gpu) for node, each in enumerate(on.node_type_of) for gpu in range(each.gpus_per_node)]
    left_s, held = columns["duration_s"].tolist(), {}
    key = key or (lambda job: job)
    turns = [0] * len(jobs)
    agenda = [(float(at), 1, next(serial), job) for job, at in enumerate(columns["submit_time_s"])]
    heapq.heapify(agenda)
    queue: list[tuple[int, float, int]] = []
    while agenda:
        now_s, started, stopped = agenda[0][0], 0, 0
        while agenda and agenda[0][0] == now_s:
            _, arriving, _, job = heapq.heappop(agenda)
            gpus = int(columns["gpus"][job])
            if arriving:
                log.append(now_s, Kind.SUBMIT, job, gpus)
            else:
                free = sorted(free + held.pop(job))
                done = left_s[job] <= 0
                log.append(now_s, Kind.FINISH if done else Kind.STOP, job, gpus)
                if done:
                    continue
                stopped += 1
                left_s[job] += restart_s
                turns[job] += 1
            heapq.heappush(queue, (turns[job], key(job), job))
        while queue and columns["gpus"][queue[0][2]] <= len(free):
            job = heapq.heappop(queue)[2]
            gpus = int(columns["gpus"][job])
            held[job], free = free[:gpus], free[gpus:]
            masks: dict[int, int] = {}
            for node, gpu in held[job]:
                masks[node] = masks.get(node, 0) | 1 << gpu
            log.start(now_s, job, gpus, list(masks.items()))
            run_s = min(left_s[job], quantum_s)
            left_s[job] -= run_s
            heapq.heappush(agenda, (now_s + run_s, 0, next(serial), job))
            started += 1
        decisions.append(now_s, 1e-5, started, stopped, len(held), len(queue), on.gpus - len(free))
    return Run(
        policy=policy,
        oracle=oracle,
        seed=seed,
        workload=jobs,
        cluster=on,
        events=log.events(),
        decisions=decisions.decisions(),
        predicted_duration_s=np.full(len(jobs), np.nan) if predicted_s is None else predicted_s,
        simulation_cpu_s=0.5,
        peak_memory_bytes=100_000_000,
    )


def policies(jobs: Workload, on: Cluster, *, seed: int = 0) -> list[Run]:
    """Four unlike runs of the same jobs."""
    return [
        simulate(jobs, on, policy="fifo", seed=seed),
        simulate(jobs, on, policy="sjf", key=lambda job: jobs.jobs["duration_s"][job], oracle=True, seed=seed),
        simulate(jobs, on, policy="round_robin", quantum_s=3_600.0, restart_s=30.0, seed=seed),
        simulate(jobs, on, policy="small", key=lambda job: jobs.jobs["gpus"][job] * 1e9 + job, seed=seed),
    ]
