"""Runs that would never end: their causes are mended, and any other is found after few decisions and said."""

from dataclasses import replace

import numpy as np
import planned_models
import pytest
from case_checks import prepared_case, simulated
from cases import Case
from jobs import cluster, finish_s, workload
from training_jobs import given, run, t4s, training

from synergy_core.errors import InputError
from synergy_core.scheduling.jobs.cluster import Cluster, NodeType
from synergy_core.scheduling.policies import get_policy
from synergy_runs.outputs.facts import Kind
from synergy_runs.outputs.invariants import check
from synergy_sim.assignment import with_language_models
from synergy_sim.execution import Costs, ExecutionModel
from synergy_sim.simulate import simulate
from synergy_sim.truth import Truth
from synergy_sim.truth.planned import PlannedTruth

MAX_DECISIONS = 3_000
"""More than any run here needs, or than it takes to find that a run never ends."""
TIMES = ("submit_time", "gpus", "virtual_cluster", "gpu_type", "duration_s")
GIVEN = ("submit_s", "gpus", "gpu_type", "model", "iterations", "global_batch")


@pytest.fixture(autouse=True)
def _roofline(monkeypatch):
    planned_models.install(monkeypatch.setattr)


def nodes(*kinds):
    return [{"gpu_type": kind, "nodes": count, "gpus_per_node": gpus} for kind, count, gpus in kinds]


def case(truth, policy, rows, machines, **keys):
    own = {"policy": policy, "trace.models": truth, "truth.measured": False, "cluster.node_types": machines}
    if truth == "llm":
        own["trace.llm_gpus"] = 1
    more = {key.replace("__", "."): value for key, value in keys.items()}
    return Case(truth, GIVEN if truth == "as_given" else TIMES, tuple(rows), own | more)


