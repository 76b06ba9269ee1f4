"""What parity is tested on: a made-up profile, jobs of its models, jobs of the catalog's applications, clusters."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from jobs import workload
from training_jobs import random_training

from synergy_core.cluster import Cluster, NodeType
from synergy_core.jobs.testbed_profiles import NoiseFrom, Profile, ProfiledCosts, ProfiledModel, ProfiledRow
from synergy_core.planner.plan import Plan
from synergy_core.policies import Policy
from synergy_runs.workload import Workload
from synergy_sim.assignment import as_given
from synergy_sim.execution import Costs, ExecutionModel
from synergy_sim.ground_truth import Disturbance, Truth
from synergy_sim.simulate import Simulation

NODE_SLOTS = 4
INITIAL_BATCH, BATCHES = 8, (8, 16, 32, 64)


def nodes(count: int, gpu_type: str = "cpu") -> Cluster:
    return Cluster((NodeType("n", gpu_type, count, NODE_SLOTS),))


def _model(name: str, sample_s: float, exchange_s: float, noise: float, restart_s: float) -> ProfiledModel:
    """Pipelines send little but fill slowly; replicas send much, which only large batches hide."""
    rows = []
    for gpus in (1, 2, 3, 4, 8):
        for across in (1, 2):
            if across > gpus or (across == 1 and gpus > NODE_SLOTS):
                continue
            for pipeline in (1, 2, 4):
                if gpus % pipeline:
                    continue
                data = gpus // pipeline
                for batch in BATCHES:
                    micro_batch, rest = divmod(batch, data * pipeline)
                    if not rest and micro_batch:
                        fill = (2 * pipeline - 1) / pipeline if pipeline > 1 else 1.0
                        sent_s = exchange_s * across * (data > 1) + 0.1 * exchange_s * (pipeline > 1)
                        plan = Plan(data=data, pipeline=pipeline, micro_batch=micro_batch, accumulation=pipeline)
                        rows.append(ProfiledRow("cpu", across, plan, batch * sample_s / gpus * fill + sent_s + 0.02))
                if pipeline == 1 and gpus == 3:
                    rows += [
                        ProfiledRow("cpu", across, Plan(data=3, micro_batch=each, accumulation=1), each * sample_s)
                        for each in (3, 6, 12)
                    ]
    costs = ProfiledCosts(launch_s=1.0, restart_s=restart_s, exit_s=0.5)
    return ProfiledModel(name, INITIAL_BATCH, BATCHES[-1], 1e6, (NoiseFrom(0.0, noise),), costs, tuple(rows))


PROFILE = Profile(
    {
        "narrow": _model("narrow", 0.02, 0.02, 5.0, 2.0),
        "wide": _model("wide", 0.01, 0.12, 200.0, 2.0),
        "slow": _model("slow", 0.03, 0.30, 60.0, 7.0),  # a restart lasts longer than a round
    },
    "a test",
    "today",
)


def profiled_jobs(
    seed: int, jobs: int, *, sizes: tuple[int, ...] = (1, 2, 4), gap_s: float = 12.0, iterations: float = 600.0
) -> Workload:
    """Jobs of the profile's models; some arrive at one instant."""
    random = np.random.default_rng(seed)
    gaps = np.rint(random.exponential(gap_s, jobs)) * (random.random(jobs) > 0.3)
    models = random.choice(list(PROFILE), jobs).tolist()
    gpus = random.choice(sizes, jobs).tolist()
    made = workload(list(zip(np.cumsum(gaps).tolist(), gpus, [1.0] * jobs, strict=True)), models=models)
    work = np.rint(iterations * random.lognormal(0.0, 0.7, jobs)) + 1.0
    return replace(made, global_batch=np.full(jobs, INITIAL_BATCH, dtype=np.int32), iterations=work)


@dataclass(frozen=True)
class Scene:
    """What is simulated. exact: whether all that the executor is told follows from the profile and the job file."""

    work: Workload
    cluster: Cluster
    truth: Truth
    execution: ExecutionModel
    exact: bool

    def simulation(self, policy: Policy) -> Simulation:
        return Simulation(self.work, self.cluster, policy, self.execution, self.truth)


def profiled(seed: int, jobs: int, *, cluster: Cluster, **more: object) -> Scene:
    truth = Truth(None, profile=PROFILE, disturbance=Disturbance(noise_fraction=0.2, seed=seed))
    work = as_given(profiled_jobs(seed, jobs, **more), cluster, truth)  # type: ignore[arg-type]
    return Scene(work, cluster, truth, ExecutionModel(Costs(), round_s=5.0), exact=True)


def catalogued(seed: int, jobs: int, *, cluster: Cluster, mean_s: float = 900.0) -> Scene:
    """Jobs of which nothing is known before they report. Their models are fitted to that."""
    truth = Truth(None, disturbance=Disturbance(noise_fraction=0.1, seed=seed))
    work = random_training(seed, jobs, cluster, truth=truth, sizes=(1, 2, 4), mean_s=mean_s)
    return Scene(
        work,
        cluster,
        truth,
        ExecutionModel(Costs(restart_s=20.0, launch_s=10.0, exit_s=4.0), round_s=60.0),
        exact=False,
    )
