"""Small workloads of training jobs, with the catalog's truth: no data files needed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from jobs import workload

from synergy_core.scheduling.jobs.cluster import Cluster, NodeType
from synergy_core.scheduling.jobs.views import Allocations
from synergy_core.scheduling.policies import AllocationPolicy, get_policy, policy_names
from synergy_runs.inputs.workload import Workload
from synergy_runs.outputs.invariants import check
from synergy_sim.assignment import mixed
from synergy_sim.execution import Costs, ExecutionModel
from synergy_sim.simulate import simulate
from synergy_sim.truth import Truth

APPLICATIONS = ("bert", "cifar10", "deepspeech2", "imagenet", "ncf", "yolov3")
CATALOG = Truth(None)
READERS = sorted(name for name in policy_names() if getattr(get_policy(name), "reads_goodput", False))
"""Policies that ask how fast jobs would train."""
MEASURED_S = 1e-3
"""Largest error of a replayed run time, in seconds."""


def t4s(nodes=4, gpus_per_node=4, **more) -> Cluster:
    return Cluster((NodeType("t4", "t4", nodes, gpus_per_node),), **more)


def three_types(**more) -> Cluster:
    types = (NodeType("a", "a100", 1, 8), NodeType("r", "rtx2080ti", 1, 8), NodeType("t", "t4", 2, 4))
    return Cluster(types, **more)


def training(rows, machines, *, truth=CATALOG, **columns) -> Workload:
    """rows: (submit_s, gpus, duration_s, application); each lasts as long as it says where it gets what it requests."""
    models = [row[3] for row in rows]
    made = workload([row[:3] for row in rows], models=models, **columns)
    return mixed(made, machines, truth, np.random.default_rng(0))


def random_training(seed, jobs, machines, *, truth=CATALOG, sizes=(1, 2, 4, 8), mean_gap_s=90.0, mean_s=900.0, **more):
    """Rows of random sizes, applications and run times; a third arrives at the instant of the one before."""
    random = np.random.default_rng(seed)
    gaps = np.rint(random.exponential(mean_gap_s, jobs)) * (random.random(jobs) > 0.3)
    durations = np.rint(np.minimum(random.lognormal(np.log(mean_s), 1.0, jobs), 20 * mean_s)) + 1.0
    applications = random.choice(APPLICATIONS, jobs).tolist()
    gpus = random.choice(sizes, jobs).tolist()
    rows = list(zip(np.cumsum(gaps).tolist(), gpus, durations.tolist(), applications, strict=True))
    return training(rows, machines, truth=truth, **more)


def with_work(made: Workload, *, batch=None, scale=None) -> Workload:
    """The same jobs with another requested batch, or another amount of work relative to their application's."""
    if batch is not None:
        made = made.with_columns(global_batch=np.broadcast_to(np.int32(batch), len(made)).copy())
    if scale is not None:
        made = made.with_columns(work_scale=np.broadcast_to(float(scale), len(made)).copy())
    return made


def given(choose, *, round_s=60.0, tunes_batch=True, information="own") -> AllocationPolicy:
    """A policy made by a test, unknown to the registry: `choose(state)` → GPUs of each job, or with types."""

    def allocate(state):
        answer = choose(state)
        gpus, kinds = answer if isinstance(answer, tuple) else (answer, np.full(len(state), -1))
        return Allocations(np.array(gpus, dtype=np.int64), np.array(kinds, dtype=np.int64))

    like = get_policy("sia")
    changes = {"round_s": round_s, "tunes_batch": tunes_batch, "information": information}
    return replace(like, name="given", allocate=allocate, parameters={}, **changes)


def policy_named(name):
    """The policy; a shorter search where it searches, since what is tested here does not depend on its length."""
    policy = get_policy(name)
    return policy.with_parameters(generations=2, population=6) if name == "pollux" else policy


def run(made, machines, policy, costs=None, *, truth=CATALOG, information=None, **execution):
    """Simulated and checked; information: of a policy that is named, if not its own."""
    if isinstance(policy, str):
        policy = policy_named(policy)
        policy = policy if information is None else replace(policy, information=information)
    model = ExecutionModel(costs or Costs(restart_s=0.0), **execution)
    done = simulate(made, machines, policy, model, truth=truth)
    check(done)
    return done