CASES = {
    "jobs that take turns while they restart": case(
        "mix",
        "gavel",
        [
            (0, 1, "", "t4", 87),
            (44, 3, "", "", 18),
            (59, 1, "", "", 43),
            (62, 2, "", "t4", 6),
            (75, 2, "", "", 79),
            (141, 1, "", "", 79),
            (141, 2, "", "t4", 5),
        ],
        nodes(("t4", 1, 3), ("t4", 1, 3)),
        testbed="rubick",
        cluster__placement="most_free",
        seed=14,
    ),
    "out of memory on more nodes than the policy expected": case(
        "llm",
        "ftf",
        [(0, 1, "", "", 8), (4, 1, "", "a100", 6)],
        nodes(("a100", 1, 8), ("a100", 1, 2)),
        cluster__placement="most_free",
    ),
    "out of memory where every row is one of larger nodes": case(
        "llm",
        "sia",
        [(0, 1, "", "", 76), (100_000, 1, "", "", 85), (100_010, 2, "", "a100", 34), (100_038, 1, "", "a100", 53)],
        nodes(("a100", 1, 4), ("a100", 3, 8), ("a100", 1, 4)),
        cluster__placement="most_free",
    ),
    "out of memory on borrowed GPUs that nobody reclaims": case(
        "llm",
        "sia",
        [
            (0, 1, "a", "rtx2080ti", 16),
            (100_001, 1, "c", "t4", 8),
            (100_006, 2, "a", "", 13),
            (100_023, 10, "c", "rtx2080ti", 5),
        ],
        nodes(("t4", 1, 1), ("rtx2080ti", 1, 8), ("rtx2080ti", 1, 8)),
        seed=48,
        testbed__decide_fraction=0.5,
        cluster__placement="most_free",
        cluster__borrowing=True,
        cluster__reclaim="never",
        cluster__virtual_clusters={"a": 3, "c": 1},
    ),
    "out of memory, and may not be stopped": case(
        "llm",
        "sia",
        [(0, 1, "", "t4", 20.175)],
        nodes(("a100", 3, 8), ("rtx2080ti", 1, 2), ("t4", 1, 2)),
        truth__not_preemptible=["tiny-llm", "small-llm", "big-llm"],
    ),
    "an equal share of the idle GPUs is too little for every job": case(
        "llm",
        "sia",
        [(0, 1, "a", "", 43), (16, 4, "a", "rtx2080ti", 46), (16, 4, "b", "rtx2080ti", 39)],
        nodes(("rtx2080ti", 2, 2)),
        cluster__borrowing=True,
        cluster__virtual_clusters={"a": 1, "b": 2},
    ),
    "the same, with three tenants and two GPU types": case(
        "llm",
        "optimus",
        [(0, 1, "a", "", 36.572), (26.384, 16, "b", "t4", 25.504), (34.067, 16, "c", "", 15.104)],
        nodes(("t4", 2, 8), ("rtx2080ti", 1, 8)),
        cluster__borrowing=True,
        cluster__virtual_clusters={"a": 1, "b": 7, "c": 3},
    ),
    "swaps before the first checkpoint": case(
        "as_given",
        "optimus+plans",
        [
            (0, 8, "", "cifar10", 1, 512),
            (2, 7, "t4", "cifar10", 1, 512),
            (3, 2, "t4", "cifar10", 1, 256),
            (6, 4, "", "ncf", 1, 1024),
        ],
        nodes(("t4", 1, 4), ("a100", 3, 6), ("t4", 3, 2)),
        restart_s=15.0,
        testbed__checkpoint_interval_s=100.0,
    ),
    "the search splits a job of two GPUs over two types": case(
        "as_given",
        "pollux",
        [(0, 14, "rtx2080ti", "cifar10", 1, 512), (60, 11, "a100", "cifar10", 1, 512)],
        nodes(("rtx2080ti", 1, 1), ("a100", 2, 8), ("rtx2080ti", 3, 7)),
        testbed="rubick",
        seed=76,
        parameters__pollux__generations=2,
        parameters__pollux__population=6,
        truth__fixed_gpus={"cifar10": 2},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_every_job_ends(name):
    done = simulated(prepared_case(CASES[name]))
    check(done)
    assert np.isfinite(finish_s(done)).all()
    assert len(done.decisions.time_s) < MAX_DECISIONS


# Policies and costs with which a run truly never ends


class Counted:
    """A policy's choice that counts how often it is asked."""

    def __init__(self, choose):
        self.choose, self.asked = choose, 0

    def __call__(self, state):
        self.asked += 1
        return self.choose(state)


def in_turns(state, first=0):
    """One GPU each for jobs before `first`, and for one of the others, another one in every round."""
    ids = state.job_id.tolist()
    others = [job for job in ids if job >= first]
    turn = others[int(state.now_s // 60) % len(others)] if others else None
    return [int(job < first or job == turn) for job in ids]


@pytest.mark.parametrize(("restart_s", "interval_s"), [(60.0, 0.0), (0.0, 60.0)])
def test_jobs_that_swap_before_they_get_anything_done_end_with_a_sentence(restart_s, interval_s):
    """A quantum shorter than a start, or than a checkpoint takes to come."""
    policy = get_policy("las").with_parameters(quantum_s=30.0)
    costs = Costs(launch_s=restart_s, restart_s=restart_s, checkpoint_interval_s=interval_s)
    with pytest.raises(
        InputError, match=rf"1-GPU job [01] takes {restart_s:g} s to its first step.*after 30 s.*quantum"
    ):
        simulate(workload([(0, 1, 1000), (0, 1, 1000)]), cluster(1, 1), policy, ExecutionModel(costs))


@pytest.mark.parametrize("jobs", [2, 6])
def test_turns_shorter_than_a_restart_are_found_after_few_decisions(jobs):
    counted = Counted(in_turns)
    rows = [(0, 1, 600, "ncf")] * jobs
    with pytest.raises(
        InputError, match=r"takes 260 s to its first step, but was stopped after 60 s.*restart_s.*round_s"
    ):
        run(training(rows, t4s(1, 1)), t4s(1, 1), given(counted), Costs(launch_s=260.0, restart_s=260.0), round_s=60.0)
    assert counted.asked < MAX_DECISIONS


def test_turns_of_the_others_are_found_although_one_job_runs():
    """While the first job advances, the run is not endless; it lasts 200 rounds."""
    counted, machines = Counted(lambda state: in_turns(state, first=1)), t4s(1, 2)
    rows = [(0, 1, 12_000, "ncf"), (0, 1, 600, "ncf"), (0, 1, 600, "ncf")]
    with pytest.raises(InputError, match=r"job [12] takes 260 s"):
        run(training(rows, machines), machines, given(counted), Costs(launch_s=260.0, restart_s=260.0), round_s=60.0)
    assert 200 < counted.asked < 200 + MAX_DECISIONS


def test_jobs_that_are_left_where_they_ran_out_of_memory_are_found(monkeypatch):
    monkeypatch.setattr(PlannedTruth, "runs_out", lambda self, seed, model, gpu_type, plan: plan.gpus == 4)
    truth, machines = Truth(None, planned=PlannedTruth(memory_error=True)), Cluster((NodeType("a", "a100", 1, 4),))
    made = with_language_models(workload([(0, 2, 600)]), machines, truth, np.random.default_rng(0), from_gpus=1)
    counted = Counted(lambda state: [4] * len(state))
    with pytest.raises(InputError, match=r"job 0 on 4 GPUs.*truth\.planned\.memory_error=false"):
        run(made, machines, given(counted), truth=truth)
    assert counted.asked < MAX_DECISIONS


def test_parameters_that_let_nobody_run_are_found():
    policy = get_policy("sia").with_parameters(queueing_penalty=0.0)
    counted = Counted(policy.allocate)
    with pytest.raises(InputError, match=r"none of 1 waiting jobs.*all GPUs are idle"):
        run(
            training([(0, 1, 100, "bert")], t4s()),
            t4s(),
            replace(policy, allocate=lambda state, **more: counted(state)),
        )
    assert counted.asked < MAX_DECISIONS


# Runs that end, although much is in vain


def test_a_start_may_last_many_rounds():
    """Nobody advances for 5,000 decisions, but the one start is not in vain."""
    rows = [(0, 1, 600, "ncf")]
    done = run(training(rows, t4s(1, 1)), t4s(1, 1), given(lambda state: [1]), Costs(launch_s=5_000.0), round_s=1.0)
    assert finish_s(done)[0] > 5_000.0


def test_jobs_may_be_stopped_in_vain_again_and_again_while_others_end():
    """Each of 3,000 short jobs stops the long one before its first step."""
    rows = [(0, 1, 10_000), *((40.0 * at, 1, 15) for at in range(1, 3_000))]
    done = simulate(workload(rows), cluster(1, 1), get_policy("srtf"), ExecutionModel(Costs(restart_s=30.0)))
    assert finish_s(done)[0] > 3_000 * 40.0
    assert int((done.events.kind == Kind.STOP).sum()) > 2_900


def test_short_rounds_may_stop_every_run_soon_after_a_restart():
    """Runs of 60 s of which a restart takes 59 s, more of them than may be in vain."""
    machines, costs = t4s(1, 1), Costs(launch_s=59.0, restart_s=59.0)
    done = run(training([(0, 1, 40_000, "ncf")] * 2, machines), machines, given(in_turns), costs, round_s=60.0)
    assert len(done.decisions.time_s) > 2_500
