"""One recorded sequence of states, the same decisions: the simulator's and the executor's."""

import dataclasses
import itertools

import numpy as np
import pytest
from exec.parity import ParityError, Recording, Scene, recorded, replayed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jobs import workload
from training_jobs import policy_named, random_training

from synergy_core.performance.planner.plan import Plan
from synergy_core.scheduling.jobs.cluster import Cluster, NodeType
from synergy_core.scheduling.jobs.testbed_profiles import (
    NoiseFrom,
    ProfiledCosts,
    ProfiledModel,
    ProfiledRow,
    TestbedProfile,
)
from synergy_core.scheduling.policies import AllocationPolicy, get_policy, policy_names
from synergy_sim.assignment import as_given
from synergy_sim.execution import Costs, ExecutionModel
from synergy_sim.truth import Truth
from synergy_sim.truth.application import Disturbance

NODE_SLOTS = 4
INITIAL_BATCH, BATCHES = 8, (8, 16, 32, 64)


def nodes(count, gpu_type="cpu"):
    return Cluster((NodeType("n", gpu_type, count, NODE_SLOTS),))


def _model(name, sample_s, exchange_s, noise, restart_s):
    """Pipelines send little but fill slowly; replicas send much, which only large batches hide."""
    batches = {3: (9, 18, 36)}  # three replicas have batches of their own
    rows = []
    for gpus, across, pipeline in itertools.product((1, 2, 3, 4, 8), (1, 2), (1, 2, 4)):
        data = gpus // pipeline
        if across > gpus or (across == 1 and gpus > NODE_SLOTS) or gpus % pipeline:
            continue
        for batch in batches.get(gpus, BATCHES):
            if batch % gpus == 0:
                fill = (2 * pipeline - 1) / pipeline if pipeline > 1 else 1.0
                sent_s = exchange_s * across * (data > 1) + 0.1 * exchange_s * (pipeline > 1)
                plan = Plan(data=data, pipeline=pipeline, micro_batch=batch // gpus, accumulation=pipeline)
                rows.append(ProfiledRow("cpu", across, plan, batch * sample_s / gpus * fill + sent_s + 0.02))
    costs = ProfiledCosts(launch_s=1.0, restart_s=restart_s, exit_s=0.5)
    return ProfiledModel(name, INITIAL_BATCH, BATCHES[-1], 1e6, (NoiseFrom(0.0, noise),), costs, tuple(rows))


PROFILE = TestbedProfile(
    {
        "narrow": _model("narrow", 0.02, 0.02, 5.0, 2.0),
        "wide": _model("wide", 0.01, 0.12, 200.0, 2.0),
        "slow": _model("slow", 0.03, 0.30, 60.0, 7.0),  # a restart lasts longer than a round
    },
    "a test",
    "today",
)


def profiled_jobs(seed, jobs, *, sizes=(1, 2, 4), gap_s=12.0, iterations=600.0):
    """Jobs of the profile's models; some arrive at one instant."""
    random = np.random.default_rng(seed)
    gaps = np.rint(random.exponential(gap_s, jobs)) * (random.random(jobs) > 0.3)
    models = random.choice(list(PROFILE), jobs).tolist()
    gpus = random.choice(sizes, jobs).tolist()
    made = workload(list(zip(np.cumsum(gaps).tolist(), gpus, [1.0] * jobs, strict=True)), models=models)
    work = np.rint(iterations * random.lognormal(0.0, 0.7, jobs)) + 1.0
    return made.with_columns(global_batch=np.full(jobs, INITIAL_BATCH, dtype=np.int32), iterations=work)


def profiled(seed, jobs, *, cluster, **more):
    truth = Truth(None, profile=PROFILE, disturbance=Disturbance(noise_fraction=0.2, seed=seed))
    work = as_given(profiled_jobs(seed, jobs, **more), cluster, truth)
    return Scene(work, cluster, truth, ExecutionModel(Costs(), round_s=5.0), exact=True)


def catalogued(seed, jobs, *, cluster, mean_s=900.0):
    truth = Truth(None, disturbance=Disturbance(noise_fraction=0.1, seed=seed))
    work = random_training(seed, jobs, cluster, truth=truth, sizes=(1, 2, 4), mean_s=mean_s)
    return Scene(
        work,
        cluster,
        truth,
        ExecutionModel(Costs(restart_s=20.0, launch_s=10.0, exit_s=4.0), round_s=60.0),
        exact=False,
    )


FEWEST_JOBS, FEWEST_DECISIONS = 12, 40
KNOWABLE = [*(name for name in policy_names() if not get_policy(name).oracle), "sia+plans"]
"""Without those that read what only the simulator's truth knows: an executor cannot run optimus, sjf or srtf."""
READERS = [name for name in KNOWABLE if getattr(get_policy(name), "reads_goodput", False)]
TUNERS = [name for name in READERS if getattr(get_policy(name), "tunes_batch", False)]


SCENES = [
    ("profiled", 2),
    ("catalogued", 1),
    *(pytest.param(*each, marks=pytest.mark.thorough) for each in (("profiled", 1), ("catalogued", 2))),
]


def scene_of(kind, count):
    if kind == "profiled":
        return profiled(1, 14, cluster=nodes(count))
    return catalogued(1, 14, cluster=nodes(count, "t4"), mean_s=400.0)


def compared(scene, policy):
    recording = recorded(scene.simulation(policy))
    return recording.moments, replayed(recording, scene, policy)


@pytest.mark.parametrize(("kind", "count"), SCENES)
@pytest.mark.parametrize("name", KNOWABLE)
def test_executor_decides_as_the_simulator_did(name, kind, count):
    scene, policy = scene_of(kind, count), policy_named(name)
    moments, driver = compared(scene, policy)
    assert len(driver.jobs) == len(scene.work) >= FEWEST_JOBS
    assert len(moments) >= FEWEST_DECISIONS
    assert driver.compared_batches > len(moments)
    if isinstance(policy, AllocationPolicy):
        assert all(each.state for each in moments if each.starts)
    if name in TUNERS:
        assert driver.retunes > 0
    if name in READERS:
        assert sum(len(each.stops) for each in moments) > 0
    if name in ("synergy", "crius", "pollux", "sia+plans") and (kind, count) == ("profiled", 2):
        # Some stop and start at one instant on the slots they hold: for another plan.
        assert any(start in each.stops for each in moments for start in each.starts)


def changed(recording, what, *given):
    """The recording with one report of that kind, the first, saying something else."""
    moments = list(recording.moments)
    at, index = next(
        (at, index)
        for at, moment in enumerate(moments)
        for index, event in enumerate(moment.events)
        if event.what == what
    )
    events = list(moments[at].events)
    events[index] = events[index]._replace(given=(*events[index].given[: -len(given)], *given))
    moments[at] = dataclasses.replace(moments[at], events=events)
    return Recording(moments, recording.fits)


@pytest.mark.parametrize(
    ("name", "kind", "what", "given"),
    [
        ("synergy", "profiled", "noise", (1.0, 1e-3)),
        ("sia", "catalogued", "stepped", (3.0,)),
    ],
)
def test_one_report_that_says_something_else_is_noticed(name, kind, what, given):
    """In what the policy sees, and in what it decides."""
    scene, policy = scene_of(kind, 2), policy_named(name)
    other = changed(recorded(scene.simulation(policy)), what, *given)
    for states, where in ((True, "^column"), (False, "^(stops|starts|plans|plan|batch)")):
        with pytest.raises(ParityError, match=where):
            replayed(other, scene, policy, states=states)


@pytest.mark.parametrize("name", ["sia", "pollux"])
def test_a_batch_that_is_kept_because_it_is_close_is_no_other_choice(name):
    """It chose 4 × 32 by an older model and keeps it where the simulator, with the newer one, picks 4 × 33."""
    compared(catalogued(69, 1, cluster=nodes(1, "t4"), mean_s=600.0), policy_named(name))


@settings(max_examples=6, derandomize=True, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 10**6), jobs=st.integers(1, 8), count=st.integers(1, 2), kind=st.booleans())
@pytest.mark.parametrize("name", ["synergy", "sia+plans", "tiresias"])
def test_any_small_workload_is_decided_alike(name, seed, jobs, count, kind):
    if kind:
        scene = profiled(seed, jobs, cluster=nodes(count), iterations=200.0)
    else:
        scene = catalogued(seed, jobs, cluster=nodes(count, "t4"), mean_s=600.0)
    moments, driver = compared(scene, policy_named(name))
    assert len(driver.jobs) == jobs
    assert moments
