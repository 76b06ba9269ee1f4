"""A scheduler for tests of results only: the head of a queue blocks, GPUs first come first served, exact facts."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count

import numpy as np

from synergy_core.cluster import Cluster, NodeType
from synergy_core.units import on_grid
from synergy_runs.log import DecisionLog, EventLog, Kind, Run
from synergy_runs.workload import Workload

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
    zeros = np.zeros(jobs, dtype=np.int32)
    return Workload(
        name=name,
        source="by hand",
        sha256="0" * 64,
        origin_s=1_507_532_515.0,
        job_name=[f"job-{i}" for i in range(jobs)],
        submit_time_s=on_grid(np.asarray(submit_s, dtype=np.float64)),
        duration_s=on_grid(np.asarray(duration_s, dtype=np.float64)),
        estimate_s=on_grid(np.asarray(duration_s, dtype=np.float64) * 1.5),
        gpus=np.asarray(gpus, dtype=np.int32),
        cpus=np.full(jobs, np.nan),
        memory_bytes=np.full(jobs, np.nan),
        virtual_cluster_code=zeros if tenants is None else np.asarray(tenants, dtype=np.int32),
        virtual_clusters=tenant_names,
        user_code=zeros,
        users=("someone",),
        partition_code=zeros,
        partitions=("",),
        gpu_type_code=zeros,
        gpu_types=("",),
        given_gpu_type_code=zeros,
        given_gpu_types=("",),
        model_code=zeros,
        global_batch=zeros,
        work_scale=np.full(len(zeros), np.nan),
        iterations=np.full(len(zeros), np.nan),
        models=("",),
        estimate_drawn=np.zeros(jobs, dtype=bool),
        carried=np.zeros(jobs, dtype=bool),
        measured=np.ones(jobs, dtype=bool),
        ran_before_s=np.zeros(jobs),
        log_wait_s=np.zeros(jobs),
        converted_by=np.ones(jobs),
        end_state_code=zeros if end_state is None else np.asarray(end_state, dtype=np.int32),
        line=np.arange(1, jobs + 1, dtype=np.int32),
        quotas={},
        left_out={},
        bad_rows=0,
        bad_examples=(),
        notes=(),
    )


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


class _Nodes:
    """Which GPUs are free; takes the lowest numbers first."""

    def __init__(self, of: Cluster) -> None:
        self.mask = [(1 << each.gpus_per_node) - 1 for each in of.node_types for _ in range(each.nodes)]
        self.free = of.gpus

    def take(self, gpus: int) -> list[tuple[int, int]]:
        got = []
        for node, mask in enumerate(self.mask):
            part = 0
            while mask and gpus:
                part |= mask & -mask
                mask &= mask - 1
                gpus -= 1
                self.free -= 1
            if part:
                got.append((node, part))
                self.mask[node] = mask
            if not gpus:
                return got
        raise AssertionError("not enough GPUs")

    def give(self, parts: list[tuple[int, int]]) -> None:
        for node, part in parts:
            self.mask[node] |= part
            self.free += part.bit_count()


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
    log, decisions, nodes, serial = EventLog(), DecisionLog(), _Nodes(on), count()
    left_s, place = jobs.duration_s.tolist(), {}
    key = key or (lambda job: job)
    turns = [0] * len(jobs)
    agenda = [(float(at), 1, next(serial), job) for job, at in enumerate(jobs.submit_time_s)]
    heapq.heapify(agenda)
    queue: list[tuple[int, float, int]] = []
    while agenda:
        now_s, started, stopped = agenda[0][0], 0, 0
        while agenda and agenda[0][0] == now_s:
            _, arriving, _, job = heapq.heappop(agenda)
            gpus = int(jobs.gpus[job])
            if arriving:
                log.append(now_s, Kind.SUBMIT, job, gpus)
            else:
                nodes.give(place.pop(job))
                done = left_s[job] <= 0
                log.append(now_s, Kind.FINISH if done else Kind.STOP, job, gpus)
                if done:
                    continue
                stopped += 1
                left_s[job] += restart_s
                turns[job] += 1
            heapq.heappush(queue, (turns[job], key(job), job))
        while queue and jobs.gpus[queue[0][2]] <= nodes.free:
            job = heapq.heappop(queue)[2]
            place[job] = nodes.take(int(jobs.gpus[job]))
            log.start(now_s, job, int(jobs.gpus[job]), place[job])
            run_s = min(left_s[job], quantum_s)
            left_s[job] -= run_s
            heapq.heappush(agenda, (now_s + run_s, 0, next(serial), job))
            started += 1
        used = on.gpus - nodes.free
        decisions.append(now_s, 1e-5, started, stopped, len(place), len(queue), used)
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
        simulate(jobs, on, policy="sjf", key=lambda job: jobs.duration_s[job], oracle=True, seed=seed),
        simulate(jobs, on, policy="round_robin", quantum_s=3_600.0, restart_s=30.0, seed=seed),
        simulate(jobs, on, policy="small", key=lambda job: jobs.gpus[job] * 1e9 + job, seed=seed),
    ]
